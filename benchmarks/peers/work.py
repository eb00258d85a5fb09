"""The jobs that every system does: written once, for whatever adapter they are given.

A round lasts a set time and not a number of events, so that a slow peer is measured as long as a fast one, and no longer.
"""

from __future__ import annotations

import statistics
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.limits import seconds_to_write, sync_at_rate
from benchmarks.peers.figures import OWN, Figure
from benchmarks.peers.peer import Client, Event, Peer, Producer, Running, Tick
from benchmarks.peers.servers import cpu_seconds, resident_mb
from benchmarks.processes import say_ready, started
from benchmarks.results import percentile
from benchmarks.writing import sample_keys, sample_values

MB = 1_000_000
_TICK_SECONDS = 0.001
_END = b"end"
_ANSWER_SECONDS = 90.0
#: Before latencies are measured in an idle peer, and how long those of the bare disk are.
_SETTLE_SECONDS = 10.0
_DISK_SECONDS = 5.0
#: 4 MB each: what is written in bulk in one go.
_MOST_BULK = 64


@dataclass(frozen=True)
class Sizes:
    """How much of each job is done."""

    rounds: int
    warm_up_seconds: float
    write_seconds: float
    bulk_seconds: float
    latency_seconds: float
    #: The backlog that the process writes just before it writes at a rate: up to this size, in at most this time.
    backlog_mb: int
    backlog_seconds: float
    rates: tuple[int, ...]
    producers: tuple[int, ...]
    #: Threads that each wait for the ack of their own event.
    ack_threads: tuple[int, ...]
    commit_seconds: float
    scan_mb: int
    stream_events: int
    segments: tuple[int, ...]
    streams: int
    extents: int
    install: bool


DEFAULT = Sizes(
    rounds=2, warm_up_seconds=4.0, write_seconds=1.2, bulk_seconds=1.0,
    latency_seconds=15.0, backlog_mb=1_800, backlog_seconds=15.0, rates=(1_000, 10_000, 100_000), producers=(1, 4), ack_threads=(1, 16, 64),
    commit_seconds=1.0,
    scan_mb=5_000, stream_events=4_000_000, segments=(1_000, 10_000, 100_000), streams=1_000, extents=1_000_000, install=True,
)  # fmt: skip
QUICK = Sizes(
    rounds=1, warm_up_seconds=1.0, write_seconds=0.5, bulk_seconds=0.3,
    latency_seconds=1.0, backlog_mb=100, backlog_seconds=2.0, rates=(1_000, 10_000), producers=(1,), ack_threads=(1, 16),
    commit_seconds=0.3,
    scan_mb=100, stream_events=200_000, segments=(100, 1_000), streams=50, extents=10_000, install=False,
)  # fmt: skip
TINY = Sizes(
    rounds=1, warm_up_seconds=0.02, write_seconds=0.02, bulk_seconds=0.02,
    latency_seconds=0.1, backlog_mb=4, backlog_seconds=0.1, rates=(1_000,), producers=(1,), ack_threads=(1, 2),
    commit_seconds=0.02,
    scan_mb=1, stream_events=1_000, segments=(10, 20), streams=5, extents=200, install=False,
)  # fmt: skip


def sample_events(size: int) -> list[Event]:
    return list(zip(sample_values(size), sample_keys(), strict=True))


