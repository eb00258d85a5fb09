"""A history of a journal: processes that persist, delete, follow, scale and tend it, each with a log; and what must be true afterwards."""

from __future__ import annotations

import random
import traceback
import uuid
from collections import defaultdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import headwater as hw
from headwater.catalog import leases
from headwater.catalog.persists import JournalLedger
from headwater.check import check_store
from headwater.runtime import failpoints
from headwater.streams import upkeep
from tests.crash.history_workers import Log, read_log
from tests.crash.journal_workers import NAME, scale, wait_until_indexed
from tests.crash.processes import Place
from tests.journals import Stored, check_journal, check_order, require

IDS = [f"e{number}" for number in range(6)]
TAGS = ("red", "green", "blue")
ROLES = ("persist1", "persist2", "tx1", "deleter", "scaler", "tender", "follower")
FAILPOINTS = {
    "persist": ("append.begun", "append.applied", "append.committed", "append.acked", "persist.refused"),
    "tx": ("txn.staged", "txn.applied", "txn.committed", "txn.prepared", "txn.rolled"),
    "deleter": ("entity.deleted",),
    "scaler": ("scale.applied", "scale.committed"),
    "tender": ("tier.written", "tier.applied", "tier.swapped", "garbage.deleted"),
    "follower": (),
}


def live(channel: Connection, place: Place, folder: str, role: str, life: int, seed: int, fault: str | None) -> None:
    """One life of one process, until it is killed."""
    if fault is not None:
        FAULTS[fault]()
    rng, kind = random.Random(f"{seed} {role} {life}"), role.rstrip("12")
    vars(upkeep).update(LEASE_SECONDS=0.3, TIER_EXTENTS=5)
    vars(leases).update(_LEASE_US=300_000)
    log = Log(Path(folder), role, life)
    names = FAILPOINTS[kind]
    try:
        with place.open() as store:
            if names and rng.random() < 0.5:
                failpoints.arm(f"{rng.choice(names)}=kill@{rng.randint(1, 8)}")
            log.add("born")
            channel.send("ready")
            {"persist": _persist, "tx": _transact, "deleter": _delete, "scaler": _scale, "tender": _tend, "follower": _follow}[kind](
                channel, store, rng, log
            )
    except BaseException:
        log.add("failed", error=traceback.format_exc())
        raise


def _events(rng: random.Random, number: int) -> list[hw.Record]:
    of, count = str(uuid.uuid4()), rng.choice((1, 1, 2, 5))
    data = {"of": of, "count": count, "pad": "." * rng.choice((5, 5, 5, 30_000))}
    return [hw.Record("t", data, tags=rng.sample(TAGS, rng.randint(0, 2))) for _ in range(count)]


def _plan(log: Log, id: str, records: list[hw.Record], expected: int | None) -> list[str]:
    ids = [str(record.event_id) for record in records]
    log.add("planned", id=id, events=ids, tags=[sorted(record.tags) for record in records], expected=expected)
    return ids


def _persist(channel: Connection, store: hw.Store, rng: random.Random, log: Log) -> None:
    """With the sequence that was seen, with any, or several without waiting; what was refused says where the entity was."""
    journal = store.journal(NAME)
    while not channel.poll(0.002):
        acks = []
        for number in range(rng.choice((1, 1, 4))):
            id, records = rng.choice(IDS), _events(rng, number)
            expected = journal.head(id).sequence if rng.random() < 0.6 else None
            acks.append((_plan(log, id, records, expected), id, expected, journal.persist_async(id, records, expected=expected)))
        for ids, id, expected, ack in acks:
            try:
                found = ack.result()
                log.add("stored", id=id, events=ids, first=found.first, last=found.last)
            except hw.ConditionFailedError as error:
                log.add("refused", id=id, events=ids, expected=expected, actual=error.actual)


def _transact(channel: Connection, store: hw.Store, rng: random.Random, log: Log) -> None:
    while not channel.poll(0.01):
        tx = store.transaction()
        plans = []
        for id in rng.sample(IDS, 2):
            records = _events(rng, 0)
            sequence = store.journal(NAME).head(id).sequence
            plans.append((id, _plan(log, id, records, sequence), sequence))
            tx.persist(NAME, id, records, expected=sequence)
            if rng.random() < 0.4:
                tx.flush()
                channel.poll(rng.uniform(0, 0.05))
        try:
            tx.commit()
        except hw.ConditionFailedError as error:
            for _, ids, expected in plans:
                log.add("refused", id=error.id, events=ids, expected=expected, actual=error.actual, tx=True)
        else:
            for id, ids, sequence in plans:
                log.add("stored", id=id, events=ids, first=sequence + 1, last=sequence + len(ids))
            log.add("together", events=[ids for _, ids, _ in plans])


