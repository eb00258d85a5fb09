"""Schemas: which are allowed, how they may change, which batches fit, and what Python gets of them."""

from __future__ import annotations

import re
from typing import Any

import pyarrow as pa
import pytest

from headwater.errors import InvalidRequestError
from headwater.model.fitting import check_frame_schema
from headwater.model.limits import NESTED_TYPES
from headwater.model.schemas import OPAQUE, check_schema, evolve, is_opaque, python_schema, upgrade


def nested(depth: int) -> pa.DataType:
    kind = pa.int8()
    for _ in range(depth):
        kind = pa.map_(pa.string(), kind)
    return kind


UUID = {"ARROW:extension:name": "arrow.uuid", "ARROW:extension:metadata": ""}

FLAT = [
    pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64(), pa.float32(),
    pa.float64(), pa.decimal128(10, 2), pa.decimal256(50, 3), pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.binary(4),
    pa.date32(), pa.date64(), pa.time32("ms"), pa.time64("us"), pa.timestamp("us"), pa.timestamp("ms", "UTC"),
    pa.timestamp("us", "Europe/Berlin"),
    pa.duration("us"), pa.float16(), pa.timestamp("s", "UTC"), pa.timestamp("ns"), pa.time32("s"), pa.time64("ns"), pa.duration("s"),
    pa.duration("ns"),
]  # fmt: skip
NESTED = [
    pa.list_(pa.int64()),
    pa.large_list(pa.string()),
    pa.list_(pa.int32(), 2),
    pa.struct([("a", pa.int64()), ("b", pa.list_(pa.string()))]),
    pa.map_(pa.string(), pa.struct([("x", pa.decimal128(5, 1))])),
    pa.list_(pa.struct([("m", pa.map_(pa.int64(), pa.binary()))])),
    pa.struct([pa.field("a", pa.int64(), nullable=False), ("b", pa.list_(pa.field("item", pa.timestamp("us", "UTC"), nullable=False), 1))]),
    pa.map_(pa.string(), pa.field("value", pa.date32(), nullable=False)),
    nested(NESTED_TYPES),
]


@pytest.mark.parametrize("kind", FLAT + NESTED, ids=str)
def test_a_stream_may_have_columns_of_these_types(kind: pa.DataType) -> None:
    schema = pa.schema([pa.field("a", kind)], metadata={"made": "elsewhere"})
    assert check_schema(schema).equals(schema)
    assert check_schema(schema).metadata is None


