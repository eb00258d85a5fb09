"""Committing transactions: one part, of what was staged and what comes along, with the transaction's row as the receipt.

Transactions that must roll are prepared first, so that all that wait share one roll. Lock order: transaction, marker, stream, segment,
writer, group.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from headwater.catalog import segments
from headwater.catalog.database import Database, Statement, Tx
from headwater.catalog.flushes import add_extent, grow
from headwater.catalog.operations import operation
from headwater.catalog.parts import CLAIMED, REWOUND, SEALED, Append, Part, Refused, Term, load_term
from headwater.catalog.persists import RESCALED
from headwater.catalog.plans import Plan
from headwater.catalog.refusals import load_error
from headwater.catalog.tails import Tail, Tails
from headwater.catalog.targets import RouteStale, ScaledMeanwhile, by_stream, open_targets, rolled_targets
from headwater.catalog.transactions import (
    COMMITTED,
    COMMITTING,
    OPEN,
    Batch,
    begin,
    check_staged,
    drop,
    forget_staged,
    forgotten,
    insert_staged,
    load_tails,
    with_object,
)
from headwater.errors import ConflictError, HeadwaterError, InvalidRequestError, TransactionEndedError
from headwater.model.markers import Marker
from headwater.runtime import failpoints

#: The sequence of a marker's row while its first commit is under way: below all that can be given.
NO_SEQUENCE = -(1 << 63)


class Outcome(NamedTuple):
    """A commit: for each stream, the tails of its open segments right behind it."""

    id: str
    tails: dict[int, dict[int, int]]
    repeated: bool


@operation("commit", repeatable=True)
def commit(
    tx: Tx,
    id: str,
    batch: Batch,
    marker: Marker | None,
    lease_us: int,
    by: str,
    after: int | None = None,
) -> Outcome:
    """Commit what is staged together with `batch`. Given again by the same caller (`by`), it answers the same.

    `after` is the last batch that the caller staged, 0 for none, None if the catalog need not know of the transaction.
    RollNeeded if a staged segment was split meanwhile; ConflictError and its kind if a condition does not hold: then it is aborted.
    """
    plan = Plan([batch.part])
    wanted = by_stream((append.stream, append.segment) for append in batch.appends)
    # Those that are locked may be all of a stream's open ones. If they are not, they are looked up with the locks: no trip more.
    looked = [stream for stream, numbers in wanted.items() if batch.widths.get(stream) != len(numbers)]
    # All that a transaction needs which was never staged, in one round trip; its commit is the second. Whether it is known is asked
    # last: an earlier attempt of this commit, whose connection was lost, has ended when its locks can be had.
    held = [_lock_marker(marker.owner)] if marker is not None else []
    locks, opens, looks = plan.locks(), [segments.opened(stream) for stream in looked], plan.looks()
    known_now: Statement = "SELECT now_us(), (SELECT state FROM txn WHERE id = ?)", (id,)
    *answers, known = tx.run_all([*held, *locks, *opens, *looks, known_now])
    answers = answers[len(held) :]
    now, state = known[0]
    if state is None and after is not None:
        raise forgotten(id)
    if state is not None:
        earlier, marker, batch = _look_again(tx, id, batch, marker, by)
        if earlier is not None:
            return earlier
    repeated = _check_marker(tx, marker)
    if repeated is not None:
        if repeated.id == id:
            # The marker's row is what this waited for, and an earlier attempt of this commit had it.
            earlier, _, _ = _look_again(tx, id, batch, marker, by)
            if earlier is None:
                raise ConflictError(f"transaction {id} holds its marker, and is not committed: the catalog contradicts itself")
            return earlier
        begin(tx, id, lease_us, marker)
        drop(tx, [id], f"its marker was committed by {repeated.id}")
        return repeated
    batch = with_object(tx, batch)
    if state is None:
        plan.load_tails(answers[: len(locks)])
        plan.load_looks(tx, answers[len(locks) + len(opens) :])
        _decide(tx, plan, now, RouteStale)
        tails = {stream: {number: plan.tails[stream, number].tail for number in numbers} for stream, numbers in wanted.items()}
        for stream, rows in zip(looked, answers[len(locks) :], strict=False):
            tails[stream] = {row.number: row.tail for row in map(segments.to_row, rows)} | tails[stream]
        times = now, lease_us, now + lease_us
        outcome = _note_commit(tx, id, tails, _added(batch.appends, [], plan.tails), marker, by, times)
    else:
        if state == OPEN:
            check_staged(tx, id, after or 0)
        sums = _sums(tx, id)
        plan = Plan([_part(tx, id, sums, batch)])
        plan.find(tx)
        staged = {(row.stream, row.segment) for row in sums}
        needed = staged | {(append.stream, append.segment) for append in batch.appends}
        plan.tails.update(open_targets(tx, needed, staged, plan.watched()))
        outcome = _commit_staged(tx, id, plan, sums, marker, by, ScaledMeanwhile)
    failpoints.reach("txn.applied")
    return outcome


@operation("database", repeatable=True)
def commit_one(database: Database, id: str, batch: Batch, lease_us: int, by: str) -> Outcome | None:
    """A transaction of one block, to a stream of one segment, that the catalog does not know yet: in one round trip.

    None if it is another one, if it is known by now, or if its segment is no longer open.
    """
    if len(batch.appends) != 1 or batch.terms or batch.object_key is not None:
        return None
    append = batch.appends[0]
    stream = append.stream
    if batch.widths.get(stream) != 1:
        return None
    place = stream, append.segment
    # Around the tail, which the database knows.
    before, after = _result({stream: {append.segment: None}}, by, {stream: {append.segment: append.count}}).split("null", 1)
    answers = database.write_whole(
        [
            grow(append),
            *add_extent(append),
            (
                "INSERT INTO txn (id, state, begun_at, lease, expires_at, ended_at, next_ordinal, result) "
                "VALUES (?, 'committed', now_us(), ?, now_us() + ?, now_us(), 0, "
                "(SELECT ? || CAST(tail AS TEXT) || ? FROM segment WHERE stream = ? AND number = ?))",
                (id, lease_us, lease_us, before, after, *place),
            ),
        ],
        "txn.applied",
    )
    if answers is None:
        return None
    database.announce()
    return Outcome(id, {stream: {append.segment: answers[0][0][0]}}, False)


def _result(tails: Mapping[int, Mapping[int, int | None]], by: str, added: Mapping[int, Mapping[int, int]]) -> str:
    """What is kept of a commit: what it answered, to whom, and how many events it added to each segment."""
    return json.dumps({"tails": tails, "by": by, "added": added})


@operation("commit", repeatable=True)
def prepare(tx: Tx, id: str, batch: Batch, by: str) -> None:
    """Stage the rest and wait for a roll: from here on any process may commit it, together with others."""
    rows = tx.run(
        "UPDATE txn SET next_ordinal = next_ordinal + ?, state = 'committing', result = ? WHERE id = ? AND state = 'open' "
        "RETURNING next_ordinal",
        (len(batch.appends) + len(batch.terms), json.dumps({"by": by}), id),
    )
    if rows:
        insert_staged(tx, id, batch, rows[0][0] - len(batch.appends) - len(batch.terms))


@operation("statement")
def count_waiting(tx: Tx) -> int:
    """How many transactions wait for a roll."""
    return int(tx.run("SELECT count(*) FROM txn WHERE state = 'committing'")[0][0])


@operation("commit", repeatable=True)
def commit_prepared(tx: Tx, id: str, batch: Batch, by: str) -> Outcome | HeadwaterError:
    """Commit a prepared transaction and all others that wait: they share one roll of each stream. A failing one is aborted alone.

    Why this one failed is returned, not raised: the others' commits stand. That may be that another caller prepared it, without `batch`.
    """
    sql = "SELECT id FROM txn WHERE state = 'committing' AND (id = ? OR expires_at >= now_us()) ORDER BY id FOR UPDATE"
    waiting = [row[0] for row in tx.run(sql, (id,))]
    sums = {other: _sums(tx, other) for other in waiting}
    plans = {other: Plan([_part(tx, other, sums[other], Batch())]) for other in waiting}
    for plan in plans.values():
        plan.find(tx)
    needed = {(row.stream, row.segment) for rows in sums.values() for row in rows}
    targets, gone = rolled_targets(tx, needed, [watch for plan in plans.values() for watch in plan.watched()])
    for other, plan in plans.items():
        plan.tails.update(targets)
        columns = "marker_owner, marker_sequence, marker_fingerprint, result"
        *fields, result = tx.run(f"SELECT {columns} FROM txn WHERE id = ?", (other,))[0]
        marker = Marker(*fields) if fields[0] is not None else None
        try:
            lost = next((gone[row.stream] for row in sums[other] if row.stream in gone), None)
            if lost is not None:
                raise lost
            repeated = _check_marker(tx, marker)
            if repeated is not None:
                drop(tx, [other], f"its marker was committed by {repeated.id}")
            else:
                _commit_staged(tx, other, plan, sums[other], marker, json.loads(result)["by"])
        except HeadwaterError as error:
            drop(tx, [other], error.message, error)
    failpoints.reach("txn.rolled")
    try:
        outcome, _, _ = _look_again(tx, id, batch, None, by)
    except HeadwaterError as error:
        return error
    return forgotten(id) if outcome is None else outcome


def _look_again(tx: Tx, id: str, batch: Batch, marker: Marker | None, by: str) -> tuple[Outcome | None, Marker | None, Batch]:
    """(what a commit said before or None, the marker, what is still to be added) of a transaction that may have ended.

    TransactionEndedError if it was aborted, or committed by another caller without `batch`; or what made it fail.
    """
    columns = "state, expires_at < now_us(), result, marker_owner, marker_sequence, marker_fingerprint"
    state, expired, result, *fields = tx.run(f"SELECT {columns} FROM txn WHERE id = ? FOR UPDATE", (id,))[0]
    if marker is None and fields[0] is not None:
        marker = Marker(*fields)
    if state == COMMITTED:
        found = json.loads(result)
        if not batch.is_empty and found["by"] != by:
            raise TransactionEndedError(
                f"transaction {id} was committed by another caller: what this one adds to it was not stored", state=COMMITTED
            )
        return Outcome(id, load_tails(found["tails"]), False), marker, batch
    if state == COMMITTING:
        # All was staged when it was prepared; another caller's part is not.
        if not batch.is_empty and json.loads(result)["by"] != by:
            raise TransactionEndedError(f"transaction {id} is being committed by another caller: what this one adds to it was not stored")
        return None, marker, Batch()
    if state == OPEN and not expired:
        return None, marker, batch
    repeated = _check_marker(tx, marker)
    if repeated is not None:
        return repeated, marker, batch
    if state == OPEN:
        raise TransactionEndedError(f"transaction {id} was aborted: its lease ran out")
    found = json.loads(result)
    if found["error"] is not None:
        raise load_error(found["error"])
    raise TransactionEndedError(f"transaction {id} was aborted: {found['reason']}")


def _check_marker(tx: Tx, marker: Marker | None) -> Outcome | None:
    """The commit that had this marker before, None if it is new. ConflictError if it is old, or means other data."""
    if marker is None:
        return None
    rows = tx.run(*_lock_marker(marker.owner))
    if not rows:
        # A row to lock: of two first commits the second waits here, and then finds the first one's.
        tx.run(
            "INSERT INTO marker (owner, sequence, txn, result) VALUES (?, ?, '', '') ON CONFLICT (owner) DO NOTHING",
            (marker.owner, NO_SEQUENCE),
        )
        rows = tx.run(*_lock_marker(marker.owner))
    if rows[0][0] < marker.sequence:
        return None
    sequence, fingerprint, first, result = rows[0]
    if sequence == marker.sequence and fingerprint == marker.fingerprint:
        return Outcome(first, load_tails(json.loads(result)), True)
    raise ConflictError(
        f"marker {marker.owner!r}: sequence {marker.sequence} with fingerprint {marker.fingerprint!r} was asked for, "
        f"sequence {sequence} with fingerprint {fingerprint!r} is committed already: nothing was stored",
        committed=sequence,
    )


@operation("statement")
def find_marker(tx: Tx, owner: str) -> Marker | None:
    """The last one that was committed for an owner."""
    rows = tx.run("SELECT owner, sequence, fingerprint FROM marker WHERE owner = ? AND sequence > ?", (owner, NO_SEQUENCE))
    return Marker(*rows[0]) if rows else None


def _lock_marker(owner: str) -> Statement:
    return "SELECT sequence, fingerprint, txn, result FROM marker WHERE owner = ? FOR UPDATE", (owner,)


class _Sum(NamedTuple):
    """All of a transaction's staged blocks for one segment, as one sum."""

    stream: int
    segment: int
    events: int
    bytes: int


