"""Spark: source and sink beside ones that do nothing, history beside Spark's own reader, and the price of a small batch."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

import headwater as hw
import headwater.spark
from benchmarks.bench import MB, Bench
from benchmarks.limits import take_memory
from benchmarks.results import Result, at_least, at_most, in_turns, median_ratio, percentile
from benchmarks.sparkready import ROW_BYTES, ReadyDataSource

_SEGMENTS = 4
_NAME = "bench/spark"
#: A sink's memory as a multiple of what it writes: what it has of it, what it makes of it, and the files' cache.
_MEMORY = 4
#: Spark's own work on the first runs is several times that of later ones.
_WARM_UP = 5


@contextmanager
def _session() -> Iterator[SparkSession]:
    """A session of two cores; one that is there already is used, and left as it is."""
    running = SparkSession.getActiveSession()
    if running is None:
        # The workers import the ready source from here.
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    spark = running or headwater.spark.session("benchmarks", master="local[2]", spark__driver__memory="2g")
    spark.sparkContext.setLogLevel("ERROR")
    spark.dataSource.register(ReadyDataSource)
    try:
        yield spark
    finally:
        if running is None:
            spark.stop()


@contextmanager
def _store(bench: Bench, times: int = 4) -> Iterator[tuple[hw.Store, Path, int]]:
    """(a store with a stream in it, a folder, rows)."""
    rows = max(1000, bench.sizes.batch_mb * times * MB // ROW_BYTES)
    folder = bench.path()
    try:
        with hw.open(folder / "store", upkeep=False) as store:
            stream = store.create_stream(_NAME, scaling=hw.Scaling.fixed(_SEGMENTS))
            with stream.writer() as writer:
                for start in range(0, rows, 50_000):
                    numbers = range(start, min(rows, start + 50_000))
                    values = pa.array([bytes([number % 256]) * ROW_BYTES for number in numbers], pa.binary())
                    keys = pa.array([b"key%d" % (number % 1000) for number in numbers], pa.binary())
                    writer.write_batch(pa.record_batch({"value": values, "_key": keys}))
            yield store, folder, rows
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _seconds(run: Callable[[], object]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def _discard(df: DataFrame) -> None:
    df.write.format("noop").mode("overwrite").save()


def _finish(writer: DataStreamWriter, checkpoint: Path) -> float:
    """The seconds that the batches of a query took, without its start."""
    query = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
    query.awaitTermination()
    found = sum(_durations(query.recentProgress)) / 1000
    shutil.rmtree(checkpoint, ignore_errors=True)
    return found


def reading(bench: Bench) -> Iterator[Result]:
    """All of a stream, in a batch and in a query, beside the same rows made ready before; and Parquet by Spark's own reader."""
    with _session() as spark, _store(bench) as (store, folder, rows):
        options = {"store": store.url, "stream": _NAME}
        ready = {"rows": str(rows), "parts": str(_SEGMENTS)}
        own = lambda: _seconds(lambda: _discard(spark.read.format("headwater").options(**options).load()))  # noqa: E731
        limit = lambda: _seconds(lambda: _discard(spark.read.format("ready").options(**ready).load()))  # noqa: E731
        yield _compare(bench, "spark-read", "batch", rows, own, limit)
        stream = lambda: _finish(spark.readStream.format("headwater").options(**options).load().writeStream.format("noop"), folder / "c")  # noqa: E731
        ready_stream = lambda: _finish(  # noqa: E731
            spark.readStream.format("ready").options(**ready).load().writeStream.format("noop"), folder / "c"
        )
        yield _compare(bench, "spark-read", "micro-batches", rows, stream, ready_stream)
        spark.read.format("headwater").options(**options).load().write.option("compression", "none").parquet(str(folder / "parquet"))
        parquet = lambda: _seconds(lambda: _discard(spark.read.parquet(str(folder / "parquet"))))  # noqa: E731
        (taken,) = in_turns(bench.sizes.rounds, parquet)
        yield Result("spark-read", "spark.read.parquet, for comparison", rows * ROW_BYTES / MB / statistics.median(taken), "MB/s")


def conditions(bench: Bench) -> Iterator[Result]:
    """`where` that one row in a hundred passes, of a column that grows and of one in any order, beside Spark filtering all rows."""
    rows = max(2000, bench.sizes.read_events)
    folder = bench.path()
    random = np.random.default_rng(1)
    try:
        with _session() as spark, hw.open(folder / "store", upkeep=False) as store:
            stream = store.create_stream(_NAME, schema=pa.schema([("grows", pa.int64()), ("any", pa.int64()), ("text", pa.string())]))
            with stream.writer() as writer:
                for start in range(0, rows, 10_000):
                    numbers = range(start, min(rows, start + 10_000))
                    texts = [f"{number:0100d}" for number in numbers]
                    writer.write_batch(pa.table({"grows": numbers, "any": random.integers(0, rows, len(numbers)), "text": texts}))
                    writer.flush()
            store.run_upkeep()
            options = {"store": store.url, "stream": _NAME}
            for column, variant in (("grows", "a column that grows"), ("any", "a column in any order")):
                where = f"{column} < {rows // 100}"
                own, limit = in_turns(
                    bench.sizes.rounds,
                    lambda: _seconds(lambda: _discard(spark.read.format("headwater").options(**options, where=where).load())),  # noqa: B023
                    lambda: _seconds(lambda: _discard(spark.read.format("headwater").options(**options).load().where(where))),  # noqa: B023
                )
                rates = [1000 * statistics.median(found) for found in (own, limit)]
                yield Result("spark-where", variant, rates[0], "ms", rates[1], "Spark filters", median_ratio(limit, own))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _compare(
    bench: Bench,
    name: str,
    variant: str,
    rows: int,
    own: Callable[[], float],
    limit: Callable[[], float],
    goal: float = 0.7,
    word: str = "ready batches",
) -> Result:
    for _ in range(_WARM_UP):
        own()
        limit()
    taken, least = in_turns(bench.sizes.rounds, own, limit)
    figure = rows * ROW_BYTES / MB / statistics.median(taken)
    bound = rows * ROW_BYTES / MB / statistics.median(least)
    return Result(name, variant, figure, f"MB/s in rows of {ROW_BYTES} B", bound, word, median_ratio(least, taken), at_least(goal, "ratio"))


