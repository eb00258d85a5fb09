"""Spark reads a journal: as a DataFrame, as a query that follows, and its history at the JVM's speed."""

from __future__ import annotations

import json
from collections import defaultdict

import pytest
from pyspark.sql import functions as F

import headwater as hw
import headwater.spark
from headwater.model.records import JOURNAL_SCHEMA
from tests.spark.pipelines import Lab, finish

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NAME = "shop/orders"


@pytest.fixture
def journal(lab: Lab) -> hw.Journal:
    return lab.store.journal(NAME, scaling=hw.Scaling.fixed(2))


def fill(journal: hw.Journal, first: int, until: int) -> None:
    """Events of 7 orders, every tenth with a tag."""
    acks = [
        journal.persist_async(f"order-{number % 7}", hw.Record("placed", {"cents": number}, tags=["tenth"] if number % 10 == 0 else []))
        for number in range(first, until)
    ]
    for ack in acks:
        ack.result()


def test_a_journal_is_a_dataframe_whose_data_is_json(lab: Lab, journal: hw.Journal) -> None:
    fill(journal, 0, 100)
    journal.persist("order-0", hw.Record("noted", "ü", meta={"by": "ann"}))
    frame = lab.batch(NAME)
    assert frame.columns == [*JOURNAL_SCHEMA.names, "_key", "_time", "_stream", "_segment", "_number"]
    found = {(row.id, row.sequence): row for row in frame.collect()}
    for event in journal.events():
        row = found.pop((event.id, event.sequence))
        assert (row.type, row.version, json.loads(row.data), tuple(row.tags)) == (event.type, event.version, event.data, event.tags)
        assert (row.event_id, row._segment, row._number) == (str(event.event_id), event.position.segment, event.position.number)
        assert bytes(row._key).decode() == event.id and (row.meta is None) == (event.meta is None)
    assert not found
    cents = frame.where("type = 'placed'").select(F.get_json_object("data", "$.cents").cast("long").alias("cents"))
    assert cents.agg(F.sum("cents")).first() == (sum(range(100)),)
    assert frame.where(F.array_contains("tags", "tenth")).count() == 10
    assert lab.batch(NAME, columns="id,data", where="type = 'noted'").collect() == [("order-0", '"ü"')]


def test_history_of_a_journal_and_its_tail_are_one_table(lab: Lab, journal: hw.Journal) -> None:
    fill(journal, 0, 2000)
    lab.store.run_upkeep()
    assert lab.store.stream(NAME).chunks()
    fill(journal, 2000, 2100)
    whole = headwater.spark.table(lab.spark, lab.store, NAME)
    assert whole.columns == lab.batch(NAME).columns
    cents = whole.select(F.get_json_object("data", "$.cents").cast("long").alias("cents"))
    assert sorted(row.cents for row in cents.collect()) == list(range(2100))
    assert whole.where(F.array_contains("tags", "tenth")).count() == 210
    assert whole.select("event_id").subtract(lab.batch(NAME).select("event_id")).count() == 0


def test_a_query_follows_a_journal_across_splits_and_restarts_exactly_once(lab: Lab, journal: hw.Journal) -> None:
    lab.store.create_stream("shop/copy", schema=JOURNAL_SCHEMA)
    stream = lab.store.stream(NAME)
    for start in range(0, 300, 100):
        fill(journal, start, start + 100)
        source = lab.source(NAME, max_events_per_batch=40)
        rows = source.select(*JOURNAL_SCHEMA.names)
        finish(lab.sink(rows, stream="shop/copy", key="id"))
        stream.split(stream.segments()[0].number)
    found: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for event in lab.store.stream("shop/copy").read():
        found[event.value["id"]].append((event.value["sequence"], event.value["event_id"]))
    assert found == {id: [(event.sequence, str(event.event_id)) for event in journal.replay(id)] for id in journal.ids()}
    lab.check()


def test_spark_does_not_write_a_journal(lab: Lab, journal: hw.Journal) -> None:
    fill(journal, 0, 1)
    rows = lab.batch(NAME).select(*JOURNAL_SCHEMA.names)
    with pytest.raises(Exception, match="of kind 'journal'"):
        rows.write.format("headwater").mode("append").options(**lab.place, stream=NAME, key="id").save()
    assert len(list(journal.events())) == 1
