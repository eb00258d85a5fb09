"""Merged reading while journals and streams are written, scaled and tiered: no event comes before its cause, none is missed or repeated."""

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
from tests.crash.journal_workers import record, scale
from tests.crash.processes import Place

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

JOURNALS, STREAM = ("crash/one", "crash/two"), "crash/plain"
NAMES = (*JOURNALS, STREAM)


@pytest.fixture
def store(place: Place) -> Iterator[hw.Store]:
    with place.open() as store:
        for name in JOURNALS:
            store.journal(name, scaling=hw.Scaling.fixed(3))
        store.create_stream(STREAM, scaling=hw.Scaling.fixed(3))
        yield store


def follow_chain(store: hw.Store, chain: int, steps: int) -> None:
    """Write one event after the other, each when the one before it, its cause, was acked: anywhere, with any key."""
    rng = random.Random(chain)
    with store.stream(STREAM).writer() as writer:
        for step in range(steps):
            name, key = rng.choice(NAMES), f"k{rng.randrange(8)}"
            if rng.random() < 0.15:
                # The steps of a transaction are everywhere at once.
                with store.transaction() as tx:
                    tx.write(STREAM, f"{chain}:{step}:tx", key=key)
                    tx.persist(rng.choice(JOURNALS), f"{chain}-tx-{step}", record([chain, step, "tx"]))
            elif name == STREAM:
                writer.write(f"{chain}:{step}:", key=key).result()
            else:
                store.journal(name).persist(key, record([chain, step, ""]))


def told(event: hw.Event | hw.Recorded) -> tuple[int, int]:
    if isinstance(event, hw.Recorded):
        return event.data[0], event.data[1]
    chain, step, _ = event.value.decode().split(":")
    return int(chain), int(step)


def place_of(name: str | None, event: hw.Event | hw.Recorded) -> tuple[str, hw.Position]:
    assert name is not None
    return name, event.position


class Reading:
    """What a merged read gave, checked as it comes: a chain never goes back."""

    def __init__(self) -> None:
        self.places: list[tuple[str, hw.Position]] = []
        self._steps: dict[int, int] = {}

    def take(self, merged: Any, count: int | None = None) -> None:
        for event in itertools.islice(merged, count):
            chain, step = told(event)
            assert step >= self._steps.get(chain, 0), f"step {step} of chain {chain} comes after its effect, {self._steps[chain]}"
            self._steps[chain] = step
            self.places.append(place_of(merged.stream, event))


def test_no_event_comes_before_its_cause_while_all_is_scaled_and_tiered(place: Place, store: hw.Store, pytestconfig: pytest.Config) -> None:
    chains, steps = (12, 300) if pytestconfig.getoption("--long") else (6, 60)
    rng = random.Random(1)
    live, errors = Reading(), []

    def follow() -> None:
        try:
            live.take(store.read_merged(*NAMES, follow=True))
        except BaseException as error:
            errors.append(error)

    follower = threading.Thread(target=follow, daemon=True)
    follower.start()
    paused, cut = Reading(), str(store.read_merged(*NAMES).cut)
    with place.open() as other, ThreadPoolExecutor(chains) as pool:
        jobs = [pool.submit(follow_chain, (store, other)[chain % 2], chain, steps) for chain in range(chains)]
        while wait(jobs, timeout=0.02).not_done:
            scale(store.stream(rng.choice(NAMES)), rng)
            if rng.random() < 0.3:
                store.run_upkeep()
            # A read that is paused again and again, and goes on from its cut.
            merged = other.read_merged(*NAMES, start=hw.Cut.parse(cut))
            paused.take(merged, rng.randrange(1, 60))
            cut = str(merged.cut)
        for job in jobs:
            job.result()
    for name in NAMES:
        store.stream(name).seal()
    follower.join(300)
    assert not follower.is_alive() and not errors, errors
    paused.take(store.read_merged(*NAMES, start=hw.Cut.parse(cut)))
    store.run_upkeep()
    whole = Reading()
    whole.take(store.read_merged(*NAMES))
    stored = [(name, event.position) for name in NAMES for event in store.stream(name).read()]
    for what, reading in (("live", live), ("paused", paused), ("whole", whole)):
        assert len(reading.places) == len(set(reading.places)), f"{what}: repeated"
        assert set(reading.places) == set(stored), f"{what}: missed or made up"
    assert check_store(store).ok