@pytest.mark.parametrize(
    "schema",
    [
        pa.schema([]),
        pa.schema([("_key", pa.binary())]),
        pa.schema([("_mine", pa.int64())]),
        pa.schema([("a", pa.int64()), ("a", pa.string())]),
        pa.schema([("a", pa.null())]),
        pa.schema([("a", pa.dictionary(pa.int8(), pa.string()))]),
        pa.schema([("a", pa.list_(pa.dictionary(pa.int8(), pa.string())))]),
        pa.schema([("a", pa.struct([("b", pa.null())]))]),
        pa.schema([("a", pa.map_(pa.string(), pa.null()))]),
        pa.schema([("a", pa.string_view())]),
        pa.schema([("a", pa.dense_union([pa.field("x", pa.int64())]))]),
        pa.schema([("a", pa.uuid())]),
        pa.schema([("a", pa.struct([("b", pa.int64()), ("b", pa.string())]))]),
        pa.schema([("a", pa.timestamp("us", "Nowhere/X"))]),
        pa.schema([("a", pa.map_(pa.string(), pa.list_(pa.timestamp("ns", "Europe"))))]),
        {"a": "int64"},
        "a: int64",
    ],
    ids=str,
)
def test_other_schemas_are_refused(schema: Any) -> None:
    with pytest.raises(InvalidRequestError):
        check_schema(schema)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (pa.binary(0), "fixed_size_binary[0] have the size 0"),
        (pa.list_(pa.int32(), 0), "have the size 0"),
        (pa.decimal128(5, -2), "the scale of decimal128(5, -2) is not from 0 to its precision"),
        (pa.decimal256(5, -2), "the scale of decimal256(5, -2)"),
        (pa.decimal32(2, 4), "the scale of decimal32(2, 4)"),
        (nested(NESTED_TYPES), "nested 30 deep"),
        (nested(400), "nested 30 deep"),
        (pa.struct([pa.field("u", pa.binary(16), metadata=UUID)]), "stored as another one"),
        (pa.struct([pa.field(b"\xff", pa.int8())]), "not UTF-8"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_types_that_blocks_or_chunks_can_not_hold_are_refused_with_the_reason(kind: pa.DataType, said: str) -> None:
    for outer in (pa.list_(kind), pa.list_(kind, 2), pa.struct([("x", kind)]), pa.map_(pa.string(), kind), pa.large_list(pa.list_(kind))):
        new = pa.schema([("a", pa.int64()), ("b", outer)])
        for check in (check_schema, lambda schema: evolve(pa.schema([("a", pa.int64())]), schema)):
            with pytest.raises(InvalidRequestError, match=re.escape(said)):
                check(new)


def test_a_stream_is_opaque_only_with_the_one_schema() -> None:
    assert is_opaque(OPAQUE)
    assert not is_opaque(pa.schema([("value", pa.binary())]))
    assert not is_opaque(pa.schema([pa.field("value", pa.string(), nullable=False)]))


WIDER = [
    (pa.int8(), pa.int16()),
    (pa.int32(), pa.int64()),
    (pa.uint8(), pa.uint64()),
    (pa.uint32(), pa.int64()),
    (pa.float32(), pa.float64()),
    (pa.decimal128(10, 2), pa.decimal128(20, 2)),
    (pa.decimal128(10, 2), pa.decimal256(40, 2)),
    (pa.string(), pa.large_string()),
    (pa.binary(), pa.large_binary()),
]


@pytest.mark.parametrize(("old", "new"), WIDER, ids=str)
def test_types_may_be_widened_and_not_narrowed(old: pa.DataType, new: pa.DataType) -> None:
    first, second = pa.schema([("a", old)]), pa.schema([("a", new)])
    assert evolve(first, second).equals(second)
    with pytest.raises(InvalidRequestError, match="goes from"):
        evolve(second, first)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (pa.int64(), pa.float64()),
        (pa.int64(), pa.string()),
        (pa.int64(), pa.uint64()),
        (pa.uint32(), pa.int32()),
        (pa.decimal128(10, 2), pa.decimal128(10, 3)),
        (pa.timestamp("us"), pa.timestamp("us", "UTC")),
        (pa.string(), pa.binary()),
        (pa.list_(pa.int32()), pa.list_(pa.int64())),
        (pa.struct([("a", pa.int64())]), pa.struct([("a", pa.int64()), ("b", pa.int64())])),
    ],
    ids=str,
)
def test_other_changes_of_type_are_refused_with_both_schemas(old: pa.DataType, new: pa.DataType) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        evolve(pa.schema([("a", old)]), pa.schema([("a", new)]))
    assert f"in use:\n  pyarrow.Field<a: {old}>" in str(caught.value)
    assert f"asked for:\n  pyarrow.Field<a: {new}>" in str(caught.value)


def test_every_reason_for_a_refusal_is_named() -> None:
    old = pa.schema([("kept", pa.int64()), ("lost", pa.int64()), ("opt", pa.int64())])
    new = pa.schema([("kept", pa.string()), pa.field("opt", pa.int64(), nullable=False), pa.field("must", pa.int64(), nullable=False)])
    with pytest.raises(InvalidRequestError) as caught:
        evolve(old, new)
    for part in ("'lost' is missing", "'kept' goes from", "'opt' is no longer nullable", "'must' is not nullable"):
        assert part in str(caught.value)


def test_an_opaque_stream_stays_opaque() -> None:
    with pytest.raises(InvalidRequestError, match="stays opaque"):
        evolve(OPAQUE, OPAQUE.append(pa.field("more", pa.int64())))


def test_an_older_batch_is_read_with_the_newer_schema() -> None:
    old = pa.RecordBatch.from_pylist([{"a": 1, "b": "x"}, {"a": None, "b": "y"}], schema=pa.schema([("a", pa.int32()), ("b", pa.string())]))
    new = pa.schema([("c", pa.list_(pa.int64())), ("b", pa.large_string()), ("a", pa.int64())])
    assert upgrade(old, evolve(old.schema, new)).to_pylist() == [{"c": None, "b": "x", "a": 1}, {"c": None, "b": "y", "a": None}]


