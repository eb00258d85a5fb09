"""Streams, ranges, tables and journals as frames of other libraries: pyarrow, pandas, Polars, DuckDB and nanoarrow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import duckdb
import nanoarrow
import polars as pl
import pyarrow as pa
import pytest

import headwater as hw
from headwater.model.records import Record

SCHEMA = pa.schema([("n", pa.int64()), ("s", pa.string())])
ROWS = [{"n": n, "s": f"text {n}" if n % 3 else None} for n in range(100)]


@pytest.fixture
def stream(store: hw.Store) -> hw.Stream:
    """Half of it in chunks, half in blocks."""
    stream = store.create_stream("a/stream", schema=SCHEMA, scaling=hw.Scaling.fixed(2))
    with stream.writer() as writer:
        writer.write_batch(pl.DataFrame(ROWS[:50]), key="n")
        writer.flush()
        store.run_upkeep()
        writer.write_batch(pl.DataFrame(ROWS[50:]), key="n")
    return stream


def by_n(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(({name: row[name] for name in ("n", "s")} for row in rows), key=lambda row: int(row["n"]))


READERS: dict[str, Callable[[Any], list[dict[str, Any]]]] = {
    "pyarrow": lambda source: pa.table(source).to_pylist(),
    "pyarrow reader": lambda source: pa.RecordBatchReader.from_stream(source).read_all().to_pylist(),
    "polars": lambda source: pl.DataFrame(source).to_dicts(),
    "duckdb": lambda source: duckdb.sql("FROM source").pl().to_dicts(),
    "duckdb query": lambda source: duckdb.sql("SELECT n, s FROM source WHERE n >= 0").pl().to_dicts(),
    "nanoarrow": lambda source: pa.table(nanoarrow.ArrayStream(source)).to_pylist(),
    "to_polars": lambda source: source.to_polars().to_dicts(),
    "to_pandas": lambda source: pa.Table.from_pandas(source.to_pandas()).to_pylist(),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_a_stream_is_a_frame_for_every_library(stream: hw.Stream, read: Callable[[Any], list[dict[str, Any]]]) -> None:
    assert by_n(read(stream)) == ROWS
    found = [row for item in stream.ranges() for row in read(item)]
    assert by_n(found) == ROWS


def test_a_frame_has_the_columns_of_to_arrow_and_takes_places_and_columns(stream: hw.Stream) -> None:
    assert pa.table(stream).equals(stream.to_arrow())
    middle = stream.tail()
    with stream.writer() as writer:
        writer.write({"n": 100, "s": "last"})
    assert stream.to_polars(middle, columns=["n"]).to_dicts() == [{"n": 100}]
    assert stream.to_pandas(end=middle, columns=["s"]).columns.tolist() == ["s"]
    assert pa.table(stream, schema=stream.to_arrow().schema).num_rows == 101


def test_an_empty_stream_is_a_frame_with_its_columns(store: hw.Store) -> None:
    stream = store.create_stream("a/empty", schema=SCHEMA)
    assert pl.DataFrame(stream).columns == pa.table(stream).column_names == [*SCHEMA.names, "_key", "_time", "_segment", "_number"]
    assert stream.to_pandas().empty


def test_a_stream_is_written_to_another_one_as_it_is(store: hw.Store, stream: hw.Stream) -> None:
    copy = store.create_stream("a/copy", schema=SCHEMA)
    with copy.writer() as writer:
        writer.write_batch(stream)
    with store.transaction() as tx:
        tx.write_batch("a/copy", stream.to_polars())
    original = sorted((event.value["n"], event.key, event.time) for event in stream.read())
    assert sorted((event.value["n"], event.key, event.time) for event in copy.read()) == sorted(original * 2)


def test_a_table_is_a_frame_of_its_present_entries(store: hw.Store) -> None:
    table = store.table("a/table")
    assert pa.table(table).num_rows == 0
    for number in range(1201):  # more than two pages
        table.put(f"k{number:04}", b"%d" % number)
    table.put("k0000", b"again")
    table.remove("k0001")
    entries = table  # noqa: F841 - DuckDB finds it by this name
    expected = [{"key": key, "value": entry.value, "version": entry.version} for key, entry in table.items()]
    assert len(expected) == 1200
    assert pa.table(table).to_pylist() == expected == pl.DataFrame(table).to_dicts() == table.to_polars().to_dicts()
    assert duckdb.sql("SELECT version FROM entries WHERE key = 'k0000'").fetchall() == [(1202,)]
    assert table.to_pandas()["key"].tolist() == [row["key"] for row in expected]


def test_a_journal_is_a_frame_without_its_deleted_events(store: hw.Store) -> None:
    journal = store.journal("a/journal")
    for id in ("one", "two"):
        for number in range(3):
            journal.persist(id, Record("Counted", {"n": number}))
    assert pa.table(journal).num_rows == 6
    journal.delete_to("one", 2)
    expected = [("one", 3), ("two", 1), ("two", 2), ("two", 3)]
    for rows in (pa.table(journal).to_pylist(), pl.DataFrame(journal).to_dicts(), journal.to_polars().to_dicts()):
        assert sorted((row["id"], row["sequence"]) for row in rows) == expected
    assert len(journal.to_pandas()) == 4


def test_what_was_truncated_under_a_frame_is_an_error_and_never_a_gap(store: hw.Store) -> None:
    stream = store.create_stream("a/stream")
    with stream.writer() as writer:
        for number in range(10):
            writer.write(b"%d" % number)
    item = stream.ranges()[0]
    stream.truncate(stream.tail())
    with pytest.raises(hw.TruncatedError):
        item.to_polars()
    with pytest.raises(hw.TruncatedError):
        pa.table(item)
