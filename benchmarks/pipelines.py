"""Pipelines: a savepoint, a restore and a rescale of large state, a take-over, and a supervised query beside a plain one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

import headwater as hw
import headwater.spark
from benchmarks.bench import MB, Bench
from benchmarks.results import Result, at_most, in_turns, median_ratio
from headwater.pipelines import Pipeline
from headwater.pipelines.register import Register
from headwater.pipelines.sessions import SETTINGS

_NAME, _KEYS, _COPY = "bench/numbers", "bench/keys", "bench/copy"
_LARGE, _NEWEST = "bench/large", "bench/newest"
_VALUE_BYTES = 1000
_TRIGGER_SECONDS = 1
_BATCHES = 20
#: A standby's session is up this long after its JVM was started.
_WARM_SECONDS = 15.0
_PATIENCE_SECONDS = 120.0


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
    """A savepoint of a large state while a query has a batch each second, and a restore of it."""
    megabytes = min(1000, bench.sizes.memory_mb)
    with _session() as spark, _store(bench) as (store, _):
        rows = megabytes * MB // _VALUE_BYTES
        schema = pa.schema([("number", pa.int64()), ("value", pa.binary())])
        store.create_stream(_LARGE, schema=schema, scaling=hw.Scaling.fixed(2))
        pipeline = Pipeline("bench", store, spark=spark)

        @pipeline.table(_NEWEST, key="number", partitions=2, trigger=f"{_TRIGGER_SECONDS} seconds", max_events=max(1, rows // 10))
        def newest(read: Any) -> Any:
            grouped = read.stream(_LARGE).groupBy("number").agg(f.max("value").alias("value"))
            # The table shall not cost more than the state.
            return grouped.select(f.col("number").cast("string").alias("number"), f.length("value").alias("bytes")).where("bytes < 9")

        _write_values(store, 0, rows, _VALUE_BYTES)
        pipeline.run(until="caught_up")
        with pipeline.start() as run, _fed(store):
            _wait_for_batches(spark, 4)
            begun = datetime.now(UTC)
            taken = _seconds(lambda: pipeline.savepoint("one"))
            ended = datetime.now(UTC)
            _wait_for_batches(spark, 3)
            wait = _longest_wait(spark.streams.active[0], begun, ended)
            run.stop()
        size = f"{_state_bytes(pipeline) / MB:,.0f} MB of state"
        yield Result("pipeline-savepoint", f"{size}, while it runs", taken, "s", goal=at_most(60))
        yield Result("pipeline-wait", "longest time between two batches meanwhile", wait, "s", _TRIGGER_SECONDS, "trigger",
                     wait / _TRIGGER_SECONDS, at_most(2.0, "ratio"))  # fmt: skip

        def restore() -> None:
            pipeline.restore("one")
            pipeline.run(until="caught_up")

        yield Result("pipeline-restore", f"{size}, and the batches after it", _seconds(restore), "s", goal=at_most(60))


def rescale(bench: Bench) -> Iterator[Result]:
    """The state of a query that remembers every number it has seen is divided anew."""
    keys = min(1_000_000, bench.sizes.read_events // 4)
    with _session() as spark, _store(bench) as (store, _):
        pipeline = Pipeline("bench", store, spark=spark)

        @pipeline.stream(_KEYS, partitions=2)
        def distinct(read: Any) -> Any:
            return read.stream(_NAME).dropDuplicates(["number"]).select("number")

        _write(store, 0, keys)
        pipeline.run(until="caught_up")
        for before, after in ((2, 4), (4, 2)):
            divided = _seconds(partial(pipeline.rescale, after))
            yield Result("pipeline-rescale", f"{keys:,} keys, {before} to {after} partitions", divided, "s", goal=at_most(60))


def _write_values(store: hw.Store, first: int, until: int, size: int) -> None:
    """Numbers with values that don't compress."""
    with store.stream(_LARGE).writer() as writer:
        for start in range(first, until, 10_000):
            numbers = range(start, min(until, start + 10_000))
            writer.write_batch(pa.table({"number": numbers, "value": pa.array([os.urandom(size) for _ in numbers], pa.binary())}))


