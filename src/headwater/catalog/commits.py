"""Committing transactions: everything that was staged, and what comes along, in one transaction of the catalog.

Those that must roll are prepared first, so that all that wait share one roll. Lock order: transaction, marker, stream, segment, table
entries, group.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple

from headwater.catalog import groups, segments, tables
from headwater.catalog.database import Database, Statement, Tx
from headwater.catalog.flushes import PlacedBlock, add_extent, enter_blocks, grow
from headwater.catalog.segments import SegmentRow
from headwater.catalog.targets import RouteStale, Target, Targets, by_stream, open_targets, rolled_targets
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
from headwater.errors import (
    ConditionFailedError,
    ConflictError,
    FencedError,
    HeadwaterError,
    NotFoundError,
    SealedError,
    TransactionEndedError,
)
from headwater.model.markers import Marker
from headwater.runtime import failpoints

#: Errors that a commit made by another process may have left for this one: told as what they are.
_TOLD = {kind.__name__: kind for kind in (ConditionFailedError, ConflictError, FencedError, NotFoundError, SealedError)}


#: The sequence of a marker's row while its first commit is under way: below all that can be given.
_NO_SEQUENCE = -(1 << 63)


class Outcome(NamedTuple):
    """A commit: for each stream, the tails of its open segments right behind it."""

    id: str
    tails: dict[int, dict[int, int]]
    repeated: bool


def commit(
    tx: Tx,
    id: str,
    batch: Batch,
    marker: Marker | None,
    lease_us: int,
    age_us: int,
    by: str,
    open_us: int = 0,
    after: int | None = None,
) -> Outcome:
    """Commit what is staged together with `batch`. Given again by the same caller (`by`), it answers the same.

    `after` is the last batch that the caller staged, 0 for none, None if the catalog need not know of the transaction.
    RollNeeded if a staged segment was split meanwhile; ConflictError and its kind if a condition does not hold: then it is aborted.
    """
    wanted = by_stream((item.stream, item.append.segment) for item in batch.appends)
    locks = [segments.locked(stream, numbers) for stream, numbers in wanted.items()]
    # Those that are locked may be all of a stream's open ones. If they are not, they are looked up with the locks: no trip more.
    looked = [stream for stream, numbers in wanted.items() if batch.widths.get(stream) != len(numbers)]
    looks = [segments.opened(stream) for stream in looked]
    # All that a transaction needs which was never staged, in one round trip; its commit is the second. Whether it is known is asked
    # last: an earlier attempt of this commit, whose connection was lost, has ended when its locks can be had.
    held = [_lock_marker(marker.owner)] if marker is not None else []
    *answers, known = tx.run_all([*held, *locks, *looks, ("SELECT now_us(), (SELECT state FROM txn WHERE id = ?)", (id,))])
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
            assert earlier is not None, "it is committed"
            return earlier
        begin(tx, id, lease_us, age_us, marker, open_us)
        drop(tx, [id], f"its marker was committed by {repeated.id}")
        return repeated
    batch = with_object(tx, batch)
    if state is None:
        rows = {stream: [segments.to_row(row) for row in found] for stream, found in zip(wanted, answers, strict=False)}
        targets = {(stream, row.number): Target(row) for stream, found in rows.items() for row in found if row.is_open}
        if len(targets) < sum(map(len, wanted.values())):
            raise RouteStale
        if any(item.append.log not in (0, targets[item.stream, item.append.segment].log) for item in batch.appends):
            raise RouteStale
        opened = rows | {
            stream: [segments.to_row(row) for row in found] for stream, found in zip(looked, answers[len(locks) :], strict=True)
        }
        times = now - open_us, lease_us, now + lease_us - age_us
        outcome = _apply(tx, id, batch, [], targets, marker, by, now, _New(opened, times))
    else:
        if state == OPEN:
            check_staged(tx, id, after or 0)
        staged = _staged(tx, id)
        needed = {(row.stream, row.segment) for row in staged} | {(item.stream, item.append.segment) for item in batch.appends}
        targets = open_targets(tx, needed, {(row.stream, row.segment) for row in staged})
        outcome = _apply(tx, id, batch, staged, targets, marker, by, tx.run("SELECT now_us()")[0][0])
    failpoints.reach("txn.applied")
    return outcome


def commit_one(database: Database, id: str, batch: Batch, lease_us: int, age_us: int, by: str, open_us: int) -> Outcome | None:
    """A transaction of one block, to a stream of one segment, that the catalog does not know yet: in one round trip.

    None if it is another one, if it is known by now, or if its segment is no longer open.
    """
    if len(batch.appends) != 1 or batch.changes or batch.object_key is not None:
        return None
    stream, append, expected = batch.appends[0]
    if expected is not None or batch.widths.get(stream) != 1:
        return None
    place = stream, append.segment
    # Around the tail, which the database knows.
    before, after = _result({stream: {append.segment: None}}, by, {stream: {append.segment: append.count}}).split("null", 1)
    answers = database.write_whole(
        [
            grow(stream, append),
            *add_extent(stream, append),
            (
                "INSERT INTO txn (id, state, begun_at, lease, expires_at, ended_at, next_ordinal, result) "
                "VALUES (?, 'committed', now_us() - ?, ?, now_us() + ?, now_us(), 0, "
                "(SELECT ? || CAST(tail AS TEXT) || ? FROM segment WHERE stream = ? AND number = ?))",
                (id, open_us, lease_us, lease_us - age_us, before, after, *place),
            ),
        ],
        "txn.applied",
    )
    return None if answers is None else Outcome(id, {stream: {append.segment: answers[0][0][0]}}, False)


def _result(tails: Mapping[int, Mapping[int, int | None]], by: str, added: Mapping[int, Mapping[int, int]]) -> str:
    """What is kept of a commit: what it answered, to whom, and how many events it added to each segment."""
    return json.dumps({"tails": tails, "by": by, "added": added})


def prepare(tx: Tx, id: str, batch: Batch, by: str) -> None:
    """Stage the rest and wait for a roll: from here on any process may commit it, together with others."""
    rows = tx.run(
        "UPDATE txn SET next_ordinal = next_ordinal + ?, state = 'committing', result = ? WHERE id = ? AND state = 'open' "
        "RETURNING next_ordinal",
        (len(batch.appends) + len(batch.changes), json.dumps({"by": by}), id),
    )
    if rows:
        insert_staged(tx, id, batch, rows[0][0] - len(batch.appends) - len(batch.changes))


def count_waiting(tx: Tx) -> int:
    """How many transactions wait for a roll."""
    return int(tx.run("SELECT count(*) FROM txn WHERE state = 'committing'")[0][0])


def commit_prepared(tx: Tx, id: str, batch: Batch, by: str) -> Outcome | HeadwaterError:
    """Commit a prepared transaction and all others that wait: they share one roll of each stream. A failing one is aborted alone.

    Why this one failed is returned, not raised: the others' commits stand. That may be that another caller prepared it, without `batch`.
    """
    sql = "SELECT id FROM txn WHERE state = 'committing' AND (id = ? OR expires_at >= now_us()) ORDER BY id FOR UPDATE"
    waiting = [row[0] for row in tx.run(sql, (id,))]
    staged = {other: _staged(tx, other) for other in waiting}
    needed = {(row.stream, row.segment) for rows in staged.values() for row in rows}
    targets, gone = rolled_targets(tx, needed)
    now = tx.run("SELECT now_us()")[0][0]
    for other in waiting:
        columns = "marker_owner, marker_sequence, marker_fingerprint, result"
        *fields, result = tx.run(f"SELECT {columns} FROM txn WHERE id = ?", (other,))[0]
        marker = Marker(*fields) if fields[0] is not None else None
        try:
            lost = next((gone[row.stream] for row in staged[other] if row.stream in gone), None)
            if lost is not None:
                raise lost
            repeated = _check_marker(tx, marker)
            if repeated is not None:
                drop(tx, [other], f"its marker was committed by {repeated.id}")
            else:
                _apply(tx, other, Batch(), staged[other], targets, marker, json.loads(result)["by"], now)
        except HeadwaterError as error:
            drop(tx, [other], error.message, type(error).__name__)
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
    if found["kind"] in _TOLD:
        raise _TOLD[found["kind"]](found["reason"])
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
            (marker.owner, _NO_SEQUENCE),
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


def find_marker(tx: Tx, owner: str) -> Marker | None:
    """The last one that was committed for an owner."""
    rows = tx.run("SELECT owner, sequence, fingerprint FROM marker WHERE owner = ? AND sequence > ?", (owner, _NO_SEQUENCE))
    return Marker(*rows[0]) if rows else None


def _lock_marker(owner: str) -> Statement:
    return "SELECT sequence, fingerprint, txn, result FROM marker WHERE owner = ? FOR UPDATE", (owner,)


class _Staged(NamedTuple):
    """All of a transaction's blocks for one segment, as one sum."""

    stream: int
    segment: int
    events: int
    bytes: int
    conditions: int


