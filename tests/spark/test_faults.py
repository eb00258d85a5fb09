"""Exactly once whatever dies: processes killed at each step around the commit, tasks that fail or run twice, drivers killed at random."""

from __future__ import annotations

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql.streaming.readwriter import DataStreamWriter

from tests.spark.faulty import OPTION, FaultyDataSource, plant
from tests.spark.pipelines import SINK, Lab, check_order, finish

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

#: What follows after a batch's tasks are done, in order. At each of these the process that commits is killed.
STEPS = ("commit:before", "commit:adopt.applied", "commit:adopt.committed", "commit:txn.applied", "commit:txn.committed", "commit-after")
AROUND = ("commit:txn.applied", "commit:txn.committed")
#: Enough in one batch that tasks stage it, and not in their messages.
LARGE = 4000


def faulty(lab: Lab, **options: str) -> DataStreamWriter:
    """Copies SOURCE to SINK, in several partitions, through the sink with faults."""
    source = lab.source(partition_bytes="30000", **options).selectExpr("id", "concat(name, repeat('.', 300)) AS name", "_key")
    writer = lab.sink(source, stream=SINK, **{OPTION: str(lab.folder / "faults")})
    return writer.format("faulty")


@pytest.fixture
def two_streams(lab: Lab) -> Lab:
    lab.spark.dataSource.register(FaultyDataSource)
    lab.create()
    lab.create(SINK)
    return lab


@pytest.mark.parametrize(
    ("count", "steps"),
    [
        pytest.param(50, AROUND[1:], id="in the message"),
        pytest.param(LARGE, AROUND, id="staged"),
        pytest.param(LARGE, STEPS, id="at every step", marks=pytest.mark.long),
    ],
)
def test_a_process_killed_around_the_commit_neither_loses_nor_repeats(two_streams: Lab, count: int, steps: tuple[str, ...]) -> None:
    lab = two_streams
    expected = 0
    for step in steps:
        lab.fill(expected, expected + count)
        expected += count
        plant(lab.folder / "faults", step)
        with pytest.raises(StreamingQueryException):
            finish(faulty(lab))
        assert len(lab.ids()) in (expected - count, expected), f"{step}: a batch is visible whole or not at all"
        finish(faulty(lab))
        assert sorted(lab.ids()) == list(range(expected)), step
        assert list((lab.folder / "faults").iterdir()) == [], f"{step} was never reached"
    check_order(lab.store.stream(SINK).read())
    lab.check()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("fault", ["error", "kill-task", "twice", pytest.param("slow", marks=pytest.mark.long)])
def test_attempts_that_do_not_count_leave_nothing(two_streams: Lab, fault: str) -> None:
    lab = two_streams
    lab.fill(0, LARGE)
    plant(lab.folder / "faults", fault)
    finish(faulty(lab))
    assert sorted(lab.ids()) == list(range(LARGE))
    check_order(lab.store.stream(SINK).read())
    assert list((lab.folder / "faults").iterdir()) == []
    lab.check()
