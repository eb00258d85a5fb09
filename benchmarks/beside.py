"""How long one event takes to another process while upkeep tiers gigabytes: in an idle store, after a backlog, and beside its tiering."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import headwater as hw
from benchmarks.bench import MB, Bench, Catalog, Place
from benchmarks.limits import sync_at_rate
from benchmarks.processes import say_ready, started
from benchmarks.results import Result, at_most, percentile
from benchmarks.writing import sample_batch
from headwater.model.limits import UPKEEP_DELAY_SECONDS

_RATE = 1000
#: A value says when it was due. A zero is not measured; this one ends the follower.
_END = (1 << 64) - 1
#: Until upkeep has the lease, and the processes have what they need in memory. The same in every case.
_WARM_UP_SECONDS = UPKEEP_DELAY_SECONDS + 1.0
_DISK_SECONDS = 5.0
_LOOK_SECONDS = 0.1
_EVENT_BYTES = 1000
_SHARES = (0.5, 0.9, 0.99, 0.999)

#: The name of a case, whether it has a backlog, and the upkeep of the writer's process.
_CASES: tuple[tuple[str, bool, Any], ...] = (
    ("idle, no upkeep", False, False),
    ("backlog, no upkeep", True, False),
    ("backlog, upkeep", True, True),
    ("backlog, upkeep in a process", True, "process"),
)


def latency_beside(bench: Bench) -> Iterator[Result]:
    """From the time an event is due in one process to its value in another, 1,000 a second, beside the bare disk at the same rate."""
    for catalog in bench.catalogs:
        found: dict[str, list[float]] = {}
        for name, has_backlog, upkeep in _CASES:
            delays, disk, tiered = _measure(bench, catalog, has_backlog, upkeep)
            found[name] = delays
            for share in _SHARES:
                own, bare = percentile(delays, share) * 1000, percentile(disk, share) * 1000
                variant = f"{catalog.name}, {name}, p{share * 100:g}"
                yield Result("latency-beside", variant, own, "ms", bare, "bare pwrite + fdatasync", own / bare)
            if tiered:
                yield Result("latency-beside", f"{catalog.name}, {name}, tiered meanwhile", tiered, "MB/s")
        before = percentile(found["backlog, no upkeep"], 0.99) * 1000
        for name, _, upkeep in _CASES:
            if upkeep:
                own = percentile(found[name], 0.99) * 1000
                variant = f"{catalog.name}, {name}, p99"
                yield Result("latency-beside", variant, own, "ms", before, "without upkeep", own / before, at_most(1.5, of="ratio"))


def _measure(bench: Bench, catalog: Catalog, has_backlog: bool, upkeep: Any) -> tuple[list[float], list[float], float]:
    """The events' delays and those of the bare disk, in seconds, and the rate of tiering in MB/s."""
    seconds = bench.sizes.beside_seconds
    warm_up = min(seconds, _WARM_UP_SECONDS)
    with bench.place(catalog) as place, hw.open(place.url, catalog=place.catalog, upkeep=False) as store:
        store.create_stream("bench/tail")
        backlog = store.create_stream("bench/backlog")
        with (
            started(_write, place, upkeep, bench.sizes.backlog_mb if has_backlog else 0) as writer,
            started(_follow, place) as follower,
        ):
            disk = sync_at_rate(place.beside(), min(seconds, _DISK_SECONDS))
            writer.send((warm_up, seconds))
            rate = _watch(backlog, warm_up + seconds)
            delays = follower.recv()
    return [delay / 1e9 for delay in delays], disk, rate


def _watch(backlog: hw.Stream, seconds: float) -> float:
    """How fast chunks take the place of blocks, in MB/s: from the first that is seen to the last one in this time."""
    seen: list[tuple[float, int]] = []
    end = time.monotonic() + seconds
    while (now := time.monotonic()) < end:
        events = sum(chunk.count for chunk in backlog.chunks())
        if events and (not seen or events > seen[-1][1]):
            seen.append((now, events))
        time.sleep(_LOOK_SECONDS)
    if len(seen) < 2:
        return 0.0
    return (seen[-1][1] - seen[0][1]) * _EVENT_BYTES / MB / (seen[-1][0] - seen[0][0])


def _write(pipe: Connection, place: Place, upkeep: Any, backlog_mb: int) -> None:
    with hw.open(place.url, catalog=place.catalog, create=False, upkeep=False) as store:
        _fill(store.stream("bench/backlog"), backlog_mb)
    say_ready(pipe)
    warm_up, seconds = pipe.recv()
    with (
        hw.open(place.url, catalog=place.catalog, create=False, upkeep=upkeep) as store,
        store.stream("bench/tail").writer() as writer,
    ):
        _pace(writer, warm_up, is_measured=False)
        _pace(writer, seconds, is_measured=True)
        writer.write(_END.to_bytes(8, "big")).result()


def _fill(stream: hw.Stream, megabytes: int) -> None:
    batch = sample_batch(4000, _EVENT_BYTES)
    with stream.writer() as writer:
        for _ in range(megabytes * MB // (4000 * _EVENT_BYTES)):
            writer.write_batch(batch, key="user")


def _pace(writer: hw.Writer, seconds: float, *, is_measured: bool) -> None:
    """Write each event when it is due. One that is given late counts from when it was due."""
    padding = bytes(92)
    begun = time.monotonic()
    for number in range(int(seconds * _RATE)):
        due = begun + number / _RATE
        time.sleep(max(0.0, due - time.monotonic()))
        writer.write((int(due * 1e9) if is_measured else 0).to_bytes(8, "big") + padding)


def _follow(pipe: Connection, place: Place) -> None:
    with hw.open(place.url, catalog=place.catalog, create=False, upkeep=False) as store:
        events = store.stream("bench/tail").read("tail", follow=True)
        delays = array("q")
        say_ready(pipe)
        for event in events:
            due = int.from_bytes(event.value[:8], "big")
            if due == _END:
                break
            if due:
                delays.append(time.monotonic_ns() - due)
    pipe.send(delays)
