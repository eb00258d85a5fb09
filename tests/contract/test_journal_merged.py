"""Merged reading: several streams and journals as one stream, each event after its causes."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import pytest

import headwater as hw
from headwater.catalog import segments

JOURNALS = ("shop/orders", "shop/stock")
STREAM = "shop/clicks"
NAMES = (*JOURNALS, STREAM)


@pytest.fixture
def journals(store: hw.Store) -> list[hw.Journal]:
    store.create_stream(STREAM, scaling=hw.Scaling.fixed(2))
    return [store.journal(name, scaling=hw.Scaling.fixed(3)) for name in JOURNALS]


def number_of(event: Any) -> int:
    return event.data if isinstance(event, hw.Recorded) else int(event.value)


def fill(store: hw.Store, journals: list[hw.Journal], rng: random.Random, numbers: range) -> None:
    """Write numbers, each after the one before is durable, to any of the streams."""
    with store.stream(STREAM).writer() as writer:
        for number in numbers:
            which = rng.randrange(4)
            key = f"e{rng.randrange(9)}"
            if which == 3:
                with store.transaction() as tx:
                    tx.persist(JOURNALS[0], key, hw.Record("x", number))
                    tx.write(STREAM, str(number), key=key)
            elif which == 2:
                writer.write(str(number), key=key).result()
            else:
                journals[which].persist(key, hw.Record("x", number))
            if rng.random() < 0.05:
                stream = store.stream(rng.choice(NAMES))
                stream.split(rng.choice(stream.segments()).number)
            if rng.random() < 0.04:
                store.run_upkeep()


def test_events_come_in_the_order_in_which_they_were_written(store: hw.Store, journals: list[hw.Journal], seed: int) -> None:
    rng = random.Random(seed)
    fill(store, journals, rng, range(120))
    for _ in range(2):
        merged = store.read_merged(*NAMES)
        found = [(merged.stream, number_of(event)) for event in merged]
        assert [number for _, number in found] == sorted(number for _, number in found)
        assert {number for _, number in found} == set(range(120)) and {name for name, _ in found} == set(NAMES)
        for name, journal in zip(JOURNALS, journals, strict=True):
            assert sorted(number for where, number in found if where == name) == sorted(event.data for event in journal.events())
        store.run_upkeep()


def test_a_merged_read_goes_on_from_its_cut(store: hw.Store, journals: list[hw.Journal], seed: int) -> None:
    rng = random.Random(seed)
    fill(store, journals, rng, range(60))
    wanted = [(type(event).__name__, event.position, number_of(event)) for event in store.read_merged(*NAMES)]
    found, cut = [], None
    while True:
        merged = store.read_merged(*NAMES, start=cut)
        some = [(type(event).__name__, event.position, number_of(event)) for event in islice(merged, rng.randrange(1, 9))]
        if not some:
            break
        found += some
        cut = hw.Cut.parse(str(merged.cut))
    assert found == wanted
    assert cut == store.cut(*NAMES)
    fill(store, journals, rng, range(60, 70))
    assert {number_of(event) for event in store.read_merged(*NAMES, start=cut)} == set(range(60, 70))
    assert {number_of(event) for event in store.read_merged(*NAMES, end=cut)} == set(range(60))
    assert list(store.read_merged(*NAMES, start="tail")) == []


def test_no_effect_comes_before_its_cause(store: hw.Store, journals: list[hw.Journal]) -> None:
    """One thread answers what another one reads, in another journal: the follower sees each question before its answer."""
    orders, stock = journals
    live = store.read_merged(*NAMES, start="head", follow=True)
    found: list[tuple[str | None, int]] = []

    def follow() -> None:
        for event in live:
            found.append((live.stream, number_of(event)))

    def ask() -> None:
        for number in range(100):
            orders.persist(f"e{number % 7}", hw.Record("asked", number))

    def answer() -> None:
        for event in islice(orders.events(follow=True), 100):
            stock.persist(f"e{event.data % 5}", hw.Record("answered", event.data))

    with ThreadPoolExecutor(3) as pool:
        work = [pool.submit(follow), pool.submit(answer), pool.submit(ask)]
        for each in work[1:]:
            each.result(timeout=120)
        for name in NAMES:
            store.stream(name).seal()
        work[0].result(timeout=120)
    places = {item: place for place, item in enumerate(found)}
    assert len(found) == len(places) == 200
    for number in range(100):
        assert places[JOURNALS[0], number] < places[JOURNALS[1], number]


def test_a_follower_of_one_more_stream_waits_and_ends_with_the_last(store: hw.Store, journals: list[hw.Journal]) -> None:
    journals[0].persist("gone", hw.Record("x", -1))
    journals[0].delete("gone")
    found: list[int] = []
    live = store.read_merged(*NAMES, follow=True)
    thread = threading.Thread(target=lambda: found.extend(map(number_of, live)))
    thread.start()
    fill(store, journals, random.Random(1), range(20))
    for name in NAMES:
        assert thread.is_alive()
        store.stream(name).seal()
    thread.join(timeout=60)
    assert not thread.is_alive() and sorted(set(found)) == list(range(20)) and found == sorted(found)


def bad(store: hw.Store) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    yield (), {}
    yield (STREAM, STREAM), {}
    yield (NAMES[0], STREAM), {"start": store.cut(STREAM)}
    yield (STREAM,), {"end": store.cut(NAMES[0])}
    yield (STREAM,), {"start": 1}
    yield (STREAM,), {"follow": True, "end": "tail"}
    yield (STREAM,), {"follow": "yes"}
    yield ("shop/bytes",), {}
    yield ("no name",), {}


def test_what_can_not_be_merged_is_refused_at_once(store: hw.Store, journals: list[hw.Journal]) -> None:
    store.create_stream("shop/bytes", kind="bytes")
    for names, more in bad(store):
        with pytest.raises(hw.InvalidRequestError):
            store.read_merged(*names, **more)
    with pytest.raises(hw.NotFoundError):
        store.read_merged("shop/nothing")
    journals[0].persist("a", hw.Record("x", 1))
    assert [number_of(event) for event in store.read_merged(store.stream(NAMES[0]))] == [1]


def test_all_tails_of_a_round_are_of_one_look(store: hw.Store, journals: list[hw.Journal], monkeypatch: pytest.MonkeyPatch) -> None:
    """A cause and its effect are committed right after each look at tails: a follower that looked twice would see the effect alone."""
    orders, stock = journals
    engine, left = store._engine, list(range(5))
    run = engine.run

    def run_and_persist(operation: Any, *args: Any, **more: Any) -> Any:
        found = run(operation, *args, **more)
        if operation is segments.list_segments_of and left:
            number = left.pop(0)
            orders.persist("a", hw.Record("asked", number))
            stock.persist("a", hw.Record("answered", number))
        return found

    live = store.read_merged(*JOURNALS, start="head", follow=True)
    monkeypatch.setattr(engine, "run", run_and_persist)
    found = [(live.stream, number_of(event)) for event in islice(live, 10)]
    assert found == [(name, number) for number in range(5) for name in JOURNALS]
