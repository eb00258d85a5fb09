"""Segments: which keys each covers, its readable numbers, and the epochs in which the set of them changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from headwater.catalog.database import Row, Statement, Tx
from headwater.catalog.operations import Right, operation
from headwater.catalog.schema import next_ids
from headwater.errors import ConflictError, CorruptDataError, InvalidRequestError, NotFoundError, SealedError
from headwater.model.keys import KeyRange
from headwater.model.limits import OPEN_SEGMENTS
from headwater.runtime import failpoints

#: What is taken off a place in the routing space to fit the catalog's integers.
SHIFT = 1 << 63


class SegmentRow(NamedTuple):
    """A segment as the catalog has it; sealed if `sealed_epoch` is set."""

    number: int
    log: int
    keys: KeyRange
    made_epoch: int
    made_at: int
    sealed_epoch: int | None
    sealed_at: int | None
    head: int
    tail: int
    bytes: int
    appended_at: int
    base_until: int
    dropped: int
    #: Who alone may append: see catalog/claims.py.
    claim: str | None = None

    @property
    def is_open(self) -> bool:
        return self.sealed_epoch is None


COLUMNS = (
    "number, log, first_key, last_key, made_epoch, made_at, sealed_epoch, sealed_at, head, tail, bytes, appended_at, base_until, dropped, "
    "claim"
)


def to_row(row: Row) -> SegmentRow:
    number, log, first_key, last_key, *rest = row
    return SegmentRow(number, log, KeyRange(first_key + SHIFT, last_key + SHIFT + 1), *rest)


def insert_segments(tx: Tx, stream: int, *, epoch: int, made_at: int, ranges: Sequence[KeyRange], claim: str | None = None) -> list[int]:
    """Open a segment for each range, under a claim; returns their numbers, which are never used again."""
    end = tx.run("UPDATE stream SET next_segment = next_segment + ? WHERE id = ? RETURNING next_segment", (len(ranges), stream))[0][0]
    numbers = list(range(end - len(ranges), end))
    logs = next_ids(tx, "log", len(ranges))
    rows = [
        (stream, number, log, keys.start - SHIFT, keys.end - 1 - SHIFT, epoch, made_at, made_at, claim)
        for number, log, keys in zip(numbers, logs, ranges, strict=True)
    ]
    tx.defer(
        "INSERT INTO segment (stream, number, log, first_key, last_key, made_epoch, made_at, head, tail, bytes, appended_at, "
        "claim) VALUES (?, ?, ?, ?, ?, ?, ?, 0, 0, 0, ?, ?)",
        rows,
    )
    return numbers


@operation("statement", right=Right("read", "stream"))
def list_segments(tx: Tx, stream: int, *, first: int = 0, with_dropped: bool = False) -> list[SegmentRow]:
    """Every segment that is readable, by number from `first` on; with those that only a tag keeps, if asked for."""
    return [to_row(row) for row in tx.run(*listed(stream, first, with_dropped=with_dropped))]


def listed(stream: int, first: int = 0, *, with_dropped: bool = False) -> Statement:
    """The statement of `list_segments`; `to_row` makes segments of its rows."""
    dropped = "" if with_dropped else "AND dropped = 0"
    return f"SELECT {COLUMNS} FROM segment WHERE stream = ? AND number >= ? {dropped} ORDER BY number", (stream, first)


@operation("statement", right=Right("read", "stream"))
def list_open_segments(tx: Tx, stream: int) -> list[SegmentRow]:
    return [to_row(row) for row in tx.run(*opened(stream))]


def list_open_numbers(tx: Tx, stream: int) -> list[int]:
    """The numbers of a stream's open segments."""
    return [row[0] for row in tx.run("SELECT number FROM segment WHERE stream = ? AND sealed_epoch IS NULL ORDER BY number", (stream,))]


@operation("statement")
def list_segments_of(tx: Tx, streams: Sequence[int]) -> dict[int, list[SegmentRow]]:
    """The segments of several streams in one look: consistent."""
    found: dict[int, list[SegmentRow]] = {stream: [] for stream in streams}
    marks = ", ".join("?" * len(streams))
    for stream, *row in tx.run(f"SELECT stream, {COLUMNS} FROM segment WHERE stream IN ({marks}) AND dropped = 0 ORDER BY number", streams):
        found[stream].append(to_row(tuple(row)))
    return found


