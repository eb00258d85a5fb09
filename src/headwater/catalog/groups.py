"""Reader groups: which segments a group is at, its committed position in each, and who reads it.

The rows of `group_segment` are the group's frontier: together they tile the key space of each stream, so they are a cut at any time. A
successor joins it only when the committed position of every predecessor is its end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headwater.catalog import replacements, segments, undone
from headwater.catalog.database import Row, Statement, Tx
from headwater.catalog.operations import Right, operation
from headwater.catalog.schema import later, next_id
from headwater.catalog.segments import SegmentRow
from headwater.errors import ConflictError, FencedError, NotFoundError, RolledBackError
from headwater.model.arguments import MOST, check_whole
from headwater.model.cuts import Cut, StreamCut
from headwater.model.limits import READER_SECONDS
from headwater.model.names import parse_word
from headwater.model.segmentmap import Progress, SegmentMap

_DEAD_AFTER_US = int(READER_SECONDS * 1_000_000)

Ends = dict[int, dict[int, int]]
#: A stream and one of its segments.
Key = tuple[int, int]


@dataclass(frozen=True)
class GroupRow:
    """A group as the catalog has it.

    A bounded group has `ends`: the numbers it stops at by stream and segment. A stream that `ends` lacks has no end.
    """

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


_GROUP = "SELECT id, name, generation, checkpoint, end_cut FROM reader_group"
_STREAMS = "SELECT stream, name FROM group_stream"


@operation("read")
def find_group(tx: Tx, name: str) -> GroupRow | None:
    streams = (f"{_STREAMS} WHERE grp = (SELECT id FROM reader_group WHERE name = ?) ORDER BY name", (name,))
    rows, streams_of = tx.run_all([(f"{_GROUP} WHERE name = ?", (name,)), streams])
    return _to_group(rows[0], streams_of) if rows else None


def get_group(tx: Tx, group: int) -> GroupRow:
    return _get(*tx.run_all(_group(group)))


def lock_group(tx: Tx, group: int) -> GroupRow:
    return _get(*tx.run_all(_group(group, " FOR UPDATE")))


def _group(group: int, locking: str = "") -> list[Statement]:
    """The statements that look up a group, for `_get`."""
    return [(f"{_GROUP} WHERE id = ?{locking}", (group,)), (f"{_STREAMS} WHERE grp = ? ORDER BY name", (group,))]


def _get(rows: Sequence[Row], streams: Sequence[Row]) -> GroupRow:
    if not rows:
        raise NotFoundError("this reader group was deleted")
    return _to_group(rows[0], streams)


def _to_group(row: Row, streams: Sequence[Row]) -> GroupRow:
    ends = None
    if row[4] is not None:
        ends = {int(stream): {int(segment): end for segment, end in found.items()} for stream, found in json.loads(row[4]).items()}
    return GroupRow(row[0], row[1], row[2], row[3], ends, {found[0]: found[1] for found in streams})


@operation("statement")
def list_groups(tx: Tx) -> list[str]:
    return [row[0] for row in tx.run("SELECT name FROM reader_group ORDER BY name")]


@operation("commit", right=Right("manage", "group"))
def delete_group(tx: Tx, group: int) -> None:
    lock_group(tx, group)
    for table in ("group_segment", "group_reader", "group_stream"):
        tx.run(f"DELETE FROM {table} WHERE grp = ?", (group,))
    tx.run("DELETE FROM reader_group WHERE id = ?", (group,))


@operation("read", right=Right("read", "group"))
def explain_reset(tx: Tx, group: int, generation: int, handed: Mapping[Key, int]) -> RolledBackError | None:
    """Why a group is no longer in a generation that a reader knows, if a roll-back or a replacement is why: of a stream of which the group
    was past the cut, or the reader, which handed out events up to these numbers that were not committed."""
    rows = tx.run("SELECT rolled_generation, rolled_to, name FROM reader_group WHERE id = ?", (group,))
    if rows and rows[0][0] > generation:
        return RolledBackError(
            f"a stream was rolled back to before what the reader group {rows[0][2]!r} had read: it goes on at the cut of this error",
            Cut.parse(rows[0][1]),
        )
    places: dict[int, dict[int, int]] = {}
    for (stream, segment), number in handed.items():
        if number:
            places.setdefault(stream, {})[segment] = number
    for stream, place in places.items():
        moved = replacements.find_parted(tx, stream, place)
        error = undone.find_error(tx, stream, place)
        # The reader knows only its own segments: the group's place says where all are read on.
        if moved is not None and (moved[1] or error is not None):
            successor, _ = moved
            return RolledBackError(
                f"another stream has the name {successor.full_name} by now, without what was read: read on from the cut of this error",
                _place_in(tx, group, successor.id, successor.full_name),
            )
        if error is not None:
            assert error.cut is not None
            [(name, _)] = error.cut.streams.items()
            return RolledBackError(error.message, _place_in(tx, group, stream, name))
    return None


def _place_in(tx: Tx, group: int, stream: int, name: str) -> Cut:
    """A group's place in one of its streams."""
    [(store,)] = tx.run("SELECT id FROM store")
    rows = tx.run("SELECT segment, position FROM group_segment WHERE grp = ? AND stream = ?", (group, stream))
    return Cut(store, {name: StreamCut(stream, dict(rows))})


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
    return [_to_assigned(row) for row in rows]


