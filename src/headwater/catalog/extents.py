"""Extents: which block holds which numbers of a log. Committing a flush, planning a read, deleting what was truncated."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headwater.catalog.database import NO_NEWS, Database, News, Row, Statement, Tx
from headwater.catalog.segments import SegmentRow, find_piece, list_pieces
from headwater.errors import FencedError
from headwater.runtime import failpoints


@dataclass(slots=True)
class Append:
    """One block for one segment: its bytes are inline in `data`, or durable in an object already."""

    segment: int
    count: int
    length: int
    crc: int
    object: int | None
    position: int
    data: bytes | None


class Part(NamedTuple):
    """What commits or fails as one: all events of one named writer, one conditional append, or a stream's anonymous events."""

    stream: int
    appends: tuple[Append, ...]
    writer: str | None = None
    generation: int = 0
    last_number: int = 0
    expected_tail: int | None = None


@dataclass(frozen=True)
class Flush:
    """Everything one process commits at once. The same number again means the same flush, and gets the same answer."""

    session: int
    number: int
    parts: tuple[Part, ...]
    objects: tuple[tuple[int, str], ...] = ()


class Stored(NamedTuple):
    """A part that committed: the first number of each of its appends."""

    firsts: tuple[int, ...]
    appended_at: int


class Refused(NamedTuple):
    """A part that was left out, and why: sealed, fenced, moved (a condition failed), or deleted."""

    reason: str
    detail: int = 0


PartResult = Stored | Refused


_INSERT_OBJECT = "INSERT INTO object (id, key, session) VALUES (?, ?, ?) ON CONFLICT (id) DO NOTHING"


def commit_flush(database: Database, flush: Flush, news: News = NO_NEWS) -> list[PartResult]:
    """Append every part that may be appended, in order, each seeing the tails left by the one before; durable on return.

    FencedError if the session is no longer live. A flush that was committed before is answered from its session, before any other check.
    """
    found = _commit_one(database, flush, news)
    return database.write(lambda tx: apply_flush(tx, flush), repeatable=True) if found is None else found


def _commit_one(database: Database, flush: Flush, news: News) -> list[PartResult] | None:
    """A flush of one block without conditions, as most are while events come one by one: in one round trip.

    None if it is another one, if it was committed before, or if its session or its segment are not as they must be.
    """
    part = flush.parts[0]
    if len(flush.parts) > 1 or len(part.appends) != 1 or part.writer is not None or part.expected_tail is not None:
        return None
    append = part.appends[0]
    place = part.stream, append.segment
    # Not as EXISTS, of which SQLite makes a join that takes 30 us longer.
    is_noted = "(SELECT id FROM session WHERE id = ?) IS NOT NULL", (flush.session,)
    answers = database.write_whole(
        [
            grow(part.stream, append),
            # Not live, or not next: then its last flush would be NULL, which a constraint refuses.
            (
                "UPDATE session SET last_flush = CASE WHEN live = 1 AND last_flush = ? THEN last_flush + 1 END, renewed_at = now_us(), "
                "last_result = (SELECT '[[' || CAST(appended_at AS TEXT) || ', ' || CAST(tail - ? AS TEXT) || ']]' FROM segment "
                "WHERE stream = ? AND number = ?) WHERE id = ?",
                (flush.number - 1, append.count, *place, flush.session),
            ),
            *add_extent(part.stream, append, is_noted),
            *((_INSERT_OBJECT, (*stored, flush.session)) for stored in flush.objects),
        ],
        "append.begun",
        "append.applied",
        news=news,
    )
    if answers is None:
        return None
    tail, appended_at = answers[0][0]
    return [Stored((tail - append.count,), appended_at)]


def grow(stream: int, append: Append) -> Statement:
    """The statement that moves an open segment's tail, wherever it is, behind a block; it returns the new one, and when that was."""
    return (
        "UPDATE segment SET tail = tail + ?, bytes = bytes + ?, "
        "appended_at = CASE WHEN appended_at > now_us() THEN appended_at ELSE now_us() END "
        "WHERE stream = ? AND number = ? AND sealed_epoch IS NULL RETURNING tail, appended_at",
        (append.count, append.length, stream, append.segment),
    )