class Supply:
    """Events until a time: pieces of the same list, so that taking the next one costs nothing that counts."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._events = events
        self.count = 0

    def until(self, deadline: float) -> Iterator[Event]:
        return chain.from_iterable(self._pieces(deadline))

    def _pieces(self, deadline: float) -> Iterator[Sequence[Event]]:
        # In pieces of a hundred: a slow peer must see the deadline too.
        pieces = [self._events[start : start + 128] for start in range(0, len(self._events), 128)]
        while True:
            for piece in pieces:
                if time.monotonic() >= deadline:
                    return
                self.count += len(piece)
                yield piece


@dataclass
class Trial:
    """One peer, running, and what it is to be measured by."""

    peer: Peer
    running: Running
    sizes: Sizes
    folder: Path
    #: Events of 100 B in the topic that one producer filled, for those who read.
    written: int = 0

    @property
    def client(self) -> Client:
        return self.running.client

    def figure(self, job: str, variant: str, value: float, unit: str, *, less: bool = False, note: str = "") -> Figure:
        return Figure(job, variant, self.peer.name, value, unit, less, note)


Job = Callable[[Trial], Iterator[Figure]]


def write_events(trial: Trial) -> Iterator[Figure]:
    """Event by event, by one and by four processes at once; and what one million of them cost in processor time and memory."""
    for size, label in ((100, "100 B"), (1000, "1 kB")):
        for producers in trial.sizes.producers:
            topic = f"events-{size}-{producers}"
            trial.client.create(topic, producers)
            with ExitStack() as stack:
                pipes = [stack.enter_context(started(_produce, trial.client, topic, size)) for _ in range(producers)]
                rates, costs = [], []
                for _ in range(trial.sizes.rounds):
                    before = cpu_seconds(trial.running.pids)
                    counts, seconds, cpu = _all_at_once(pipes, trial.sizes.write_seconds)
                    rates.append(sum(counts) / seconds)
                    costs.append((sum(cpu) + cpu_seconds(trial.running.pids) - before) / sum(counts) * 1e6)
                    trial.written += sum(counts) if (size, producers) == (100, 1) else 0
                memory = sum(_ask(pipe, "memory") for pipe in pipes) + resident_mb(trial.running.pids)
                trial.written += _WARM_UP if (size, producers) == (100, 1) else 0
            by = "1 producer" if producers == 1 else f"{producers} producers"
            yield trial.figure("write-events", f"{label}, {by}", statistics.median(rates), "events/s")
            if (size, producers) == (100, 1):
                yield trial.figure("cost", "writing, CPU", statistics.median(costs), "s per million events", less=True)
                yield trial.figure("cost", "writing, memory", memory, "MB, client and server", less=True)


_WARM_UP = 4096


def _produce(pipe: Connection, client: Client, topic: str, size: int) -> None:
    events = sample_events(size)
    producer = client.producer(topic)
    producer.write(events[:_WARM_UP])
    say_ready(pipe)
    for asked in _questions(pipe):
        if asked == "memory":
            pipe.send(_peak_mb())
            continue
        begun, cpu, supply = time.monotonic(), time.process_time(), Supply(events)
        producer.write(supply.until(begun + asked))
        pipe.send((supply.count, time.process_time() - cpu))
    producer.close()


def _questions(pipe: Connection) -> Iterator[Any]:
    while True:
        try:
            yield pipe.recv()
        except EOFError:
            return


def _ask(pipe: Connection, what: Any) -> Any:
    pipe.send(what)
    return _answer(pipe)


def _answer(pipe: Connection) -> Any:
    """What a process says; one that hangs, as some peers' clients do, is given up."""
    if not pipe.poll(_ANSWER_SECONDS):
        raise RuntimeError(f"no answer within {_ANSWER_SECONDS:.0f} s")
    try:
        return pipe.recv()
    except EOFError:
        raise RuntimeError("the process that did the work failed") from None


def _all_at_once(pipes: Sequence[Connection], seconds: float) -> tuple[list[int], float, list[float]]:
    begun = time.monotonic()
    for pipe in pipes:
        pipe.send(seconds)
    answers = [_answer(pipe) for pipe in pipes]
    return [count for count, _ in answers], time.monotonic() - begun, [cpu for _, cpu in answers]


def _peak_mb() -> float:
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024 / MB


def write_bulk(trial: Trial) -> Iterator[Figure]:
    """Values of 1 kB in the peer's fastest way, beside the disk's own write and fdatasync."""
    trial.client.create("bulk")
    with started(_produce_bulk, trial.client, "bulk", trial.sizes.bulk_seconds) as pipe:
        rates: list[float] = []
        disk: list[float] = []
        for _ in range(trial.sizes.rounds + 1):
            written, seconds = _ask(pipe, "go")
            rates.append(written / MB / seconds)
            if trial.peer.name == OWN:
                paths = {kind: trial.folder / f"bare-{len(disk)}-{kind}" for kind in (True, False)}
                bare = [seconds_to_write(path, written, preallocated=kind) for kind, path in paths.items()]
                disk.append(written / MB / min(bare))
    yield trial.figure("write-bulk", "1 kB", statistics.median(rates), "MB/s")
    if disk:
        yield Figure("write-bulk", "1 kB", "disk", statistics.median(disk), "MB/s", note="write + fdatasync")


def _produce_bulk(pipe: Connection, client: Client, topic: str, seconds: float) -> None:
    events = sample_events(1000)[:4000]
    producer = client.producer(topic)
    prepared = producer.prepare(events)
    size = sum(len(value) for value, _ in events)
    producer.write_prepared(prepared, 1)
    begun = time.monotonic()
    producer.write_prepared(prepared, 4)
    times = max(4, min(_MOST_BULK, int(seconds / (time.monotonic() - begun) * 4)))
    say_ready(pipe)
    for _ in _questions(pipe):
        begun = time.monotonic()
        producer.write_prepared(prepared, times)
        pipe.send((times * size, time.monotonic() - begun))
    producer.close()