def _to_assigned(row: Row) -> Assigned:
    return Assigned(row[0], row[1], row[2], bool(row[3]), row[4], row[5])


def _with_tails(group: int) -> Statement:
    """The statement that looks up the frontier together with the tail of each segment that is still there."""
    return (
        "SELECT g.stream, g.segment, g.position, g.done, g.reader, g.since, s.tail FROM group_segment g "
        "LEFT JOIN segment s ON s.stream = g.stream AND s.number = g.segment WHERE g.grp = ?",
        (group,),
    )


def list_readers(tx: Tx, group: int) -> list[tuple[str, int]]:
    """(reader, last seen)."""
    return [(row[0], row[1]) for row in tx.run("SELECT id, seen_at FROM group_reader WHERE grp = ? ORDER BY id", (group,))]


@operation("commit", repeatable=True, right=Right("read", "group"))
def join_group(tx: Tx, group: int, reader: str) -> tuple[int, int, int]:
    """(this reader's generation, the group's, its last checkpoint). An older holder of the name is fenced, and its segments are free."""
    parse_word(reader, "reader")
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


@operation("statement", right=Right("read", "group"))
def get_generation(tx: Tx, group: int, reader: str) -> int:
    """The generation of whoever has this name now. NotFoundError if nobody ever had it."""
    rows = tx.run("SELECT generation FROM group_reader WHERE grp = ? AND id = ?", (group, reader))
    if not rows:
        raise NotFoundError(f"this reader group has no reader {reader!r}")
    return int(rows[0][0])


@operation("commit", repeatable=True, right=Right("read", "group"))
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
    return _is_alive(tx.run(*_seat(group, reader)), generation)


def _seat(group: int, reader: str) -> Statement:
    """The statement that looks up a reader, for `_is_alive`."""
    return "SELECT generation, seen_at FROM group_reader WHERE grp = ? AND id = ?", (group, reader)


def _is_alive(rows: Sequence[Row], generation: int) -> bool:
    return bool(rows and rows[0][0] == generation and rows[0][1])


@operation("commit", repeatable=True, right=Right("read", "group"))
def report(tx: Tx, group: int, reader: str, generation: int) -> Turn:
    """Say that a reader lives, let dead ones go, move the frontier on, and give the reader its share. FencedError if it lost its name."""
    row = lock_group(tx, group)
    _check_alive(tx, row, reader, generation)
    tx.defer("UPDATE group_reader SET seen_at = now_us() WHERE grp = ? AND id = ?", [(group, reader)])
    for other in _list_dead(tx, group):
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


