"""What a transaction was given and has not staged yet: events by stream, changes of tables and shared state, persists, readers' positions.

All of it is checked when it is given. A stream of opaque events that an earlier transaction of this process wrote to is not looked up by
its name again; whether it is still there shows at the latest in the commit, and then it is.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa

from headwater.catalog.conditions import TailIs
from headwater.catalog.parts import Append, Term
from headwater.catalog.positions import ReaderMove
from headwater.catalog.tables import EntryIs
from headwater.errors import InvalidRequestError, NotFoundError
from headwater.frames import frame_chunk
from headwater.journals.journal import Journal
from headwater.journals.persisting import Condition
from headwater.journals.staging import JournalContents
from headwater.model.cuts import Cut
from headwater.model.keys import key_bytes
from headwater.model.limits import EVENT_BYTES, MIB
from headwater.model.matches import Expected
from headwater.model.names import parse_stream_name
from headwater.model.records import Row
from headwater.segments.block import Chunk
from headwater.segments.engine import Engine
from headwater.segments.lanes import EVENT_OVERHEAD_BYTES, StreamRef, make_chunk
from headwater.segments.routing import Router
from headwater.streams.lifecycle import open_stream
from headwater.streams.replacing import Replace
from headwater.streams.rollback import RollBack, check_kind
from headwater.tables import find_changes_back
from headwater.writer import EventCheck

T = TypeVar("T")

#: What is much: to be staged before more is added.
STAGE_BYTES = 8 * MIB


class TableChange(NamedTuple):
    """A put of a table's entry (a removal if the value is None), if it has the version that is expected."""

    key: str
    value: bytes | None
    expected: int | None


class StreamEvents:
    """Events for one stream."""

    def __init__(self, stream: StreamRef, check: EventCheck) -> None:
        self.stream = stream
        self.is_opaque = stream.is_opaque
        self.check = check
        self.chunks: list[Chunk] = []
        self.values: list[Any] = []
        self.keys: list[bytes | None] = []
        self.times: dict[int, datetime] = {}

    @property
    def is_empty(self) -> bool:
        return not self.values and not self.chunks

    def close_chunk(self) -> list[Chunk]:
        if self.values:
            chunks = [*self.chunks, make_chunk(self.stream, self.values, self.keys, self.times)]
            # In one line without a call, in which a Ctrl-C can't come: each event is in one of them.
            self.chunks, self.values, self.keys, self.times = chunks, [], [], {}
        return self.chunks


