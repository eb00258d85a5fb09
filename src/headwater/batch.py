"""Reading in parallel: ranges of segments that travel to other processes and are read there as Arrow batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from headwater.errors import InvalidRequestError, NotFoundError, TruncatedError
from headwater.exports import Exported, as_polars
from headwater.model.arguments import MOST, check_whole, shown
from headwater.model.keys import WHOLE, KeyRange
from headwater.model.limits import PREFETCH_BYTES
from headwater.model.names import parse_stream_name
from headwater.segments.batches import Columns, batch_schema, check_columns
from headwater.segments.bounds import Choice, MayHave
from headwater.segments.engine import Engine
from headwater.segments.lanes import StreamRef
from headwater.segments.read import SegmentCursor
from headwater.streams import cuts, reading
from headwater.streams.lifecycle import open_stream


@dataclass(frozen=True)
class SegmentRange(Exported):
    """Events [start, end) of one segment. Picklable: it opens the same store where it is unpickled."""

    store: Any = field(repr=False, compare=False)
    stream: str
    segment: int
    start: int
    end: int
    stream_id: int = field(repr=False)
    #: About how many bytes they have, and the part of the key space that the segment takes: ranges that overlap there are read by number.
    bytes: int = field(default=0, repr=False, compare=False)
    keys: KeyRange = field(default=WHOLE, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_whole(self.segment, "a segment's number", most=MOST)
        check_whole(self.start, "the start of a range", most=MOST)
        check_whole(self.end, "the end of a range", most=MOST)
        if self.start > self.end:
            raise InvalidRequestError(f"a range ends at its start or behind it: the start {self.start:,} lies behind the end {self.end:,}")
        check_whole(self.stream_id, "a stream's id", most=MOST)

    @property
    def count(self) -> int:
        return self.end - self.start

    def to_batches(self, columns: Sequence[str] | None = None, *, prefetch_bytes: int = PREFETCH_BYTES) -> Iterator[pa.RecordBatch]:
        """The events in order, as record batches of these columns; by default the schema's with `_key, _time, _segment, _number`.

        About `prefetch_bytes` are fetched ahead; a batch has up to a quarter of that, and at least one block or row group.
        """
        check_whole(prefetch_bytes, "prefetch_bytes", 1)
        return self._read_chosen(columns, prefetch_bytes)

    def _read_chosen(
        self, columns: Sequence[str] | None, prefetch_bytes: int, names: Sequence[str] = (), may_have: MayHave | None = None
    ) -> Iterator[pa.RecordBatch]:
        """The same, without row groups of which `may_have` says by the bounds of the named columns that nothing in them is wanted."""
        choice = Choice(names, may_have) if may_have is not None else None
        engine = self._engine
        name, numbers = parse_stream_name(self.stream), (self.start, self.end)
        try:
            cursor, names = engine.open_cursor(name, self.stream_id, self.segment, *numbers, columns, prefetch_bytes, choice)
        except TruncatedError as error:
            raise reading.with_head(engine, self._open_stream(), error) from None
        return _batches(engine, cursor, names)

    def schema(self) -> pa.Schema:
        """The schema of the stream's own columns, as it is now."""
        return self._open_stream().schema

    def to_arrow(self, columns: Sequence[str] | None = None) -> pa.Table:
        """All of them as one table."""
        schema, batches = self._read_batches(columns)
        return pa.Table.from_batches(batches, schema=schema)

    def to_pandas(self, columns: Sequence[str] | None = None) -> Any:
        """Return the events as a pandas DataFrame."""
        return self.to_arrow(columns).to_pandas()

    def to_polars(self, columns: Sequence[str] | None = None) -> Any:
        """Return the events as a Polars DataFrame."""
        return as_polars(self.to_arrow(columns))

    def _read_batches(self, columns: Sequence[str] | None = None) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        stream = self._open_stream()
        return batch_schema(stream, check_columns(stream, columns)), self.to_batches(columns)

    @property
    def _engine(self) -> Engine:
        engine = getattr(self.store, "_engine", None)
        if not isinstance(engine, Engine):
            raise InvalidRequestError(f"a range is read from its open store, not from {shown(self.store)}: make it with stream.range()")
        return engine

    def _open_stream(self) -> StreamRef:
        stream = open_stream(self._engine, parse_stream_name(self.stream))
        if stream.id != self.stream_id:
            raise NotFoundError(f"stream {self.stream} was deleted; another has its name by now")
        return stream


@dataclass(frozen=True)
class ChunkRange:
    """Events [start, end) of one segment in one Parquet file, whose first row is number `first`."""

    url: str
    stream: str
    segment: int
    start: int
    end: int
    first: int
    bytes: int
    is_whole: bool = True

    @property
    def count(self) -> int:
        return self.end - self.start


def list_chunks(engine: Engine, stream: StreamRef, start: cuts.Place, end: cuts.Place) -> list[ChunkRange]:
    """What of a stream lies in Parquet chunks, between two places."""
    found = []
    for item in cuts.ranges(engine, stream, start, end):
        segment = item.segment.number
        for place in engine.list_chunks(stream, segment, item.start, item.end):
            bounds = max(place.first, item.start), min(place.end, item.end)
            is_whole = bounds == (place.first, place.end)
            found.append(ChunkRange(place.url, stream.name, segment, *bounds, place.first, place.bytes, is_whole))
    return found


def _batches(engine: Engine, cursor: SegmentCursor, names: list[str]) -> Iterator[pa.RecordBatch]:
    columns = Columns(names)
    while not cursor.is_done:
        batch = reading.next_batch(engine, cursor.stream, cursor)
        if batch is not None:
            yield batch.to_arrow(columns)
