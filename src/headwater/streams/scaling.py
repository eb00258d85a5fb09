"""Splitting and merging segments: successors cover exactly the keys of what they replace, as the stream's next epoch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import pairwise

from headwater.catalog import segments, streams
from headwater.catalog.database import Tx
from headwater.catalog.segments import SegmentRow
from headwater.errors import InvalidRequestError, NotFoundError, SealedError
from headwater.model.arguments import MOST, check_whole, items_of, shown
from headwater.model.keys import KeyRange
from headwater.model.limits import OPEN_SEGMENTS
from headwater.runtime import failpoints
from headwater.segments.engine import Engine
from headwater.segments.lanes import StreamRef


def split(engine: Engine, stream: StreamRef, number: int, parts: int) -> list[SegmentRow]:
    """Replace one open segment by `parts` equal ones; returns them."""
    check_whole(parts, "the parts that a segment is split into", 2, OPEN_SEGMENTS)
    check_whole(number, "a segment's number", most=MOST)

    def ranges(rows: list[SegmentRow]) -> list[KeyRange]:
        if rows[0].keys.end - rows[0].keys.start < parts:
            raise InvalidRequestError(f"segment {number} covers too few keys to be split into {parts}")
        return rows[0].keys.split(parts)

    return _replace(engine, stream, [number], ranges)


def merge(engine: Engine, stream: StreamRef, numbers: Collection[int]) -> list[SegmentRow]:
    """Replace open neighbours by one segment; returns it in a list."""
    items = items_of(numbers, "what is merged", "the numbers of two or more segments")
    given = [check_whole(number, "each of the two or more segments' numbers", most=MOST) for number in items]
    if len(set(given)) < 2:
        raise InvalidRequestError(f"a merge takes the numbers of two or more segments, not {shown(numbers)}")

    def ranges(rows: list[SegmentRow]) -> list[KeyRange]:
        ordered = sorted(row.keys for row in rows)
        for left, right in pairwise(ordered):
            if left.end != right.start:
                raise InvalidRequestError(
                    f"segments {sorted(set(given))} of {stream.name} are not neighbours: only neighbours can be merged"
                )
        return [KeyRange(ordered[0].start, ordered[-1].end)]

    return _replace(engine, stream, sorted(set(given)), ranges)


def _replace(
    engine: Engine, stream: StreamRef, numbers: Sequence[int], ranges: Callable[[list[SegmentRow]], list[KeyRange]]
) -> list[SegmentRow]:
    if stream.kind != "events":
        raise InvalidRequestError(f"{stream.name} is of kind {stream.kind!r}: it has one segment, which can't be scaled")

    def work(tx: Tx) -> list[int]:
        stream_row = streams.lock_stream(tx, stream.id)
        if stream_row.sealed_at is not None:
            raise SealedError(f"stream {stream.name} is sealed")
        rows = [found for number in numbers if (found := segments.find_segment(tx, stream.id, number)) is not None]
        opened = {row.number for row in rows if row.is_open}
        for number in numbers:
            if number not in opened:
                raise NotFoundError(f"stream {stream.name} has no open segment {number!r}")
        return segments.replace_segments(tx, stream.id, epoch=stream_row.epoch, seal=numbers, ranges=ranges(rows))

    made = engine.write(work)
    failpoints.reach("scale.committed")
    return [row for row in engine.read(segments.list_segments, stream.id) if row.number in made]