def read_events(trial: Trial) -> Iterator[Figure]:
    """What one producer wrote, from its beginning, by one consumer that has just been started."""
    count = trial.written or _fill(trial, "events-100-1")
    for job, variant in (("read-events", "100 B, one by one"), ("read-batches", "100 B, in batches")):
        with started(_consume, trial.client, job, "events-100-1", count) as pipe:
            rates, costs = [], []
            for _ in range(trial.sizes.rounds + 1):
                before = cpu_seconds(trial.running.pids)
                seconds, cpu = _ask(pipe, "go")
                rates.append(count / seconds)
                costs.append((cpu + cpu_seconds(trial.running.pids) - before) / count * 1e6)
        yield trial.figure(job, variant, statistics.median(rates), "events/s")
        if job == "read-events":
            yield trial.figure("cost", "reading, CPU", statistics.median(costs), "s per million events", less=True)


def _fill(trial: Trial, topic: str) -> int:
    trial.client.create(topic)
    producer, supply = trial.client.producer(topic), Supply(sample_events(100))
    producer.write(supply.until(time.monotonic() + trial.sizes.rounds * trial.sizes.write_seconds))
    producer.close()
    return supply.count


def _consume(pipe: Connection, client: Client, job: str, topic: str, count: int) -> None:
    say_ready(pipe)
    for _ in _questions(pipe):
        begun, cpu = time.monotonic(), time.process_time()
        if job == "read-events":
            found = client.read(topic, count)
            assert found == count * 100, f"{count} events were written and {found / 100} read"
        else:
            found = client.read_batches(topic, count)
            assert found == count, f"{count} events were written and {found} read"
        pipe.send((time.monotonic() - begun, time.process_time() - cpu))


def idle_latency(trial: Trial) -> Iterator[Figure]:
    """From the moment an event was due in one process to its value in the hands of another, at rates that are not negotiated.

    Before anything large was written; the first seconds, in which what the warm-up left is put away, are not measured.
    """
    yield from _latency(trial, "idle-latency", 0, _SETTLE_SECONDS)


def latency(trial: Trial) -> Iterator[Figure]:
    """The same, beginning just after the process that writes has written a backlog: whatever a peer does with that goes on meanwhile."""
    yield from _latency(trial, "latency", trial.sizes.backlog_mb, 2.0)


def _latency(trial: Trial, name: str, backlog_mb: int, warm_up: float) -> Iterator[Figure]:
    seconds = trial.sizes.latency_seconds
    for rate in trial.sizes.rates:
        topic = f"{name}-{rate}"
        trial.client.create(topic)
        backlog = f"{topic}-before" if backlog_mb else None
        if backlog is not None:
            trial.client.create(backlog)
        disk = sync_at_rate(trial.folder / "bare", min(seconds, _DISK_SECONDS)) if trial.peer.name == OWN else []
        with (
            started(_follow, trial.client, topic) as reader,
            started(_pace, trial.client, topic, rate, trial.sizes, min(warm_up, seconds), backlog) as writer,
        ):
            sent, took = _ask(writer, "go")
            delays = _answer(reader)
        late = f"only {sent / took / 1000:.3g} k/s" if sent / took < 0.9 * rate else ""
        naps = _nap(min(seconds, _DISK_SECONDS)) if trial.peer.name == OWN else []
        for share in (0.5, 0.99, 0.999):
            variant = f"{rate // 1000} k/s{'' if backlog_mb else ' idle'}, p{share * 100:g}"
            yield trial.figure("latency", variant, percentile(delays, share) / 1e6, "ms", less=True, note=late)
            if naps:
                yield Figure("latency", variant, "a sleep", percentile(naps, share) * 1000, "ms", less_is_better=True, note="of 1 ms")
                yield Figure("latency", variant, "disk", percentile(disk, share) * 1000, "ms", True, "pwrite + fdatasync, 1 k/s")


def _nap(seconds: float) -> list[float]:
    """How long sleeps of 1 ms take while nothing else runs: what the machine itself does to a process that waits for something."""
    found = []
    end = time.monotonic() + seconds
    while (begun := time.monotonic()) < end:
        time.sleep(0.001)
        found.append(time.monotonic() - begun)
    return found


