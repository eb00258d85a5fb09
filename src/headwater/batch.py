"""Reading in parallel: ranges of segments that travel to other processes and are read there as Arrow batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from headwater.catalog import segments
from headwater.errors import NotFoundError, TruncatedError
from headwater.model.names import parse_stream_name
from headwater.segments.read import SegmentCursor, batch_schema, check_columns
from headwater.streams.lifecycle import open_stream


@dataclass(frozen=True)
class SegmentRange:
    """Events [start, end) of one segment. Picklable: it opens the same store where it is unpickled."""

    store: Any = field(repr=False, compare=False)
    stream: str
    segment: int
    start: int
    end: int

    @property
    def count(self) -> int:
        return self.end - self.start

    def to_batches(self, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """The events in order, as record batches of these columns; by default the schema's with `_key, _time, _segment, _number`."""
        engine = self.store._engine
        stream = open_stream(engine, parse_stream_name(self.stream))
        names = check_columns(stream, columns)
        row = engine.read(segments.find_segment, stream.id, self.segment)
        if row is None:
            raise TruncatedError(f"segment {self.segment} of {self.stream} was truncated")
        cursor = SegmentCursor(engine, stream, self.segment, row.log, self.start, self.end)
        return _batches(cursor, names)

    def to_arrow(self, columns: Sequence[str] | None = None) -> pa.Table:
        """All of them as one table."""
        stream = open_stream(self.store._engine, parse_stream_name(self.stream))
        return pa.Table.from_batches(self.to_batches(columns), schema=batch_schema(stream, check_columns(stream, columns)))


def _batches(cursor: SegmentCursor, names: list[str]) -> Iterator[pa.RecordBatch]:
    while (batch := cursor.next_batch()) is not None:
        yield batch.to_arrow(names)


__all__ = ["NotFoundError", "SegmentRange"]