def _sums(tx: Tx, id: str) -> list[_Sum]:
    sql = (
        "SELECT stream, segment, CAST(sum(count) AS BIGINT), CAST(sum(length) AS BIGINT) FROM txn_extent "
        "WHERE txn = ? GROUP BY stream, segment ORDER BY stream, segment"
    )
    return [_Sum(*row) for row in tx.run(sql, (id,))]


def _part(tx: Tx, id: str, sums: Sequence[_Sum], batch: Batch) -> Part:
    """The one part of a transaction of which something may be staged: the staged terms, then those of the batch that comes along."""
    rows = tx.run("SELECT ordinal, kind, fields, data FROM txn_term WHERE txn = ? AND ordinal >= 0 ORDER BY ordinal, place", (id,))
    ordinals = [row[0] for row in tx.run("SELECT ordinal FROM txn_extent WHERE txn = ? ORDER BY ordinal", (id,))] if rows else []
    blocks = {ordinal: block for block, ordinal in enumerate(ordinals)}
    terms: list[Term] = [load_term(kind, fields, data, blocks.get(ordinal, -1)) for ordinal, kind, fields, data in rows]
    # Unless terms that were staged ask for them, the places of staged blocks are not looked up, and blocks are counted without them.
    terms += [term.of_block(term.block + len(ordinals)) if term.block >= 0 else term for term in batch.terms]
    return Part(tuple(batch.appends), batch.replace_looked(terms), _StagedBlocks(id, sums, bool(rows)) if sums else None)