@contextmanager
def _fed(store: hw.Store) -> Iterator[None]:
    """A few events many times a second, so that every trigger has a batch."""
    ended = threading.Event()

    def feed() -> None:
        number = 0
        while not ended.wait(0.1):
            number += 10
            _write_values(store, number, number + 10, 8)

    thread = threading.Thread(target=feed)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _progress(query: Any) -> list[Any]:
    return [found for found in (json.loads(one.json) for one in query.recentProgress) if found["numInputRows"]]


def _wait_for_batches(spark: SparkSession, count: int) -> None:
    """Wait for this many more batches with rows."""
    query: Any = spark.streams.active[0]
    known = {found["batchId"] for found in _progress(query)}
    while len({found["batchId"] for found in _progress(query)} - known) < count:
        time.sleep(0.1)


def _longest_wait(query: Any, begun: datetime, ended: datetime) -> float:
    """The longest time between the starts of two batches, of those that a period touches, in seconds."""
    starts = [datetime.fromisoformat(found["timestamp"]) for found in _progress(query)]
    return max((after - before).total_seconds() for before, after in pairwise(starts) if after >= begun and before <= ended)


def _state_bytes(pipeline: Pipeline) -> int:
    """The size of the newest savepoint, which is the state and little else."""
    return pipeline.savepoints()[-1].bytes


_JOB = """
import os

import headwater as hw
from headwater.pipelines import Pipeline

pipeline = Pipeline("bench", hw.open(os.environ["HEADWATER_BENCH"], create=False, upkeep=False))


@pipeline.stream("bench/copy", max_events=1000)
def copy(read):
    return read.stream("bench/numbers").select("number")
"""


def take_over(bench: Bench) -> Iterator[Result]:
    """A runner is killed, and its standby goes on: until it has the pipeline, and until its first batch."""
    with _store(bench) as (store, folder):
        _write(store, 0, 1000)
        job = folder / "job.py"
        job.write_text(_JOB, encoding="utf-8")
        command = [sys.executable, "-m", "headwater", "pipeline", "run", str(job), "--standby"]
        environment = os.environ | {"HEADWATER_BENCH": store.url}
        with (folder / "log").open("ab") as log, ExitStack() as running:

            def begin() -> subprocess.Popen[bytes]:
                process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
                running.callback(_kill, process)
                return process

            found: list[tuple[float, float]] = []
            register = Register(store, "bench")
            processes = {process.pid: process for process in (begin(), begin())}
            for turn in range(1, min(4, bench.sizes.rounds) + 1):
                _wait_for_copied(store, 1000 * turn)
                # The other one has a warm session: it has had time for it, as it was started first or is the former standby.
                _wait_until(lambda: all(len(psutil.Process(pid).children()) > 0 for pid in processes))
                time.sleep(_WARM_SECONDS)
                owner = _owner(register)
                _kill(processes.pop(owner))
                begun = time.perf_counter()
                _write(store, 1000 * turn, 1000 * turn + 1000)
                _wait_for_successor(register, owner)
                taken = time.perf_counter() - begun
                _wait_for_copied(store, 1000 * (turn + 1))
                found.append((taken, time.perf_counter() - begun))
                process = begin()
                processes[process.pid] = process
            taken, first = (statistics.median(figures) for figures in zip(*found, strict=True))
            yield Result("pipeline-takeover", "a standby has the pipeline after kill -9", taken, "s", goal=at_most(15))
            yield Result("pipeline-takeover", "its first batch is stored", first, "s", goal=at_most(45))


def _owner(register: Register) -> int:
    live = register.find_live()
    return live.owner.pid if live is not None and live.owner is not None else 0


def _count_copied(store: hw.Store) -> int:
    return sum(part.count for part in store.stream(_COPY).ranges()) if _COPY in store.streams() else 0


def _wait_for_copied(store: hw.Store, count: int) -> None:
    _wait_until(lambda: _count_copied(store) == count)


def _wait_for_successor(register: Register, former: int) -> None:
    _wait_until(lambda: _owner(register) not in (former, 0))


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the pipeline does not go on")
        time.sleep(0.01)


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

            with pipeline.start():
                query = spark.streams.active[0]
                # Not by the status of the run: to ask for that many times a second costs more than the supervision.
                query.processAllAvailable()
                return _median_batch(query)

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
