"""kill -9 at every failpoint of a journal: what was acked is read, sequences have no gap, and the index is what the events say."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from typing import Any

import pytest

import headwater as hw
from headwater.check import check_store
from headwater.runtime import failpoints
from tests.crash.journal_workers import NAME, persist_plan, wait_until_indexed
from tests.crash.processes import Crew, Place
from tests.journals import Stored, check_journal, require

pytestmark = pytest.mark.slow

#: Up to which pass each is surely reached by any seed's plan.
PASSES = {
    "append.encoded": 10,
    "append.stored": 2,
    "append.begun": 10,
    "append.applied": 10,
    "append.committed": 10,
    "append.acked": 10,
    "persist.refused": 5,
    "txn.stored": 2,
    "txn.inserted": 2,
    "txn.staged": 2,
    "txn.applied": 4,
    "txn.prepared": 1,
    "txn.rolled": 1,
    "txn.committed": 4,
    "entity.deleted": 4,
    "snapshot.applied": 2,
    "scale.applied": 3,
    "scale.committed": 3,
    "rebuild.sliced": 9,
    "tier.applied": 2,
    "tier.swapped": 2,
}
#: Tried in `make test`, with one seed: the others, and more seeds, in `make test-long`.
QUICK = ("append.committed", "txn.rolled", "rebuild.sliced")


def test_every_failpoint_of_journals_is_tried() -> None:
    kinds = ("persist", "entity", "snapshot", "rebuild")
    assert {name for name in failpoints.NAMES if name.partition(".")[0] in kinds} <= set(PASSES)


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in PASSES])
def test_nothing_acked_is_lost_when_a_process_is_killed_at(name: str, place: Place, crew: Crew, pytestconfig: pytest.Config) -> None:
    for seed in (1, 2) if pytestconfig.getoption("--long") else (1,):
        _kill_and_go_on(crew, Place(f"{place.url}-{seed}", None) if place.catalog is None else place, name, seed)
        if place.catalog is not None:
            return


def _kill_and_go_on(crew: Crew, place: Place, name: str, seed: int) -> None:
    place.open(create=True).close()
    at = random.Random(f"{name}{seed}").randint(1, PASSES[name])
    killed = crew.start(persist_plan, place, f"{name}=kill@{at}", seed, 1)
    told = list(killed.hear_all())
    assert ("done",) not in told, f"pass {at} of {name} was never reached"
    assert killed.wait() == -9
    with place.open() as store:
        _check(store, told)

    second = crew.start(persist_plan, place, "", seed, 2)
    told += second.hear_all()
    assert second.wait() == 0 and told.pop() == ("done",)
    with place.open() as store:
        _check(store, told)


def _check(store: hw.Store, told: list[Any]) -> None:
    if NAME not in store.journals():
        assert not told
        return
    wait_until_indexed(store)
    journal = store.journal(NAME)
    ids = {id for (id,) in store._engine.database.query("SELECT id FROM entity WHERE stream = ?", (journal._ref.id,))}
    lows = {id: journal.head(id).low for id in ids}
    events = check_journal(store, NAME, lows=lows)
    by_id = {event.event_id: event for event in events}
    for what, id, at, *more in told:
        if what == "persisted":
            for place, event_id in enumerate(more[0]):
                event = by_id.get(event_id)
                require(event is not None, f"acked, and lost: {id} at {at + place}")
                assert event is not None and (event.id, event.sequence) == (id, at + place)
        elif what == "deleted":
            require(lows[id] >= at, f"{id} was deleted to {at}, and begins at {lows[id]}")
        elif id in ids and lows[id] <= at:
            require(journal.find_snapshot(id, at) is not None, f"the snapshot of {id} at {at} is lost")
    _check_persists(events)
    report = check_store(store)
    assert report.ok, report.problems


def _check_persists(events: list[Stored]) -> None:
    """Each persist, and each transaction, is there whole or not at all; each name at most once."""
    parts: dict[str, list[Stored]] = defaultdict(list)
    names = defaultdict(list)
    for event in events:
        data = json.loads(event.data)
        parts[data["of"]].append(event)
        for tag in event.tags:
            if tag.startswith("name:"):
                names[tag].append(event.id)
    for of, found in parts.items():
        count = json.loads(found[0].data)["count"] * (2 if of.endswith(".tx") else 1)
        require(len(found) == count, f"of {count} events of {of} there are {len(found)}")
    for tag, ids in names.items():
        require(len(ids) == 1, f"{tag} was given to {ids}")
