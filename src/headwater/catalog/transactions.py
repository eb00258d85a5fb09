"""Transactions: staged blocks and changes that become visible in one commit, over any number of streams, tables and readers.

Staged blocks are for the segments that were open when they were staged. If those were merged since, the successor takes them; if they
were split, the active segments *roll*: they are sealed, one sealed segment takes the blocks, and the same ranges are opened again.
Lock order: transaction, marker, stream, segment, table entries, group.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from headwater.catalog import groups, segments, tables
from headwater.catalog.database import Statement, Tx
from headwater.catalog.extents import Append
from headwater.catalog.schema import next_id
from headwater.catalog.segments import SegmentRow
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

OPEN, COMMITTING, COMMITTED, ABORTED = "open", "committing", "committed", "aborted"

#: Errors that a commit made by another process may have left for this one: told as what they are.
_TOLD = {kind.__name__: kind for kind in (ConditionFailedError, ConflictError, FencedError, NotFoundError, SealedError)}
#: The sequence of a marker's row while its first commit is under way: below all that can be given.
_NO_SEQUENCE = -(1 << 63)


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
    """What a process adds to a transaction at once. `object_key` names the object that holds the blocks which are not inline.

    `id` is the batch's own: given again after a lost answer, it is not added twice.
    """

    id: int = 0
    appends: list[StagedAppend] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    object_key: str | None = None

    @property
    def is_empty(self) -> bool:
        return not self.appends and not self.changes


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


def begin(tx: Tx, id: str, lease_us: int, age_us: int, marker: Marker | None) -> bool:
    """Insert the transaction, whose lease began `age_us` ago; False if it is there already."""
    return bool(tx.run(*_begin(id, lease_us, age_us, marker)))


def _begin(id: str, lease_us: int, age_us: int, marker: Marker | None) -> Statement:
    sql = (
        "INSERT INTO txn (id, state, begun_at, lease, expires_at, next_ordinal, marker_owner, marker_sequence, marker_fingerprint) "
        "VALUES (?, 'open', now_us(), ?, now_us() + ?, 0, ?, ?, ?) ON CONFLICT (id) DO NOTHING RETURNING expires_at < now_us(), now_us()"
    )
    return sql, (id, lease_us, lease_us - age_us, *(marker or (None, None, None)))


def renew(tx: Tx, id: str) -> None:
    """Put the time-out off by another lease. One that ran out is over, whether or not anybody looked."""
    live = "state IN ('open', 'committing') AND expires_at >= now_us()"
    if not tx.run(f"UPDATE txn SET expires_at = now_us() + lease WHERE id = ? AND {live} RETURNING id", (id,)):
        raise _ended(id, get_state(tx, id))


def get_state(tx: Tx, id: str) -> str:
    """The state; an open transaction whose lease ran out is aborted by this look."""
    rows = tx.run("SELECT state, expires_at < now_us() FROM txn WHERE id = ? FOR UPDATE", (id,))
    if not rows:
        raise NotFoundError(f"there is no transaction {id}")
    if rows[0][0] in (OPEN, COMMITTING) and rows[0][1]:
        _drop(tx, [id], "its lease ran out")
        return ABORTED
    return str(rows[0][0])


def look_up(tx: Tx, id: str) -> tuple[str, int]:
    """(state, lease) of a transaction."""
    state = get_state(tx, id)
    return state, int(tx.run("SELECT lease FROM txn WHERE id = ?", (id,))[0][0])


def find_state(tx: Tx, id: str) -> str | None:
    """The state, without changing anything; None if the lease ran out, which `get_state` makes final."""
    rows = tx.run("SELECT state, expires_at < now_us() FROM txn WHERE id = ?", (id,))
    if not rows:
        raise NotFoundError(f"there is no transaction {id}")
    return None if rows[0][0] in (OPEN, COMMITTING) and rows[0][1] else str(rows[0][0])


def stage(tx: Tx, id: str, batch: Batch) -> None:
    """Add blocks and changes to an open transaction, once. Readers see nothing of them before its commit."""
    rows = tx.run(
        "UPDATE txn SET next_ordinal = next_ordinal + ? WHERE id = ? AND state = 'open' AND expires_at >= now_us() RETURNING next_ordinal",
        (len(batch.appends) + len(batch.changes), id),
    )
    if not rows:
        raise _ended(id, get_state(tx, id))
    # The batch leaves a mark among the changes, below all ordinals.
    marked = tx.run(
        "INSERT INTO txn_change (txn, ordinal, place, kind, target, name) VALUES (?, ?, 0, 'batch', 0, '') "
        "ON CONFLICT (txn, ordinal, place) DO NOTHING RETURNING ordinal",
        (id, -batch.id),
    )
    if marked:
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


def abort(tx: Tx, id: str, lease_us: int) -> None:
    """Drop all that was staged. Aborting again changes nothing; a committed one raises."""
    # If a commit of it is still under way somewhere, this waits for it; if it never was known, it is now, as aborted.
    begin(tx, id, lease_us, 0, None)
    state = get_state(tx, id)
    if state == COMMITTED:
        raise _ended(id, state)
    if state != ABORTED:
        _drop(tx, [id], "it was aborted")


def abort_expired(tx: Tx) -> list[str]:
    """Abort every transaction whose lease ran out before its commit. A wrong guess costs a retry, never data."""
    sql = "SELECT id FROM txn WHERE state IN ('open', 'committing') AND expires_at < now_us() ORDER BY id LIMIT 100 FOR UPDATE"
    rows = tx.run(sql)
    ids = [row[0] for row in rows]
    _drop(tx, ids, "its lease ran out")
    return ids


def abort_staged_in(tx: Tx, stream: int) -> None:
    """Abort the open transactions that have something staged for a stream, which is being sealed."""
    rows = tx.run(
        "SELECT id FROM txn WHERE state IN ('open', 'committing') AND id IN (SELECT txn FROM txn_extent WHERE stream = ?) "
        "ORDER BY id FOR UPDATE",
        (stream,),
    )
    _drop(tx, [row[0] for row in rows], "a stream it writes to was sealed")


def _drop(tx: Tx, ids: Sequence[str], reason: str, kind: str = "") -> None:
    result = json.dumps({"reason": reason, "kind": kind})
    for id in ids:
        _forget_staged(tx, id)
        tx.run("UPDATE txn SET state = 'aborted', ended_at = now_us(), result = ? WHERE id = ?", (result, id))
        failpoints.reach("txn.dropped")


def _forget_staged(tx: Tx, id: str) -> None:
    tx.run("DELETE FROM txn_change WHERE txn = ?", (id,))
    tx.run("DELETE FROM txn_extent WHERE txn = ?", (id,))


class TransactionRow(NamedTuple):
    """A transaction as the catalog has it; `streams` are those it has something staged for, or wrote to."""

    id: str
    state: str
    begun_at: int
    expires_at: int
    ended_at: int | None
    streams: tuple[str, ...]


def list_transactions(tx: Tx, limit: int, only_open: bool) -> list[TransactionRow]:
    """The newest transactions first."""
    where = "WHERE state IN ('open', 'committing')" if only_open else ""
    rows = tx.run(f"SELECT id, state, begun_at, expires_at, ended_at, result FROM txn {where} ORDER BY begun_at DESC LIMIT ?", (limit,))
    found = []
    for id, state, begun_at, expires_at, ended_at, result in rows:
        staged = {row[0] for row in tx.run("SELECT DISTINCT stream FROM txn_extent WHERE txn = ?", (id,))}
        written = set(_load_tails(json.loads(result)["tails"])) if state == COMMITTED else set()
        names = [tx.run("SELECT scope, name FROM stream WHERE id = ?", (stream,)) for stream in sorted(staged | written)]
        streams = tuple(f"{name[0][0]}/{name[0][1]}" for name in names if name)
        found.append(TransactionRow(id, state, begun_at, expires_at, ended_at, streams))
    return found


def commit(tx: Tx, id: str, batch: Batch, marker: Marker | None, lease_us: int, age_us: int, by: str) -> Outcome:
    """Commit what is staged together with `batch`. Given again by the same caller (`by`), it answers the same.

    RollNeeded if a staged segment was split meanwhile; ConflictError and its kind if a condition does not hold: then it is aborted.
    """
    wanted = _by_stream((item.stream, item.append.segment) for item in batch.appends)
    locks = [segments.locked(stream, numbers) for stream, numbers in wanted.items()]
    looks = [segments.opened(stream) for stream in wanted]
    # All that a transaction needs which was never staged, in one round trip; its commit is the second.
    held = [_lock_marker(marker.owner)] if marker is not None else []
    begun, *answers = tx.run_all([_begin(id, lease_us, age_us, marker), *held, *locks, *looks])
    answers = answers[len(held) :]
    if not begun or begun[0][0]:
        earlier, marker, batch = _look_again(tx, id, batch, marker, by)
        if earlier is not None:
            return earlier
    repeated = _check_marker(tx, marker)
    if repeated is not None:
        _drop(tx, [id], f"its marker was committed by {repeated.id}")
        return repeated
    batch = _with_object(tx, batch)
    if begun:
        rows = {stream: [segments.to_row(row) for row in found] for stream, found in zip(wanted, answers, strict=False)}
        targets = {(stream, row.number): _Target(row) for stream, found in rows.items() for row in found if row.is_open}
        if len(targets) < sum(map(len, wanted.values())):
            raise RouteStale
        opened = {stream: [segments.to_row(row) for row in found] for stream, found in zip(wanted, answers[len(locks) :], strict=True)}
        outcome = _apply(tx, id, batch, [], targets, marker, by, begun[0][1], opened)
    else:
        staged = _staged(tx, id)
        needed = {(row.stream, row.segment) for row in staged} | {(item.stream, item.append.segment) for item in batch.appends}
        targets = _open_targets(tx, needed, {(row.stream, row.segment) for row in staged})
        outcome = _apply(tx, id, batch, staged, targets, marker, by, tx.run("SELECT now_us()")[0][0])
    failpoints.reach("txn.applied")
    return outcome


def _by_stream(keys: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    """Segment numbers by stream, both ascending: the order in which they are locked."""
    found: dict[int, list[int]] = {}
    for stream, segment in sorted(set(keys)):
        found.setdefault(stream, []).append(segment)
    return found


def prepare(tx: Tx, id: str, batch: Batch, by: str) -> None:
    """Stage the rest and wait for a roll: from here on any process may commit it, together with others."""
    rows = tx.run(
        "UPDATE txn SET next_ordinal = next_ordinal + ?, state = 'committing', result = ? WHERE id = ? AND state = 'open' "
        "RETURNING next_ordinal",
        (len(batch.appends) + len(batch.changes), json.dumps({"by": by}), id),
    )
    if rows:
        _insert(tx, id, batch, rows[0][0] - len(batch.appends) - len(batch.changes))


def count_waiting(tx: Tx) -> int:
    """How many transactions wait for a roll."""
    return int(tx.run("SELECT count(*) FROM txn WHERE state = 'committing'")[0][0])


def commit_prepared(tx: Tx, id: str, by: str) -> Outcome | HeadwaterError:
    """Commit a prepared transaction and all others that wait: they share one roll of each stream. A failing one is aborted alone.

    Why this one failed is returned, not raised: the others' commits stand.
    """
    sql = "SELECT id FROM txn WHERE state = 'committing' AND (id = ? OR expires_at >= now_us()) ORDER BY id FOR UPDATE"
    waiting = [row[0] for row in tx.run(sql, (id,))]
    staged = {other: _staged(tx, other) for other in waiting}
    needed = {(row.stream, row.segment) for rows in staged.values() for row in rows}
    targets, gone = _rolled_targets(tx, needed)
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
                _drop(tx, [other], f"its marker was committed by {repeated.id}")
            else:
                _apply(tx, other, Batch(), staged[other], targets, marker, json.loads(result)["by"], now)
        except HeadwaterError as error:
            _drop(tx, [other], error.message, type(error).__name__)
    failpoints.reach("txn.rolled")
    try:
        outcome, _, _ = _look_again(tx, id, Batch(), None, by)
    except HeadwaterError as error:
        return error
    assert outcome is not None, "a prepared transaction ends here, if it did not before"
    return outcome


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
        return Outcome(id, _load_tails(found["tails"]), False), marker, batch
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


def _ended(id: str, state: str) -> TransactionEndedError:
    return TransactionEndedError(f"transaction {id} is {state} already", state=state)


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
        return Outcome(first, _load_tails(json.loads(result)), True)
    raise ConflictError(
        f"marker {marker.owner!r}: sequence {marker.sequence} with fingerprint {marker.fingerprint!r} was asked for, "
        f"sequence {sequence} with fingerprint {fingerprint!r} is committed already: nothing was stored",
        committed=sequence,
    )


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


class _Target:
    """A segment that takes blocks: its next number, and what is added to it."""

    def __init__(self, row: SegmentRow) -> None:
        self.number = row.number
        self.log = row.log
        self.tail = row.tail
        self.made_at = row.made_at
        self.appended_at = row.appended_at
        self.is_open = row.is_open
        self.bytes = 0

    def append_time(self, now: int) -> int:
        """Never decreasing in a segment; in one that was sealed at birth, to be rolled into, the moment of its birth."""
        return max(now, self.appended_at) if self.is_open else self.made_at


Targets = dict[tuple[int, int], _Target]


def _open_targets(tx: Tx, needed: Iterable[tuple[int, int]], staged: set[tuple[int, int]]) -> Targets:
    """The segments themselves, locked, if all are open still; else where their keys are now, if that takes no roll."""
    found: Targets = {}
    for stream, numbers in _by_stream(needed).items():
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
    for stream, numbers in _by_stream(needed).items():
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


def _apply(
    tx: Tx,
    id: str,
    batch: Batch,
    staged: list[_Staged],
    targets: Targets,
    marker: Marker | None,
    by: str,
    now: int,
    opened: dict[int, list[SegmentRow]] | None = None,
) -> Outcome:
    """Append, change and record everything, once each condition was found to hold.

    `opened` are the open segments of each stream for a transaction of which nothing was staged.
    """
    is_new = opened is not None
    _check_tails(tx, id, batch, staged, targets)
    used = {
        key: targets[key]
        for key in sorted({(row.stream, row.segment) for row in staged} | {(s.stream, s.append.segment) for s in batch.appends})
    }
    changes = _numbered_changes(tx, id, batch, staged, used, is_new)
    tables.check_entries(tx, [change for change in changes if change.kind != "reader"])
    groups.check_positions(tx, [change for change in changes if change.kind == "reader"])

    for target in {target.log: target for target in used.values()}.values() if staged else ():
        target.tail = _move(tx, id, target, sorted(key for key, other in used.items() if other is target), now)
    for stream, append, _ in batch.appends:
        target = used[stream, append.segment]
        tx.defer(
            "INSERT INTO extent (log, first, count, length, crc, appended_at, object, position) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            [(target.log, target.tail, append.count, append.length, append.crc, target.append_time(now), append.object, append.position)],
        )
        if append.data is not None:
            tx.defer("INSERT INTO inline_block (log, first, data) VALUES (?, ?, ?)", [(target.log, target.tail, append.data)])
        target.tail += append.count
        target.bytes += append.length
    # Several staged segments may have one target, and so may the transactions that share a roll: what is added counts once.
    grown = {(stream, target.number): target for (stream, _), target in used.items()}
    tx.defer(
        "UPDATE segment SET tail = ?, bytes = bytes + ?, appended_at = ? WHERE stream = ? AND number = ?",
        [(target.tail, target.bytes, target.append_time(now), *place) for place, target in grown.items()],
    )
    for target in grown.values():
        target.bytes = 0
    tables.apply_entries(tx, [change for change in changes if change.kind != "reader"])
    groups.apply_positions(tx, [change for change in changes if change.kind == "reader"])
    if not is_new:
        _forget_staged(tx, id)
    if opened is None:
        opened = {stream: segments.list_open_segments(tx, stream) for stream in sorted({key[0] for key in used})}
    tails = {stream: {row.number: row.tail for row in rows} for stream, rows in opened.items()}
    for (stream, number), target in grown.items():
        if number in tails[stream]:
            tails[stream][number] = target.tail
    dumped = {str(stream): {str(number): tail for number, tail in found.items()} for stream, found in tails.items()}
    tx.defer(
        "UPDATE txn SET state = 'committed', ended_at = now_us(), result = ? WHERE id = ?", [(json.dumps({"tails": dumped, "by": by}), id)]
    )
    if marker is not None:
        tx.defer(
            "INSERT INTO marker (owner, sequence, fingerprint, txn, result) VALUES (?, ?, ?, ?, ?) ON CONFLICT (owner) DO UPDATE SET "
            "sequence = excluded.sequence, fingerprint = excluded.fingerprint, txn = excluded.txn, result = excluded.result",
            [(marker.owner, marker.sequence, marker.fingerprint, id, json.dumps(dumped))],
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


def _move(tx: Tx, id: str, target: _Target, keys: list[tuple[int, int]], now: int) -> int:
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


def _load_tails(tails: dict[str, dict[str, int]]) -> dict[int, dict[int, int]]:
    return {int(stream): {int(number): tail for number, tail in found.items()} for stream, found in tails.items()}
