"""Extents: which block holds which numbers of a log. Planning a read, finding a time, deleting what was truncated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headwater.catalog.database import Database, Row, Statement, Tx
from headwater.catalog.operations import Right, operation
from headwater.catalog.segments import SegmentRow, find_piece, list_pieces
from headwater.catalog.streams import StreamRow, to_stream_and_segment, with_segment
from headwater.errors import CorruptDataError
from headwater.model.limits import SLICE_ROWS
from headwater.model.names import StreamName
from headwater.model.numbers import Numbers

#: What an extent is: a block as it was appended, a Parquet chunk, or raw bytes in a chunk.
BLOCK, PARQUET, RAW = 0, 1, 2


@dataclass(slots=True)
class Extent:
    """Numbers [first, first + count) of a log, and where they are: `data` if inline, else `length` bytes of object `key`.

    A chunk (`form` above 0) also has its bytes before compression, and when its last event was appended. A fork may need only the
    numbers below `limit`: what lies behind it in the same bytes is its parent's.
    """

    first: int
    count: int
    length: int
    crc: int
    appended_at: int
    position: int
    object: int | None
    key: str | None
    data: bytes | None
    form: int = BLOCK
    raw: int | None = None
    last_at: int | None = None
    limit: int | None = None

    @property
    def end(self) -> int:
        end = self.first + self.count
        return end if self.limit is None else min(end, self.limit)

    @property
    def bytes(self) -> int:
        """Its size as it was appended."""
        return self.length if self.raw is None else self.raw


def plan(database: Database, log: int, start: int, end: int, limit: int) -> list[Extent]:
    """The extents that hold numbers [start, end) of a log, in order; at most `limit` of them. One statement, so one consistent look."""
    return [Extent(*row) for row in database.query(*planned(("?", (log,)), start, end, limit))]


@operation("statement", right=Right("read", "stream"))
def plan_segment(tx: Tx, stream: int, segment: int, start: int, end: int, limit: int, is_own: bool = False) -> list[Extent]:
    """The first extents, in order and at most `limit`, that hold numbers [start, end) of a segment. Empty if the segment is gone.

    All of them are in one log: in the log of a fork's parent, if that holds `start`. Plan again from the end of the last one. With `is_own`
    the caller knows that `start` is in the segment's own log, which is found faster.
    """
    if is_own:
        own = "(SELECT log FROM segment WHERE stream = ? AND number = ?)", (stream, segment)
        return [Extent(*row) for row in tx.run(*planned(own, start, end, limit))]
    return _to_extents(tx.run(*_plan_of(stream, segment, start, end, limit)))


@operation("statement", right=Right("read", "stream"))
def open_range(tx: Tx, name: StreamName, stream: int, segment: int, start: int, end: int, limit: int) -> OpenRange | None:
    """Find the stream of a name and one of its segments, and plan the segment of the stream with this id. None without such a name.

    The two statements take one round trip, and do not see one consistent state.
    """
    rows, extents = tx.run_all([with_segment(name, segment), _plan_of(stream, segment, start, end, limit)])
    return OpenRange(*to_stream_and_segment(rows[0]), _to_extents(extents)) if rows else None


@operation("statement", right=Right("read", "stream"))
def find_extents(tx: Tx, stream: int, runs: Sequence[Numbers]) -> list[tuple[int, Extent]]:
    """The extents in segments' own logs that hold some of these runs of numbers, each with the place of the run; in no order.

    A fork's numbers that are in its parent's logs have none here.
    """
    found: list[tuple[int, Extent]] = []
    statements = []
    for start in range(0, len(runs), _RUNS_AT_ONCE):
        some = runs[start : start + _RUNS_AT_ONCE]
        size = next(size for size in _RUN_SIZES if size >= len(some))
        values = [value for place, run in enumerate(some, start) for value in (place, run.segment, run.first, run.end)]
        # Runs of no segment fill up to one of a few sizes, so that prepared statements are used again.
        values += [0, -1, 0, 0] * (size - len(some))
        statements.append((_FIND_EXTENTS.format(", ".join([_RUN_MARKS] * size)), (*values, stream)))
    for rows in tx.run_all(statements):
        found += [(row[0], Extent(*row[1:])) for row in rows]
    return found


_RUN_SIZES = (1, 4, 16, 64, 256)
_RUNS_AT_ONCE = _RUN_SIZES[-1]
_RUN_MARKS = "(CAST(? AS BIGINT), CAST(? AS BIGINT), CAST(? AS BIGINT), CAST(? AS BIGINT))"
_FIND_EXTENTS = (
    "SELECT w.column1, e.first, e.count, e.length, e.crc, e.appended_at, e.position, e.object, o.key, b.data, e.form, e.raw, e.last_at "
    "FROM (VALUES {}) AS w JOIN segment s ON s.stream = ? AND s.number = w.column2 JOIN extent e ON e.log = s.log "
    "AND e.first >= COALESCE((SELECT max(first) FROM extent WHERE log = s.log AND first <= w.column3), w.column3) "
    "AND e.first < w.column4 AND e.first + e.count > w.column3 "
    "LEFT JOIN object o ON o.id = e.object LEFT JOIN inline_block b ON e.object IS NULL AND b.log = e.log AND b.first = e.first"
)


class OpenRange(NamedTuple):
    """What is needed to begin reading some numbers of a segment."""

    stream: StreamRow
    segment: SegmentRow | None
    extents: list[Extent]


def _plan_of(stream: int, segment: int, start: int, end: int, limit: int) -> Statement:
    # The log is a subquery, so that the extents are found in the order of the index and the search ends at the limit.
    piece = "FROM segment s LEFT JOIN base p ON p.log = s.log AND p.first <= ? AND p.until > ? WHERE s.stream = ? AND s.number = ?"
    values = start, start, stream, segment
    log, until = (f"(SELECT COALESCE(p.source, s.log) {piece})", values), (f"(SELECT p.until {piece})", values)
    return planned(log, start, end, limit, until)


def _to_extents(rows: Sequence[Row]) -> list[Extent]:
    """The extents of a plan, up to the number where the log stops being the segment's."""
    found = [Extent(*row) for row in rows]
    return [extent for extent in found if extent.limit is None or extent.first < extent.limit]