class _StagedBlocks:
    """A transaction's staged blocks. They are moved by statements over all of them, and their bytes are not read."""

    def __init__(self, id: str, sums: Sequence[_Sum], is_placed: bool) -> None:
        self._id = id
        self._is_placed = is_placed
        self.segments = [(row.stream, row.segment) for row in sums]

    def place(self, tx: Tx, tails: Tails, now: int) -> list[tuple[int, int, int]]:
        places = self._places(tx, tails) if self._is_placed else []
        for target in {tails[key].log: tails[key] for key in self.segments}.values():
            _move(tx, self._id, target, sorted(key for key in self.segments if tails[key] is target), now)
        return places

    def _places(self, tx: Tx, tails: Tails) -> list[tuple[int, int, int]]:
        found = []
        behind: dict[int, int] = {}
        for stream, segment, count in tx.run("SELECT stream, segment, count FROM txn_extent WHERE txn = ? ORDER BY ordinal", (self._id,)):
            tail = tails[stream, segment]
            first = behind.get(tail.log, tail.tail)
            found.append((stream, tail.number, first))
            behind[tail.log] = first + count
        return found


def _commit_staged(
    tx: Tx, id: str, plan: Plan, sums: Sequence[_Sum], marker: Marker | None, by: str, rescaled: type[Exception] | None = None
) -> Outcome:
    """Commit a plan whose segments are locked, of a transaction that the catalog knows."""
    looks = plan.looks()
    *answers, [[now]] = tx.run_all([*looks, ("SELECT now_us()", ())])
    plan.load_looks(tx, answers)
    _decide(tx, plan, now, rescaled)
    forget_staged(tx, id)
    appends = plan.parts[0].appends
    streams = sorted({row.stream for row in sums} | {append.stream for append in appends})
    tails = {stream: {row.number: row.tail for row in segments.list_open_segments(tx, stream)} for stream in streams}
    return _note_commit(tx, id, tails, _added(appends, sums, plan.tails), marker, by, None)


