"""Batches: events of one segment as they lie in a block or row group, as `Event` objects or as Arrow columns made on demand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from functools import lru_cache
from itertools import repeat
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.errors import InvalidRequestError
from headwater.model.arguments import items_of, shown
from headwater.model.events import Event, events_of
from headwater.model.positions import Position
from headwater.model.schemas import METADATA, TIME, fit, python_schema, upgrade
from headwater.runtime import clock
from headwater.segments.block import Chunk
from headwater.segments.lanes import StreamRef

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
        appended = self._cut(self._appended)
        # The buffer itself: `to_numpy` imports pandas.
        times = np.frombuffer(appended.buffers()[1], dtype=np.int64, count=len(appended), offset=appended.offset * 8)
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
        keys = self._chunk.keys
        return events_of(self._values(self.columns()), self._cut(keys).to_pylist() if keys is not None else None, self)

    def events_of_key(self, key: bytes) -> Iterator[Event]:
        """The events with a routing key."""
        if self._chunk.keys is None:
            return iter(())
        keys = self._cut(self._chunk.keys)
        places = np.flatnonzero(pc.fill_null(pc.equal(keys, pa.scalar(key, keys.type)), False).to_numpy(zero_copy_only=False))
        if not len(places):
            return iter(())
        return events_of(self._values(self.columns().take(pa.array(places))), repeat(key), self, places.tolist())

    def _values(self, columns: pa.RecordBatch) -> list[Any]:
        """The values of events, which were written with this schema of the stream or an older one."""
        columns = upgrade(columns, self._stream.schema)
        if self._stream.is_opaque:
            return list(columns.column(0).to_pylist())
        ours = python_schema(self._stream.schema)
        return list((columns if ours is None else columns.cast(ours, safe=False)).to_pylist())

    def columns(self) -> pa.RecordBatch:
        """The columns of the stream's schema as they were written, perhaps with an older schema."""
        return self._chunk.columns.slice(self._from, self.count)

    def append_times(self) -> list[int]:
        """When each event was appended, in microseconds."""
        appended = self._appended
        return [appended] * self.count if isinstance(appended, int) else self._cut(appended).cast(pa.int64()).to_pylist()

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
    if isinstance(value, int):
        return _numbers(np.full(count, value, dtype=np.int64), pa.int64())
    # `pa.repeat` imports pandas, where it is installed: most of the time of a group's first batch.
    text = value.encode()
    offsets = np.arange(count + 1, dtype=np.int32) * np.int32(len(text))
    return pa.Array.from_buffers(pa.string(), count, [None, pa.py_buffer(offsets), pa.py_buffer(text * count)])


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
