"""Transactions: writes to many streams and tables, with readers' positions, that become visible in one commit or not at all."""

from __future__ import annotations

import threading
import time as clock
import uuid
from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from headwater.catalog import streams, transactions
from headwater.catalog.extents import Append
from headwater.catalog.transactions import Batch, Change, RollNeeded, RouteStale, ScaledMeanwhile, StagedAppend
from headwater.errors import HeadwaterError, InvalidRequestError, TransactionEndedError, UnavailableError
from headwater.model.cuts import Cut, StreamCut
from headwater.model.limits import INLINE_BYTES, MIB
from headwater.model.markers import Marker
from headwater.model.names import parse_stream_name
from headwater.runtime import failpoints
from headwater.segments.block import Chunk, encode
from headwater.segments.engine import Engine
from headwater.segments.lanes import EVENT_OVERHEAD_BYTES, StreamRef, make_chunk
from headwater.segments.routing import Router
from headwater.storage import layout
from headwater.streams.lifecycle import open_stream
from headwater.tables import TABLE_SCHEMA, check_entry
from headwater.writer import EventCheck, batch_chunk

if TYPE_CHECKING:
    from headwater.readers.reader import Reader
    from headwater.store import Store
    from headwater.synchronizer import Synchronizer

#: What a transaction keeps in memory before it is staged.
_STAGE_BYTES = 8 * MIB
#: How long a commit that must roll waits for others to share it, and the pause that says no more are coming.
_LONGEST_LINGER_SECONDS = 0.5
_PAUSE_SECONDS = 0.02


class TransactionStatus(Enum):
    """Where a transaction is. One that was committed or aborted stays so."""

    OPEN = "open"
    COMMITTED = "committed"
    ABORTED = "aborted"


class Commit(NamedTuple):
    """A commit: the place in each stream right behind it. `repeated` if its marker was committed before: nothing was stored again."""

    id: str
    cut: Cut
    repeated: bool


class _Events:
    """What a transaction has for one stream and did not stage yet."""

    def __init__(self, stream: StreamRef) -> None:
        self.stream = stream
        self.check = EventCheck(stream)
        self.chunks: list[Chunk] = []
        self.values: list[Any] = []
        self.keys: list[bytes | None] = []
        self.times: dict[int, datetime] = {}

    def close_chunk(self) -> list[Chunk]:
        if self.values:
            self.chunks.append(make_chunk(self.stream, self.values, self.keys, self.times))
            self.values, self.keys, self.times = [], [], {}
        return self.chunks


class _TableChange(NamedTuple):
    kind: str
    key: str
    value: bytes | None
    expected: int | None