@operation("read", right=Right("read", "group"))
def look(tx: Tx, group: int, reader: str, generation: int, known: tuple[int, int, int], held: Mapping[Key, int]) -> News:
    """Whether a report would tell or change anything, without changing anything: most of the time it would not.

    `known` is (the group's generation, checkpoint, surplus) as of the last report, `held` the segments the reader has, with
    the number it reads next.
    """
    alive, dead, *found = tx.run_all([_seat(group, reader), _dead(group), *_group(group)])
    # The rows of a group's readers are deleted with the group.
    if not _is_alive(alive, generation) or dead:
        return News(True, {}, [])
    row = _get(*found)
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


def _list_dead(tx: Tx, group: int) -> list[str]:
    return [row[0] for row in tx.run(*_dead(group))]


def _dead(group: int) -> Statement:
    return "SELECT id FROM group_reader WHERE grp = ? AND seen_at > 0 AND seen_at < now_us() - ?", (group, _DEAD_AFTER_US)


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


@operation("commit", repeatable=True, right=Right("read", "group"))
def touch_reader(tx: Tx, group: int, reader: str, generation: int) -> None:
    """Say that a reader lives. FencedError if it lost its name, NotFoundError if the group is gone."""
    sql = "UPDATE group_reader SET seen_at = now_us() WHERE grp = ? AND id = ? AND generation = ? AND seen_at > 0 RETURNING id"
    if not tx.run(sql, (group, reader, generation)):
        _check_alive(tx, lock_group(tx, group), reader, generation)


def _check_alive(tx: Tx, row: GroupRow, reader: str, generation: int) -> None:
    if not _holds(tx, row.id, reader, generation):
        raise _fenced(row, reader)


def _fenced(row: GroupRow, reader: str) -> FencedError:
    return FencedError(
        f"the reader {reader!r} of group {row.name!r} was taken over, removed or timed out: this one is fenced, and stores no positions"
    )


@operation("commit", repeatable=True, right=Right("read", "group"))
def commit_positions(
    tx: Tx, group: int, reader: str, generation: int, group_generation: int, positions: Mapping[Key, int], give: Sequence[Key]
) -> None:
    """Make a reader's positions durable, then give the segments `give` up to the others.

    ConflictError, and nothing is stored, if a position lies past the tail or below what is durable already. Run again after a lost
    answer, this stores what it stored before, and passes over the segments that the reader lost by it.
    """
    row = lock_group(tx, group)
    seat = _look_at_seat(tx, row, reader, generation, group_generation, positions)
    _check_tails(positions, seat.tails)
    lost = {key: at for key, at in positions.items() if key not in seat.held}
    kept = {key: at for key, at in positions.items() if key in seat.held}
    _check_held(row, reader, seat, kept)
    _check_lost(tx, row, reader, seat, lost)
    _store(tx, group, kept)
    tx.defer("UPDATE group_reader SET seen_at = now_us() WHERE grp = ? AND id = ?", [(group, reader)])
    _advance(tx, row)
    tx.defer(
        "UPDATE group_segment SET reader = NULL, since = now_us() WHERE grp = ? AND stream = ? AND segment = ? AND reader = ?",
        [(group, *key, reader) for key in give],
    )


class _Seat(NamedTuple):
    """What a live reader sees of its group: the frontier, the part of it that it holds, and the tails of the frontier's segments."""

    frontier: dict[Key, Assigned]
    held: dict[Key, Assigned]
    tails: dict[Key, int]


def _look_at_seat(tx: Tx, row: GroupRow, reader: str, generation: int, group_generation: int, positions: Mapping[Key, int]) -> _Seat:
    """The reader's seat in a locked group. FencedError if the reader lost its name, ConflictError if the group was reset, RolledBackError
    if positions of the reader were undone."""
    alive, rows = tx.run_all([_seat(row.id, reader), _with_tails(row.id)])
    if not _is_alive(alive, generation):
        raise _fenced(row, reader)
    if row.generation != group_generation:
        error = explain_reset(tx, row.id, group_generation, positions)
        if error is not None:
            raise error
        raise ConflictError(f"the group {row.name!r} was reset meanwhile: the positions were not stored; read on from where it is now")
    frontier = {(found[0], found[1]): _to_assigned(found) for found in rows}
    held = {key: item for key, item in frontier.items() if item.reader == reader}
    return _Seat(frontier, held, {(found[0], found[1]): found[6] for found in rows if found[6] is not None})