def _decide(tx: Tx, plan: Plan, now: int, rescaled: type[Exception] | None) -> None:
    """Enter the plan's one part, or raise why it is refused; `rescaled` if segments to watch were sealed since they were looked up."""
    [part], [result] = plan.parts, plan.decide(tx, now)
    if isinstance(result, Refused):
        if result.reason == SEALED:
            raise RouteStale
        if result.reason == REWOUND:
            raise InvalidRequestError("this transaction writes to a stream that it rolls back or replaces: do that in two")
        if result.reason == CLAIMED:
            raise ConflictError(
                f"a stream of this transaction is claimed by {result.facts['owner']!r}: only its owner appends to it until it is released",
                owner=result.facts["owner"],
            )
        if result.reason == RESCALED and rescaled is not None:
            raise rescaled
        raise part.terms[result.term].error(result)
    plan.enter(tx)


def _added(appends: Iterable[Append], sums: Iterable[_Sum], tails: Tails) -> dict[int, dict[int, int]]:
    """How many events a commit added to each segment."""
    added: dict[int, dict[int, int]] = {}
    counts = [*(row[:3] for row in sums), *((append.stream, append.segment, append.count) for append in appends)]
    for stream, segment, events in counts:
        number = tails[stream, segment].number
        found = added.setdefault(stream, {})
        found[number] = found.get(number, 0) + events
    return added


