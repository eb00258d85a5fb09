"""Transactions: their life from begin to abort, and what they stage: blocks and changes that nobody sees before the commit."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from headwater.catalog.database import Tx
from headwater.catalog.operations import operation
from headwater.catalog.parts import Append, Part, Term, dump_term
from headwater.catalog.refusals import dump_error
from headwater.catalog.schema import next_id
from headwater.errors import HeadwaterError, NotFoundError, TransactionEndedError
from headwater.model.markers import Marker
from headwater.runtime import failpoints

OPEN, COMMITTING, COMMITTED, ABORTED = "open", "committing", "committed", "aborted"


@dataclass
class Batch:
    """What a process adds to a transaction at once. `object_key` names the object that holds the blocks which are not inline.

    `id` is the batch's own: given again after a lost answer, it is not added twice. `widths` says how many open segments a stream had when
    events were spread over them.
    """

    id: int = 0
    appends: list[Append] = field(default_factory=list)
    terms: list[Term] = field(default_factory=list)
    object_key: str | None = None
    widths: dict[int, int] = field(default_factory=dict)
    #: Terms, staged or not, that the caller found to hold up to a later place, with what takes their place.
    looked: dict[Term, Term] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        return not self.appends and not self.terms

    @property
    def part(self) -> Part:
        return Part(tuple(self.appends), self.replace_looked(self.terms))

    def replace_looked(self, terms: Iterable[Term]) -> tuple[Term, ...]:
        """The terms, as they are to be checked."""
        return tuple([self.looked.get(term, term) for term in terms] if self.looked else terms)


@operation("commit", repeatable=True)
def begin(tx: Tx, id: str, lease_us: int, marker: Marker | None) -> bool:
    """Insert the transaction, whose lease begins now; False if it is there already."""
    sql = (
        "INSERT INTO txn (id, state, begun_at, lease, expires_at, next_ordinal, marker_owner, marker_sequence, marker_fingerprint) "
        "VALUES (?, 'open', now_us(), ?, now_us() + ?, 0, ?, ?, ?) ON CONFLICT (id) DO NOTHING RETURNING id"
    )
    return bool(tx.run(sql, (id, lease_us, lease_us, *(marker or (None, None, None)))))


@operation("commit", repeatable=True)
def renew(tx: Tx, id: str) -> None:
    """Put the time-out off by another lease. One that ran out is over, whether or not anybody looked."""
    live = "state IN ('open', 'committing') AND expires_at >= now_us()"
    if not tx.run(f"UPDATE txn SET expires_at = now_us() + lease WHERE id = ? AND {live} RETURNING id", (id,)):
        raise _ended(id, get_state(tx, id))


@operation("commit", repeatable=True)
def get_state(tx: Tx, id: str) -> str:
    """The state; an open transaction whose lease ran out is aborted by this look."""
    rows = tx.run("SELECT state, expires_at < now_us() FROM txn WHERE id = ? FOR UPDATE", (id,))
    if not rows:
        raise NotFoundError(f"there is no transaction {id}")
    if rows[0][0] in (OPEN, COMMITTING) and rows[0][1]:
        drop(tx, [id], "its lease ran out")
        return ABORTED
    return str(rows[0][0])


@operation("commit", repeatable=True)
def look_up(tx: Tx, id: str) -> tuple[str, int]:
    """(state, lease) of a transaction."""
    state = get_state(tx, id)
    return state, int(tx.run("SELECT lease FROM txn WHERE id = ?", (id,))[0][0])


@operation("statement")
def find_state(tx: Tx, id: str) -> str | None:
    """The state, without changing anything; None if the lease ran out, which `get_state` makes final."""
    rows = tx.run("SELECT state, expires_at < now_us() FROM txn WHERE id = ?", (id,))
    if not rows:
        raise NotFoundError(f"there is no transaction {id}")
    return None if rows[0][0] in (OPEN, COMMITTING) and rows[0][1] else str(rows[0][0])


@operation("read")
def find_unknown(tx: Tx, ids: Sequence[str]) -> list[str]:
    """Those of these ids that no transaction has."""
    if not ids:
        return []
    known = {row[0] for row in tx.run(f"SELECT id FROM txn WHERE id IN ({', '.join('?' * len(ids))})", ids)}
    return [id for id in ids if id not in known]


@operation("commit", repeatable=True)
def stage(tx: Tx, id: str, batch: Batch, after: int = 0) -> None:
    """Add blocks and changes to an open transaction, once, behind the batch `after` of the same caller, if it gave one before.

    Readers see nothing of them before the commit.
    """
    rows = tx.run(
        "UPDATE txn SET next_ordinal = next_ordinal + ? WHERE id = ? AND state = 'open' AND expires_at >= now_us() RETURNING next_ordinal",
        (len(batch.appends) + len(batch.terms), id),
    )
    if not rows:
        raise _ended(id, get_state(tx, id))
    check_staged(tx, id, after)
    if _mark(tx, id, batch.id):
        insert_staged(tx, id, batch, rows[0][0] - len(batch.appends) - len(batch.terms))
    failpoints.reach("txn.inserted")


def _mark(tx: Tx, id: str, batch: int) -> bool:
    """Leave a batch's mark among the terms, below all ordinals; False if it is there."""
    sql = (
        "INSERT INTO txn_term (txn, ordinal, place, kind, fields) VALUES (?, ?, 0, 'batch', '') "
        "ON CONFLICT (txn, ordinal, place) DO NOTHING RETURNING ordinal"
    )
    return bool(tx.run(sql, (id, -batch)))


