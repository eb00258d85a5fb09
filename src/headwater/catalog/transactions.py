"""Transactions: staged blocks and changes that become visible in one commit, over any number of streams, tables and readers.

Staged blocks are for the segments that were open when they were staged. If those were merged since, the successor takes them; if they
were split, the active segments *roll*: they are sealed, one sealed segment takes the blocks, and the same ranges are opened again.
Lock order: transaction, marker, stream, segment, table entries, group.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from headwater.catalog import groups, segments, tables
from headwater.catalog.database import Tx
from headwater.catalog.extents import Append
from headwater.catalog.schema import next_id
from headwater.catalog.segments import SegmentRow
from headwater.errors import (
    ConditionFailedError,
    ConflictError,
    HeadwaterError,
    NotFoundError,
    SealedError,
    TransactionEndedError,
)
from headwater.model.markers import Marker
from headwater.runtime import failpoints

OPEN, COMMITTING, COMMITTED, ABORTED = "open", "committing", "committed", "aborted"


class StagedAppend(NamedTuple):
    """A block for a stream's segment; `expected_tail` is where it must land, if that matters."""

    stream: int
    append: Append
    expected_tail: int | None = None


class Change(NamedTuple):
    """Beside blocks: kind "put" or "remove" for the event `place` of the block `block` of this batch, or "reader" for positions."""

    block: int
    place: int
    kind: str
    target: int
    name: str
    expected: int | None
    data: bytes | None


@dataclass
class Batch:
    """What a process adds to a transaction at once. `objects` are (key) of objects that hold the blocks, named by index in `object`."""

    appends: list[StagedAppend] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    object_key: str | None = None


class Outcome(NamedTuple):
    """A commit: for each stream, the tails of its open segments right behind it."""

    id: str
    tails: dict[int, dict[int, int]]
    repeated: bool


class RollNeeded(Exception):
    """Some staged segment was split: prepare, then commit with others that wait for the same."""


class RouteStale(Exception):
    """A segment that nothing was staged for yet is no longer open: route the events again."""


class ScaledMeanwhile(Exception):
    """A segment was sealed while it was looked at: do it again."""


def begin(tx: Tx, id: str, lease_us: int) -> bool:
    """Insert the transaction; False if it is there already."""
    made = tx.run(
        "INSERT INTO txn (id, state, begun_at, lease, expires_at, next_ordinal) VALUES (?, 'open', now_us(), ?, now_us() + ?, 0) "
        "ON CONFLICT (id) DO NOTHING RETURNING id",
        (id, lease_us, lease_us),
    )
    return bool(made)


def renew(tx: Tx, id: str) -> None:
    """Put the time-out off by another lease."""
    if not tx.run("UPDATE txn SET expires_at = now_us() + lease WHERE id = ? AND state = 'open' RETURNING id", (id,)):
        raise _ended(id, get_state(tx, id))


def get_state(tx: Tx, id: str) -> str:
    """The state; an open transaction whose lease ran out is aborted by this look."""
    rows = tx.run("SELECT state, expires_at < now_us() FROM txn WHERE id = ? FOR UPDATE", (id,))
    if not rows:
        raise NotFoundError(f"there is no transaction {id}")
    if rows[0][0] == OPEN and rows[0][1]:
        _drop(tx, [id], "its lease ran out")
        return ABORTED
    return str(rows[0][0])


def look_up(tx: Tx, id: str) -> tuple[str, int]:
    """(state, lease) of a transaction."""
    state = get_state(tx, id)
    return state, int(tx.run("SELECT lease FROM txn WHERE id = ?", (id,))[0][0])


def stage(tx: Tx, id: str, batch: Batch) -> None:
    """Add blocks and changes to an open transaction. Readers see nothing of them before its commit."""
    rows = tx.run(
        "UPDATE txn SET next_ordinal = next_ordinal + ?, expires_at = now_us() + lease WHERE id = ? AND state = 'open' RETURNING next_ordinal",
        (len(batch.appends) + len(batch.changes), id),
    )
    if not rows:
        raise _ended(id, get_state(tx, id))
    _insert(tx, id, batch, rows[0][0] - len(batch.appends) - len(batch.changes))
    failpoints.reach("txn.inserted")