@operation("statement", right=Right("read", "stream"))
def find_segment(tx: Tx, stream: int, number: int) -> SegmentRow | None:
    rows = tx.run(f"SELECT {COLUMNS} FROM segment WHERE stream = ? AND number = ?", (stream, number))
    return to_row(rows[0]) if rows else None


def replace_segments(tx: Tx, stream: int, *, epoch: int, seal: Sequence[int], ranges: Sequence[KeyRange]) -> list[int]:
    """Seal segments and open their successors, as the stream's next epoch; returns the new numbers.

    `epoch` is the one the caller decided from: if another scale won, nothing changes. The ranges cover exactly the keys of the sealed
    segments.
    """
    # The WHERE clause is the lock: of two callers exactly one matches, on SQLite and on PostgreSQL.
    won = tx.run("UPDATE stream SET epoch = epoch + 1 WHERE id = ? AND epoch = ? AND sealed_at IS NULL RETURNING epoch", (stream, epoch))
    if not won:
        rows = tx.run("SELECT sealed_at FROM stream WHERE id = ?", (stream,))
        if not rows:
            raise NotFoundError("this stream was deleted")
        if rows[0][0] is not None:
            raise SealedError("this stream is sealed")
        raise ConflictError("the stream was scaled by another process meanwhile: look again")
    marks = ", ".join("?" * len(seal))
    old = lock_segments(tx, stream, seal)
    if len(old) != len(set(seal)) or not all(row.is_open for row in old):
        # The epoch guards the open segments: no scale went between.
        name = f"stream {stream}"
        raise CorruptDataError(f"the catalog has {name} at epoch {epoch}, in which segments {sorted(seal)} are not all open", object=name)
    if not _tiles([row.keys for row in old], ranges):
        raise InvalidRequestError(f"successors must cover exactly the keys of segments {sorted(seal)}")
    open_count = tx.run("SELECT count(*) FROM segment WHERE stream = ? AND sealed_epoch IS NULL", (stream,))[0][0]
    if open_count - len(old) + len(ranges) > OPEN_SEGMENTS:
        raise InvalidRequestError(f"a stream may have {OPEN_SEGMENTS:,} open segments")
    # Times grow along a key, whatever the clock does: everything in a segment was appended before the moment it was sealed.
    made_at = max(tx.run("SELECT now_us()")[0][0], *(max(row.appended_at, row.made_at) + 1 for row in old))
    tx.run(
        f"UPDATE segment SET sealed_epoch = ?, sealed_at = ? WHERE stream = ? AND number IN ({marks})",
        (epoch + 1, made_at, stream, *seal),
    )
    numbers = insert_segments(tx, stream, epoch=epoch + 1, made_at=made_at, ranges=ranges, claim=old[0].claim)
    failpoints.reach("scale.applied")
    return numbers


@operation("statement", right=Right("read", "stream"))
def list_segments_numbered(tx: Tx, stream: int, numbers: Sequence[int]) -> list[SegmentRow]:
    """The segments of these numbers that have a row."""
    marks = ", ".join("?" * len(numbers))
    return [to_row(row) for row in tx.run(f"SELECT {COLUMNS} FROM segment WHERE stream = ? AND number IN ({marks})", (stream, *numbers))]


def lock_segments(tx: Tx, stream: int, numbers: Sequence[int]) -> list[SegmentRow]:
    """The segments of these numbers that have a row, unchanged until this transaction ends."""
    return [to_row(row) for row in tx.run(*locked(stream, numbers))]


def locked(stream: int, numbers: Sequence[int]) -> Statement:
    """The statement that locks segments; `to_row` makes segments of its rows."""
    marks = ", ".join("?" * len(numbers))
    return f"SELECT {COLUMNS} FROM segment WHERE stream = ? AND number IN ({marks}) ORDER BY number FOR UPDATE", (stream, *numbers)


def opened(stream: int) -> Statement:
    """The statement that looks up a stream's open segments; `to_row` makes segments of its rows."""
    return f"SELECT {COLUMNS} FROM segment WHERE stream = ? AND sealed_epoch IS NULL ORDER BY number", (stream,)