def check_staged(tx: Tx, id: str, batch: int) -> None:
    """TransactionEndedError if an open transaction lacks a batch that its caller knows to be staged: the catalog went back in time."""
    if batch and not tx.run("SELECT 1 FROM txn_term WHERE txn = ? AND ordinal = ? AND place = 0", (id, -batch)):
        raise forgotten(id)


def _find_marks(tx: Tx, ids: Sequence[str]) -> frozenset[tuple[str, int]]:
    """(transaction, ordinal) of the marks that batches left in these transactions."""
    if not ids:
        return frozenset()
    sql = f"SELECT txn, ordinal FROM txn_term WHERE txn IN ({', '.join('?' * len(ids))}) AND ordinal < 0 AND place = 0"
    return frozenset((row[0], row[1]) for row in tx.run(sql, ids))


def forgotten(id: str) -> TransactionEndedError:
    return TransactionEndedError(
        f"the catalog went back in time and lost what transaction {id} had staged: nothing of it was stored", id=id
    )


def insert_staged(tx: Tx, id: str, batch: Batch, first: int) -> None:
    batch = with_object(tx, batch)
    tx.defer(
        "INSERT INTO txn_extent (txn, ordinal, stream, segment, count, length, crc, object, position, data) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        [
            (id, first + index, a.stream, a.segment, a.count, a.length, a.crc, a.object, a.position, a.data)
            for index, a in enumerate(batch.appends)
        ],
    )
    # A term that is about no block has an ordinal that no block has.
    behind = first + len(batch.appends)
    tx.defer(
        "INSERT INTO txn_term (txn, ordinal, place, kind, fields, data) VALUES (?, ?, ?, ?, ?, ?)",
        [
            (id, first + term.block if term.block >= 0 else behind + index, index, *dump_term(term))
            for index, term in enumerate(batch.terms)
        ],
    )


@operation("statement")
def list_objects(tx: Tx, id: str) -> list[tuple[str | None, int]]:
    """The objects that a transaction's staged blocks are in, None for one that the catalog does not have, and where the last block ends."""
    sql = (
        "SELECT o.key, max(e.position + e.length) FROM txn_extent e LEFT JOIN object o ON o.id = e.object "
        "WHERE e.txn = ? AND e.object IS NOT NULL GROUP BY e.object, o.key"
    )
    return [(row[0], int(row[1])) for row in tx.run(sql, (id,))]


