"""The journal: persists on a condition, replay, queries by tag, live queries and a million entities, beside other event stores.

The library `eventsourcing` and UmaDB stand beside it where they are installed (`make bench-journal`); what fails of theirs is left out,
with a word on standard error.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import repeat
from multiprocessing.connection import Connection
from typing import Any

import apsw
import psycopg

import headwater as hw
from benchmarks.bench import Bench, Place
from benchmarks.eventstores import (
    DATA,
    JOURNAL,
    TYPE,
    EventStore,
    Filling,
    Headwater,
    Opened,
    OpenedHeadwater,
    Persist,
    Tagged,
    UmaDB,
    running_peers,
)
from benchmarks.processes import say_ready, started
from benchmarks.results import Goal, Result, at_least, at_most, in_turns, median_ratio, percentile

#: A typed ack may take this part of the time of a persist on a condition.
_OF_AN_ACK = 1 / 1.3
_ENTITY_EVENTS = 10
_RARE = "rare"
_RARE_ONE_IN = 10_000
_INDEX_TABLES = ("journal", "entity", "entity_page", "word", "word_page", "entity_by_deletion")


def persists(bench: Bench) -> Iterator[Result]:
    """One event with a condition at a time, by threads of one process and by processes, beside typed acks and other event stores."""
    sizes = bench.sizes
    for catalog in bench.catalogs:
        with bench.place(catalog) as place, running_peers(bench, catalog, place) as peers:
            own = [Headwater(place, condition) for condition in ("ack", "expected", "fail_if")]
            stores: list[EventStore] = [*own, *peers]
            for threads in sizes.journal_threads:
                with ExitStack() as stack:
                    opened = [stack.enter_context(store.opened()) for store in stores]
                    count = max(threads, sizes.journal_persists)
                    measures = [partial(_rate_of_threads, each, threads, count) for each in opened]
                    rates = _turns(sizes.rounds, stores, measures)
                yield from _persist_results(catalog.name, _counted(threads, "thread"), stores, rates, threads)
            count = max(1, sizes.journal_persists // sizes.journal_processes)
            measures = [partial(_rate_of_processes, store.for_one_thread(), sizes.journal_processes, count) for store in stores]
            rates = _turns(min(sizes.rounds, 3), stores, measures)
            yield from _persist_results(catalog.name, _counted(sizes.journal_processes, "process", "processes"), stores, rates, 0)


def _persist_results(
    catalog: str, who: str, stores: Sequence[EventStore], rates: Sequence[Sequence[float]], threads: int
) -> Iterator[Result]:
    acks = rates[0]
    for store, own in zip(stores[1:3], rates[1:3], strict=True):
        assert isinstance(store, Headwater)
        variant = f"{catalog}, {who}, {store.condition}"

        def result(limits: Sequence[float], name: str, goal: Goal | None, variant: str = variant, own: Sequence[float] = own) -> Result:
            value, limit = statistics.median(own), statistics.median(limits)
            return Result("journal-persist", variant, value, "persists/s", limit, name, median_ratio(own, limits), goal)

        yield result(acks, "typed acks", at_least(_OF_AN_ACK, of="ratio") if catalog == "SQLite" and threads else None)
        for peer, theirs in zip(stores[3:], rates[3:], strict=True):
            if not any(map(math.isnan, theirs)):
                is_asked = peer.name == "eventsourcing" and catalog == "PostgreSQL" and threads == 16
                yield result(theirs, peer.name, at_least(5, of="ratio") if is_asked else None)


def _rate_of_threads(store: Opened, threads: int, count: int) -> float:
    """Persists a second of threads that each wait for one after the other."""
    barrier = threading.Barrier(threads + 1)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            persist = store.persist()
            persist(uuid.uuid4().hex, 1)
            barrier.wait()
            _persist(persist, count // threads)
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    started_threads = [threading.Thread(target=work) for _ in range(threads)]
    for thread in started_threads:
        thread.start()
    with suppress(threading.BrokenBarrierError):
        barrier.wait()
    begun = time.perf_counter()
    for thread in started_threads:
        thread.join()
    seconds = time.perf_counter() - begun
    if errors:
        raise errors[0]
    return count // threads * threads / seconds


def _persist(persist: Persist, count: int) -> None:
    """Events of entities that have some each."""
    for start in range(0, count, _ENTITY_EVENTS):
        id = uuid.uuid4().hex
        for sequence in range(1, min(_ENTITY_EVENTS, count - start) + 1):
            persist(id, sequence)


def _rate_of_processes(store: EventStore, processes: int, count: int) -> float:
    with ExitStack() as stack:
        pipes = [stack.enter_context(started(_persist_when_told, store, count)) for _ in range(processes)]
        begun = time.perf_counter()
        for pipe in pipes:
            pipe.send(None)
        for pipe in pipes:
            pipe.recv()
        return processes * count / (time.perf_counter() - begun)


def _persist_when_told(pipe: Connection, store: EventStore, count: int) -> None:
    with store.opened() as opened:
        persist = opened.persist()
        persist(uuid.uuid4().hex, 1)
        say_ready(pipe)
        pipe.recv()
        _persist(persist, count)
        pipe.send(None)


def _turns(rounds: int, stores: Sequence[EventStore], measures: Sequence[Callable[[], float]]) -> list[list[float]]:
    """The figures of each store, measured in turns. A peer that fails has none; a failure of ours ends the benchmark."""

    def measured(store: EventStore, measure: Callable[[], float]) -> float:
        if isinstance(store, Headwater):
            return measure()
        try:
            return measure()
        except Exception as error:
            print(f"{store.name} is left out: {type(error).__name__}: {error}", file=sys.stderr)
            return math.nan

    return in_turns(rounds, *(partial(measured, store, measure) for store, measure in zip(stores, measures, strict=True)))


# Reading.


def _fillings(bench: Bench) -> Iterator[Filling]:
    """Entities of 10 events, and one each of the other sizes that are replayed; an event in 10,000 is a rare one."""
    sizes = bench.sizes
    for count in sizes.journal_replays[1:]:
        yield Filling(f"entity-of-{count}", count)
    small = max(1, (sizes.journal_events - sum(sizes.journal_replays[1:])) // _ENTITY_EVENTS)
    every = max(1, min(_RARE_ONE_IN // _ENTITY_EVENTS, small))
    for number in range(small):
        yield Filling(f"small-{number}", _ENTITY_EVENTS, _RARE if number % every == 0 else None)


def _random_small(bench: Bench) -> str:
    count = max(1, (bench.sizes.journal_events - sum(bench.sizes.journal_replays[1:])) // _ENTITY_EVENTS)
    return f"small-{random.randrange(count)}"


@contextmanager
def _filled(bench: Bench, stores: Sequence[EventStore]) -> Iterator[list[Opened]]:
    with ExitStack() as stack:
        opened: list[Opened] = [stack.enter_context(store.opened()) for store in stores]
        for each in opened:
            each.fill(_fillings(bench))
        yield opened


def replays(bench: Bench) -> Iterator[Result]:
    """Replay entities of several sizes among all others: from blocks and from Parquet, and by a process that has read nothing yet."""
    sizes = bench.sizes
    for catalog in bench.catalogs:
        with bench.place(catalog) as place, running_peers(bench, catalog, place) as peers:
            stores: list[EventStore] = [Headwater(place, "expected"), *peers]
            with _filled(bench, stores) as opened:
                own = opened[0]
                assert isinstance(own, OpenedHeadwater)
                for form in ("blocks", "Parquet"):
                    if form == "Parquet":
                        own.store.run_upkeep()
                    measures = [partial(_replay_seconds, each, partial(_random_small, bench), _ENTITY_EVENTS) for each in opened]
                    found = _turns(sizes.acks, stores, measures)
                    goal = at_most(1.0) if catalog.name == "SQLite" and form == "blocks" else None
                    yield from _times(f"{catalog.name}, {_ENTITY_EVENTS} events, {form}, p50", "journal-replay", stores, found, goal)
                    cold = [_cold_seconds(place, _random_small(bench)) for _ in range(sizes.rounds)]
                    goal = at_most(50.0) if catalog.name == "SQLite" else None
                    variant = f"{catalog.name}, {_ENTITY_EVENTS} events, {form}, cold"
                    yield Result("journal-replay", variant, statistics.median(cold) * 1000, "ms", goal=goal)
                    for count in sizes.journal_replays[1:]:
                        name = f"entity-of-{count}"
                        measures = [partial(_replay_seconds, each, repeat(name).__next__, count) for each in opened]
                        found = _turns(sizes.rounds, stores, measures)
                        yield from _times(f"{catalog.name}, {count:,} events, {form}", "journal-replay", stores, found, None)


def _replay_seconds(store: Opened, choose: Callable[[], str], count: int) -> float:
    id = choose()
    begun = time.perf_counter()
    found = store.replay(id)
    seconds = time.perf_counter() - begun
    assert found == count, (id, found)
    return seconds


def _times(variant: str, name: str, stores: Sequence[EventStore], found: Sequence[Sequence[float]], goal: Goal | None) -> Iterator[Result]:
    """Medians in milliseconds, beside each peer's."""
    value = statistics.median(found[0]) * 1000
    beside = [(store, theirs) for store, theirs in zip(stores[1:], found[1:], strict=True) if not any(map(math.isnan, theirs))]
    if not beside or goal is not None:
        yield Result(name, variant, value, "ms", goal=goal)
    for store, theirs in beside:
        limit = statistics.median(theirs) * 1000
        yield Result(name, variant, value, "ms", limit, store.name, value / limit)


