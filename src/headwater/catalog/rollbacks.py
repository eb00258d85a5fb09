"""Rolling back: a stream ends at a cut again, and another stream has what it was.

The segments from the cut on move with their logs to the other stream. The stream gets views of those that the cut names, which end there
for good, and opens new segments under numbers that were never used. So no position ever means two events, and no bytes are copied.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from headwater.catalog import keeps, undone
from headwater.catalog.database import Tx
from headwater.catalog.journals import in_lists
from headwater.catalog.segments import SegmentRow, insert_segments
from headwater.catalog.streams import StreamRow
from headwater.catalog.views import View, add_views
from headwater.errors import ConflictError, InvalidRequestError
from headwater.model.cuts import Cut, StreamCut
from headwater.model.segmentmap import Front, SegmentMap
from headwater.runtime import failpoints


class Parted(NamedTuple):
    """The segments of a stream that lie before a cut, at it, and past it."""

    before: list[SegmentRow]
    at: list[SegmentRow]
    past: list[SegmentRow]


def part(stream: StreamRow, rows: Sequence[SegmentRow], numbers: dict[int, int]) -> Parted:
    """Divide segments by a cut. InvalidRequestError unless whatever precedes a segment before the cut lies before the cut too."""
    stream_map = SegmentMap(rows)
    before = stream_map.before(numbers)
    at = [stream_map.segments[number] for number in sorted(numbers)]
    named = {row.number for row in (*before, *at)}
    front = Front(at)
    for row in before:
        if any(number < row.number for number in front.over(row.keys)):
            raise InvalidRequestError(
                f"this cut of {stream.full_name} lies past segment {row.number}, and before the end of one that precedes it"
            )
    return Parted(before, at, [row for row in rows if row.number not in named])


def check_free(tx: Tx, stream: StreamRow, rows: Sequence[SegmentRow], numbers: dict[int, int], parted: Parted) -> None:
    """ConflictError if a tag, a keep or the end of a reader group lies past the cut."""
    stream_map = SegmentMap(rows)
    past = {row.number for row in parted.past}

    def lies_past(place: dict[int, int]) -> bool:
        return not past.isdisjoint(place) or stream_map.passes(place, numbers)

    tagged = "SELECT name, cut FROM tag WHERE expires_at IS NULL AND name IN (SELECT tag FROM pin WHERE stream = ?) ORDER BY name"
    ends = "SELECT g.name, g.end_cut FROM reader_group g JOIN group_stream s ON s.grp = g.id WHERE s.stream = ? AND g.end_cut IS NOT NULL"
    tag_rows, floors, groups = tx.run_all([(tagged, (stream.id,)), keeps.floors_of(stream.id), (f"{ends} ORDER BY g.name", (stream.id,))])
    found = [f"tag {name!r}" for name, cut in tag_rows if any(map(lies_past, _places(cut, stream.id)))]
    found += [f"keep {floor.name!r}" for floor in keeps.to_floors(floors) if lies_past(floor.numbers)]
    found += [f"end of reader group {name!r}" for name, end in groups if lies_past(_numbers(json.loads(end)[str(stream.id)]))]
    if found:
        raise ConflictError(f"{stream.full_name} can't be rolled back to before the {', the '.join(found)}: remove it first")


def _places(cut: str, stream: int) -> list[dict[int, int]]:
    return [dict(part.segments) for part in Cut.parse(cut).streams.values() if part.id == stream]


def _numbers(found: dict[str, int]) -> dict[int, int]:
    """Numbers by segment, as JSON has them."""
    return {int(segment): number for segment, number in found.items()}


def roll_back(tx: Tx, stream: StreamRow, kept: StreamRow, rows: Sequence[SegmentRow], numbers: dict[int, int], parted: Parted) -> None:
    """Move what lies past a cut to the new stream `kept`, as the stream's next epoch. The caller has locked the stream and all segments."""
    opened = [row for row in rows if row.is_open]
    epoch = stream.epoch + 1
    [[now]] = tx.run("SELECT now_us()")
    # Times grow along a key, whatever the clock does.
    made_at = max(now, *(max(row.appended_at, row.made_at) + 1 for row in rows))
    lowest: dict[int, int] = dict(tx.run("SELECT segment, min(first) FROM pin WHERE stream = ? GROUP BY segment", (stream.id,)))
    for marks, values in in_lists([row.number for row in (*parted.at, *parted.past)]):
        tx.run(
            "UPDATE segment SET stream = ?, claim = NULL, sealed_epoch = COALESCE(sealed_epoch, ?), sealed_at = COALESCE(sealed_at, ?) "
            f"WHERE stream = ? AND number IN ({marks})",
            (kept.id, epoch, made_at, stream.id, *values),
        )
    # What the stream still has as it was, the kept one sees, and the other way round.
    add_views(tx, stream.id, kept.id, [View(row, row.head, row.tail, _sealed(row)) for row in parted.before])
    ended = [View(row, min(row.head, lowest.get(row.number, row.head)), numbers[row.number], (epoch, made_at)) for row in parted.at]
    add_views(tx, kept.id, stream.id, ended)
    failpoints.reach("rollback.moved")
    tx.run("UPDATE stream SET epoch = ? WHERE id = ?", (epoch, stream.id))
    insert_segments(tx, stream.id, epoch=epoch, made_at=made_at, ranges=sorted(row.keys for row in opened), claim=opened[0].claim)
    # The kept stream has the segments that were there, and was sealed in the same moment.
    tx.run(
        "UPDATE stream SET next_segment = ?, epoch = ?, sealed_at = ? WHERE id = ?", (rows[-1].number + 1, stream.epoch, made_at, kept.id)
    )
    undone.note(
        tx,
        stream.id,
        kept.id,
        numbers,
        [*((row, numbers[row.number]) for row in parted.at), *((row, undone.ALL) for row in parted.past)],
    )
    _forget_what_was_known(tx, stream, rows, numbers, parted)
    failpoints.reach("rollback.applied")


