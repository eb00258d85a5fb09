"""Cursors: the events of one segment from a number on, planned in the catalog, fetched and verified ahead, handed out in order.

A cursor checks that numbers follow each other without a gap, whatever the catalog and the storage say. A truncated number raises
TruncatedError. Upkeep may move bytes under a cursor: the cursor plans them again by number, and bytes that the catalog still names are
damaged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

import google_crc32c
import pyarrow as pa

from headwater.catalog import extents, segments, tags, tiers, undone
from headwater.catalog.extents import PARQUET, Extent
from headwater.catalog.segments import SegmentRow
from headwater.errors import CorruptDataError, HeadwaterError, InvalidRequestError, NotFoundError, TruncatedError
from headwater.model.limits import MIB, PLAN_EXTENTS, PREFETCH_BYTES
from headwater.runtime.workers import Later, Task
from headwater.segments.batches import Batch
from headwater.segments.block import decode, verify
from headwater.segments.bounds import Choice
from headwater.segments.chunk import ChunkFile, RowGroups
from headwater.segments.lanes import StreamRef

if TYPE_CHECKING:
    from headwater.segments.engine import Engine

_FETCH_BYTES = 4 * MIB
#: From this size on, copying and verifying what is in memory already is worth a thread of its own: waking it costs 0.1 ms.
_THREAD_BYTES = 4 * MIB


class SegmentState(NamedTuple):
    """How far a cursor is in its segment, as of a look into the catalog. `epoch` sealed the segment, or made it if it is open."""

    at_tail: bool
    #: Whether the segment is sealed and read: only its successors have more.
    ended: bool
    epoch: int


class BytesBlock(NamedTuple):
    """Bytes from offset `first` on that lie together, and when the first and the last of them were appended."""

    first: int
    data: pa.Buffer
    appended_at: int
    last_at: int


class SegmentCursor:
    """Reads one segment from a number on, up to `end`, or along its tail if `end` is None. `Engine.cursor` makes it.

    `columns` are the columns that callers will ask its batches for: others are not fetched from chunks. None means all. With
    `keeps_schema` all events have the schema of `stream`, even if upkeep wrote them with a newer one; without it, events have newer columns
    from where those begin. `planned` are the first extents from `start` on, if they are known. `log` is for upkeep, which reads logs that
        have no segment any more. With a `key`, row groups that can't have an event with this routing key are passed over; with a
    `choice`, those that it rules out.

    After any error, a Ctrl-C too, the cursor continues with the first event that it did not hand out.
    """

    def __init__(
        self,
        engine: Engine,
        stream: StreamRef,
        segment: int,
        start: int,
        end: int | None,
        columns: Sequence[str] | None = None,
        prefetch_bytes: int = PREFETCH_BYTES,
        *,
        keeps_schema: bool = False,
        planned: Sequence[Extent] = (),
        log: int | None = None,
        key: bytes | None = None,
        choice: Choice | None = None,
    ) -> None:
        self._engine = engine
        self._stream = stream
        self._log = log
        self._key = key
        self._choice = choice
        self._columns = columns
        self._prefetch_bytes = prefetch_bytes
        self._keeps_schema = keeps_schema
        self.segment = segment
        self.number = start
        self.end = end
        self._planned = start
        self._first = planned
        #: A fork's events before this number lie in its parents' logs; those from `_own_from` on are known to lie in its own.
        self._inherited_until = 0
        self._own_from: float = inf
        self._news: str | None = None
        self._waiting: deque[Extent | RowGroups] = deque()
        self._fetching: deque[tuple[Sequence[Extent | RowGroups], Task[Sequence[Any]] | Later[Sequence[Any]]]] = deque()
        self._fetching_bytes = 0
        self._ready: deque[tuple[Extent | RowGroups, Any]] = deque()

    @property
    def stream(self) -> StreamRef:
        """The stream, with the schema of the events handed out last."""
        return self._stream

    @property
    def is_done(self) -> bool:
        return self.end is not None and self.number >= self.end

    @property
    def is_ready(self) -> bool:
        """Whether the next events are fetched."""
        return bool(self._ready)

    def next_time(self) -> int | None:
        """When the next block was appended; None if there is none now."""
        if self._ready:
            return self._ready[0][0].appended_at
        if self._fetching:
            return self._fetching[0][0][0].appended_at
        if not self._waiting:
            self._plan()
        return self._waiting[0].appended_at if self._waiting else None

    def next_block(self) -> BytesBlock | None:
        """The next verified bytes of a byte stream; None if there are none now."""
        start = self.number
        try:
            found = self._next()
        except BaseException:
            self.go_back(start)
            raise
        if found is None:
            return None
        extent, data = found
        assert isinstance(extent, Extent), "a byte stream has no Parquet"
        return BytesBlock(extent.first, data.slice(0, extent.end - extent.first), extent.appended_at, extent.last_at or extent.appended_at)

    def next_batch(self) -> Batch | None:
        """The next events that lie together; None if there are none now, or if `number` has passed over some that are not wanted."""
        start = self.number
        try:
            found = self._next()
            if found is None or (isinstance(found[0], RowGroups) and found[0].is_denied):
                return None
            return self._batch(start, *found)
        except BaseException:
            self.go_back(start)
            raise

    def _batch(self, start: int, item: Extent | RowGroups, data: Any) -> Batch:
        if isinstance(item, RowGroups):
            chunk, appended = data
            # A fork does not follow its parent: it has all that its parent's events had when it was made.
            if start >= self._inherited_until:
                self._follow_schema(item.file.schema_version)
            return Batch(
                self._stream, self.segment, item.first, chunk, item.appended_at if appended is None else appended, start, self.number
            )
        name = _name(item)
        block = decode(data, self._schema, name)
        if block.chunk.count != item.count:
            raise CorruptDataError(f"a block in {name} has {block.chunk.count} events, the catalog says {item.count}", object=name)
        self._follow_schema(block.schema_version)
        return Batch(self._stream, self.segment, item.first, block.chunk, item.appended_at, start, self.number)

    def _next(self) -> tuple[Extent | RowGroups, Any] | None:
        if self.is_done:
            return None
        while not self._ready:
            if not self._fill():
                return None
        item, data = self._ready.popleft()
        if not item.first <= self.number < item.end:
            self._explain_gap(item)
        self.number = min(item.end, self.end) if self.end is not None else item.end
        return item, data

    def go_back(self, number: int) -> None:
        """Forget what was planned and fetched: go on with this number, which was handed out or is the next."""
        self.number = self._planned = number
        self._first = ()
        self._waiting.clear()
        self._fetching.clear()
        self._fetching_bytes = 0
        self._ready.clear()

    def _follow_schema(self, version: int) -> None:
        # The schema was changed while a follower reads: its events have the newer columns from here on.
        if version > self._stream.schema_version and not self._keeps_schema:
            self._stream = self._stream._replace(schema=self._schema(version), schema_version=version)

    def _schema(self, version: int) -> pa.Schema:
        return self._engine.schema(self._stream.id, version)

    def look(self) -> SegmentState:
        """Look where the cursor is in its segment now. TruncatedError, or NotFoundError, if its next event is gone."""
        row = self._engine.run(segments.find_segment, self._stream.id, self.segment)
        if row is None:
            raise self._gone()
        if self._is_truncated(row):
            raise self._truncated(row)
        if self.number > row.tail:
            self._check_undone(self.number)
        at_tail = self.number >= row.tail
        epoch = row.made_epoch if row.sealed_epoch is None else row.sealed_epoch
        return SegmentState(at_tail, at_tail and not row.is_open, epoch)

    def has_news(self) -> bool:
        """Whether it was heard, since this was asked last, that there is more to read."""
        before, self._news = self._news, self._engine.last_news(self._stream.id, self.segment)
        return self._news != before

    def _plan(self) -> None:
        end = self.end if self.end is not None else 1 << 62
        if self._planned >= end:
            return
        found, self._first = self._first or self._plan_from(self._planned, end), ()
        if not found and self._own_from <= self._planned:
            # At the tail, or a roll-back put a view in the segment's place: its events lie in another log then.
            self._own_from = inf
            if self.end is not None:
                found = self._plan_from(self._planned, end)
        if not found:
            if self.end is not None:
                self._explain_gap(None)
            return
        expected = self._planned
        for extent in found:
            if not extent.first <= expected < extent.end:
                self._explain_gap(extent)
            expected = extent.end
        self._planned = expected
        until = found[-1].limit
        if until is not None:
            self._inherited_until = max(self._inherited_until, until)
        else:
            self._own_from = min(self._own_from, found[0].first)
        self._waiting.extend(found)

    def _plan_from(self, start: int, end: int, limit: int = PLAN_EXTENTS) -> Sequence[Extent]:
        if self._log is not None:
            return self._engine.run(tiers.plan_log, self._log, start, end, limit)
        return self._engine.run(extents.plan_segment, self._stream.id, self.segment, start, end, limit, start >= self._own_from)

    def _fill(self) -> bool:
        """Fetch ahead, then make the next items ready; False if there is nothing now. True without any: try again."""
        if not self._waiting and not self._fetching:
            self._plan()
        while self._waiting and self._fetching_bytes < self._prefetch_bytes:
            if not self._open_chunk():
                return True
            group = self._next_group()
            first = group[0]
            if isinstance(first, Extent) and first.data is not None:
                # Inline blocks came with the plan. They wait their turn behind what is being fetched.
                if self._fetching or self._ready:
                    self._waiting.extendleft(reversed(group))
                    break
                self._take_inline(group)
                continue
            if self._ready:
                self._waiting.extendleft(reversed(group))
                break
            self._fetching.append((group, self._begin_fetching(group)))
            self._fetching_bytes += _memory(group)
            if isinstance(first, RowGroups) and first.is_denied:
                break  # It has no bytes, and the next chunk's footer can wait until it is passed over.
        if self._ready:
            return True
        if not self._fetching:
            return False
        group, task = self._fetching.popleft()
        self._fetching_bytes -= _memory(group)
        try:
            fetched = task.result()
        except CorruptDataError as error:
            self._look_again(group[0], error)
            return True
        self._ready.extend(zip(group, fetched, strict=False))
        if len(fetched) < len(group):
            self._plan_again_from(group[len(fetched)])
        return True

    def _take_inline(self, group: Sequence[Extent | RowGroups]) -> None:
        for extent in group:
            assert isinstance(extent, Extent) and extent.data is not None
            try:
                self._ready.append((extent, _verified(extent, pa.py_buffer(extent.data), self._stream.kind)))
            except CorruptDataError as error:
                if self._ready:
                    self._plan_again_from(extent)
                else:
                    self._look_again(extent, error)
                return

    def _plan_again_from(self, item: Extent | RowGroups) -> None:
        """What is ready goes first. By the time of this one, whose bytes are damaged or gone, there may be others in its place."""
        self._waiting.clear()
        self._fetching.clear()
        self._fetching_bytes = 0
        self._planned = item.first

    def _open_chunk(self) -> bool:
        """Replace a chunk that is next by its row groups; False if it is gone, and all is planned again."""
        extent = self._waiting[0]
        if not isinstance(extent, Extent) or extent.form != PARQUET:
            return True
        try:
            file = self._engine.chunks.open(extent)
            denied = self._denied(file)
        except CorruptDataError as error:
            if not self._fetching and not self._ready:
                self._look_again(extent, error)
            else:
                # Not what is being fetched, which comes before it.
                self._waiting.clear()
                self._planned = extent.first
            return False
        self._waiting.popleft()
        end = self.end if self.end is not None else extent.end
        bounds = max(self.number, extent.first), min(end, extent.end)
        # Two at once, at twice their size: see `_memory`.
        self._waiting.extendleft(reversed(file.row_groups(*bounds, self._columns, self._prefetch_bytes // 4, denied)))
        return True

    def _denied(self, file: ChunkFile) -> Collection[int]:
        if self._key is not None:
            return file.denied(self._engine.storage, self._key)
        # Columns of these names that a fork's parent has added are null in what the fork has of it, and counted as such.
        return file.unwanted(self._choice) if self._choice is not None else ()

    def _next_group(self) -> Sequence[Extent | RowGroups]:
        """The next row group; or the next extents that are inline, or that lie in one object."""
        first = self._waiting.popleft()
        if isinstance(first, RowGroups):
            return [first]
        group = [first]
        size = first.length
        while self._waiting:
            extent, last = self._waiting[0], group[-1]
            if not isinstance(extent, Extent) or extent.form == PARQUET or extent.object != last.object:
                break
            if (extent.data is None) != (last.data is None):
                break  # An inline block is missing.
            if size + extent.length > _FETCH_BYTES:
                break
            size += extent.length
            group.append(extent)
            self._waiting.popleft()
        return group

    def _begin_fetching(self, group: Sequence[Extent | RowGroups]) -> Task[Sequence[Any]] | Later[Sequence[Any]]:
        engine, kind, columns = self._engine, self._stream.kind, self._columns
        item = group[0]
        if isinstance(item, RowGroups):
            if item.is_denied:
                return Later(lambda: [None])
            return engine.workers.submit(lambda: [item.file.read(engine.storage, item.places, columns)])
        extents = [extent for extent in group if isinstance(extent, Extent)]
        is_near = item.key is not None and engine.storage.expect(item.key, [(extent.position, extent.length) for extent in extents])
        # Upkeep, whose cursors are those with a log, lets others go first.
        give_way = engine.pace.give_way if self._log is not None else _go_on
        if is_near and sum(extent.length for extent in extents) < _THREAD_BYTES:
            return Later(lambda: _fetch(engine, extents, kind, give_way))
        return engine.workers.submit(lambda: _fetch(engine, extents, kind, give_way))

    def _explain_gap(self, extent: Extent | RowGroups | None) -> None:
        """Numbers are missing from the catalog: were they truncated, or is it damaged?"""
        row = self._engine.run(segments.find_segment, self._stream.id, self.segment)
        if row is None:
            raise self._gone()
        if self._is_truncated(row):
            raise self._truncated(row)
        needed = self.number if self.end is None else self.end
        if needed > row.tail:
            self._check_undone(needed)
        if extent is not None or (self.end is not None and row.tail >= self.end):
            raise CorruptDataError(
                f"the catalog has no extent for event {self.number} of segment {self.segment} of {self._stream.name}",
                object=self._stream.name,
            )
        raise InvalidRequestError(f"segment {self.segment} of {self._stream.name} ends at {row.tail}, before {self.end}")

    def _truncated(self, row: SegmentRow) -> TruncatedError:
        head = "all of it was" if row.dropped else f"its head is {row.head}"
        return TruncatedError(f"event {self.number} of segment {self.segment} of {self._stream.name} was truncated; {head}")

    def _check_undone(self, number: int) -> None:
        """RolledBackError if the stream was rolled back to before a number of the segment."""
        error = self._engine.run(undone.explain, self._stream.id, {self.segment: number})
        if error is not None:
            raise error

    def _gone(self) -> HeadwaterError:
        """The error for a segment that has no row any more."""
        self._check_undone(self.number)
        from_stream = self._engine.run(segments.list_segments, self._stream.id)
        if not from_stream:
            return NotFoundError(f"stream {self._stream.name} was deleted")
        return TruncatedError(f"segment {self.segment} of {self._stream.name} was truncated")

    def _look_again(self, item: Extent | RowGroups, error: CorruptDataError) -> None:
        """Bytes are missing or damaged. If the catalog names others for these numbers by now, plan again; else it is what it seems."""
        row = self._engine.run(segments.find_segment, self._stream.id, self.segment)
        if row is None:
            raise self._gone()
        if self._is_truncated(row):
            raise self._truncated(row)
        found = self._plan_from(self.number, self.number + 1, 1)
        if found and found[0].object == item.object:
            place = {"stream": self._stream.name, "segment": self.segment, "first": item.first, "end": item.end}
            raise CorruptDataError(error.message, error.object, **{**error.facts, **place}) from error
        self.go_back(self.number)

    def _is_truncated(self, row: SegmentRow) -> bool:
        """Whether the next number is, and no tag keeps it."""
        if self.number >= row.head and not row.dropped:
            return False
        pins = self._engine.run(tags.get_pins, self._stream.id).get(self.segment, ())
        return not any(first <= self.number < until for first, until in pins)


def _memory(group: Sequence[Extent | RowGroups]) -> int:
    """What fetching a group takes. The bytes of row groups are there twice, until their columns are decoded."""
    return sum([item.length * 2 if isinstance(item, RowGroups) else item.length for item in group])


def _go_on() -> None:
    """Give way to nobody."""


def _fetch(engine: Engine, group: Sequence[Extent], kind: str, give_way: Callable[[], None]) -> list[pa.Buffer]:
    """The blocks' bytes, up to the first that is damaged. CorruptDataError if there is none before it."""
    key = group[0].key
    if key is None:
        raise CorruptDataError(f"the catalog names an object {group[0].object} that it does not have", object=str(group[0].object))
    try:
        buffers = engine.storage.get_ranges(key, [(extent.position, extent.length) for extent in group])
        return [_verified(extent, pa.py_buffer(data), kind, give_way) for extent, data in zip(group, buffers, strict=True)]
    except CorruptDataError:
        if len(group) == 1:
            raise
    found: list[pa.Buffer] = []
    for extent in group:
        try:
            found += _fetch(engine, [extent], kind, give_way)
        except CorruptDataError:
            if not found:
                raise
            break
    return found


def _verified(extent: Extent, data: pa.Buffer, kind: str, give_way: Callable[[], None] = _go_on) -> pa.Buffer:
    name = _name(extent)
    if data.size != extent.length:
        raise CorruptDataError(f"a block in {name} has {data.size} bytes instead of {extent.length}", object=name)
    if kind != "bytes":
        verify(data, extent.crc, name, give_way)
    elif google_crc32c.value(data) != extent.crc:
        raise CorruptDataError(f"a block in {name} is damaged: its checksum does not match the catalog's {extent.crc:08x}", object=name)
    return data


def _name(extent: Extent) -> str:
    return extent.key if extent.key is not None else "the catalog (inline block)"