class Contents:
    """Not thread-safe: its transaction is."""

    def __init__(self, engine: Engine, router: Router) -> None:
        self._engine = engine
        self._router = router
        #: False: what is staged for a stream that is gone would fail the commit, so each name is looked up.
        self.may_remember = True
        self._refs: dict[str, StreamRef] = {}
        #: Those of them that are remembered from earlier transactions.
        self._unseen: set[str] = set()
        self.events: dict[str, StreamEvents] = {}
        self.tables: dict[int, tuple[StreamRef, list[TableChange]]] = {}
        self.states: list[tuple[StreamRef, Append, TailIs]] = []
        self._updated: set[int] = set()
        self.journals: dict[int, JournalContents] = {}
        self.readers: list[ReaderMove] = []
        #: Conditions and changes beside those of events, tables, shared state and readers.
        self.terms: list[Term] = []
        #: Tells this from what the transaction was given before and after: staged again, it is not added twice.
        self.id = new_batch_id()
        #: What may still be added before all of it is to be staged.
        self.room = STAGE_BYTES

    @property
    def is_empty(self) -> bool:
        is_idle = all(events.is_empty for events in self.events.values()) and all(each.is_empty for each in self.journals.values())
        return is_idle and not (self.tables or self.states or self.readers or self.terms)

    @property
    def names(self) -> dict[int, str]:
        """The streams and tables something was given for, by id, staged or not."""
        journals = {each.ref.id: each.ref.name for each in self.journals.values()}
        return {ref.id: ref.name for ref in self._refs.values()} | journals

    # What is given.

    def write(self, stream: str, value: bytes | str | Mapping[str, Any], key: bytes | str | int | None, time: datetime | None) -> None:
        try:
            events = self.events.get(stream) or self._events_of(stream)
        except TypeError:
            parse_stream_name(stream)  # A list can't be looked for.
            raise
        if type(value) is bytes and events.is_opaque and time is None and len(value) <= EVENT_BYTES:
            routing_key = key_bytes(key)
            self.room -= len(value) + len(routing_key or b"") + EVENT_OVERHEAD_BYTES
            # Without a call between them, in which a Ctrl-C could come: each value has its own key.
            events.keys += (routing_key,)
            events.values += (value,)
        else:
            self._write_checked(stream, value, key, time)

    def _write_checked(self, stream: str, value: Any, key: bytes | str | int | None, time: datetime | None) -> None:
        events, (checked, routing_key, size) = self._fitting(stream, lambda events: events.check(value, key, time))
        self.room -= size + EVENT_OVERHEAD_BYTES
        index = len(events.values)
        # As above: each value has its own key and time.
        if time is not None:
            events.times[index] = time
        events.keys += (routing_key,)
        events.values += (checked,)

    def write_batch(self, stream: str, batch: pa.RecordBatch, key: str | None, missing: str | None) -> int:
        """Add a batch of events; return their number."""
        events, chunk = self._fitting(stream, lambda events: frame_chunk(batch, key, events.stream, missing))
        if chunk.count:
            events.close_chunk()
            events.chunks.append(chunk)
            self.room -= chunk_size(chunk)
        return chunk.count

    def change_table(self, table: str, change: TableChange) -> None:
        ref = self._ref(table, "table")
        self.tables.setdefault(ref.id, (ref, []))[1].append(change)
        self.room -= len(change.value or b"") + EVENT_OVERHEAD_BYTES

    def require_entry(self, table: str, key: str, version: int) -> None:
        """Add a condition on a table's entry."""
        if table in self._unseen:
            self.look_up()  # A condition on a table that is gone is not looked up again by the commit.
        self.terms.append(EntryIs(self._ref(table, "table", is_seen=True).id, key, version))

    def roll_back(self, name: str, cut: Cut, keep_as: str, force: bool, transaction: str) -> None:
        """Add a roll-back of a stream. One that this transaction writes to is refused, now or at the commit."""
        ref = self._open(name, "events")
        check_kind(ref.name, ref.kind)
        if any(isinstance(term, RollBack) and term.stream == ref.id for term in self.terms):
            raise InvalidRequestError(f"this transaction rolls {name} back already")
        events = self.events.get(name)
        if events is not None and not events.is_empty:
            raise InvalidRequestError(f"this transaction writes to {name}: roll it back in another")
        self._refs[name] = ref
        self.terms.append(RollBack(ref.id, str(cut), str(parse_stream_name(keep_as)), force, transaction))

    def replace_stream(self, name: str, by: str, keep_as: str, consumers: str) -> None:
        """Add that a stream takes the name of another one."""
        old, new = (open_stream(self._engine, parse_stream_name(each)) for each in (name, by))
        self.terms.append(Replace(old.id, new.id, old.name, keep_as, consumers))

    def roll_table_back(self, name: str, version: int) -> None:
        """Add the changes that make a table's entries what they were at a version, if nobody changes the table before the commit."""
        ref = self._ref(name, "table")
        if ref.id in self.tables:
            raise InvalidRequestError(f"this transaction changes {name} already: roll it back first, then change it")
        tail, changes = find_changes_back(self._engine, ref, version)
        self.terms.append(TailIs(ref.id, 0, tail))
        for key, value in changes:
            self.change_table(name, TableChange(key, value, None))

    def update(self, stream: StreamRef, append: Append, expected: TailIs) -> None:
        """Add an update of shared state, which is at `expected` now."""
        if stream.id in self._updated:
            raise InvalidRequestError(f"this transaction updates {stream.name} already: give all its updates at once")
        self._updated.add(stream.id)
        self.states.append((stream, append, expected))
        self.room -= append.length

    def persist(self, journal: Journal, id: str, rows: list[Row], expected: int | Expected | None, condition: Condition | None) -> None:
        """Add events of an entity, which were checked."""
        self.room -= self._journal(journal).persist(id, rows, expected, condition)

    def require(self, journal: Journal, id: str, expected: int | Expected) -> None:
        """Add a condition on an entity."""
        self._journal(journal).require(id, expected)

    def _journal(self, journal: Journal) -> JournalContents:
        return self.journals.setdefault(journal._ref.id, JournalContents(journal))

    def move_reader(self, move: ReaderMove) -> None:
        mine = move.group, move.reader, move.generation
        self.readers = [other for other in self.readers if (other.group, other.reader, other.generation) != mine]
        self.readers.append(move)

    def emptied(self) -> Contents:
        """The same without what was given: that is staged, or the transaction ended."""
        found = Contents(self._engine, self._router)
        found.may_remember, found._refs, found._unseen, found._updated = self.may_remember, self._refs, self._unseen, self._updated
        found.journals = {stream: each.emptied() for stream, each in self.journals.items()}
        found.events = {name: StreamEvents(events.stream, events.check) for name, events in self.events.items()}
        return found

    # The streams it is for.

    def _events_of(self, name: str) -> StreamEvents:
        if not isinstance(name, str):
            parse_stream_name(name)
        found = self.events.get(name)
        if found is None:
            ref = self._ref(name, "events")
            found = self.events[name] = StreamEvents(ref, EventCheck(ref))
        return found

    def _fitting(self, name: str, check: Callable[[StreamEvents], T]) -> tuple[StreamEvents, T]:
        """What was given, as the stream takes it. Before it is refused, a stream that was only remembered is looked up."""
        events = self._events_of(name)
        try:
            return events, check(events)
        except InvalidRequestError:
            if name not in self._unseen:
                raise
            self.look_up()
            events = self._events_of(name)
            return events, check(events)

    def _ref(self, name: str, kind: str, *, is_seen: bool = False) -> StreamRef:
        """The stream of this name. Unless it must be seen now, one that is remembered will do."""
        if not isinstance(name, str):
            parse_stream_name(name)
        ref = self._refs.get(name)
        if ref is None:
            ref = self._router.remembered(name, kind) if self.may_remember and not is_seen else None
            if ref is not None:
                self._unseen.add(name)
            else:
                ref = self._open(name, kind)
                self._router.remember(ref)
            self._refs[name] = ref
        if ref.kind != kind:
            raise InvalidRequestError(f"{name} is of kind {ref.kind!r}, not {kind!r}")
        return ref

    def look_up(self) -> None:
        """Look remembered streams up by their names. What was given for one that is gone goes to the stream that has its name now."""
        for name in self._unseen:
            old = self._refs[name]
            self._router.forget_name(name)
            found = self._refs[name] = self._open(name, old.kind)
            self._router.remember(found)
            if found.id == old.id:
                continue
            if old.kind == "table":
                if found.kind != "table":
                    raise InvalidRequestError(f"the table {name} was deleted, and a stream created under its name: begin again")
                _, changes = self.tables.pop(old.id, (old, []))
                self.tables |= {found.id: (found, changes)} if changes else {}
                continue
            events = self.events[name]
            if found.kind == "events" and found.is_opaque:
                events.stream = found
            elif events.is_empty:
                del self.events[name]
            else:
                raise InvalidRequestError(f"{name} was deleted, and another kind of stream created under its name: begin again")
        self._unseen.clear()

    def _open(self, name: str, kind: str) -> StreamRef:
        try:
            return open_stream(self._engine, parse_stream_name(name))
        except NotFoundError:
            if kind != "table":
                raise
            raise NotFoundError(f"there is no table {name}: store.table({name!r}) makes one") from None


def new_batch_id() -> int:
    """A number that tells a batch from all others of its transaction, and is not 0."""
    return (uuid.uuid4().int >> 66) + 1


def chunk_size(chunk: Chunk) -> int:
    return int(chunk.columns.nbytes) + (int(chunk.keys.nbytes) if chunk.keys is not None else 0)