def planned(log: Statement, start: int, end: int, limit: int, until: Statement = ("NULL", ())) -> Statement:
    """The statement that finds the first extents of a log that hold numbers [start, end); `Extent` takes its rows."""
    return (
        "SELECT e.first, e.count, e.length, e.crc, e.appended_at, e.position, e.object, o.key, b.data, e.form, e.raw, e.last_at, "
        f"{until[0]} FROM extent e "
        "LEFT JOIN object o ON o.id = e.object LEFT JOIN inline_block b ON e.object IS NULL AND b.log = e.log AND b.first = e.first "
        f"WHERE e.log = {log[0]} AND e.first >= COALESCE((SELECT max(first) FROM extent WHERE log = {log[0]} AND first <= ?), ?) "
        "AND e.first < ? AND e.first + e.count > ? ORDER BY e.first LIMIT ?",
        (*until[1], *log[1], *log[1], start, start, end, start, limit),
    )


def is_counted(row: SegmentRow, start: int) -> bool:
    """Whether all that a segment has from a number on is its own, and readable: then its row says how large it is."""
    return start >= max(row.head, row.base_until)


def count_bytes(row: SegmentRow, start: int, end: int) -> int:
    """About how many bytes numbers [start, end) have, if they are counted."""
    return row.bytes * (end - start) // max(1, row.tail - max(row.head, row.base_until))


def estimate_bytes(tx: Tx, row: SegmentRow, start: int, end: int, *, is_held: bool = False) -> int:
    """About how many bytes numbers [start, end) have as they were appended; `is_held` if some may be below the head, and kept."""
    if is_counted(row, start) and not is_held:
        return count_bytes(row, start, end)
    # What a fork has of its parent is not counted in its row, and what is held below the head is counted with it.
    size = 0
    for log, first, until in list_pieces(tx, row):
        low, high = max(first, start), min(until, end)
        if low < high:
            events, found = tx.run(
                "SELECT COALESCE(sum(count), 0), COALESCE(sum(size), 0) FROM (SELECT count, COALESCE(raw, length) AS size FROM extent "
                "WHERE log = ? AND first >= COALESCE((SELECT max(first) FROM extent WHERE log = ? AND first <= ?), 0) AND first < ? "
                "ORDER BY first LIMIT ?) AS sample",
                (log, log, low, high, _SAMPLED_EXTENTS),
            )[0]
            size += int(found) * (high - low) // max(1, int(events))
    return size


