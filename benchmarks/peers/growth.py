"""What must not cost more as a store grows: headwater with many segments, with many open ones, and with many extents, beside itself."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import headwater as hw
from benchmarks import growth as extents
from benchmarks.bench import DEFAULT, Bench, Catalog
from benchmarks.peers.figures import OWN, Figure
from benchmarks.peers.work import Sizes, Supply
from benchmarks.results import in_turns, percentile
from benchmarks.writing import sample_values

_FEW = 10
_MANY_OPEN = 256
_APPENDS = 300
_KEYS = 50_000


def growth(sizes: Sizes, folder: Path) -> Iterator[Figure]:
    folder.mkdir(parents=True)
    yield from _many_segments(sizes, folder)
    yield from _many_open(sizes, folder)
    yield from _many_extents(sizes, folder)


def _many_segments(sizes: Sizes, folder: Path) -> Iterator[Figure]:
    """One event to a stream of one segment and its arrival at a follower, in a store of few segments and in one of ever more."""
    with ExitStack() as stack:
        stores = [stack.enter_context(hw.open(str(folder / name), upkeep=False)) for name in ("large", "small")]
        stores[1].create_stream("bench/other", scaling=hw.Scaling.fixed(_FEW - 1))
        measures, appended, tailed = [], ([], []), ([], [])  # type: ignore[var-annotated]
        for index, store in enumerate(stores):
            stream = store.create_stream("bench/target")
            writer = stack.enter_context(stream.writer())
            measures.append(extents._append_and_tail(writer, stream.read("tail", follow=True), appended[index], tailed[index]))
        each = 0
        for segments in sizes.segments:
            for number in range(sizes.streams):
                name = f"bench/s{number}"
                if not each:
                    stores[0].create_stream(name, scaling=hw.Scaling.fixed(max(1, segments // sizes.streams)))
                    continue
                stream = stores[0].stream(name)
                opened = stream.segments()
                # Those that were there stay too, sealed: what counts is the number of all.
                wanted = (segments - each) // sizes.streams
                stream.split(opened[0].number, parts=max(2, wanted))
            each = segments
            for found in (*appended, *tailed):
                found.clear()
            in_turns(_APPENDS // extents._BLOCK, *measures)
            for what, (large, small) in (("append", appended), ("tail read", tailed)):
                variant = f"{what}, {segments:,} segments in {sizes.streams:,} streams"
                for name, figures in ((OWN, large), ("small store", small)):
                    note = "" if name == OWN else f"{_FEW} segments"
                    yield Figure("growth", variant, name, percentile(figures, 0.5) * 1000, "ms", less_is_better=True, note=note)


def _many_open(sizes: Sizes, folder: Path) -> Iterator[Figure]:
    """Events of 100 B with random keys to one stream of 256 open segments, beside one segment."""
    values = sample_values(100)
    events = [(values[index % len(values)], b"key-%d" % (index * 7919 % _KEYS)) for index in range(_KEYS)]
    with hw.open(str(folder / "open"), upkeep=False) as store, ExitStack() as stack:
        writers = [
            stack.enter_context(store.create_stream(f"bench/o{count}", scaling=hw.Scaling.fixed(count)).writer())
            for count in (_MANY_OPEN, 1)
        ]

        def rate(writer: hw.Writer) -> float:
            begun, supply = time.monotonic(), Supply(events)
            for value, key in supply.until(begun + sizes.write_seconds):
                writer.write(value, key)
            writer.flush()
            return supply.count / (time.monotonic() - begun)

        many, one = in_turns(sizes.rounds + 1, *(partial(rate, writer) for writer in writers))
    variant = f"writing to {_MANY_OPEN} open segments"
    yield Figure("growth", variant, OWN, statistics.median(many), "events/s")
    yield Figure("growth", variant, "1 segment", statistics.median(one), "events/s")


def _many_extents(sizes: Sizes, folder: Path) -> Iterator[Figure]:
    bench = Bench(replace(DEFAULT, extents=sizes.extents), folder, [Catalog("SQLite")])
    for result in extents.growth(bench):
        if result.variant.startswith("open"):
            continue
        assert result.limit is not None
        for name, value in ((OWN, result.value), ("small store", result.limit)):
            note = "" if name == OWN else result.limit_name
            yield Figure("growth", result.variant.replace("SQLite, ", ""), name, value, "ms", less_is_better=True, note=note)