def make_ticks(rate: int, seconds: float, begin: float, sent: list[int]) -> Iterator[Tick]:
    """Events that carry the time at which they are due, so that a late writer is seen as late. `sent` counts those handed out."""
    each = max(1, round(rate * _TICK_SECONDS))
    padding, keys = bytes(92), sample_keys()
    for tick in range(int(rate * seconds / each)):
        at = begin + tick * each / rate
        stamp = int(at * 1e9).to_bytes(8, "big") + padding
        sent.append(each)
        yield at, [(stamp, keys[(tick + index) % len(keys)]) for index in range(each)]


def _pace(pipe: Connection, client: Client, topic: str, rate: int, sizes: Sizes, warm_up: float, backlog: str | None) -> None:
    if backlog is not None:
        _write_backlog(client.producer(backlog), sizes)
    producer = client.producer(topic, low_latency=True)
    # The same rate for some seconds warms up both sides; its events carry no time.
    begin = time.monotonic() + 0.1
    producer.pace((at, [(bytes(100), key) for _, key in events]) for at, events in make_ticks(rate, warm_up, begin, []))
    say_ready(pipe)
    pipe.recv()
    sent: list[int] = []
    begin = time.monotonic() + 0.1
    producer.pace(make_ticks(rate, sizes.latency_seconds, begin, sent))
    took = time.monotonic() - begin
    producer.pace([(time.monotonic(), [(_END, b"user-0")])])
    pipe.send((sum(sent), took))
    producer.close()


def _write_backlog(producer: Producer, sizes: Sizes) -> None:
    """In the peer's fastest way, until it is as large as wanted or the time is over: some peers take minutes for as much."""
    events = sample_events(1000)[:1000]
    prepared = producer.prepare(events)
    deadline = time.monotonic() + sizes.backlog_seconds
    for _ in range(sizes.backlog_mb * MB // sum(len(value) for value, _ in events)):
        producer.write_prepared(prepared, 1)
        if time.monotonic() > deadline:
            break
    producer.close()


def _follow(pipe: Connection, client: Client, topic: str) -> None:
    delays = array("q")

    def take(value: bytes) -> bool:
        if value == _END:
            return False
        stamp = int.from_bytes(value[:8], "big")
        if stamp:
            delays.append(time.monotonic_ns() - stamp)
        return True

    say_ready(pipe)
    client.follow(topic, take)
    pipe.send(delays)


def transactions(trial: Trial) -> Iterator[Figure]:
    """Commits a second, of one event and of a thousand, one after the other."""
    for count, label in ((1, "1 event"), (1000, "1,000 events")):
        topic = f"transactions-{count}"
        trial.client.create(topic)
        with started(_commit, trial.client, topic, count, trial.sizes.commit_seconds) as pipe:
            rates = [_ask(pipe, "go") for _ in range(trial.sizes.rounds + 1)]
        yield trial.figure("transactions", label, statistics.median(rates), "commits/s")


def _commit(pipe: Connection, client: Client, topic: str, count: int, seconds: float) -> None:
    events = sample_events(100)[:count]
    with client.committer(topic) as commit:
        commit(events)
        say_ready(pipe)
        for _ in _questions(pipe):
            begun, done = time.monotonic(), 0
            while time.monotonic() < begun + seconds:
                commit(events)
                done += 1
            pipe.send(done / (time.monotonic() - begun))


def warm_up(trial: Trial) -> None:
    """Give a server that compiles as it goes the time to do so: events in and out, as the jobs will have them."""
    trial.client.create("warm-up")
    producer, supply = trial.client.producer("warm-up"), Supply(sample_events(100))
    producer.write(supply.until(time.monotonic() + trial.sizes.warm_up_seconds))
    producer.close()
    trial.client.read("warm-up", supply.count)


def first_event(trial: Trial, seconds_to_start: float) -> Figure:
    """From an installed peer that is not running to the first event read."""
    begun = time.monotonic()
    trial.client.create("first")
    producer = trial.client.producer("first")
    producer.write([(bytes(100), b"user-0")])
    assert trial.client.read("first", 1) == 100
    producer.close()
    taken = seconds_to_start + time.monotonic() - begun
    return trial.figure("start-up", "installed to first event read", taken, "s", less=True)


JOBS: dict[str, Job] = {
    "idle-latency": idle_latency,
    "write": write_events,
    "bulk": write_bulk,
    "read": read_events,
    "latency": latency,
    "transactions": transactions,
}
