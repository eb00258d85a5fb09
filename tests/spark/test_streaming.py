"""The source in micro-batches: limits, order across splits and merges, restarts, truncation, and where a query is."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

import headwater as hw
import headwater.spark
from tests.spark.pipelines import SINK, SOURCE, Lab, check_order, finish, forget_commits, rows_read, wait_for_batch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def wait_until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def test_order_holds_for_each_key_across_splits_merges_and_restarts(lab: Lab) -> None:
    stream = lab.create()
    lab.fill(0, 300)
    stream.split(0)
    lab.fill(300, 600)
    assert max(rows_read(lab.copy(max_events=100))) <= 100
    neighbours = sorted(stream.segments(), key=lambda segment: segment.start)
    stream.merge([segment.number for segment in neighbours[:2]])
    lab.store.run_upkeep()
    lab.fill(600, 900)
    lab.store.stream(SINK).split(0)
    lab.copy(max_events=200)
    assert sorted(lab.ids()) == list(range(900))
    check_order(lab.store.stream(SINK).read())
    lab.check()


def test_within_a_batch_a_key_is_in_one_partition_in_order(lab: Lab) -> None:
    stream = lab.create()
    lab.fill(0, 100)
    stream.split(1)
    lab.fill(100, 200)
    # Room for the largest range, and not for a segment with its successors.
    room = max(part.bytes for part in stream.ranges())
    seen: list[list[tuple[str, int, int]]] = []

    def look(df: DataFrame, batch: int) -> None:
        from pyspark.sql import functions as f

        rows = df.select(f.col("_key").cast("string"), f.spark_partition_id().alias("p"), "id").collect()
        seen.append([(row[0], row.p, row.id) for row in rows])

    finish(lab.source(partition_bytes=room).writeStream.foreachBatch(look).option("checkpointLocation", str(lab.folder / "c")))
    for rows in seen:
        partitions: dict[str, set[int]] = {}
        latest: dict[str, int] = {}
        for key, partition, number in rows:
            partitions.setdefault(key, set()).add(partition)
            assert latest.get(key, -1) < number
            latest[key] = number
        assert all(len(found) == 1 for found in partitions.values())
    assert sum(map(len, seen)) == 200 and len(seen) > 1


def test_a_running_query_follows_and_tells_its_progress(lab: Lab) -> None:
    stream = lab.create()
    lab.store.reader_group("watchers", [SOURCE])
    query = lab.sink(lab.source(group="watchers")).start()
    lab.fill(0, 50)
    wait_until(lambda: SINK in lab.store.streams() and len(lab.ids()) == 50)
    lab.fill(50, 80)
    wait_until(lambda: len(lab.ids()) == 80)
    query.processAllAvailable()
    progress = query.lastProgress
    assert progress is not None
    last = json.loads(progress.json)["sources"][0]
    assert hw.Cut.parse(json.dumps(last["endOffset"])) == stream.tail() == hw.Cut.parse(json.dumps(last["latestOffset"]))
    assert headwater.spark.lag(query) == hw.Lag(0, 0, 0.0)
    # The group is told of a batch when the next one begins.
    group = lab.store.reader_group("watchers")
    assert group.lag().events <= 30
    # What the query still has to read is kept, whatever is truncated.
    query.stop()
    lab.fill(80, 100)
    behind = headwater.spark.lag(query, lab.store)
    assert behind.events == 20 and behind.seconds > 0


def test_a_query_that_joins_a_table_tells_its_lag_too(lab: Lab) -> None:
    lab.create()
    lab.fill(0, 10)
    joined = lab.source().join(lab.spark.range(20), "id")
    query = joined.writeStream.format("noop").option("checkpointLocation", str(lab.folder / "c")).start()
    query.processAllAvailable()
    assert headwater.spark.lag(query).events == 0


def test_a_catalog_on_postgresql_takes_a_pipeline_too(spark: SparkSession, tmp_path: Path, postgres_url: str) -> None:
    with hw.open(tmp_path / "store", catalog=postgres_url, upkeep=False) as store:
        lab = Lab(spark, store, tmp_path)
        stream = lab.create()
        lab.fill(0, 3000)
        stream.split(0)
        lab.fill(3000, 4000)
        lab.copy(max_events=2500)
        forget_commits(tmp_path / "checkpoint", 1)
        lab.copy()
        assert sorted(lab.ids()) == list(range(4000))
        check_order(lab.store.stream(SINK).read())
        lab.check()


def test_two_queries_read_one_stream_each_at_its_own_pace(lab: Lab) -> None:
    lab.create()
    lab.fill(0, 100)
    first = lab.sink(lab.source(max_events_per_batch=30), "c1", stream="t/one", create="true").trigger(availableNow=True).start()
    wait_for_batch(first)
    second = lab.sink(lab.source(), "c2", stream="t/two", create="true").trigger(availableNow=True).start()
    first.awaitTermination()
    second.awaitTermination()
    assert sorted(lab.ids("t/one")) == sorted(lab.ids("t/two")) == list(range(100))


def test_what_was_truncated_fails_the_query_or_is_skipped_as_asked(lab: Lab) -> None:
    stream = lab.create()
    lab.fill(0, 100)
    lab.copy(max_events=50)
    lab.fill(100, 300)
    stream.truncate(lab.store.advance(stream.tail(), max_events=1))
    lab.fill(300, 310)
    with pytest.raises(StreamingQueryException, match="were truncated before they were read") as caught:
        lab.copy()
    assert "events 20 to" in str(caught.value) and "on_truncation" in str(caught.value)
    finish(lab.sink(lab.source(on_truncation="skip"), stream=SINK))
    assert sorted(lab.ids()) == [*range(100), *range(300, 310)]


def test_start_at_the_tail_skips_what_is_there_and_an_end_stops(lab: Lab) -> None:
    stream = lab.create()
    lab.fill(0, 10)
    start = stream.tail()
    lab.fill(10, 20)
    end = stream.tail()
    lab.fill(20, 30)
    query = lab.sink(lab.source(start=str(start), end=str(end))).start()
    query.processAllAvailable()
    query.stop()
    assert sorted(lab.ids()) == list(range(10, 20))


def test_a_first_batch_that_is_repeated_begins_where_it_began(lab: Lab) -> None:
    """Killed in its first batch, a query that began at the tail is asked again where to begin: by then the tail is elsewhere."""
    stream = lab.create()
    lab.fill(0, 10)
    began = stream.tail()
    lab.fill(10, 20)
    finish(lab.sink(lab.source(start=str(began)), "checkpoint"))
    for log in ("commits", "offsets"):
        assert [path.name for path in sorted((lab.folder / "checkpoint" / log).glob("[0-9]*"))] == ["0"]
    forget_commits(lab.folder / "checkpoint", 0)
    seen: list[int] = []
    lab.fill(20, 30)
    finish(
        lab.source(start="tail")
        .writeStream.foreachBatch(lambda df, batch: seen.extend(row.id for row in df.collect()))
        .option("checkpointLocation", str(lab.folder / "checkpoint"))
    )
    assert sorted(seen) == list(range(10, 30))


def test_a_checkpoint_of_another_store_is_refused(lab: Lab, tmp_path: Path) -> None:
    lab.create()
    lab.fill(0, 5)
    lab.copy()
    with hw.open(tmp_path / "other", upkeep=False) as other:
        second = Lab(lab.spark, other, lab.folder)
        second.create()
        second.fill(0, 5)
        with pytest.raises(StreamingQueryException, match="is of another store"):
            second.copy()
