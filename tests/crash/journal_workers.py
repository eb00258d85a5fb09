"""What the processes of the journal's tests do."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import headwater as hw
from headwater.catalog import leases, rebuilds
from headwater.catalog.parts import Alone, Append
from headwater.catalog.persists import EntityIs, JournalLedger, NoMatch
from headwater.catalog.tails import Watch
from headwater.runtime import failpoints
from headwater.streams import rebuilding, upkeep
from tests.crash.processes import Place, wait_until

NAME = "crash/journal"
SEATS = 3


def record(data: Any = None, *tags: str, type: str = "happened") -> hw.Record:
    return hw.Record(type, data, tags=tags)


# Races.


def compete(channel: Connection, place: Place, process: int, threads: int, fault: str | None) -> None:
    """In each round that the test begins all threads want the same at once; says who got what."""
    if fault is not None:
        FAULTS[fault]()
    with place.open() as store, ThreadPoolExecutor(threads) as pool:
        journal, together = store.journal(NAME), threading.Barrier(threads)
        channel.send("ready")
        while (message := channel.recv()) is not None:
            kind, turn = message
            race = RACES[kind]

            def work(thread: int, race: Any = race, turn: int = turn) -> Any:
                together.wait()
                return race(store, journal, turn, process, thread)

            channel.send(list(pool.map(work, range(threads))))


def _take_name(store: hw.Store, journal: hw.Journal, turn: int, process: int, thread: int) -> tuple[str, hw.Position | None]:
    """One unique name: who gets it persists its tag. The loser is told where."""
    id, tag = f"name-{turn}-{process}-{thread}", f"name:{turn}"
    try:
        journal.persist(id, record(None, tag), fail_if=hw.Match(tags=(tag,)), expected=0)
    except hw.ConditionFailedError as error:
        return id, error.position
    return id, None


def _take_seat(store: hw.Store, journal: hw.Journal, turn: int, process: int, thread: int) -> tuple[str, bool]:
    """A course with a few seats: count them up to a cut, and take one unless one was taken after it."""
    id, tag = f"seat-{turn}-{process}-{thread}", f"course:{turn}"
    while True:
        cut = store.cut(NAME)
        if sum(1 for _ in journal.events(tag=tag, end=cut)) >= SEATS:
            return id, False
        with contextlib.suppress(hw.ConditionFailedError):
            journal.persist(id, record(None, tag), fail_if=hw.Match(tags=(tag,)), after=cut)
            return id, True


def _take_side(store: hw.Store, journal: hw.Journal, turn: int, process: int, thread: int) -> tuple[str, int, bool]:
    """Each of a pair persists the tag that the other one forbids."""
    pair, side = f"pair-{turn}-{process // 2}-{thread}", process % 2
    match = hw.Match(tags=(f"{pair}:{1 - side}",))
    try:
        if thread % 2:
            with store.transaction() as tx:
                tx.persist(NAME, f"{pair}-{side}", record(None, f"{pair}:{side}"), fail_if=match)
        else:
            journal.persist(f"{pair}-{side}", record(None, f"{pair}:{side}"), fail_if=match)
    except hw.ConditionFailedError:
        return pair, side, False
    return pair, side, True


def _require_other(store: hw.Store, journal: hw.Journal, turn: int, process: int, thread: int) -> tuple[str, int, bool]:
    """Each of a pair persists an entity, and requires that the other one's is unknown."""
    pair, side = f"skew-{turn}-{process // 2}-{thread}", process % 2
    try:
        with store.transaction() as tx:
            tx.require_entity(NAME, f"{pair}-{1 - side}", 0)
            tx.persist(NAME, f"{pair}-{side}", record())
            if thread % 2:
                tx.flush()
    except hw.ConditionFailedError:
        return pair, side, False
    return pair, side, True


RACES: dict[str, Callable[[hw.Store, hw.Journal, int, int, int], Any]] = {
    "name": _take_name,
    "seat": _take_seat,
    "side": _take_side,
    "require": _require_other,
}


