"""Whole drivers, killed at random: JVM and Python at once, and their workers left to find out."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from pyspark.sql import SparkSession

import headwater as hw
from headwater.check import check_store
from tests.spark.driver import COUNTS
from tests.spark.pipelines import SCHEMA, SINK, SOURCE, Lab, check_order, fill, finish

pytestmark = [pytest.mark.slow]
ROOT = Path(__file__).parents[2]


@contextmanager
def driver(store: hw.Store, folder: Path, *arguments: str, program: str = "tests.spark.driver") -> Iterator[subprocess.Popen[bytes]]:
    """A driver that runs; all its processes are gone when the block ends."""
    command = [sys.executable, "-m", program, store.url, str(folder), *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with (folder / "driver.log").open("ab") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        yield process
    finally:
        kill_all(process)


def kill_all(process: subprocess.Popen[bytes]) -> None:
    """Kill a driver: its Python and its JVM at the same moment, then whatever workers are still there."""
    family: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        parent = psutil.Process(process.pid)
        family = parent.children(recursive=True)
        family.sort(key=lambda child: "java" not in child.name())
        parent.kill()
    for child in family:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    process.wait()


def kill_drivers(tmp_path: Path, kills: int, seed: int, *what: str, session: SparkSession | None = None) -> None:
    """Kill drivers; then a last one, or this session, does the rest."""
    rng = random.Random(seed)
    print(f"seed {seed}")
    with hw.open(tmp_path / "store", upkeep=False) as store:
        store.create_stream(SOURCE, schema=SCHEMA, scaling=hw.Scaling.fixed(2))
        sink = store.create_stream(SINK, schema=SCHEMA, scaling=hw.Scaling.fixed(2))
        written = 0
        for kill in range(kills):
            fill(store, written, written + 3000)
            written += 3000
            if kill % 3 == 1:
                busiest = max(sink.segments(), key=lambda segment: segment.end - segment.start)
                sink.split(busiest.number)
                store.run_upkeep()
            reached = sum(part.count for part in sink.ranges()) + rng.randrange(1, 2500)
            with driver(store, tmp_path, *what) as process:
                while sum(part.count for part in sink.ranges()) < reached:
                    assert process.poll() is None, (tmp_path / "driver.log").read_text()[-3000:]
                    time.sleep(0.005)
                time.sleep(rng.random() * 0.3)
                kill_all(process)
        if session is not None:
            lab = Lab(session, store, tmp_path)
            finish(lab.sink(lab.source(), "copy", stream=SINK))
        else:
            with driver(store, tmp_path, "end", *what) as process:
                assert process.wait() == 0, (tmp_path / "driver.log").read_text()[-3000:]
        events = list(sink.read())
        assert sorted(event.value["id"] for event in events) == list(range(written))
        check_order(events)
        if "counts" in what:
            counts = {key: entry.value for key, entry in store.table(COUNTS).items()}
            assert counts == {f"n{name}": b'{"n":%d}' % len(range(name, written, 7)) for name in range(7)}
        report = check_store(store)
        assert report.ok, report.problems
        assert store.transactions(only_open=True) == []


@pytest.mark.timeout(600)
def test_a_driver_that_is_killed_loses_and_repeats_nothing(spark: SparkSession, tmp_path: Path) -> None:
    kill_drivers(tmp_path, 1, 1, session=spark)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_driver_that_is_killed_twenty_times_loses_and_repeats_nothing(tmp_path: Path) -> None:
    # With one seed: twenty drivers take a quarter of an hour to start.
    kill_drivers(tmp_path, 20, 1, "counts")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_an_executor_that_is_killed_while_it_stages_leaves_nothing(tmp_path: Path) -> None:
    with hw.open(tmp_path / "store", upkeep=False) as store:
        store.create_stream(SOURCE, schema=SCHEMA, scaling=hw.Scaling.fixed(2))
        sink = store.create_stream(SINK, schema=SCHEMA, scaling=hw.Scaling.fixed(2))
        fill(store, 0, 8000)
        with driver(store, tmp_path, program="tests.spark.executors") as process:
            assert process.wait() == 0, (tmp_path / "driver.log").read_text()[-3000:]
        assert (tmp_path / "attempt-0-1").exists(), "no executor was lost"
        events = list(sink.read())
        assert sorted(event.value["id"] for event in events) == list(range(8000))
        check_order(events)
        assert store.transactions(only_open=True) == []
