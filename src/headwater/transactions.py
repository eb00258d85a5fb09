"""Transactions: writes to many streams and tables, with readers' positions, that become visible in one commit or not at all."""

from __future__ import annotations

import threading
import time as clock
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import pyarrow as pa

from headwater.catalog import commits, streams, transactions
from headwater.catalog.commits import Outcome
from headwater.catalog.extents import Append
from headwater.catalog.targets import RollNeeded, RouteStale, ScaledMeanwhile
from headwater.catalog.transactions import Batch, Change, StagedAppend
from headwater.errors import (
    HeadwaterError,
    InvalidRequestError,
    NotFoundError,
    OutcomeUnknownError,
    SealedError,
    TransactionEndedError,
    UnavailableError,
)
from headwater.model.cuts import Cut, StreamCut
from headwater.model.keys import key_bytes
from headwater.model.limits import EVENT_BYTES, INLINE_BYTES, MIB
from headwater.model.markers import Marker
from headwater.model.names import parse_stream_name
from headwater.runtime import failpoints
from headwater.segments.block import Chunk, EncodedBlock, encode, encode_few
from headwater.segments.engine import Engine
from headwater.segments.lanes import EVENT_OVERHEAD_BYTES, StreamRef, make_chunk
from headwater.segments.pending import FEW_EVENTS
from headwater.segments.routing import Route, Router
from headwater.storage import layout
from headwater.streams.lifecycle import open_stream
from headwater.tables import TABLE_SCHEMA, check_entry
from headwater.writer import EventCheck, batch_chunk

if TYPE_CHECKING:
    from headwater.readers.reader import Positions, Reader
    from headwater.store import Store
    from headwater.synchronizer import Synchronizer

T = TypeVar("T")

#: Up to this size staged blocks go into the catalog: an object of a transaction's own takes three syncs, which cost more.
_INLINE_BYTES = 4 * INLINE_BYTES
#: What a transaction keeps in memory before it is staged.
_STAGE_BYTES = 8 * MIB
#: How long a commit that must roll waits for others to share it, and the shortest pause that says no more are coming.
_LONGEST_LINGER_SECONDS = 2.0
_PAUSE_SECONDS = 0.02


class TransactionStatus(Enum):
    """Where a transaction is. One that was committed or aborted stays so."""

    OPEN = "open"
    COMMITTED = "committed"
    ABORTED = "aborted"


class TransactionInfo(NamedTuple):
    """A transaction as `store.transactions` lists it: `streams` are those it staged something for, or wrote to."""

    id: str
    status: TransactionStatus
    begun: datetime
    expires: datetime
    ended: datetime | None
    streams: tuple[str, ...]
    marker: Marker | None = None


class Commit(NamedTuple):
    """A commit: the place in each stream right behind it. `repeated` if its marker was committed before: nothing was stored again."""

    id: str
    cut: Cut
    repeated: bool


