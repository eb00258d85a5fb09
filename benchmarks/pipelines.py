"""Pipelines: a savepoint, a restore and a rescale of large state, and a supervised query beside a plain one."""

from __future__ import annotations

import json
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

import headwater as hw
import headwater.spark
from benchmarks.bench import Bench
from benchmarks.results import Result, at_most, in_turns, median_ratio
from headwater.pipelines import Pipeline
from headwater.pipelines.sessions import SETTINGS

_NAME, _KEYS, _COPY = "bench/numbers", "bench/keys", "bench/copy"
_BATCHES = 10


@contextmanager
def _session() -> Iterator[SparkSession]:
    """A session of two cores with state in RocksDB; one that is there already is used, with these settings for now."""
    running = SparkSession.getActiveSession()
    spark = running or headwater.spark.session("benchmarks", master="local[2]", spark__driver__memory="2g")
    spark.sparkContext.setLogLevel("ERROR")
    before = {name: spark.conf.get(name, None) for name in SETTINGS}
    for name, wanted in SETTINGS.items():
        spark.conf.set(name, wanted)
    try:
        yield spark
    finally:
        for name, value in before.items():
            spark.conf.unset(name) if value is None else spark.conf.set(name, value)
        if running is None:
            spark.stop()


@contextmanager
def _store(bench: Bench) -> Iterator[tuple[hw.Store, Path]]:
    folder = bench.path()
    try:
        with hw.open(folder / "store", upkeep=False) as store:
            store.create_stream(_NAME, schema=pa.schema([("number", pa.int64())]), scaling=hw.Scaling.fixed(2))
            yield store, folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write(store: hw.Store, first: int, until: int) -> None:
    with store.stream(_NAME).writer() as writer:
        for start in range(first, until, 50_000):
            writer.write_batch(pa.table({"number": range(start, min(until, start + 50_000))}))


def _seconds(run: Callable[[], object]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def state(bench: Bench) -> Iterator[Result]:
    """A query that remembers every number it has seen, and what is done to its state."""
    keys = min(1_000_000, bench.sizes.read_events // 4)
    with _session() as spark, _store(bench) as (store, _):
        pipeline = Pipeline("bench", store, spark=spark)

        @pipeline.stream(_KEYS, partitions=2)
        def distinct(read: Any) -> Any:
            return read.stream(_NAME).dropDuplicates(["number"]).select("number")

        _write(store, 0, keys)
        pipeline.run(until="caught_up")
        with pipeline.start() as run:
            batches = _batches(store, run, keys)
            taken = _seconds(lambda: pipeline.savepoint("one"))
            yield Result("pipeline-savepoint", f"{keys:,} keys, while it runs", taken, "s", batches(), "trigger", None, at_most(60))
        restored = _seconds(lambda: pipeline.restore("one"))
        yield Result("pipeline-restore", f"{keys:,} keys", restored, "s", goal=at_most(60))
        rescaled = _seconds(lambda: pipeline.rescale(4))
        yield Result("pipeline-rescale", f"{keys:,} keys, 2 to 4 partitions", rescaled, "s", goal=at_most(60))


def _batches(store: hw.Store, run: Any, first: int) -> Callable[[], float]:
    """Feed the query a little; what is returned measures how long the next events take to come out, in seconds."""

    def one() -> float:
        nonlocal first
        begun = time.perf_counter()
        _write(store, first, first + 10)
        first += 10
        tail = str(store.stream(_NAME).tail())
        while run.status()["distinct"]["cut"] != [tail]:
            time.sleep(0.01)
        return time.perf_counter() - begun

    one()
    return one


def overhead(bench: Bench) -> Iterator[Result]:
    """The median batch of a supervised query beside the same query started with plain Spark."""
    events = max(_BATCHES, bench.sizes.read_events // 100)
    with _session() as spark, _store(bench) as (store, folder):
        _write(store, 0, events)
        count = iter(range(1000))

        def supervised() -> float:
            name = f"o{next(count)}"
            pipeline = Pipeline(name, store, spark=spark)

            @pipeline.stream(f"{_COPY}-{name}", max_events=events // _BATCHES)
            def copy(read: Any) -> Any:
                return read.stream(_NAME).select("number")

            with pipeline.start() as run:
                tail = str(store.stream(_NAME).tail())
                while run.status()["copy"]["cut"] != [tail]:
                    time.sleep(0.02)
                return _median_batch(spark.streams.active[0])

        def plain() -> float:
            name = f"p{next(count)}"
            source = spark.readStream.format("headwater").options(store=store.url, stream=_NAME, max_events_per_batch=events // _BATCHES)
            writer = source.load().select("number").writeStream.format("headwater").options(store=store.url, create="true")
            query = writer.option("stream", f"{_COPY}-{name}").option("checkpointLocation", str(folder / name)).start()
            query.processAllAvailable()
            found = _median_batch(query)
            query.stop()
            return found

        supervised()
        plain()
        own, limit = in_turns(bench.sizes.rounds, supervised, plain)
        ratio = median_ratio(own, limit)
        value, bound = statistics.median(own), statistics.median(limit)
        yield Result("pipeline-overhead", "a batch of a supervised query", value, "ms", bound, "plain query", ratio, at_most(1.1, "ratio"))


def _median_batch(query: Any) -> float:
    found = [json.loads(one.json) for one in query.recentProgress]
    return statistics.median(float(one["durationMs"]["triggerExecution"]) for one in found if one["numInputRows"])
