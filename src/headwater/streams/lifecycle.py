"""Creating and describing streams, with the sentences for what is refused."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from headwater.catalog import streams
from headwater.catalog.streams import StreamRow
from headwater.errors import AlreadyExistsError, InvalidRequestError, NotFoundError
from headwater.model.arguments import items_of, shown
from headwater.model.names import StreamName, parse_stream_name, parse_word
from headwater.model.policies import Retention, Scaling
from headwater.model.schemas import OPAQUE, check_schema, difference, evolve
from headwater.segments.engine import Engine, schema_bytes
from headwater.segments.lanes import StreamRef

KINDS = ("events", "bytes")
#: Streams that others are made of: a table's changes, a revisioned stream, a journal's events.
INNER_KINDS = ("table", "revisioned", "journal")
#: Kinds that have routing keys, and so many segments; every API that reads events reads them.
SCALED_KINDS = ("events", "journal")


def create_stream(
    engine: Engine,
    name: str,
    *,
    scaling: Scaling,
    retention: Retention,
    schema: pa.Schema | None,
    kind: str,
    labels: Collection[str],
    exist_ok: bool,
) -> StreamRef:
    """The new stream; with `exist_ok`, an existing one of the same kind and schema."""
    parsed = parse_stream_name(name)
    check_policies(scaling, retention)
    if kind == "bytes" and (schema is not None or scaling != Scaling.fixed(1)):
        raise InvalidRequestError("a byte stream has no schema and one segment")
    arrow = OPAQUE if schema is None else check_schema(schema)
    # Only a caller who takes an existing stream may run it again after a lost answer: without `exist_ok`, it could not tell whose it is.
    row = engine.run(
        streams.ensure_stream if exist_ok else streams.create_stream,
        parsed,
        kind=kind,
        segments=scaling.min_segments,
        scaling=scaling.to_json(),
        retention=retention.to_json(),
        schema=schema_bytes(arrow),
        labels=check_labels(labels),
    )
    if row is not None:
        return engine.stream_ref(row)
    found = open_stream(engine, parsed)
    differences = []
    if found.kind != kind:
        differences.append(f"it is a stream of {found.kind}, not of {kind}")
    elif not found.schema.equals(arrow):
        differences.append(difference(found.schema, arrow))
    if differences or not exist_ok:
        reason = f" and differs: {'; '.join(differences)}" if differences else ""
        raise AlreadyExistsError(f"stream {parsed} exists{reason}")
    return found


def check_kinds(kinds: Any) -> tuple[str, ...]:
    """Refuse what are no kinds of streams."""
    found = tuple(items_of(kinds, "kinds", "kinds of streams"))
    for kind in found:
        if kind not in (*KINDS, *INNER_KINDS):
            raise InvalidRequestError(f"a stream is of kind {', '.join((*KINDS, *INNER_KINDS))}, not {shown(kind)}")
    if not found:
        raise InvalidRequestError(f"kinds are one or more of {', '.join((*KINDS, *INNER_KINDS))}")
    return found


def check_policies(scaling: Scaling | None, retention: Retention | None) -> None:
    if scaling is not None and not isinstance(scaling, Scaling):
        raise InvalidRequestError(f"scaling is made with hw.Scaling, not {type(scaling).__name__}")
    if retention is not None and not isinstance(retention, Retention):
        raise InvalidRequestError(f"retention is made with hw.Retention, not {type(retention).__name__}")


def check_kind(kind: Any) -> None:
    """Refuse what no caller can create: the streams that others are made of come with them."""
    if not isinstance(kind, str) or kind not in KINDS:
        raise InvalidRequestError(f"a stream is of kind 'events' or 'bytes', not {shown(kind)}")


def check_labels(labels: Collection[str]) -> tuple[str, ...]:
    return tuple(parse_word(label, "label") for label in items_of(labels, "labels", "words"))


def open_stream(engine: Engine, name: StreamName) -> StreamRef:
    row = engine.run(streams.find_stream, name)
    if row is None:
        raise NotFoundError(f"there is no stream {name}")
    return engine.stream_ref(row)


def bare_ref(row: StreamRow) -> StreamRef:
    """A stream without its schema, for operations that ask only for places in it."""
    return StreamRef(row.id, row.full_name, row.kind, OPAQUE, row.schema_version, False)


def current_row(engine: Engine, stream: StreamRef) -> StreamRow:
    """The stream's row as of now; NotFoundError if it was deleted, also when another has its name by now."""
    try:
        return engine.run(streams.get_stream, stream.id)
    except NotFoundError:
        raise deleted(stream) from None


@contextmanager
def naming(*refs: StreamRef) -> Iterator[None]:
    """Name the stream in the error of an operation that found one of these deleted."""
    try:
        yield
    except NotFoundError as error:
        for ref in refs:
            if ref.id == error.facts.get("stream"):
                raise deleted(ref) from None
        raise


def deleted(stream: StreamRef) -> NotFoundError:
    return NotFoundError(f"stream {stream.name} was deleted")


def update_stream(
    engine: Engine,
    stream: StreamRef,
    *,
    scaling: Scaling | None,
    retention: Retention | None,
    labels: Collection[str] | None,
    schema: pa.Schema | None,
) -> StreamRef:
    """Change what is given. A new schema must be able to read every event written with the present one."""
    check_policies(scaling, retention)
    row = current_row(engine, stream)
    if scaling is not None and scaling != Scaling.fixed(1) and row.kind not in SCALED_KINDS:
        raise InvalidRequestError(f"{stream.name} is of kind {row.kind!r}: it has one segment, which can't be scaled")
    if row.kind == "journal" and (retention not in (None, Retention.forever()) or schema is not None):
        raise InvalidRequestError(f"{stream.name} is a journal: it keeps all its events, and its columns are those of every journal")
    new_schema = None
    if schema is not None:
        if row.kind == "bytes":
            raise InvalidRequestError("a byte stream has no schema")
        present = engine.schema(row.id, row.schema_version)
        wanted = evolve(present, schema)
        if not wanted.equals(present):
            new_schema = schema_bytes(wanted)
    new_scaling = scaling.to_json() if scaling else None
    new_retention = retention.to_json() if retention else None
    new_labels = check_labels(labels) if labels is not None else None
    if new_schema is None:
        changed = engine.run(streams.update_stream, stream.id, scaling=new_scaling, retention=new_retention, labels=new_labels)
    else:
        changed = engine.run(
            streams.evolve_stream,
            stream.id,
            version=row.schema_version,
            schema=new_schema,
            scaling=new_scaling,
            retention=new_retention,
            labels=new_labels,
        )
    return engine.stream_ref(changed)
