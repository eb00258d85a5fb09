"""Pipelines on a full disk, with a last batch that failed, with a crash in the middle of a batch, and with a runner that lost its place."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import functions as f

import headwater as hw
from headwater.pipelines import IncompatibleError, OutputFailedError, Pipeline, commands
from headwater.pipelines.checkpoints import last_batch
from headwater.pipelines.register import Owner
from headwater.pipelines.runner import Runner
from headwater.pipelines.tenure import Tenure
from tests.crash.test_damage import small_disk
from tests.spark.pipelines import forget_commits
from tests.spark.shop import ORDERS, TOTALS, Shop, sums, wait_until
from tests.spark.test_pipelines import refuse
from tests.spark.test_pipelines import shop as shop

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
MIB = 1 << 20


def leave(pipeline: Pipeline) -> None:
    """Make it look as if the pipeline's runner had been killed: an owner that is gone and did not stop in order."""
    register = pipeline._register
    live = register.find_live()
    assert live is not None
    register.put_live(replace(live, owner=Owner("gone", "elsewhere", 1, Owner.of_this_process().place, "0", "then")))


@pytest.mark.long
def test_a_disk_that_is_full_in_the_middle_of_a_savepoint_leaves_the_old_ones_and_the_job(shop: Shop, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 16 * MIB) as disk:
        pipeline = Pipeline("sales", shop.store, checkpoints=disk, spark=shop.spark)

        @pipeline.table(TOTALS, key="item", partitions=2)
        def totals(read: Any) -> Any:
            return read.stream(ORDERS).groupBy("item").agg(f.sum("price").alias("total"))

        shop.fill(0, 100)
        with pipeline.start() as run:
            shop.wait_for(run, shop.store.stream(ORDERS).tail(), ["totals"])
            pipeline.savepoint("old")
            filler = disk / "filler"
            fill_up(filler)
            with pytest.raises(hw.UnavailableError, match="No space left on device"):
                pipeline.savepoint("new")
            assert [savepoint.name for savepoint in pipeline.savepoints()] == ["old"]
            assert list(shop.store.kept()) == ["pipeline.sales.old.0"]
            assert [path.name for path in (disk / "sales" / ".savepoints").iterdir()] == ["old"]
            # The job itself finds no room, tries again, and goes on when there is some.
            shop.fill(100, 200)
            wait_until(lambda: "No space left on device" in str(run.status()["totals"]["last_error"]))
            filler.unlink()
            shop.wait_for(run, shop.store.stream(ORDERS).tail(), ["totals"])
            assert shop.table() == sums(range(200))
            pipeline.savepoint("new")
        pipeline.restore("old")
        assert shop.table() == sums(range(100))
        pipeline.run(until="caught_up")
        assert shop.table() == sums(range(200))
    shop.check()


