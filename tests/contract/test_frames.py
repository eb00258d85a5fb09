"""Frames of other libraries, given to `write_batch` as they are: pandas, Polars, DuckDB and nanoarrow, each really installed."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

import duckdb
import nanoarrow
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import headwater as hw
from tests.contract.writing import values

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int32(), nullable=False),
        ("colour", pa.string()),
        ("at", pa.timestamp("us", "UTC")),
        ("price", pa.float64()),
    ]
)
AT = datetime(2024, 2, 29, 1, 2, 3, tzinfo=UTC)
ROWS: list[dict[str, Any]] = [
    {"id": 1, "colour": "red", "at": AT, "price": 1.5},
    {"id": 2, "colour": "a text that is longer than a view holds inline", "at": AT + timedelta(hours=1), "price": None},
    {"id": 3, "colour": None, "at": None, "price": -2.0},
]
#: In another order than the schema's, as people have them.
ORDER = ["price", "at", "id", "colour"]


def as_table() -> pa.Table:
    return pa.Table.from_pylist(ROWS, schema=SCHEMA).select(ORDER)


def as_pandas() -> Any:
    return pd.DataFrame(ROWS)[ORDER]


def as_polars() -> pl.DataFrame:
    return pl.DataFrame(ROWS).select(ORDER)


FRAMES: dict[str, Callable[[], Any]] = {
    "pyarrow table": as_table,
    "pyarrow batch": lambda: as_table().to_batches()[0],
    "pyarrow reader": lambda: as_table().to_reader(),
    "pandas": as_pandas,
    "pandas with text and time as categories": lambda: as_pandas().astype({"colour": "category"}),
    "pandas of arrow": lambda: as_pandas().convert_dtypes(dtype_backend="pyarrow"),
    "polars": as_polars,
    "polars lazy": lambda: as_polars().lazy().filter(pl.col("id") < 10),
    "polars enum": lambda: as_polars().with_columns(pl.col("colour").cast(pl.Enum([row["colour"] for row in ROWS if row["colour"]]))),
    "polars categorical": lambda: as_polars().with_columns(pl.col("colour").cast(pl.Categorical)),
    "polars in another zone": lambda: as_polars().with_columns(pl.col("at").dt.convert_time_zone("Europe/Berlin")),
    "duckdb": lambda: duckdb.connect().from_arrow(as_table()),
    "duckdb query": lambda: duckdb.connect().from_arrow(as_table()).query("t", "SELECT * FROM t WHERE id < 10 ORDER BY id"),
    "nanoarrow array": lambda: nanoarrow.c_array(as_table().to_batches()[0]),
    "nanoarrow stream": lambda: nanoarrow.ArrayStream(as_table()),
}


@pytest.mark.parametrize("make", FRAMES.values(), ids=FRAMES)
def test_a_frame_is_stored_by_the_names_of_its_columns(local_store: hw.Store, make: Callable[[], Any]) -> None:
    stream = local_store.create_stream("a/t", schema=SCHEMA)
    with stream.writer() as writer:
        writer.write_batch(make(), key="id")
    with local_store.transaction() as tx:
        tx.write_batch("a/t", make(), key="colour")
    events = list(stream.read())
    assert [event.value for event in events] == ROWS * 2
    assert [event.key for event in events] == [
        key.encode() if key is not None else None for key in ["1", "2", "3", *(row["colour"] for row in ROWS)]
    ]


def test_a_batch_in_a_named_writer_and_in_a_transaction_fill_a_missing_column_on_demand_only(store: hw.Store) -> None:
    stream = store.create_stream("a/t", schema=SCHEMA)
    frame = as_polars().drop("price", "at")
    with stream.writer("w") as writer, store.transaction() as tx:
        gives: list[Callable[..., Any]] = [writer.write_batch, lambda *args, **more: tx.write_batch("a/t", *args, **more)]
        for give in gives:
            with pytest.raises(hw.InvalidRequestError, match=r"'at' is missing: give.*'price' is missing"):
                give(frame)
            with pytest.raises(hw.InvalidRequestError, match=r"'id' is missing\."):
                give(frame.drop("id"), missing="null")
            give(frame, missing="null")
    assert values(stream) == [row | {"price": None, "at": None} for row in ROWS] * 2


def test_an_index_of_pandas_is_a_column_if_it_has_a_name(local_store: hw.Store) -> None:
    stream = local_store.create_stream("a/t", schema=pa.schema([("id", pa.int64()), ("n", pa.int64())]))
    frame = pd.DataFrame({"id": [7, 8, 9], "n": [1, 2, 3]})
    with stream.writer() as writer:
        # Rows that were filtered keep their places as an index without a name.
        writer.write_batch(frame[frame.n > 1])
        writer.write_batch(frame.set_index("id"), key="id")
        writer.write_batch(frame.set_index(["n", "id"]))
        with pytest.raises(hw.InvalidRequestError, match="column 'place' is not in the stream's schema"):
            writer.write_batch(frame.rename_axis("place").iloc[[0, 2]])
    assert [value["id"] for value in values(stream)] == [8, 9, 7, 8, 9, 7, 8, 9]


def test_whole_numbers_that_pandas_made_floats_of_are_numbers_again(local_store: hw.Store) -> None:
    stream = local_store.create_stream("a/t", schema=pa.schema([("n", pa.int64())]))
    with stream.writer() as writer:
        writer.write_batch(pd.DataFrame({"n": [1, None, 3]}))
        with pytest.raises(hw.InvalidRequestError, match=r"'n' can't be stored as int64: .*1\.5"):
            writer.write_batch(pd.DataFrame({"n": [1.5]}))
    assert [value["n"] for value in values(stream)] == [1, None, 3]


def test_nested_columns_of_polars_are_stored_with_their_enums_and_views(local_store: hw.Store) -> None:
    place = pa.struct([("city", pa.string()), ("names", pa.list_(pa.string()))])
    schema = pa.schema([("tags", pa.list_(pa.string())), ("place", place), ("pair", pa.list_(pa.string(), 2))])
    stream = local_store.create_stream("a/t", schema=schema)
    rows: list[dict[str, Any]] = [
        {"tags": ["left out"], "place": None, "pair": None},
        {"tags": ["red", None], "place": {"city": "x" * 40, "names": ["red"]}, "pair": ["a", "b"]},
        {"tags": [], "place": {"city": None, "names": None}, "pair": ["c" * 20, None]},
        {"tags": None, "place": None, "pair": None},
    ]
    enum = pl.Enum(["red", "left out"])
    kinds: dict[str, Any] = {
        "tags": pl.List(enum),
        "place": pl.Struct({"city": pl.String, "names": pl.List(enum)}),
        "pair": pl.Array(pl.String, 2),
    }
    with stream.writer() as writer:
        writer.write_batch(pl.DataFrame(rows, schema=kinds).slice(1))
    local_store.run_upkeep()
    assert values(stream) == rows[1:]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (pa.array([1 << 40]), pa.int32()),
        (pa.array([-1]), pa.uint8()),
        (pa.array([float("nan")]), pa.int64()),
        (pa.array([2**60 + 1]), pa.float64()),
        (pa.array([0.1]), pa.float32()),
        (pa.array([[0.1], [0.5]]), pa.list_(pa.float32())),
        (pa.array([1e300]), pa.float32()),
        (pa.array([1.55]), pa.decimal128(4, 1)),
        (pa.array([Decimal("1.55")]), pa.decimal128(4, 1)),
        (pa.array([Decimal("1.5")]), pa.int64()),
        (pa.array([Decimal("0.12345678901234567890")]), pa.float64()),
        (pa.array([1], pa.time64("ns")), pa.time64("us")),
        (pa.array([1], pa.timestamp("ns", "UTC")), pa.timestamp("us", "UTC")),
    ],
    ids=str,
)
def test_a_value_that_the_cast_would_change_is_refused(local_store: hw.Store, given: pa.Array, wanted: pa.DataType) -> None:
    stream = local_store.create_stream("a/t", schema=pa.schema([("a", wanted)]))
    with stream.writer() as writer, pytest.raises(hw.InvalidRequestError, match="column 'a' can't be stored as"):
        writer.write_batch(pa.table({"a": given}))
    assert values(stream) == []


@pytest.mark.parametrize(
    ("given", "wanted", "stored"),
    [
        (pa.array([7, None]), pa.uint8(), [7, None]),
        (pa.array([2.0]), pa.int8(), [2]),
        (pa.array([0.5, None, float("inf")]), pa.float32(), [0.5, None, float("inf")]),
        (pa.array([[0.5, None], None]), pa.list_(pa.float32()), [[0.5, None], None]),
        (pa.array([0.1]), pa.decimal128(4, 1), [Decimal("0.1")]),
        (pa.array([Decimal("15")], pa.decimal128(38, 0)), pa.int64(), [15]),
        (pa.array([Decimal("1.5")]), pa.float64(), [1.5]),
        (pa.array([AT], pa.timestamp("us", "Asia/Tokyo")), pa.timestamp("us", "UTC"), [AT]),
        (pa.array([AT]), pa.timestamp("us", "Asia/Tokyo"), [AT.astimezone(ZoneInfo("Asia/Tokyo"))]),
    ],
    ids=str,
)
def test_a_value_that_the_cast_keeps_is_stored(local_store: hw.Store, given: pa.Array, wanted: pa.DataType, stored: list[Any]) -> None:
    stream = local_store.create_stream("a/t", schema=pa.schema([("a", wanted)]))
    with stream.writer() as writer:
        writer.write_batch(pa.table({"a": given}))
    assert [value["a"] for value in values(stream)] == stored


def test_nan_is_no_value_that_a_cast_changes(local_store: hw.Store) -> None:
    stream = local_store.create_stream("a/t", schema=pa.schema([("a", pa.float32()), ("l", pa.list_(pa.float32()))]))
    with stream.writer() as writer:
        writer.write_batch(pa.table({"a": [float("nan")], "l": [[float("nan"), 1.5]]}))
    assert repr(values(stream)) == "[{'a': nan, 'l': [nan, 1.5]}]"


def test_a_column_of_event_times_may_have_any_zone(local_store: hw.Store) -> None:
    stream = local_store.create_stream("a/t", schema=pa.schema([("n", pa.int64())]))
    frame = pl.DataFrame({"n": [1], "_time": [AT]}).with_columns(pl.col("_time").dt.convert_time_zone("Asia/Tokyo"))
    with stream.writer() as writer:
        writer.write_batch(frame)
        writer.write_batch(frame.to_pandas())
    assert [event.time for event in stream.read()] == [AT, AT]