def _insert(tx: Tx, id: str, batch: Batch, first: int) -> None:
    batch = _with_object(tx, batch)
    tx.defer(
        "INSERT INTO txn_extent (txn, ordinal, stream, segment, count, length, crc, object, position, expected_tail, data) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        [
            (id, first + index, stream, a.segment, a.count, a.length, a.crc, a.object, a.position, expected, a.data)
            for index, (stream, a, expected) in enumerate(batch.appends)
        ],
    )
    behind = first + len(batch.appends)
    tx.defer(
        "INSERT INTO txn_change (txn, ordinal, place, kind, target, name, expected, data) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        [
            (id, first + c.block if c.kind != "reader" else behind + index, c.place, c.kind, c.target, c.name, c.expected, c.data)
            for index, c in enumerate(batch.changes)
        ],
    )


def _with_object(tx: Tx, batch: Batch) -> Batch:
    """Name the object that holds the batch's blocks. It is the transaction's, so its id is below zero: no session's."""
    if batch.object_key is None:
        return batch
    object_id = -next_id(tx, "staged_object")
    tx.run("INSERT INTO object (id, key, session) VALUES (?, ?, 0)", (object_id, batch.object_key))
    for staged in batch.appends:
        if staged.append.data is None:
            staged.append.object = object_id
    return batch


def abort(tx: Tx, id: str) -> None:
    """Drop all that was staged. Aborting again changes nothing; a committed one raises."""
    state = get_state(tx, id)
    if state == COMMITTED:
        raise _ended(id, state)
    if state != ABORTED:
        _drop(tx, [id], "it was aborted")


def abort_expired(tx: Tx) -> list[str]:
    """Abort every open transaction whose lease ran out. A wrong guess costs a retry, never data."""
    rows = tx.run("SELECT id FROM txn WHERE state = 'open' AND expires_at < now_us() ORDER BY id LIMIT 100 FOR UPDATE")
    ids = [row[0] for row in rows]
    _drop(tx, ids, "its lease ran out")
    return ids


def abort_staged_in(tx: Tx, stream: int) -> None:
    """Abort the open transactions that have something staged for a stream, which is being sealed."""
    rows = tx.run(
        "SELECT id FROM txn WHERE state IN ('open', 'committing') AND id IN (SELECT txn FROM txn_extent WHERE stream = ?) ORDER BY id FOR UPDATE",
        (stream,),
    )
    _drop(tx, [row[0] for row in rows], "a stream it writes to was sealed")


def _drop(tx: Tx, ids: Sequence[str], reason: str) -> None:
    for id in ids:
        _forget_staged(tx, id)
        tx.run("UPDATE txn SET state = 'aborted', ended_at = now_us(), result = ? WHERE id = ?", (json.dumps({"reason": reason}), id))
        failpoints.reach("txn.dropped")


def _forget_staged(tx: Tx, id: str) -> None:
    tx.run("DELETE FROM txn_change WHERE txn = ?", (id,))
    tx.run("DELETE FROM txn_extent WHERE txn = ?", (id,))


def list_transactions(tx: Tx, limit: int) -> list[tuple[str, str, int, int, int | None]]:
    """(id, state, begun, expires, ended), the newest first."""
    sql = "SELECT id, state, begun_at, expires_at, ended_at FROM txn ORDER BY begun_at DESC LIMIT ?"
    return [(row[0], row[1], row[2], row[3], row[4]) for row in tx.run(sql, (limit,))]


def commit(tx: Tx, id: str, batch: Batch, marker: Marker | None, lease_us: int) -> Outcome:
    """Commit what is staged together with `batch`. Given again, it answers the same.

    RollNeeded if a staged segment was split meanwhile; ConflictError and its kind if a condition does not hold: then it is aborted.
    """
    is_new = begin(tx, id, lease_us)
    earlier = None if is_new else _earlier_outcome(tx, id)
    if earlier is not None:
        return earlier
    repeated = _check_marker(tx, marker)
    if repeated is not None:
        _drop(tx, [id], f"its marker was committed by {repeated.id}")
        return repeated
    batch = _with_object(tx, batch)
    staged = [] if is_new else _staged(tx, id)
    needed = {(row.stream, row.segment) for row in staged} | {(item.stream, item.append.segment) for item in batch.appends}
    targets = _open_targets(tx, needed, {(row.stream, row.segment) for row in staged})
    outcome = _apply(tx, id, batch, staged, targets, marker, is_new)
    failpoints.reach("txn.applied")
    return outcome


