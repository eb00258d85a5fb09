"""With a session: streaming queries that are in the middle of what is rolled back, or replaced. No event is skipped without an error."""

from __future__ import annotations

import re

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

import headwater as hw
from tests.spark.pipelines import SINK, SOURCE, Lab, finish

KEPT = "t/old"


def _fails(query: StreamingQuery) -> hw.Cut:
    """Wait for a query to fail since its stream was rolled back; returns where it says to read on."""
    with pytest.raises(StreamingQueryException, match="RolledBackError") as caught:
        query.awaitTermination(120)
    assert query.exception() is not None and not query.isActive
    found = re.search(r"option\('start', '(\{.*?\}\}\}\})'\)", str(caught.value))
    assert found is not None, str(caught.value)
    return hw.Cut.parse(found[1])


def test_a_query_past_the_cut_ends_with_the_error_and_its_checkpoint_is_refused_for_good(lab: Lab) -> None:
    stream = lab.create()
    lab.fill(0, 10)
    cut = stream.tail()
    lab.fill(10, 30)
    query = lab.sink(lab.source(), stream=SINK, create="true").start()
    query.processAllAvailable()
    stream.roll_back(cut, keep_as=KEPT, force=True)
    lab.fill(100, 110)
    assert _fails(query) == cut
    stream.split(stream.segments()[0].number)
    lab.fill(110, 120)
    for _ in range(2):
        assert _fails(lab.sink(lab.source(), stream=SINK).trigger(availableNow=True).start()) == cut
    # Nothing that came after was taken for what was rolled back.
    assert sorted(lab.ids()) == list(range(30))
    finish(lab.sink(lab.source(start=str(cut)), "second", stream=SINK))
    assert sorted(lab.ids()) == [*range(30), *range(100, 120)]
    lab.check()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_batch_that_is_under_way_fails_and_is_not_repeated_with_other_events(lab: Lab, when: str) -> None:
    stream = lab.create(segments=1)
    lab.fill(0, 10)
    cut = stream.tail()
    lab.fill(10, 20)
    seen: list[int] = []

    def take(df: DataFrame, batch: int) -> None:
        if batch == 2 and when == "before":
            stream.roll_back(cut, keep_as=KEPT, force=True)
            lab.fill(100, 120)
        seen.extend(row.id for row in df.collect())
        if batch == 2 and when == "after":
            stream.roll_back(cut, keep_as=KEPT, force=True)
            lab.fill(100, 120)

    def start() -> StreamingQuery:
        writer = lab.source(max_events_per_batch=5).writeStream.option("checkpointLocation", str(lab.folder / "c"))
        return writer.foreachBatch(take).start()

    query = start()
    with pytest.raises(StreamingQueryException, match="RolledBackError"):
        query.awaitTermination(120)
    assert seen == list(range(10 if when == "before" else 15))
    # The batch is in Spark's log of offsets, and planned again after a restart.
    assert _fails(start()) == cut
    assert seen == list(range(10 if when == "before" else 15))


def test_a_query_before_the_cut_goes_on_with_what_came_after(lab: Lab) -> None:
    stream = lab.create(segments=1)
    lab.fill(0, 10)
    cut = stream.tail()
    lab.fill(10, 20)
    seen: list[int] = []

    def take(df: DataFrame, batch: int) -> None:
        seen.extend(row.id for row in df.collect())
        if batch == 0:
            stream.roll_back(cut, keep_as=KEPT, force=True)
            lab.fill(100, 110)

    query = lab.source(max_events_per_batch=5).writeStream.option("checkpointLocation", str(lab.folder / "c")).foreachBatch(take).start()
    query.processAllAvailable()
    query.stop()
    assert seen == [*range(10), *range(100, 110)]


def test_a_query_of_a_stream_that_is_replaced_goes_on_from_before_the_fork_and_fails_past_it(lab: Lab) -> None:
    stream = lab.create(segments=1)
    lab.fill(0, 10)
    seen: list[int] = []

    def take(df: DataFrame, batch: int) -> None:
        seen.extend(row.id for row in df.collect())

    def start(name: str) -> StreamingQuery:
        return lab.source().writeStream.option("checkpointLocation", str(lab.folder / name)).foreachBatch(take).start()

    early = start("early")
    early.processAllAvailable()
    early.stop()
    stream.fork("t/green")
    lab.fill(10, 20)
    late = start("late")
    late.processAllAvailable()
    lab.store.replace_stream(SOURCE, by="t/green", keep_as=KEPT)
    lab.fill(100, 105)
    fork = lab.store.advance(lab.store.stream(SOURCE).head(), max_events=10)
    assert _fails(late) == fork
    assert _fails(start("late")) == fork
    seen.clear()
    early = start("early")
    early.processAllAvailable()
    assert seen == list(range(100, 105))
