"""Without a session: a reader of micro-batches, as Spark calls it, whose stream is truncated while it reads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headwater as hw
from headwater.spark.options import read_source_options
from headwater.spark.source import StreamReader, source_schema
from tests.spark.pipelines import SCHEMA, SOURCE, fill


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


def open_reader(store: hw.Store, readers: list[StreamReader], **options: str) -> StreamReader:
    chosen = read_source_options({"store": store.url, "stream": SOURCE, **options})
    readers.append(StreamReader(chosen, source_schema(chosen)))
    return readers[-1]


def offset(cut: hw.Cut) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(str(cut))
    return found


def plan(reader: StreamReader, start: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """(where the next batch ends, its partitions), as Spark asks for them."""
    end = reader.latestOffset(start, reader.getDefaultReadLimit())
    return end, reader.partitions(start, end)


def ids(reader: StreamReader, partitions: list[Any]) -> list[int]:
    tables = [pa.Table.from_batches([batch]) for part in partitions for batch in reader.read(part)]
    return [row["id"] for table in tables for row in table.to_pylist()]


def test_a_group_waits_for_a_query_that_is_before_the_head_and_follows_it_again(store: hw.Store, readers: list[StreamReader]) -> None:
    stream = store.stream(SOURCE)
    fill(store, 0, 20)
    store.reader_group("g", [SOURCE])
    reader = open_reader(store, readers, group="g", max_events_per_batch="5")
    at, partitions = plan(reader, offset(stream.head()))
    stream.truncate(stream.tail())
    reader.commit(at)  # Before the head by now.
    seen = ids(reader, partitions)
    while (found := plan(reader, at))[0] != at:
        seen += ids(reader, found[1])
        at = found[0]
        reader.commit(at)
    assert sorted(seen) == list(range(20))
    assert store.reader_group("g").lag().events == 0
    fill(store, 20, 25)
    assert store.reader_group("g").lag().events == 5


def test_what_a_batch_reads_is_held_from_when_it_is_planned(store: hw.Store, readers: list[StreamReader]) -> None:
    stream = store.stream(SOURCE)
    fill(store, 0, 5)
    reader = open_reader(store, readers)
    at, _ = plan(reader, offset(stream.head()))
    fill(store, 5, 10)
    _, partitions = plan(reader, at)
    stream.truncate(stream.tail())
    store.run_upkeep()
    assert ids(reader, partitions) == list(range(5, 10))


def test_a_batch_that_is_repeated_after_a_restart_is_held_too(store: hw.Store, readers: list[StreamReader]) -> None:
    stream = store.stream(SOURCE)
    fill(store, 0, 10)
    reader = open_reader(store, readers)
    # Spark knows its offsets from the checkpoint, and does not look for new ones first.
    partitions = reader.partitions(offset(stream.head()), offset(stream.tail()))
    stream.truncate(stream.tail())
    store.run_upkeep()
    assert ids(reader, partitions) == list(range(10))


def test_what_is_held_is_not_skipped_and_comes_within_the_limit(store: hw.Store, readers: list[StreamReader]) -> None:
    stream = store.stream(SOURCE)
    fill(store, 0, 20)
    reader = open_reader(store, readers, max_events_per_batch="5", on_truncation="skip")
    at, partitions = plan(reader, offset(stream.head()))
    stream.truncate(stream.tail())
    batches = [ids(reader, partitions)]
    for _ in range(3):
        at, partitions = plan(reader, at)
        batches.append(ids(reader, partitions))
    assert batches == [[*range(first, first + 5)] for first in (0, 5, 10, 15)]
    assert plan(reader, at)[0] == at
