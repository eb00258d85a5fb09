"""Reading segments: plan extents in the catalog, fetch and verify their blocks or row groups, hand them out in order.

Numbers are checked to follow each other without a gap, whatever the catalog and storage say. What was truncated under a reader raises
TruncatedError. What is missing was perhaps moved by upkeep, so it is planned again by number; what is still named then is corruption.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa

from headwater.catalog import segments, tags
from headwater.catalog.extents import PARQUET, Extent
from headwater.catalog.segments import SegmentRow
from headwater.errors import CorruptDataError, InvalidRequestError, NotFoundError, TruncatedError
from headwater.model.arguments import items_of, shown
from headwater.model.events import Event, events_of
from headwater.model.limits import MIB, PREFETCH_BYTES
from headwater.model.positions import Position
from headwater.model.schemas import METADATA, TIME, fit, python_schema, upgrade
from headwater.runtime import clock
from headwater.runtime.workers import Later, Task
from headwater.segments.block import Chunk, decode, verify
from headwater.segments.chunk import RowGroups
from headwater.segments.engine import Engine
from headwater.segments.lanes import StreamRef

_FETCH_BYTES = 4 * MIB
#: From this size on, copying and verifying what is in memory already is worth a thread of its own: waking it costs 0.1 ms.
_THREAD_BYTES = 4 * MIB
#: Of small blocks, the columns of the segment, the stream and the numbers are made once for many: at most half a megabyte each.
_REPEATED_ROWS = 32767
_COUNTED_ROWS = 65536
_DEFAULT_METADATA = ("_key", "_time", "_segment", "_number")


class Batch:
    """Events of one segment with consecutive numbers, as they lie in one block or row group.

    `appended` is when they were: one time for a block, one for each event of a row group.
    """

    __slots__ = ("_appended", "_chunk", "_from", "_stream", "appended_at", "count", "first", "segment")

    def __init__(self, stream: StreamRef, segment: int, first: int, chunk: Chunk, appended: int | pa.Array, start: int, end: int) -> None:
        self._stream = stream
        self._chunk = chunk
        self._from = max(start - first, 0)
        self.segment = segment
        self.first = first + self._from
        self.count = min(end, first + chunk.count) - self.first
        self._appended = appended
        self.appended_at = appended if isinstance(appended, int) else int(appended[self._from].value)

    @property
    def end(self) -> int:
        return self.first + self.count

    @property
    def schema(self) -> pa.Schema:
        return self._stream.schema

    def count_until(self, time_us: int, *, inclusive: bool) -> int:
        """How many of the first events were appended before a time, or at it too."""
        if isinstance(self._appended, int):
            return self.count if self._appended < time_us or (inclusive and self._appended == time_us) else 0
        times = self._cut(self._appended).cast(pa.int64()).to_numpy()
        return int(np.searchsorted(times, time_us, side="right" if inclusive else "left"))

    def split(self, count: int) -> tuple[Batch, Batch]:
        """The first `count` events, and the rest."""
        start = self.first - self._from
        middle = self.first + count
        parts = ((self.first, middle), (middle, self.end))
        first, second = (Batch(self._stream, self.segment, start, self._chunk, self._appended, *part) for part in parts)
        return first, second

    def time_at(self, index: int) -> datetime:
        times = self._chunk.times
        if times is not None and times[self._from + index].is_valid:
            return clock.to_datetime(times[self._from + index].value)
        return clock.to_datetime(self.appended_at)

    def position_at(self, index: int) -> Position:
        return Position(self.segment, self.first + index)

    def events(self) -> Iterator[Event]:
        columns = upgrade(self._chunk.columns.slice(self._from, self.count), self._stream.schema)
        if self._stream.is_opaque:
            values = columns.column(0).to_pylist()
        else:
            ours = python_schema(self._stream.schema)
            values = (columns if ours is None else columns.cast(ours, safe=False)).to_pylist()
        keys = self._chunk.keys
        return events_of(values, self._cut(keys).to_pylist() if keys is not None else None, self)

    def to_arrow(self, columns: Columns) -> pa.RecordBatch:
        """The named columns, of the stream's schema or of METADATA."""
        arrays = [self._metadata(name) if name.startswith("_") else self._column(name) for name in columns.names]
        return pa.RecordBatch.from_arrays(arrays, schema=columns.schema_for(self._stream))

    def _column(self, name: str) -> pa.Array:
        kind = self._stream.schema.field(name).type
        index = self._chunk.columns.schema.get_field_index(name)
        if index < 0:
            return pa.nulls(self.count, kind)  # Written before the schema had it.
        return fit(self._cut(self._chunk.columns.column(index)), kind)

    def _cut(self, array: pa.Array) -> pa.Array:
        return array if len(array) == self.count else array.slice(self._from, self.count)

    def _metadata(self, name: str) -> pa.Array:
        chunk = self._chunk
        if name == "_key":
            return self._cut(chunk.keys) if chunk.keys is not None else pa.nulls(self.count, pa.binary())
        if name == "_number":
            return self._count_up()
        if name == "_segment":
            return self._repeat(self.segment)
        if name == "_stream":
            return self._repeat(self._stream.name)
        if name == "_time" and chunk.times is not None:
            times = self._cut(chunk.times)
            return times.fill_null(pa.scalar(self.appended_at, pa.int64()).cast(TIME)) if times.null_count else times
        if not isinstance(self._appended, int):
            return self._cut(self._appended)
        return _numbers(np.full(self.count, self._appended, dtype=np.int64), TIME)

    def _count_up(self) -> pa.Array:
        block, start = divmod(self.first, _COUNTED_ROWS)
        if start + self.count <= _COUNTED_ROWS and self.count <= _REPEATED_ROWS:
            return _counted(block).slice(start, self.count)
        return _numbers(np.arange(self.first, self.end, dtype=np.int64), pa.int64())

    def _repeat(self, value: int | str) -> pa.Array:
        if self.count > _REPEATED_ROWS:
            return _repeated(value, self.count)
        return _kept(value, 1 << self.count.bit_length()).slice(0, self.count)


