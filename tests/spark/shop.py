"""A shop whose orders pipelines count: the stream, the pipelines, and what must come out, by plain Python."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

import headwater as hw
from headwater.check import check_store
from headwater.pipelines import Pipeline, Run

ORDERS, PER_MINUTE, TOTALS, COPY = "shop/orders", "shop/per_minute", "shop/totals", "shop/copy"
SCHEMA = pa.schema([pa.field("id", pa.int64()), pa.field("item", pa.string()), pa.field("price", pa.int64())])
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
ITEMS = 42


def item_of(number: int) -> str:
    return f"item{number % ITEMS}"


def fill(store: hw.Store, first: int, until: int) -> None:
    """Orders with these ids, one a second, each with its id as its price."""
    with store.stream(ORDERS).writer() as writer:
        for number in range(first, until):
            item = item_of(number)
            writer.write({"id": number, "item": item, "price": number}, key=item, time=BEGIN + timedelta(seconds=number))


def sums(numbers: Iterable[int]) -> dict[str, int]:
    found: dict[str, int] = defaultdict(int)
    for number in numbers:
        found[item_of(number)] += number
    return dict(found)


@dataclass
class Shop:
    """A store, and a pipeline `sales` with a table of totals, a stream of totals per minute, and a stream that copies the latter."""

    spark: SparkSession
    store: hw.Store
    folder: Path
    pipelines: list[Pipeline] = field(default_factory=list)

    def create(self, segments: int = 2) -> hw.Stream:
        return self.store.create_stream(ORDERS, schema=SCHEMA, scaling=hw.Scaling.fixed(segments))

    def fill(self, first: int, until: int) -> None:
        fill(self.store, first, until)

    def empty(self, name: str = "sales") -> Pipeline:
        return Pipeline(name, self.store, checkpoints=self.folder / "checkpoints", spark=self.spark)

    def totals(self, name: str = "sales", *, where: str = "true", partitions: int | None = None, max_events: int | None = None) -> Pipeline:
        """A pipeline with the table of totals only."""
        pipeline = self.empty(name)

        @pipeline.table(TOTALS, key="item", partitions=partitions, max_events=max_events)
        def totals(read: Any) -> Any:
            return read.stream(ORDERS).where(where).groupBy("item").agg(f.sum("price").alias("total"))

        return pipeline

    def sales(self, *, partitions: int | None = None, max_events: int | None = None) -> Pipeline:
        """Three outputs: a view, windows in append mode, a table in update mode, and a second hop."""
        pipeline = self.empty()

        @pipeline.view()
        def even(read: Any) -> Any:
            return read.stream(ORDERS).where("id % 2 = 0")

        @pipeline.stream(PER_MINUTE, key="item", watermark=("_time", "1 minute"), partitions=partitions, max_events=max_events)
        def per_minute(read: Any) -> Any:
            return read.view("even").groupBy(f.window("_time", "1 minute"), "item").agg(f.sum("price").alias("total"))

        @pipeline.table(TOTALS, key="item", partitions=partitions, max_events=max_events)
        def totals(read: Any) -> Any:
            return read.view("even").groupBy("item").agg(f.sum("price").alias("total"))

        @pipeline.stream(COPY, key="item")
        def copy(read: Any) -> Any:
            return read.stream(PER_MINUTE).select("window", "item", "total")

        return pipeline

    def table(self, name: str = TOTALS) -> dict[str, Any]:
        return {key: json.loads(entry.value)["total"] for key, entry in self.store.table(name).items()}

    def windows(self, name: str = PER_MINUTE) -> list[tuple[int, str, int]]:
        """(minute, item, total) of all rows, in order."""
        rows = (event.value for event in self.store.stream(name).read())
        return sorted((minute_of(row["window"]["start"]), row["item"], row["total"]) for row in rows)

    def wait_for(self, run: Run, until: hw.Cut, outputs: Sequence[str]) -> None:
        """Wait until these outputs have processed their input up to a cut."""

        def done() -> bool:
            run.wait(timeout=0.0)
            status = run.status()
            return all(status[name]["cut"] == [str(until)] for name in outputs)

        wait_until(done)

    def check(self) -> None:
        report = check_store(self.store)
        assert report.ok, report.problems
        assert self.store.transactions(only_open=True) == []


def minute_of(time: datetime) -> int:
    return int((time - BEGIN).total_seconds()) // 60


def windows_of(numbers: Iterable[int], closed_until: int) -> list[tuple[int, str, int]]:
    """The totals per minute and item, of minutes that ended before this second."""
    found: dict[tuple[int, str], int] = defaultdict(int)
    for number in numbers:
        found[number // 60, item_of(number)] += number
    return sorted((minute, item, total) for (minute, item), total in found.items() if (minute + 1) * 60 <= closed_until)


def wait_until(condition: Callable[[], bool], seconds: float = 180.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)
