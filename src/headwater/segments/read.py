"""Reading segments: plan extents in the catalog, fetch and verify their blocks, hand them out in order.

Numbers are checked to follow each other without a gap, whatever the catalog and storage say. What was truncated under a reader raises
TruncatedError; what is named and missing is corruption.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa

from headwater.catalog import segments
from headwater.catalog.extents import Extent
from headwater.catalog.segments import SegmentRow
from headwater.errors import CorruptDataError, InvalidRequestError, NotFoundError, TruncatedError
from headwater.model.events import Event, events_of
from headwater.model.limits import MIB, PREFETCH_BYTES
from headwater.model.positions import Position
from headwater.model.schemas import METADATA, TIME, python_schema, upgrade
from headwater.runtime import clock
from headwater.runtime.workers import Task
from headwater.segments.block import DecodedBlock, decode, verify
from headwater.segments.engine import Engine
from headwater.segments.lanes import StreamRef

_FETCH_BYTES = 2 * MIB
_DEFAULT_METADATA = ("_key", "_time", "_segment", "_number")


class Batch:
    """Events of one segment with consecutive numbers, as they lie in one block."""

    __slots__ = ("_block", "_from", "_stream", "appended_at", "count", "first", "segment")

    def __init__(self, stream: StreamRef, segment: int, extent: Extent, block: DecodedBlock, start: int, end: int) -> None:
        self._stream = stream
        self._block = block
        self._from = max(start - extent.first, 0)
        self.segment = segment
        self.first = extent.first + self._from
        self.count = min(end, extent.end) - self.first
        self.appended_at = extent.appended_at

    @property
    def end(self) -> int:
        return self.first + self.count

    @property
    def schema(self) -> pa.Schema:
        return self._stream.schema

    def time_at(self, index: int) -> datetime:
        times = self._block.chunk.times
        if times is not None and times[self._from + index].is_valid:
            return clock.to_datetime(times[self._from + index].value)
        return clock.to_datetime(self.appended_at)

    def position_at(self, index: int) -> Position:
        return Position(self.segment, self.first + index)

    def events(self) -> Iterator[Event]:
        columns = self._columns()
        if self._stream.is_opaque:
            values = columns.column(0).to_pylist()
        else:
            ours = python_schema(self._stream.schema)
            values = (columns if ours is None else columns.cast(ours, safe=False)).to_pylist()
        keys = self._block.chunk.keys
        return events_of(values, self._cut(keys).to_pylist() if keys is not None else None, self)

    def to_arrow(self, columns: Sequence[str]) -> pa.RecordBatch:
        """The named columns, of the stream's schema or of METADATA."""
        data = self._columns()
        arrays = [self._metadata(name) if name.startswith("_") else data.column(name) for name in columns]
        return pa.RecordBatch.from_arrays(arrays, schema=batch_schema(self._stream, columns))

    def _columns(self) -> pa.RecordBatch:
        return upgrade(self._block.chunk.columns.slice(self._from, self.count), self._stream.schema)

    def _cut(self, array: pa.Array) -> pa.Array:
        return array.slice(self._from, self.count)

    def _metadata(self, name: str) -> pa.Array:
        chunk = self._block.chunk
        if name == "_key":
            return self._cut(chunk.keys) if chunk.keys is not None else pa.nulls(self.count, pa.binary())
        if name == "_number":
            return _numbers(np.arange(self.first, self.end, dtype=np.int64), pa.int64())
        if name == "_segment":
            return _numbers(np.full(self.count, self.segment, dtype=np.int64), pa.int64())
        if name == "_stream":
            return pa.repeat(self._stream.name, self.count)
        if name == "_time" and chunk.times is not None:
            times = self._cut(chunk.times)
            return times.fill_null(pa.scalar(self.appended_at, pa.int64()).cast(TIME)) if times.null_count else times
        return _numbers(np.full(self.count, self.appended_at, dtype=np.int64), TIME)


def _numbers(values: np.ndarray[Any, np.dtype[np.int64]], kind: pa.DataType) -> pa.Array:
    # Over the buffer, since `pa.array` looks at each value for nulls, and a cast copies.
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


def check_columns(stream: StreamRef, columns: Sequence[str] | None) -> list[str]:
    """The columns to read: those asked for, or all of the schema with `_key, _time, _segment, _number`."""
    if columns is None:
        return [*stream.schema.names, *_DEFAULT_METADATA]
    if isinstance(columns, str):
        raise InvalidRequestError(f"columns is a list of names, not the text {columns!r}")
    for name in columns:
        if name not in METADATA and stream.schema.get_field_index(name) < 0:
            known = ", ".join([*stream.schema.names, *METADATA])
            raise InvalidRequestError(f"stream {stream.name} has no column {name!r}; there are: {known}")
    return list(columns)


def batch_schema(stream: StreamRef, columns: Sequence[str]) -> pa.Schema:
    return pa.schema(
        [pa.field(name, METADATA[name], nullable=name == "_key") if name in METADATA else stream.schema.field(name) for name in columns]
    )


