"""Without a session: which columns are read of streams that differ, and of types that Spark lacks."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headwater as hw
from headwater.spark.options import read_source_options
from headwater.spark.source import BatchReader, source_schema


@pytest.fixture
def store(tmp_path: Path) -> Iterator[hw.Store]:
    with hw.open(tmp_path / "store", upkeep=False) as store:
        yield store


def create(store: hw.Store, name: str, *rows: dict[str, Any], **columns: pa.DataType) -> None:
    stream = store.create_stream(name, schema=pa.schema(list(columns.items())))
    with stream.writer() as writer:
        for row in rows:
            writer.write(row)


def read(store: hw.Store, streams: str, **options: str) -> list[dict[str, Any]]:
    """The rows, as tasks read them."""
    chosen = read_source_options({"store": store.url, "streams": streams, **options})
    reader = BatchReader(chosen, source_schema(chosen))
    return [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]


def test_a_stream_without_the_columns_that_are_asked_for_has_rows_of_nulls(store: hw.Store) -> None:
    create(store, "t/a", {"id": 1, "price": 2.0}, {"id": 2, "price": 4.0}, id=pa.int64(), price=pa.float64())
    create(store, "t/b", {"id": 3}, id=pa.int64())
    assert read(store, "t/a,t/b", columns="price") == [{"price": 2.0}, {"price": 4.0}, {"price": None}]
    assert read(store, "t/a,t/b", columns="id", where="price > 3") == [{"id": 2}]
    assert read(store, "t/a,t/b", columns="id", where="price IS NULL") == [{"id": 3}]


def test_columns_that_are_left_out_may_differ_or_be_of_a_type_that_spark_lacks(store: hw.Store) -> None:
    create(store, "t/a", {"id": 1, "p": 2.0}, id=pa.int64(), p=pa.float64())
    create(store, "t/b", {"id": 2, "p": "x"}, id=pa.int64(), p=pa.string())
    create(store, "t/c", {"id": 3, "p": None}, id=pa.int64(), p=pa.decimal256(50, 2))
    assert read(store, "t/a,t/b,t/c", columns="id", where="id > 1") == [{"id": 2}, {"id": 3}]
    with pytest.raises(hw.InvalidRequestError, match="leave the column out"):
        read(store, "t/a,t/b")
    with pytest.raises(hw.InvalidRequestError, match="leave the column out"):
        read(store, "t/c", columns="id,p")


def test_nanoseconds_are_cut_off_also_where_they_are_nested(store: hw.Store) -> None:
    stamp, span = pa.timestamp("ns"), pa.duration("ns")
    kinds = {"flat": stamp, "list": pa.list_(stamp), "struct": pa.struct([("t", stamp)]), "map": pa.map_(pa.string(), span)}
    stream = store.create_stream("t/a", schema=pa.schema(list(kinds.items())))
    values = {"flat": [1001], "list": [[1001]], "struct": [{"t": 1001}], "map": [[("a", 1001)]]}
    with stream.writer() as writer:
        writer.write_batch(pa.table({name: pa.array(values[name], kind) for name, kind in kinds.items()}))
    time = datetime(1970, 1, 1, microsecond=1)
    expected = {"flat": time, "list": [time], "struct": {"t": time}, "map": [("a", timedelta(microseconds=1))]}
    assert read(store, "t/a", columns="flat,list,struct,map") == [expected]
