"""Schemas: which are allowed, how they may change, and that what `RowCheck` lets pass can always be stored."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import InvalidRequestError
from headwater.model.schemas import OPAQUE, RowCheck, check_batch_schema, check_schema, evolve, is_opaque, upgrade

FLAT = [
    pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64(), pa.float32(),
    pa.float64(), pa.decimal128(10, 2), pa.decimal256(50, 3), pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.binary(4),
    pa.date32(), pa.date64(), pa.time32("ms"), pa.time64("us"), pa.timestamp("us"), pa.timestamp("ms", "UTC"),
    pa.timestamp("us", "Europe/Berlin"),
    pa.duration("us"),
]  # fmt: skip
NESTED = [
    pa.list_(pa.int64()),
    pa.large_list(pa.string()),
    pa.list_(pa.int32(), 2),
    pa.struct([("a", pa.int64()), ("b", pa.list_(pa.string()))]),
    pa.map_(pa.string(), pa.struct([("x", pa.decimal128(5, 1))])),
    pa.list_(pa.struct([("m", pa.map_(pa.int64(), pa.binary()))])),
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
        {"a": "int64"},
        "a: int64",
    ],
    ids=str,
)
def test_other_schemas_are_refused(schema: Any) -> None:
    with pytest.raises(InvalidRequestError):
        check_schema(schema)


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


TEXT = st.text(max_size=5)
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT | st.binary(max_size=5) | st.decimals() | st.datetimes()
    | st.dates() | st.times() | st.timedeltas() | st.datetimes(timezones=st.just(dt.UTC)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abmx"), inner, max_size=3) | st.tuples(inner, inner)
    | st.lists(st.tuples(st.sampled_from("abmx"), inner), max_size=2),
    max_leaves=6,
)  # fmt: skip

FITTING: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.bool_(): st.booleans(),
    pa.int8(): st.integers(-128, 127),
    pa.uint64(): st.integers(0, 2**64 - 1),
    pa.float32(): st.floats(width=32),
    pa.float64(): st.floats() | st.integers(-(2**53), 2**53),
    pa.decimal128(10, 2): st.decimals(-1000, 1000, places=2),
    pa.string(): st.text(st.characters(exclude_categories=["Cs"])),
    pa.binary(): st.binary(),
    pa.binary(4): st.binary(min_size=4, max_size=4),
    pa.timestamp("us", "Europe/Berlin"): st.datetimes(min_value=dt.datetime(1900, 1, 1), timezones=st.just(dt.UTC)),
    pa.list_(pa.int64()): st.lists(st.none() | st.integers(-(2**63), 2**63 - 1)),
    pa.struct([("a", pa.int64()), ("b", pa.list_(pa.string()))]): st.fixed_dictionaries(
        {}, optional={"a": st.none() | st.integers(0, 9), "b": st.none() | st.lists(st.text("xy"))}
    ),
    pa.map_(pa.string(), pa.int64()): st.dictionaries(st.text("ab"), st.none() | st.integers(0, 9))
    | st.lists(st.tuples(st.text("ab"), st.integers(0, 9))),
}


@given(st.data())
def test_what_the_check_lets_pass_can_be_stored_together(data: st.DataObject) -> None:
    """A flush never fails on a row: whatever was let pass one by one makes one batch."""
    kind = data.draw(st.sampled_from(FLAT + NESTED))
    schema = pa.schema([pa.field("a", kind)])
    check = RowCheck(schema)
    fitting = FITTING.get(kind, ANY)
    passed = []
    for row in data.draw(st.lists(st.fixed_dictionaries({"a": ANY | fitting}), max_size=6)):
        try:
            assert check(row) >= 0
        except InvalidRequestError:
            continue
        passed.append(row)
    assert pa.RecordBatch.from_pylist(passed, schema=schema).num_rows == len(passed)


@given(st.data())
def test_what_fits_is_let_pass(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(list(FITTING)))
    RowCheck(pa.schema([pa.field("a", kind, nullable=False)]))({"a": data.draw(FITTING[kind])})


STRUCT = pa.schema([("s", pa.struct([("a", pa.int64())]))])


def test_a_struct_is_given_as_a_dict_and_not_as_pairs() -> None:
    # Arrow takes either, but not both in one column: two events that pass alone would not be stored together.
    check = RowCheck(STRUCT)
    check({"s": {"a": 1}})
    for other in ([("a", 1)], (1,)):
        with pytest.raises(InvalidRequestError, match="'s'"):
            check({"s": other})


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"n": "1"}, "'n' takes int64; '1' of type str"),
        ({"n": True}, "'n' takes int64; True of type bool"),
        ({"n": 2**63}, "'n' takes int64"),
        ({"n": 1.0}, "'n' takes int64"),
        ({}, "'n' is missing or None"),
        ({"n": None}, "'n' is missing or None"),
        ({"n": 1, "m": 2}, "no column is called 'm'"),
        ({"n": 1, "s": "\ud800"}, "'s' takes string"),
        ({"n": 1, "d": Decimal("1.234")}, "'d' takes decimal128"),
        ([("n", 1)], "mapping"),
        (b"n", "mapping"),
        (None, "mapping"),
    ],
)
def test_a_row_that_does_not_fit_is_refused_with_the_column(row: Any, said: str) -> None:
    schema = pa.schema([pa.field("n", pa.int64(), nullable=False), ("s", pa.string()), ("d", pa.decimal128(5, 2))])
    with pytest.raises(InvalidRequestError) as caught:
        RowCheck(schema)(row)
    assert said in str(caught.value)


def test_the_size_of_a_row_counts_what_is_nested_in_it() -> None:
    schema = pa.schema([("s", pa.struct([("a", pa.list_(pa.binary()))]))])
    assert RowCheck(schema)({"s": {"a": [b"x" * 1000] * 10}}) >= 10_000


@pytest.mark.parametrize(
    ("given_type", "wanted", "fits"),
    [
        (pa.int32(), pa.int64(), True),
        (pa.int64(), pa.int32(), False),
        (pa.null(), pa.int32(), True),
        (pa.dictionary(pa.int8(), pa.string()), pa.string(), True),
        (pa.string_view(), pa.string(), True),
        (pa.string(), pa.binary(), True),
        (pa.binary(), pa.string(), False),
        (pa.timestamp("ms", "UTC"), pa.timestamp("us", "UTC"), True),
        (pa.timestamp("ns", "UTC"), pa.timestamp("us", "UTC"), False),
        (pa.timestamp("us"), pa.timestamp("us", "UTC"), False),
        (pa.list_(pa.int32()), pa.large_list(pa.int64()), True),
        (pa.struct([("a", pa.int32())]), pa.struct([("a", pa.int64())]), True),
        (pa.struct([("b", pa.int32())]), pa.struct([("a", pa.int64())]), False),
        (pa.map_(pa.string(), pa.int8()), pa.map_(pa.string(), pa.int64()), True),
        (pa.float64(), pa.int64(), False),
    ],
    ids=str,
)
def test_a_batch_fits_if_nothing_is_lost(given_type: pa.DataType, wanted: pa.DataType, fits: bool) -> None:
    schemas = pa.schema([("a", given_type)]), pa.schema([("a", wanted)])
    if fits:
        check_batch_schema(*schemas)
    else:
        with pytest.raises(InvalidRequestError, match="does not fit the stream"):
            check_batch_schema(*schemas)


def test_a_batch_needs_the_columns_that_are_not_nullable_and_no_others() -> None:
    wanted = pa.schema([pa.field("must", pa.int64(), nullable=False), ("may", pa.int64())])
    check_batch_schema(pa.schema([("must", pa.int64())]), wanted)
    with pytest.raises(InvalidRequestError, match="'must' is missing"):
        check_batch_schema(pa.schema([("may", pa.int64())]), wanted)
    with pytest.raises(InvalidRequestError, match="'other' is not in the stream's schema"):
        check_batch_schema(pa.schema([("must", pa.int64()), ("other", pa.int64())]), wanted)


@pytest.mark.parametrize("value", [[None], (None, None), [("a",)], [("a", 1, 2)], [(None, 1)], ["ab"], {"a": "x"}, 3, "ab"], ids=repr)
def test_a_map_that_is_none_is_refused_and_does_not_end_the_process(value: Any) -> None:
    # pyarrow aborts on a missing pair: found by the property above.
    with pytest.raises(InvalidRequestError, match="'m'"):
        RowCheck(pa.schema([("m", pa.map_(pa.string(), pa.int64()))]))({"m": value})