def prepare(tx: Tx, id: str, batch: Batch, marker: Marker | None, lease_us: int) -> None:
    """Stage the rest and wait for a roll: from here on any process may commit it, together with others."""
    begin(tx, id, lease_us)
    if _earlier_outcome(tx, id) is not None:
        return
    rows = tx.run(
        "UPDATE txn SET next_ordinal = next_ordinal + ?, state = 'committing', marker_owner = ?, marker_sequence = ?, marker_fingerprint = ? "
        "WHERE id = ? AND state = 'open' RETURNING next_ordinal",
        (len(batch.appends) + len(batch.changes), *(marker or (None, None, None)), id),
    )
    if rows:
        _insert(tx, id, batch, rows[0][0] - len(batch.appends) - len(batch.changes))


def count_waiting(tx: Tx) -> int:
    """How many transactions wait for a roll."""
    return int(tx.run("SELECT count(*) FROM txn WHERE state = 'committing'")[0][0])


def commit_prepared(tx: Tx, id: str) -> Outcome:
    """Commit a prepared transaction and all others that wait: they share one roll of each stream. A failing one is aborted alone."""
    waiting = [row[0] for row in tx.run("SELECT id FROM txn WHERE state = 'committing' ORDER BY id FOR UPDATE")]
    staged = {other: _staged(tx, other) for other in waiting}
    needed = {(row.stream, row.segment) for rows in staged.values() for row in rows}
    targets, gone = _rolled_targets(tx, needed)
    for other in waiting:
        rows = tx.run("SELECT marker_owner, marker_sequence, marker_fingerprint FROM txn WHERE id = ?", (other,))
        marker = Marker(*rows[0]) if rows[0][0] is not None else None
        try:
            lost = next((gone[row.stream] for row in staged[other] if row.stream in gone), None)
            if lost is not None:
                raise lost
            if _check_marker(tx, marker) is not None:
                _drop(tx, [other], "its marker was committed by another")
            else:
                _apply(tx, other, Batch(), staged[other], targets, marker)
        except HeadwaterError as error:
            _drop(tx, [other], error.message)
    failpoints.reach("txn.rolled")
    outcome = _earlier_outcome(tx, id)
    assert outcome is not None, "a prepared transaction ends here, if it did not before"
    return outcome


def _earlier_outcome(tx: Tx, id: str) -> Outcome | None:
    """What a commit said before; None if it is still to be decided; TransactionEndedError if it was aborted."""
    rows = tx.run("SELECT state, result FROM txn WHERE id = ? FOR UPDATE", (id,))
    state, result = rows[0]
    if state == COMMITTED:
        return Outcome(id, _load_tails(result), False)
    if state == ABORTED:
        raise TransactionEndedError(f"transaction {id} was aborted: {json.loads(result)['reason']}")
    return None


def _ended(id: str, state: str) -> TransactionEndedError:
    return TransactionEndedError(f"transaction {id} is {state} already")


def _check_marker(tx: Tx, marker: Marker | None) -> Outcome | None:
    """The commit that had this marker before, None if it is new. ConflictError if it is old, or means other data."""
    if marker is None:
        return None
    rows = tx.run("SELECT sequence, fingerprint, txn, result FROM marker WHERE owner = ? FOR UPDATE", (marker.owner,))
    if not rows or rows[0][0] < marker.sequence:
        return None
    sequence, fingerprint, first, result = rows[0]
    if sequence == marker.sequence and fingerprint == marker.fingerprint:
        return Outcome(first, _load_tails(result), True)
    raise ConflictError(
        f"marker {marker.owner!r}: sequence {marker.sequence} with fingerprint {marker.fingerprint!r} was asked for, "
        f"sequence {sequence} with fingerprint {fingerprint!r} is committed already: nothing was stored",
        committed=sequence,
    )


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