def _cold_seconds(place: Place, id: str) -> float:
    """Of the first replay of a process, whose store is open."""
    with started(_replay_when_told, place) as pipe:
        pipe.send(id)
        return float(pipe.recv())


def _replay_when_told(pipe: Connection, place: Place) -> None:
    with hw.open(place.url, catalog=place.catalog, create=False, upkeep=False) as store:
        journal = store.journal(JOURNAL)
        say_ready(pipe)
        id = pipe.recv()
        begun = time.perf_counter()
        for _ in journal.replay(id):
            pass
        pipe.send(time.perf_counter() - begun)


def tags(bench: Bench) -> Iterator[Result]:
    """Find the events with a tag that one in 10,000 has, beside a query that scans: by their type, which no other event has."""
    for catalog in bench.catalogs:
        with bench.place(catalog) as place, running_peers(bench, catalog, place) as peers:
            stores: list[EventStore] = [Headwater(place, "expected"), *(peer for peer in peers if isinstance(peer, UmaDB))]
            with _filled(bench, stores) as opened:
                own = opened[0]
                assert isinstance(own, OpenedHeadwater)
                wanted = own.find(_RARE)
                for form in ("blocks", "Parquet"):
                    if form == "Parquet":
                        own.store.run_upkeep()
                    scanned = partial(_seconds, partial(_scan, own.journal), wanted)
                    measures = [partial(_seconds, partial(each.find, _RARE), wanted) for each in opened if isinstance(each, Tagged)]
                    found = _turns(bench.sizes.rounds, [*stores, stores[0]], [*measures, scanned])
                    scans, by_tag = found.pop(), found[0]
                    variant, value = f"{catalog.name}, {wanted:,} events, {form}", statistics.median(by_tag) * 1000
                    ratio = median_ratio(by_tag, scans)
                    # Among few events a scan takes little.
                    goal = at_most(0.1, of="ratio") if bench.sizes.journal_events >= 100 * _RARE_ONE_IN else None
                    yield Result("journal-tag", variant, value, "ms", statistics.median(scans) * 1000, "a scan by type", ratio, goal)
                    if len(stores) > 1:
                        yield from _times(variant, "journal-tag", stores, found, None)


