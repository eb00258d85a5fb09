"""Queries of a journal, live, paused and resumed, while it is written, scaled and tiered and its writers are killed: no miss, no repeat."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest

import headwater as hw
from headwater.check import check_store
from tests.crash.journal_workers import NAME, persist_until_killed, record, scale
from tests.crash.processes import Crew, Place, wait_until
from tests.journals import Stored, check_journal, check_order, stored_events

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def store(place: Place) -> Iterator[hw.Store]:
    with place.open() as store:
        store.journal(NAME, scaling=hw.Scaling.fixed(2))
        yield store


class Follower:
    """A thread that follows a query until the journal is sealed."""

    def __init__(self, query: Iterator[hw.Recorded]) -> None:
        self.found: list[hw.Recorded] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(query,), daemon=True)
        self._thread.start()

    def _run(self, query: Iterator[hw.Recorded]) -> None:
        try:
            for event in query:
                self.found.append(event)
        except BaseException as error:
            self._error = error

    def end(self) -> list[hw.Recorded]:
        self._thread.join(300)
        assert not self._thread.is_alive(), f"the query still waits after {len(self.found)} events"
        if self._error is not None:
            raise self._error
        return self.found


def check_found(found: list[hw.Recorded], wanted: list[Stored], what: str) -> None:
    """All that was wanted was found, once, in the order of its entity and its segment."""
    ids = [str(event.event_id) for event in found]
    expected = {event.event_id for event in wanted}
    assert len(ids) == len(set(ids)), f"{what} repeats {len(ids) - len(set(ids))} events"
    assert set(ids) == expected, f"{what} misses {len(expected - set(ids))} events and has {len(set(ids) - expected)} others"
    check_order([(event.position, event.id, event.sequence) for event in found], what)


def test_live_queries_see_all_that_many_threads_persist(store: hw.Store, pytestconfig: pytest.Config) -> None:
    entities, events = (100, 100) if pytestconfig.getoption("--long") else (10, 10)
    threads, journal, rng = 10, store.journal(NAME), random.Random(1)
    everything, tagged = Follower(journal.events(follow=True)), Follower(journal.events(tag="even", follow=True))

    def work(thread: int) -> None:
        for turn in range(events):
            acks = [journal.persist_async(f"e{entity}", record([thread, turn], *["even"] * (turn % 2 == 0))) for entity in range(entities)]
            for ack in acks:
                ack.result()

    with ThreadPoolExecutor(threads) as pool:
        jobs = [pool.submit(work, thread) for thread in range(threads)]
        while wait(jobs, timeout=0.1).not_done:
            scale(journal.stream, rng)
            store.run_upkeep()
        for job in jobs:
            job.result()
    journal.stream.seal()
    stored = check_journal(store, NAME)
    assert len(stored) == threads * entities * events
    check_found(everything.end(), stored, "the live query")
    check_found(tagged.end(), [event for event in stored if "even" in event.tags], "the live query by tag")
    for entity in range(entities):
        mine = [event.data for event in journal.replay(f"e{entity}")]
        for thread in range(threads):
            assert [turn for one, turn in mine if one == thread] == list(range(events)), "a thread's events are in its order"
    assert check_store(store).ok


WANTED: dict[str, dict[str, Any]] = {
    "all": {},
    "a rare tag": {"tag": "rare"},
    "a common tag": {"tag": "common"},
    "a type": {"type": "odd"},
    "an entity": {"id": "e3"},
}


def wants(name: str, event: Stored) -> bool:
    wanted = WANTED[name]
    return wanted.get("tag") in (None, *event.tags) and wanted.get("type") in (None, event.type) and wanted.get("id") in (None, event.id)


def persist_many(journal: hw.Journal, rng: random.Random, count: int) -> None:
    left, acks = count, []
    while left:
        size = min(left, rng.choice((1, 1, 5, 20)))
        tags = ["common"] * (rng.random() < 0.5) + ["rare"] * (rng.random() < 0.02)
        acks.append(
            journal.persist_async(f"e{rng.randrange(20)}", [record(None, *tags, type=rng.choice(("odd", "even"))) for _ in range(size)])
        )
        left -= size
    for ack in acks:
        ack.result()


def test_a_paused_query_goes_on_where_it_was_however_much_has_passed(place: Place, store: hw.Store, pytestconfig: pytest.Config) -> None:
    count = 100_000 if pytestconfig.getoption("--long") else 2_000
    journal, rng = store.journal(NAME), random.Random(2)
    for _ in range(5):
        persist_many(journal, rng, 200)
        scale(journal.stream, rng)
    store.run_upkeep()
    persist_many(journal, rng, 200)

    before = stored_events(store, NAME)
    given: dict[tuple[str, str], list[hw.Recorded]] = {}
    queries = {
        (name, kind): journal.query(**more, follow=kind == "live") for name, more in WANTED.items() for kind in ("live", "finite", "cut")
    }
    cuts = {}
    for (name, kind), query in queries.items():
        given[name, kind] = list(itertools.islice(query, rng.randrange(sum(wants(name, event) for event in before))))
        if kind == "cut":
            cuts[name] = str(query.cut)

    for _ in range(10):
        persist_many(journal, rng, count // 10)
        scale(journal.stream, rng)
        store.run_upkeep()
        scale(journal.stream, rng)
    journal.stream.seal()
    stored = check_journal(store, NAME)
    with place.open() as other:
        for name, more in WANTED.items():
            after = [event for event in stored if wants(name, event)]
            given[name, "cut"] += other.journal(NAME).events(**more, start=hw.Cut.parse(cuts[name]))
            check_found(given[name, "cut"], after, f"{name}, resumed")
            given[name, "live"] += queries[name, "live"]
            check_found(given[name, "live"], after, f"{name}, live")
            given[name, "finite"] += queries[name, "finite"]
            check_found(given[name, "finite"], [event for event in before if wants(name, event)], f"{name}, to its end")
    assert check_store(store).ok


def test_a_live_query_by_tag_misses_nothing_while_its_writer_is_killed_again_and_again(
    place: Place, store: hw.Store, crew: Crew, pytestconfig: pytest.Config
) -> None:
    journal, rng = store.journal(NAME), random.Random(3)
    follower = Follower(journal.events(tag="eu", follow=True))
    acked: list[str] = []
    for life in range(40 if pytestconfig.getoption("--long") else 6):
        name = rng.choice(("append.begun", "append.applied", "append.committed", "append.acked"))
        writer = crew.start(persist_until_killed, place, f"{name}=kill@{rng.randint(2, 9)}", life)
        acked += writer.hear_all()
        assert writer.wait() == -9
        if life % 3 == 2:
            scale(journal.stream, rng)
            store.run_upkeep()
    stored = check_journal(store, NAME)
    wanted = [event for event in stored if "eu" in event.tags]
    wait_until(lambda: len(follower.found) >= len(wanted))
    journal.stream.seal()
    check_found(follower.end(), wanted, "the live query by tag")
    assert acked and set(acked) <= {event.event_id for event in stored}
