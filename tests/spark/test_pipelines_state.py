"""Every kind of state: saved, restored, and divided anew, or refused by name before anything is touched."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from pyspark.sql import functions as f
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType

import headwater as hw
from headwater.pipelines import IncompatibleError, Pipeline
from tests.spark.shop import BEGIN, ITEMS, ORDERS, SCHEMA, TOTALS, Shop, item_of, sums
from tests.spark.test_pipelines import shop as shop

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SESSIONS, JOINED, PAYMENTS, SLIDING, WITHIN = "shop/sessions", "shop/joined", "shop/payments", "shop/sliding", "shop/within"
GAP_SECONDS = 50


def partitions_of(pipeline: Pipeline, output: str, **options: Any) -> set[int]:
    return {row["partition_id"] for row in pipeline.state(output, **options).collect()}


# Session windows.


def session_totals(numbers: Iterable[int], closed_until: int) -> list[tuple[str, int, int]]:
    """(item, second of the first order, total) of each session that ended before this second."""
    open_: dict[str, list[int]] = {}
    found: list[list[Any]] = []
    for number in sorted(numbers):
        item = item_of(number)
        current = open_.get(item)
        if current is None or number - current[1] > GAP_SECONDS:
            current = open_[item] = [number, number, 0]
            found.append([item, current])
        current[1] = number
        current[2] += number
    return sorted((item, first, total) for item, (first, last, total) in found if last + GAP_SECONDS <= closed_until)


@pytest.mark.long
def test_session_windows_are_saved_restored_and_rescaled(shop: Shop) -> None:
    pipeline = shop.empty()

    @pipeline.stream(SESSIONS, watermark=("_time", "1 minute"), partitions=2)
    def sessions(read: Any) -> Any:
        grouped = read.stream(ORDERS).groupBy(f.session_window("_time", f"{GAP_SECONDS} seconds").alias("session"), "item")
        return grouped.agg(f.sum("price").alias("total"))

    def found() -> list[tuple[str, int, int]]:
        rows = (event.value for event in shop.store.stream(SESSIONS).read())
        return sorted((row["item"], int((row["session"]["start"] - BEGIN).total_seconds()), row["total"]) for row in rows)

    shop.fill(0, 100)
    pipeline.run(until="caught_up")
    pipeline.savepoint("first")
    assert found() == []
    shop.fill(200, 300)
    pipeline.run(until="caught_up")
    closed = session_totals([*range(100), *range(200, 300)], 239)
    assert found() == closed and len(closed) == ITEMS
    pipeline.restore("first")
    assert found() == []
    pipeline.rescale(3)
    pipeline.run(until="caught_up")
    assert found() == closed
    shop.fill(400, 500)
    pipeline.run(until="caught_up")
    assert found() == session_totals([*range(100), *range(200, 300), *range(400, 500)], 439)
    assert partitions_of(pipeline, "sessions") == {0, 1, 2}
    shop.check()


# Joins.


def pay(shop: Shop, first: int, until: int) -> None:
    with shop.store.stream(PAYMENTS).writer() as writer:
        for number in range(first, until):
            time = BEGIN + timedelta(seconds=number)
            writer.write({"id": number, "item": item_of(number), "price": 2 * number}, key=item_of(number), time=time)


@pytest.mark.long
def test_a_join_of_two_streams_is_saved_restored_and_rescaled(shop: Shop) -> None:
    shop.store.create_stream(PAYMENTS, schema=SCHEMA)
    pipeline = shop.empty()

    @pipeline.stream(JOINED, watermark=("_time", "10 minutes"), partitions=2)
    def joined(read: Any) -> Any:
        orders = read.stream(ORDERS).select("id", "price", f.col("_time").alias("ordered"))
        payments = read.stream(PAYMENTS).select(f.col("id").alias("order"), f.col("price").alias("paid"), f.col("_time").alias("at"))
        return orders.join(payments, f.expr("id = order AND at BETWEEN ordered AND ordered + INTERVAL 1 DAY")).select("id", "price", "paid")

    def found() -> list[tuple[int, int, int]]:
        return sorted((row["id"], row["price"], row["paid"]) for row in (event.value for event in shop.store.stream(JOINED).read()))

    def expected(until: int) -> list[tuple[int, int, int]]:
        return [(number, number, 2 * number) for number in range(until)]

    shop.fill(0, 200)
    pay(shop, 0, 50)
    pipeline.run(until="caught_up")
    pipeline.savepoint("first")
    pay(shop, 50, 100)
    pipeline.run(until="caught_up")
    assert found() == expected(100)
    pipeline.restore("first")
    assert found() == expected(50)
    pipeline.rescale(3)
    pipeline.run(until="caught_up")
    # Orders from before the savepoint and the rescale wait in the state for their payments.
    pay(shop, 100, 200)
    pipeline.run(until="caught_up")
    assert found() == expected(200)
    shop.check()


# transformWithState.


class Totals(StatefulProcessor):
    """The total of each item, in a value; the number of orders, in a list."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._total = handle.getValueState("total", StructType([StructField("total", LongType())]))
        self._orders = handle.getListState("orders", StructType([StructField("id", LongType())]))

    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
        known = self._total.get()
        total = known[0] if known is not None else 0
        for frame in rows:
            total += int(frame["price"].sum())
            self._orders.appendList([(int(id),) for id in frame["id"]])
        self._total.update((total,))
        yield pd.DataFrame({"item": [key[0]], "total": [total], "orders": [sum(1 for _ in self._orders.get())]})

    def close(self) -> None:
        pass