class InChunk(NamedTuple):
    """The answer lies in this chunk: only its own times can tell.

    Of the chunk's numbers those in [start, end) count; if none of them is it, the search goes on at `end`.
    """

    chunk: Extent
    start: int
    end: int


def find_number_at(tx: Tx, row: SegmentRow, time_us: int, start: int = 0) -> int | InChunk:
    """The first readable number of a segment from `start` on that was appended at `time_us` or later, else its tail."""
    for log, first, until in list_pieces(tx, row):
        bounds = max(first, row.head, start), min(until, row.tail)
        found = _search_time(tx, log, *bounds, time_us)
        if isinstance(found, InChunk) or found < bounds[1]:
            return found
    return row.tail


def _search_time(tx: Tx, log: int, head: int, tail: int, time_us: int) -> int | InChunk:
    # Times don't decrease along a log, so this is a binary search.
    low, high = head, tail
    while low < high:
        middle = (low + high) // 2
        rows = tx.run(
            "SELECT first, count, appended_at, COALESCE(last_at, appended_at), form FROM extent WHERE log = ? AND first <= ? "
            "ORDER BY first DESC LIMIT 1",
            (log, middle),
        )
        if not rows or rows[0][0] + rows[0][1] <= middle:
            raise CorruptDataError(f"the catalog has no extent for event {middle} of log {log}", object=f"log {log}")
        first, count, appended_at, last_at, form = rows[0]
        if last_at < time_us:
            low = first + count
        elif appended_at >= time_us or form == RAW:
            # Raw bytes have no times of their own: the start of their extent is the place.
            high = max(first, head)
        else:
            (chunk,) = tx.run(*planned(("?", (log,)), middle, middle + 1, 1))
            return InChunk(Extent(*chunk), max(first, head), min(first + count, tail))
    return min(low, tail)