def _delete(channel: Connection, store: hw.Store, rng: random.Random, log: Log) -> None:
    journal = store.journal(NAME)
    while not channel.poll(rng.uniform(0.05, 0.3)):
        id = rng.choice(IDS)
        sequence = journal.head(id).sequence
        if rng.random() < 0.3:
            journal.delete(id)
        else:
            journal.delete_to(id, sequence // 2)
            sequence //= 2
        log.add("deleted", id=id, sequence=sequence)


def _scale(channel: Connection, store: hw.Store, rng: random.Random, log: Log) -> None:
    while not channel.poll(rng.uniform(0.03, 0.2)):
        scale(store.stream(NAME), rng)
        log.add("scaled")


def _tend(channel: Connection, store: hw.Store, rng: random.Random, log: Log) -> None:
    while not channel.poll(rng.uniform(0.02, 0.2)):
        try:
            log.add("tended", chunks=store.run_upkeep().chunks_written)
        except hw.HeadwaterError as error:  # The one before it has the lease for a moment.
            log.add("waited", error=str(error))


def _follow(channel: Connection, store: hw.Store, rng: random.Random, log: Log) -> None:
    """Follow a tag; each life goes on at the cut of the one before it, and tells what it got with where it is."""
    query = store.journal(NAME).query(tag="red", start=_last_cut(log, store), follow=True)
    for count, event in enumerate(query):
        log.add("seen", event=str(event.event_id), cut=str(query.cut), id=event.id, sequence=event.sequence, place=list(event.position))
        if count and channel.poll(0):
            return


def _last_cut(log: Log, store: hw.Store) -> hw.Cut | None:
    seen = [line for line in read_log(log.folder, "follower") if line["what"] == "seen"]
    return hw.Cut.parse(seen[-1]["cut"]) if seen else None


def check_history(store: hw.Store, folder: Path) -> dict[str, int]:
    """Raise Broken if the logs and the journal contradict each other; returns how much there was of each."""
    wait_until_indexed(store)
    journal = store.journal(NAME)
    lines = [line for role in ROLES for line in read_log(folder, role)]
    for line in lines:
        require(line["what"] != "failed", f"a process failed: {line.get('error')}")
    lows = {id: max(journal.head(id).low, 1) for id in IDS}
    events = check_journal(store, NAME, lows=lows)
    by_id = {event.event_id: event for event in events}
    planned = {tuple(line["events"]): line for line in lines if line["what"] == "planned"}
    for ids, line in planned.items():
        found = [by_id[id] for id in ids if id in by_id]
        require(len(found) in (0, len(ids)), f"of {len(ids)} events of a persist there are {len(found)}")
        if found:
            first = found[0].sequence
            require([(event.id, event.sequence) for event in found] == [(line["id"], first + at) for at in range(len(ids))], "torn apart")
            require([sorted(event.tags) for event in found] == line["tags"], "tags were lost")
            require(line["expected"] in (None, first - 1), f"{line['id']} was expected at {line['expected']}, and stored after {first - 1}")
    for line in lines:
        _check_line(line, by_id, lows)
    _check_times(lines, planned)
    _check_follower([line for line in lines if line["what"] == "seen"], events, lows)
    report = check_store(store)
    require(report.ok, f"the store is damaged: {report.problems[:3]}")
    counts: dict[str, int] = defaultdict(int)
    for line in lines:
        counts[line["what"]] += 1
    return counts


def _check_line(line: dict[str, Any], by_id: dict[str, Stored], lows: dict[str, int]) -> None:
    if line["what"] == "stored":
        where = [(by_id[id].id, by_id[id].sequence) if id in by_id else None for id in line["events"]]
        require(where == [(line["id"], at) for at in range(line["first"], line["last"] + 1)], f"acked, and not there: {line} is at {where}")
    elif line["what"] == "refused":
        require(not [id for id in line["events"] if id in by_id], f"refused, and stored: {line}")
        require(line.get("tx") or line["expected"] != line["actual"], f"refused without a reason: {line}")
    elif line["what"] == "deleted":
        require(lows[line["id"]] > line["sequence"], f"deleted, and there: {line}")


def _check_times(lines: list[dict[str, Any]], planned: dict[tuple[str, ...], dict[str, Any]]) -> None:
    """What was begun after an ack comes after it; who was refused was told of what was acked before."""
    acked: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for line in lines:
        if line["what"] == "stored":
            acked[line["id"]].append((line["at"], line["last"]))
    for line in lines:
        if line["what"] in ("stored", "refused"):
            begun = planned[tuple(line["events"])]
            before = max((last for at, last in acked[line["id"]] if at < begun["at"]), default=0)
            at = line["first"] - 1 if line["what"] == "stored" else line["actual"]
            require(line.get("tx") or at >= before, f"{line['id']} was at {before} by an ack before this began: {line}")


def _check_follower(seen: list[dict[str, Any]], events: list[Stored], lows: dict[str, int]) -> None:
    """A life that is killed between taking an event and noting it takes it again: nothing else is missed or repeated."""
    ids = [line["event"] for line in seen]
    require(len(ids) == len(set(ids)), "the follower saw an event twice")
    require(set(ids) <= {event.event_id for event in events if "red" in event.tags}, "the follower saw what is not there")
    check_order([(hw.Position(*line["place"]), line["id"], line["sequence"]) for line in seen], "the follower")
    # It is not at the end, but for each entity it has seen all up to its last.
    last = {line["id"]: line["sequence"] for line in seen}
    wanted = {event.event_id for event in events if "red" in event.tags and lows[event.id] <= event.sequence <= last.get(event.id, 0)}
    require(wanted <= set(ids), f"the follower missed {len(wanted - set(ids))} events")


# Faults, to be planted in every process of a history: the checker must find each.


def _do_not_compare() -> None:
    """A persist moves an entity from wherever it is."""
    misses = JournalLedger._misses

    def faulty(self: Any, term: Any, entity: Any, moved: Any) -> Any:
        found = misses(self, term, entity, moved)
        return None if found is not None and found.reason == "moved" else found

    JournalLedger._misses = faulty  # type: ignore[method-assign]


def _lose_tags() -> None:
    """Of several tags of one event one is not indexed."""
    move = JournalLedger._move_tag

    def faulty(self: Any, stream: int, word: str, segment: int, numbers: list[int]) -> None:
        move(self, stream, word, segment, numbers[:1])

    JournalLedger._move_tag = faulty  # type: ignore[method-assign]


FAULTS = {"sequences are not compared": _do_not_compare, "some tags are not indexed": _lose_tags}