class _Target:
    """A segment that takes blocks: its next number, and what is added to it."""

    def __init__(self, row: SegmentRow) -> None:
        self.number = row.number
        self.log = row.log
        self.tail = row.tail
        self.appended_at = row.appended_at
        self.bytes = 0


Targets = dict[tuple[int, int], _Target]


def _open_targets(tx: Tx, needed: Iterable[tuple[int, int]], staged: set[tuple[int, int]]) -> Targets:
    """The segments themselves, locked, if all are open still; else where their keys are now, if that takes no roll."""
    found: Targets = {}
    by_stream: dict[int, list[int]] = defaultdict(list)
    for stream, segment in sorted(needed):
        by_stream[stream].append(segment)
    for stream, numbers in by_stream.items():
        rows = segments.list_segments_numbered(tx, stream, numbers)
        closed = set(numbers) - {row.number for row in rows if row.is_open}
        if closed:
            active = _lock_active(tx, stream)
            if any((stream, number) not in staged for number in closed):
                raise RouteStale
            taken: dict[int, _Target] = {}
            for number in numbers:
                row = segments.find_segment(tx, stream, number)
                if row is None:
                    raise RollNeeded
                holder = next((other for other in active if other.keys.start <= row.keys.start and row.keys.end <= other.keys.end), None)
                if holder is None:
                    raise RollNeeded
                found[stream, number] = taken.setdefault(holder.number, _Target(holder))
        else:
            locked = segments.lock_segments(tx, stream, numbers)
            if len(locked) < len(numbers) or not all(row.is_open for row in locked):
                raise ScaledMeanwhile
            found.update({(stream, row.number): _Target(row) for row in locked})
    return found


def _lock_active(tx: Tx, stream: int) -> list[SegmentRow]:
    rows = tx.run("SELECT sealed_at, scope, name FROM stream WHERE id = ? FOR UPDATE", (stream,))
    if not rows:
        raise NotFoundError("a stream of this transaction was deleted")
    if rows[0][0] is not None:
        raise SealedError(f"stream {rows[0][1]}/{rows[0][2]} is sealed")
    numbers = [row.number for row in segments.list_open_segments(tx, stream)]
    return segments.lock_segments(tx, stream, numbers)


def _rolled_targets(tx: Tx, needed: Iterable[tuple[int, int]]) -> tuple[Targets, dict[int, HeadwaterError]]:
    """Where the keys of staged segments are now, rolling the active segments where they were split; and the streams that are gone."""
    found: Targets = {}
    gone: dict[int, HeadwaterError] = {}
    by_stream: dict[int, list[int]] = defaultdict(list)
    for stream, segment in sorted(needed):
        by_stream[stream].append(segment)
    for stream, numbers in by_stream.items():
        try:
            active = _lock_active(tx, stream)
        except HeadwaterError as error:
            gone[stream] = error
            continue
        by_number = {row.number: row for row in active}
        holders: dict[int, list[SegmentRow]] = {}
        for number in numbers:
            row = by_number.get(number) or segments.find_segment(tx, stream, number)
            # A staged segment that was truncated away: its keys are unknown, so all ranges roll.
            holders[number] = [other for other in active if row is None or other.keys.overlaps(row.keys)]
        groups_to_roll = _components([rows for rows in holders.values() if len(rows) > 1])
        rolled = {row.number: _Target(made) for rows in groups_to_roll for made in [segments.roll(tx, stream, rows)] for row in rows}
        targets = {row.number: _Target(row) for row in active if row.number not in rolled}
        for rows in groups_to_roll:
            shared = rolled[rows[0].number]
            for row in rows:
                targets[row.number] = shared
        found.update({(stream, number): targets[rows[0].number] for number, rows in holders.items()})
    return found, gone


def _components(sets: list[list[SegmentRow]]) -> list[list[SegmentRow]]:
    """Join the sets that share a segment."""
    joined: list[dict[int, SegmentRow]] = []
    for rows in sets:
        merged = {row.number: row for row in rows}
        for other in [other for other in joined if other.keys() & merged.keys()]:
            merged.update(other)
            joined.remove(other)
        joined.append(merged)
    return [sorted(rows.values(), key=lambda row: row.number) for rows in joined]