def add_extent(stream: int, append: Append, condition: Statement = ("TRUE", ())) -> list[Statement]:
    """The statements, after `grow`, that put a block there.

    If the segment is not open, or the condition does not hold, they violate a constraint: no extent may be without a log.
    """
    place = stream, append.segment
    found = "FROM segment WHERE stream = ? AND number = ?"
    statements: list[Statement] = [
        (
            "INSERT INTO extent (log, first, count, length, crc, appended_at, object, position) VALUES "
            f"((SELECT log {found} AND sealed_epoch IS NULL AND {condition[0]}), (SELECT tail - ? {found}), ?, ?, ?, "
            f"(SELECT appended_at {found}), ?, ?)",
            (
                *(*place, *condition[1]),
                *(append.count, *place),
                *(append.count, append.length, append.crc),
                *place,
                *(append.object, append.position),
            ),
        ),
    ]
    if append.data is not None:
        statements.append(
            (
                f"INSERT INTO inline_block (log, first, data) VALUES ((SELECT log {found}), (SELECT tail - ? {found}), ?)",
                (*place, append.count, *place, append.data),
            )
        )
    return statements


def apply_flush(tx: Tx, flush: Flush) -> list[PartResult]:
    """What a flush changes, decided part by part."""
    segments = sorted({(part.stream, append.segment) for part in flush.parts for append in part.appends})
    writers = sorted({(part.stream, part.writer) for part in flush.parts if part.writer is not None})
    locks = _lock_segments(segments)
    answers = tx.run_all([_lock_session(flush.session), *locks, *(_lock_writer(*key) for key in writers)])
    live, last_flush, last_result, now = answers[0][0] if answers[0] else (0, 0, "", 0)
    if last_flush == flush.number:
        return _load(last_result)
    if not live:
        raise FencedError(f"session {flush.session} was fenced: nothing of its flush {flush.number} was stored")
    assert last_flush == flush.number - 1, f"flush {flush.number} follows flush {last_flush}"
    failpoints.reach("append.begun")
    state = {(row[0], row[1]): _Tail(*row[2:]) for rows in answers[1 : 1 + len(locks)] for row in rows}
    held = {key: rows[0] for key, rows in zip(writers, answers[1 + len(locks) :], strict=True) if rows}

    results: list[PartResult] = []
    extents, blocks, numbers = [], [], {}
    touched: dict[tuple[int, int], _Tail] = {}
    for part in flush.parts:
        refusal = _refusal(part, state, held)
        if refusal is not None:
            results.append(refusal)
            continue
        firsts = []
        appended_at = max(now, *(state[part.stream, append.segment].appended_at for append in part.appends))
        for append in part.appends:
            key = part.stream, append.segment
            tail = touched[key] = state[key]
            firsts.append(tail.tail)
            extents.append((tail.log, tail.tail, append.count, append.length, append.crc, appended_at, append.object, append.position))
            if append.data is not None:
                blocks.append((tail.log, tail.tail, append.data))
            tail.tail += append.count
            tail.bytes += append.length
            tail.appended_at = appended_at
        if part.writer is not None:
            numbers[part.stream, part.writer] = part.last_number
            held[part.stream, part.writer] = (part.last_number, part.generation)
        results.append(Stored(tuple(firsts), appended_at))

    tx.defer(
        "UPDATE segment SET tail = ?, bytes = bytes + ?, appended_at = ? WHERE stream = ? AND number = ?",
        [(tail.tail, tail.bytes, tail.appended_at, *key) for key, tail in touched.items()],
    )
    tx.defer(_INSERT_OBJECT, [(*stored, flush.session) for stored in flush.objects])
    tx.defer("INSERT INTO extent (log, first, count, length, crc, appended_at, object, position) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", extents)
    tx.defer("INSERT INTO inline_block (log, first, data) VALUES (?, ?, ?)", blocks)
    tx.defer("UPDATE writer SET last_number = ? WHERE stream = ? AND id = ?", [(number, *key) for key, number in numbers.items()])
    tx.defer(
        "UPDATE session SET last_flush = ?, last_result = ?, renewed_at = ? WHERE id = ?",
        [(flush.number, _dump(results), now, flush.session)],
    )
    failpoints.reach("append.applied")
    return results


class _Tail:
    """A segment's tail while a flush is applied; `bytes` counts only what this flush adds."""

    __slots__ = ("appended_at", "bytes", "log", "sealed", "tail")

    def __init__(self, log: int, tail: int, sealed_epoch: int | None, appended_at: int) -> None:
        self.log = log
        self.tail = tail
        self.sealed = sealed_epoch is not None
        self.appended_at = appended_at
        self.bytes = 0


def _lock_session(session: int) -> Statement:
    return "SELECT live, last_flush, last_result, now_us() FROM session WHERE id = ? FOR UPDATE", (session,)


_IN_SIZES = (1, 4, 16, 64, 256)


