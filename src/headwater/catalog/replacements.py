"""Replacements: streams that took the name of another one, and which places of the old stream hold in the new one.

A place holds if it lies before the point where the new stream was forked from the old one. Forks keep the numbers of their parents.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple

from headwater.catalog import streams, undone
from headwater.catalog.database import Tx
from headwater.catalog.operations import Right, operation
from headwater.catalog.segments import list_segments
from headwater.catalog.streams import StreamRow
from headwater.catalog.undone import Gone
from headwater.errors import RolledBackError
from headwater.model.segmentmap import SegmentMap


class Moved(NamedTuple):
    """A place of a stream in the one that has its name now; `holds` is False if the place lay further on."""

    numbers: dict[int, int]
    holds: bool


class Onward(NamedTuple):
    """The stream that has another one's name now, where a reader of the other one reads on in it, and whether all it read holds there."""

    stream: StreamRow
    numbers: dict[int, int]
    holds: bool


def note_fork(tx: Tx, fork: int, parent: int, numbers: Mapping[int, int]) -> None:
    """Note where a fork parts from its parent."""
    tx.defer("INSERT INTO fork_point (stream, parent, numbers) VALUES (?, ?, ?)", [(fork, parent, json.dumps(dict(numbers)))])


def note(tx: Tx, stream: int, successor: int) -> None:
    """Note that a stream has the name of another one from now on."""
    sql = "SELECT numbers FROM fork_point WHERE stream = ? AND parent = ?"
    rows = tx.run(sql, (successor, stream))
    tx.run("INSERT INTO replacement (stream, successor, numbers) VALUES (?, ?, ?)", (stream, successor, rows[0][0] if rows else None))


@operation("read", right=Right("read", "stream"))
def find_successor(tx: Tx, stream: int, name: str) -> StreamRow | None:
    """The stream that has a name now which was this stream's; None if no other stream took it by a replacement."""
    while rows := tx.run("SELECT successor FROM replacement WHERE stream = ?", (stream,)):
        [(stream,)] = rows
        found = tx.run(*streams.looked_up(stream))
        if found and (row := StreamRow(*found[0])).full_name == name:
            return row
    return None


@operation("read", right=Right("read", "stream"))
def find_onward(tx: Tx, stream: int, name: str, read: Mapping[int, int], newest: int, key: bytes | None) -> Onward | None:
    """Where a reader goes on that read a stream up to these numbers, if another stream has the name by now; None if none has.

    Segments up to `newest` that `read` lacks lay before the reader's start. With a routing key the reader reads that key's segments only.
    """
    row = find_successor(tx, stream, name)
    if row is None:
        return None
    error = undone.find_error(tx, stream, {segment: number for segment, number in read.items() if number})
    if error is not None:
        moved = follow(tx, stream, row.id, _part_of(error, stream))
        assert moved is not None, "the successor was found before"
        return Onward(row, SegmentMap(list_segments(tx, row.id)).readable(moved.numbers), False)
    [(successor, text)] = tx.run("SELECT successor, numbers FROM replacement WHERE stream = ?", (stream,))
    new = SegmentMap(list_segments(tx, successor))
    if text is None:
        found = Moved(new.head(), False)
    else:
        fork = _to_numbers(text)
        old = {segment.number: segment for segment in list_segments(tx, stream, with_dropped=True)}
        # What both streams had when they parted. Of it each may have truncated some since.
        both = {number: segment for number, segment in new.segments.items() if number in fork} | {s.number: s for s in new.before(fork)}
        stream_map = SegmentMap({**both, **old}.values())
        limits = stream_map.reached(fork)
        reached = {}
        for number, segment in stream_map.segments.items():
            if number in read:
                reached[number] = read[number]
            elif number not in old or (key is not None and not segment.keys.covers(key)):
                reached[number] = limits[number]
            else:
                reached[number] = segment.tail if number <= newest else segment.head
        shared = SegmentMap([*stream_map.before(fork), *(stream_map.segments[number] for number in fork if number in stream_map.segments)])
        place = shared.frontier({number: min(reached[number], limits[number]) for number in shared.segments}, fork)
        found = Moved(place, all(at <= limits[number] for number, at in reached.items()))
    if successor != row.id:
        further = follow(tx, successor, row.id, found.numbers)
        assert further is not None, "the successor's successors were found before"
        found = Moved(further.numbers, found.holds and further.holds)
    if not found.holds:
        found = Moved(SegmentMap(list_segments(tx, row.id)).readable(found.numbers), False)
    return Onward(row, *found)


