"""kill -9 at every failpoint of begin, stage, commit, roll, abort and time-out: each transaction is whole or absent, each job done once."""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

import headwater as hw
from headwater.check import check_store
from headwater.runtime import failpoints
from tests.crash.processes import Crew, Place
from tests.crash.txn_workers import JOBS, KINDS, ONE, TWO, create_job_streams, do_jobs, plan_jobs

pytestmark = pytest.mark.slow

#: Up to which pass each is surely reached by any seed's jobs.
PASSES = {
    "txn.begun": 8,
    "txn.stored": 10,
    "txn.inserted": 10,
    "txn.staged": 10,
    "txn.applied": 6,
    "txn.committed": 7,
    "txn.prepared": 1,
    "txn.rolled": 1,
    "txn.dropped": 2,
    "txn.aborted": 1,
    "txn.expired": 1,
}


def test_every_failpoint_of_transactions_is_tried() -> None:
    assert {name for name in failpoints.NAMES if name.startswith("txn.")} == set(PASSES)


@pytest.mark.parametrize("name", PASSES)
def test_transactions_are_whole_or_absent_when_a_process_is_killed_at(name: str, seed: int, sqlite_place: Place, crew: Crew) -> None:
    _kill_and_go_on(crew, sqlite_place, name, seed)


@pytest.mark.parametrize("name", PASSES)
def test_transactions_on_postgresql_are_whole_or_absent_when_a_process_is_killed_at(
    name: str, seeds: tuple[int, ...], tmp_path: Path, postgres_url: str, crew: Crew
) -> None:
    place = Place(str(tmp_path / "store"), postgres_url)
    place.open(create=True).close()
    _kill_and_go_on(crew, place, name, random.Random(name).choice(seeds))


def _kill_and_go_on(crew: Crew, place: Place, name: str, seed: int) -> None:
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


def _check(store: hw.Store, seed: int, messages: list[tuple[str, str, Any]]) -> set[str]:
    """The tags of the transactions that are there, having found that each is whole and that every other is absent and over."""
    for (id,) in store._engine.database.query("SELECT id FROM txn"):
        if store.transaction_status(id) is hw.TransactionStatus.OPEN:
            store.resume_transaction(id).abort()
        assert store.transaction_status(id) is not hw.TransactionStatus.OPEN
    for table in ("txn_extent", "txn_term"):
        assert not store._engine.database.query(f"SELECT txn FROM {table}"), "something staged is left behind"

    found: dict[str, dict[str, list[str]]] = {}
    for stream in (ONE, TWO):
        found[stream] = defaultdict(list)
        last: dict[Any, str] = {}
        for event in store.stream(stream).read():
            value = event.value.partition(b"|")[0].decode()
            found[stream][value[:5]].append(value)
            # Jobs come one after the other, and so do the values of each.
            assert last.get(event.key, "") < value, f"{value} comes after {last[event.key]}"
            last[event.key] = value
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
        assert len(_check(store, 1, messages)) == len(KINDS)
