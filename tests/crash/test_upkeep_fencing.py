"""One upkeep at a time: a dead one is followed within seconds, and one that only looked dead can change nothing any more."""

from __future__ import annotations

import time

import pytest

import headwater as hw
from headwater.catalog import leases
from headwater.check import check_store
from headwater.streams import upkeep
from tests.crash.processes import Crew, Place, wait_until
from tests.crash.upkeep_workers import tend_by_hand, tend_in_background
from tests.operations import fence_all

pytestmark = pytest.mark.slow

STREAM = "up/one"
COUNT = 12


def _write(store: hw.Store, start: int, count: int) -> None:
    with store.stream(STREAM).writer() as writer:
        for number in range(start, start + count):
            writer.write(b"%d|" % number + b"." * (100_000 if number % 3 == 0 else 10)).result()


def _numbers(store: hw.Store) -> list[int]:
    return [int(event.value.partition(b"|")[0]) for event in store.stream(STREAM).read()]


@pytest.fixture
def store(place: Place) -> hw.Store:
    store = place.open()
    store.create_stream(STREAM)
    _write(store, 0, COUNT)
    return store


def test_when_the_holder_is_killed_another_takes_over_within_seconds(
    place: Place, store: hw.Store, crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "UPKEEP_DELAY_SECONDS", 0.01)
    monkeypatch.setattr(upkeep, "_ROUND_SECONDS", 0.02)
    with store:
        first = crew.start(tend_in_background, place)
        assert first.hear() == "holds"
        with hw.open(place.url, catalog=place.catalog) as second:
            time.sleep(1.5)
            assert not second._upkeep._is_held, "the first renews its lease"
            first.kill()
            began = time.monotonic()
            wait_until(lambda: second._upkeep._is_held)
            assert time.monotonic() - began < 10
            monkeypatch.setattr(upkeep, "TIER_EXTENTS", 1)
            _write(store, COUNT, 1)
            wait_until(lambda: store._engine.database.query("SELECT count(*) FROM extent WHERE form = 1") != [(0,)])
            assert _numbers(store) == list(range(COUNT + 1))


#: The first two stop where the next ones do, but for a moment.
STOPS = [
    *(pytest.param(name, marks=pytest.mark.long) for name in ("tier.read", "tier.sliced")),
    *("tier.written", "tier.swapped", "garbage.found", "garbage.deleted"),
]


@pytest.mark.parametrize("failpoint", STOPS)
def test_a_holder_that_was_stopped_and_goes_on_after_a_takeover_changes_nothing(
    place: Place, store: hw.Store, crew: Crew, failpoint: str
) -> None:
    with store:
        if failpoint.startswith("garbage"):
            store.run_upkeep()
            store.stream(STREAM).truncate(store.stream(STREAM).tail())
            _write(store, COUNT, COUNT)
        expected = _numbers(store)
        zombie = crew.start(tend_by_hand, place, f"{failpoint}=stop")
        zombie.wait_until_stopped()

        wait_until(lambda: store._engine.run(leases.find_holder) is None)
        fence_all(store._engine.database)
        _write(store, 2 * COUNT, 3)
        expected += range(2 * COUNT, 2 * COUNT + 3)
        store.run_upkeep()
        store.run_upkeep()
        assert _numbers(store) == expected

        zombie.go_on()
        assert zombie.hear() == (False, "FencedError")
        assert _numbers(store) == expected
        report = check_store(store)
        assert report.ok, report.problems
        zombie.tell("end")
        assert zombie.wait() == 0
        store.run_upkeep()
        assert _numbers(store) == expected
        fence_all(store._engine.database)
        store.run_upkeep()
        assert check_store(store).unused_count == 0


def test_a_stopped_background_that_goes_on_takes_its_turn_again(place: Place, store: hw.Store, crew: Crew) -> None:
    with store:
        background = crew.start(tend_in_background, place, "tier.written=stop")
        assert background.hear() == "holds"
        _write(store, COUNT, COUNT)
        background.wait_until_stopped()
        wait_until(lambda: store._engine.run(leases.find_holder) is None)
        fence_all(store._engine.database)
        first = store._engine.database.query("SELECT session FROM lease")
        store.run_upkeep()
        background.go_on()
        wait_until(lambda: store._engine.run(leases.find_holder) is not None)
        assert store._engine.database.query("SELECT session FROM lease") != first, "with a session that lives"
        live = store._engine.database.query("SELECT live FROM session WHERE id = (SELECT session FROM lease)")
        assert live == [(1,)]
        _write(store, 2 * COUNT, 2 * COUNT)
        wait_until(lambda: store._engine.database.query("SELECT count(*) FROM extent WHERE form = 1") == [(2,)])
        assert _numbers(store) == list(range(4 * COUNT))