def find_parted(tx: Tx, stream: int, numbers: Mapping[int, int]) -> tuple[StreamRow, bool] | None:
    """The stream that took a stream's name, if one did, and whether one of these numbers lies past the point where the two part."""
    rows = tx.run("SELECT successor, numbers FROM replacement WHERE stream = ?", (stream,))
    if not rows:
        return None
    is_past = True
    if rows[0][1] is not None:
        fork = _to_numbers(rows[0][1])
        limits = SegmentMap(list_segments(tx, stream, with_dropped=True)).reached(fork)
        # A segment that is gone was truncated or rolled back if its number is not above the fork's.
        is_past = any(at > limits[number] if number in limits else number > max(fork) for number, at in numbers.items())
    while rows:
        successor = rows[0][0]
        rows = tx.run("SELECT successor FROM replacement WHERE stream = ?", (successor,))
    return streams.get_stream(tx, successor), is_past


def _part_of(error: RolledBackError, stream: int) -> dict[int, int]:
    """The numbers of an error's cut for a stream."""
    assert error.cut is not None, "each such error has a cut"
    [part] = [part for part in error.cut.streams.values() if part.id == stream]
    return dict(part.segments)


def _to_numbers(text: str) -> dict[int, int]:
    return {int(segment): number for segment, number in json.loads(text).items()}


def follow(tx: Tx, stream: int, successor: int, numbers: Mapping[int, int]) -> Moved | None:
    """A place of a stream in one that took its name, if need be over others that had it meanwhile; None if it never did."""
    found = Moved(dict(numbers), True)
    while stream != successor:
        # A place that a roll-back took away before the replacement holds nowhere.
        error = undone.find_error(tx, stream, found.numbers)
        if error is not None:
            found = Moved(_part_of(error, stream), False)
        rows = tx.run("SELECT successor, numbers FROM replacement WHERE stream = ?", (stream,))
        if not rows:
            return None
        fork = None if rows[0][1] is None else _to_numbers(rows[0][1])
        moved = _step(tx, stream, rows[0][0], found.numbers, fork)
        found = Moved(moved.numbers, found.holds and moved.holds)
        stream = rows[0][0]
    return found


def _step(tx: Tx, stream: int, successor: int, numbers: dict[int, int], fork: dict[int, int] | None) -> Moved:
    stream_map = SegmentMap(list_segments(tx, successor))
    if fork is None:
        return Moved(stream_map.head(), False)
    shared = {segment.number for segment in stream_map.before(fork)} | fork.keys()
    # What precedes the fork and was truncated in the new stream is gone there, and older than all that the fork names.
    past = {
        segment
        for segment, number in numbers.items()
        if number > fork.get(segment, number) or (segment not in shared and (segment in stream_map.segments or segment > max(fork)))
    }
    if not past:
        return Moved(numbers, True)
    rows = {row.number: row for row in list_segments(tx, stream, with_dropped=True)}
    own = past - fork.keys()
    if own - rows.keys():
        return Moved(fork, False)  # The old stream was deleted: nobody knows the keys.
    named = {segment: min(number, fork.get(segment, number)) for segment, number in numbers.items() if segment not in own}
    limits = stream_map.reached(fork)
    reached = stream_map.reached(named, [Gone(segment, rows[segment].keys) for segment in own])
    place = stream_map.frontier({number: min(at, limits[number]) for number, at in reached.items()}, {*named, *fork})
    return Moved(place, False)