class SegmentCursor:
    """Reads one segment from a number on, up to `end`, or along its tail if `end` is None."""

    def __init__(self, engine: Engine, stream: StreamRef, row: SegmentRow, start: int, end: int | None) -> None:
        self._engine = engine
        self._stream = stream
        self._row = row
        self.segment = row.number
        self.number = start
        self.end = end
        self._planned = start
        self._ready: deque[tuple[Extent, pa.Buffer]] = deque()
        self._fetching: deque[tuple[list[Extent], Task[list[pa.Buffer]]]] = deque()
        self._fetching_bytes = 0
        self._extents: deque[Extent] = deque()

    @property
    def is_done(self) -> bool:
        return self.end is not None and self.number >= self.end

    def next_time(self) -> int | None:
        """When the next block was appended; None if there is none now."""
        if self._ready:
            return self._ready[0][0].appended_at
        if self._fetching:
            return self._fetching[0][0][0].appended_at
        if not self._extents:
            self._plan()
        return self._extents[0].appended_at if self._extents else None

    def next_block(self) -> tuple[Extent, pa.Buffer] | None:
        """The next extent with its verified bytes; None if there is none now."""
        if self.is_done:
            return None
        if not self._ready:
            self._fill()
        if not self._ready:
            return None
        extent, data = self._ready.popleft()
        if not extent.first <= self.number < extent.end:
            self._explain_gap(extent)
        self.number = min(extent.end, self.end) if self.end is not None else extent.end
        return extent, data

    def next_batch(self) -> Batch | None:
        start = self.number
        found = self.next_block()
        if found is None:
            return None
        extent, data = found
        name = _name(extent)
        block = decode(data, self._schema, name)
        if block.chunk.count != extent.count:
            raise CorruptDataError(f"a block in {name} has {block.chunk.count} events, the catalog says {extent.count}", object=name)
        if block.schema_version > self._stream.schema_version:
            # The schema was changed while a follower reads: its events have the newer columns from here on.
            self._stream = self._stream._replace(schema=self._schema(block.schema_version), schema_version=block.schema_version)
        return Batch(self._stream, self.segment, extent, block, start, self.number)

    def _schema(self, version: int) -> pa.Schema:
        return self._engine.schema(self._stream.id, version)

    def _plan(self) -> None:
        end = self.end if self.end is not None else 1 << 62
        if self._planned >= end:
            return
        found = self._engine.plan(self._row, self._planned, end)
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
        self._extents.extend(found)

    def _fill(self) -> None:
        if not self._extents and not self._fetching:
            self._plan()
        while self._extents and self._fetching_bytes < PREFETCH_BYTES and (not self._ready or self._extents[0].data is None):
            group = self._next_group()
            if group[0].data is not None:
                # Inline blocks came with the plan. They wait their turn behind what is being fetched.
                if self._fetching:
                    self._extents.extendleft(reversed(group))
                    break
                self._ready.extend((extent, _verified(extent, pa.py_buffer(extent.data), self._stream.kind)) for extent in group)
                continue
            if self._ready:
                self._extents.extendleft(reversed(group))
                break
            self._fetching.append((group, self._engine.workers.submit(_fetcher(self._engine, group, self._stream.kind))))
            self._fetching_bytes += sum(extent.length for extent in group)
        if not self._ready and self._fetching:
            group, task = self._fetching.popleft()
            self._fetching_bytes -= sum(extent.length for extent in group)
            try:
                buffers = task.result()
            except CorruptDataError:
                self._explain_missing(group)
                raise
            self._ready.extend(zip(group, buffers, strict=True))

    def _next_group(self) -> list[Extent]:
        """The next extents that are inline, or that lie close together in one object."""
        group = [self._extents.popleft()]
        size = group[0].length
        while self._extents:
            extent, last = self._extents[0], group[-1]
            if extent.object != last.object or size + extent.length > _FETCH_BYTES:
                break
            if extent.object is not None and not 0 <= extent.position - (last.position + last.length) <= 64 * 1024:
                break
            size += extent.length
            group.append(self._extents.popleft())
        return group

    def _explain_gap(self, extent: Extent | None) -> None:
        """Numbers are missing from the catalog: were they truncated, or is it damaged?"""
        row = self._engine.read(segments.find_segment, self._stream.id, self.segment)
        if row is None:
            self._raise_gone()
        elif self.number < row.head:
            raise TruncatedError(
                f"event {self.number} of segment {self.segment} of {self._stream.name} was truncated; its head is {row.head}"
            )
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

    def _explain_missing(self, group: Sequence[Extent]) -> None:
        """Bytes are missing or damaged: if the catalog no longer names them, they were truncated or moved meanwhile."""
        row = self._engine.read(segments.find_segment, self._stream.id, self.segment)
        if row is None:
            self._raise_gone()
        elif self.number < row.head:
            self._explain_gap(None)


def _fetcher(engine: Engine, group: list[Extent], kind: str) -> Callable[[], list[pa.Buffer]]:
    def fetch() -> list[pa.Buffer]:
        key = group[0].key
        if key is None:
            raise CorruptDataError(f"the catalog names an object {group[0].object} that it does not have", object=str(group[0].object))
        start = group[0].position
        data = pa.py_buffer(engine.storage.get(key, start, group[-1].position + group[-1].length - start))
        return [_verified(extent, data.slice(extent.position - start, extent.length), kind) for extent in group]

    return fetch


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