TOTALS_TYPE = StructType([StructField("item", StringType()), StructField("total", LongType()), StructField("orders", IntegerType())])


def with_totals(shop: Shop, key: str = "item") -> Pipeline:
    pipeline = shop.empty()

    @pipeline.table(TOTALS, key="item", partitions=2)
    def totals(read: Any) -> Any:
        grouped = read.stream(ORDERS).select("id", "item", "price").groupBy(key)
        return grouped.transformWithStateInPandas(Totals(), TOTALS_TYPE, "Update", "None")

    return pipeline


def test_the_state_of_transform_with_state_is_saved_restored_and_rescaled(shop: Shop) -> None:
    pipeline = with_totals(shop)
    shop.fill(0, 100)
    pipeline.run(until="caught_up")
    with pytest.raises(IncompatibleError, match=r"the keys of its transformWithState are .*id.*, and were .*item"):
        with_totals(shop, key="id").check()
    pipeline.savepoint("first")
    shop.fill(100, 200)
    pipeline.run(until="caught_up")
    assert shop.table() == sums(range(200))
    pipeline.restore("first")
    assert shop.table() == sums(range(100))
    pipeline.rescale(3)
    shop.fill(200, 300)
    pipeline.run(until="caught_up")
    assert shop.table() == sums(range(300))
    assert partitions_of(pipeline, "totals", stateVarName="total") == {0, 1, 2}
    shop.check()


# Sliding windows and deduplication within the watermark, whose state must be right after the restore.


def sliding_totals(until: int) -> list[tuple[int, int]]:
    starts: dict[int, int] = defaultdict(int)
    for number in range(until):
        for start in (number // 60 * 60, number // 60 * 60 - 60):
            starts[start] += number
    return sorted((start, total) for start, total in starts.items() if start + 120 <= until - 1 - 60)


@pytest.mark.long
def test_sliding_windows_and_keys_within_the_watermark_are_right_after_a_restore_and_a_rescale(shop: Shop) -> None:
    pipeline = shop.empty()

    @pipeline.stream(SLIDING, watermark=("_time", "1 minute"), partitions=2)
    def sliding(read: Any) -> Any:
        return read.stream(ORDERS).groupBy(f.window("_time", "2 minutes", "1 minute")).agg(f.sum("price").alias("total"))

    @pipeline.stream(WITHIN, watermark=("_time", "5 minutes"), partitions=2)
    def within(read: Any) -> Any:
        return read.stream(ORDERS).dropDuplicatesWithinWatermark(["id"]).select("id")

    def windows() -> list[tuple[int, int]]:
        rows = (event.value for event in shop.store.stream(SLIDING).read())
        return sorted((int((row["window"]["start"] - BEGIN).total_seconds()), row["total"]) for row in rows)

    def ids() -> list[int]:
        return sorted(event.value["id"] for event in shop.store.stream(WITHIN).read())

    shop.fill(0, 250)
    pipeline.run(until="caught_up")
    pipeline.savepoint("first")
    shop.fill(250, 300)
    pipeline.run(until="caught_up")
    pipeline.restore("first")
    pipeline.rescale(3)
    shop.fill(300, 500)
    pipeline.run(until="caught_up")
    assert windows() == sliding_totals(500) and ids() == list(range(500))
    pipeline.rescale(1)
    # Ids that were stored before the savepoint, after it, and after the restore: each is known.
    repeat(shop, [*range(220, 230), *range(260, 270), *range(300, 310)])
    pipeline.run(until="caught_up")
    assert ids() == list(range(500))
    shop.check()


def repeat(shop: Shop, numbers: Sequence[int]) -> None:
    """Orders with known ids and a time within the watermark."""
    with shop.store.stream(ORDERS).writer() as writer:
        for number in numbers:
            writer.write({"id": number, "item": item_of(number), "price": 0}, key=item_of(number), time=BEGIN + timedelta(seconds=499))


# What can't be divided.


@pytest.mark.long
def test_state_that_spark_cannot_divide_is_refused_by_name_before_any_query_stops(shop: Shop, tmp_path: Path) -> None:
    pipeline = shop.totals(partitions=2)

    @pipeline.stream("shop/first", partitions=2)
    def first(read: Any) -> Any:
        return read.stream(ORDERS).select("id").limit(50)

    shop.fill(0, 100)
    with pipeline.start() as run:
        shop.wait_for(run, shop.store.stream(ORDERS).tail(), ["totals", "first"])
        before = {name: status["generation"] for name, status in run.status().items()}
        queries = {query.id: query.runId for query in shop.spark.streams.active}
        with pytest.raises(hw.InvalidRequestError, match=r"'first' keeps a limit, whose state can't be divided"):
            pipeline.rescale(3)
        assert {query.id: query.runId for query in shop.spark.streams.active} == queries, "no query was stopped"
        pipeline.rescale(3, output="totals")
        shop.fill(100, 200)
        shop.wait_for(run, shop.store.stream(ORDERS).tail(), ["totals"])
        assert run.status()["first"]["generation"] == before["first"] and run.status()["totals"]["generation"] != before["totals"]
    assert shop.table() == sums(range(200))
    assert len(list(shop.store.stream("shop/first").read())) == 50
    shop.check()
