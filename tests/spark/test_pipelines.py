"""Pipelines that run, are asked for savepoints, restored, rescaled and taken over: their outputs equal the batch result."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

import headwater as hw
from headwater.pipelines import IncompatibleError, OutputFailedError
from headwater.pipelines.checkpoints import last_batch
from headwater.pipelines.register import Owner
from headwater.pipelines.sessions import SETTINGS
from tests.spark.pipelines import forget_commits
from tests.spark.shop import BEGIN, COPY, ORDERS, PER_MINUTE, TOTALS, Shop, sums, windows_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def shop(spark: SparkSession, tmp_path: Path) -> Iterator[Shop]:
    before: dict[str, str | None] = {name: spark.conf.get(name, None) for name in SETTINGS}
    no_data = "spark.sql.streaming.noDataMicroBatches.enabled"
    for name, wanted in {**SETTINGS, no_data: "true"}.items():
        spark.conf.set(name, wanted)
    with hw.open(tmp_path / "store", upkeep=False) as store:
        shop = Shop(spark, store, tmp_path)
        shop.create()
        yield shop
    spark.conf.set(no_data, "false")
    for name, value in before.items():
        spark.conf.unset(name) if value is None else spark.conf.set(name, value)


def refuse(number: int) -> int:
    raise ValueError(f"no good: {number}")


def even(first: int, until: int) -> range:
    return range(first + first % 2, until, 2)


def test_a_graph_of_three_hops_gives_the_batch_result_with_a_live_savepoint_and_a_rescale(shop: Shop) -> None:
    shop.fill(0, 400)
    pipeline = shop.sales(partitions=2, max_events=250)
    pipeline.check()
    assert shop.store.streams() == [ORDERS] and shop.store.tables() == [], "a check changes nothing"
    pipeline.run(until="caught_up")
    assert shop.table() == sums(even(0, 400))
    # The watermark is the largest time less a minute: 398 - 60.
    assert shop.windows() == windows_of(even(0, 400), 338) == shop.windows(COPY)
    assert {name: found["state"] for name, found in pipeline.status().items()} == dict.fromkeys(("per_minute", "totals", "copy"), "stopped")

    with pipeline.start() as run:
        first = pipeline.savepoint("first")
        shop.fill(400, 800)
        shop.wait_for(run, shop.store.stream(ORDERS).tail(), ["per_minute", "totals"])
        found = run.status()["totals"]
        assert found["state"] == "running" and found["restarts"] == 0 and found["state_rows"] == 21 and found["owner"]
        pipeline.rescale(4)
        shop.fill(800, 1200)
        shop.wait_for(run, shop.store.stream(ORDERS).tail(), ["per_minute", "totals"])
        run.stop(savepoint="end")
    assert shop.table() == sums(even(0, 1200))
    pipeline.run(until="caught_up")
    assert shop.windows() == windows_of(even(0, 1200), 1138) == shop.windows(COPY)
    assert [savepoint.name for savepoint in pipeline.savepoints()] == ["first", "end"]
    assert first.state == "complete" and first.bytes > 0
    assert {row["key"]["item"]: row["value"]["sum"] for row in pipeline.state("totals", savepoint="first").collect()} == sums(even(0, 400))
    assert {row["partition_id"] for row in pipeline.state("totals").collect()} == {0, 1, 2, 3}
    # What a savepoint needs of the input stays.
    with pytest.raises(hw.ConflictError, match=r"pipeline\.sales\.first\.0"):
        shop.store.stream(ORDERS).truncate(shop.store.stream(ORDERS).tail())
    for name in ("first", "end"):
        pipeline.drop_savepoint(name)
    assert pipeline.savepoints() == [] and shop.store.kept() == {}
    shop.store.stream(ORDERS).truncate(shop.store.stream(ORDERS).tail())
    shop.check()


def test_the_state_of_42_keys_is_divided_from_2_to_4_to_2_partitions_and_every_sum_is_right(shop: Shop) -> None:
    pipeline = shop.totals(partitions=2)

    def add(rounds: int) -> None:
        with shop.store.stream(ORDERS).writer() as writer:
            for number in range(42 * rounds):
                writer.write({"id": number, "item": f"{number % 42}", "price": number % 42}, key=str(number % 42))
        pipeline.run(until="caught_up")

    add(1000)
    pipeline.rescale(4)
    add(250)
    assert {row["partition_id"] for row in pipeline.state("totals").collect()} == {0, 1, 2, 3}
    pipeline.rescale(2, output="totals")
    add(250)
    assert shop.table() == {str(key): key * 1500 for key in range(42)}
    assert {row["partition_id"] for row in pipeline.state("totals").collect()} == {0, 1}
    shop.check()


def test_a_batch_that_is_stored_and_not_noted_is_finished_before_a_savepoint_and_a_rescale(shop: Shop) -> None:
    pipeline = shop.totals(partitions=2)
    shop.fill(0, 200)
    pipeline.run(until="caught_up")
    shop.fill(200, 400)
    pipeline.run(until="caught_up")
    checkpoint = shop.folder / "checkpoints" / "sales" / "totals" / "1"
    # As after a kill between our commit and Spark's note of it.
    forget_commits(checkpoint, 1)
    pipeline.savepoint("first")
    forget_commits(checkpoint, 1)
    pipeline.rescale(3)
    shop.fill(400, 500)
    pipeline.run(until="caught_up")
    assert shop.table() == sums(range(500))
    versions = [change.version for change in shop.store.table(TOTALS).changes()]
    assert len(versions) == 42 * 3, "no batch is stored twice"
    assert {row["key"]["item"]: row["value"]["sum"] for row in pipeline.state("totals", savepoint="first").collect()} == sums(range(400))


def test_a_successor_goes_on_and_the_former_owner_stores_nothing_more(shop: Shop) -> None:
    shop.fill(0, 200)
    former = shop.totals(max_events=50)
    run = former.start()
    shop.wait_for(run, shop.store.stream(ORDERS).tail(), ["totals"])
    # Another process believes that this one is dead, and takes over.
    register = former._register
    live = register.find_live()
    assert live is not None and live.owner is not None
    stranger = Owner("gone", "elsewhere", 1, live.owner.place, "0", "then")
    register.put_live(replace(live, owner=stranger))
    shop.fill(200, 300)
    with pytest.raises(hw.FencedError, match="was taken over by process 1 on elsewhere"):
        run.wait()
    assert shop.table() == sums(range(200)), "it stored nothing after the change"
    # Killed between our commit of the last batch and Spark's note of it.
    checkpoint = shop.folder / "checkpoints" / "sales" / "totals" / "1"
    forget_commits(checkpoint, last_batch(checkpoint, "commits"))
    # The stranger is gone, and had not stopped in order: its successor goes on in a copy of the checkpoint.
    successor = shop.totals()
    successor.run(until="caught_up")
    assert shop.table() == sums(range(300))
    assert successor.status()["totals"]["generation"] == 2
    shop.check()


def test_a_catalog_on_postgresql_takes_a_pipeline_too(shop: Shop, tmp_path: Path, postgres_url: str) -> None:
    with hw.open(tmp_path / "other", catalog=postgres_url, upkeep=False) as store:
        other = Shop(shop.spark, store, tmp_path / "other")
        other.create()
        other.fill(0, 200)
        pipeline = other.sales(partitions=2)
        pipeline.run(until="caught_up")
        pipeline.savepoint("first")
        other.fill(200, 400)
        pipeline.run(until="caught_up")
        pipeline.restore("first")
        assert other.table() == sums(even(0, 200))
        pipeline.rescale(3)
        pipeline.run(until="caught_up")
        assert other.table() == sums(even(0, 400))
        assert other.windows() == windows_of(even(0, 400), 338) == other.windows(COPY)
        other.check()


def test_a_second_supervisor_is_refused_and_names_the_first(shop: Shop) -> None:
    with shop.totals().start(), pytest.raises(hw.ConflictError, match=r"pipeline sales is run by process \d+ on .*: wait with standby"):
        shop.totals().run()


def test_a_standby_takes_over_when_the_owner_ends(shop: Shop) -> None:
    shop.fill(0, 100)
    first = shop.totals().start()
    standby = shop.totals().start(standby=True)
    shop.wait_for(first, shop.store.stream(ORDERS).tail(), ["totals"])
    first.stop()
    shop.fill(100, 200)
    shop.wait_for(standby, shop.store.stream(ORDERS).tail(), ["totals"])
    standby.stop()
    assert shop.table() == sums(range(200))


def test_a_definition_that_does_not_fit_its_state_is_refused_and_says_what_changed(shop: Shop) -> None:
    def windowed(length: str, key: str, source: str = ORDERS, total: str = "sum", where: str = "true") -> Any:
        pipeline = shop.empty()

        @pipeline.stream(PER_MINUTE, watermark=("_time", "1 minute"))
        def per_minute(read: Any) -> Any:
            rows = read.stream(source).where(where).groupBy(f.window("_time", length), key)
            return rows.agg(getattr(f, total)("price").alias("total"))

        return pipeline

    shop.store.stream(ORDERS).fork("shop/other")
    shop.fill(0, 200)
    windowed("1 minute", "item").run(until="caught_up")
    before = shop.windows()
    for changed, words in (
        (windowed("2 minutes", "item"), r"the keys of its aggregation are .*12000000"),
        (windowed("1 minute", "id"), "the keys of its aggregation are .*id"),
        (windowed("1 minute", "item", total="max"), r"the functions of its aggregation are \[.*max\(price\)\]"),
        (windowed("1 minute", "item", source="shop/other"), "it reads shop/other, and read shop/orders"),
    ):
        with pytest.raises(IncompatibleError, match=words) as caught:
            changed.check()
        assert "Run the old code, or give the function another name" in str(caught.value)
        with pytest.raises(IncompatibleError):
            changed.run(until="caught_up")
    assert shop.windows() == before
    # What the state does not depend on may change.
    windowed("1 minute", "item", where="id >= 0").run(until="caught_up")


def test_a_failure_ends_its_branch_after_a_few_restarts_and_the_others_go_on(shop: Shop) -> None:
    pipeline = shop.totals()

    @pipeline.stream("shop/broken")
    def broken(read: Any) -> Any:
        fail = f.udf(refuse, "long", useArrow=False)
        return read.stream(ORDERS).select(fail("id").alias("id"))

    @pipeline.stream("shop/after")
    def after(read: Any) -> Any:
        return read.stream("shop/broken").select("id")

    shop.fill(0, 100)
    with pytest.raises(OutputFailedError, match="'broken' after 2 restarts: data: ValueError: no good"):
        pipeline.run(until="caught_up")
    assert shop.table() == sums(range(100))
    assert not shop.store.stream("shop/after").ranges(), "what reads it did not start"
    shop.check()


def test_a_restore_rolls_all_outputs_back_and_what_came_after_the_savepoint_is_processed_again_once(shop: Shop) -> None:
    shop.fill(0, 400)
    pipeline = shop.sales(partitions=2, max_events=250)
    pipeline.run(until="caught_up")
    pipeline.savepoint("early")
    then = (shop.table(), shop.windows(), shop.windows(COPY))
    shop.fill(400, 800)
    with pipeline.start() as run:
        shop.wait_for(run, shop.store.stream(ORDERS).tail(), ["per_minute", "totals"])
        pipeline.savepoint("late")
        run.stop()
    later = shop.store.stream(PER_MINUTE).tail()
    pipeline.restore("early")
    assert (shop.table(), shop.windows(), shop.windows(COPY)) == then
    assert [savepoint.state for savepoint in pipeline.savepoints()] == ["complete", "abandoned"]
    with pytest.raises(hw.RolledBackError) as told:
        list(shop.store.stream(PER_MINUTE).read(later))
    assert told.value.cut is not None and not shop.store.stream(PER_MINUTE).ranges(told.value.cut)
    kept = [name for name in shop.store.streams() if name.startswith(f"{PER_MINUTE}.undone-")]
    assert len(kept) == 1 and len(shop.windows(kept[0])) > len(then[1])
    with pytest.raises(hw.ConflictError, match="the savepoint 'late' was abandoned"):
        pipeline.restore("late")
    pipeline.run(until="caught_up")
    assert shop.table() == sums(even(0, 800))
    assert shop.windows() == windows_of(even(0, 800), 738) == shop.windows(COPY)
    # Again, while it runs, by a request; and then a savepoint that was taken with the outputs rolled back.
    with pipeline.start() as run:
        pipeline.restore("early")
        shop.fill(800, 1000)
        shop.wait_for(run, shop.store.stream(ORDERS).tail(), ["per_minute", "totals"])
        pipeline.savepoint("again")
    pipeline.rescale(3)
    pipeline.restore("again")
    pipeline.run(until="caught_up")
    assert shop.table() == sums(even(0, 1000))
    assert shop.windows() == windows_of(even(0, 1000), 938) == shop.windows(COPY)
    shop.check()


def test_windows_and_deduplications_are_saved_restored_and_rescaled(shop: Shop) -> None:
    pipeline = shop.empty()

    @pipeline.stream("shop/sliding", watermark=("_time", "1 minute"), partitions=2)
    def sliding(read: Any) -> Any:
        return read.stream(ORDERS).groupBy(f.window("_time", "2 minutes", "1 minute")).agg(f.sum("price").alias("total"))

    @pipeline.stream("shop/once", partitions=2)
    def once(read: Any) -> Any:
        return read.stream(ORDERS).dropDuplicates(["item"]).select("item")

    @pipeline.stream("shop/within", watermark=("_time", "1 minute"), partitions=2)
    def within(read: Any) -> Any:
        return read.stream(ORDERS).dropDuplicatesWithinWatermark(["id"]).select("id")

    def found() -> tuple[list[tuple[int, int]], list[str], list[int]]:
        windows = [event.value for event in shop.store.stream("shop/sliding").read()]
        return (
            sorted((int((row["window"]["start"] - BEGIN).total_seconds()), row["total"]) for row in windows),
            sorted(event.value["item"] for event in shop.store.stream("shop/once").read()),
            sorted(event.value["id"] for event in shop.store.stream("shop/within").read()),
        )

    def expected(until: int) -> tuple[list[tuple[int, int]], list[str], list[int]]:
        starts = [start for start in range(-60, until, 60) if start + 120 <= until - 1 - 60]
        windows = [(start, sum(range(max(start, 0), min(start + 120, until)))) for start in starts]
        return windows, sorted(sums(range(until))), list(range(until))

    shop.fill(0, 300)
    pipeline.run(until="caught_up")
    pipeline.savepoint("first")
    shop.fill(300, 450)
    pipeline.run(until="caught_up")
    assert found() == expected(450)
    pipeline.restore("first")
    assert found() == expected(300)
    pipeline.rescale(3)
    pipeline.run(until="caught_up")
    # Orders that come again within the watermark are known, in whatever partition they are now.
    shop.fill(430, 450)
    shop.fill(450, 500)
    pipeline.run(until="caught_up")
    assert found()[1:] == expected(500)[1:]
    shop.check()


def test_with_append_a_restore_leaves_the_outputs_and_appends_again(shop: Shop) -> None:
    pipeline = shop.empty()

    @pipeline.stream("shop/numbers")
    def numbers(read: Any) -> Any:
        return read.stream(ORDERS).select("id")

    shop.fill(0, 100)
    pipeline.run(until="caught_up")
    pipeline.savepoint("first")
    shop.fill(100, 150)
    with pipeline.start() as run:
        shop.wait_for(run, shop.store.stream(ORDERS).tail(), ["numbers"])
        pipeline.savepoint("second")
        pipeline.restore("first", outputs="append")
        shop.wait_for(run, shop.store.stream(ORDERS).tail(), ["numbers"])
    found = sorted(event.value["id"] for event in shop.store.stream("shop/numbers").read())
    assert found == sorted([*range(100), *range(100, 150), *range(100, 150)])
    assert [savepoint.state for savepoint in pipeline.savepoints()] == ["complete", "complete"]
    shop.check()


def test_a_cycle_through_a_stream_ends_when_nothing_is_in_flight(shop: Shop) -> None:
    pipeline = shop.empty()
    shop.store.create_stream("shop/halved", schema=pa.schema([("price", pa.int64())]))

    @pipeline.stream("shop/open")
    def opened(read: Any) -> Any:
        return read.stream(ORDERS).select("price").union(read.stream("shop/halved").select("price"))

    @pipeline.stream("shop/halved")
    def halved(read: Any) -> Any:
        return read.stream("shop/open").where("price > 1").selectExpr("CAST(price / 2 AS BIGINT) AS price")

    shop.fill(0, 9)
    pipeline.run(until="caught_up")
    expected, flying = [], list(range(9))
    while flying:
        expected += flying
        flying = [price // 2 for price in flying if price > 1]
    assert sorted(event.value["price"] for event in shop.store.stream("shop/open").read()) == sorted(expected)


def test_a_session_with_another_provider_is_refused(shop: Shop) -> None:
    shop.spark.conf.unset(next(iter(SETTINGS)))
    with pytest.raises(hw.InvalidRequestError, match=r"the session has .*providerClass=nothing, and savepoints need .*RocksDB"):
        shop.totals().run(until="caught_up")
    assert TOTALS not in shop.store.tables()


def test_a_savepoint_that_cannot_be_written_is_not_listed_and_the_old_ones_stay(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = shop.totals()
    shop.fill(0, 100)
    pipeline.run(until="caught_up")
    pipeline.savepoint("old")
    with pytest.raises(hw.AlreadyExistsError, match="has a savepoint 'old'"):
        pipeline.savepoint("old")
    # A file stands where the folder is to be: as on a full disk, what is needed can't be made.
    place = shop.folder / "checkpoints" / "sales" / ".savepoints" / "new"
    shutil.rmtree(place, ignore_errors=True)
    place.write_text("")
    with pytest.raises(hw.UnavailableError, match=r"the savepoint 'new' can't be written|can't be copied"):
        pipeline.savepoint("new")
    assert [savepoint.name for savepoint in pipeline.savepoints()] == ["old"]
    assert list(shop.store.kept()) == ["pipeline.sales.old.0"]
    assert pipeline.state("totals", savepoint="old").count() == 42
