"""Flushes: what one process appends at once, to many segments. Its blocks become extents and the tails move, in one transaction."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headwater.catalog.database import NO_NEWS, Database, News, Statement, Tx
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
    #: The segment's log, as it was looked up: the number may be another's in a catalog that went back in time. 0: it does not matter.
    log: int = 0


class Part(NamedTuple):
    """What commits or fails as one: all events of one named writer, one conditional append, or a stream's anonymous events."""

    stream: int
    appends: tuple[Append, ...]
    writer: str | None = None
    generation: int = 0
    last_number: int = 0
    expected_tail: int | None = None
    #: Of a named writer: the last number that its holder knows to be stored.
    stored_number: int = 0
    #: Of the stream's schema, which the blocks were made with.
    schema_version: int = 1


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
    """A part that was left out, and why: sealed, fenced, deleted, moved (a condition failed); or by a catalog that went back in time:
    forgotten (some of a writer's events), unknown schema."""

    reason: str
    detail: int = 0


PartResult = Stored | Refused
#: A block with its log, its first number there, and when it was appended.
PlacedBlock = tuple[int, int, int, Append]


#: Of values, so that one statement moves many on PostgreSQL.
_MOVE_TAILS = (
    "UPDATE segment SET tail = moved.column1, bytes = bytes + moved.column2, appended_at = moved.column3 "
    "FROM (VALUES (?, ?, ?, ?, ?)) AS moved WHERE stream = moved.column4 AND number = moved.column5"
)
_INSERT_OBJECT = "INSERT INTO object (id, key, session) VALUES (?, ?, ?) ON CONFLICT (id) DO NOTHING"


def commit_flush(database: Database, flush: Flush, news: News = NO_NEWS) -> list[PartResult]:
    """Append every part that may be appended, in order, each seeing the tails left by the one before; durable on return.

    FencedError if the session is no longer live. A flush that was committed before is answered from its session, before any other check.
    """
    found = _commit_one(database, flush, news)
    return database.write(lambda tx: apply_flush(tx, flush), repeatable=True, news=news) if found is None else found


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
    condition: Statement = "(SELECT id FROM session WHERE id = ?) IS NOT NULL", (flush.session,)
    if part.schema_version > 1:
        known = "(SELECT version FROM stream_schema WHERE stream = ? AND version = ?) IS NOT NULL"
        condition = f"{condition[0]} AND {known}", (*condition[1], part.stream, part.schema_version)
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
            *add_extent(part.stream, append, condition),
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
    where, place = _open_place(stream, append)
    return (
        "UPDATE segment SET tail = tail + ?, bytes = bytes + ?, "
        "appended_at = CASE WHEN appended_at > now_us() THEN appended_at ELSE now_us() END "
        f"WHERE {where} RETURNING tail, appended_at",
        (append.count, append.length, *place),
    )


def _open_place(stream: int, append: Append) -> Statement:
    """What finds the segment that a block is for, if that is open."""
    if append.log:
        return "stream = ? AND number = ? AND log = ? AND sealed_epoch IS NULL", (stream, append.segment, append.log)
    return "stream = ? AND number = ? AND sealed_epoch IS NULL", (stream, append.segment)


