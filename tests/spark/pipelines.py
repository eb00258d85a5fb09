"""What the Spark tests do again and again: fill a stream, run a query until it has read everything, look at what came out."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

import headwater as hw
from headwater.check import check_store

SCHEMA = pa.schema([pa.field("id", pa.int64()), pa.field("name", pa.string())])
#: Settings for a small session that starts quickly.
FAST: dict[str, Any] = {
    "spark__driver__extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
    "spark__driver__memory": "1g",
    "spark__sql__shuffle__partitions": 1,
    "spark__sql__streaming__stateStore__maintenanceInterval": "3600s",
    "spark__sql__streaming__noDataMicroBatches__enabled": "false",
    "spark__sql__session__timeZone": "Europe/Berlin",
}
SOURCE, SINK = "t/in", "t/out"


@dataclass
class Lab:
    """A store and a session."""

    spark: SparkSession
    store: hw.Store
    folder: Path

    @property
    def place(self) -> dict[str, str]:
        """The options that name the store."""
        url, catalog, _ = self.store.address
        return {"store": url} | ({"catalog": catalog} if catalog is not None else {})

    def create(self, name: str = SOURCE, *, segments: int = 2, schema: pa.Schema | None = SCHEMA) -> hw.Stream:
        return self.store.create_stream(name, scaling=hw.Scaling.fixed(segments), schema=schema)

    def fill(self, first: int, until: int, name: str = SOURCE) -> None:
        """Rows with these ids, of 10 keys."""
        fill(self.store, first, until, name)

    def batch(self, stream: str = SOURCE, **options: Any) -> DataFrame:
        return self.spark.read.format("headwater").options(**self.place, stream=stream, **options).load()

    def source(self, stream: str = SOURCE, **options: Any) -> DataFrame:
        return self.spark.readStream.format("headwater").options(**self.place, stream=stream, **options).load()

    def sink(self, df: DataFrame, checkpoint: str = "checkpoint", **options: Any) -> DataStreamWriter:
        """A writer to the store; without other options to SINK, which is made."""
        chosen = options or {"stream": SINK, "create": "true"}
        return df.writeStream.format("headwater").options(**self.place, checkpointLocation=str(self.folder / checkpoint), **chosen)

    def copy(self, checkpoint: str = "checkpoint", *, max_events: int | None = None, **options: Any) -> StreamingQuery:
        """Copy all there is from SOURCE to SINK."""
        limit: dict[str, Any] = {"max_events_per_batch": max_events} if max_events is not None else {}
        return finish(self.sink(self.source(**limit), checkpoint, stream=SINK, create="true", **options))

    def ids(self, name: str = SINK) -> list[int]:
        return [event.value["id"] for event in self.store.stream(name).read()]

    def table(self, name: str) -> dict[str, bytes]:
        return {key: entry.value for key, entry in self.store.table(name).items()}

    def check(self) -> None:
        """The store is sound, and nothing staged was left behind."""
        report = check_store(self.store)
        assert report.ok, report.problems
        assert self.store.transactions(only_open=True) == []


def fill(store: hw.Store, first: int, until: int, name: str = SOURCE) -> None:
    with store.stream(name).writer() as writer:
        for number in range(first, until):
            writer.write({"id": number, "name": f"n{number % 7}"}, key=f"k{number % 10}")


def finish(writer: DataStreamWriter) -> StreamingQuery:
    """Run a query over all there is now; raises what it failed with."""
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    return query


def wait_for_batch(query: StreamingQuery) -> None:
    """Wait for a query's first batch. Two that start in one session at the same moment may break each other in Spark 4.3.

    (java.io.OptionalDataException: they share a map of environment variables, which one serializes while the other adds to it.)
    """
    while query.isActive and query.lastProgress is None:
        time.sleep(0.02)


def rows_read(query: StreamingQuery) -> list[int]:
    """How many rows each batch had."""
    return [progress["numInputRows"] for progress in query.recentProgress if progress["numInputRows"]]


def check_order(events: Iterable[hw.Event]) -> None:
    """Ids grow along each key."""
    latest: dict[bytes | None, int] = {}
    for event in events:
        assert latest.get(event.key, -1) < event.value["id"], f"{event} after {latest[event.key]}"
        latest[event.key] = event.value["id"]


def forget_commits(checkpoint: Path, first: int) -> None:
    """Take back Spark's notes that batches from this one on are done."""
    for path in (checkpoint / "commits").glob("[0-9]*"):
        if int(path.name) >= first:
            path.unlink()
            (path.parent / f".{path.name}.crc").unlink(missing_ok=True)
