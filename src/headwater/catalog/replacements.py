"""Replacements: streams that took the name of another one, and which places of the old stream hold in the new one.

A place holds if it lies before the point where the new stream was forked from the old one. Forks keep the numbers of their parents.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple

from headwater.catalog.database import Tx
from headwater.catalog.segments import list_segments
from headwater.catalog.undone import Gone
from headwater.model.segmentmap import SegmentMap


class Moved(NamedTuple):
    """A place of a stream in the one that has its name now; `holds` is False if the place lay further on."""

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


def follow(tx: Tx, stream: int, successor: int, numbers: Mapping[int, int]) -> Moved | None:
    """A place of a stream in one that took its name, if need be over others that had it meanwhile; None if it never did."""
    found = Moved(dict(numbers), True)
    while stream != successor:
        rows = tx.run("SELECT successor, numbers FROM replacement WHERE stream = ?", (stream,))
        if not rows:
            return None
        fork = None if rows[0][1] is None else {int(segment): number for segment, number in json.loads(rows[0][1]).items()}
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