class Transaction:
    """Writes that commit together. Use it in a `with` block: it commits at the end, and aborts on an exception.

    Nothing is visible before the commit. While the handle is open its lease is renewed; when the process dies, it times out.
    Thread-safe; other processes add to it with `store.resume_transaction(id)`.
    """

    def __init__(self, store: Store, router: Router, *, lease: float, auto_renew: bool, marker: Marker | None, resumed: str | None) -> None:
        self._store = store
        self._engine: Engine = store._engine
        self._router = router
        self._id = resumed or uuid.uuid4().hex
        self._lease_seconds = lease
        self._auto_renew = auto_renew
        self._marker = marker
        self._is_begun = resumed is not None
        self._status = TransactionStatus.OPEN
        self._commit: Commit | None = None
        self._lock = threading.RLock()
        self._events: dict[int, _Events] = {}
        self._tables: dict[int, tuple[StreamRef, list[_TableChange]]] = {}
        self._states: list[tuple[StreamRef, Append, int]] = []
        self._readers: list[tuple[Reader, Change]] = []
        self._refs: dict[str, StreamRef] = {}
        self._size = 0
        if self._is_begun and auto_renew:
            store._heart.add(self._renew_quietly, lease / 3)

    def __repr__(self) -> str:
        return f"<Transaction {self._id} {self._status.value}>"

    @property
    def id(self) -> str:
        """The id by which any process can resume it or ask for its status."""
        with self._lock:
            if self._status is TransactionStatus.OPEN:
                self._begin()
            return self._id

    @property
    def status(self) -> TransactionStatus:
        if self._status is not TransactionStatus.OPEN or not self._is_begun:
            return self._status
        return self._store.transaction_status(self._id)

    def _begin(self) -> None:
        """Make the transaction known to the catalog. A short one never is before its commit: that saves it a round trip."""
        if not self._is_begun:
            self._engine.write_once(transactions.begin, self._id, self._lease_us)
            self._is_begun = True
            failpoints.reach("txn.begun")
            if self._auto_renew:
                self._store._heart.add(self._renew_quietly, self._lease_seconds / 3)

    @property
    def _lease_us(self) -> int:
        return int(self._lease_seconds * 1_000_000)

    # Writing.

    def write(
        self, stream: str, value: bytes | str | Mapping[str, Any], key: bytes | str | int | None = None, *, time: datetime | None = None
    ) -> None:
        """Add an event. It is checked now, and visible after the commit."""
        with self._lock:
            events = self._events_of(stream)
            checked, routing_key, size = events.check(value, key, time)
            if time is not None:
                events.times[len(events.values)] = time
            events.values.append(checked)
            events.keys.append(routing_key)
            self._grow(size + EVENT_OVERHEAD_BYTES)

    def write_batch(self, stream: str, batch: pa.RecordBatch | pa.Table, key: str | None = None) -> None:
        """Add an Arrow batch of events; `key` names the column with the routing keys."""
        with self._lock:
            events = self._events_of(stream)
            chunk = batch_chunk(batch, key, events.stream)
            if chunk.count:
                events.close_chunk()
                events.chunks.append(chunk)
                self._grow(chunk.columns.nbytes)

    def put(self, table: str, key: str, value: bytes, version: int | None = None) -> None:
        """Set a table's entry, at the commit; with `version`, only if it has that one then (`hw.ABSENT`: only if it is missing)."""
        check_entry(key, value, version)
        self._change_table(table, _TableChange("put", key, value, version))

    def remove(self, table: str, key: str, version: int | None = None) -> None:
        """Remove a table's entry, at the commit."""
        check_entry(key, b"", version)
        self._change_table(table, _TableChange("remove", key, None, version))

    def _change_table(self, table: str, change: _TableChange) -> None:
        with self._lock:
            ref = self._ref(table, "table")
            self._tables.setdefault(ref.id, (ref, []))[1].append(change)
            self._grow(len(change.value or b"") + EVENT_OVERHEAD_BYTES)

    def update(self, synchronizer: Synchronizer[Any, Any], updates: Sequence[Any]) -> None:
        """Apply updates to shared state, at the commit, if nobody changed it since this process last fetched it."""
        with self._lock:
            self._check_open()
            stream, append, expected = synchronizer.stage(updates)
            if any(other.id == stream.id for other, _, _ in self._states):
                raise InvalidRequestError(f"this transaction updates {stream.name} already: give all its updates at once")
            self._states.append((stream, append, expected))

    def commit_reader(self, reader: Reader) -> None:
        """Commit a manual reader's position as of now together with the rest; an abort takes the reader back to its last durable one."""
        with self._lock:
            self._check_open()
            self._readers = [item for item in self._readers if item[0] is not reader]
            self._readers.append((reader, reader.stage_positions()))

    def _events_of(self, name: str) -> _Events:
        self._check_open()
        ref = self._ref(name, "events")
        if ref.id not in self._events:
            self._events[ref.id] = _Events(ref)
        return self._events[ref.id]

    def _ref(self, name: str, kind: str) -> StreamRef:
        self._check_open()
        ref = self._refs.get(name)
        if ref is None:
            ref = self._refs[name] = open_stream(self._engine, parse_stream_name(name))
        if ref.kind != kind:
            raise InvalidRequestError(f"{name} is of kind {ref.kind!r}, not {kind!r}")
        return ref

    def _check_open(self) -> None:
        if self._status is not TransactionStatus.OPEN:
            raise TransactionEndedError(f"transaction {self._id} is {self._status.value} already")

    def _grow(self, size: int) -> None:
        self._size += size
        if self._size >= _STAGE_BYTES:
            self.flush()

    # Staging.

    def flush(self) -> None:
        """Stage what was given so far: durable, still invisible. A process that only adds to a transaction ends with this."""
        with self._lock:
            self._check_open()
            self._begin()
            batch = self._gather()
            if batch is None:
                return
            failpoints.reach("txn.stored")
            self._ended_on(lambda: self._engine.write(transactions.stage, self._id, batch))
            failpoints.reach("txn.staged")
            self._forget()

    def _forget(self) -> None:
        for events in self._events.values():
            events.chunks, events.values, events.keys, events.times = [], [], [], {}
        self._tables.clear()
        self._states.clear()
        self._size = 0

    def _ended_on(self, call: Any) -> Any:
        """Run a call to the catalog; if it says that the transaction ended, so does this handle."""
        try:
            return call()
        except TransactionEndedError:
            self._end(TransactionStatus.ABORTED)
            raise

    def _gather(self, *, with_readers: bool = False) -> Batch | None:
        """All that is not staged yet as blocks, in storage if they are large. None if there is nothing."""
        batch = Batch()
        blocks = []
        for events in self._events.values():
            chunks = events.close_chunk()
            if chunks:
                spread, _ = self._router.route(events.stream).spread(chunks, 0)
                stream = events.stream
                blocks += [(stream.id, segment, encode(some, stream.schema_version, stream.is_opaque), None) for segment, some in spread]
        for table, changes in self._tables.values():
            columns = pa.RecordBatch.from_arrays(
                [pa.array([change.key for change in changes], pa.string()), pa.array([change.value for change in changes], pa.binary())],
                schema=TABLE_SCHEMA,
            )
            batch.changes += [
                Change(len(blocks), place, change.kind, table.id, change.key, change.expected, change.value)
                for place, change in enumerate(changes)
            ]
            blocks.append((table.id, 0, encode([Chunk(columns, None, None)], table.schema_version, False), None))
        size = sum(block.length for _, _, block, _ in blocks)
        at = 0
        buffers: list[Any] = []
        for stream_id, segment, block, _ in blocks:
            data = block.to_bytes() if size <= INLINE_BYTES else None
            batch.appends.append(StagedAppend(stream_id, Append(segment, block.count, block.length, block.crc, None, at, data)))
            if data is None:
                buffers += block.buffers
                at += block.length
        if buffers:
            batch.object_key = layout.transaction_key(self._id, uuid.uuid4().hex)
            self._engine.storage.put(batch.object_key, buffers)
        batch.appends += [StagedAppend(stream.id, append, expected) for stream, append, expected in self._states]
        if with_readers:
            batch.changes += [change for _, change in self._readers]
        return batch if batch.appends or batch.changes else None

    # The end.

    def renew(self) -> None:
        """Put the time-out off by another lease. TransactionEndedError if it ended already."""
        with self._lock:
            self._check_open()
            self._begin()
        self._ended_on(lambda: self._engine.write(transactions.renew, self._id))

    def _renew_quietly(self) -> bool:
        """For the heart: whether to go on. A failure shows at the next call that matters."""
        if self._status is not TransactionStatus.OPEN or self._engine.is_closed:
            return False
        try:
            self._engine.write(transactions.renew, self._id)
        except UnavailableError:
            return True
        except HeadwaterError:
            return False
        return True

    def commit(self) -> Commit:
        """Make everything visible at once. Durable on return; on a handle that is committed, the same answer again.

        A condition that does not hold, a fenced reader or a sealed stream abort the transaction and raise; nothing was stored.
        UnavailableError leaves it open: commit again.
        """
        with self._lock:
            if self._commit is not None:
                return self._commit
            self._check_open()
            try:
                outcome = self._ended_on(self._commit_in_catalog)
            except UnavailableError:
                raise
            except HeadwaterError:
                self._abort_quietly()
                raise
            failpoints.reach("txn.committed")
            self._commit = Commit(outcome.id, self._cut(outcome.tails), outcome.repeated)
            self._status = TransactionStatus.COMMITTED
            for reader, _ in self._readers:
                reader.positions_committed()
            return self._commit

    def _commit_in_catalog(self) -> transactions.Outcome:
        batch: Batch | None = None
        while True:
            if batch is None:
                batch = self._gather(with_readers=True) or Batch()
            arguments = (self._id, batch, self._marker, self._lease_us)
            try:
                return self._engine.write_once(transactions.commit, *arguments)
            except ScaledMeanwhile:
                continue
            except RouteStale:
                for events in self._events.values():
                    self._router.forget(events.stream)
                batch = None
            except RollNeeded:
                self._engine.write_once(transactions.prepare, *arguments)
                failpoints.reach("txn.prepared")
                self._linger()
                return self._engine.write_once(transactions.commit_prepared, self._id)

    def _linger(self) -> None:
        """Wait while more transactions come to share a roll, for a moment."""
        deadline = clock.monotonic() + _LONGEST_LINGER_SECONDS
        waiting = 0
        while (found := self._engine.read(transactions.count_waiting)) > waiting and clock.monotonic() < deadline:
            waiting = found
            clock.sleep(_PAUSE_SECONDS)

    def _cut(self, tails: dict[int, dict[int, int]]) -> Cut:
        names = {ref.id: ref.name for ref in self._refs.values()}
        parts = {}
        for stream, numbers in tails.items():
            name = names.get(stream) or self._engine.read(streams.get_stream, stream).full_name
            parts[name] = StreamCut(stream, numbers)
        return Cut(self._engine.store_id, parts)

    def abort(self) -> None:
        """Drop everything. Aborting again does nothing; a committed one raises TransactionEndedError."""
        with self._lock:
            if self._status is TransactionStatus.ABORTED:
                return
            self._check_open()
            if self._is_begun:
                self._engine.write_once(transactions.abort, self._id)
                failpoints.reach("txn.aborted")
            self._end(TransactionStatus.ABORTED)

    def _abort_quietly(self) -> None:
        if self._status is TransactionStatus.OPEN:
            try:
                self.abort()
            except HeadwaterError:
                self._end(TransactionStatus.ABORTED)

    def _end(self, status: TransactionStatus) -> None:
        self._status = status
        self._forget()
        if status is TransactionStatus.ABORTED:
            for reader, _ in self._readers:
                reader.rewind()

    def __enter__(self) -> Transaction:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if self._status is not TransactionStatus.OPEN:
            return
        if error is None:
            self.commit()
        else:
            self._abort_quietly()