def with_object(tx: Tx, batch: Batch) -> Batch:
    """Name the object that holds the batch's blocks. It is the transaction's, so its id is below zero: no session's."""
    if batch.object_key is None:
        return batch
    object_id = -next_id(tx, "staged_object")
    tx.run("INSERT INTO object (id, key, session) VALUES (?, ?, 0)", (object_id, batch.object_key))
    for append in batch.appends:
        if append.data is None:
            append.object = object_id
    return batch


@operation("commit", repeatable=True)
def adopt(tx: Tx, id: str, others: Sequence[tuple[str, int]], batch: int, after: int = 0) -> None:
    """Move what other open transactions staged behind what this one has, in the given order; they end, with nothing. Given again: once.

    Each comes with the last batch that its handle staged, 0 if that is not known. It leaves a mark, as the batch `batch` of its caller, and
    comes behind `after` as in `stage`.
    """
    marks = ", ".join("?" * (len(others) + 1))
    sql = f"SELECT id, state, expires_at < now_us(), next_ordinal, result FROM txn WHERE id IN ({marks}) ORDER BY id FOR UPDATE"
    rows = {row[0]: row[1:] for row in tx.run(sql, (id, *(other for other, _ in others)))}
    state, expired, behind, _ = rows[id]
    if state != OPEN or expired:
        raise _ended(id, get_state(tx, id))
    check_staged(tx, id, after)
    _mark(tx, id, batch)
    staged = _find_marks(tx, [other for other, last in others if last])
    outcome = json.dumps({"reason": f"{id} took over what it staged", "error": None, "adopted_by": id})
    for other, last in others:
        if other not in rows:
            raise NotFoundError(f"there is no transaction {other}")
        state, expired, length, result = rows[other]
        if state == ABORTED and result == outcome:
            continue
        if state != OPEN or expired:
            raise _ended(other, get_state(tx, other))
        if last and (other, -last) not in staged:
            raise forgotten(other)
        tx.run("DELETE FROM txn_term WHERE txn = ? AND ordinal < 0", (other,))
        tx.run("UPDATE txn_term SET txn = ?, ordinal = ordinal + ? WHERE txn = ?", (id, behind, other))
        tx.run("UPDATE txn_extent SET txn = ?, ordinal = ordinal + ? WHERE txn = ?", (id, behind, other))
        tx.run("UPDATE txn SET state = 'aborted', ended_at = now_us(), result = ? WHERE id = ?", (outcome, other))
        behind += length
    tx.run("UPDATE txn SET next_ordinal = ? WHERE id = ?", (behind, id))
    failpoints.reach("adopt.applied")


@operation("commit", repeatable=True)
def abort(tx: Tx, id: str, lease_us: int) -> None:
    """Drop all that was staged. Aborting again changes nothing; a committed one raises."""
    # If a commit of it is still under way somewhere, this waits for it; if it never was known, it is now, as aborted.
    begin(tx, id, lease_us, None)
    state = get_state(tx, id)
    if state == COMMITTED:
        raise _ended(id, state)
    if state != ABORTED:
        drop(tx, [id], "it was aborted")


@operation("statement")
def has_expired(tx: Tx) -> bool:
    """Whether `abort_expired` would abort any."""
    return bool(tx.run("SELECT 1 FROM txn WHERE state IN ('open', 'committing') AND expires_at < now_us() LIMIT 1"))


@operation("commit", repeatable=True)
def abort_expired(tx: Tx) -> list[str]:
    """Abort every transaction whose lease ran out before its commit. A wrong guess costs a retry, never data."""
    sql = "SELECT id FROM txn WHERE state IN ('open', 'committing') AND expires_at < now_us() ORDER BY id LIMIT 100 FOR UPDATE"
    rows = tx.run(sql)
    ids = [row[0] for row in rows]
    drop(tx, ids, "its lease ran out")
    return ids


def abort_staged_in(tx: Tx, stream: int, reason: str = "a stream it writes to was sealed") -> None:
    """Abort the open transactions that have something staged for a stream."""
    rows = tx.run(
        "SELECT id FROM txn WHERE state IN ('open', 'committing') AND id IN (SELECT txn FROM txn_extent WHERE stream = ?) "
        "ORDER BY id FOR UPDATE",
        (stream,),
    )
    drop(tx, [row[0] for row in rows], reason)


