"""Spark reads the changes of a table and the values of a revisioned stream, in batches, in micro-batches and out of Parquet files."""

from __future__ import annotations

import pytest
from pyspark.sql import DataFrame

import headwater as hw
import headwater.spark
from tests.spark.pipelines import Lab, finish

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TABLE, LOG, COPY = "shop/prices", "shop/log", "shop/copy"
Change = tuple[str, bytes | None]


@pytest.fixture
def table(lab: Lab) -> hw.Table:
    return lab.store.table(TABLE)


def change(table: hw.Table, first: int, until: int) -> list[Change]:
    """Put or remove one of seven keys for each number; return the changes in order."""
    made: list[Change] = []
    for number in range(first, until):
        key, value = f"item-{number % 7}", None if number % 5 == 4 else b"%d" % number
        if value is None:
            table.remove(key)
        else:
            table.put(key, value)
        made.append((key, value))
    return made


def changes_in(rows: DataFrame) -> list[Change]:
    """The changes of a DataFrame in the order of their numbers; each has its entry's key as its routing key."""
    found = []
    for row in rows.orderBy("_number").collect():
        assert bytes(row._key).decode() == row.key
        found.append((row.key, None if row.value is None else bytes(row.value)))
    return found


def test_the_changes_of_a_table_are_rows(lab: Lab, table: hw.Table) -> None:
    expected = change(table, 0, 20)
    assert changes_in(lab.batch(TABLE)) == expected
    lab.store.run_upkeep()
    assert lab.store.stream(TABLE).chunks()
    middle = lab.store.stream(TABLE).tail()
    expected += change(table, 20, 30)
    assert changes_in(lab.batch(TABLE)) == expected
    assert changes_in(lab.batch(TABLE, start=str(middle))) == expected[20:]
    assert changes_in(lab.batch(TABLE, where="key = 'item-3' AND value IS NULL")) == [item for item in expected if item == ("item-3", None)]
    assert changes_in(headwater.spark.table(lab.spark, lab.store, TABLE)) == expected


def test_the_values_of_a_revisioned_stream_are_rows(lab: Lab) -> None:
    log = lab.store.revisioned(LOG)
    for number in range(10):
        log.append(b"%d" % number)
    lab.store.run_upkeep()
    for number in range(10, 15):
        log.append(b"%d" % number)
    for rows in (lab.batch(LOG), headwater.spark.table(lab.spark, lab.store, LOG)):
        found = [(row._number, bytes(row.value), row._key) for row in rows.orderBy("_number").collect()]
        assert found == [(number, b"%d" % number, None) for number in range(15)]


def test_a_query_follows_a_table_across_restarts_exactly_once(lab: Lab, table: hw.Table) -> None:
    lab.store.reader_group("watchers", [TABLE])
    expected: list[Change] = []
    for start in range(0, 60, 20):
        expected += change(table, start, start + 20)
        source = lab.source(TABLE, max_events_per_batch=7, group="watchers")
        finish(lab.sink(source, stream=COPY, create="true"))
        lab.store.run_upkeep()
    found = [(event.value["key"], event.value["value"]) for event in lab.store.stream(COPY).read()]
    assert found == expected
    assert lab.store.reader_group("watchers").lag().events <= 7, "it follows when the next batch begins"
    lab.check()


def test_a_query_follows_a_revisioned_stream_across_restarts_exactly_once(lab: Lab) -> None:
    log = lab.store.revisioned(LOG)
    for start in range(0, 30, 10):
        for number in range(start, start + 10):
            log.append(b"%d" % number)
        finish(lab.sink(lab.source(LOG, max_events_per_batch=4), stream=COPY, create="true"))
    assert [event.value for event in lab.store.stream(COPY).read()] == [b"%d" % number for number in range(30)]
    lab.check()


@pytest.mark.parametrize("name", [TABLE, LOG])
def test_spark_does_not_append_to_a_table_s_changes_or_a_revisioned_stream(lab: Lab, table: hw.Table, name: str) -> None:
    lab.store.revisioned(LOG)
    table.put("key", b"value")
    rows = lab.batch(TABLE).select("value")
    with pytest.raises(Exception, match=r"of kind '(table|revisioned)': Spark writes to streams of events"):
        rows.write.format("headwater").mode("append").options(**lab.place, stream=name).save()
    assert len(list(lab.store.stream(name).read())) == (name == TABLE)