def _scan(journal: hw.Journal) -> int:
    return sum(1 for _ in journal.events(type=_RARE))


def _seconds(count: Callable[[], int], wanted: int) -> float:
    begun = time.perf_counter()
    found = count()
    seconds = time.perf_counter() - begun
    assert found == wanted, (found, wanted)
    return seconds


# Live.


def live(bench: Bench) -> Iterator[Result]:
    """From `persist` in one process to the event in the hands of a live query by tag in another, beside `stream.read(follow=True)`."""
    for catalog in bench.catalogs:
        with bench.place(catalog) as place, hw.open(place.url, catalog=place.catalog) as store:
            journal = store.journal(JOURNAL, scaling=hw.Scaling.fixed(4))
            count = max(1, bench.sizes.journal_live // bench.sizes.rounds)
            measures = [partial(_delays, journal, place, how, count) for how in ("query", "stream")]
            query, stream = ([delay for block in blocks for delay in block] for blocks in in_turns(bench.sizes.rounds, *measures))
        for share in (0.5, 0.99):
            found, limit = percentile(query, share) * 1000, percentile(stream, share) * 1000
            goal = at_most(1.2, of="ratio") if share == 0.5 else None
            variant = f"{catalog.name}, p{share * 100:.0f}"
            yield Result("journal-live", variant, found, "ms", limit, "stream.read(follow=True)", found / limit, goal)


def _delays(journal: hw.Journal, place: Place, how: str, count: int) -> list[float]:
    with started(_follow, place, how) as pipe:
        delays = []
        for number in range(count + 1):
            time.sleep(random.uniform(0.004, 0.012))
            # CLOCK_MONOTONIC is one clock for all processes of a host.
            journal.persist(f"entity-{number % 50}", hw.Record(TYPE, {"sent": time.monotonic_ns(), **DATA}, tags=("live",)))
            delays.append(pipe.recv() / 1e9)
        return delays[1:]


def _follow(pipe: Connection, place: Place, how: str) -> None:
    with hw.open(place.url, catalog=place.catalog, create=False) as store:
        journal = store.journal(JOURNAL)
        start = store.cut(JOURNAL)
        say_ready(pipe)
        try:
            if how == "query":
                for event in journal.events(tag="live", start=start, follow=True):
                    pipe.send(time.monotonic_ns() - event.data["sent"])
            else:
                for found in store.stream(JOURNAL).read(start, follow=True):
                    pipe.send(time.monotonic_ns() - json.loads(found.value["data"])["sent"])
        except (EOFError, BrokenPipeError):
            return


# Many entities.


def entities(bench: Bench) -> Iterator[Result]:
    """A journal of many entities of one event each: what the catalog needs for one, a persist beside an empty journal's, and all ids."""
    count = bench.sizes.journal_entities
    for catalog in bench.catalogs:
        with bench.place(catalog) as full_place, bench.place(catalog) as empty_place, ExitStack() as stack:
            full, empty = (stack.enter_context(Headwater(place, "expected").opened()) for place in (full_place, empty_place))
            before = _index_bytes(full_place)
            full.fill(Filling(f"entity-{number}", 1) for number in range(count))
            size = (_index_bytes(full_place) - before) / count
            goal = at_most(300) if count >= 10_000 else None  # pages that are half empty count in a small one
            yield Result("journal-entities", f"{catalog.name}, {count:,} entities", max(size, 1.0), "B of index each", goal=goal)
            measures = [partial(_rate_of_threads, each, 1, max(1, bench.sizes.journal_persists // 4)) for each in (full, empty)]
            rates, limits = in_turns(bench.sizes.rounds, *measures)
            value, limit, ratio = statistics.median(rates), statistics.median(limits), median_ratio(rates, limits)
            goal = at_least(1 / 1.2, of="ratio") if catalog.name == "SQLite" else None
            variant = f"{catalog.name}, persist beside {count:,}"
            yield Result("journal-entities", variant, value, "persists/s", limit, "an empty journal", ratio, goal)
            begun = time.perf_counter()
            listed = sum(1 for _ in full.journal.ids())
            seconds = time.perf_counter() - begun
            assert listed >= count, listed
            yield Result("journal-entities", f"{catalog.name}, list {count:,} ids", listed / seconds, "ids/s")


def _index_bytes(place: Place) -> int:
    """What the tables of the journal's index take."""
    marks = ", ".join("?" * len(_INDEX_TABLES))
    if place.catalog is None:
        connection = apsw.Connection(f"{place.url}/catalog.sqlite", flags=apsw.SQLITE_OPEN_READONLY)
        try:
            rows: Any = connection.execute(f"SELECT sum(pgsize) FROM dbstat WHERE name IN ({marks})", _INDEX_TABLES).fetchall()
        finally:
            connection.close()
    else:
        with psycopg.connect(place.catalog) as postgres:
            sql = "SELECT sum(pg_total_relation_size(quote_ident(tablename)::regclass)) FROM pg_tables WHERE tablename = ANY(%s)"
            rows = postgres.execute(sql, (list(_INDEX_TABLES),)).fetchall()
    return int(rows[0][0] or 0)


def _counted(count: int, noun: str, nouns: str | None = None) -> str:
    return f"{count} {noun if count == 1 else nouns or noun + 's'}"
