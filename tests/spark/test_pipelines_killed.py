"""Runners, standbys and commands killed with SIGKILL: whoever comes next goes on, and the outputs equal the batch result."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

import headwater as hw
from headwater.check import check_store
from headwater.pipelines import Pipeline
from headwater.pipelines.checkpoints import last_batch
from headwater.pipelines.register import Owner
from tests.spark import sales_job
from tests.spark.shop import Shop, sums, wait_until
from tests.spark.test_drivers import kill_all
from tests.spark.test_pipelines import shop as shop

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
COPIED = "shop/copied"


def environment(shop: Shop) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "HEADWATER_TEST_SHOP": str(shop.folder)}


def declare(shop: Shop) -> Pipeline:
    return sales_job.declare(shop.store, shop.folder, shop.spark)


@contextmanager
def runner(shop: Shop, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """`headwater pipeline run` in a process; all of it is gone when the block ends."""
    command = [sys.executable, "-m", "headwater", "pipeline", "run", str(ROOT / "tests" / "spark" / "sales_job.py"), *options]
    with (shop.folder / "runner.log").open("ab") as log:
        process = subprocess.Popen(command, cwd=shop.folder, env=environment(shop), stdout=log, stderr=log, start_new_session=True)
    try:
        yield process
    finally:
        kill_all(process)


def copied(shop: Shop) -> list[int]:
    names = shop.store.streams()
    return sorted(event.value["id"] for event in shop.store.stream(COPIED).read()) if COPIED in names else []


def count(shop: Shop) -> int:
    return sum(part.count for part in shop.store.stream(COPIED).ranges()) if COPIED in shop.store.streams() else 0


def wait_for_count(shop: Shop, number: int, process: subprocess.Popen[bytes]) -> None:
    def done() -> bool:
        assert process.poll() is None, (shop.folder / "runner.log").read_text()[-3000:]
        return count(shop) >= number

    wait_until(done, 300.0)


def test_a_standby_takes_over_from_a_runner_that_is_killed_and_ends_well_on_sigterm(shop: Shop) -> None:
    pipeline = declare(shop)
    shop.fill(0, 2000)
    with runner(shop) as first:
        wait_for_count(shop, 300, first)
        with runner(shop, "--standby", "--json") as second:
            taken = pipeline.savepoint("first")
            assert taken.state == "complete"
            wait_for_count(shop, 2000, first)
            shop.fill(2000, 4000)
            wait_for_count(shop, 2500, first)
            kill_all(first)
            wait_for_count(shop, 4000, second)
            wait_until(lambda: shop.table() == sums(range(4000)))
            second.send_signal(signal.SIGTERM)
            assert second.wait(timeout=120) == 0, (shop.folder / "runner.log").read_text()[-3000:]
    assert copied(shop) == list(range(4000)) and shop.table() == sums(range(4000))
    assert pipeline.status()["totals"]["state"] == "stopped"
    # The savepoint is readable with the job gone.
    totals = {row["key"]["item"]: row["value"]["sum"] for row in pipeline.state("totals", savepoint="first").collect()}
    assert set(totals) == set(shop.table())
    shop.check()


@pytest.mark.long
def test_a_runner_that_stood_still_over_the_take_over_stores_nothing(shop: Shop) -> None:
    shop.fill(0, 1000)
    with runner(shop) as zombie:
        wait_for_count(shop, 200, zombie)
        family = [psutil.Process(zombie.pid), *psutil.Process(zombie.pid).children(recursive=True)]
        for process in family:
            process.suspend()
        # It has no beat for 10 s, so this process takes over.
        pipeline = declare(shop)
        pipeline.run(until="caught_up", standby=True)
        assert copied(shop) == list(range(1000)) and shop.table() == sums(range(1000))
        changes = shop.store.stream("shop/totals").tail()
        shop.fill(1000, 1100)
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.resume()
        assert zombie.wait(timeout=300) == 1
    assert "was taken over by" in (shop.folder / "runner.log").read_text()
    assert shop.store.stream("shop/totals").tail() == changes and copied(shop) == list(range(1000))
    pipeline.run(until="caught_up")
    assert copied(shop) == list(range(1100)) and shop.table() == sums(range(1100))
    shop.check()


def kill_at(shop: Shop, step: str, command: str) -> None:
    """Run a command in a process that dies at a step of it."""
    arguments = [sys.executable, "-m", "tests.spark.pipeline_steps", str(shop.folder), step, command]
    with (shop.folder / "steps.log").open("ab") as log:
        process = subprocess.Popen(arguments, cwd=ROOT, env=environment(shop), stdout=log, stderr=log, start_new_session=True)
    try:
        assert process.wait(timeout=240) == -signal.SIGKILL, (shop.folder / "steps.log").read_text()[-3000:]
    finally:
        kill_all(process)


def begin(shop: Shop) -> Pipeline:
    """A pipeline that has processed 300 orders, with a savepoint after 200."""
    pipeline = declare(shop)
    shop.fill(0, 200)
    pipeline.run(until="caught_up")
    pipeline.savepoint("first")
    shop.fill(200, 300)
    pipeline.run(until="caught_up")
    return pipeline


def finish(shop: Shop, pipeline: Pipeline) -> None:
    shop.fill(300, 400)
    pipeline.run(until="caught_up")
    assert copied(shop) == list(range(400)) and shop.table() == sums(range(400))
    shop.check()


@pytest.mark.long
def test_a_crash_after_the_states_snapshot_and_before_the_commit_counts_nothing_twice(shop: Shop) -> None:
    pipeline = declare(shop)
    shop.fill(0, 300)
    kill_at(shop, "foreach.publish<2", "run")
    checkpoint = shop.folder / "checkpoints" / "sales" / "totals" / "1"
    assert (last_batch(checkpoint, "commits"), last_batch(checkpoint, "offsets")) == (0, 1)
    assert (checkpoint / "state" / "0" / "0" / "2.changelog").exists(), "the state of the batch was written"
    pipeline.savepoint("first")
    pipeline.rescale(3)
    shop.fill(300, 400)
    pipeline.run(until="caught_up")
    assert copied(shop) == list(range(400)) and shop.table() == sums(range(400))
    # What the killed batch staged stays open until its lease ends, a day later: no later batch of that generation drops it.
    assert check_store(shop.store).ok


@pytest.mark.long
def test_a_savepoint_that_is_killed_at_any_step_is_whole_or_not_listed(shop: Shop) -> None:
    pipeline = begin(shop)
    for step in ("savepoints.keep@1", "savepoints.copy_checkpoint@1", "savepoints.size_of@1", "savepoints._to_savepoint<1"):
        kill_at(shop, step, "savepoint")
        listed = [savepoint.name for savepoint in pipeline.savepoints()]
        assert listed == (["first", "killed"] if "_to_savepoint" in step else ["first"]), step
    pipeline.drop_savepoint("killed")
    assert [savepoint.name for savepoint in pipeline.savepoints()] == ["first"]
    finish(shop, pipeline)
    assert list(shop.store.kept()) == ["pipeline.sales.first.0"], "what was kept for a savepoint that never was is free"
    assert [path.name for path in (shop.folder / "checkpoints" / "sales" / ".savepoints").iterdir()] == ["first"]


def test_a_take_over_that_is_killed_at_any_step_is_made_again(shop: Shop) -> None:
    pipeline = begin(shop)
    register = pipeline._register
    for step in ("register.Register.put_live@1", "tenure.copy_checkpoint@1", "tenure.copy_checkpoint@2", "tenure.Tenure.swap@1"):
        # A former owner that did not end in order.
        live = register.find_live()
        assert live is not None
        register.put_live(replace(live, owner=Owner("gone", "elsewhere", 1, Owner.of_this_process().place, "0", "then")))
        kill_at(shop, step, "take")
    finish(shop, pipeline)


#: Before the restore is begun nothing has changed; after that it is completed, whoever runs the pipeline next.
RESTORE_STEPS = ("tenure.Tenure.swap@1", "savepoints.unkeep@1", "commands.copy_checkpoint@1", "commands.add_roll_back@2")


@pytest.mark.long
@pytest.mark.parametrize("step", ["commands.check_restore@1", *RESTORE_STEPS, "tenure.Tenure.renumber<1"])
def test_a_restore_that_is_killed_is_completed_or_never_began(shop: Shop, step: str) -> None:
    pipeline = begin(shop)
    pipeline.savepoint("later")
    kill_at(shop, step, "restore")
    for left in shop.store.transactions(only_open=True):
        # The commit that was not made: its lease would end it, too.
        shop.store.resume_transaction(left.id).abort()
    finish(shop, pipeline)
    states = {savepoint.name: savepoint.state for savepoint in pipeline.savepoints()}
    undone = [name for name in shop.store.streams() if ".undone-" in name]
    began = not step.startswith("commands.check")
    assert states["later"] == ("abandoned" if began else "complete") and len(undone) == (1 if began else 0)


@pytest.mark.long
@pytest.mark.parametrize(
    "step",
    ["commands.copy_checkpoint@1", "commands.repartition@1", "tenure.Tenure.swap<1", "tenure.Tenure.swap@1", "tenure.Tenure.release<1"],
)
def test_a_rescale_that_is_killed_leaves_the_old_state_or_the_new_one(shop: Shop, step: str) -> None:
    pipeline = begin(shop)
    kill_at(shop, step, "rescale")
    finish(shop, pipeline)


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_runners_that_are_killed_25_times_between_savepoints_lose_and_repeat_nothing(shop: Shop) -> None:
    seed = int(os.environ.get("HEADWATER_SEED", "1"))
    print(f"seed {seed}")
    rng = random.Random(seed)
    pipeline = declare(shop)
    written = 0
    for kill in range(25 * max(1, int(os.environ.get("HEADWATER_SEEDS", "1")) // 10)):
        shop.fill(written, written + 2000)
        written += 2000
        with runner(shop) as process:
            wait_for_count(shop, count(shop) + rng.randrange(1, 1500), process)
            names = [savepoint.name for savepoint in pipeline.savepoints()]
            if kill % 3 == 0:
                asked = threading.Thread(target=ask, args=(pipeline, f"s{kill}"))
                asked.start()
                time.sleep(rng.random() * 0.5)
                kill_all(process)
                asked.join()
                assert all(name in [savepoint.name for savepoint in pipeline.savepoints()] for name in names)
            else:
                kill_all(process)
    pipeline.run(until="caught_up")
    assert copied(shop) == list(range(written)) and shop.table() == sums(range(written))
    shop.check()


def ask(pipeline: Pipeline, name: str) -> None:
    """Take a savepoint. Where the runner dies meanwhile, it is taken here."""
    with suppress(hw.HeadwaterError):
        pipeline.savepoint(name)


@pytest.mark.long
def test_the_taxi_day_is_right_after_a_restore_and_a_rescale(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "taxi_pipeline.py"), str(tmp_path / "city")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1].endswith("every ride is counted once")