def fill_up(path: Path) -> None:
    """Write a file until the disk has no room."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        for size in (64 * 1024, 1):
            while True:
                try:
                    os.write(fd, bytes(size))
                except OSError:
                    break
    finally:
        os.close(fd)


def broken(shop: Shop) -> Pipeline:
    """The pipeline of totals, with a condition that fails on every row."""
    pipeline = shop.empty()

    @pipeline.table(TOTALS, key="item", partitions=2)
    def totals(read: Any) -> Any:
        fail = f.udf(refuse, "long", useArrow=False)
        return read.stream(ORDERS).where(fail("id") >= 0).groupBy("item").agg(f.sum("price").alias("total"))

    return pipeline


@pytest.mark.long
def test_a_rescale_after_a_batch_that_failed_keeps_the_state_of_the_last_good_one(shop: Shop) -> None:
    pipeline = shop.totals(partitions=2)
    shop.fill(0, 100)
    pipeline.run(until="caught_up")
    shop.fill(100, 200)
    with pytest.raises(OutputFailedError, match="no good"):
        broken(shop).run(until="caught_up")
    checkpoint = shop.folder / "checkpoints" / "sales" / "totals" / "1"
    assert last_batch(checkpoint, "offsets") == last_batch(checkpoint, "commits") + 1, "the failed batch was planned"
    pipeline.rescale(3)
    pipeline.run(until="caught_up")
    assert shop.table() == sums(range(200))
    assert {row["partition_id"] for row in pipeline.state("totals").collect()} == {0, 1, 2}
    shop.check()


@pytest.mark.long
def test_a_last_batch_that_cannot_be_finished_refuses_a_rescale_and_not_a_restore(shop: Shop) -> None:
    pipeline = shop.totals(partitions=2)
    shop.fill(0, 100)
    pipeline.run(until="caught_up")
    pipeline.savepoint("first")
    shop.fill(100, 200)
    pipeline.run(until="caught_up")
    forget_commits(shop.folder / "checkpoints" / "sales" / "totals" / "1", 1)
    with pytest.raises(hw.UnavailableError, match=r"'totals' can't finish its last batch, 1: .*no good: 1"):
        broken(shop).rescale(3)
    assert pipeline.status()["totals"]["generation"] == 1 and shop.table() == sums(range(200))
    broken(shop).restore("first")
    assert pipeline.status()["totals"]["generation"] == 2 and shop.table() == sums(range(100))
    pipeline.run(until="caught_up")
    assert shop.table() == sums(range(200))
    shop.check()


@pytest.mark.long
def test_any_of_several_savepoints_is_restored_and_the_later_ones_are_abandoned(shop: Shop) -> None:
    pipeline = shop.totals(partitions=2)
    for number in range(3):
        shop.fill(number * 100, number * 100 + 100)
        pipeline.run(until="caught_up")
        pipeline.savepoint(f"s{number}")
    shop.fill(300, 400)
    pipeline.run(until="caught_up")
    for number, states in ((1, ["complete", "complete", "abandoned"]), (0, ["complete", "abandoned", "abandoned"])):
        pipeline.restore(f"s{number}")
        assert shop.table() == sums(range(number * 100 + 100))
        assert [savepoint.state for savepoint in pipeline.savepoints()] == states
        pipeline.run(until="caught_up")
        assert shop.table() == sums(range(400))
    shop.check()


def test_a_savepoint_that_does_not_fit_is_refused_before_anything_changes(shop: Shop) -> None:
    pipeline = shop.totals(partitions=2)
    shop.fill(0, 100)
    pipeline.run(until="caught_up")
    pipeline.savepoint("first")
    shop.fill(100, 200)
    pipeline.run(until="caught_up")
    other = shop.empty()

    @other.table(TOTALS, key="item", partitions=2)
    def totals(read: Any) -> Any:
        return read.stream(ORDERS).groupBy("item").agg(f.max("price").alias("total"))

    with pytest.raises(hw.NotFoundError, match=r"has no savepoint 'second'; its savepoints: first"):
        pipeline.restore("second")
    with pytest.raises(IncompatibleError, match=r"does not fit the savepoint 'first': the functions of its aggregation are \[.*max"):
        other.restore("first")
    files = shop.folder / "checkpoints" / "sales" / ".savepoints" / "first"
    files.rename(files.parent / "gone")
    with pytest.raises(hw.ConflictError, match="the files of savepoint 'first' are gone"):
        pipeline.restore("first")
    assert shop.table() == sums(range(200)) and pipeline.status()["totals"]["generation"] == 1
    shop.fill(200, 300)
    pipeline.run(until="caught_up")
    assert shop.table() == sums(range(300))
    shop.check()


@pytest.mark.long
def test_three_hops_end_to_end_are_exact_after_a_take_over_a_restore_and_a_rescale(shop: Shop) -> None:
    pipeline = shop.empty()

    @pipeline.stream("shop/doubled", key="item", max_events=70)
    def doubled(read: Any) -> Any:
        return read.stream(ORDERS).selectExpr("id", "item", "2 * price AS price")

    @pipeline.stream("shop/once", key="item", partitions=2, max_events=70)
    def once(read: Any) -> Any:
        return read.stream("shop/doubled").dropDuplicates(["id"]).select("id", "item", "price")

    @pipeline.table(TOTALS, key="item", partitions=2, max_events=70)
    def totals(read: Any) -> Any:
        return read.stream("shop/once").groupBy("item").agg(f.sum("price").alias("total"))

    def expected(until: int) -> dict[str, int]:
        return {item: 2 * total for item, total in sums(range(until)).items()}

    shop.fill(0, 200)
    with pipeline.start() as run:
        wait_until(lambda: bool(run.wait(timeout=0.0)) or (TOTALS in shop.store.tables() and shop.table() == expected(200)))
        pipeline.savepoint("first")
    leave(pipeline)
    shop.fill(200, 400)
    pipeline.run(until="caught_up")
    assert shop.table() == expected(400)
    pipeline.restore("first")
    assert shop.table() == expected(200)
    pipeline.rescale(3)
    # Ids that are known, in whatever partition they are now.
    shop.fill(150, 250)
    pipeline.run(until="caught_up")
    assert shop.table() == expected(400)
    assert sorted(event.value["id"] for event in shop.store.stream("shop/once").read()) == list(range(400))
    shop.check()


def test_a_runner_that_does_not_notice_the_take_over_stores_nothing_as_each_commit_is_fenced(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = shop.totals()

    @pipeline.stream("shop/copied")
    def copied(read: Any) -> Any:
        return read.stream(ORDERS).select("id")

    shop.fill(0, 100)
    run = pipeline.start()
    shop.wait_for(run, shop.store.stream(ORDERS).tail(), ["totals", "copied"])
    with pytest.raises(hw.ConflictError, match="claimed by 'pipeline sales'"), shop.store.stream("shop/copied").writer() as writer:
        writer.write({"id": 1}).result()
    # It neither looks at the register nor shows that it is alive: only the fence is left.
    monkeypatch.setattr(Tenure, "_look", lambda self: None)
    monkeypatch.setattr(Tenure, "check", lambda self: None)
    leave(pipeline)
    shop.fill(100, 200)

    def copied_ids() -> list[int]:
        return sorted(event.value["id"] for event in shop.store.stream("shop/copied").read())

    wait_until(lambda: not run.is_running or shop.table() != sums(range(100)) or copied_ids() != list(range(100)))
    assert shop.table() == sums(range(100)) and copied_ids() == list(range(100))
    with pytest.raises(OutputFailedError, match=r"'totals' after 2 restarts: data: ConditionFailedError|'copied' after 2 restarts"):
        run.wait()
    monkeypatch.undo()
    # Its end took nothing from whoever came after it.
    live = pipeline._register.find_live()
    assert live is not None and live.owner is not None and live.owner.id == "gone"
    pipeline.run(until="caught_up")
    assert shop.table() == sums(range(200))
    assert copied_ids() == list(range(200))
    shop.check()


def test_a_restore_that_was_begun_is_completed_by_whoever_runs_the_pipeline_next(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = shop.totals(partitions=2)
    shop.fill(0, 100)
    pipeline.run(until="caught_up")
    pipeline.savepoint("first")
    shop.fill(100, 200)
    pipeline.run(until="caught_up")
    pipeline.savepoint("later")

    def die(tenure: Tenure, store: hw.Store) -> None:
        tenure.abandon()
        raise KeyboardInterrupt

    runner = Runner(pipeline._register, pipeline._folders, pipeline._graph, pipeline._session, waits=True)
    runner.take("")
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(commands, "complete_restore", die)
        runner.carry_out("restore", {"name": "first", "outputs": "roll_back"})
    assert shop.table() == sums(range(200)), "it was only begun"
    leave(pipeline)
    # Whatever comes first completes it, also a command.
    pipeline.savepoint("next")
    assert shop.table() == sums(range(100))
    states = {savepoint.name: savepoint.state for savepoint in pipeline.savepoints()}
    assert states == {"first": "complete", "later": "abandoned", "next": "complete"}
    pipeline.run(until="caught_up")
    assert shop.table() == sums(range(200))
    shop.check()
