"""Undone places: past which number of a segment nothing of a stream is left, for good, since the stream was rolled back.

A stale place is told from a truncated one here and nowhere else. Places that are not stale are never looked up: a stale one always names
a segment that is gone, or a number past the tail of a sealed one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from headwater.catalog.database import Tx
from headwater.catalog.operations import Right, operation
from headwater.catalog.schema import next_id
from headwater.catalog.segments import SHIFT, SegmentRow, list_segments
from headwater.errors import RolledBackError
from headwater.model.cuts import Cut, StreamCut
from headwater.model.keys import KeyRange
from headwater.model.segmentmap import Front, SegmentMap

#: Of a segment that is gone as a whole, its very first place is undone too.
ALL = -1


class Gone(NamedTuple):
    """A segment that a roll-back took away, as the map of segments needs it; nothing can be read of it."""

    number: int
    keys: KeyRange
    head: int = 0
    tail: int = 0
    is_open: bool = False


def note(tx: Tx, stream: int, kept: int, numbers: Mapping[int, int], ends: Iterable[tuple[SegmentRow, int]]) -> None:
    """Note that a stream was rolled back to a cut: of each of these segments what lies past a number is undone."""
    roll_back = next_id(tx, "roll_back")
    tx.defer(
        "INSERT INTO roll_back (id, stream, cut, kept, made_at) VALUES (?, ?, ?, ?, now_us())",
        [(roll_back, stream, json.dumps(dict(numbers)), kept)],
    )
    # Of two roll-backs of one segment the one that goes back further counts.
    tx.defer(
        "INSERT INTO undone (stream, segment, first, first_key, last_key, roll_back) VALUES (?, ?, ?, ?, ?, ?) "
        "ON CONFLICT (stream, segment) DO UPDATE SET "
        "roll_back = CASE WHEN excluded.first < undone.first THEN excluded.roll_back ELSE undone.roll_back END, "
        "first = CASE WHEN excluded.first < undone.first THEN excluded.first ELSE undone.first END",
        [(stream, row.number, first, row.keys.start - SHIFT, row.keys.end - 1 - SHIFT, roll_back) for row, first in ends],
    )


def is_suspect(rows: Mapping[int, SegmentRow], numbers: Mapping[int, int]) -> bool:
    """Whether a place names a segment that is not there, or a number past its tail: it may be undone then."""
    return any(segment not in rows or number > rows[segment].tail for segment, number in numbers.items())


def find_error(tx: Tx, stream: int, numbers: Mapping[int, int], rows: Sequence[SegmentRow] | None = None) -> RolledBackError | None:
    """The error for a place in a stream, if some of it is undone; None if nothing is. `rows` are the segments that are there."""
    found = _find(tx, stream, numbers)
    if not found:
        return None
    stream_map = SegmentMap(list_segments(tx, stream) if rows is None else rows)
    gone = [
        Gone(segment, KeyRange(first + SHIFT, last + SHIFT + 1))
        for segment, _, first, last, _ in found
        if segment not in stream_map.segments
    ]
    named = {
        segment: min(number, stream_map.segments[segment].tail) for segment, number in numbers.items() if segment in stream_map.segments
    }
    cuts, kept = _list_roll_backs(tx, {row[4] for row in found})
    reached = stream_map.reached(named, gone)
    # Who reads one segment knows no place in the others: there it is where the stream was rolled back to.
    known, ended = Front([*(stream_map.segments[segment] for segment in named), *gone]), stream_map.reached(cuts)
    reached |= {number: ended[number] for number, row in stream_map.segments.items() if not known.covers(row.keys)}
    place = stream_map.frontier(reached, {*named, *cuts})
    [(store, scope, name)] = tx.run("SELECT (SELECT id FROM store), scope, name FROM stream WHERE id = ?", (stream,))
    return RolledBackError(
        f"{scope}/{name} was rolled back to before this place: read on from the cut of this error"
        + (f"; what was rolled back is in {', '.join(kept)}" if kept else ""),
        Cut(store, {f"{scope}/{name}": StreamCut(stream, place)}),
    )


@operation("read", right=Right("read", "stream"))
def explain(tx: Tx, stream: int, numbers: Mapping[int, int]) -> RolledBackError | None:
    """The error for a place in a stream, if some of it is undone."""
    return find_error(tx, stream, numbers)


@operation("statement", right=Right("read", "stream"))
def list_gone(tx: Tx, stream: int) -> list[int]:
    """The numbers of the segments of a stream that roll-backs took away as a whole."""
    return [row[0] for row in tx.run("SELECT segment FROM undone WHERE stream = ? AND first = ? ORDER BY segment", (stream, ALL))]


def _find(tx: Tx, stream: int, numbers: Mapping[int, int]) -> list[tuple[int, int, int, int, int]]:
    """(segment, first, first key, last key, roll-back) of those segments of a place where it is undone."""
    found = []
    named = sorted(numbers)
    for start in range(0, len(named), 10_000):
        some = named[start : start + 10_000]
        marks = ", ".join("?" * len(some))
        sql = f"SELECT segment, first, first_key, last_key, roll_back FROM undone WHERE stream = ? AND segment IN ({marks})"
        found += [(row[0], row[1], row[2], row[3], row[4]) for row in tx.run(sql, (stream, *some)) if numbers[row[0]] > row[1]]
    return found


def _list_roll_backs(tx: Tx, ids: Iterable[int]) -> tuple[dict[int, int], list[str]]:
    """The cuts of roll-backs as one, and the full names of the streams that have what was rolled back."""
    numbers: dict[int, int] = {}
    names = []
    for id in sorted(ids):
        sql = "SELECT r.cut, s.scope, s.name FROM roll_back r LEFT JOIN stream s ON s.id = r.kept WHERE r.id = ?"
        for cut, scope, name in tx.run(sql, (id,)):
            numbers |= {int(segment): number for segment, number in json.loads(cut).items()}
            if scope is not None:
                names.append(f"{scope}/{name}")
    return numbers, names
