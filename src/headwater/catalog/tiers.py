"""Tiers: what of each log is still in blocks, and the swap of extents for a chunk that holds the same numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from headwater.catalog.database import Row, Tx
from headwater.catalog.extents import BLOCK, PARQUET, RAW, Extent, planned
from headwater.catalog.leases import hold
from headwater.catalog.operations import operation
from headwater.catalog.streams import lock_stream
from headwater.errors import ConditionFailedError, CorruptDataError
from headwater.model.limits import CHUNK_BYTES, CHUNK_EXTENTS, COMPACT_CHUNKS, MIB, TIER_EXTENTS
from headwater.runtime import failpoints


class Backlog(NamedTuple):
    """A log with numbers from `start` on that are in blocks; `stream` and `segment` are its own, or those of a fork that needs it."""

    log: int
    stream: int
    segment: int
    start: int
    tail: int
    is_sealed: bool


class Piece(NamedTuple):
    """An extent as far as a swap must know it."""

    first: int
    events: int
    length: int
    crc: int
    appended_at: int
    object: int | None
    form: int
    raw: int | None
    last_at: int | None

    @property
    def end(self) -> int:
        return self.first + self.events

    @property
    def bytes(self) -> int:
        return self.length if self.raw is None else self.raw


class NewExtent(NamedTuple):
    """An extent in a chunk just written."""

    first: int
    events: int
    length: int
    crc: int
    appended_at: int
    position: int
    form: int
    raw: int
    last_at: int


@operation("read")
def list_backlogs(tx: Tx) -> list[Backlog]:
    """Every log that may have blocks to tier."""
    rows = tx.run(
        "SELECT s.log, s.stream, s.number, COALESCE(t.until, s.base_until), s.tail, s.sealed_epoch FROM segment s "
        "LEFT JOIN tier t ON t.log = s.log WHERE s.tail > COALESCE(t.until, s.base_until) ORDER BY s.log"
    )
    # Of the forks that need a log without a segment, the one that needs most of it knows the schemas of all that is needed.
    dead = tx.run(
        "SELECT d.log, s.stream, s.number, COALESCE(t.until, 0), b.until FROM dead_log d JOIN base b ON b.source = d.log "
        "JOIN segment s ON s.log = b.log LEFT JOIN tier t ON t.log = d.log WHERE b.until > COALESCE(t.until, 0) ORDER BY d.log, b.until"
    )
    return [_backlog(row) for row in rows] + [_backlog((*row, 0)) for row in {row[0]: row for row in dead}.values()]


def _backlog(row: Row) -> Backlog:
    log, stream, segment, start, tail, sealed_epoch = row
    return Backlog(log, stream, segment, start, tail, sealed_epoch is not None)


class Weight(NamedTuple):
    """How much waits: of more extents than were asked about, this is a part."""

    extents: int
    bytes: int
    oldest_at: int


@operation("statement")
def weigh(tx: Tx, log: int, start: int) -> Weight:
    """The extents of a log from a number on, up to TIER_EXTENTS of them."""
    rows = tx.run(
        "SELECT count(*), COALESCE(sum(length), 0), COALESCE(min(appended_at), 0) FROM "
        "(SELECT length, appended_at FROM extent WHERE log = ? AND first >= ? ORDER BY first LIMIT ?) AS waiting",
        (log, start, TIER_EXTENTS),
    )
    return Weight(*map(int, rows[0]))


_COLUMNS = "first, count, length, crc, appended_at, object, form, raw, last_at"


@operation("statement")
def plan_log(tx: Tx, log: int, start: int, end: int, limit: int) -> list[Extent]:
    """The first extents of a log, at most `limit`, that hold numbers [start, end): of a log that has no segment any more, too."""
    return [Extent(*row) for row in tx.run(*planned(("?", (log,)), start, end, limit))]


@operation("statement")
def list_blocks(tx: Tx, log: int, start: int) -> list[Piece]:
    """The next blocks of a log from a number on that follow each other without a gap."""
    rows = tx.run(f"SELECT {_COLUMNS} FROM extent WHERE log = ? AND first >= ? ORDER BY first LIMIT ?", (log, start, CHUNK_EXTENTS))
    found: list[Piece] = []
    for row in rows:
        piece = Piece(*row)
        if piece.form != BLOCK or (found and piece.first != found[-1].end):
            break
        found.append(piece)
    return found


#: Extents of chunks that are smaller than this, before compression, may be made larger.
_SMALL_BYTES = {PARQUET: CHUNK_BYTES // 2, RAW: 2 * MIB}


@operation("statement")
def list_small(tx: Tx, log: int, before: int) -> list[Piece]:
    """The last small extents of a log before a number that are in chunks."""
    small = "raw < CASE form WHEN ? THEN ? ELSE ? END"
    rows = tx.run(
        f"SELECT {_COLUMNS} FROM extent WHERE log = ? AND first < ? AND {small} ORDER BY first DESC LIMIT ?",
        (log, before, PARQUET, _SMALL_BYTES[PARQUET], _SMALL_BYTES[RAW], CHUNK_EXTENTS),
    )
    return [Piece(*row) for row in reversed(rows)]


@operation("statement")
def list_held(tx: Tx, log: int) -> list[tuple[int, int]]:
    """The ranges of a log whose files running readers may have listed: they are not replaced while the hold lasts."""
    rows = tx.run(
        "SELECT p.first, p.until FROM pin p JOIN tag t ON t.name = p.tag JOIN segment s ON s.stream = p.stream AND s.number = p.segment "
        "WHERE t.expires_at >= now_us() AND (s.log = ? OR s.log IN (SELECT b.log FROM base b WHERE b.source = ?))",
        (log, log),
    )
    return [(row[0], row[1]) for row in rows]


def _check_held(tx: Tx, log: int, start: int, end: int) -> None:
    """ConditionFailedError if a reader may have listed the files of these numbers. Under the locks that holds are made under."""
    sql = "SELECT DISTINCT stream FROM segment WHERE log = ? OR log IN (SELECT b.log FROM base b WHERE b.source = ?) ORDER BY stream"
    for (stream,) in tx.run(sql, (log, log)):
        lock_stream(tx, stream)
    if any(start < until and first < end for first, until in list_held(tx, log)):
        raise ConditionFailedError("a reader holds the files of these events by now")


@operation("statement")
def list_crowded(tx: Tx) -> list[Backlog]:
    """The logs that have several small chunks; `start` is the first number that is not in one."""
    rows = tx.run(
        "SELECT t.log, s.stream, s.number, t.until, s.tail, s.sealed_epoch FROM tier t JOIN segment s ON s.log = t.log "
        "WHERE t.small >= CASE WHEN s.sealed_epoch IS NULL THEN ? ELSE 2 END ORDER BY t.log",
        (COMPACT_CHUNKS,),
    )
    return [_backlog(row) for row in rows]


@operation("commit", repeatable=True)
def count_small(tx: Tx, log: int, small: int) -> None:
    """Note how many small chunks a log has."""
    tx.run("UPDATE tier SET small = ? WHERE log = ?", (small, log))


def count_chunks(tx: Tx, streams: Sequence[int]) -> dict[int, tuple[int, int]]:
    """(how many, how many bytes they take) of the own chunks of streams that have any."""
    rows = tx.run(
        "SELECT s.stream, count(DISTINCT e.object), sum(e.length) FROM segment s JOIN tier t ON t.log = s.log "
        f"JOIN extent e ON e.log = s.log AND e.first < t.until WHERE s.stream IN ({', '.join('?' * len(streams))}) AND e.form > 0 "
        "GROUP BY s.stream",
        streams,
    )
    return {stream: (int(count), int(size)) for stream, count, size in rows}


@operation("statement")
def get_until(tx: Tx, log: int) -> int:
    """The first number of a log that is not in a chunk."""
    rows = tx.run("SELECT until FROM tier WHERE log = ?", (log,))
    return int(rows[0][0]) if rows else 0


@operation("commit", repeatable=True)
def swap(tx: Tx, session: int, log: int, old: Sequence[Piece], new: Sequence[NewExtent], object: tuple[int, str]) -> None:
    """Put a chunk in the place of extents, if they are exactly those that were read.

    ConditionFailedError if something changed meanwhile, or if blocks lie before these: nothing is changed, and the chunk is garbage.
    FencedError if another process does the upkeep by now.
    """
    hold(tx, session)
    start, end = old[0].first, old[-1].end
    if old[-1].form != BLOCK:
        _check_held(tx, log, start, end)
    # Blocks lie behind all chunks: inline ones below a chunk's end are deleted, and readers of history look for the rest behind it.
    sql = "SELECT first FROM extent WHERE log = ? AND first >= ? AND first < ? AND form = 0 LIMIT 1"
    if tx.run(sql, (log, get_until(tx, log), start)):
        raise ConditionFailedError("blocks before these are not in a chunk yet")
    if new[0].first != start or new[-1].first + new[-1].events != end:
        raise CorruptDataError(f"the chunk {object[1]} does not hold exactly events {start} to {end - 1} of log {log}", object=object[1])
    gone = tx.run(f"DELETE FROM extent WHERE log = ? AND first >= ? AND first < ? RETURNING {_COLUMNS}", (log, start, end))
    if sorted(Piece(*row) for row in gone) != list(old):
        raise ConditionFailedError("the extents changed while their chunk was written")
    tx.defer("INSERT INTO object (id, key, session) VALUES (?, ?, ?)", [(*object, session)])
    tx.defer(
        "INSERT INTO extent (log, first, count, length, crc, appended_at, object, position, form, raw, last_at) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        [(log, e.first, e.events, e.length, e.crc, e.appended_at, object[0], e.position, e.form, e.raw, e.last_at) for e in new],
    )
    # How many small chunks there are, so that compaction need not look at every log each time.
    small = sum(e.raw < _SMALL_BYTES[e.form] for e in new) - sum(piece.form != BLOCK for piece in old)
    tx.defer(
        "INSERT INTO tier (log, until, small) VALUES (?, ?, ?) ON CONFLICT (log) DO UPDATE SET small = tier.small + excluded.small, "
        "until = CASE WHEN tier.until < excluded.until THEN excluded.until ELSE tier.until END",
        [(log, end, small)],
    )
    failpoints.reach("tier.applied")


#: Inline blocks deleted under one lock: each may have 64 KiB.
_INLINE_ROWS = 100


@operation("commit", repeatable=True)
def delete_inline(tx: Tx, log: int, until: int) -> int:
    """Delete some of the inline blocks below a number, whose events are in chunks by now; returns how many, 0 at the end."""
    rows = tx.run("SELECT first FROM inline_block WHERE log = ? AND first < ? ORDER BY first LIMIT ?", (log, until, _INLINE_ROWS))
    if rows:
        tx.run("DELETE FROM inline_block WHERE log = ? AND first BETWEEN ? AND ?", (log, rows[0][0], rows[-1][0]))
    return len(rows)


@operation("statement")
def list_leftover_inline(tx: Tx) -> list[tuple[int, int]]:
    """(log, until) of logs that have inline blocks below what is tiered: a process ended before it deleted them."""
    sql = "SELECT t.log, t.until FROM tier t WHERE EXISTS (SELECT 1 FROM inline_block b WHERE b.log = t.log AND b.first < t.until)"
    return [(row[0], row[1]) for row in tx.run(sql)]