def _note_commit(
    tx: Tx,
    id: str,
    tails: dict[int, dict[int, int]],
    added: dict[int, dict[int, int]],
    marker: Marker | None,
    by: str,
    times: tuple[int, int, int] | None,
) -> Outcome:
    """Leave the receipt: the transaction's row, and its marker's. `times` are of one that the catalog does not know: when it began, its
    lease, and until when."""
    result = _result(tails, by, added)
    if times is not None:
        tx.defer(
            "INSERT INTO txn (id, state, begun_at, lease, expires_at, ended_at, next_ordinal, marker_owner, marker_sequence, "
            "marker_fingerprint, result) VALUES (?, 'committed', ?, ?, ?, now_us(), 0, ?, ?, ?, ?)",
            [(id, *times, *(marker or (None, None, None)), result)],
        )
    else:
        tx.defer("UPDATE txn SET state = 'committed', ended_at = now_us(), result = ? WHERE id = ?", [(result, id)])
    if marker is not None:
        tx.defer(
            "INSERT INTO marker (owner, sequence, fingerprint, txn, result, committed_at) VALUES (?, ?, ?, ?, ?, now_us()) "
            "ON CONFLICT (owner) DO UPDATE SET sequence = excluded.sequence, fingerprint = excluded.fingerprint, txn = excluded.txn, "
            "result = excluded.result, committed_at = excluded.committed_at",
            [(marker.owner, marker.sequence, marker.fingerprint, id, json.dumps(tails))],
        )
    return Outcome(id, tails, False)


def _move(tx: Tx, id: str, target: Tail, keys: list[tuple[int, int]], now: int) -> None:
    """Move a transaction's blocks behind a segment's tail, in the order in which they were staged."""
    stream = keys[0][0]
    marks = ", ".join("?" * len(keys))
    mine = (id, stream, *(segment for _, segment in keys))
    firsts = "? + CAST(sum(count) OVER (ORDER BY ordinal) AS BIGINT) - count"
    where = f"FROM txn_extent WHERE txn = ? AND stream = ? AND segment IN ({marks})"
    at = target.append_time(now)
    tx.run(
        "INSERT INTO inline_block (log, first, data) SELECT log, first, data FROM "
        f"(SELECT CAST(? AS BIGINT) AS log, {firsts} AS first, data {where}) AS moved WHERE data IS NOT NULL",
        (target.log, target.tail, *mine),
    )
    tx.run(
        "INSERT INTO extent (log, first, count, length, crc, appended_at, object, position) "
        f"SELECT CAST(? AS BIGINT), {firsts}, count, length, crc, CAST(? AS BIGINT), object, position {where}",
        (target.log, target.tail, at, *mine),
    )
    events, size = tx.run(f"SELECT CAST(sum(count) AS BIGINT), CAST(sum(length) AS BIGINT) {where}", mine)[0]
    target.grow(events or 0, size or 0, at)
