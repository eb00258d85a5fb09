"""Reader groups: which segments a group is at, its committed position in each, and who reads it.

The rows of `group_segment` are the group's frontier: together they tile the key space of each stream, so they are a cut at any time. A
successor joins it only when the committed position of every predecessor is its end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headwater.catalog import segments
from headwater.catalog.database import Tx
from headwater.catalog.schema import later, next_id
from headwater.catalog.segments import SegmentRow
from headwater.errors import ConflictError, FencedError, NotFoundError
from headwater.model.keys import WHOLE, KeyRange

Ends = dict[int, dict[int, int]]


@dataclass(frozen=True)
class GroupRow:
    """A group as the catalog has it. `ends` has, for a bounded group, the numbers it stops at by stream and segment."""

    id: int
    name: str
    generation: int
    checkpoint: int
    ends: Ends | None
    streams: dict[int, str]


class Assigned(NamedTuple):
    """A segment of the frontier."""

    stream: int
    segment: int
    position: int
    done: bool
    reader: str | None
    since: int


class Turn(NamedTuple):
    """What a reader is told when it reports: its segments, and whether the group was reset, wants a checkpoint, or is at its end.

    `surplus` is how many segments it should give up; `alone` says that all segments that are left are its own.
    """

    generation: int
    checkpoint: int
    mine: list[Assigned]
    surplus: int
    finished: bool
    alone: bool


def create_group(tx: Tx, name: str, streams: dict[int, str], positions: dict[int, dict[int, int]], ends: Ends | None) -> GroupRow | None:
    """The new group at these positions; None if the name is taken."""
    made = tx.run(
        "INSERT INTO reader_group (id, name, generation, checkpoint, end_cut, created_at) VALUES (?, ?, 1, 0, ?, now_us()) "
        "ON CONFLICT (name) DO NOTHING RETURNING id",
        (next_id(tx, "group"), name, json.dumps(ends) if ends is not None else None),
    )
    if not made:
        return None
    group = made[0][0]
    tx.defer("INSERT INTO group_stream (grp, stream, name) VALUES (?, ?, ?)", [(group, *item) for item in streams.items()])
    _place(tx, group, positions)
    return find_group(tx, name)


def _place(tx: Tx, group: int, positions: dict[int, dict[int, int]]) -> None:
    tx.defer(
        "INSERT INTO group_segment (grp, stream, segment, position, done, since) VALUES (?, ?, ?, ?, 0, now_us())",
        [(group, stream, segment, number) for stream, numbers in positions.items() for segment, number in numbers.items()],
    )


def find_group(tx: Tx, name: str) -> GroupRow | None:
    rows = tx.run("SELECT id, name, generation, checkpoint, end_cut FROM reader_group WHERE name = ?", (name,))
    return _group(tx, rows[0]) if rows else None


def is_there(tx: Tx, group: int) -> bool:
    return bool(tx.run("SELECT 1 FROM reader_group WHERE id = ?", (group,)))


def _group(tx: Tx, row: tuple[int, str, int, int, str | None]) -> GroupRow:
    streams = {found[0]: found[1] for found in tx.run("SELECT stream, name FROM group_stream WHERE grp = ? ORDER BY name", (row[0],))}
    ends = None
    if row[4] is not None:
        ends = {int(stream): {int(segment): end for segment, end in found.items()} for stream, found in json.loads(row[4]).items()}
    return GroupRow(row[0], row[1], row[2], row[3], ends, streams)


def lock_group(tx: Tx, group: int) -> GroupRow:
    rows = tx.run("SELECT id, name, generation, checkpoint, end_cut FROM reader_group WHERE id = ? FOR UPDATE", (group,))
    if not rows:
        raise NotFoundError("this reader group was deleted")
    return _group(tx, rows[0])


def list_groups(tx: Tx) -> list[str]:
    return [row[0] for row in tx.run("SELECT name FROM reader_group ORDER BY name")]


def delete_group(tx: Tx, group: int) -> None:
    lock_group(tx, group)
    for table in ("group_segment", "group_reader", "group_stream"):
        tx.run(f"DELETE FROM {table} WHERE grp = ?", (group,))
    tx.run("DELETE FROM reader_group WHERE id = ?", (group,))


def _next(column: str) -> str:
    """A number above the column's that was never given before: it follows the clock, as ids do (`next_id`)."""
    return f"CASE WHEN now_us() > {column} THEN now_us() ELSE {column} + 1 END"