def _sealed(row: SegmentRow) -> tuple[int, int]:
    assert row.sealed_epoch is not None and row.sealed_at is not None, "what lies before a cut was sealed"
    return row.sealed_epoch, row.sealed_at


def _forget_what_was_known(tx: Tx, stream: StreamRow, rows: Sequence[SegmentRow], numbers: dict[int, int], parted: Parted) -> None:
    """Forget pins of running readers, marks of event time and samples of load past the cut."""
    past = [row.number for row in parted.past]
    for marks, values in in_lists(past):
        tx.run(f"DELETE FROM pin WHERE stream = ? AND segment IN ({marks})", (stream.id, *values))
    tx.defer(
        "UPDATE pin SET until = ?, first = CASE WHEN first < ? THEN first ELSE ? END WHERE stream = ? AND segment = ? AND until > ?",
        [(at, at, at, stream.id, segment, at) for segment, at in numbers.items()],
    )
    stream_map = SegmentMap(rows)
    marked = tx.run("SELECT number, numbers FROM watermark WHERE stream = ?", (stream.id,))
    gone = set(past)
    stale = [
        (stream.id, number)
        for number, place in ((number, _numbers(json.loads(text))) for number, text in marked)
        if not gone.isdisjoint(place) or _passes(stream_map, place, numbers)
    ]
    tx.defer("DELETE FROM watermark WHERE stream = ? AND number = ?", stale)
    # Writers note their times again. Until then nothing is promised of what will come.
    tx.defer("DELETE FROM noted_time WHERE stream = ?", [(stream.id,)])
    tx.defer("DELETE FROM stream_load WHERE stream = ?", [(stream.id,)])


def _passes(stream_map: SegmentMap[SegmentRow], place: dict[int, int], numbers: dict[int, int]) -> bool:
    return any(at > numbers.get(segment, at) for segment, at in place.items() if segment in stream_map.segments)


def move_groups(tx: Tx, stream: StreamRow, rows: Sequence[SegmentRow], numbers: dict[int, int], parted: Parted) -> None:
    """Put the reader groups of a stream that are past the cut back to it, and tell all of its groups' readers to look again.

    Groups are locked last of all, by their ids.
    """
    stream_map = SegmentMap(rows)
    past = {row.number for row in parted.past}
    sql = "SELECT id FROM reader_group WHERE id IN (SELECT grp FROM group_stream WHERE stream = ?) ORDER BY id FOR UPDATE"
    groups = [row[0] for row in tx.run(sql, (stream.id,))]
    if not groups:
        return
    sql = "SELECT grp, segment, position FROM group_segment WHERE stream = ? ORDER BY grp, segment"
    places: dict[int, dict[int, int]] = {}
    for group, segment, position in tx.run(sql, (stream.id,)):
        places.setdefault(group, {})[segment] = position
    moved: list[tuple[int, int, int, int]] = []
    # Of readers that handed out what is undone, too: their positions are refused, and they are told why.
    above = "CASE WHEN now_us() > generation THEN now_us() ELSE generation + 1 END"
    tx.defer(f"UPDATE reader_group SET generation = {above} WHERE id = ?", [(group,) for group in groups])
    [(store,)] = tx.run("SELECT id FROM store")
    for group, place in places.items():
        is_past = stream_map.passes(place, numbers)
        if past.isdisjoint(place) and not is_past:
            continue
        tx.defer("DELETE FROM group_segment WHERE grp = ? AND stream = ?", [(group, stream.id)])
        back = stream_map.earlier(place, numbers)
        moved += [(group, stream.id, segment, at) for segment, at in back.items()]
        if not is_past:
            continue
        cut = Cut(store, {stream.full_name: StreamCut(stream.id, back)})
        tx.defer("UPDATE reader_group SET rolled_generation = generation, rolled_to = ? WHERE id = ?", [(str(cut), group)])
    tx.defer("INSERT INTO group_segment (grp, stream, segment, position, done, since) VALUES (?, ?, ?, ?, 0, now_us())", moved)
