"""What must not grow: memory while much streams through, and the cost of a stream with its length."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import headwater as hw
from benchmarks.bench import Bench, Catalog, Place
from benchmarks.results import Result, at_most, in_turns, percentile
from headwater.catalog.database import Statement, Tx

_SHORT = 100
_SLICE = 100_000
_BLOCK = 5


def memory(bench: Bench) -> Iterator[Result]:
    """The most memory a process has had while it streams events of 1 kB in, half one by one and half as batches, and out again."""
    for catalog in bench.catalogs:
        with bench.place(catalog) as place:
            command = [sys.executable, "-m", "benchmarks.through", place.url, place.catalog or "", str(bench.sizes.memory_mb)]
            root = Path(__file__).parent.parent
            before, after = json.loads(subprocess.run(command, cwd=root, stdout=subprocess.PIPE, check=True).stdout)
        yield Result(
            "memory",
            f"{catalog.name}, {bench.sizes.memory_mb / 1000:g} GB in and out",
            after,
            "MB at most",
            before,
            "the process with its imports",
            after / before,
            at_most(300.0),
        )


def growth(bench: Bench) -> Iterator[Result]:
    """Appending to, tailing and opening a long stream beside one of 100 extents.

    Below the public API: the extents are copies of a stream's first one, put into the catalog directly, since writing a million of them
    would take an hour.
    """
    for catalog in bench.catalogs:
        yield from _growth(bench, catalog)


def _growth(bench: Bench, catalog: Catalog) -> Iterator[Result]:
    with ExitStack() as stack:
        places = [stack.enter_context(bench.place(catalog)) for _ in range(2)]
        for place, extents in zip(places, (bench.sizes.extents, _SHORT), strict=True):
            _prepare(place, extents)
        stores = [stack.enter_context(hw.open(place.url, catalog=place.catalog, upkeep=False)) for place in places]
        appended: list[list[float]] = [[], []]
        tailed: list[list[float]] = [[], []]
        measures = []
        for index, store in enumerate(stores):
            stream = store.stream("bench/long")
            writer = stack.enter_context(stream.writer())
            measures.append(_append_and_tail(writer, stream.read("tail", follow=True), appended[index], tailed[index]))
        in_turns(-(-bench.sizes.acks // _BLOCK), *measures)
        opened = in_turns(max(5, bench.sizes.rounds), *(partial(_seconds_to_open, place) for place in places))
    held = f"{catalog.name}, {bench.sizes.extents:,} extents"
    for name, found in (("append", appended), ("tail", tailed)):
        long, short = (percentile(figures, 0.5) * 1000 for figures in found)
        yield Result("growth", f"{name}, {held}", long, "ms", short, f"{_SHORT} extents", long / short, at_most(1.2, of="ratio"))
    long, short = max(opened[0]) * 1000, statistics.median(opened[1]) * 1000
    yield Result("growth", f"open, {held}", long, "ms", short, f"{_SHORT} extents", long / short, at_most(100.0))


def _append_and_tail(writer: hw.Writer, events: Iterator[hw.Event], appended: list[float], tailed: list[float]) -> Callable[[], float]:
    def block() -> float:
        for _ in range(_BLOCK):
            begun = time.perf_counter()
            writer.write(bytes(100), b"user-1").result()
            appended.append(time.perf_counter() - begun)
            next(events)
            tailed.append(time.perf_counter() - begun - appended[-1])
        return appended[-1]

    return block


def _seconds_to_open(place: Place) -> float:
    begun = time.perf_counter()
    store = hw.open(place.url, catalog=place.catalog, create=False, upkeep=False)
    taken = time.perf_counter() - begun
    store.close()
    return taken


def _prepare(place: Place, extents: int) -> None:
    """Make a stream of so many extents, each of one event, inline."""
    with hw.open(place.url, catalog=place.catalog, upkeep=False) as store:
        with store.create_stream("bench/long").writer() as writer:
            writer.write(bytes(100), b"user-1")
        database = store._engine.database
        log = database.query("SELECT log FROM segment")[0][0]
        for first in range(1, extents, _SLICE):
            end = min(first + _SLICE, extents)
            numbers = "WITH RECURSIVE n (i) AS (SELECT CAST(? AS BIGINT) UNION ALL SELECT i + 1 FROM n WHERE i + 1 < ?)"
            values = (first, end, log)
            copy_extents = (
                "INSERT INTO extent (log, first, count, length, crc, appended_at, object, position) "
                f"{numbers} SELECT e.log, n.i, e.count, e.length, e.crc, e.appended_at, e.object, e.position "
                "FROM n, extent e WHERE e.log = ? AND e.first = 0"
            )
            copy_blocks = (
                f"INSERT INTO inline_block (log, first, data) {numbers} SELECT b.log, n.i, b.data "
                "FROM n, inline_block b WHERE b.log = ? AND b.first = 0"
            )
            move_tail = "UPDATE segment SET tail = ?, bytes = bytes * ? / ? WHERE log = ?"
            statements = [(copy_extents, values), (copy_blocks, values), (move_tail, (end, end, first, log))]
            database.write(partial(_run_all, statements))


def _run_all(statements: Sequence[Statement], tx: Tx) -> None:
    tx.run_all(statements)