@pytest.mark.parametrize(
    ("given_type", "wanted", "fits"),
    [
        (pa.int32(), pa.int64(), True),
        (pa.int64(), pa.int32(), True),
        (pa.null(), pa.int32(), True),
        (pa.dictionary(pa.int8(), pa.string()), pa.string(), True),
        (pa.string_view(), pa.string(), True),
        (pa.string(), pa.binary(), True),
        (pa.binary(), pa.string(), False),
        (pa.timestamp("ms", "UTC"), pa.timestamp("us", "UTC"), True),
        (pa.timestamp("ns", "UTC"), pa.timestamp("us", "UTC"), True),
        (pa.timestamp("us", "+00:00"), pa.timestamp("us", "UTC"), True),
        (pa.timestamp("us", "Etc/UTC"), pa.timestamp("us", "UTC"), True),
        (pa.timestamp("us", "Europe/Paris"), pa.timestamp("us", "UTC"), True),
        (pa.duration("ns"), pa.duration("us"), True),
        (pa.decimal128(2, 1), pa.decimal128(10, 2), True),
        (pa.decimal128(10, 1), pa.decimal256(40, 1), True),
        (pa.decimal128(10, 2), pa.decimal128(10, 1), True),
        (pa.decimal128(10, 1), pa.decimal128(10, 2), True),
        (pa.timestamp("us"), pa.timestamp("us", "UTC"), False),
        (pa.list_(pa.int32()), pa.large_list(pa.int64()), True),
        (pa.struct([("a", pa.int32())]), pa.struct([("a", pa.int64())]), True),
        (pa.struct([("b", pa.int32())]), pa.struct([("a", pa.int64())]), False),
        (pa.map_(pa.string(), pa.int8()), pa.map_(pa.string(), pa.int64()), True),
        (pa.float64(), pa.int64(), True),
    ],
    ids=str,
)
def test_a_column_fits_if_its_values_may(given_type: pa.DataType, wanted: pa.DataType, fits: bool) -> None:
    schemas = pa.schema([("a", given_type)]), pa.schema([("a", wanted)])
    if fits:
        check_frame_schema(*schemas, fills_missing=False)
    else:
        with pytest.raises(InvalidRequestError, match="does not fit the stream"):
            check_frame_schema(*schemas, fills_missing=False)


def test_a_batch_needs_all_columns_and_no_others() -> None:
    wanted = pa.schema([pa.field("must", pa.int64(), nullable=False), ("may", pa.int64())])
    both = pa.schema([("may", pa.int64()), ("must", pa.int64())])
    check_frame_schema(both, wanted, fills_missing=False)
    check_frame_schema(pa.schema([("must", pa.int64())]), wanted, fills_missing=True)
    with pytest.raises(InvalidRequestError, match="'may' is missing: give missing=\"null\""):
        check_frame_schema(pa.schema([("must", pa.int64())]), wanted, fills_missing=False)
    for fills_missing in (False, True):
        with pytest.raises(InvalidRequestError, match="'must' is missing"):
            check_frame_schema(pa.schema([("may", pa.int64())]), wanted, fills_missing=fills_missing)
        with pytest.raises(InvalidRequestError, match="'other' is not in the stream's schema"):
            check_frame_schema(pa.schema([*both, ("other", pa.int64())]), wanted, fills_missing=fills_missing)


NS, US = pa.timestamp("ns", "UTC"), pa.timestamp("us", "UTC")


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.map_(pa.string(), NS), [[("k", 1001)], None]),
        (pa.map_(NS, pa.field("v", pa.list_(pa.field("of", NS, nullable=False)), nullable=False)), [[(1001, [2002])], []]),
        (pa.list_(NS, 1), [[1001], None]),
        (pa.list_(pa.field("of", NS, nullable=False), 2), [[1001, 2002], None]),
        (pa.list_(pa.field("of", pa.struct([pa.field("t", NS, nullable=False)]), nullable=False)), [[{"t": 1001}], []]),
        (pa.large_list(pa.time64("ns")), [[1001], [None]]),
        (pa.struct([pa.field("a", pa.int32(), nullable=False), pa.field("t", pa.duration("ns"))]), [{"a": 1, "t": 1001}, None]),
    ],
    ids=str,
)
def test_nanoseconds_become_python_s_times_wherever_they_stand(kind: pa.DataType, values: list[Any]) -> None:
    schema = pa.schema([("a", kind)])
    ours = python_schema(schema)
    assert ours is not None and "ns" not in str(ours.field("a").type)
    column = pa.array(values, kind)
    read = pa.RecordBatch.from_arrays([column], schema=schema).cast(ours, safe=False).column(0)
    assert "Timestamp" not in repr(read.to_pylist()) and "Timedelta" not in repr(read.to_pylist())
    assert read.null_count == column.null_count


def test_a_schema_of_python_s_own_types_is_read_as_it_is() -> None:
    kinds = [US, pa.list_(pa.field("of", US, nullable=False)), pa.map_(pa.string(), pa.list_(pa.int8(), 2)), pa.struct([("t", US)])]
    assert python_schema(pa.schema([(f"c{index}", kind) for index, kind in enumerate(kinds)])) is None
