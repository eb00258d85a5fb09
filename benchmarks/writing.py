"""Writing: event by event, as Arrow batches, from several processes, and to an object store that is far away."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection

import numpy as np
import pyarrow as pa

import headwater as hw
from benchmarks.bench import MB, Bench, Place
from benchmarks.limits import seconds_to_write, take_memory
from benchmarks.processes import say_ready, started
from benchmarks.results import Result, at_least, in_turns, median_ratio
from headwater.storage.interface import Buffer
from headwater.storage.memory import MemoryStorage

_DISTINCT = 4096
_KEYS = 1000
_WRITERS = 4


def sample_values(size: int) -> list[bytes]:
    data = np.random.default_rng(size).bytes(_DISTINCT * size)
    return [data[start : start + size] for start in range(0, len(data), size)]


def sample_keys() -> list[bytes]:
    return [b"user-%d" % (index % _KEYS) for index in range(_DISTINCT)]


def sample_batch(rows: int, size: int) -> pa.RecordBatch:
    data = np.random.default_rng(rows).bytes(rows * size)
    values = pa.array([data[start : start + size] for start in range(0, len(data), size)], pa.binary())
    return pa.RecordBatch.from_arrays([values, pa.array([f"user-{index % _KEYS}" for index in range(rows)])], ["value", "user"])


def write_all(writer: hw.Writer, values: Sequence[bytes], keys: Sequence[bytes], count: int) -> None:
    """Write `count` events one by one, and flush."""
    write = writer.write
    for _ in range(count // len(values)):
        for value, key in zip(values, keys, strict=True):
            write(value, key)
    for value, key in zip(values[: count % len(values)], keys, strict=False):
        write(value, key)
    writer.flush()


def write_events(bench: Bench) -> Iterator[Result]:
    """Keyed events given one by one, durable at the end, in events a second."""
    for size, unit, goal in ((100, "events of 100 B/s", at_least(800_000)), (1000, "events of 1 kB/s", None)):
        count = bench.sizes.write_events if size == 100 else bench.sizes.write_events // 4
        values, keys = sample_values(size), sample_keys()
        for variant, segments, place in bench.places():
            with hw.open(place.url, catalog=place.catalog) as store:
                stream = store.create_stream("bench/events", scaling=hw.Scaling.fixed(segments))
                with stream.writer() as writer:
                    write_all(writer, values, keys, _DISTINCT)
                    own, disk = in_turns(
                        bench.sizes.rounds,
                        partial(_seconds_to_write_events, writer, values, keys, count),
                        partial(_seconds_for_disk, place, count * size, preallocated=False),
                    )
            yield Result(
                "write-events",
                variant,
                count / statistics.median(own),
                unit,
                count / statistics.median(disk),
                "write+fdatasync",
                median_ratio(disk, own),
                goal,
            )


def _seconds_for_disk(place: Place, size: int, *, preallocated: bool) -> float:
    return seconds_to_write(place.beside(), size, preallocated=preallocated)


def _seconds_to_write_events(writer: hw.Writer, values: Sequence[bytes], keys: Sequence[bytes], count: int) -> float:
    begun = time.perf_counter()
    write_all(writer, values, keys, count)
    return time.perf_counter() - begun


def write_batches(bench: Bench) -> Iterator[Result]:
    """Keyed Arrow batches of 4 MB with values of 1 kB, durable at the end, in MB of values a second.

    Two limits are measured: a file that is preallocated, as headwater's journal is, and one that grows. The faster counts.
    """
    rows, size = 4000, 1000
    batch = sample_batch(rows, size)
    count = max(1, bench.sizes.batch_mb * MB // (rows * size))
    written = count * rows * size
    rounds = bench.sizes.batch_rounds
    for variant, segments, place in bench.places():
        # Else whoever gets new memory in a round is several times as slow, on some virtual machines.
        take_memory(place.beside(), 3 * rounds * written)
        with hw.open(place.url, catalog=place.catalog) as store:
            stream = store.create_stream("bench/batches", scaling=hw.Scaling.fixed(segments))
            with stream.writer() as writer:
                writer.write_batch(batch, key="user").result()
                own, preallocated, grown = in_turns(
                    rounds,
                    partial(_seconds_to_write_batches, writer, batch, count),
                    partial(_seconds_for_disk, place, written, preallocated=True),
                    partial(_seconds_for_disk, place, written, preallocated=False),
                )
        is_preallocated = statistics.median(preallocated) <= statistics.median(grown)
        limits = preallocated if is_preallocated else grown
        yield Result(
            "write-batches",
            variant,
            written / MB / statistics.median(own),
            "MB/s of 1 kB",
            written / MB / statistics.median(limits),
            f"write+fdatasync ({'preallocated' if is_preallocated else 'growing'} file)",
            median_ratio(limits, own),
            at_least(0.8, of="ratio"),
        )


def _seconds_to_write_batches(writer: hw.Writer, batch: pa.RecordBatch, count: int) -> float:
    begun = time.perf_counter()
    for _ in range(count):
        writer.write_batch(batch, key="user")
    writer.flush()
    return time.perf_counter() - begun


def four_processes(bench: Bench) -> Iterator[Result]:
    """Four processes that write events of 100 B to one stream at once, beside one of them alone."""
    for variant, segments, place in bench.places():
        with ExitStack() as stack:
            with hw.open(place.url, catalog=place.catalog) as store:
                store.create_stream("bench/shared", scaling=hw.Scaling.fixed(segments))
            pipes = [stack.enter_context(started(_write_on_demand, place, bench.sizes.process_events)) for _ in range(_WRITERS)]
            one, four = in_turns(bench.sizes.rounds, partial(_rate, pipes[:1], bench), partial(_rate, pipes, bench))
        yield Result(
            "processes",
            variant,
            statistics.median(four),
            "events of 100 B/s by 4",
            statistics.median(one),
            "one process alone",
            median_ratio(four, one),
            at_least(1.0, of="ratio"),
        )


def _write_on_demand(pipe: Connection, place: Place, count: int) -> None:
    values, keys = sample_values(100), sample_keys()
    with hw.open(place.url, catalog=place.catalog, create=False) as store, store.stream("bench/shared").writer() as writer:
        write_all(writer, values, keys, 1000)
        say_ready(pipe)
        try:
            while pipe.recv():
                write_all(writer, values, keys, count)
                pipe.send("done")
        except EOFError:
            return


def _rate(pipes: Sequence[Connection], bench: Bench) -> float:
    begun = time.perf_counter()
    for pipe in pipes:
        pipe.send("go")
    for pipe in pipes:
        pipe.recv()
    return len(pipes) * bench.sizes.process_events / (time.perf_counter() - begun)


class _FarStorage(MemoryStorage):
    """As far away as an object store: each PUT takes its time, and several may be under way.

    It keeps nothing: a copy made under the interpreter's lock, which a network does not need, would be most of what is measured.
    """

    local = False

    def __init__(self, seconds: float) -> None:
        super().__init__("far")
        self._seconds = seconds

    def put(self, key: str, buffers: Sequence[Buffer]) -> None:
        time.sleep(self._seconds)


def object_store(bench: Bench) -> Iterator[Result]:
    """Batches to a store whose PUTs take 50 ms more, beside the same batches with a flush after each: one PUT at a time.

    A batch is so large that each is a PUT of its own, so only what overlaps counts. Below the public API: the store's storage is
    replaced by one that waits.
    """
    size = bench.sizes.put_mb * MB
    batch = sample_batch(size // 10_000, 10_000)

    def rate(flush_each: bool) -> float:
        with hw.open(f"memory://{bench.path()}") as store:
            stream = store.create_stream("bench/far")
            store._engine.storage = _FarStorage(bench.sizes.put_seconds)
            with stream.writer() as writer:
                begun = time.perf_counter()
                for _ in range(bench.sizes.puts):
                    writer.write_batch(batch, key="user")
                    if flush_each:
                        writer.flush()
                writer.flush()
                return bench.sizes.puts * bench.sizes.put_mb / (time.perf_counter() - begun)

    side_by_side, one_by_one = in_turns(min(bench.sizes.rounds, 3), lambda: rate(False), lambda: rate(True))
    yield Result(
        "object-store",
        f"PUT + {bench.sizes.put_seconds * 1000:g} ms",
        statistics.median(side_by_side),
        "MB/s",
        statistics.median(one_by_one),
        "one PUT at a time",
        median_ratio(side_by_side, one_by_one),
        at_least(3.0, of="ratio"),
    )
