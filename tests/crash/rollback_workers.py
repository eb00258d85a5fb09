"""The processes of a history of roll-backs: one rolls a stream back while others write, read, follow, scale, fork, tag and tier it.

Each logs what it did and saw, as the processes of `history_workers` do.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from hashlib import sha1
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import headwater as hw
from headwater.catalog import rollbacks, undone
from headwater.catalog.database import Tx
from headwater.runtime import failpoints
from tests.crash.history_workers import KEYS, Log, event_id
from tests.crash.processes import Place

STREAM, TABLE, GROUP, KEPT = "undone/stream", "undone/table", "group", "undone/kept"
#: Each is one process, killed and begun again; but the watcher lives as long as the history.
MORTAL = ("writer1", "writer2", "roller", "reader1", "reader2", "forker", "scaler", "keeper")
WATCHER = "watcher"
ROLES = (*MORTAL, WATCHER)
FAILPOINTS = {
    "writer": ("append.applied", "append.committed"),
    "roller": ("rollback.moved", "rollback.applied", "txn.applied", "txn.committed"),
    "scaler": ("scale.applied", "scale.committed"),
}


def create_rolled_stream(store: hw.Store) -> None:
    store.create_stream(STREAM, scaling=hw.Scaling.fixed(2))
    store.table(TABLE)
    store.reader_group(GROUP, [STREAM])


def live(channel: Connection, place: Place, folder: str, role: str, life: int, seed: int, fault: str | None) -> None:
    """One life of one process, until it is killed. The watcher ends when the stream is sealed."""
    if fault is not None:
        FAULTS[fault]()
    rng = random.Random(f"{seed} {role} {life}")
    kind = role.rstrip("12")
    act = {"writer": _write, "roller": _roll, "reader": _read, "forker": _fork, "scaler": _scale, "keeper": _tier, "watcher": _watch}[kind]
    log = Log(Path(folder), role, life)
    if kind in FAILPOINTS and rng.random() < 0.5:
        failpoints.arm(f"{rng.choice(FAILPOINTS[kind])}=kill@{rng.randint(1, 4)}")
    try:
        with place.open() as store:
            log.add("born")
            channel.send("ready")
            act(channel, store, f"{role}{life}", rng, log)
    except BaseException:
        log.add("failed", error=traceback.format_exc())
        raise


def digest(ids: Iterable[str]) -> str:
    """What tells two sets of events apart."""
    ordered = sorted(ids)
    return f"{len(ordered)} {sha1(' '.join(ordered).encode()).hexdigest()}"


def _write(channel: Connection, store: hw.Store, name: str, rng: random.Random, log: Log) -> None:
    count, writer = 0, store.stream(STREAM).writer()
    while True:
        given = []
        for _ in range(rng.randint(1, 8)):
            count += 1
            id = f"{name}:{count}"
            given.append((id, writer.write(id, key=rng.choice(KEYS))))
        for id, ack in given:
            position = ack.result()
            log.add("acked", id=id, place=[position.segment, position.number])
        channel.poll(0.01)


def _roll(channel: Connection, store: hw.Store, name: str, rng: random.Random, log: Log) -> None:
    """Roll the stream back to a tail that it had, alone or in a transaction with a put."""
    stream, count = store.stream(STREAM), 0
    tails = [stream.tail()]
    while True:
        for _ in range(rng.randint(1, 4)):
            channel.poll(rng.uniform(0.01, 0.1))
            tails.append(stream.tail())
        cut, count = rng.choice(tails[-5:]), count + 1
        kept = f"{KEPT}-{name}.{count}"
        log.add("rolling", cut=str(cut), kept=kept)
        try:
            if rng.random() < 0.5:
                stream.roll_back(cut, keep_as=kept, force=True)
            else:
                with store.transaction() as tx:
                    tx.roll_back(STREAM, cut, keep_as=kept, force=True)
                    tx.put(TABLE, kept, str(cut).encode())
        except hw.ConflictError as error:
            if "before the tag" not in str(error):
                raise
            log.add("refused", kept=kept)
        except hw.RolledBackError:
            log.add("stale", kept=kept)
        else:
            log.add("rolled", kept=kept)


def _read(channel: Connection, store: hw.Store, name: str, rng: random.Random, log: Log) -> None:
    while True:
        # Leaving is a commit, which may be refused.
        with suppress(hw.RolledBackError), store.reader_group(GROUP).reader(name) as reader:
            for _ in range(rng.randint(50, 300)):
                try:
                    event = reader.read(timeout=0.2)
                except hw.RolledBackError as error:
                    log.add("told", cut=str(error.cut))
                except hw.FencedError:
                    break
                else:
                    if event is not None:
                        log.add("handed", id=event_id(event), place=[event.position.segment, event.position.number])


def _fork(channel: Connection, store: hw.Store, name: str, rng: random.Random, log: Log) -> None:
    """Note what lies before a tail; fork it, or tag it for a while."""
    stream, count = store.stream(STREAM), 0
    while True:
        count += 1
        with suppress(hw.RolledBackError):
            cut = stream.tail()
            found = digest(event_id(event) for event in stream.read(end=cut))
            log.add("cut", cut=str(cut), digest=found)
            what = rng.random()
            if what < 0.3:
                log.add("forking", name=f"undone/fork-{name}.{count}", digest=found)
                stream.fork(f"undone/fork-{name}.{count}", at=cut)
            elif what < 0.6:
                log.add("tagging", name=f"{name}.{count}", digest=found, cut=str(cut))
                store.tag(f"{name}.{count}", cut)
                channel.poll(rng.uniform(0.0, 0.1))
        # Others can't roll back while there are tags past the cut.
        for tag in list(store.tags())[1:]:
            store.untag(tag)
        channel.poll(rng.uniform(0.02, 0.1))


def _scale(channel: Connection, store: hw.Store, name: str, rng: random.Random, log: Log) -> None:
    stream = store.stream(STREAM)
    while True:
        opened = sorted(stream.segments(), key=lambda segment: segment.start)
        with suppress(hw.NotFoundError, hw.ConflictError):
            if len(opened) < 2 or (len(opened) < 6 and rng.random() < 0.5):
                stream.split(rng.choice(opened).number, parts=rng.randint(2, 3))
            else:
                first = rng.randrange(len(opened) - 1)
                stream.merge([segment.number for segment in opened[first : first + rng.randint(2, 3)]])
            log.add("scaled")
        channel.poll(rng.uniform(0.02, 0.2))


def _tier(channel: Connection, store: hw.Store, name: str, rng: random.Random, log: Log) -> None:
    while True:
        with suppress(hw.UnavailableError):
            store.run_upkeep()
            log.add("tiered")
        channel.poll(rng.uniform(0.02, 0.2))


def _watch(channel: Connection, store: hw.Store, name: str, rng: random.Random, log: Log) -> None:
    """Follow the stream to its end. What a roll-back took away is taken out of what was seen, as the error's cut says."""
    stream = store.stream(STREAM)
    seen: dict[tuple[int, int], str] = {}
    start: hw.Cut | None = None
    while True:
        try:
            if start is not None:
                left = {item.segment: item.end for item in stream.ranges(None, start)}
                seen = {place: id for place, id in seen.items() if place[1] < left.get(place[0], 0)}
            for event in stream.read(start, follow=True):
                seen[event.position.segment, event.position.number] = event_id(event)
            break
        except hw.RolledBackError as error:
            log.add("told", cut=str(error.cut))
            start = error.cut
    log.add("watched", seen=[[*place, id] for place, id in seen.items()])
    channel.send("watched")