def find_append_time(tx: Tx, row: SegmentRow, number: int) -> int | None:
    """About when an event was appended: in a chunk, as if its events had come evenly."""
    log, _ = find_piece(tx, row, number)
    rows = tx.run(
        "SELECT first, count, appended_at, COALESCE(last_at, appended_at) FROM extent WHERE log = ? AND first <= ? "
        "ORDER BY first DESC LIMIT 1",
        (log, number),
    )
    if not rows:
        return None
    first, count, appended_at, last_at = rows[0]
    return int(appended_at + (last_at - appended_at) * (number - first) // count)


_END = 1 << 62
#: Extents that are looked at to tell how large events are.
_SAMPLED_EXTENTS = 64


#: Inline bytes deleted under one lock.
_SLICE_BYTES = 4 << 20


class _Slice:
    """What may be deleted under one lock: so many rows, and of inline blocks so many bytes."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.bytes = _SLICE_BYTES
        self.gone = 0

    @property
    def is_full(self) -> bool:
        return self.gone >= self.rows or self.bytes <= 0

    def take(self, rows: list[Row]) -> list[Row]:
        """As many of these (first, inline bytes) as fit; at least one."""
        for place, (_, size) in enumerate(rows, start=1):
            self.bytes -= size
            if self.bytes <= 0:
                return rows[:place]
        return rows


def delete_extents_below(tx: Tx, log: int, below: int, limit: int) -> int:
    """Delete up to `limit` extents that lie wholly below a number, and that no fork or tag needs; returns how many went."""
    part = _Slice(limit)
    _delete_below(tx, log, below, part)
    return part.gone


def _delete_below(tx: Tx, log: int, below: int, part: _Slice) -> None:
    for start, end in _gaps(_views(tx, log), below):
        rows = part.take(
            tx.run(
                "SELECT first, CASE WHEN object IS NULL THEN length ELSE 0 END FROM extent "
                "WHERE log = ? AND first >= ? AND first < ? AND first + count <= ? ORDER BY first LIMIT ?",
                (log, start, end, end, part.rows - part.gone),
            )
        )
        if rows:
            ends = (log, rows[0][0], rows[-1][0])
            tx.run("DELETE FROM inline_block WHERE log = ? AND first BETWEEN ? AND ?", ends)
            # Another process may delete the same ones: each counts what it deleted.
            # A chunk that took their place meanwhile may reach further, and stays.
            sql = "DELETE FROM extent WHERE log = ? AND first BETWEEN ? AND ? AND first + count <= ? RETURNING COALESCE(raw, length)"
            freed = tx.run(sql, (*ends, end))
            tx.run("UPDATE segment SET bytes = bytes - ? WHERE log = ?", (sum(row[0] for row in freed), log))
            part.gone += len(rows)
        if part.is_full:
            break


def _views(tx: Tx, log: int) -> list[tuple[int, int]]:
    """The ranges of a log's numbers that forks and tags need."""
    forks = tx.run(
        "SELECT b.first, b.until, s.head, s.stream, s.number FROM base b JOIN segment s ON s.log = b.log WHERE b.source = ?", (log,)
    )
    found = [(max(first, head), until) for first, until, head, _, _ in forks]
    owners = [(row[3], row[4]) for row in forks] + [
        (r[0], r[1]) for r in tx.run("SELECT stream, number FROM segment WHERE log = ?", (log,))
    ]
    for owner in owners:
        found += [(row[0], row[1]) for row in tx.run("SELECT first, until FROM pin WHERE stream = ? AND segment = ?", owner)]
    return sorted((start, until) for start, until in found if start < until)


def _gaps(ranges: list[tuple[int, int]], below: int) -> list[tuple[int, int]]:
    """What lies between ordered ranges, from 0 to `below`."""
    found, at = [], 0
    for start, until in ranges:
        if start > at:
            found.append((at, min(start, below)))
        at = max(at, until)
    return [*(gap for gap in found if gap[0] < gap[1]), *([(at, below)] if at < below else [])]


@operation("commit", repeatable=True)
def delete_dead_extents(tx: Tx) -> int:
    """Delete up to SLICE_ROWS extents that nothing needs of logs that have no segment; returns how many rows went."""
    part = _Slice(SLICE_ROWS)
    for (log,) in tx.run("SELECT log FROM dead_log ORDER BY log"):
        _delete_below(tx, log, _END, part)
        if part.is_full:
            break
        if not tx.run("SELECT 1 FROM extent WHERE log = ? LIMIT 1", (log,)):
            # Those that tiering left behind.
            left = part.take(tx.run("SELECT first, 1 << 16 FROM inline_block WHERE log = ? ORDER BY first LIMIT ?", (log, SLICE_ROWS)))
            tx.defer("DELETE FROM inline_block WHERE log = ? AND first = ?", [(log, row[0]) for row in left])
            part.gone += len(left) + 1
            if part.is_full:
                break
            tx.run("DELETE FROM dead_log WHERE log = ?", (log,))
            tx.run("DELETE FROM tier WHERE log = ?", (log,))
    return part.gone


@operation("commit", repeatable=True)
def delete_unneeded(tx: Tx) -> int:
    """Delete up to SLICE_ROWS extents below the heads of their segments, all of them in dropped ones; returns how many went."""
    part = _Slice(SLICE_ROWS)
    # Behind the head nothing is looked at: this runs under the lock, and a log may have many.
    rows = tx.run(
        "SELECT s.log, s.head, s.dropped FROM segment s WHERE s.dropped = 1 OR (s.head > 0 AND EXISTS "
        "(SELECT 1 FROM extent e WHERE e.log = s.log AND e.first < s.head AND e.first + e.count <= s.head))"
    )
    for log, head, dropped in rows:
        _delete_below(tx, log, _END if dropped else head, part)
        if part.is_full:
            break
    return part.gone