def reset_group(tx: Tx, group: int, positions: dict[int, dict[int, int]]) -> None:
    """Put the group at other positions. Readers go on from there; what they had not committed is theirs no more."""
    lock_group(tx, group)
    tx.run(f"UPDATE reader_group SET generation = {_next('generation')} WHERE id = ?", (group,))
    tx.run("DELETE FROM group_segment WHERE grp = ?", (group,))
    _place(tx, group, positions)


def list_frontier(tx: Tx, group: int) -> list[Assigned]:
    rows = tx.run(
        "SELECT stream, segment, position, done, reader, since FROM group_segment WHERE grp = ? ORDER BY stream, segment", (group,)
    )
    return [Assigned(row[0], row[1], row[2], bool(row[3]), row[4], row[5]) for row in rows]


def list_readers(tx: Tx, group: int) -> list[tuple[str, int]]:
    """(reader, last seen)."""
    return [(row[0], row[1]) for row in tx.run("SELECT id, seen_at FROM group_reader WHERE grp = ? ORDER BY id", (group,))]


def join_group(tx: Tx, group: int, reader: str) -> tuple[int, int, int]:
    """(this reader's generation, the group's, its last checkpoint). An older holder of the name is fenced, and its segments are free."""
    row = lock_group(tx, group)
    # Generations follow the clock, as ids do (`next_id`): none is given twice by a catalog that forgot its last commits.
    rows = tx.run(
        "INSERT INTO group_reader (grp, id, generation, seen_at, checkpoint) VALUES (?, ?, now_us(), now_us(), ?) ON CONFLICT (grp, id) "
        f"DO UPDATE SET generation = {later('group_reader', 'generation')}, seen_at = excluded.seen_at, checkpoint = excluded.checkpoint, "
        "positions = NULL RETURNING generation",
        (group, reader, row.checkpoint),
    )
    _free(tx, group, reader)
    return int(rows[0][0]), row.generation, row.checkpoint


def get_generation(tx: Tx, group: int, reader: str) -> int:
    """The generation of whoever has this name now. NotFoundError if nobody ever had it."""
    rows = tx.run("SELECT generation FROM group_reader WHERE grp = ? AND id = ?", (group, reader))
    if not rows:
        raise NotFoundError(f"this reader group has no reader {reader!r}")
    return int(rows[0][0])


def leave_group(tx: Tx, group: int, reader: str, generation: int) -> None:
    """Free the reader's segments at their committed positions, if the reader still has this generation."""
    lock_group(tx, group)
    if _holds(tx, group, reader, generation):
        _let_go(tx, group, reader)


def _let_go(tx: Tx, group: int, reader: str) -> None:
    _free(tx, group, reader)
    # The row stays, so that the generation of a name is never used twice; a reader that is not there is seen at 0.
    tx.run("UPDATE group_reader SET seen_at = 0, generation = generation + 1, positions = NULL WHERE grp = ? AND id = ?", (group, reader))


def _free(tx: Tx, group: int, reader: str) -> None:
    tx.run("UPDATE group_segment SET reader = NULL, since = now_us() WHERE grp = ? AND reader = ?", (group, reader))


def _holds(tx: Tx, group: int, reader: str, generation: int) -> bool:
    rows = tx.run("SELECT generation, seen_at FROM group_reader WHERE grp = ? AND id = ?", (group, reader))
    return bool(rows and rows[0][0] == generation and rows[0][1])


def report(tx: Tx, group: int, reader: str, generation: int, dead_after_us: int) -> Turn:
    """Say that a reader lives, let dead ones go, move the frontier on, and give the reader its share. FencedError if it lost its name."""
    row = lock_group(tx, group)
    _check_alive(tx, row, reader, generation)
    tx.run("UPDATE group_reader SET seen_at = now_us() WHERE grp = ? AND id = ?", (group, reader))
    for other in _list_dead(tx, group, dead_after_us):
        _let_go(tx, group, other)
    _advance(tx, row)
    turn, taken = _decide(tx, row, reader, list_frontier(tx, group))
    tx.defer(
        "UPDATE group_segment SET reader = ?, since = now_us() WHERE grp = ? AND stream = ? AND segment = ?",
        [(reader, group, item.stream, item.segment) for item in taken],
    )
    return turn._replace(mine=turn.mine + taken)


class News(NamedTuple):
    """What a look at a group tells a reader: whether it should report; where its segments end, which lost events it has not read, and
    whether all segments that are left are its own."""

    is_there: bool
    ends: dict[tuple[int, int], int]
    gone: list[tuple[int, int]]
    alone: bool = False


