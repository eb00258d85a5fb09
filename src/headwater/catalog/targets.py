"""Where a transaction's blocks land: the segments that were open when they were staged, or what has become of those.

If they were merged since, the successor takes the blocks; if they were split, the active segments *roll*: they are sealed, one sealed
segment takes the blocks, and the same ranges are opened again.
"""

from __future__ import annotations

from collections.abc import Iterable

from headwater.catalog import segments
from headwater.catalog.database import Tx
from headwater.catalog.segments import SegmentRow
from headwater.catalog.tails import Tail, Tails, Watch
from headwater.errors import HeadwaterError, NotFoundError, SealedError


class RollNeeded(Exception):
    """Some staged segment was split: prepare, then commit with others that wait for the same."""


class RouteStale(Exception):
    """A segment that nothing was staged for yet is no longer open: route the events again."""


class ScaledMeanwhile(Exception):
    """A segment was sealed while it was looked at: do it again."""


def _tail(row: SegmentRow) -> Tail:
    return Tail(row.number, row.log, row.tail, row.is_open, row.appended_at, row.claim)


def open_targets(tx: Tx, needed: Iterable[tuple[int, int]], staged: set[tuple[int, int]], watched: Iterable[Watch]) -> Tails:
    """The segments themselves, locked, if all that are needed are open still; else where their keys are now, if that takes no roll.

    Segments that are only watched are locked too, as they are.
    """
    needed = set(needed)
    found: Tails = {}
    for stream, numbers in by_stream(needed | {(watch.stream, watch.segment) for watch in watched}).items():
        rows = segments.list_segments_numbered(tx, stream, numbers)
        own = {number for number in numbers if (stream, number) in needed}
        # A segment that is only watched may be gone for good: whoever watches it finds no tail.
        numbers = sorted(own | {row.number for row in rows})
        if not numbers:
            continue
        closed = own - {row.number for row in rows if row.is_open}
        if closed:
            active = _lock_active(tx, stream)
            if any((stream, number) not in staged for number in closed):
                raise RouteStale
            taken: dict[int, Tail] = {other.number: _tail(other) for other in active}
            for number in numbers:
                row = segments.find_segment(tx, stream, number)
                if row is None:
                    raise RollNeeded
                holder = next((other for other in active if other.keys.start <= row.keys.start and row.keys.end <= other.keys.end), None)
                if number in own:
                    if holder is None:
                        raise RollNeeded
                    found[stream, number] = taken[holder.number]
                else:
                    found[stream, number] = taken.get(number) or _tail(row)
        else:
            locked = segments.lock_segments(tx, stream, numbers)
            if len(locked) < len(numbers) or not all(row.is_open for row in locked if row.number in own):
                raise ScaledMeanwhile
            found.update({(stream, row.number): _tail(row) for row in locked})
    return found


def rolled_targets(tx: Tx, needed: Iterable[tuple[int, int]], watched: Iterable[Watch]) -> tuple[Tails, dict[int, HeadwaterError]]:
    """Where the keys of staged segments are now, rolling the active segments where they were split; and the streams that are gone.

    Segments that are only watched are locked too, as they are.
    """
    needed = set(needed)
    found: Tails = {}
    gone: dict[int, HeadwaterError] = {}
    for stream, all_numbers in by_stream(needed | {(watch.stream, watch.segment) for watch in watched}).items():
        numbers = [number for number in all_numbers if (stream, number) in needed]
        try:
            active = _lock_active(tx, stream)
        except HeadwaterError as error:
            gone[stream] = error
            continue
        by_number = {row.number: row for row in active}
        holders: dict[int, list[SegmentRow]] = {}
        for number in numbers:
            row = by_number.get(number) or segments.find_segment(tx, stream, number)
            # A staged segment that was truncated away: its keys are unknown, so all ranges roll.
            holders[number] = [other for other in active if row is None or other.keys.overlaps(row.keys)]
        groups_to_roll = _components([rows for rows in holders.values() if len(rows) > 1])
        rolled = {row.number: _rolled(made) for rows in groups_to_roll for made in [segments.roll(tx, stream, rows)] for row in rows}
        targets = {row.number: _tail(row) for row in active if row.number not in rolled}
        for rows in groups_to_roll:
            shared = rolled[rows[0].number]
            for row in rows:
                targets[row.number] = shared
        found.update({(stream, number): targets[rows[0].number] for number, rows in holders.items()})
        others = [number for number in all_numbers if number not in holders]
        for row in segments.list_segments_numbered(tx, stream, others) if others else ():
            found[stream, row.number] = targets.get(row.number) or _tail(row)
    return found, gone


def _rolled(row: SegmentRow) -> Tail:
    return Tail(row.number, row.log, row.tail, row.is_open, row.appended_at, row.claim, born_at=row.made_at)


def by_stream(keys: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    """Segment numbers by stream, both ascending: the order in which they are locked."""
    found: dict[int, list[int]] = {}
    for stream, segment in sorted(set(keys)):
        found.setdefault(stream, []).append(segment)
    return found


def _lock_active(tx: Tx, stream: int) -> list[SegmentRow]:
    rows = tx.run("SELECT sealed_at, scope, name FROM stream WHERE id = ? FOR UPDATE", (stream,))
    if not rows:
        raise NotFoundError("a stream of this transaction was deleted")
    if rows[0][0] is not None:
        raise SealedError(f"stream {rows[0][1]}/{rows[0][2]} is sealed")
    numbers = [row.number for row in segments.list_open_segments(tx, stream)]
    return segments.lock_segments(tx, stream, numbers)


def _components(sets: list[list[SegmentRow]]) -> list[list[SegmentRow]]:
    """Join the sets that share a segment."""
    joined: list[dict[int, SegmentRow]] = []
    for rows in sets:
        merged = {row.number: row for row in rows}
        for other in [other for other in joined if other.keys() & merged.keys()]:
            merged.update(other)
            joined.remove(other)
        joined.append(merged)
    return [sorted(rows.values(), key=lambda row: row.number) for rows in joined]
