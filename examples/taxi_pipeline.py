"""The taxi day as a pipeline, restored and rescaled in the middle: python taxi_pipeline.py STORE

At noon a savepoint is taken. In the afternoon somebody deploys a version that forgets the surcharge. It is noticed in the evening: the
outputs are rolled back to noon, the state is divided into more partitions, and the right version counts the afternoon again.
"""

import json
import math
import random
import sys
from collections import Counter
from datetime import UTC, datetime, timedelta

import pyarrow as pa
from pyspark.sql import functions as f

import headwater as hw
from headwater.pipelines import Pipeline

ZONES, STEP = 12, timedelta(minutes=10)
DAY = datetime(2026, 6, 1, tzinfo=UTC)
SCHEMA = pa.schema([("zone", pa.int64()), ("fare", pa.int64()), ("surcharge", pa.int64())])


def declare(store: hw.Store, amount: str) -> Pipeline:
    """The pipeline; `amount` is what a ride costs. Only that differs between the versions, so each can go on from the other's state."""
    pipeline = Pipeline("taxi", store)

    @pipeline.view()
    def rides(read):  # type: ignore[no-untyped-def]
        return read.stream("taxi/rides").select("zone", "_time", f.expr(amount).alias("amount"))

    @pipeline.stream("taxi/hours", key="zone", watermark=("_time", "10 minutes"), partitions=2)
    def hours(read):  # type: ignore[no-untyped-def]
        windows = read.view("rides").groupBy(f.window("_time", "1 hour"), "zone")
        return windows.agg(f.count("*").alias("rides"), f.sum("amount").alias("amount"))

    @pipeline.table("taxi/totals", key="zone", partitions=2)
    def totals(read):  # type: ignore[no-untyped-def]
        return read.view("rides").groupBy("zone").agg(f.count("*").alias("rides"), f.sum("amount").alias("amount"))

    return pipeline


def drive(rides: hw.Stream, start: int, end: int, counts: Counter[int], amounts: Counter[int]) -> None:
    """Write the rides of some hours. The city sleeps at 4 in the morning and is busiest in the afternoon."""
    chance = random.Random(start)
    with rides.writer() as writer:
        for step in range(start * 6, end * 6):
            hour = step / 6
            for _ in range(round(10 + 45 * (1 - math.cos(2 * math.pi * (hour - 4) / 24)))):
                zone, fare, surcharge = chance.randrange(ZONES), chance.randrange(5, 60), 2 * (hour > 18)
                at = DAY + step * STEP + chance.random() * STEP
                writer.write({"zone": zone, "fare": fare, "surcharge": surcharge}, key=zone, time=at)
                counts[zone] += 1
                amounts[zone] += fare + surcharge


def main() -> None:
    counts: Counter[int] = Counter()
    amounts: Counter[int] = Counter()
    with hw.open(sys.argv[1], upkeep=False) as store:
        rides = store.create_stream("taxi/rides", schema=SCHEMA, scaling=hw.Scaling.fixed(4))
        right = declare(store, "fare + surcharge")
        drive(rides, 0, 12, counts, amounts)
        right.run(until="caught_up")
        noon = right.savepoint("noon")
        print(f"12:00  {counts.total():,} rides; savepoint of {noon.bytes:,} bytes")

        wrong = declare(store, "fare")
        drive(rides, 12, 24, counts, amounts)
        wrong.run(until="caught_up")
        print(f"24:00  {counts.total():,} rides; {amounts.total() - total(store, 'amount'):,} are missing: the surcharge was forgotten")

        right = declare(store, "fare + surcharge")
        right.restore("noon")
        right.rescale(4)
        right.run(until="caught_up")
        print(f"again  {total(store, 'rides'):,} rides, {total(store, 'amount'):,} in all, from the savepoint, with 4 partitions")
        found = {int(key): json.loads(entry.value) for key, entry in store.table("taxi/totals").items()}
        assert {zone: row["rides"] for zone, row in found.items()} == counts
        assert {zone: row["amount"] for zone, row in found.items()} == amounts
        hours = sum(event.value["rides"] for event in store.stream("taxi/hours").read())
        print(f"{hours:,} rides are in hours that are over, {counts.total() - hours:,} in the last one: every ride is counted once")


def total(store: hw.Store, word: str) -> int:
    return sum(json.loads(entry.value)[word] for _, entry in store.table("taxi/totals").items())


if __name__ == "__main__":
    main()
