"""Flushes: what one process commits at once, with its session's number as the receipt.

The session's row is fence and idempotence in one: it is locked first, and keeps the number and the answer of its last flush.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from headwater.catalog import tails
from headwater.catalog.database import NO_NEWS, Database, News, Statement, Tx
from headwater.catalog.operations import operation
from headwater.catalog.parts import Alone, Append, Part, PartResult, Refused, Stored, Term
from headwater.catalog.plans import Plan
from headwater.catalog.tails import Watch
from headwater.errors import FencedError
from headwater.runtime import failpoints


@dataclass(frozen=True)
class Flush:
    """Everything one process commits at once. The same number again means the same flush, and gets the same answer."""

    session: int
    number: int
    parts: tuple[Part, ...]
    objects: tuple[tuple[int, str], ...] = ()
    #: No later flush of the session names a journal file with a lower index: see `streams/garbage.py`.
    first_file: int = 0


_NO_TERM = Alone(("TRUE", ()))
_INSERT_OBJECT = "INSERT INTO object (id, key, session) VALUES (?, ?, ?) ON CONFLICT (id) DO NOTHING"


@operation("database", repeatable=True)
def commit_flush(database: Database, flush: Flush, news: News = NO_NEWS) -> list[PartResult]:
    """Append every part that may be appended, in order, each seeing the tails left by the one before; durable on return.

    FencedError if the session is no longer live. A flush that was committed before is answered from its session, before any other check.
    """
    found = _commit_one(database, flush, news)
    return database.write(lambda tx: apply_flush(tx, flush), repeatable=True, news=news) if found is None else found


def _commit_one(database: Database, flush: Flush, news: News) -> list[PartResult] | None:
    """A flush of one block, as most are while events come one by one, in one round trip, if all terms of the part offer that.

    None if it is another one, if it was committed before, or if its session, its segment or what its terms need are not as they must be.
    """
    part = flush.parts[0]
    if len(flush.parts) > 1 or len(part.appends) != 1:
        return None
    append = part.appends[0]
    place = append.stream, append.segment
    alone = _together(part.terms, append) if part.terms else _NO_TERM
    if alone is None:
        return None
    # Not as EXISTS, of which SQLite makes a join that takes 30 us longer.
    condition = f"(SELECT id FROM session WHERE id = ?) IS NOT NULL AND {alone.condition[0]}", (flush.session, *alone.condition[1])
    locks = tails.lock([Watch(*place, True), *alone.watched]) if alone.watched else []
    answers = database.write_whole(
        [
            *locks,
            grow(append),
            # Not live, or not next: then its last flush would be NULL, which a constraint refuses.
            (
                "UPDATE session SET last_flush = CASE WHEN live = 1 AND last_flush = ? THEN last_flush + 1 END, renewed_at = now_us(), "
                "first_file = ?, "
                "last_result = (SELECT '[[' || CAST(appended_at AS TEXT) || ', ' || CAST(tail - ? AS TEXT) || ']]' FROM segment "
                "WHERE stream = ? AND number = ?) WHERE id = ?",
                (flush.number - 1, flush.first_file, append.count, *place, flush.session),
            ),
            *add_extent(append, condition),
            *((_INSERT_OBJECT, (*stored, flush.session)) for stored in flush.objects),
            *alone.changes,
            *([alone.answer] if alone.answer is not None else []),
        ],
        "append.begun",
        "append.applied",
        news=news,
    )
    if answers is None:
        return None
    tail, appended_at = answers[len(locks)][0]
    return [Stored((tail - append.count,), appended_at, None if alone.answer is None else dict(answers[-1]))]


def _together(terms: Sequence[Term], append: Append) -> Alone | None:
    """What terms check and change as if they were one; None if one of them offers no round trip of its own."""
    found = _NO_TERM
    for term in terms:
        alone = term.alone(append)
        if alone is None:
            return None
        (sql, values), (more_sql, more) = found.condition, alone.condition
        found = Alone(
            (f"{sql} AND {more_sql}", (*values, *more)),
            [*found.changes, *alone.changes],
            alone.answer or found.answer,
            [*found.watched, *alone.watched],
        )
    return found


def grow(append: Append) -> Statement:
    """The statement that moves an open segment's tail, wherever it is, behind a block; it returns the new one, and when that was."""
    where, place = _open_place(append)
    return (
        "UPDATE segment SET tail = tail + ?, bytes = bytes + ?, "
        "appended_at = CASE WHEN appended_at > now_us() THEN appended_at ELSE now_us() END "
        f"WHERE {where} RETURNING tail, appended_at",
        (append.count, append.length, *place),
    )


def _open_place(append: Append) -> Statement:
    """What finds the segment that a block is for, if that is open and nobody claims it."""
    where = "stream = ? AND number = ? AND sealed_epoch IS NULL AND claim IS NULL"
    if append.log:
        return f"{where} AND log = ?", (append.stream, append.segment, append.log)
    return where, (append.stream, append.segment)


def add_extent(append: Append, condition: Statement = ("TRUE", ())) -> list[Statement]:
    """The statements, after `grow`, that put a block there.

    If the segment is not open, or the condition does not hold, they violate a constraint: no extent may be without a log.
    """
    place = append.stream, append.segment
    found = "FROM segment WHERE stream = ? AND number = ?"
    where, open_place = _open_place(append)
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
    plan = Plan(flush.parts)
    locks = plan.locks()
    session, *answers = tx.run_all([_lock_session(flush.session), *locks, *plan.looks()])
    live, last_flush, last_result, now = session[0] if session else (0, 0, "", 0)
    if last_flush == flush.number:
        return _load(last_result)
    if not live:
        raise FencedError(f"session {flush.session} was fenced: nothing of its flush {flush.number} was stored")
    if last_flush != flush.number - 1:
        raise FencedError(f"session {flush.session} is at flush {last_flush} by now: nothing of its flush {flush.number} was stored")
    failpoints.reach("append.begun")
    plan.load_tails(answers[: len(locks)])
    plan.load_looks(tx, answers[len(locks) :])
    results = plan.decide(tx, now)
    plan.enter(tx)
    tx.defer(_INSERT_OBJECT, [(*stored, flush.session) for stored in flush.objects])
    tx.defer(
        "UPDATE session SET last_flush = ?, last_result = ?, first_file = ?, renewed_at = ? WHERE id = ?",
        [(flush.number, _dump(results), flush.first_file, now, flush.session)],
    )
    failpoints.reach("append.applied")
    return results


def _lock_session(session: int) -> Statement:
    return "SELECT live, last_flush, last_result, now_us() FROM session WHERE id = ? FOR UPDATE", (session,)


def _dump(results: Sequence[PartResult]) -> str:
    return json.dumps([[result.appended_at, *result.firsts] if isinstance(result, Stored) else list(result) for result in results])


def _load(text: str) -> list[PartResult]:
    return [Refused(*fields) if isinstance(fields[0], str) else Stored(tuple(fields[1:]), fields[0]) for fields in json.loads(text)]