def drop(tx: Tx, ids: Sequence[str], reason: str, error: HeadwaterError | None = None) -> None:
    """Abort transactions. Whoever commits one of them is told the error, if there is one."""
    result = json.dumps({"reason": reason, "error": None if error is None else dump_error(error)})
    for id in ids:
        forget_staged(tx, id)
        tx.run("UPDATE txn SET state = 'aborted', ended_at = now_us(), result = ? WHERE id = ?", (result, id))
        failpoints.reach("txn.dropped")


def forget_staged(tx: Tx, id: str) -> None:
    tx.run("DELETE FROM txn_term WHERE txn = ?", (id,))
    tx.run("DELETE FROM txn_extent WHERE txn = ?", (id,))


class TransactionRow(NamedTuple):
    """A transaction as the catalog has it; `streams` are those it has something staged for, or wrote to."""

    id: str
    state: str
    begun_at: int
    expires_at: int
    ended_at: int | None
    streams: tuple[str, ...]
    marker: Marker | None


@operation("read")
def list_transactions(tx: Tx, limit: int, only_open: bool) -> list[TransactionRow]:
    """List the newest transactions first, with a few statements however many transactions there are.

    Leave out aborted ones that never staged anything and had no marker: the leases of processes that found nothing to do.
    """
    is_open = "WHERE state IN ('open', 'committing')"
    is_shown = "WHERE state <> 'aborted' OR next_ordinal > 0 OR marker_owner IS NOT NULL"
    newest = "ORDER BY begun_at DESC, id LIMIT ?"
    columns = "id, state, begun_at, expires_at, ended_at, result, marker_owner, marker_sequence, marker_fingerprint"
    # Only open transactions have staged blocks. The newest open ones include all open ones among the newest of all.
    staged = f"SELECT DISTINCT txn, stream FROM txn_extent WHERE txn IN (SELECT id FROM txn {is_open} {newest})"
    rows, staged_rows = tx.run_all(
        [
            (f"SELECT {columns} FROM txn {is_open if only_open else is_shown} {newest}", (limit,)),
            (f"SELECT e.txn, s.id, s.scope, s.name FROM ({staged}) e JOIN stream s ON s.id = e.stream", (limit,)),
        ]
    )
    names = {stream: f"{scope}/{name}" for _, stream, scope, name in staged_rows}
    streams: dict[str, set[int]] = {row[0]: set() for row in rows}
    for id, stream, _, _ in staged_rows:
        streams.setdefault(id, set()).add(stream)
    for id, state, _, _, _, result, *_ in rows:
        if state == COMMITTED:
            streams[id] |= load_tails(json.loads(result)["tails"]).keys()
    names |= full_names(tx, sorted(set().union(*streams.values()) - names.keys()))
    return [
        TransactionRow(
            id,
            state,
            begun_at,
            expires_at,
            ended_at,
            tuple(names[stream] for stream in sorted(streams[id]) if stream in names),
            Marker(*fields) if fields[0] is not None else None,
        )
        for id, state, begun_at, expires_at, ended_at, _, *fields in rows
    ]


def full_names(tx: Tx, streams: Sequence[int]) -> dict[int, str]:
    """The full names of streams, without those that were deleted."""
    names: dict[int, str] = {}
    # SQLite takes at most 32,766 values in a statement.
    for start in range(0, len(streams), 10_000):
        some = streams[start : start + 10_000]
        sql = f"SELECT id, scope, name FROM stream WHERE id IN ({', '.join('?' * len(some))})"
        names |= {id: f"{scope}/{name}" for id, scope, name in tx.run(sql, some)}
    return names


def _ended(id: str, state: str) -> TransactionEndedError:
    return TransactionEndedError(f"transaction {id} is {state} already", state=state, id=id)


def load_tails(tails: dict[str, dict[str, int]]) -> dict[int, dict[int, int]]:
    return {int(stream): {int(number): tail for number, tail in found.items()} for stream, found in tails.items()}