def look(
    tx: Tx, group: int, reader: str, generation: int, dead_after_us: int, known: tuple[int, int, int], held: Mapping[tuple[int, int], int]
) -> News:
    """Whether a report would tell or change anything, without changing anything: most of the time it would not.

    `known` is (the group's generation, checkpoint, surplus) as of the last report, `held` the segments the reader has, with
    the number it reads next.
    """
    rows = tx.run("SELECT id, name, generation, checkpoint, end_cut FROM reader_group WHERE id = ?", (group,))
    if not rows or not _holds(tx, group, reader, generation) or _list_dead(tx, group, dead_after_us):
        return News(True, {}, [])
    row = _group(tx, rows[0])
    frontier = list_frontier(tx, group)
    turn, taken = _decide(tx, row, reader, frontier)
    if row.generation != known[0] or set(held) != {(item.stream, item.segment) for item in turn.mine}:
        return News(True, {}, [])
    ends: dict[tuple[int, int], int] = {}
    gone = []
    is_there = bool(taken or turn.finished or known != (turn.generation, turn.checkpoint, turn.surplus))
    for stream, before, after, present in _moves(tx, row, frontier):
        is_there = is_there or before != after
        stops = (row.ends or {}).get(stream, {})
        for key, number in held.items():
            if key[0] == stream and (key[1] not in present or number < min(present[key[1]].head, stops.get(key[1], 1 << 62))):
                gone.append(key)
            elif key[0] == stream and (key[1] in stops or not present[key[1]].is_open):
                ends[key] = stops.get(key[1], present[key[1]].tail)
    return News(is_there, ends, gone, turn.alone)


def _list_dead(tx: Tx, group: int, dead_after_us: int) -> list[str]:
    rows = tx.run("SELECT id FROM group_reader WHERE grp = ? AND seen_at > 0 AND seen_at < now_us() - ?", (group, dead_after_us))
    return [row[0] for row in rows]


def _decide(tx: Tx, row: GroupRow, reader: str, frontier: Sequence[Assigned]) -> tuple[Turn, list[Assigned]]:
    """(what to tell a reader, the free segments it takes). Shares differ by one at most; who has one more already keeps it."""
    readers = [item[0] for item in list_readers(tx, row.id) if item[1]]
    live = [item for item in frontier if not item.done]
    held = {other: sum(item.reader == other for item in live) for other in readers}
    ranked = sorted(readers, key=lambda other: (-held[other], other))
    share = len(live) // len(readers) + (1 if ranked.index(reader) < len(live) % len(readers) else 0)
    mine = [item for item in live if item.reader == reader]
    free = [item for item in live if item.reader is None]
    taken = free[: max(0, share - len(mine))]
    finished = row.ends is not None and not live
    alone = len(mine) + len(taken) == len(live)
    return Turn(row.generation, row.checkpoint, mine, max(0, len(mine) - share), finished, alone), taken


def touch_reader(tx: Tx, group: int, reader: str, generation: int) -> None:
    """Say that a reader lives. FencedError if it lost its name, NotFoundError if the group is gone."""
    sql = "UPDATE group_reader SET seen_at = now_us() WHERE grp = ? AND id = ? AND generation = ? AND seen_at > 0 RETURNING id"
    if not tx.run(sql, (group, reader, generation)):
        _check_alive(tx, lock_group(tx, group), reader, generation)


def _check_alive(tx: Tx, row: GroupRow, reader: str, generation: int) -> None:
    if not _holds(tx, row.id, reader, generation):
        raise FencedError(
            f"the reader {reader!r} of group {row.name!r} was taken over, removed or timed out: this one is fenced, and stores no positions"
        )


def commit_positions(
    tx: Tx,
    group: int,
    reader: str,
    generation: int,
    group_generation: int,
    positions: dict[tuple[int, int], int],
    give: Sequence[tuple[int, int]],
    *,
    again: bool = False,
) -> None:
    """Make a reader's positions durable, then give the segments `give` up to the others.

    Given `again`, since the answer to an earlier try was lost, it recognises what was done.
    """
    row = lock_group(tx, group)
    if again:
        # A reader that is alive loses segments by its own commits alone: those it gave up, and those that it brought to their end.
        present = {(item.stream, item.segment): item for item in list_frontier(tx, group)}
        stored = {
            key for key, at in positions.items() if key not in present or (present[key].reader != reader and present[key].position >= at)
        }
        positions = {key: number for key, number in positions.items() if key not in stored}
    check_holder(tx, row, reader, generation, group_generation, positions)
    _store(tx, group, positions)
    tx.run("UPDATE group_reader SET seen_at = now_us() WHERE grp = ? AND id = ?", (group, reader))
    _advance(tx, row)
    tx.defer(
        "UPDATE group_segment SET reader = NULL, since = now_us() WHERE grp = ? AND stream = ? AND segment = ? AND reader = ?",
        [(group, *key, reader) for key in give],
    )


