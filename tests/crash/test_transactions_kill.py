"""kill -9 at every failpoint of begin, stage, commit, roll, abort and time-out: each transaction is whole or absent, each job done once."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

import headwater as hw
from headwater.check import check_store
from headwater.runtime import failpoints
from tests.crash.processes import Crew, Place
from tests.crash.txn_workers import JOBS, KINDS, ONE, TWO, create_job_streams, do_jobs, plan_jobs

pytestmark = pytest.mark.slow

#: Up to which pass each is surely reached by any seed's jobs.
PASSES = {
    "txn.begun": 12,
    "txn.stored": 12,
    "txn.inserted": 12,
    "txn.staged": 12,
    "txn.applied": 14,
    "txn.committed": 14,
    "txn.prepared": 2,
    "txn.rolled": 2,
    "txn.dropped": 4,
    "txn.aborted": 2,
    "txn.expired": 2,
}


def test_every_failpoint_of_transactions_is_tried() -> None:
    assert {name for name in failpoints.NAMES if name.startswith("txn.")} == set(PASSES)


@pytest.mark.parametrize("name", PASSES)
def test_transactions_are_whole_or_absent_when_a_process_is_killed_at(name: str, seed: int, place: Place, crew: Crew) -> None:
    at = random.Random(f"{name}{seed}").randint(1, PASSES[name])
    killed = crew.start(do_jobs, place, f"{name}=kill@{at}", seed, 1)
    messages = list(killed.hear_all())
    assert "done" not in messages, f"pass {at} of {name} was never reached"
    assert killed.wait() == -9
    with place.open() as store:
        create_job_streams(store)
        _check(store, seed, messages)

    second = crew.start(do_jobs, place, "", seed, 2)
    more = list(second.hear_all())
    assert second.wait() == 0 and more.pop() == "done"
    with place.open() as store:
        tags = _check(store, seed, messages + more)
        assert [tag[:2] for tag in sorted(tags)] == [f"{job.number:02d}" for job in plan_jobs(seed)], "each job is done once"


def _check(store: hw.Store, seed: int, messages: list[tuple[str, str, str]]) -> set[str]:
    """The tags of the transactions that are there, having found that each is whole and that every other is absent and over."""
    for (id,) in store._engine.database.query("SELECT id FROM txn"):
        if store.transaction_status(id) is hw.TransactionStatus.OPEN:
            store.resume_transaction(id).abort()
        assert store.transaction_status(id) is not hw.TransactionStatus.OPEN
    for table in ("txn_extent", "txn_change"):
        assert not store._engine.database.query(f"SELECT txn FROM {table}"), "something staged is left behind"

    found: dict[str, dict[str, list[str]]] = {}
    for stream in (ONE, TWO):
        found[stream] = defaultdict(list)
        order: dict[bytes | None, dict[str, int]] = defaultdict(dict)
        for event in store.stream(stream).read():
            value = event.value.partition(b"|")[0].decode()
            found[stream][value[:5]].append(value)
            for tag, last in order[event.key].items():
                assert tag == value[:5] or tag not in value, "a transaction's events are not together"
                assert tag != value[:5] or last < int(value[-2:]), f"{value} is out of order"
            order[event.key][value[:5]] = int(value[-2:])
    puts = [change.key for change in store.table(JOBS).changes()]
    tags = {key for key in puts if len(key) == 5}
    for job in plan_jobs(seed):
        mine = {tag for tag in tags | found[ONE].keys() | found[TWO].keys() if tag[:2] == f"{job.number:02d}"}
        assert len(mine) <= 1, f"job {job.number} was done as {mine}"
        for tag in mine:
            for stream in (ONE, TWO):
                assert sorted(found[stream][tag]) == job.events(stream, tag), f"transaction {tag} ({job.kind}) is not whole in {stream}"
            assert puts.count(tag) == 1 and puts.count(f"{tag}.shared") == (job.kind == "shared"), f"{tag} is not whole in the table"
    for what, tag, fact in messages:
        if what == "begun":
            assert (store.transaction_status(fact) is hw.TransactionStatus.COMMITTED) == (tag in tags), f"the status of {tag}"
        else:
            assert (tag in tags) != fact, f"{tag} was committed{' before' if fact else ''}"
    report = check_store(store)
    assert report.ok, report.problems
    return tags


def test_every_kind_of_job_is_done(sqlite_place: Place, crew: Crew) -> None:
    worker = crew.start(do_jobs, sqlite_place, "", 1, 1)
    messages = list(worker.hear_all())
    assert messages.pop() == "done" and worker.wait() == 0
    with sqlite_place.open() as store:
        assert len(_check(store, 1, messages)) == 2 * len(KINDS)