def _apply(tx: Tx, id: str, batch: Batch, staged: list[_Staged], targets: Targets, marker: Marker | None, is_new: bool = False) -> Outcome:
    """Append, change and record everything, once each condition was found to hold."""
    now = tx.run("SELECT now_us()")[0][0]
    _check_tails(tx, id, batch, staged, targets)
    used = {
        key: targets[key]
        for key in sorted({(row.stream, row.segment) for row in staged} | {(s.stream, s.append.segment) for s in batch.appends})
    }
    appended_at = max([now, *(target.appended_at for target in used.values())])
    changes = _numbered_changes(tx, id, batch, staged, used, is_new)
    tables.check_entries(tx, [change for change in changes if change.kind != "reader"])
    groups.check_positions(tx, [change for change in changes if change.kind == "reader"])

    for target in {target.log: target for target in used.values()}.values() if staged else ():
        target.tail = _move(tx, id, target, sorted(key for key, other in used.items() if other is target), appended_at)
    for stream, append, _ in batch.appends:
        target = used[stream, append.segment]
        tx.defer(
            "INSERT INTO extent (log, first, count, length, crc, appended_at, object, position) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            [(target.log, target.tail, append.count, append.length, append.crc, appended_at, append.object, append.position)],
        )
        if append.data is not None:
            tx.defer("INSERT INTO inline_block (log, first, data) VALUES (?, ?, ?)", [(target.log, target.tail, append.data)])
        target.tail += append.count
        target.bytes += append.length
    # Several staged segments may have one target, and so may the transactions that share a roll: what is added counts once.
    grown = {(stream, target.number): target for (stream, _), target in used.items()}
    tx.defer(
        "UPDATE segment SET tail = ?, bytes = bytes + ?, appended_at = ? WHERE stream = ? AND number = ?",
        [(target.tail, target.bytes, appended_at, *place) for place, target in grown.items()],
    )
    for target in grown.values():
        target.bytes = 0
    tables.apply_entries(tx, [change for change in changes if change.kind != "reader"])
    groups.apply_positions(tx, [change for change in changes if change.kind == "reader"])
    if not is_new:
        _forget_staged(tx, id)
    tails = {
        stream: {row.number: row.tail for row in segments.list_open_segments(tx, stream)} for stream in sorted({key[0] for key in used})
    }
    result = json.dumps({str(stream): {str(number): tail for number, tail in found.items()} for stream, found in tails.items()})
    tx.defer("UPDATE txn SET state = 'committed', ended_at = now_us(), result = ? WHERE id = ?", [(result, id)])
    if marker is not None:
        tx.defer(
            "INSERT INTO marker (owner, sequence, fingerprint, txn, result) VALUES (?, ?, ?, ?, ?) ON CONFLICT (owner) DO UPDATE SET "
            "sequence = excluded.sequence, fingerprint = excluded.fingerprint, txn = excluded.txn, result = excluded.result",
            [(marker.owner, marker.sequence, marker.fingerprint, id, result)],
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
    for stream, segment, expected in conditions:
        if targets[stream, segment].tail != expected:
            raise ConditionFailedError(
                f"the shared state moved to revision {targets[stream, segment].tail} after it was read at {expected}: read it again, decide again"
            )


def _numbered_changes(tx: Tx, id: str, batch: Batch, staged: list[_Staged], used: Targets, is_new: bool) -> list[tables.EntryChange]:
    """Every change, with the version it makes: the number its event will have, plus one."""
    found = []
    behind = {target.log: target.tail for target in used.values()}
    rows = [] if is_new else tx.run(
        "SELECT ordinal, place, kind, target, name, expected, data FROM txn_change WHERE txn = ? ORDER BY ordinal, place", (id,)
    )  # fmt: skip
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


def _move(tx: Tx, id: str, target: _Target, keys: list[tuple[int, int]], appended_at: int) -> int:
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
        (target.log, target.tail, appended_at, *mine),
    )
    events, size = tx.run(f"SELECT CAST(sum(count) AS BIGINT), CAST(sum(length) AS BIGINT) {where}", mine)[0]
    target.bytes += size or 0
    return target.tail + (events or 0)


def _load_tails(result: str) -> dict[int, dict[int, int]]:
    return {int(stream): {int(number): tail for number, tail in found.items()} for stream, found in json.loads(result).items()}
