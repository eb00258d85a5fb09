"""Spark over headwater, over Kafka and over plain files: scans of history, and pipelines from a stream to a stream."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import headwater as hw
from benchmarks.peers import fetch
from benchmarks.peers.figures import OWN, Figure
from benchmarks.peers.kafka import KafkaClient, KafkaPeer
from benchmarks.peers.work import MB, Sizes, sample_events

_ROWS = 50_000
_NOTE_BYTES = 200
_BATCHES = 5
_SCHEMA = pa.schema([("id", pa.int64()), ("city", pa.string()), ("amount", pa.float64()), ("note", pa.string())])
_DDL = "id BIGINT, city STRING, amount DOUBLE, note STRING"
#: A scan that took longer than this is not repeated.
_LONG_SECONDS = 20.0
#: As many partitions and segments, for as many tasks at once.
_PARTS = 4


def sample_rows() -> pa.RecordBatch:
    """Rides in a thousand cities, each with a note of random text."""
    random = np.random.default_rng(1)
    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz012345", dtype=np.uint8)
    notes = letters[random.integers(0, 32, _ROWS * _NOTE_BYTES)].tobytes().decode()
    return pa.RecordBatch.from_arrays(
        [
            pa.array(random.integers(0, 1 << 40, _ROWS)),
            pa.array([f"city-{number}" for number in random.integers(0, 1000, _ROWS)]),
            pa.array(random.random(_ROWS).round(6) * 100),
            pa.array([notes[start : start + _NOTE_BYTES] for start in range(0, len(notes), _NOTE_BYTES)]),
        ],
        schema=_SCHEMA,
    )


def scans(sizes: Sizes, folder: Path) -> Iterator[Figure]:
    """Count, filter and aggregate over the same rows: headwater's long-term tier, plain Parquet files, and JSON in Kafka."""
    rows = sample_rows()
    values = [json.dumps(row, separators=(",", ":")).encode() for row in rows.to_pylist()]
    times = max(1, sizes.scan_mb * MB // sum(map(len, values)))
    count = times * rows.num_rows
    folder.mkdir(parents=True)
    variant = f"{times * sum(map(len, values)) / 1e9:.1f} GB as JSON"
    with hw.open(str(folder / "store"), upkeep=False) as store, _session() as spark:
        stream = store.create_stream("bench/rides", schema=_SCHEMA, scaling=hw.Scaling.fixed(_PARTS))
        with stream.writer() as writer:
            for _ in range(times):
                writer.write_batch(rows, key="city")
        store.run_upkeep()
        _write_parquet(rows, times, folder / "parquet")
        from headwater import spark as headwater_spark

        tables = {OWN: headwater_spark.table(spark, store, "bench/rides"), "Parquet": spark.read.parquet(str(folder / "parquet"))}
        for _ in range(2):
            # In turns, for the machine's sake: the two are close.
            for name, table in tables.items():
                yield from _scan(name, table, count, variant)
        with KafkaPeer().running(folder / "kafka") as running:
            assert isinstance(running.client, KafkaClient)
            running.client.create("rides", _PARTS)
            producer = running.client.producer("rides")
            producer.write_prepared(producer.prepare([(value, b"%d" % index) for index, value in enumerate(values)]), times)
            producer.close()
            options = {"kafka.bootstrap.servers": running.client.servers, "subscribe": "rides", "startingOffsets": "earliest"}
            topic = spark.read.format("kafka").options(**options).load()
            from pyspark.sql import functions as f

            table = topic.select(f.from_json(f.col("value").cast("string"), _DDL).alias("row")).select("row.*")
            yield from _scan("Kafka", table, count, variant)


def _write_parquet(rows: pa.RecordBatch, times: int, folder: Path) -> None:
    """As headwater has it: zstd, row groups of some MB, files of about 128 MB."""
    folder.mkdir()
    table = pa.Table.from_batches([rows])
    for start in range(0, times, 12):
        with pq.ParquetWriter(folder / f"{start}.parquet", _SCHEMA, compression="zstd", compression_level=1) as writer:
            for _ in range(min(12, times - start)):
                writer.write_table(table)


def _scan(name: str, table: Any, count: int, variant: str) -> Iterator[Figure]:
    from pyspark.sql import functions as f

    queries: dict[str, Callable[[], Any]] = {
        "count": table.count,
        "filter on a column": lambda: table.where(f.col("city") == "city-7").select(f.sum("amount")).collect(),
        "aggregate": lambda: table.groupBy("city").agg(f.sum("amount"), f.max("id")).collect(),
        "all columns": lambda: table.select(f.sum(f.length("note")), f.sum("amount"), f.max("id"), f.max("city")).collect(),
    }
    for query, run in queries.items():
        begun = time.monotonic()
        found = run()
        seconds = time.monotonic() - begun
        assert query != "count" or found == count, f"{found} of {count} events were found in {name}"
        if seconds < _LONG_SECONDS:
            seconds = min(seconds, _seconds(run))
        yield Figure("spark-scan", f"{query}, {variant}", name, count / seconds, "events/s")


def _seconds(run: Callable[[], Any]) -> float:
    begun = time.monotonic()
    run()
    return time.monotonic() - begun


def streams(sizes: Sizes, folder: Path) -> Iterator[Figure]:
    """A stream through a map, and through an aggregate, into another: headwater exactly once, Kafka at least once."""
    folder.mkdir(parents=True)
    with hw.open(str(folder / "store"), upkeep=False) as store, KafkaPeer().running(folder / "kafka") as running, _session() as spark:
        assert isinstance(running.client, KafkaClient)
        events = sample_events(100)
        times = max(_BATCHES, sizes.stream_events // len(events))
        stream = store.create_stream("bench/in", scaling=hw.Scaling.fixed(_PARTS))
        store.create_stream("bench/map", scaling=hw.Scaling.fixed(_PARTS))
        store.table("bench/aggregate")
        for name in ("map", "aggregate"):
            running.client.create(name, _PARTS)
        with stream.writer() as writer:
            values, keys = zip(*events, strict=True)
            batch = pa.RecordBatch.from_arrays([pa.array(values), pa.array(keys)], ["value", "key"])
            for _ in range(times):
                writer.write_batch(batch, key="key")
        running.client.create("in", _PARTS)
        producer = running.client.producer("in")
        producer.write_prepared(producer.prepare(events), times)
        producer.close()
        each = -(-times * len(events) // _BATCHES)
        for job in ("map", "aggregate"):
            for name, start in ((OWN, _headwater_query), ("Kafka", _kafka_query)):
                address = str(folder / "store") if name == OWN else running.client.servers
                yield from _run_query(job, name, start(spark, address, job, each, folder / f"checkpoint-{name}-{job}"))


def _run_query(job: str, name: str, writer: Any) -> Iterator[Figure]:
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    done = [progress for progress in query.recentProgress if progress["numInputRows"]]
    # The first batch is the warm-up.
    counted = done[1:]
    seconds = [progress["durationMs"]["triggerExecution"] / 1000 for progress in counted]
    rate = sum(progress["numInputRows"] for progress in counted) / sum(seconds)
    yield Figure("spark-stream", f"{job}, events/s", name, rate, "events/s", note="" if name == OWN else "at least once")
    yield Figure("spark-stream", f"{job}, a batch", name, statistics.median(seconds), "s", less_is_better=True)


def _headwater_query(spark: Any, store: str, job: str, each: int, checkpoint: Path) -> Any:
    from pyspark.sql import functions as f

    options = {"store": store, "stream": "bench/in", "start": "head", "max_events_per_batch": str(each), "columns": "value,_key"}
    source = spark.readStream.format("headwater").options(**options).load()
    if job == "map":
        made = source.select(f.concat("value", f.lit(b"!")).alias("value"), f.col("_key").alias("k"))
    else:
        counted = source.groupBy("_key").agg(f.count("*").alias("n"), f.max("value").alias("last"))
        made = counted.select(f.concat_ws(" ", "n", f.hex("last")).alias("value"), f.col("_key").cast("string").alias("k"))
    # What replaces itself with every batch goes into a table.
    target = {"stream": "bench/map"} if job == "map" else {"table": "bench/aggregate"}
    writer = made.writeStream.format("headwater").outputMode("append" if job == "map" else "complete")
    return writer.options(store=store, key="k", checkpointLocation=str(checkpoint), **target)


def _kafka_query(spark: Any, servers: str, job: str, each: int, checkpoint: Path) -> Any:
    from pyspark.sql import functions as f

    options = {"kafka.bootstrap.servers": servers, "subscribe": "in", "startingOffsets": "earliest", "maxOffsetsPerTrigger": str(each)}
    source = spark.readStream.format("kafka").options(**options).load()
    if job == "map":
        made = source.select(f.concat("value", f.lit(b"!")).alias("value"), "key")
    else:
        counted = source.groupBy("key").agg(f.count("*").alias("n"), f.max("value").alias("last"))
        made = counted.select(f.encode(f.concat_ws(" ", "n", f.hex("last")), "utf-8").alias("value"), "key")
    writer = made.writeStream.format("kafka").outputMode("append" if job == "map" else "complete")
    throughput = {"kafka.acks": "all", "kafka.linger.ms": "10", "kafka.batch.size": "1000000"}
    return writer.options(topic=job, checkpointLocation=str(checkpoint), **{"kafka.bootstrap.servers": servers}, **throughput)


@contextmanager
def _session() -> Iterator[Any]:
    from headwater import spark as headwater_spark

    jars = ",".join(map(str, fetch.fetch_jars(fetch.SPARK_KAFKA)))
    spark = headwater_spark.session("headwater-peers", "local[2]", spark__jars=jars, spark__driver__memory="3g")
    spark.sparkContext.setLogLevel("ERROR")
    try:
        yield spark
    finally:
        spark.stop()