# Faults, to be planted in every process of a history: the checker must find each.


def _use_numbers_again() -> None:
    """The segments that a roll-back opens have numbers of those that it took away."""
    insert = vars(rollbacks)["insert_segments"]

    def faulty(tx: Tx, stream: int, **rest: Any) -> list[int]:
        tx.run("UPDATE stream SET next_segment = (SELECT max(number) + 1 FROM segment WHERE stream = ?) WHERE id = ?", (stream, stream))
        return list(insert(tx, stream, **rest))

    vars(rollbacks)["insert_segments"] = faulty


def _believe_stale_places() -> None:
    """A place that looks wrong is not looked up among those that are undone."""
    vars(undone)["is_suspect"] = lambda rows, numbers: False


def _end_before_the_cut() -> None:
    """The stream ends one event before the cut in each segment."""
    add_views = vars(rollbacks)["add_views"]

    def faulty(tx: Tx, source: int, target: int, views: Any) -> None:
        if target < source:
            views = [view._replace(tail=max(view.tail - 1, 0)) for view in views]
        add_views(tx, source, target, views)

    vars(rollbacks)["add_views"] = faulty


def _tell_no_follower() -> None:
    """A follower that is past the cut is not told, and goes on with what came after."""
    undone.explain.function = lambda tx, stream, numbers: None


def _leave_groups_past_the_cut() -> None:
    """Reader groups stay where they are."""
    vars(rollbacks)["move_groups"] = lambda tx, stream, rows, numbers, parted: None


FAULTS: dict[str, Callable[[], None]] = {
    "a roll-back uses numbers again": _use_numbers_again,
    "stale places are believed": _believe_stale_places,
    "the stream ends before the cut": _end_before_the_cut,
    "a follower is not told": _tell_no_follower,
    "groups stay past the cut": _leave_groups_past_the_cut,
}
