"""How long one event takes: until it is durable, and until another process has it."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection

import headwater as hw
from benchmarks.bench import Bench, Place
from benchmarks.limits import bare_file, bare_postgres, bare_sqlite, seconds_of_a_hop
from benchmarks.processes import say_ready, started
from benchmarks.results import Result, at_most, in_turns, percentile

_KEYS = [b"user-%d" % index for index in range(100)]
#: Measured this many at a time before the next one's turn.
_BLOCK = 5
#: What tells the follower to end.
_END = b"end"


def acks(bench: Bench) -> Iterator[Result]:
    """One event of 100 B at a time, until its ack: durable and readable. The goal counts a bare sync and a bare commit as its limit."""
    for variant, segments, place in bench.places():
        with (
            hw.open(place.url, catalog=place.catalog) as store,
            _bare_commit(bench, place) as commit,
            bare_file(bench.path()) as sync,
        ):
            stream = store.create_stream("bench/acks", scaling=hw.Scaling.fixed(segments))
            with stream.writer() as writer:

                def ack(writer: hw.Writer = writer) -> float:
                    begun = time.perf_counter()
                    writer.write(bytes(100), random.choice(_KEYS)).result()
                    return time.perf_counter() - begun

                # As much as the catalog's own log takes before it is emptied for the first time; see `bare_sqlite`.
                for _ in range(100):
                    writer.write(bytes(50_000), _KEYS[0]).result()
                own: list[float] = []
                commits: list[float] = []
                syncs: list[float] = []
                in_turns(
                    -(-bench.sizes.acks // _BLOCK),
                    _repeated(ack, own),
                    _repeated(commit, commits),
                    _repeated(sync, syncs),
                )
        is_sqlite = place.catalog is None
        for share in (0.5, 0.99):
            bare = percentile(commits, share) + percentile(syncs, share)
            found = percentile(own, share)
            goal = at_most(1.5, of="ratio") if share == 0.5 and is_sqlite else None
            yield Result(
                "ack", f"{variant}, p{share * 100:.0f}", found * 1000, "ms", bare * 1000, "bare fsync + bare commit", found / bare, goal
            )
        commit_only = statistics.median(commits)
        yield Result(
            "ack",
            f"{variant}, p50",
            percentile(own, 0.5) * 1000,
            "ms",
            commit_only * 1000,
            "bare commit",
            percentile(own, 0.5) / commit_only,
        )


def _bare_commit(bench: Bench, place: Place) -> AbstractContextManager[Callable[[], float]]:
    return bare_sqlite(bench.path()) if place.catalog is None else bare_postgres(place.catalog)


def _repeated(measure: Callable[[], float], into: list[float]) -> Callable[[], float]:
    def block() -> float:
        into.extend(measure() for _ in range(_BLOCK))
        return into[-1]

    return block


def tails(bench: Bench) -> Iterator[Result]:
    """From `write` in one process to the event in the hands of a follower in another, its ack on the way.

    Once with pauses of a few milliseconds between events, and once with pauses so long that the follower has stopped expecting any.
    """
    for variant, segments, place in bench.places():
        with (
            hw.open(place.url, catalog=place.catalog) as store,
            _bare_commit(bench, place) as commit,
        ):
            stream = store.create_stream("bench/tail", scaling=hw.Scaling.fixed(segments))
            with stream.writer() as writer, started(_follow, place) as pipe:
                hop = seconds_of_a_hop(pipe, 50)
                busy = _delays(writer, pipe, bench.sizes.tail_events, (0.004, 0.012), commit)
                idle = _delays(writer, pipe, bench.sizes.idle_tail_events, (0.2, 0.3), commit)
                writer.write(_END).result()
        for share in (0.5, 0.99):
            yield _tail_result(variant, f"p{share * 100:.0f}", busy, share, hop)
        yield _tail_result(variant, "p50 after a pause", idle, 0.5, hop)


def _tail_result(variant: str, which: str, found: tuple[list[float], list[float]], share: float, hop: float) -> Result:
    delays, commits = found
    delay, bare = percentile(delays, share), percentile(commits, share) + hop
    goal = at_most(3.0) if share == 0.5 else None
    return Result("tail", f"{variant}, {which}", delay * 1000, "ms", bare * 1000, "bare commit + a pipe", delay / bare, goal)


def _delays(
    writer: hw.Writer, pipe: Connection, count: int, pause: tuple[float, float], commit: Callable[[], float]
) -> tuple[list[float], list[float]]:
    """The follower's delays and those of bare commits, in seconds. The first event is not counted."""
    delays, commits = [], []
    for index in range(count + 1):
        time.sleep(random.uniform(*pause))
        commits.append(commit())
        time.sleep(random.uniform(*pause))
        # CLOCK_MONOTONIC is one clock for all processes of a host.
        writer.write(b"%d" % time.monotonic_ns(), random.choice(_KEYS)).result()
        delay = pipe.recv() / 1e9
        if index:
            delays.append(delay)
    return delays, commits


def _follow(pipe: Connection, place: Place) -> None:
    with hw.open(place.url, catalog=place.catalog, create=False) as store:
        events = store.stream("bench/tail").read("tail", follow=True)
        say_ready(pipe)
        try:
            for _ in range(50):
                pipe.send(pipe.recv())
            for event in events:
                if event.value == _END:
                    return
                pipe.send(time.monotonic_ns() - int(event.value))
        except (EOFError, BrokenPipeError):
            return