def roll(tx: Tx, stream: int, active: Sequence[SegmentRow]) -> SegmentRow:
    """Seal active neighbours, put one sealed segment behind them, and open the same ranges again behind that; returns the one between.

    The caller has locked the stream and the segments, and appends to the one returned in this transaction only.
    """
    epoch = tx.run("UPDATE stream SET epoch = epoch + 1 WHERE id = ? RETURNING epoch", (stream,))[0][0]
    made_at = max(tx.run("SELECT now_us()")[0][0], *(max(row.appended_at, row.made_at) + 1 for row in active))
    tx.defer(
        "UPDATE segment SET sealed_epoch = ?, sealed_at = ? WHERE stream = ? AND number = ?",
        [(epoch, made_at, stream, row.number) for row in active],
    )
    keys = sorted(row.keys for row in active)
    claim = active[0].claim
    whole = [KeyRange(keys[0].start, keys[-1].end)]
    between = insert_segments(tx, stream, epoch=epoch, made_at=made_at, ranges=whole, claim=claim)[0]
    tx.run("UPDATE segment SET sealed_epoch = ?, sealed_at = ? WHERE stream = ? AND number = ?", (epoch, made_at + 1, stream, between))
    insert_segments(tx, stream, epoch=epoch, made_at=made_at + 1, ranges=keys, claim=claim)
    found = find_segment(tx, stream, between)
    assert found is not None
    return found


def _tiles(old: Sequence[KeyRange], new: Sequence[KeyRange]) -> bool:
    def joined(ranges: Sequence[KeyRange]) -> list[tuple[int, int]]:
        result: list[tuple[int, int]] = []
        for start, end in sorted(ranges):
            if result and result[-1][1] == start:
                result[-1] = (result[-1][0], end)
            else:
                result.append((start, end))
        return result

    return joined(old) == joined(new)


def advance_heads(tx: Tx, stream: int, heads: dict[int, int], drop: Sequence[int]) -> None:
    """Make numbers below `heads` unreadable and forget the segments `drop`. Their extents go later, in slices.

    A segment that a tag pins is only marked: with the tag its rows go too.
    """
    tx.run("SELECT number FROM segment WHERE stream = ? ORDER BY number FOR UPDATE", (stream,))
    tx.defer(
        "UPDATE segment SET head = ? WHERE stream = ? AND number = ? AND head < ?",
        [(head, stream, number, head) for number, head in heads.items()],
    )
    pinned = {row[0] for row in tx.run("SELECT DISTINCT segment FROM pin WHERE stream = ?", (stream,))}
    tx.defer("UPDATE segment SET dropped = 1 WHERE stream = ? AND number = ?", [(stream, number) for number in drop if number in pinned])
    forget_segments(tx, stream, [number for number in drop if number not in pinned])


def forget_segments(tx: Tx, stream: int, numbers: Sequence[int]) -> None:
    """Delete segments' rows. What is left of their logs is deleted later, as far as no fork or tag needs it."""
    keys = [(stream, number) for number in numbers]
    tx.defer("INSERT INTO dead_log (log) SELECT log FROM segment WHERE stream = ? AND number = ?", keys)
    tx.defer("DELETE FROM base WHERE log IN (SELECT log FROM segment WHERE stream = ? AND number = ?)", keys)
    tx.defer("DELETE FROM segment WHERE stream = ? AND number = ?", keys)


def list_pieces(tx: Tx, row: SegmentRow) -> list[tuple[int, int, int]]:
    """(log, first, until) of the logs that hold a segment's numbers, in order; the last one is its own."""
    bases: list[tuple[int, int, int]] = []
    if row.base_until:
        found = tx.run("SELECT source, first, until FROM base WHERE log = ? ORDER BY first", (row.log,))
        bases = [(piece[0], piece[1], piece[2]) for piece in found]
    return [*bases, (row.log, row.base_until, 1 << 62)]


def find_piece(tx: Tx, row: SegmentRow, number: int) -> tuple[int, int]:
    """(log, until) of the log that holds a number of a segment."""
    for log, _, until in list_pieces(tx, row):
        if number < until:
            return log, until
    raise AssertionError("a segment's own log has no end")
