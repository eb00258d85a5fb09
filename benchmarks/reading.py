"""Catching up: everything that is in a stream, as events and as Arrow batches."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import headwater as hw
from benchmarks.bench import Bench
from benchmarks.limits import seconds_to_copy
from benchmarks.results import Goal, Result, at_least, in_turns, median_ratio
from benchmarks.writing import sample_keys, sample_values, write_all

_SIZE = 100


def read_events(bench: Bench) -> Iterator[Result]:
    """`for event in stream.read()`, with a look at each value."""
    yield from _measure(bench, "read-events", _read_values, at_least(1_000_000))


def read_batches(bench: Bench) -> Iterator[Result]:
    """All `ranges()` of a stream with `to_batches()`, one after the other, with the columns that a user gets by default."""
    yield from _measure(bench, "read-batches", _read_ranges, at_least(20_000_000))


def _measure(bench: Bench, name: str, read: Callable[[hw.Stream], int], goal: Goal) -> Iterator[Result]:
    count = bench.sizes.read_events
    for variant, segments, place in bench.places():
        with hw.open(place.url, catalog=place.catalog) as store:
            stream = store.create_stream("bench/read", scaling=hw.Scaling.fixed(segments))
            with stream.writer() as writer:
                write_all(writer, sample_values(_SIZE), sample_keys(), count)
            own, copied = in_turns(bench.sizes.rounds + 2, partial(_seconds, read, stream, count), partial(seconds_to_copy, count * _SIZE))
        yield Result(
            name,
            variant,
            count / statistics.median(own),
            "events of 100 B/s",
            count / statistics.median(copied),
            "memcpy",
            median_ratio(copied, own),
            goal,
        )


def _seconds(read: Callable[[hw.Stream], int], stream: hw.Stream, count: int) -> float:
    begun = time.perf_counter()
    found = read(stream)
    taken = time.perf_counter() - begun
    assert found == count * _SIZE, f"{count * _SIZE} bytes were written and {found} read"
    return taken


def _read_values(stream: hw.Stream) -> int:
    found = 0
    for event in stream.read():
        found += len(event.value)
    return found


def _read_ranges(stream: hw.Stream) -> int:
    return sum(batch.num_rows * _SIZE for part in stream.ranges() for batch in part.to_batches())