def _check_tails(positions: Mapping[Key, int], tails: Mapping[Key, int]) -> None:
    """ConflictError if a position lies past the tail of its segment: all events up to there would be skipped."""
    for key, number in positions.items():
        check_whole(number, "a reader's position", most=MOST)
        if number > tails.get(key, MOST):
            raise ConflictError(
                f"no position was stored: {number} in segment {key[1]} lies past its tail {tails[key]}, where no event ever was, or the "
                "catalog went back to before it; read on from where the group is"
            )


def _check_held(row: GroupRow, reader: str, seat: _Seat, positions: Mapping[Key, int]) -> None:
    """ConflictError if a position is below the durable one, FencedError if the reader does not hold its segment."""
    for key, number in positions.items():
        if key not in seat.held:
            raise _not_held(row, reader, key)
        if number < seat.held[key].position:
            raise _moved_on(row, reader, key, seat.held[key].position, number)


def _check_lost(tx: Tx, row: GroupRow, reader: str, seat: _Seat, positions: Mapping[Key, int]) -> None:
    """FencedError or ConflictError unless positions in segments that a live reader no longer holds are durable already.

    The reader loses a segment by its own commits alone: a commit gave the segment up, or brought it to its end.
    """
    for key, number in positions.items():
        item = seat.frontier.get(key)
        if item is not None and not item.done:
            # Given up. Another reader may have gone on from there.
            end = number if item.position >= number else None
        elif item is not None:
            end = item.position
        else:
            end = _find_end(tx, row, seat, key, number)
        if end is None or number > end:
            raise _not_held(row, reader, key)
        if number < end:
            raise _moved_on(row, reader, key, end, number)


def _find_end(tx: Tx, row: GroupRow, seat: _Seat, key: Key, number: int) -> int | None:
    """The end of a segment that all of the group is past; None if the group was never there. A truncated one ended at `number`."""
    newest = max((segment for stream, segment in seat.frontier if stream == key[0]), default=-1)
    if key[1] > newest:
        return None
    found = segments.find_segment(tx, *key)
    if found is None:
        return number
    return (row.ends or {}).get(key[0], {}).get(key[1], found.tail)


def _not_held(row: GroupRow, reader: str, key: Key) -> FencedError:
    return FencedError(f"the reader {reader!r} of group {row.name!r} no longer holds segment {key[1]}: its positions were not stored")


def _moved_on(row: GroupRow, reader: str, key: Key, position: int, number: int) -> ConflictError:
    return ConflictError(
        f"the reader {reader!r} of group {row.name!r} is at {position} in segment {key[1]}, behind {number}, "
        "by a transaction that was committed meanwhile: read on from there"
    )


def check_holder(
    tx: Tx, row: GroupRow, reader: str, generation: int, group_generation: int, positions: Mapping[Key, int]
) -> dict[Key, Assigned]:
    """For a transaction: the frontier. FencedError or ConflictError unless the reader may store these positions.

    None of them may lie past a tail. They are those that moved: a segment that is done is nobody's, and its position stays.
    """
    seat = _look_at_seat(tx, row, reader, generation, group_generation, positions)
    _check_tails(positions, seat.tails)
    _check_held(row, reader, seat, positions)
    return seat.frontier


def _store(tx: Tx, group: int, positions: Mapping[Key, int]) -> None:
    tx.defer(
        "UPDATE group_segment SET position = ? WHERE grp = ? AND stream = ? AND segment = ?",
        [(number, group, *key) for key, number in positions.items()],
    )


def store_positions(tx: Tx, row: GroupRow, positions: Mapping[Key, int]) -> None:
    """For a transaction: make positions durable that `check_holder` found to hold, in a locked group."""
    _store(tx, row.id, positions)
    _advance(tx, row)


