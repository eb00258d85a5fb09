"""Without a session: a reader of micro-batches, as Spark calls it, whose stream is rolled back or replaced while it reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import headwater as hw
from headwater.spark.source import StreamReader
from tests.spark.pipelines import SCHEMA, SOURCE, fill
from tests.spark.test_truncation import ids, offset, open_reader, plan


@pytest.fixture
def store(tmp_path: Path) -> Iterator[hw.Store]:
    with hw.open(tmp_path / "store", upkeep=False) as store:
        store.create_stream(SOURCE, schema=SCHEMA)
        yield store


@pytest.fixture
def readers() -> Iterator[list[StreamReader]]:
    made: list[StreamReader] = []
    yield made
    for reader in made:
        reader.stop()


def test_a_query_past_the_cut_fails_for_good_and_one_before_it_goes_on(store: hw.Store, readers: list[StreamReader]) -> None:
    stream = store.stream(SOURCE)
    fill(store, 0, 10)
    cut = stream.tail()
    fill(store, 10, 20)
    past, before = open_reader(store, readers), open_reader(store, readers, max_events_per_batch="5")
    head = offset(stream.head())
    at, _ = plan(past, head)
    early, partitions = plan(before, head)
    stream.roll_back(cut, keep_as="spark/old", force=True)
    fill(store, 100, 103)
    for _ in range(2):
        with pytest.raises(hw.RolledBackError) as caught:
            past.latestOffset(at, past.getDefaultReadLimit())
        assert caught.value.cut == cut
        # A batch that is repeated after a restart, too.
        with pytest.raises(hw.RolledBackError):
            past.partitions(head, at)
    seen = ids(before, partitions)
    while (found := plan(before, early))[0] != early:
        seen += ids(before, found[1])
        early = found[0]
    assert sorted(seen) == [*range(10), 100, 101, 102]


def test_partitions_that_were_planned_before_a_roll_back_end_at_the_cut_with_an_error(store: hw.Store, readers: list[StreamReader]) -> None:
    stream = store.stream(SOURCE)
    fill(store, 0, 10)
    cut = stream.tail()
    fill(store, 10, 20)
    reader = open_reader(store, readers)
    _, partitions = plan(reader, offset(stream.head()))
    stream.roll_back(cut, keep_as="spark/old", force=True)
    with pytest.raises(hw.RolledBackError):
        ids(reader, partitions)


def test_a_query_goes_on_in_the_fork_that_took_the_name_from_before_the_fork(store: hw.Store, readers: list[StreamReader]) -> None:
    stream = store.stream(SOURCE)
    fill(store, 0, 10)
    reader, late = open_reader(store, readers), open_reader(store, readers)
    at, _ = plan(reader, offset(stream.head()))
    stream.fork("spark/green")
    fill(store, 10, 20)
    past, _ = plan(late, at)
    store.replace_stream(SOURCE, by="spark/green", keep_as="spark/blue")
    fill(store, 100, 105)
    _, partitions = plan(reader, at)
    assert sorted(ids(reader, partitions)) == list(range(100, 105))
    with pytest.raises(hw.RolledBackError):
        late.latestOffset(past, late.getDefaultReadLimit())