def _numbers(values: np.ndarray[Any, np.dtype[np.int64]], kind: pa.DataType) -> pa.Array:
    # Over the buffer, since `pa.array` looks at each value for nulls, and a cast copies.
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


def _repeated(value: int | str, count: int) -> pa.Array:
    return pa.repeat(value, count) if isinstance(value, str) else _numbers(np.full(count, value, dtype=np.int64), pa.int64())


#: One value again and again is a column of many batches: of a segment's, of a stream's.
_kept = lru_cache(maxsize=32)(_repeated)


@lru_cache(maxsize=4)
def _counted(block: int) -> pa.Array:
    return _numbers(np.arange(block * _COUNTED_ROWS, (block + 1) * _COUNTED_ROWS, dtype=np.int64), pa.int64())


class Columns:
    """The columns that the batches of a read are asked for."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self._stream: StreamRef | None = None
        self._schema: pa.Schema | None = None

    def schema_for(self, stream: StreamRef) -> pa.Schema:
        # Made once as long as it is the same object: schemas that differ in their metadata only are equal.
        if stream is not self._stream:
            self._stream, self._schema = stream, batch_schema(stream, self.names)
        return self._schema


def check_columns(stream: StreamRef, columns: Sequence[str] | None) -> list[str]:
    """The columns to read: those asked for, or all of the schema with `_key, _time, _segment, _number`."""
    if columns is None:
        return [*stream.schema.names, *_DEFAULT_METADATA]
    wanted = []
    known = {*stream.schema.names, *METADATA}
    for name in items_of(columns, "columns", "names"):
        if not isinstance(name, str):
            raise InvalidRequestError(f"columns is a list of names, of which {shown(name)} is none")
        if name not in known:
            there = ", ".join([*stream.schema.names, *METADATA])
            raise InvalidRequestError(f"stream {stream.name} has no column {shown(name)}; there are: {there}")
        wanted.append(name)
    if not wanted:
        raise InvalidRequestError("columns is empty: name at least one, or leave it out for all of them")
    return wanted


def batch_schema(stream: StreamRef, columns: Sequence[str]) -> pa.Schema:
    fields = (
        pa.field(name, METADATA[name], nullable=name == "_key") if name in METADATA else stream.schema.field(name) for name in columns
    )
    return pa.schema(fields)


class SegmentCursor:
    """Reads one segment from a number on, up to `end`, or along its tail if `end` is None.

    `columns` are those its batches will be asked for, so that others are not fetched from chunks; None means all. `planned` are extents
    of the segment's own log that were found already, from `start` on. With `keeps_schema` all events have the schema of `stream`, also
    where upkeep wrote them with a newer one meanwhile; else they have newer columns from where those begin.

    After any error, a Ctrl-C too, it goes on with the event that it had not handed out.
    """

    def __init__(
        self,
        engine: Engine,
        stream: StreamRef,
        row: SegmentRow,
        start: int,
        end: int | None,
        columns: Sequence[str] | None = None,
        prefetch_bytes: int = PREFETCH_BYTES,
        planned: Sequence[Extent] = (),
        *,
        keeps_schema: bool = False,
    ) -> None:
        self._engine = engine
        self._stream = stream
        self._row = row
        self._columns = columns
        self._prefetch_bytes = prefetch_bytes
        self._keeps_schema = keeps_schema
        self.segment = row.number
        self.number = start
        self.end = end
        self._planned = start
        self._first = planned if start >= row.base_until else ()
        self._news: str | None = None
        self._waiting: deque[Extent | RowGroups] = deque()
        self._fetching: deque[tuple[Sequence[Extent | RowGroups], Task[Sequence[Any]] | Later[Sequence[Any]]]] = deque()
        self._fetching_bytes = 0
        self._ready: deque[tuple[Extent | RowGroups, Any]] = deque()

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

    def next_block(self) -> tuple[Extent, pa.Buffer] | None:
        """The next extent with its verified bytes; None if there is none now. For streams whose chunks are not Parquet."""
        start = self.number
        try:
            found = self._next()
        except BaseException:
            self.go_back(start)
            raise
        if found is None:
            return None
        assert isinstance(found[0], Extent)
        return found[0], found[1]

    def next_batch(self) -> Batch | None:
        """The next events that lie together; None if there are none now."""
        start = self.number
        try:
            found = self._next()
            return None if found is None else self._batch(start, *found)
        except BaseException:
            self.go_back(start)
            raise

    def _batch(self, start: int, item: Extent | RowGroups, data: Any) -> Batch:
        if isinstance(item, RowGroups):
            chunk, appended = data
            # A fork does not follow its parent: it has all that its parent's events had when it was made.
            if start >= self._row.base_until:
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

    def has_news(self) -> bool:
        """Whether it was heard, since this was asked last, that there is more to read."""
        before, self._news = self._news, self._engine.last_news(self._stream.id, self.segment)
        return self._news != before

    def _plan(self) -> None:
        end = self.end if self.end is not None else 1 << 62
        if self._planned >= end:
            return
        found, self._first = self._first or self._engine.plan(self._row, self._planned, end), ()
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
        self._waiting.extend(found)

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
        self._waiting.extendleft(reversed(file.row_groups(*bounds, self._columns, self._prefetch_bytes // 4)))
        return True

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
            return engine.workers.submit(lambda: [item.file.read(engine.storage, item.places, columns)])
        extents = [extent for extent in group if isinstance(extent, Extent)]
        is_near = item.key is not None and engine.storage.expect(item.key, [(extent.position, extent.length) for extent in extents])
        if is_near and sum(extent.length for extent in extents) < _THREAD_BYTES:
            return Later(lambda: _fetch(engine, extents, kind))
        return engine.workers.submit(lambda: _fetch(engine, extents, kind))

    def _explain_gap(self, extent: Extent | RowGroups | None) -> None:
        """Numbers are missing from the catalog: were they truncated, or is it damaged?"""
        row = self._engine.read(segments.find_segment, self._stream.id, self.segment)
        if row is None:
            self._raise_gone()
        elif self._is_truncated(row):
            head = "all of it was" if row.dropped else f"its head is {row.head}"
            raise TruncatedError(f"event {self.number} of segment {self.segment} of {self._stream.name} was truncated; {head}")
        elif extent is not None or (self.end is not None and row.tail >= self.end):
            raise CorruptDataError(
                f"the catalog has no extent for event {self.number} of segment {self.segment} of {self._stream.name}",
                object=self._stream.name,
            )
        else:
            raise InvalidRequestError(f"segment {self.segment} of {self._stream.name} ends at {row.tail}, before {self.end}")

    def _raise_gone(self) -> None:
        from_stream = self._engine.read(segments.list_segments, self._stream.id)
        if not from_stream:
            raise NotFoundError(f"stream {self._stream.name} was deleted")
        raise TruncatedError(f"segment {self.segment} of {self._stream.name} was truncated")

    def _look_again(self, item: Extent | RowGroups, error: CorruptDataError) -> None:
        """Bytes are missing or damaged. If the catalog names others for these numbers by now, plan again; else it is what it seems."""
        row = self._engine.read(segments.find_segment, self._stream.id, self.segment)
        if row is None:
            self._raise_gone()
        elif self._is_truncated(row):
            self._explain_gap(None)
        found = self._engine.plan(self._row, self.number, self.number + 1, 1)
        if found and found[0].object == item.object:
            place = {"stream": self._stream.name, "segment": self.segment, "first": item.first, "end": item.end}
            raise CorruptDataError(error.message, error.object, **{**error.facts, **place}) from error
        self.go_back(self.number)

    def _is_truncated(self, row: SegmentRow) -> bool:
        """Whether the next number is, and no tag keeps it."""
        if self.number >= row.head and not row.dropped:
            return False
        pins = self._engine.read(tags.get_pins, self._stream.id).get(self.segment, ())
        return not any(first <= self.number < until for first, until in pins)


def _memory(group: Sequence[Extent | RowGroups]) -> int:
    """What fetching a group takes. The bytes of row groups are there twice, until their columns are decoded."""
    return sum([item.length * 2 if isinstance(item, RowGroups) else item.length for item in group])


def _fetch(engine: Engine, group: Sequence[Extent], kind: str) -> list[pa.Buffer]:
    """The blocks' bytes, up to the first that is damaged. CorruptDataError if there is none before it."""
    key = group[0].key
    if key is None:
        raise CorruptDataError(f"the catalog names an object {group[0].object} that it does not have", object=str(group[0].object))
    try:
        buffers = engine.storage.get_ranges(key, [(extent.position, extent.length) for extent in group])
        return [_verified(extent, pa.py_buffer(data), kind) for extent, data in zip(group, buffers, strict=True)]
    except CorruptDataError:
        if len(group) == 1:
            raise
    found: list[pa.Buffer] = []
    for extent in group:
        try:
            found += _fetch(engine, [extent], kind)
        except CorruptDataError:
            if not found:
                raise
            break
    return found


def _verified(extent: Extent, data: pa.Buffer, kind: str) -> pa.Buffer:
    name = _name(extent)
    if data.size != extent.length:
        raise CorruptDataError(f"a block in {name} has {data.size} bytes instead of {extent.length}", object=name)
    if kind != "bytes":
        verify(data, extent.crc, name)
    elif google_crc32c.value(data) != extent.crc:
        raise CorruptDataError(f"a block in {name} is damaged: its checksum does not match the catalog's {extent.crc:08x}", object=name)
    return data


def _name(extent: Extent) -> str:
    return extent.key if extent.key is not None else "the catalog (inline block)"
