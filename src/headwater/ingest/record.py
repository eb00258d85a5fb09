"""What ingestion remembers in the store.

Two things. A **table** has an entry for each file: its stamp, how far it is stored, and the hash of its bytes. A
**synchronizer** holds one small record: the process that ingests now, and the transaction it writes. Every transaction commits its events,
the entries of its files, and a conditional update of the record that names the *next* transaction. So the record always points at a
transaction that is open as long as its holder lives; whoever moves the record makes every other commit fail; and nothing is ever looked up
in the status of an old transaction. The table grows by a row for each file, the record does not grow.

`claim.py` has the record, this file the table.
"""

from __future__ import annotations

import json
from typing import NamedTuple

import headwater as hw
from headwater.ingest.pieces import Position
from headwater.ingest.sources import SourceFile, Stamp


class FileState(NamedTuple):
    """How far a file is stored. `position` is where to go on; None when it is done. `fingerprint` says what it was.

    `stream` is the id of the stream that has the file's rows: a new stream of the same name gets them too. It is None for a file without
    rows that was done before there was a stream.
    """

    stamp: Stamp
    format: str
    events: int = 0
    bad_rows: int = 0
    position: Position | None = None
    fingerprint: str | None = None
    stream: int | None = None

    def dump(self) -> bytes:
        return json.dumps(self._asdict(), separators=(",", ":")).encode()

    @staticmethod
    def load(value: bytes) -> FileState:
        fields = json.loads(value)
        position = Position(*fields["position"]) if fields["position"] is not None else None
        return FileState(**{**fields, "stamp": Stamp(*fields["stamp"]), "position": position})


class Files:
    """The table of files, as it was when it was loaded and what was committed since."""

    def __init__(self, store: hw.Store, name: str) -> None:
        self._table = store.table(name)
        self._states: dict[str, FileState] = {}
        #: The stream that is ingested into; None while there is none.
        self.stream: int | None = None
        self.load()

    def load(self) -> None:
        self._states = {key: FileState.load(entry.value) for key, entry in self._table.items()}

    def find(self, file: SourceFile) -> FileState | None:
        state = self._states.get(file.key)
        return state if state is not None and state.stream in (None, self.stream) else None

    def stage(self, tx: hw.Transaction, file: SourceFile, state: FileState) -> None:
        tx.put(self._table.name, file.key, state._replace(stream=self.stream).dump())

    def committed(self, file: SourceFile, state: FileState) -> None:
        self._states[file.key] = state._replace(stream=self.stream)