def _staged(tx: Tx, id: str) -> list[_Staged]:
    sql = (
        "SELECT stream, segment, CAST(sum(count) AS BIGINT), CAST(sum(length) AS BIGINT), count(expected_tail) FROM txn_extent "
        "WHERE txn = ? GROUP BY stream, segment ORDER BY stream, segment"
    )
    return [_Staged(*row) for row in tx.run(sql, (id,))]


class _New(NamedTuple):
    """A transaction of which nothing was staged: the open segments of each stream, and when it began, its lease, and until when."""

    opened: dict[int, list[SegmentRow]]
    times: tuple[int, int, int]


def _apply(
    tx: Tx,
    id: str,
    batch: Batch,
    staged: list[_Staged],
    targets: Targets,
    marker: Marker | None,
    by: str,
    now: int,
    new: _New | None = None,
) -> Outcome:
    """Append, change and record everything, once each condition was found to hold."""
    _check_tails(tx, id, batch, staged, targets)
    used = {
        key: targets[key]
        for key in sorted({(row.stream, row.segment) for row in staged} | {(s.stream, s.append.segment) for s in batch.appends})
    }
    changes = _numbered_changes(tx, id, batch, staged, used, new is not None) if new is None or batch.changes else []
    entries, positions = ([change for change in changes if (change.kind == "reader") is is_reader] for is_reader in (False, True))
    tables.check_entries(tx, entries)
    groups.check_positions(tx, positions)

    for target in {target.log: target for target in used.values()}.values() if staged else ():
        target.tail = _move(tx, id, target, sorted(key for key, other in used.items() if other is target), now)
    blocks: list[PlacedBlock] = []
    for stream, append, _ in batch.appends:
        target = used[stream, append.segment]
        blocks.append((target.log, target.tail, target.append_time(now), append))
        target.tail += append.count
        target.bytes += append.length
    enter_blocks(tx, blocks)
    # Several staged segments may have one target, and so may the transactions that share a roll: what is added counts once.
    grown = {(stream, target.number): target for (stream, _), target in used.items()}
    tx.defer(
        "UPDATE segment SET tail = ?, bytes = bytes + ?, appended_at = ? WHERE stream = ? AND number = ?",
        [(target.tail, target.bytes, target.append_time(now), *place) for place, target in grown.items()],
    )
    for target in grown.values():
        target.bytes = 0
    tables.apply_entries(tx, entries)
    groups.apply_positions(tx, positions)
    if new is not None:
        opened = new.opened
    else:
        forget_staged(tx, id)
        opened = {stream: segments.list_open_segments(tx, stream) for stream in sorted({key[0] for key in used})}
    tails = {stream: {row.number: row.tail for row in rows} for stream, rows in opened.items()}
    for (stream, number), target in grown.items():
        if number in tails[stream]:
            tails[stream][number] = target.tail
    added: dict[int, dict[int, int]] = {}
    for stream, segment, events in [*(row[:3] for row in staged), *((s.stream, s.append.segment, s.append.count) for s in batch.appends)]:
        number = used[stream, segment].number
        found = added.setdefault(stream, {})
        found[number] = found.get(number, 0) + events
    result = _result(tails, by, added)
    if new is not None:
        tx.defer(
            "INSERT INTO txn (id, state, begun_at, lease, expires_at, ended_at, next_ordinal, marker_owner, marker_sequence, "
            "marker_fingerprint, result) VALUES (?, 'committed', ?, ?, ?, now_us(), 0, ?, ?, ?, ?)",
            [(id, *new.times, *(marker or (None, None, None)), result)],
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


def _check_tails(tx: Tx, id: str, batch: Batch, staged: list[_Staged], targets: Targets) -> None:
    conditions = [(item.stream, item.append.segment, item.expected_tail) for item in batch.appends if item.expected_tail is not None]
    if any(row.conditions for row in staged):
        conditions += [
            (row[0], row[1], row[2])
            for row in tx.run(
                "SELECT stream, segment, expected_tail FROM txn_extent WHERE txn = ? AND expected_tail IS NOT NULL ORDER BY ordinal", (id,)
            )
        ]
    if len({condition[:2] for condition in conditions}) < len(conditions):
        raise ConditionFailedError(
            "this transaction updates the same shared state twice, each time as it was before: give all updates at once"
        )
    for stream, segment, expected in conditions:
        if targets[stream, segment].tail != expected:
            raise ConditionFailedError(
                f"the shared state moved to revision {targets[stream, segment].tail} after it was read at {expected}: "
                "read it again, decide again"
            )


def _numbered_changes(tx: Tx, id: str, batch: Batch, staged: list[_Staged], used: Targets, is_new: bool) -> list[tables.EntryChange]:
    """Every change, with the version it makes: the number its event will have, plus one."""
    found = []
    behind = {target.log: target.tail for target in used.values()}
    columns = "ordinal, place, kind, target, name, expected, data"
    sql = f"SELECT {columns} FROM txn_change WHERE txn = ? AND ordinal >= 0 ORDER BY ordinal, place"
    rows = [] if is_new else tx.run(sql, (id,))
    if rows:
        firsts = {}
        for ordinal, stream, segment, count in tx.run(
            "SELECT ordinal, stream, segment, count FROM txn_extent WHERE txn = ? ORDER BY ordinal", (id,)
        ):
            log = used[stream, segment].log
            firsts[ordinal] = behind[log]
            behind[log] += count
        for ordinal, place, kind, target, name, expected, data in rows:
            found.append(tables.EntryChange(kind, target, name, expected, data, firsts.get(ordinal, 0) + place + 1))
    else:
        for row in staged:
            behind[used[row.stream, row.segment].log] += row.events
    numbers = []
    for stream, append, _ in batch.appends:
        log = used[stream, append.segment].log
        numbers.append(behind[log])
        behind[log] += append.count
    for change in batch.changes:
        number = numbers[change.block] + change.place + 1 if change.kind != "reader" else 0
        found.append(tables.EntryChange(change.kind, change.target, change.name, change.expected, change.data, number))
    return found


def _move(tx: Tx, id: str, target: Target, keys: list[tuple[int, int]], now: int) -> int:
    """Move a transaction's blocks behind a segment's tail, in the order in which they were staged; returns the new tail."""
    stream = keys[0][0]
    marks = ", ".join("?" * len(keys))
    mine = (id, stream, *(segment for _, segment in keys))
    firsts = "? + CAST(sum(count) OVER (ORDER BY ordinal) AS BIGINT) - count"
    where = f"FROM txn_extent WHERE txn = ? AND stream = ? AND segment IN ({marks})"
    tx.run(
        "INSERT INTO inline_block (log, first, data) SELECT log, first, data FROM "
        f"(SELECT CAST(? AS BIGINT) AS log, {firsts} AS first, data {where}) AS moved WHERE data IS NOT NULL",
        (target.log, target.tail, *mine),
    )
    tx.run(
        "INSERT INTO extent (log, first, count, length, crc, appended_at, object, position) "
        f"SELECT CAST(? AS BIGINT), {firsts}, count, length, crc, CAST(? AS BIGINT), object, position {where}",
        (target.log, target.tail, target.append_time(now), *mine),
    )
    events, size = tx.run(f"SELECT CAST(sum(count) AS BIGINT), CAST(sum(length) AS BIGINT) {where}", mine)[0]
    target.bytes += size or 0
    return target.tail + (events or 0)
