"""Views: segments that show numbers of other segments' logs. Making them costs a few statements, however many there are, and no bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from headwater.catalog.database import Tx
from headwater.catalog.schema import next_ids
from headwater.catalog.segments import SHIFT, SegmentRow, list_segments
from headwater.model.segmentmap import SegmentMap


class View(NamedTuple):
    """What a segment of the same number in another stream shows of a segment: numbers [low, tail), of which those from its head are
    readable. `sealed` is its epoch and time; None: it is open."""

    row: SegmentRow
    low: int
    tail: int
    sealed: tuple[int, int] | None


def add_views(tx: Tx, source: int, target: int, views: Sequence[View]) -> None:
    """Give the stream `target` views of segments of the stream `source`, which the caller has locked."""
    bases = _list_bases(tx, source)
    rows, pieces = [], []
    for view, log in zip(views, next_ids(tx, "log", len(views)), strict=True):
        row, tail = view.row, view.tail
        keys = (row.keys.start - SHIFT, row.keys.end - 1 - SHIFT)
        sealed = view.sealed or (None, None)
        head = min(row.head, tail)
        rows.append((target, row.number, log, *keys, row.made_epoch, row.made_at, *sealed, head, tail, row.appended_at, tail))
        for origin, first, until in [*bases.get(row.log, ()), (row.log, row.base_until, tail)]:
            start, end = max(first, view.low), min(until, tail)
            if start < end:
                pieces.append((log, start, end, origin))
    tx.defer(
        "INSERT INTO segment (stream, number, log, first_key, last_key, made_epoch, made_at, sealed_epoch, sealed_at, head, tail, bytes, "
        "appended_at, base_until) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0, ?, ?)",
        rows,
    )
    tx.defer("INSERT INTO base (log, first, until, source) VALUES (?, ?, ?, ?)", pieces)


def _list_bases(tx: Tx, stream: int) -> dict[int, list[tuple[int, int, int]]]:
    """(log, first, until) of what the segments of a stream show of other logs, in order, by their own logs."""
    sql = "SELECT b.log, b.source, b.first, b.until FROM segment s JOIN base b ON b.log = s.log WHERE s.stream = ? ORDER BY b.log, b.first"
    found: dict[int, list[tuple[int, int, int]]] = {}
    for log, source, first, until in tx.run(sql, (stream,)):
        found.setdefault(log, []).append((source, first, until))
    return found


def copy_segments(tx: Tx, parent: int, fork: int, numbers: dict[int, int]) -> None:
    """Give a new stream its parent's segments up to a cut, as views: no bytes are copied.

    `numbers` are the cut: these segments end there and are open in the fork; the ones before are sealed as they are. The caller has
    locked the parent.
    """
    stream_map = SegmentMap(list_segments(tx, parent))
    found = [View(row, row.head, row.tail, _sealed(row)) for row in stream_map.before(numbers)]
    found += [View(stream_map.segments[number], stream_map.segments[number].head, tail, None) for number, tail in numbers.items()]
    add_views(tx, parent, fork, found)
    tx.run("UPDATE stream SET next_segment = ? WHERE id = ?", (max(view.row.number for view in found) + 1, fork))


def _sealed(row: SegmentRow) -> tuple[int, int] | None:
    return None if row.sealed_epoch is None or row.sealed_at is None else (row.sealed_epoch, row.sealed_at)