def check_holder(tx: Tx, row: GroupRow, reader: str, generation: int, group_generation: int, positions: dict[tuple[int, int], int]) -> None:
    """`positions` are those that moved: a segment that is done is nobody's, and its position stays."""
    _check_alive(tx, row, reader, generation)
    if row.generation != group_generation:
        raise ConflictError(f"the group {row.name!r} was reset meanwhile: the positions were not stored; read on from where it is now")
    held = {(item.stream, item.segment): item for item in list_frontier(tx, row.id) if item.reader == reader}
    for key, number in positions.items():
        if key not in held:
            raise FencedError(
                f"the reader {reader!r} of group {row.name!r} no longer holds segment {key[1]}: its positions were not stored"
            )
        if number < held[key].position:
            raise ConflictError(
                f"the reader {reader!r} of group {row.name!r} is at {held[key].position} in segment {key[1]}, behind {number}, "
                "by a transaction that was committed meanwhile: read on from there"
            )


def _store(tx: Tx, group: int, positions: dict[tuple[int, int], int]) -> None:
    tx.defer(
        "UPDATE group_segment SET position = ? WHERE grp = ? AND stream = ? AND segment = ?",
        [(number, group, *key) for key, number in positions.items()],
    )


def store_positions(tx: Tx, row: GroupRow, positions: dict[tuple[int, int], int]) -> None:
    """For a transaction: make positions durable that `check_holder` found to hold, in a locked group."""
    _store(tx, row.id, positions)
    _advance(tx, row)


def dump_positions(group_generation: int, positions: dict[tuple[int, int], int]) -> bytes:
    return json.dumps([group_generation, [[*key, number] for key, number in sorted(positions.items())]]).encode()


def _load(data: bytes | None) -> tuple[int, dict[tuple[int, int], int]]:
    assert data is not None
    group_generation, rows = json.loads(bytes(data))
    return group_generation, {(stream, segment): number for stream, segment, number in rows}


Places = dict[int, tuple[int, bool]]


def _advance(tx: Tx, row: GroupRow) -> None:
    """Mark what is read to its end, and let successors join whose every predecessor is."""
    for stream, before, after, _ in _moves(tx, row, list_frontier(tx, row.id)):
        tx.defer(
            "DELETE FROM group_segment WHERE grp = ? AND stream = ? AND segment = ?",
            [(row.id, stream, number) for number in before.keys() - after],
        )
        tx.defer(
            "UPDATE group_segment SET done = 1, reader = NULL WHERE grp = ? AND stream = ? AND segment = ?",
            [(row.id, stream, number) for number, (_, done) in after.items() if number in before and done and not before[number][1]],
        )
        tx.defer(
            "INSERT INTO group_segment (grp, stream, segment, position, done, since) VALUES (?, ?, ?, ?, ?, now_us())",
            [(row.id, stream, number, *map(int, after[number])) for number in sorted(after.keys() - before)],
        )


def _moves(tx: Tx, row: GroupRow, frontier: Sequence[Assigned]) -> list[tuple[int, Places, Places, dict[int, SegmentRow]]]:
    """(stream, its part of the frontier, where that can move to, the segments from there on); positions, and whether they are at an end."""
    by_stream: dict[int, Places] = {}
    for item in frontier:
        by_stream.setdefault(item.stream, {})[item.segment] = (item.position, item.done)
    found = []
    for stream, before in by_stream.items():
        ends = row.ends.get(stream, {}) if row.ends is not None else None
        # Numbers grow along each key, so what lies before the frontier's first is read already.
        rows = {other.number: other for other in segments.list_segments(tx, stream, first=min([*before, *(ends or {})]))}
        after = dict(before)
        while _advance_once(rows, after, ends):
            pass
        found.append((stream, before, after, rows))
    return found


