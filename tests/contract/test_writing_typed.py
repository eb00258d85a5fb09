"""Writing to typed streams: mappings and batches, and what does not fit."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from enum import StrEnum
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import headwater as hw
from tests.contract.writing import WAIT_SECONDS, values


class Colour(StrEnum):
    RED = "red"


TYPED = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        ("name", pa.string()),
        ("price", pa.decimal128(12, 3)),
        ("at", pa.timestamp("us", "UTC")),
        ("day", pa.date32()),
        ("ok", pa.bool_()),
        ("ratio", pa.float64()),
        ("raw", pa.binary()),
        ("tags", pa.list_(pa.string())),
        ("place", pa.struct([("lat", pa.float64()), ("names", pa.list_(pa.struct([("lang", pa.string())])))])),
        ("extra", pa.map_(pa.string(), pa.int64())),
    ]
)
FULL = {
    "id": 1,
    "name": "ü",
    "price": Decimal("12345.678"),
    "at": datetime(2024, 2, 29, 1, 2, 3, 4, tzinfo=UTC),
    "day": date(2024, 2, 29),
    "ok": True,
    "ratio": -0.5,
    "raw": b"\0\xff",
    "tags": ["a", None, ""],
    "place": {"lat": 1.5, "names": [{"lang": "de"}, {"lang": None}]},
    "extra": [("a", 1), ("b", None)],
}
EMPTY = dict.fromkeys(FULL) | {"id": 2}


def test_typed_events_are_written_as_mappings_and_as_batches_and_read_as_both(store: hw.Store) -> None:
    stream = store.create_stream("a/t", schema=TYPED, scaling=hw.Scaling.fixed(2))
    with stream.writer() as writer:
        writer.write(FULL, key="k")
        writer.write({"id": 2}, key="k")
        writer.write({**EMPTY, "extra": {"c": 3}}, key="k")
        writer.write_batch(pa.Table.from_pylist([FULL, EMPTY], schema=TYPED), key="id")
        writer.write_batch(pa.RecordBatch.from_pylist([{"id": 2}], schema=pa.schema([("id", pa.int64())])), missing="null")
    by_key: dict[Any, list[Any]] = {}
    for event in stream.read():
        by_key.setdefault(event.key, []).append(event.value)
    assert by_key == {b"k": [FULL, EMPTY, {**EMPTY, "extra": [("c", 3)]}], b"1": [FULL], b"2": [EMPTY], None: [EMPTY]}
    table = stream.to_arrow()
    assert table.schema.names == [*TYPED.names, "_key", "_time", "_segment", "_number"]
    assert sorted(table.select(TYPED.names).to_pylist(), key=repr) == sorted(
        (value for found in by_key.values() for value in found), key=repr
    )


def test_a_mapping_may_be_changed_once_it_was_given(store: hw.Store) -> None:
    stream = store.create_stream("a/t", schema=pa.schema([("n", pa.int64()), ("list", pa.list_(pa.int64()))]))
    flat = store.create_stream("a/f", schema=pa.schema([("n", pa.int64())]))
    row: dict[str, Any] = {"list": []}
    with stream.writer() as writer, flat.writer() as flat_writer:
        for number in range(500):
            row["n"] = number
            row["list"][:] = [number]
            writer.write(row)
            flat_writer.write({"n": number})
        reused: dict[str, Any] = {}
        for number in range(500, 1000):
            reused["n"] = number
            flat_writer.write(reused)
    assert values(stream) == [{"n": n, "list": [n]} for n in range(500)]
    assert values(flat) == [{"n": n} for n in range(1000)]


def test_a_row_that_does_not_fit_is_refused_at_once_and_alone(local_store: hw.Store) -> None:
    stream = local_store.create_stream("a/t", schema=TYPED)
    wrong: list[Any] = [b"x", "x", None, 7, [("id", 1)], {}, {"id": None}, {"id": "1"}, {"id": 1, "what": 2}, {"id": 1, "price": 1.5}]
    wrong += [{"id": 1, "tags": "abc"}, {"id": 1, "place": {"lat": "x"}}, {"id": 1, "place": [("lat", 1.0)]}, {"id": 1, "extra": [None]}]
    with stream.writer() as writer:
        writer.write({"id": 1, "place": {"lat": 1.0}})
        for row in wrong:
            with pytest.raises(hw.InvalidRequestError):
                writer.write(row)
        writer.write({"id": 2})
    assert [value["id"] for value in values(stream)] == [1, 2]


def test_what_is_nested_is_checked_by_the_call_that_gives_it(local_store: hw.Store) -> None:
    item = pa.field("item", pa.int32(), nullable=False)
    schema = pa.schema([("st", pa.struct([item.with_name("a")])), ("l", pa.list_(item)), ("f", pa.list_(item, 1))])
    stream = local_store.create_stream("a/t", schema=schema)
    good: dict[str, Any] = {"st": {"a": 1}, "l": [1], "f": [1]}
    wrong: list[tuple[dict[str, Any], str]]
    wrong = [({"st": {}}, r"'st\.a'"), ({"st": {"a": None}}, r"'st\.a'"), ({"l": [1, None]}, r"'l\.item'"), ({"f": [None]}, r"'f\.item'")]
    with stream.writer() as writer, local_store.transaction() as tx:
        for row, said in wrong:
            table = pa.Table.from_pylist([good, {"l": None}, row], schema=schema)
            for give in (writer.write, lambda row: tx.write("a/t", row)):
                with pytest.raises(hw.InvalidRequestError, match=f"{said}.*not nullable"):
                    give(row)
            for give_batch in (writer.write_batch, lambda table: tx.write_batch("a/t", table)):
                with pytest.raises(hw.InvalidRequestError, match=f"{said}.*not nullable"):
                    give_batch(table)
                give_batch(table.slice(0, 2))
        with pytest.raises(hw.InvalidRequestError, match=r"no column is called 'st\.zz'"):
            writer.write({"st": {"a": 1, "zz": "lost"}})
        # Lists that are nullable all through, of which one has a null.
        with pytest.raises(hw.InvalidRequestError, match=r"'l\.item' has 1 nulls"):
            writer.write_batch(pa.table({"l": pa.array([[1], [None, 2]], pa.list_(pa.int8()))}), missing="null")
        writer.write_batch(pa.table({"l": pa.array([[1], None], pa.list_(pa.int8()))}), missing="null")
    local_store.run_upkeep()
    assert {repr(value) for value in values(stream)} == {repr(dict.fromkeys(good) | row) for row in (good, {}, {"l": [1]})}


def test_a_row_is_any_mapping_and_its_values_may_be_of_enums_and_numpy(local_store: hw.Store) -> None:
    schema = pa.schema([("id", pa.int64()), ("s", pa.string()), ("st", pa.struct([("f", pa.float64())])), ("l", pa.list_(pa.int64()))])
    stream = local_store.create_stream("a/t", schema=schema)
    row = MappingProxyType({"id": np.int64(5), "s": Colour.RED, "st": MappingProxyType({"f": np.float64(1.5)}), "l": np.array([1, 2])})
    with stream.writer() as writer, local_store.transaction() as tx:
        writer.write(row, key=Colour.RED)
        tx.write("a/t", row, key=np.str_("red"))
    assert [(event.key, event.value) for event in stream.read()] == [(b"red", {"id": 5, "s": "red", "st": {"f": 1.5}, "l": [1, 2]})] * 2


def test_a_batch_in_other_units_is_stored_if_no_digit_is_lost(local_store: hw.Store) -> None:
    schema = pa.schema([("at", pa.timestamp("us", "UTC")), ("took", pa.list_(pa.duration("ms"))), ("sum", pa.decimal128(10, 2))])
    stream = local_store.create_stream("a/t", schema=schema)
    with stream.writer() as writer:
        # As pandas has it.
        nanoseconds = pa.timestamp("ns", "Etc/UTC"), pa.list_(pa.duration("ns")), pa.decimal128(2, 1)
        values = [[1_000, None], [[2_000_000], []], [Decimal("1.5"), None]]
        writer.write_batch(pa.table([pa.array(*item) for item in zip(values, nanoseconds, strict=True)], names=schema.names))
        for name, column in (("at", pa.array([1_001], nanoseconds[0])), ("took", pa.array([[2_000_001]], nanoseconds[1]))):
            with pytest.raises(hw.InvalidRequestError, match=f"column '{name}' can't be stored as .* would lose data"):
                writer.write_batch(pa.table({name: column}), missing="null")
    expected = pa.table([pa.array(*item) for item in zip([[1, None], [[2], []], values[2]], schema.types, strict=True)], schema=schema)
    assert stream.to_arrow(columns=schema.names).equals(expected)


def test_a_batch_that_does_not_fit_is_refused_at_once_and_alone(local_store: hw.Store) -> None:
    stream = local_store.create_stream("a/t", schema=pa.schema([pa.field("id", pa.int64(), nullable=False), ("name", pa.string())]))
    opaque = local_store.create_stream("a/o")
    some = pa.array(["x"])
    wrong: list[tuple[Any, str]] = [
        (pa.table({"name": ["x"]}), "'id' is missing"),
        (pa.table({"id": [1]}), "'name' is missing: give missing=\"null\""),
        (pa.table({"id": [1], "name": some, "other": [2]}), "'other' is not in the stream's schema"),
        (pa.table({"id": ["1"], "name": some}), "'id' is string, not int64"),
        (pa.table({"id": [1.5], "name": some}), "'id' can't be stored as int64: .*truncated"),
        (pa.table({"id": [1, None], "name": ["x", "y"]}), "1 nulls, and is not nullable"),
        (pa.RecordBatch.from_arrays([pa.array([1]), pa.array([2])], names=["id", "id"]), "a column twice"),
        ([{"id": 1}], "Arrow data, .* not list"),
        (None, "not NoneType"),
        (pa.chunked_array([[1]]), "can't be read as Arrow data"),
    ]
    with stream.writer() as writer, opaque.writer() as opaque_writer:
        for given, said in wrong:
            with pytest.raises(hw.InvalidRequestError, match=said):
                writer.write_batch(given)
        with pytest.raises(hw.InvalidRequestError, match="no column 'key'"):
            writer.write_batch(pa.table({"id": [1], "name": some}), key="key")
        with pytest.raises(hw.InvalidRequestError, match="missing is None or \"null\", not 'none'"):
            writer.write_batch(pa.table({"id": [1]}), missing="none")
        with pytest.raises(hw.InvalidRequestError, match="can't be the routing key"):
            writer.write_batch(pa.table({"id": [1], "key": [1.5]}), key="key")
        with pytest.raises(hw.InvalidRequestError, match="'value' is missing"):
            opaque_writer.write_batch(pa.table({"id": [1]}))
        with pytest.raises(hw.InvalidRequestError, match="nulls"):
            opaque_writer.write_batch(pa.table({"value": pa.array([b"x", None])}))
        no_events: tuple[Any, ...] = (7, None, {"value": b"x"}, [b"x"], "\ud800")
        for row in no_events:
            with pytest.raises(hw.InvalidRequestError):
                opaque_writer.write(row)
        writer.write_batch(pa.table({"id": pa.array([7], pa.int8()), "name": pa.array([None], pa.null())}))
    assert values(stream) == [{"id": 7, "name": None}] and values(opaque) == []


def test_sliced_and_chunked_tables_are_stored_as_they_read(wide: hw.Stream) -> None:
    rows = [b"%d" % n for n in range(100)]
    table = pa.concat_tables([pa.table({"value": rows[:33], "id": range(33)}), pa.table({"value": rows[33:], "id": range(33, 100)})])
    with wide.writer() as writer:
        ack = writer.write_batch(table.slice(10, 50), key="id")
        assert sum(item.count for item in ack.result(WAIT_SECONDS)) == 50
        assert writer.write_batch(table.slice(0, 0), key="id").result(WAIT_SECONDS) == []
    assert sorted(values(wide)) == sorted(rows[10:60])
    assert all(event.key == event.value for event in wide.read())