class Commits:
    """The commits under way in this process. One that must roll waits for those, since they may share it; later ones find it done."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._undecided: set[Transaction] = set()

    def begin(self, tx: Transaction) -> None:
        with self._lock:
            self._undecided.add(tx)

    def decide(self, tx: Transaction) -> None:
        """It is committed, failed, or waits for a roll."""
        with self._lock:
            self._undecided.discard(tx)

    def undecided(self) -> set[Transaction]:
        with self._lock:
            return set(self._undecided)


class _Events:
    """What a transaction has for one stream and did not stage yet."""

    def __init__(self, stream: StreamRef) -> None:
        self.stream = stream
        self.is_opaque = stream.is_opaque
        self.check = EventCheck(stream)
        self.chunks: list[Chunk] = []
        self.values: list[Any] = []
        self.keys: list[bytes | None] = []
        self.times: dict[int, datetime] = {}

    def encode(self, route: Route) -> list[tuple[int, EncodedBlock]]:
        """One block, or a few large ones, for each segment the events go to."""
        version = self.stream.schema_version
        if self.is_opaque and 0 < len(self.values) <= FEW_EVENTS and not self.chunks and not self.times:
            few, _ = route.spread_few(self.values, self.keys, 0)
            return [(segment, encode_few(values, keys, version)) for segment, values, keys in few]
        found = []
        for chunks in _parts(self.close_chunk()):
            spread, _ = route.spread(chunks, 0)
            found += [(segment, encode(some, version, self.is_opaque)) for segment, some in spread]
        return found

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
        self._is_asked = False
        self._made_at = clock.monotonic()
        self._status = TransactionStatus.OPEN
        self._commit: Commit | None = None
        # With what was given so far, this says which call of commit it was: its answer may be lost, and more given.
        self._caller = uuid.uuid4().hex
        self._given = 0
        self._lock = threading.RLock()
        self._events: dict[int, _Events] = {}
        self._named_events: dict[str, _Events] = {}
        self._tables: dict[int, tuple[StreamRef, list[_TableChange]]] = {}
        self._states: list[tuple[StreamRef, Append, int]] = []
        self._updated: set[int] = set()
        self._readers: list[tuple[Reader, Positions]] = []
        self._unstaged_readers: list[Change] = []
        self._pending: Batch | None = None
        self._refs: dict[str, StreamRef] = {}
        #: Those of them that are remembered from earlier transactions.
        self._unseen: set[str] = set()
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
            elif not self._is_begun and not self._is_asked and not self._engine.is_closed:
                # It ended before the catalog knew of it. Whoever asks for its id may ask what became of it.
                self._engine.write_once(transactions.abort, self._id, self._lease_us)
                self._is_asked = True
            return self._id

    @property
    def status(self) -> TransactionStatus:
        if self._status is not TransactionStatus.OPEN:
            return self._status
        if not self._is_begun and self._age_us > self._lease_us:
            return TransactionStatus.ABORTED
        if not self._is_begun and not self._is_asked:
            return TransactionStatus.OPEN
        try:
            return self._store.transaction_status(self._id)
        except NotFoundError:
            return TransactionStatus.OPEN  # A commit was tried, and never reached the catalog.

    def _begin(self) -> None:
        """Make the transaction known to the catalog. A short one never is before its commit: that saves it a round trip."""
        if not self._is_begun:
            self._check_age()
            self._look_up_again()
            self._engine.write_once(transactions.begin, self._id, self._lease_us, self._age_us, self._marker, self._open_us)
            self._is_begun = True
            failpoints.reach("txn.begun")
            if self._auto_renew:
                self._store._heart.add(self._renew_quietly, self._lease_seconds / 3)

    @property
    def _lease_us(self) -> int:
        return max(1, int(self._lease_seconds * 1_000_000))

    @property
    def _age_us(self) -> int:
        """How much of the lease was used before the catalog knew of it; nothing, if the handle renews it."""
        return 0 if self._auto_renew else self._open_us

    @property
    def _open_us(self) -> int:
        return int((clock.monotonic() - self._made_at) * 1_000_000)

    def _check_age(self) -> None:
        if not self._is_begun and self._age_us > self._lease_us:
            self._end(TransactionStatus.ABORTED)
            raise TransactionEndedError(f"transaction {self._id} was aborted: its lease ran out")

    # Writing.

    def write(
        self, stream: str, value: bytes | str | Mapping[str, Any], key: bytes | str | int | None = None, *, time: datetime | None = None
    ) -> None:
        """Add an event. It is checked now, and visible after the commit."""
        with self._lock:
            events = self._named_events.get(stream) if self._status is TransactionStatus.OPEN else None
            if events is None:
                events = self._events_of(stream)
            if type(value) is bytes and events.is_opaque and time is None and len(value) <= EVENT_BYTES:
                checked, routing_key, size = value, key_bytes(key), len(value)
            else:
                events, (checked, routing_key, size) = self._fitting(stream, lambda events: events.check(value, key, time))
            if self._size >= _STAGE_BYTES:
                self._make_room()
            if time is not None:
                events.times[len(events.values)] = time
            events.values.append(checked)
            events.keys.append(routing_key)
            self._size += size + EVENT_OVERHEAD_BYTES
            self._given += 1

    def write_batch(self, stream: str, batch: pa.RecordBatch | pa.Table, key: str | None = None) -> None:
        """Add an Arrow batch of events; `key` names the column with the routing keys."""
        with self._lock:
            events, chunk = self._fitting(stream, lambda events: batch_chunk(batch, key, events.stream))
            if chunk.count:
                self._make_room()
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
            self._make_room()
            self._tables.setdefault(ref.id, (ref, []))[1].append(change)
            self._grow(len(change.value or b"") + EVENT_OVERHEAD_BYTES)

    def update(self, synchronizer: Synchronizer[Any, Any], updates: Sequence[Any]) -> None:
        """Apply updates to shared state, at the commit, if nobody changed it since this process last fetched it."""
        with self._lock:
            self._check_open()
            stream, append, expected = synchronizer.stage(self._engine.store_id, updates)
            if stream.id in self._updated:
                raise InvalidRequestError(f"this transaction updates {stream.name} already: give all its updates at once")
            self._updated.add(stream.id)
            self._states.append((stream, append, expected))
            self._grow(append.length)

    def adopt(self, ids: Sequence[str]) -> None:
        """Take over what other open transactions staged, in this order, behind what this one has so far. They end; this one commits it.

        For work that is staged in parallel, where only some of the attempts shall count. TransactionEndedError if one ended before.
        """
        with self._lock:
            self.flush()
            if ids:
                self._given += 1
                self._ended_on(lambda: self._engine.write_once(transactions.adopt, self._id, list(ids)))
                failpoints.reach("adopt.committed")

    def commit_reader(self, reader: Reader) -> None:
        """Commit a manual reader's position as of now together with the rest; an abort takes the reader back to its last durable one."""
        with self._lock:
            self._check_open()
            change, positions = reader.stage_positions(self._engine.store_id)
            self._readers = [item for item in self._readers if item[0] is not reader]
            self._readers.append((reader, positions))
            self._unstaged_readers = [other for other in self._unstaged_readers if other[3:6] != change[3:6]]
            self._unstaged_readers.append(change)
            self._given += 1

    def _events_of(self, name: str) -> _Events:
        self._check_open()
        ref = self._ref(name, "events")
        if ref.id not in self._events:
            self._events[ref.id] = _Events(ref)
        self._named_events[name] = self._events[ref.id]
        return self._events[ref.id]

    def _fitting(self, name: str, check: Callable[[_Events], T]) -> tuple[_Events, T]:
        """What was given, as the stream takes it. Before it is refused, a stream that was only remembered is looked up."""
        events = self._events_of(name)
        try:
            return events, check(events)
        except InvalidRequestError:
            if name not in self._unseen:
                raise
            self._look_up_again()
            events = self._events_of(name)
            return events, check(events)

    def _ref(self, name: str, kind: str) -> StreamRef:
        self._check_open()
        ref = self._refs.get(name)
        if ref is None:
            ref = self._router.remembered(name) if kind == "events" and not self._is_begun else None
            if ref is not None:
                self._unseen.add(name)
            else:
                ref = open_stream(self._engine, parse_stream_name(name))
                self._router.remember(ref)
            self._refs[name] = ref
        if ref.kind != kind:
            raise InvalidRequestError(f"{name} is of kind {ref.kind!r}, not {kind!r}")
        return ref

    def _look_up_again(self) -> None:
        """See whether streams that were remembered are still the ones of their names; events go to those that took their place."""
        for name in self._unseen:
            old = self._refs[name]
            self._router.forget_name(name)
            found = self._refs[name] = open_stream(self._engine, parse_stream_name(name))
            self._router.remember(found)
            if found.id != old.id:
                del self._named_events[name]
                events = self._events.pop(old.id)
                if events.values or events.chunks:
                    if found.kind != "events" or not found.is_opaque:
                        raise InvalidRequestError(f"{name} was deleted, and another kind of stream created under its name: begin again")
                    events.stream = found
                    self._named_events[name] = self._events[found.id] = events
        self._unseen.clear()

    def _check_open(self) -> None:
        if self._status is not TransactionStatus.OPEN:
            raise TransactionEndedError(f"transaction {self._id} is {self._status.value} already")

    def _make_room(self) -> None:
        """Stage what is there if it is much. Before something is added, so that a failure adds nothing."""
        if self._size >= _STAGE_BYTES:
            self.flush()

    def _grow(self, size: int) -> None:
        self._size += size
        self._given += 1

    # Staging.

    def flush(self) -> None:
        """Stage what was given so far: durable, still invisible. A process that only adds to a transaction ends with this."""
        with self._lock:
            self._check_open()
            self._begin()
            self._stage_pending()
            batch = self._gather()
            if batch is not None:
                self._forget()
                self._pending = batch
                self._stage_pending()

    def _stage_pending(self) -> None:
        """Stage the batch whose staging was begun. Its answer may have been lost: it is the same batch, so it is added once."""
        if self._pending is not None:
            batch = self._pending
            failpoints.reach("txn.stored")
            self._ended_on(lambda: self._engine.write_once(transactions.stage, self._id, batch))
            failpoints.reach("txn.staged")
            self._pending = None

    def _forget(self) -> None:
        for events in self._events.values():
            events.chunks, events.values, events.keys, events.times = [], [], [], {}
        self._tables.clear()
        self._states.clear()
        self._unstaged_readers.clear()
        self._size = 0

    def _ended_on(self, call: Callable[[], T]) -> T:
        """Run a call to the catalog; if it says that the transaction ended, so does this handle."""
        try:
            return call()
        except TransactionEndedError as error:
            if error.facts.get("id", self._id) != self._id:
                raise  # Another one, which this one was to adopt.
            if error.facts.get("state") == transactions.COMMITTED:
                self._end(TransactionStatus.COMMITTED, is_whole=not self._unstaged_readers)
            else:
                self._end(TransactionStatus.ABORTED)
            raise

    def _route(self, events: _Events) -> Route:
        try:
            return self._router.route(events.stream)
        except (NotFoundError, SealedError):
            self._look_up_again()
            return self._router.route(events.stream)

    def _gather(self) -> Batch | None:
        """All that is not staged yet as blocks, in storage if they are large. None if there is nothing."""
        batch = Batch((uuid.uuid4().int >> 66) + 1)
        blocks = []
        for events in list(self._events.values()):
            if events.values or events.chunks:
                route = self._route(events)
                batch.widths[events.stream.id] = len(route.numbers)
                blocks += [(events.stream.id, segment, block) for segment, block in events.encode(route)]
        for table, changes in self._tables.values():
            columns = pa.RecordBatch.from_arrays(
                [pa.array([change.key for change in changes], pa.string()), pa.array([change.value for change in changes], pa.binary())],
                schema=TABLE_SCHEMA,
            )
            batch.changes += [
                Change(len(blocks), place, change.kind, table.id, change.key, change.expected, change.value)
                for place, change in enumerate(changes)
            ]
            blocks.append((table.id, 0, encode([Chunk(columns, None, None)], table.schema_version, False)))
        size = sum(block.length for _, _, block in blocks)
        at = 0
        buffers: list[Any] = []
        for stream_id, segment, block in blocks:
            data = block.to_bytes() if size <= _INLINE_BYTES else None
            batch.appends.append(StagedAppend(stream_id, Append(segment, block.count, block.length, block.crc, None, at, data)))
            if data is None:
                buffers += block.buffers
                at += block.length
        if buffers:
            batch.object_key = layout.transaction_key(self._id, uuid.uuid4().hex)
            self._engine.storage.put(batch.object_key, buffers)
        batch.appends += [StagedAppend(stream.id, append, expected) for stream, append, expected in self._states]
        batch.changes += self._unstaged_readers
        return None if batch.is_empty else batch

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
            under_way = self._store._commits
            under_way.begin(self)
            try:
                outcome = self._ended_on(self._commit_in_catalog)
            except (UnavailableError, OutcomeUnknownError):
                raise
            except HeadwaterError:
                self._abort_quietly()
                raise
            finally:
                under_way.decide(self)
            failpoints.reach("txn.committed")
            for events in self._events.values():
                # The next transaction of this process shall stage for the segments that are open now.
                self._router.forget(events.stream, unless=outcome.tails.get(events.stream.id, ()))
            self._commit = Commit(outcome.id, self._cut(outcome.tails), outcome.repeated)
            # What an earlier commit under the same marker stored are not these positions.
            self._end(TransactionStatus.COMMITTED, is_whole=not outcome.repeated)
            return self._commit

    def _commit_in_catalog(self) -> Outcome:
        self._stage_pending()
        began = clock.monotonic()
        caller = f"{self._caller}.{self._given}"
        batch: Batch | None = None
        while True:
            self._check_age()
            if batch is None:
                batch = self._gather() or Batch()
            age_us = 0 if self._is_begun else self._age_us
            self._is_asked = True
            try:
                return self._engine.write_once(commits.commit, self._id, batch, self._marker, self._lease_us, age_us, caller, self._open_us)
            except ScaledMeanwhile:
                continue
            except RouteStale:
                for events in self._events.values():
                    self._router.forget(events.stream)
                self._look_up_again()
                batch = None
            except RollNeeded:
                # Only what was staged before needs one, so the catalog knows of it.
                self._engine.write_once(commits.prepare, self._id, batch, caller)
                failpoints.reach("txn.prepared")
                self._linger(clock.monotonic() - began)
                outcome = self._engine.write_once(commits.commit_prepared, self._id, caller)
                if isinstance(outcome, HeadwaterError):
                    raise outcome from None
                return outcome

    def _linger(self, spent: float) -> None:
        """Wait while more transactions come to share a roll: those of this process that are on their way, and others soon behind them."""
        under_way = self._store._commits
        under_way.decide(self)
        now = clock.monotonic()
        deadline = now + _LONGEST_LINGER_SECONDS
        # As long as this one took to get here, another may take that began a little later.
        pause = max(_PAUSE_SECONDS, min(spent, _LONGEST_LINGER_SECONDS / 4))
        waiting = 0
        while now < deadline and (found := self._engine.read(commits.count_waiting)) > waiting:
            waiting = found
            coming = under_way.undecided()
            until = now + pause
            while now < until or (now < deadline and coming & under_way.undecided()):
                clock.sleep(_PAUSE_SECONDS / 4)
                now = clock.monotonic()

    def _cut(self, tails: dict[int, dict[int, int]]) -> Cut:
        names = {ref.id: ref.name for ref in self._refs.values()}
        parts = {}
        for stream, numbers in tails.items():
            try:
                name = names.get(stream) or self._engine.read(streams.get_stream, stream).full_name
            except NotFoundError:
                continue  # An earlier commit is told again, and this stream of it was deleted since.
            parts[name] = StreamCut(stream, numbers)
        return Cut(self._engine.store_id, parts)

    def abort(self) -> None:
        """Drop everything. Aborting again does nothing; a committed one raises TransactionEndedError."""
        with self._lock:
            if self._status is TransactionStatus.ABORTED:
                return
            self._check_open()
            if self._is_begun or self._is_asked:
                self._ended_on(lambda: self._engine.write_once(transactions.abort, self._id, self._lease_us))
                failpoints.reach("txn.aborted")
            self._end(TransactionStatus.ABORTED)

    def _abort_quietly(self) -> None:
        if self._status is TransactionStatus.OPEN:
            try:
                self.abort()
            except HeadwaterError:
                if self._status is TransactionStatus.OPEN:
                    self._end(TransactionStatus.ABORTED)

    def _end(self, status: TransactionStatus, *, is_whole: bool = False) -> None:
        """`is_whole`: what this handle was given is committed, its readers' positions with it; else they go back."""
        self._status = status
        self._forget()
        self._pending = None
        for reader, positions in self._readers:
            if is_whole:
                reader.positions_committed(positions)
            else:
                reader.rewind()
        self._readers.clear()

    def __enter__(self) -> Transaction:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if self._status is not TransactionStatus.OPEN:
            return
        if error is None:
            self.commit()
        else:
            self._abort_quietly()


