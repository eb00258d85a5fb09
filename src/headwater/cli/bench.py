"""`headwater bench`: what this store does on this machine, beside what its disk could do."""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import NamedTuple

import click
import pyarrow as pa

import headwater as hw
from headwater.cli.app import Target, with_store
from headwater.cli.arguments import Number
from headwater.cli.interrupts import interrupts
from headwater.cli.output import console, emit, table
from headwater.model.limits import FLUSH_BYTES, MIB

_EVENT_BYTES = 100
_ROW_BYTES = 1000


class Figure(NamedTuple):
    """One line of the answer; `beside` says what the limit is that stands beside it, if there is one."""

    what: str
    value: float
    unit: str
    limit: float | None = None
    beside: str = ""


@click.command("bench")
@click.option("--seconds", type=Number(0.1, 600), default=2.0, show_default=True, help="For each figure.")
@with_store
def bench_command(target: Target, seconds: float) -> None:
    """Measure a store: acks, writing, reading, the tail and transactions. It writes to a stream of its own, and deletes that at the end."""
    interrupts.wait_for_place()
    with target.open(create=True, upkeep=False) as store:
        name = f"bench/run-{uuid.uuid4().hex[:12]}"
        stream = store.create_stream(name)
        figures = []
        try:
            for figure in _figures(store, stream, seconds):
                figures.append(figure)
                if target.json:
                    emit({key: value for key, value in figure._asdict().items() if value not in (None, "")})
                else:
                    console(stderr=True).print(f"{figure.what}: {_shown(figure.value)} {figure.unit}")
        finally:
            stream.seal()
            store.delete_stream(name)
            store.run_upkeep()
    if not target.json:
        answer = table("what", "figure", "", "limit", "of", right=("figure", "limit"))
        for figure in figures:
            limit = "" if figure.limit is None else _shown(figure.limit)
            answer.add_row(figure.what, _shown(figure.value), figure.unit, limit, figure.beside)
        console().print(answer)


def _figures(store: hw.Store, stream: hw.Stream, seconds: float) -> Iterator[Figure]:
    folder = store.url if os.path.isdir(store.url) else None
    sync_ms = _sync_ms(folder, seconds / 4) if folder else None
    with stream.writer() as writer:
        acks = _times_ms(lambda: writer.write(bytes(_EVENT_BYTES), b"key").result(), seconds)
        yield Figure("ack of one event, median", statistics.median(acks), "ms", sync_ms, "one write and sync of the disk")
        yield Figure("ack of one event, 99 %", sorted(acks)[int(len(acks) * 0.99)], "ms")
        yield Figure("writing events of 100 B", _events_per_second(writer, seconds), "events/s")
        disk = _disk_mb(folder, seconds / 4) if folder else None
        beside = f"writing and syncing {FLUSH_BYTES // MIB} MiB at a time"
        yield Figure("writing batches of 1 kB rows", _batches_mb(writer, seconds), "MB/s", disk, beside)
        yield Figure("tail, median", statistics.median(_tail_ms(stream, writer, seconds)), "ms from write to read")
    yield Figure("reading events", _read_events(stream, seconds), "events/s")
    yield Figure("reading as Arrow", _read_batches(stream), "events/s")
    commits = _times_ms(lambda: _commit(store, stream.name), seconds)
    yield Figure("transactions of one event", 1000 / statistics.median(commits), "commits/s")


def _may_end() -> None:
    """Where Ctrl-C does no harm; what was measured is deleted then too."""
    with interrupts.place():
        pass


def _times_ms(call: Callable[[], object], seconds: float) -> list[float]:
    found: list[float] = []
    deadline = time.perf_counter() + seconds
    while (begun := time.perf_counter()) < deadline or not found:
        _may_end()
        call()
        found.append((time.perf_counter() - begun) * 1000)
    return found


def _events_per_second(writer: hw.Writer, seconds: float) -> float:
    value, keys = bytes(_EVENT_BYTES), [b"%d" % number for number in range(1000)]
    begun = time.perf_counter()
    count = 0
    while time.perf_counter() < begun + seconds:
        _may_end()
        for key in keys:
            writer.write(value, key)
        count += len(keys)
    writer.flush()
    return count / (time.perf_counter() - begun)


def _batches_mb(writer: hw.Writer, seconds: float) -> float:
    batch = pa.record_batch({"value": pa.array([os.urandom(_ROW_BYTES) for _ in range(4000)], pa.binary())})
    begun = time.perf_counter()
    count = 0
    while time.perf_counter() < begun + seconds:
        _may_end()
        writer.write_batch(batch)
        count += batch.num_rows
    writer.flush()
    return count * _ROW_BYTES / 1e6 / (time.perf_counter() - begun)


def _tail_ms(stream: hw.Stream, writer: hw.Writer, seconds: float) -> list[float]:
    arrived = threading.Semaphore(0)
    stop = threading.Event()

    def follow() -> None:
        for _ in stream.read("tail", follow=True):
            arrived.release()
            if stop.is_set():
                return

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    # Until the follower stands at the tail, what is written may not reach it.
    while not arrived.acquire(timeout=0.05):
        writer.write(b"ready").result()
    while arrived.acquire(timeout=0.2):
        pass

    def one() -> None:
        writer.write(bytes(_EVENT_BYTES), b"key")
        arrived.acquire()

    found = _times_ms(one, seconds)
    stop.set()
    writer.write(b"end").result()
    thread.join()
    return found


def _read_events(stream: hw.Stream, seconds: float) -> float:
    begun = time.perf_counter()
    count = 0
    for event in stream.read():
        count += len(event.value) > 0
        if not count % 1000:
            _may_end()
            if time.perf_counter() > begun + seconds:
                break
    return count / (time.perf_counter() - begun)


def _read_batches(stream: hw.Stream) -> float:
    begun = time.perf_counter()
    count: int = sum(batch.num_rows for part in stream.ranges() for batch in part.to_batches())
    return count / (time.perf_counter() - begun)


def _commit(store: hw.Store, stream: str) -> None:
    with store.transaction() as tx:
        tx.write(stream, bytes(_EVENT_BYTES), key="key")


def _sync_ms(folder: str, seconds: float) -> float:
    with tempfile.TemporaryFile(dir=folder) as file:

        def write() -> None:
            os.write(file.fileno(), bytes(4096))
            os.fsync(file.fileno())

        return statistics.median(_times_ms(write, seconds))


def _disk_mb(folder: str, seconds: float) -> float:
    data = os.urandom(FLUSH_BYTES)
    with tempfile.TemporaryFile(dir=folder) as file:

        def write() -> None:
            os.write(file.fileno(), data)
            os.fsync(file.fileno())

        return len(data) / 1e6 / (statistics.median(_times_ms(write, seconds)) / 1000)


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"
