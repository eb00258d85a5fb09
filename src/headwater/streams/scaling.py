"""Splitting and merging segments: successors cover exactly the keys of what they replace, as the stream's next epoch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

from headwater.catalog import segments, streams
from headwater.catalog.database import Tx
from headwater.catalog.operations import Right, operation
from headwater.catalog.segments import SegmentRow
from headwater.catalog.streams import StreamRow
from headwater.errors import InvalidRequestError, NotFoundError, SealedError
from headwater.model.arguments import MOST, check_whole, items_of, shown
from headwater.model.keys import KeyRange
from headwater.model.limits import OPEN_SEGMENTS
from headwater.runtime import failpoints
from headwater.segments.engine import Engine
from headwater.segments.lanes import StreamRef
from headwater.streams.lifecycle import SCALED_KINDS


def split(engine: Engine, stream: StreamRef, number: int, parts: int) -> list[SegmentRow]:
    """Replace one open segment by `parts` equal ones; returns them."""
    return _made(engine, stream, engine.run(split_segment, stream.id, number, parts))


def merge(engine: Engine, stream: StreamRef, numbers: Collection[int]) -> list[SegmentRow]:
    """Replace open neighbours by one segment; returns it in a list."""
    given = list(items_of(numbers, "what is merged", "the numbers of two or more segments"))
    return _made(engine, stream, engine.run(merge_segments, stream.id, given))


def _made(engine: Engine, stream: StreamRef, numbers: list[int]) -> list[SegmentRow]:
    failpoints.reach("scale.committed")
    return [row for row in engine.run(segments.list_segments, stream.id) if row.number in numbers]


@operation("commit", right=Right("manage", "stream"))
def split_segment(tx: Tx, stream: int, number: int, parts: int) -> list[int]:
    """Replace one open segment by `parts` equal ones; returns their numbers."""
    check_whole(parts, "the parts that a segment is split into", 2, OPEN_SEGMENTS)
    check_whole(number, "a segment's number", most=MOST)
    found, [row] = _lock(tx, stream, [number])
    if row.keys.end - row.keys.start < parts:
        raise InvalidRequestError(f"segment {number} covers too few keys to be split into {parts}")
    return segments.replace_segments(tx, stream, epoch=found.epoch, seal=[number], ranges=row.keys.split(parts))


@operation("commit", right=Right("manage", "stream"))
def merge_segments(tx: Tx, stream: int, numbers: Collection[int]) -> list[int]:
    """Replace open neighbours by one segment; returns its number in a list."""
    given = sorted({check_whole(number, "each of the two or more segments' numbers", most=MOST) for number in numbers})
    if len(given) < 2:
        raise InvalidRequestError(f"a merge takes the numbers of two or more segments, not {shown(numbers)}")
    found, rows = _lock(tx, stream, given)
    ordered = sorted(row.keys for row in rows)
    for left, right in pairwise(ordered):
        if left.end != right.start:
            raise InvalidRequestError(f"segments {given} of {found.full_name} are not neighbours: only neighbours can be merged")
    return segments.replace_segments(tx, stream, epoch=found.epoch, seal=given, ranges=[KeyRange(ordered[0].start, ordered[-1].end)])


def _lock(tx: Tx, stream: int, numbers: Sequence[int]) -> tuple[StreamRow, list[SegmentRow]]:
    """Lock a stream of events; returns it with these segments, all of which are open."""
    row = streams.lock_stream(tx, stream)
    if row.kind not in SCALED_KINDS:
        raise InvalidRequestError(f"{row.full_name} is of kind {row.kind!r}: it has one segment, which can't be scaled")
    if row.sealed_at is not None:
        raise SealedError(f"stream {row.full_name} is sealed")
    found = [segment for number in numbers if (segment := segments.find_segment(tx, stream, number)) is not None]
    opened = {segment.number for segment in found if segment.is_open}
    for number in numbers:
        if number not in opened:
            raise NotFoundError(f"stream {row.full_name} has no open segment {number!r}")
    return row, found