def _advance_once(rows: dict[int, SegmentRow], frontier: Places, ends: dict[int, int] | None) -> bool:
    changed = False
    for number, (position, done) in list(frontier.items()):
        row = rows.get(number)
        if done or row is None:
            continue
        if ends is not None and number in ends:
            done = position >= ends[number]
        else:
            done = (not row.is_open and position >= row.tail) or (ends is not None and _is_behind(row, ends, rows))
        if done:
            frontier[number] = (position, True)
            changed = True
    if any(number not in rows and not done for number, (_, done) in frontier.items()):
        return changed  # Truncated away before it was read: its keys are unknown, so nothing of the stream goes on before a reset.
    blocked: list[SegmentRow] = []
    for number, row in sorted(rows.items()):
        if number in frontier or (ends is not None and _is_behind(row, ends, rows)):
            continue
        near = [other for other in frontier if other in rows and rows[other].keys.overlaps(row.keys)]
        if any(other > number for other in near):
            continue  # It lies before the frontier: read already.
        if not all(frontier[other][1] for other in near) or any(other.keys.overlaps(row.keys) for other in blocked):
            blocked.append(row)
            continue
        frontier[number] = (0, False)
        changed = True
    present = [rows[number].keys for number in frontier if number in rows]
    for number in [number for number, (_, done) in frontier.items() if done]:
        if number not in rows:
            is_passed = _covers(present, WHOLE)
        else:
            newer = [
                rows[other].keys for other in frontier if other > number and other in rows and rows[other].keys.overlaps(rows[number].keys)
            ]
            is_passed = _covers(newer, rows[number].keys)
        if is_passed:
            del frontier[number]
            changed = True
    return changed


def _is_behind(row: SegmentRow, ends: dict[int, int], rows: dict[int, SegmentRow]) -> bool:
    """Whether a segment lies behind the end of a bounded group."""
    # An end that is gone was truncated away: it is older than all that is left.
    return row.number not in ends and not any(end > row.number and end in rows and rows[end].keys.overlaps(row.keys) for end in ends)


def _covers(ranges: Sequence[KeyRange], whole: KeyRange) -> bool:
    at = whole.start
    for start, end in sorted(ranges):
        if start <= at:
            at = max(at, end)
    return at >= whole.end


def request_checkpoint(tx: Tx, group: int) -> int:
    """Ask every reader to say where it is; returns the request's number."""
    lock_group(tx, group)
    return int(tx.run(f"UPDATE reader_group SET checkpoint = {_next('checkpoint')} WHERE id = ? RETURNING checkpoint", (group,))[0][0])


def answer_checkpoint(tx: Tx, group: int, reader: str, generation: int, checkpoint: int, positions: dict[tuple[int, int], int]) -> None:
    """A reader's answer: what it had handed out, when it was next asked for an event."""
    row = lock_group(tx, group)
    # A reset that the reader has not heard of took its segments: where it was in them counts no more.
    held = {(item.stream, item.segment) for item in list_frontier(tx, group) if item.reader == reader}
    positions = {key: number for key, number in positions.items() if key in held}
    tx.run(
        "UPDATE group_reader SET checkpoint = ?, positions = ?, seen_at = now_us() WHERE grp = ? AND id = ? AND generation = ?",
        (checkpoint, dump_positions(row.generation, positions).decode(), group, reader, generation),
    )


def read_checkpoint(tx: Tx, group: int, checkpoint: int, dead_after_us: int) -> tuple[list[str], dict[int, dict[int, int]]]:
    """(readers that have not answered, positions by stream and segment): a cut, once nobody is missing."""
    frontier = list_frontier(tx, group)
    present = [row[0] for row in tx.run("SELECT generation FROM reader_group WHERE id = ?", (group,))]
    found: dict[int, dict[int, int]] = {}
    for item in frontier:
        found.setdefault(item.stream, {})[item.segment] = item.position
    missing = []
    rows = tx.run(
        "SELECT id, checkpoint, positions, seen_at < now_us() - ? FROM group_reader WHERE grp = ? AND seen_at > 0", (dead_after_us, group)
    )
    for reader, answered, positions, dead in rows:
        if answered < checkpoint:
            if not dead and any(item.reader == reader for item in frontier):
                missing.append(reader)
            continue
        group_generation, numbers = _load(positions.encode()) if positions else (None, {})
        if group_generation not in present:
            continue  # It answered before a reset, and is where that put it.
        for (stream, segment), number in numbers.items():
            if segment in found.get(stream, {}) and number > found[stream][segment]:
                found[stream][segment] = number
    return sorted(missing), found
