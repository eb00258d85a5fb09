"""Operations that tell how far a reader group is: its positions, its lag, its window of event time, and who holds what."""

from __future__ import annotations

from typing import NamedTuple

from headwater.catalog import extents, groups, segments, watermarks
from headwater.catalog.database import Tx
from headwater.catalog.groups import Assigned, Ends
from headwater.catalog.operations import Right, operation
from headwater.catalog.segments import SegmentRow
from headwater.model.segmentmap import Front, Numbers, SegmentMap
from headwater.streams import cuts


class Lag(NamedTuple):
    """How far a group is behind: events and bytes not committed yet, and the age of the oldest of them in seconds."""

    events: int
    bytes: int
    seconds: float


@operation("read", right=Right("read", "group"))
def list_readers(tx: Tx, group: int) -> list[str]:
    """The readers that are there now. NotFoundError if the group was deleted, as of each operation here."""
    groups.get_group(tx, group)
    return [reader for reader, seen_at in groups.list_readers(tx, group) if seen_at]


@operation("read", right=Right("read", "group"))
def positions(tx: Tx, group: int) -> Ends:
    """The committed positions by stream and segment."""
    groups.get_group(tx, group)
    return _positions(tx, group)


def _positions(tx: Tx, group: int) -> Ends:
    found: Ends = {}
    for item in groups.list_frontier(tx, group):
        found.setdefault(item.stream, {})[item.segment] = item.position
    return found


@operation("read", right=Right("read", "group"))
def frontier(tx: Tx, group: int) -> tuple[list[Assigned], dict[tuple[int, int], SegmentRow]]:
    """The segments that the group is at, and all segments of its streams by stream and number."""
    row = groups.get_group(tx, group)
    found = {(stream, segment.number): segment for stream in row.streams for segment in segments.list_segments(tx, stream)}
    return groups.list_frontier(tx, group), found


@operation("read", right=Right("read", "group"))
def is_at_tail(tx: Tx, group: int) -> bool:
    """Whether the committed positions are at the tails, or at the end of a bounded group."""
    row = groups.get_group(tx, group)
    for stream, numbers in _positions(tx, group).items():
        ends = row.ends.get(stream) if row.ends is not None else None
        if cuts.between_numbers(segments.list_segments(tx, stream), numbers, ends):
            return False
    return True


@operation("read", right=Right("read", "group"))
def lag(tx: Tx, group: int) -> Lag:
    """How far the committed positions are behind the tails, or behind the end of a bounded group."""
    row = groups.get_group(tx, group)
    events = size = 0
    oldest: int | None = None
    for stream, numbers in _positions(tx, group).items():
        rows = segments.list_segments(tx, stream)
        ends = row.ends.get(stream) if row.ends is not None else None
        for item in cuts.between_numbers(rows, numbers, ends):
            events += item.end - item.start
            size += extents.estimate_bytes(tx, item.segment, item.start, item.end)
            appended_at = extents.find_append_time(tx, item.segment, item.start)
            if appended_at is not None:
                oldest = appended_at if oldest is None else min(oldest, appended_at)
    now = tx.run("SELECT now_us()")[0][0]
    return Lag(events, size, max(0.0, (now - oldest) / 1_000_000) if oldest is not None else 0.0)


@operation("read", right=Right("read", "group"))
def time_window(tx: Tx, group: int) -> tuple[int | None, int | None]:
    """Bounds of event time at the group's position, None where unknown: no later event is older than the first bound, no committed event
    is newer than the second."""
    groups.get_group(tx, group)
    lowers: list[int | None] = []
    uppers: list[int | None] = []
    for stream, numbers in _positions(tx, group).items():
        stream_map = SegmentMap(segments.list_segments(tx, stream))
        front = stream_map.front(numbers)
        passed: int | None = None
        ahead: int | None = None
        for mark in watermarks.list_marks(tx, stream):
            if all(_is_passed(segment, number, numbers, stream_map, front) for segment, number in mark.numbers.items()):
                passed = mark.low
            if ahead is None and all(_reaches(segment, number, numbers, stream_map, front) for segment, number in mark.numbers.items()):
                ahead = mark.high
        lowers.append(passed)
        uppers.append(ahead)
    return (
        None if None in lowers else min(bound for bound in lowers if bound is not None),
        None if None in uppers else max(bound for bound in uppers if bound is not None),
    )


def _is_passed(segment: int, number: int, positions: Numbers, stream_map: SegmentMap[SegmentRow], front: Front) -> bool:
    """Whether a group at `positions` has read all before this number of the segment."""
    if segment in positions:
        return positions[segment] >= number
    return segment not in stream_map.segments or front.is_past(stream_map.segments[segment])


def _reaches(segment: int, number: int, positions: Numbers, stream_map: SegmentMap[SegmentRow], front: Front) -> bool:
    """Whether a mark at this number of the segment lies at or past the group's positions."""
    if segment in positions:
        return number >= positions[segment]
    return segment in stream_map.segments and not front.is_past(stream_map.segments[segment])