def _lock_segments(keys: Sequence[tuple[int, int]]) -> list[Statement]:
    """Statements that lock segments in ascending order. Few sizes of IN lists, so that prepared statements are used again."""
    by_stream: dict[int, list[int]] = defaultdict(list)
    for stream, number in keys:
        by_stream[stream].append(number)
    found: list[Statement] = []
    for stream, numbers in by_stream.items():
        for start in range(0, len(numbers), _IN_SIZES[-1]):
            some = numbers[start : start + _IN_SIZES[-1]]
            size = next(size for size in _IN_SIZES if size >= len(some))
            some += [some[-1]] * (size - len(some))
            sql = (
                "SELECT stream, number, log, tail, sealed_epoch, appended_at FROM segment "
                f"WHERE stream = ? AND number IN ({', '.join('?' * size)}) ORDER BY number FOR UPDATE"
            )
            found.append((sql, (stream, *some)))
    return found


def _lock_writer(stream: int, writer: str) -> Statement:
    return "SELECT last_number, generation FROM writer WHERE stream = ? AND id = ? FOR UPDATE", (stream, writer)


def _refusal(part: Part, state: dict[tuple[int, int], _Tail], held: dict[tuple[int, str], tuple[int, ...]]) -> Refused | None:
    tails = [state.get((part.stream, append.segment)) for append in part.appends]
    if part.writer is not None:
        row = held.get((part.stream, part.writer))
        if row is None:
            return Refused("deleted")
        if row[1] != part.generation:
            return Refused("fenced", row[1])
        assert part.last_number > row[0], "the holder of a generation gives its numbers in order"
    if any(tail is None for tail in tails):
        # A segment's row goes with its stream, or when it was sealed and truncated away: looking again tells which.
        return Refused("sealed")
    if part.expected_tail is not None and tails[0] is not None and tails[0].tail != part.expected_tail:
        return Refused("moved", tails[0].tail)
    if any(tail is not None and tail.sealed for tail in tails):
        return Refused("sealed")
    return None


def _dump(results: Sequence[PartResult]) -> str:
    return json.dumps([[result.appended_at, *result.firsts] if isinstance(result, Stored) else list(result) for result in results])


def _load(text: str) -> list[PartResult]:
    return [
        Refused(fields[0], fields[1]) if isinstance(fields[0], str) else Stored(tuple(fields[1:]), fields[0]) for fields in json.loads(text)
    ]


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
    rows = database.query(
        "SELECT e.first, e.count, e.length, e.crc, e.appended_at, e.position, e.object, o.key, b.data, e.form, e.raw, e.last_at "
        "FROM extent e "
        "LEFT JOIN object o ON o.id = e.object LEFT JOIN inline_block b ON e.object IS NULL AND b.log = e.log AND b.first = e.first "
        "WHERE e.log = ? AND e.first >= COALESCE((SELECT max(first) FROM extent WHERE log = ? AND first <= ?), ?) "
        "AND e.first < ? AND e.first + e.count > ? ORDER BY e.first LIMIT ?",
        (log, log, start, start, end, start, limit),
    )
    return [Extent(*row) for row in rows]


class InChunk(NamedTuple):
    """The answer lies in the chunk that holds this number of a log: only its own times can tell.

    Of the chunk's numbers those in [start, end) count; if none of them is it, the search goes on at `end`.
    """

    log: int
    number: int
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
        first, count, appended_at, last_at, form = tx.run(
            "SELECT first, count, appended_at, COALESCE(last_at, appended_at), form FROM extent WHERE log = ? AND first <= ? "
            "ORDER BY first DESC LIMIT 1",
            (log, middle),
        )[0]
        if last_at < time_us:
            low = first + count
        elif appended_at >= time_us or form == RAW:
            # Raw bytes have no times of their own: the start of their extent is the place.
            high = max(first, head)
        else:
            return InChunk(log, middle, max(first, head), min(first + count, tail))
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


def delete_dead_extents(tx: Tx, limit: int) -> int:
    """Delete up to `limit` extents that nothing needs of logs that have no segment; returns how many rows went."""
    part = _Slice(limit)
    for (log,) in tx.run("SELECT log FROM dead_log ORDER BY log"):
        _delete_below(tx, log, _END, part)
        if part.is_full:
            break
        if not tx.run("SELECT 1 FROM extent WHERE log = ? LIMIT 1", (log,)):
            # Those that tiering left behind.
            left = part.take(tx.run("SELECT first, 1 << 16 FROM inline_block WHERE log = ? ORDER BY first LIMIT ?", (log, limit)))
            tx.defer("DELETE FROM inline_block WHERE log = ? AND first = ?", [(log, row[0]) for row in left])
            part.gone += len(left) + 1
            if part.is_full:
                break
            tx.run("DELETE FROM dead_log WHERE log = ?", (log,))
            tx.run("DELETE FROM tier WHERE log = ?", (log,))
    return part.gone


def delete_unneeded(tx: Tx, limit: int) -> int:
    """Delete up to `limit` extents below the heads of their segments, all of them in dropped ones; returns how many went."""
    part = _Slice(limit)
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