def add_extent(stream: int, append: Append, condition: Statement = ("TRUE", ())) -> list[Statement]:
    """The statements, after `grow`, that put a block there.

    If the segment is not open, or the condition does not hold, they violate a constraint: no extent may be without a log.
    """
    place = stream, append.segment
    found = "FROM segment WHERE stream = ? AND number = ?"
    where, open_place = _open_place(stream, append)
    statements: list[Statement] = [
        (
            "INSERT INTO extent (log, first, count, length, crc, appended_at, object, position) VALUES "
            f"((SELECT log FROM segment WHERE {where} AND {condition[0]}), (SELECT tail - ? {found}), ?, ?, ?, "
            f"(SELECT appended_at {found}), ?, ?)",
            (
                *(*open_place, *condition[1]),
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
    schemas = sorted({(part.stream, part.schema_version) for part in flush.parts if part.schema_version > 1})
    locks = _lock_segments(segments)
    looks = [*map(_lock_writer, writers), *map(_look_for_schema, schemas)]
    answers = tx.run_all([_lock_session(flush.session), *locks, *looks])
    live, last_flush, last_result, now = answers[0][0] if answers[0] else (0, 0, "", 0)
    if last_flush == flush.number:
        return _load(last_result)
    if not live:
        raise FencedError(f"session {flush.session} was fenced: nothing of its flush {flush.number} was stored")
    if last_flush != flush.number - 1:
        raise FencedError(f"session {flush.session} is at flush {last_flush} by now: nothing of its flush {flush.number} was stored")
    failpoints.reach("append.begun")
    state = {(row[0], row[1]): _Tail(*row[2:]) for rows in answers[1 : 1 + len(locks)] for row in rows}
    found = answers[1 + len(locks) :]
    held = {key: rows[0] for key, rows in zip(writers, found, strict=False) if rows}
    known = {key for key, rows in zip(schemas, found[len(writers) :], strict=True) if rows}

    results: list[PartResult] = []
    blocks: list[PlacedBlock] = []
    numbers: dict[tuple[int, str], int] = {}
    touched: dict[tuple[int, int], _Tail] = {}
    for part in flush.parts:
        refusal = _refusal(part, state, held, known)
        if refusal is not None:
            results.append(refusal)
            continue
        firsts = []
        appended_at = max(now, *(state[part.stream, append.segment].appended_at for append in part.appends))
        for append in part.appends:
            key = part.stream, append.segment
            tail = touched[key] = state[key]
            firsts.append(tail.tail)
            blocks.append((tail.log, tail.tail, appended_at, append))
            tail.tail += append.count
            tail.bytes += append.length
            tail.appended_at = appended_at
        if part.writer is not None:
            numbers[part.stream, part.writer] = part.last_number
            held[part.stream, part.writer] = (part.last_number, part.generation)
        results.append(Stored(tuple(firsts), appended_at))

    tx.defer(_MOVE_TAILS, [(tail.tail, tail.bytes, tail.appended_at, *key) for key, tail in touched.items()])
    tx.defer(_INSERT_OBJECT, [(*stored, flush.session) for stored in flush.objects])
    enter_blocks(tx, blocks)
    tx.defer("UPDATE writer SET last_number = ? WHERE stream = ? AND id = ?", [(number, *key) for key, number in numbers.items()])
    tx.defer(
        "UPDATE session SET last_flush = ?, last_result = ?, renewed_at = ? WHERE id = ?",
        [(flush.number, _dump(results), now, flush.session)],
    )
    failpoints.reach("append.applied")
    return results


def enter_blocks(tx: Tx, blocks: Sequence[PlacedBlock]) -> None:
    """Put blocks at their places, which are at the tails that the caller holds, and moves."""
    tx.defer(
        "INSERT INTO extent (log, first, count, length, crc, appended_at, object, position) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        [(log, first, b.count, b.length, b.crc, appended_at, b.object, b.position) for log, first, appended_at, b in blocks],
    )
    inline = [(log, first, block.data) for log, first, _, block in blocks if block.data is not None]
    tx.defer("INSERT INTO inline_block (log, first, data) VALUES (?, ?, ?)", inline)


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


def _lock_writer(key: tuple[int, str]) -> Statement:
    return "SELECT last_number, generation FROM writer WHERE stream = ? AND id = ? FOR UPDATE", key


def _look_for_schema(key: tuple[int, int]) -> Statement:
    return "SELECT 1 FROM stream_schema WHERE stream = ? AND version = ?", key


def _refusal(
    part: Part, state: dict[tuple[int, int], _Tail], held: dict[tuple[int, str], tuple[int, ...]], schemas: set[tuple[int, int]]
) -> Refused | None:
    tails = [state.get((part.stream, append.segment)) for append in part.appends]
    if part.writer is not None:
        row = held.get((part.stream, part.writer))
        if row is None:
            return Refused("deleted")
        if row[1] != part.generation:
            return Refused("fenced", row[1])
        if row[0] < part.stored_number:
            # By a catalog that went back in time. What is missing now its source can still give, to one that begins anew.
            return Refused("forgotten", row[0])
        assert part.last_number > row[0], "the holder of a generation gives its numbers in order"
    if any(tail is None or append.log not in (0, tail.log) for tail, append in zip(tails, part.appends, strict=True)):
        # A segment's row goes with its stream, or when it was sealed and truncated away: looking again tells which.
        return Refused("sealed")
    if part.schema_version > 1 and (part.stream, part.schema_version) not in schemas:
        return Refused("unknown schema", part.schema_version)
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