def _dump_positions(group_generation: int, positions: Mapping[Key, int]) -> str:
    return json.dumps([group_generation, [[*key, number] for key, number in sorted(positions.items())]])


def _load_positions(text: str) -> tuple[int, dict[Key, int]]:
    group_generation, rows = json.loads(text)
    return group_generation, {(stream, segment): number for stream, segment, number in rows}


Places = dict[int, Progress]


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
        by_stream.setdefault(item.stream, {})[item.segment] = Progress(item.position, item.done)
    # A stream that the end of a bounded group does not name has no end.
    ends_of = {stream: row.ends.get(stream) if row.ends is not None else None for stream in by_stream}
    # Numbers grow along each key, so what lies before the frontier's first is read already.
    looks = [segments.listed(stream, min([*before, *(ends_of[stream] or {})])) for stream, before in by_stream.items()]
    found = []
    for (stream, before), listed in zip(by_stream.items(), tx.run_all(looks) if looks else [], strict=True):
        ends = ends_of[stream]
        rows = {other.number: other for other in map(segments.to_row, listed)}
        found.append((stream, before, SegmentMap(rows.values()).advance(before, ends), rows))
    return found


@operation("commit", repeatable=True, right=Right("read", "group"))
def request_checkpoint(tx: Tx, group: int) -> int:
    """Ask every reader to say where it is; returns the request's number."""
    lock_group(tx, group)
    return int(tx.run(f"UPDATE reader_group SET checkpoint = {_next('checkpoint')} WHERE id = ? RETURNING checkpoint", (group,))[0][0])


@operation("commit", repeatable=True, right=Right("read", "group"))
def answer_checkpoint(tx: Tx, group: int, reader: str, generation: int, checkpoint: int, positions: Mapping[Key, int]) -> None:
    """A reader's answer: what it had handed out, when it was next asked for an event.

    ConflictError, and nothing is stored, if a position lies past the tail, or nobody asked for this checkpoint.
    """
    row = lock_group(tx, group)
    if checkpoint > row.checkpoint:
        raise ConflictError(f"nobody asked the group {row.name!r} for checkpoint {checkpoint}; the last one is {row.checkpoint}")
    rows = tx.run(*_with_tails(group))
    # A reset that the reader has not heard of took its segments: where it was in them counts no more.
    held = {(found[0], found[1]) for found in rows if found[4] == reader}
    positions = {key: number for key, number in positions.items() if key in held}
    _check_tails(positions, {(found[0], found[1]): found[6] for found in rows if found[6] is not None})
    tx.defer(
        "UPDATE group_reader SET checkpoint = ?, positions = ?, seen_at = now_us() WHERE grp = ? AND id = ? AND generation = ?",
        [(checkpoint, _dump_positions(row.generation, positions), group, reader, generation)],
    )


@operation("read", right=Right("read", "group"))
def read_checkpoint(tx: Tx, group: int, checkpoint: int) -> tuple[list[str], dict[int, dict[int, int]]]:
    """(readers that have not answered, positions by stream and segment): a cut, once nobody is missing."""
    answers = (
        "SELECT id, checkpoint, positions, seen_at < now_us() - ? FROM group_reader WHERE grp = ? AND seen_at > 0",
        (_DEAD_AFTER_US, group),
    )
    generations, rows = tx.run_all([("SELECT generation FROM reader_group WHERE id = ?", (group,)), answers])
    present = [row[0] for row in generations]
    frontier = list_frontier(tx, group)
    found: dict[int, dict[int, int]] = {}
    for item in frontier:
        found.setdefault(item.stream, {})[item.segment] = item.position
    missing = []
    for reader, answered, positions, dead in rows:
        if answered < checkpoint:
            if not dead and any(item.reader == reader for item in frontier):
                missing.append(reader)
            continue
        group_generation, numbers = _load_positions(positions) if positions else (None, {})
        if group_generation not in present:
            continue  # It answered before a reset, and is where that put it.
        for (stream, segment), number in numbers.items():
            if segment in found.get(stream, {}) and number > found[stream][segment]:
                found[stream][segment] = number
    return sorted(missing), found