def _parts(chunks: list[Chunk]) -> Iterator[list[Chunk]]:
    """The chunks in order, each part small enough for one block."""
    part: list[Chunk] = []
    size = 0
    for chunk in chunks:
        pieces = max(1, min(chunk.count, -(-chunk.columns.nbytes // _STAGE_BYTES)))
        for index in range(pieces):
            piece = chunk.slice(chunk.count * index // pieces, chunk.count * (index + 1) // pieces) if pieces > 1 else chunk
            if part and size >= _STAGE_BYTES:
                yield part
                part, size = [], 0
            part.append(piece)
            size += chunk.columns.nbytes // pieces
    if part:
        yield part


def check_marker(marker: Any) -> None:
    """Refuse what is no marker, before anything is staged under it."""
    if not isinstance(marker, Marker):
        raise InvalidRequestError(f"a marker is hw.Marker(owner, sequence), not {marker!r}")
    for text in (marker.owner, marker.fingerprint or "-"):
        if not isinstance(text, str) or not text or "\0" in text or not text.isprintable():
            raise InvalidRequestError(f"a marker's owner and fingerprint are text that can be printed, not {text!r}")
    if isinstance(marker.sequence, bool) or not isinstance(marker.sequence, int) or not -(1 << 62) < marker.sequence < 1 << 62:
        raise InvalidRequestError(f"a marker's sequence is a whole number, not {marker.sequence!r}")
