"""The register of a pipeline: a table of the store that says who runs it, and which checkpoint of each output is the live one.

The entry `live` has both. Every commit of an output requires its version, so a change of it, by a take-over, a restore or a rescale,
ends the commits of whoever ran the pipeline before. Nobody is believed to be dead by a clock: a wrong guess costs a restart, no data.
"""

from __future__ import annotations

import json
import os
import socket
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headwater import ABSENT, ConflictError, InvalidRequestError, Store, Transaction

SCOPE = "pipelines"
LIVE = "live"
BEAT, REQUEST, ANSWER, SAVEPOINT = "beat/", "request/", "answer/", "savepoint/"


@dataclass(frozen=True)
class Owner:
    """A process that runs a pipeline. `place` tells processes of one machine and boot apart from others with the same pid."""

    id: str
    host: str
    pid: int
    place: str
    started: str
    since: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"

    @classmethod
    def of_this_process(cls) -> Owner:
        since = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(uuid.uuid4().hex, socket.gethostname(), os.getpid(), _place(), _started(os.getpid()), since)

    def is_gone(self) -> bool:
        """Whether this is a process of this machine that ended. False if that can't be known here."""
        if not self.place or self.place != _place() or not self.started:
            return False
        return _started(self.pid) != self.started


def _place() -> str:
    """The boot and the process namespace of this process; empty where the system has no such names."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: int) -> str:
    """When a process was started, in ticks since the boot; empty if there is no such process, or it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in ("Z", "X") else fields[19]


@dataclass(frozen=True)
class Generation:
    """The live checkpoint of an output. A new one is made by each take-over, restore and rescale."""

    number: int
    #: The id of the Spark query, which is in its markers. Restore and rescale give a new one.
    query: str
    #: The last batch that the checkpoint had when it was made; -1 for an empty one.
    base: int
    #: Where the sources began: [stream, cut] in the order in which the function reads them.
    starts: list[list[str]]
    #: The output's tail before the first batch of all.
    born: str
    #: What the query is, to refuse another one: see `definitions`.
    definition: dict[str, Any]
    target: str
    is_table: bool

    @property
    def marker(self) -> str:
        """The owner of the markers that the sinks of headwater.spark write."""
        return f"spark/{self.query}/{'table ' if self.is_table else ''}{self.target}"


@dataclass(frozen=True)
class Live:
    """The entry `live` at a version."""

    version: int
    owner: Owner | None = None
    outputs: Mapping[str, Generation] = field(default_factory=dict)
    #: A restore that was begun: whoever comes next completes it.
    pending: Mapping[str, Any] | None = None

    def to_bytes(self) -> bytes:
        found = {
            "owner": asdict(self.owner) if self.owner is not None else None,
            "outputs": {name: asdict(generation) for name, generation in self.outputs.items()},
            "pending": self.pending,
        }
        return json.dumps(found, separators=(",", ":")).encode()


class Register:
    """Reads and changes a pipeline's table."""

    def __init__(self, store: Store, pipeline: str) -> None:
        self.store = store
        self.pipeline = pipeline
        self.name = f"{SCOPE}/{pipeline}"

    @property
    def exists(self) -> bool:
        return self.name in self.store.tables(SCOPE)

    def find_live(self) -> Live | None:
        """The entry as it is; None for a pipeline that never ran."""
        entry = self.store.table(self.name).get(LIVE) if self.exists else None
        if entry is None:
            return None
        found = json.loads(entry.value)
        owner = Owner(**found["owner"]) if found["owner"] else None
        outputs = {name: Generation(**generation) for name, generation in found["outputs"].items()}
        return Live(entry.version, owner, outputs, found["pending"])

    def put_live(self, live: Live) -> Live:
        """Change the entry, if it is still at the version of `live`; returns it with its new version.

        ConditionFailedError if somebody else changed it: then this process no longer runs the pipeline.
        """
        version = self.store.table(self.name).put(LIVE, live.to_bytes(), version=live.version)
        return replace(live, version=version)

    def add_live(self, tx: Transaction, live: Live) -> None:
        """The same as part of a transaction."""
        tx.put(self.name, LIVE, live.to_bytes(), version=live.version)

    def create(self, owner: Owner) -> Live:
        """Make the first entry. ConditionFailedError if there is one."""
        return self.put_live(Live(ABSENT, owner))

    # What else is in the table.

    def put(self, key: str, value: Mapping[str, Any]) -> int:
        return self.store.table(self.name).put(key, encode(value))

    def find(self, key: str) -> dict[str, Any] | None:
        entry = self.store.table(self.name).get(key) if self.exists else None
        return json.loads(entry.value) if entry is not None else None

    def items(self, prefix: str) -> dict[str, dict[str, Any]]:
        """The entries below a prefix, by the rest of their keys."""
        if not self.exists:
            return {}
        found = self.store.table(self.name).items(prefix)
        return {key.removeprefix(prefix): json.loads(entry.value) for key, entry in found}

    def remove(self, key: str) -> None:
        self.store.table(self.name).remove(key)

    def beat_version(self, owner: Owner) -> int | None:
        """A number that changes with each sign of life."""
        entry = self.store.table(self.name).get(BEAT + owner.id)
        return entry.version if entry is not None else None

    def forget_history(self) -> None:
        """Drop the changes of the table so far: beats would make it grow forever. The entries stay."""
        stream = self.store.stream(self.name)
        stream.truncate(stream.tail())


def encode(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def check_word(name: Any, what: str) -> str:
    """A name of one word: it becomes part of a table's name, of a folder, and of a keep's name."""
    if (
        not isinstance(name, str)
        or not 1 <= len(name) <= 48
        or not name.isascii()
        or not name[0].isalnum()
        or not all(letter.isalnum() or letter in "_.-" for letter in name)
    ):
        raise InvalidRequestError(f"{what} is one word of letters, digits, _ . and -, up to 48, that begins with no sign; not {name!r}")
    return name


def refuse_owner(pipeline: str, owner: Owner, command: str) -> ConflictError:
    return ConflictError(f"pipeline {pipeline} is run by {owner}: {command}", owner=str(owner))
