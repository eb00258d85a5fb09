"""The streams that ingestion writes to: opened, or made with the schema that the files suggest; and where it keeps its state."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import NamedTuple

import pyarrow as pa

import headwater as hw
from headwater.ingest.formats import Dialect, infer_schema
from headwater.ingest.pieces import BadRow
from headwater.ingest.sources import SourceFile
from headwater.ingest.target import Target
from headwater.model.names import parse_stream_name, parse_word
from headwater.model.schemas import is_opaque

_NAME_LENGTH = 128


class StateNames(NamedTuple):
    """The names of ingestion's own record and table, beside the stream."""

    record: str
    files: str


def state_names(stream: str, name: str) -> StateNames:
    """Where the state for a stream is, under a name: two names know nothing of each other."""
    scope, word = parse_stream_name(stream)
    base = f"{word}.{parse_word(name, 'ingestion')}"
    if "." in name:
        # The stream p under q.r is not the stream p.q under r, whose base is the same.
        base = _hashed(base, f"{word}/{name}")
    elif len(base) > _NAME_LENGTH - len(".files"):
        base = _hashed(base, base)
    return StateNames(f"{scope}/{base}", f"{scope}/{base}.files")


def _hashed(base: str, whole: str) -> str:
    return f"{base[:80]}.{hashlib.sha256(whole.encode()).hexdigest()[:16]}"


def find_stream_id(store: hw.Store, name: str) -> int | None:
    """Which stream has the name now; None if there is none."""
    try:
        return store.stream(name).id
    except hw.NotFoundError:
        return None


class Plan(NamedTuple):
    """What a stream is to be like if it is missing, and which of its columns are routing key and event time."""

    schema: pa.Schema | None
    segments: int
    key: str | None
    time: str | None
    dialect: Dialect


def open_target(store: hw.Store, name: str, plan: Plan, files: Sequence[SourceFile]) -> Target | None:
    """The stream as the target of rows, made if it is missing. None if it is missing, and no file says what it should be."""
    try:
        stream = store.stream(name)
    except hw.NotFoundError:
        schema = plan.schema
        if schema is None:
            schema = next((found for file in files if (found := infer_schema(file, plan.dialect)) is not None), None)
            if schema is None:
                return None
        # Keys and times are checked before anything is made.
        Target(schema, plan.key, plan.time)
        stream = store.create_stream(name, schema=schema, scaling=hw.Scaling.fixed(plan.segments), exist_ok=True)
    else:
        if plan.schema is not None:
            store.create_stream(name, schema=plan.schema, exist_ok=True)
    if stream.kind != "events":
        raise hw.InvalidRequestError(f"{name} is a stream of {stream.kind}: files are ingested as events")
    if stream.is_sealed:
        raise hw.SealedError(f"stream {name} is sealed")
    return Target(stream.schema, plan.key, plan.time)


class DeadLetters:
    """The stream that gets what is no event of the other: JSON objects with file, place, reason and text."""

    def __init__(self, store: hw.Store, name: str) -> None:
        stream = store.create_stream(name, exist_ok=True) if name not in store.streams() else store.stream(name)
        if stream.kind != "events" or not is_opaque(stream.schema):
            raise hw.InvalidRequestError(f"{name} has a schema: bad rows go to a stream without one")
        self._name = name

    def write(self, tx: hw.Transaction, file: SourceFile, row: BadRow) -> None:
        letter = {"file": file.key, "place": row.place, "reason": row.reason, "text": row.text}
        tx.write(self._name, json.dumps(letter, ensure_ascii=False).encode(errors="backslashreplace"), key=file.key)