def scale_all_the_time(channel: Connection, place: Place, seed: int) -> None:
    """Split and merge between 2 and 6 segments until told to end; says how often."""
    rng, count = random.Random(seed), 0
    with place.open() as store:
        stream = store.stream(NAME)
        channel.send("ready")
        while not channel.poll(rng.uniform(0.02, 0.3)):
            scale(stream, rng)
            count += 1
    channel.send(count)


def scale(stream: hw.Stream, rng: random.Random) -> None:
    opened = sorted(stream.segments(), key=lambda segment: segment.start)
    with contextlib.suppress(hw.NotFoundError):  # A transaction rolled them meanwhile.
        if len(opened) < 3 or (len(opened) < 6 and rng.random() < 0.5):
            stream.split(rng.choice(opened).number)
        else:
            first = rng.randrange(len(opened) - 1)
            stream.merge([opened[first].number, opened[first + 1].number])


# Faults, to be planted in every process of a race: the test must find each.


def _do_not_watch(*kinds: type) -> None:
    """The segments of these conditions are not locked, unless they are written."""
    watched, unwatched = JournalLedger.watched, JournalLedger._unwatched

    def faulty(self: JournalLedger) -> Iterator[Watch]:
        terms = self.terms
        self.terms = [term for term in terms if not isinstance(term, kinds)]
        yield from list(watched(self))
        self.terms = terms

    JournalLedger.watched = faulty  # type: ignore[method-assign]
    NoMatch.alone = lambda self, append: None  # type: ignore[method-assign]
    JournalLedger._unwatched = lambda self, term: None if isinstance(term, kinds) else unwatched(self, term)  # type: ignore[method-assign]


def _do_not_watch_alone() -> None:
    """The same, of persists that share no flush."""
    alone = NoMatch.alone

    def faulty(self: NoMatch, append: Append) -> Alone | None:
        found = alone(self, append)
        return found._replace(watched=()) if found is not None else None

    NoMatch.alone = faulty  # type: ignore[method-assign]


def _look_before_the_lock() -> None:
    """A condition is compared with the numbers of the time before the commit."""
    JournalLedger._may_match = lambda self, term: False  # type: ignore[method-assign]


FAULTS: dict[str, Callable[[], None]] = {
    "forbidden segments are not locked": partial(_do_not_watch, NoMatch),
    "a persist that is committed alone does not lock them": _do_not_watch_alone,
    "required segments are not locked": partial(_do_not_watch, EntityIs),
    "a commit does not compare": _look_before_the_lock,
}


# A plan, killed at one place and begun again.

TURNS = 5


def persist_plan(channel: Connection, place: Place, spec: str, seed: int, run: int) -> None:
    """Persist, delete, take snapshots, scale and rebuild the index, going through the failpoints in `spec`; tells what was acked."""
    # A short lease: the next one need not wait long for what a killed one held. Small slices: a rebuild has several.
    vars(upkeep).update(LEASE_SECONDS=0.3)
    vars(leases).update(_LEASE_US=300_000)
    for module in (rebuilds, rebuilding):
        vars(module).update(REBUILD_ROWS=20)
    rng = random.Random(f"{seed} {run}")
    with place.open() as store:
        journal = store.journal(NAME, scaling=hw.Scaling.fixed(2))
        wait_until_indexed(store)
        failpoints.arm(spec)
        for turn in range(TURNS):
            life = f"{run}.{turn}"
            _persist_some(channel, journal, rng, life)
            _transact(channel, store, rng, life, is_staged=bool(turn % 2))
            _refuse(place, journal, life)
            _delete_some(channel, journal, rng, life)
            scale(store.stream(NAME), rng)
            if turn % 2:
                store._engine.run(rebuilds.begin_repair, journal._ref.id)
            store.run_upkeep()
            wait_until_indexed(store)
    channel.send(("done",))


def wait_until_indexed(store: hw.Store) -> None:
    """Upkeep, until the index of the journal is whole: another process may have the lease for a moment."""

    def is_whole() -> bool:
        with contextlib.suppress(hw.UnavailableError):
            store.run_upkeep()
        return store.journal(NAME)._is_ready()

    if not store.journal(NAME)._is_ready():
        wait_until(is_whole)