def writing(bench: Bench) -> Iterator[Result]:
    """Rows that Spark reads from Parquet to a stream, in a batch and in a query, beside a Python sink that only takes them."""
    with _session() as spark, _store(bench) as (store, folder, rows):
        source = spark.read.format("headwater").options(store=store.url, stream=_NAME).load().select("value", "_key")
        source.repartition(_SEGMENTS).write.option("compression", "none").parquet(str(folder / "parquet"))
        df = spark.read.parquet(str(folder / "parquet"))
        target = {"store": store.url, "stream": "bench/sink", "create": "true", "segments": str(_SEGMENTS)}

        def compare(variant: str, own: Callable[[], float], limit: Callable[[], float], word: str) -> Result:
            ours, least = (_with_memory(folder / "memory", _MEMORY * rows * ROW_BYTES, run) for run in (own, limit))
            return _compare(bench, "spark-write", variant, rows, ours, least, word=word)

        def own() -> float:
            return _and_drop(store, _seconds(lambda: df.write.format("headwater").options(**target).mode("append").save()))

        limit = lambda: _seconds(lambda: df.write.format("ready").mode("append").save())  # noqa: E731
        yield compare("batch", own, limit, "a sink that only takes")
        (folder / "taken").mkdir()

        def stored() -> float:
            found = _seconds(lambda: df.write.format("ready").option("folder", str(folder / "taken")).mode("append").save())
            for path in (folder / "taken").iterdir():
                path.unlink()
            return found

        yield compare("batch, durable", own, stored, "a sink that takes, writes and syncs")

        def files() -> DataFrame:
            return spark.readStream.schema(df.schema).parquet(str(folder / "parquet"))

        stream = lambda: _and_drop(store, _finish(files().writeStream.format("headwater").options(**target), folder / "c"))  # noqa: E731
        taking = lambda: _finish(files().writeStream.format("ready"), folder / "c")  # noqa: E731
        yield compare("micro-batches", stream, taking, "a sink that only takes")


def _with_memory(path: Path, size: int, run: Callable[[], float]) -> Callable[[], float]:
    """As `run`, with as much memory free as it will use, which the host has given already: see `limits.seconds_to_write`.

    Some hosts take back what was free for a second. A sink that only takes rows needs little, so that new memory would count for the
    other alone: on one such host it was the larger part of the difference.
    """

    def measured() -> float:
        take_memory(path, size)
        return run()

    return measured


def _and_drop(store: hw.Store, seconds: float) -> float:
    """What was written goes, as the limit's files do: see `limits.seconds_to_write`."""
    store.stream("bench/sink").seal()
    store.delete_stream("bench/sink")
    store.run_upkeep()
    return seconds


def history(bench: Bench) -> Iterator[Result]:
    """`table()` over long-term Parquet, beside Spark's own reader of the same files. Much of it: planning takes 0.1 s either way."""
    with _session() as spark, _store(bench, times=16) as (store, _, rows):
        store.run_upkeep()
        files = [chunk.url for chunk in store.stream(_NAME).chunks()]
        # The columns that the files have: the names of stream and segment would be more work.
        names = [name for name in headwater.spark.table(spark, store, _NAME).columns if name not in ("_stream", "_segment")]
        own = lambda: _seconds(lambda: _discard(headwater.spark.table(spark, store, _NAME).select(names)))  # noqa: E731
        limit = lambda: _seconds(lambda: _discard(spark.read.parquet(*files).select(names)))  # noqa: E731
        yield _compare(bench, "spark-table", "all of it in chunks", rows, own, limit, 0.9, "spark.read.parquet")


def small_batches(bench: Bench) -> Iterator[Result]:
    """What a micro-batch of one event takes from stream to stream, beside Spark's own rate source and noop sink."""
    batches = max(3, bench.sizes.tail_events // 4)
    with _session() as spark, _store(bench) as (store, folder, _):
        source = spark.readStream.format("headwater").options(store=store.url, stream=_NAME, start="tail").load()
        target = {"store": store.url, "stream": "bench/out", "create": "true", "checkpointLocation": str(folder / "c1")}
        query = source.writeStream.format("headwater").options(**target).start()
        query.processAllAvailable()
        with store.stream(_NAME).writer() as writer:
            for number in range(batches + 3):
                writer.write(b"x" * ROW_BYTES, key=str(number)).result(60)
                query.processAllAvailable()
        own = _durations(query.recentProgress)[-batches:]
        query.stop()
        noop = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 1).load().writeStream.format("noop")
        query = noop.option("checkpointLocation", str(folder / "c2")).start()
        while len(_durations(query.recentProgress)) < batches + 3:
            time.sleep(0.05)
        limit = _durations(query.recentProgress)[-batches:]
        query.stop()
    bound = percentile(limit, 0.5)
    figure = percentile(own, 0.5)
    yield Result("spark-batch", "1 event, p50", figure, "ms", bound, "rate source, noop sink", figure / bound, at_most(3, "ratio"))


def _durations(progress: Sequence[Any]) -> list[float]:
    found = [json.loads(one.json) for one in progress]
    return [float(one["durationMs"]["triggerExecution"]) for one in found if one["numInputRows"]]
