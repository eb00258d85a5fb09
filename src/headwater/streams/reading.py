"""Reading a whole stream: every segment after its predecessors, segments side by side in the order of their appends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from headwater.catalog import segments, streams
from headwater.catalog.database import Tx
from headwater.catalog.segments import SegmentRow
from headwater.errors import NotFoundError, TruncatedError
from headwater.segments.engine import Engine
from headwater.segments.lanes import StreamRef
from headwater.segments.read import Batch, SegmentCursor
from headwater.streams import cuts
from headwater.streams.cuts import Place, Range
from headwater.streams.lineage import Lineage

_LONGEST_WAIT_SECONDS = 1.0


def read_batches(engine: Engine, stream: StreamRef, start: Place, end: Place, columns: Sequence[str] | None = None) -> Iterator[Batch]:
    """The batches between two places, each segment's in order; with these columns only, if they are named."""
    return _bounded(engine, stream, cuts.ranges(engine, stream, start, end), columns)


def _bounded(engine: Engine, stream: StreamRef, ranges: list[Range], columns: Sequence[str] | None) -> Iterator[Batch]:
    lineage = _lineage(ranges)
    reading: set[SegmentCursor] = set()
    while lineage or reading:
        reading.update(SegmentCursor(engine, stream, item.segment, item.start, item.end, columns) for item in lineage.take_ready())
        try:
            cursor = _earliest(reading)
            batch = cursor.next_batch()
        except TruncatedError as error:
            raise _with_head(engine, stream, error) from None
        if cursor.is_done:
            reading.remove(cursor)
            lineage.finish(cursor.segment)
        if batch is not None:
            yield batch


def _lineage(ranges: Iterable[Range]) -> Lineage:
    lineage = Lineage()
    for item in sorted(ranges, key=lambda item: item.segment.number):
        lineage.add(item)
    return lineage


def _earliest(reading: set[SegmentCursor]) -> SegmentCursor:
    if len(reading) == 1:
        return next(iter(reading))
    return min(reading, key=lambda cursor: (cursor.next_time() or 1 << 62, cursor.segment))


def _with_head(engine: Engine, stream: StreamRef, error: TruncatedError) -> TruncatedError:
    return TruncatedError(error.message, cuts.head(engine, stream))


def follow_batches(engine: Engine, stream: StreamRef, start: Place) -> Iterator[Batch | None]:
    """The batches from a place on, for ever: None whenever there is nothing for a while. Ends when the stream is sealed and read."""
    ranges = cuts.open_ranges(engine, stream, start)
    return _following(engine, stream, _lineage(ranges), max((item.segment.number for item in ranges), default=-1))


def _following(engine: Engine, stream: StreamRef, lineage: Lineage, newest: int) -> Iterator[Batch | None]:
    reading: set[SegmentCursor] = set()
    while True:
        seen = engine.changes.version()
        for item in lineage.take_ready():
            end = item.end if not item.segment.is_open else None
            reading.add(SegmentCursor(engine, stream, item.segment, item.start, end))
        found = False
        tails = None
        for cursor in sorted(reading, key=lambda cursor: cursor.segment):
            if len(reading) > 4:
                # With many segments one look at all their tails is cheaper than a plan for each.
                tails = tails if tails is not None else dict(engine.look(_tails, stream))
                if tails.get(cursor.segment, 1 << 62) <= cursor.number:
                    continue
            try:
                batch = None if cursor.is_done else cursor.next_batch()
            except TruncatedError as error:
                raise _with_head(engine, stream, error) from None
            if batch is not None:
                found = True
                yield batch
        if found:
            continue
        sealed, rows = engine.read(_look, stream)
        progressed = False
        for cursor in list(reading):
            row = rows.get(cursor.segment)
            if row is None or cursor.number < row.head:
                # If the segment is gone, nobody knows whether we had read all of it: going on quietly might skip events.
                raise _with_head(engine, stream, TruncatedError(f"segment {cursor.segment} of {stream.name} was truncated"))
            if not row.is_open and cursor.number >= row.tail:
                progressed = True
                reading.remove(cursor)
                lineage.finish(cursor.segment)
        for number in range(newest + 1, max(rows) + 1):
            row = rows.get(number)
            if row is None or row.head:
                raise _with_head(engine, stream, TruncatedError(f"segment {number} of {stream.name} was truncated before it was read"))
            progressed = True
            lineage.add(Range(row, row.head, row.tail))
        newest = max(newest, *rows)
        if not reading and not lineage and sealed:
            return
        if not progressed:
            engine.changes.wait(seen, _LONGEST_WAIT_SECONDS)
            yield None


def get_single_segment(engine: Engine, stream: StreamRef) -> SegmentRow:
    """The one segment of a stream that can't scale."""
    rows = engine.look(segments.list_segments, stream.id)
    if not rows:
        raise NotFoundError(f"stream {stream.name} was deleted")
    return rows[0]


def _tails(tx: Tx, stream: StreamRef) -> list[tuple[int, int]]:
    return [(row.number, row.tail) for row in segments.list_open_segments(tx, stream.id)]


def _look(tx: Tx, stream: StreamRef) -> tuple[bool, dict[int, SegmentRow]]:
    rows = {row.number: row for row in segments.list_segments(tx, stream.id)}
    if not rows:
        raise NotFoundError(f"stream {stream.name} was deleted")
    return streams.get_stream(tx, stream.id).sealed_at is not None, rows