def planned(life: str, what: str, count: int, *tags: str, size: int = 10) -> list[hw.Record]:
    """Events of one persist; each says of which one and how many there are, and has its tag."""
    data = {"of": f"{life}.{what}", "count": count, "pad": "." * size}
    return [record(data, f"of:{life}.{what}", *tags, type=f"t{count}") for _ in range(count)]


def _told(channel: Connection, found: hw.Persisted, records: list[hw.Record]) -> None:
    channel.send(("persisted", found.id, found.first, [str(one.event_id) for one in records]))


def _persist_some(channel: Connection, journal: hw.Journal, rng: random.Random, life: str) -> None:
    acks = []
    for number in range(8):
        id = f"k{rng.randrange(5)}"
        records = planned(life, f"p{number}", rng.randint(1, 3), rng.choice(("red", "blue")), size=rng.choice((10, 10, 40_000)))
        acks.append((journal.persist_async(id, records), records))
    name = f"name:{life.partition('.')[2]}"
    mine = planned(life, "name", 1, name)
    with contextlib.suppress(hw.ConditionFailedError):  # An earlier run has it.
        acks.append((journal.persist_async(f"n{life}", mine, expected=0, fail_if=hw.Match(tags=(name,))), mine))
        acks[-1][0].result()
    for ack, records in acks:
        with contextlib.suppress(hw.ConditionFailedError):
            _told(channel, ack.result(), records)


def _transact(channel: Connection, store: hw.Store, rng: random.Random, life: str, *, is_staged: bool) -> None:
    """Two entities and a stream, all or nothing; what was staged before a split needs a roll."""
    tx = store.transaction()
    tx.require_entity(NAME, f"never-{life}", 0)
    parts = [(f"k{rng.randrange(5)}", planned(life, "tx", 2)), (f"a{life}", planned(life, "tx", 2))]
    first = [store.journal(NAME).head(id).sequence + 1 for id, _ in parts]
    for id, records in parts:
        tx.persist(NAME, id, records, fail_if=hw.Match(tags=(f"nobody:{life}",)))
    if is_staged:
        tx.flush()
        # All of them: the blocks are for some of them, and those must roll.
        stream = store.stream(NAME)
        for segment in stream.segments():
            stream.split(segment.number)
    tx.commit()
    for (id, records), at in zip(parts, first, strict=True):
        channel.send(("persisted", id, at, [str(one.event_id) for one in records]))


def _refuse(place: Place, journal: hw.Journal, life: str) -> None:
    """A persist that knows an old head is given again, and one whose condition looks but does not hit."""
    records = planned(life, "raced", 1)
    journal.persist("raced", planned(life, "before", 1))
    with place.open() as other:
        other.journal(NAME).persist("raced", planned(life, "other", 1, "red"))
    journal.persist("raced", records)
    journal.persist("raced", planned(life, "looks", 1), fail_if=hw.Match(tags=("red",), types=("never",)))


def _delete_some(channel: Connection, journal: hw.Journal, rng: random.Random, life: str) -> None:
    id = f"k{rng.randrange(5)}"
    sequence = journal.head(id).sequence
    if sequence:
        journal.snapshot(id, sequence, {"at": sequence})
        channel.send(("snapshot", id, sequence))
        journal.delete_to(id, sequence // 2)
        channel.send(("deleted", id, sequence // 2 + 1))
    gone = f"a{life}"
    journal.delete(gone)
    channel.send(("deleted", gone, journal.head(gone).sequence + 1))


def persist_until_killed(channel: Connection, place: Place, spec: str, life: int) -> None:
    """Persist one event after the other, most with the tag "eu"; tells each one's id when it is acked."""
    with place.open() as store:
        journal = store.journal(NAME)
        failpoints.arm(spec)
        for number in itertools.count():
            event = record([life, number], *["eu"] * (number % 4 != 3))
            journal.persist(f"e{number % 5}", event)
            channel.send(str(event.event_id))
