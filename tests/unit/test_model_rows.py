"""Rows given one at a time: what `RowCheck` lets pass can always be stored, is read as it was given, and is our own."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import InvalidRequestError
from headwater.model.arguments import shown
from headwater.model.columns import check_nested_nulls
from headwater.model.rows import RowCheck, row_size
from headwater.model.schemas import python_schema
from tests.unit.test_model_schemas import FLAT, NESTED

pd: Any = pytest.importorskip("pandas")  # which has no types

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
            taken = check(row)
        except InvalidRequestError:
            continue
        assert row_size(taken) >= 0
        passed.append(taken)
    batch = pa.RecordBatch.from_pylist(passed, schema=schema)
    assert batch.num_rows == len(passed)
    check_nested_nulls("a", batch.column(0))
    ours = python_schema(schema)
    assert len((batch if ours is None else batch.cast(ours, safe=False)).to_pylist()) == len(passed)


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
    assert row_size(RowCheck(schema)({"s": {"a": [b"x" * 1000] * 10}})) >= 10_000


@pytest.mark.parametrize("value", [[None], (None, None), [("a",)], [("a", 1, 2)], [(None, 1)], ["ab"], {"a": "x"}, 3, "ab"], ids=repr)
def test_a_map_that_is_none_is_refused_and_does_not_end_the_process(value: Any) -> None:
    # pyarrow aborts on a missing pair: found by the property above.
    with pytest.raises(InvalidRequestError, match="column 'm"):
        RowCheck(pa.schema([("m", pa.map_(pa.string(), pa.int64()))]))({"m": value})


# What would be lost is refused.

NOON = dt.datetime(2020, 1, 1, 12, 0, 0, 999_999)
ZONED = NOON.replace(tzinfo=dt.UTC)


@pytest.mark.parametrize(
    ("kind", "value", "why"),
    [
        (pa.float32(), 1e300, "infinite"),
        (pa.float32(), -1e39, "infinite"),
        (pa.float16(), 65520.0, "infinite"),
        (pa.float16(), 4097, "does not fit"),
        (pa.float32(), (1 << 24) + 1, "does not fit"),
        (pa.timestamp("s", "UTC"), ZONED, "finer than the unit s"),
        (pa.timestamp("ms"), NOON, "finer than the unit ms"),
        (pa.timestamp("us"), pd.Timestamp("2020-01-01T00:00:00.000000001"), "finer than the unit us"),
        (pa.timestamp("us"), pd.NaT, "does not fit"),
        (pa.timestamp("us", "UTC"), NOON, "it has no zone"),
        (pa.timestamp("us", "UTC"), np.datetime64("2020-01-01", "us"), "it has no zone"),
        (pa.timestamp("us"), ZONED, "it has a zone"),
        (pa.timestamp("us"), np.datetime64("NaT", "us"), "does not fit"),
        (pa.timestamp("us"), 1 << 62, "outside of the years 1 to 9999"),
        (pa.timestamp("us"), 5.5, "does not fit"),
        (pa.timestamp("us", "UTC"), dt.datetime(1, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=5))), "does not fit"),
        (pa.timestamp("us", "America/New_York"), dt.datetime(1, 1, 1, tzinfo=dt.UTC), "outside of the years 1 to 9999 of its zone"),
        (pa.timestamp("ns"), dt.datetime(1600, 1, 1), "does not fit"),
        (pa.duration("s"), dt.timedelta(milliseconds=1500), "finer than the unit s"),
        (pa.duration("ms"), dt.timedelta(microseconds=1), "finer than the unit ms"),
        (pa.duration("us"), pd.Timedelta(5, "ns"), "finer than the unit us"),
        (pa.duration("ns"), dt.timedelta.max, "does not fit"),
        (pa.time32("s"), dt.time(1, 2, 3, 999), "finer than the unit s"),
        (pa.time32("ms"), dt.time(1, 2, 3, 999), "finer than the unit ms"),
        (pa.time64("us"), dt.time(1, tzinfo=dt.UTC), "it has a zone"),
        (pa.time64("us"), -5, "not within the acceptable range"),
        (pa.time32("s"), 86_400, "not within the acceptable range"),
        (pa.duration("s"), 1 << 61, "outside of Python's durations"),
        (pa.timestamp("s"), 1 << 61, "outside of the years 1 to 9999"),
        (pa.date32(), NOON, "give its date()"),
        (pa.date64(), NOON, "give its date()"),
        (pa.date64(), 5, "whole number of days"),
        (pa.date32(), 10**9, "outside of the years 1 to 9999"),
        (pa.decimal128(5, 2), Decimal("NaN"), "does not fit"),
        (pa.binary(4), b"abc", "does not fit"),
    ],
    ids=str,
)
def test_what_would_be_lost_is_refused_wherever_it_stands(kind: pa.DataType, value: Any, why: str) -> None:
    nested = pa.schema([("a", kind), ("s", pa.struct([("a", kind)])), ("l", pa.list_(kind)), ("m", pa.map_(pa.string(), kind))])
    check = RowCheck(nested)
    for row, name in (({"a": value}, "a"), ({"s": {"a": value}}, "s.a"), ({"l": [value]}, "l.item"), ({"m": {"k": value}}, "m.value")):
        with pytest.raises(InvalidRequestError) as caught:
            check(row)
        assert f"column '{name}' takes {kind}; {shown(value)} of type" in str(caught.value)
        assert why in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.float32(), 0.1),
        (pa.float32(), 3.4028234663852886e38),
        (pa.float32(), float("inf")),
        (pa.float16(), 65519.0),
        (pa.timestamp("s", "UTC"), ZONED.replace(microsecond=0)),
        (pa.timestamp("ms"), NOON.replace(microsecond=5000)),
        (pa.timestamp("us"), dt.datetime.min),
        (pa.timestamp("us", "UTC"), dt.datetime.max.replace(tzinfo=dt.UTC)),
        (pa.timestamp("us", "UTC"), dt.datetime(1, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=-5)))),
        (pa.timestamp("us", "Europe/Berlin"), dt.datetime(2020, 10, 25, 1, 30, tzinfo=dt.UTC)),
        (pa.timestamp("ns"), pd.Timestamp("2020-01-01T00:00:00.000000001")),
        (pa.timestamp("us", "Europe/Berlin"), 1_603_589_400_000_000),
        (pa.timestamp("us"), np.datetime64("2020-01-01", "us")),
        (pa.duration("s"), dt.timedelta(seconds=-5)),
        (pa.duration("us"), dt.timedelta(days=106_751_990)),
        (pa.time32("s"), dt.time(23, 59, 59)),
        (pa.time64("ns"), dt.time.max),
        (pa.date32(), dt.date.min),
        (pa.date64(), dt.date.max),
        (pa.decimal128(5, 2), 5),
    ],
    ids=str,
)
def test_what_is_kept_is_let_pass(kind: pa.DataType, value: Any) -> None:
    taken = RowCheck(pa.schema([("a", kind)]))({"a": value})
    assert pa.RecordBatch.from_pylist([taken], schema=pa.schema([("a", kind)])).column(0).null_count == 0


# What is nested.

ITEM = pa.field("item", pa.int32(), nullable=False)
DEEP = pa.schema(
    [
        ("st", pa.struct([ITEM.with_name("a"), ("b", pa.list_(pa.struct([ITEM.with_name("c")])))])),
        ("l", pa.list_(ITEM)),
        ("f", pa.list_(ITEM, 2)),
        ("m", pa.map_(pa.string(), ITEM.with_name("value"))),
    ]
)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"st": {}}, "'st.a' is missing or None"),
        ({"st": {"a": None}}, "'st.a' is missing or None"),
        ({"st": {"a": 1, "b": [{"c": 1}, {}]}}, "'st.b.item.c' is missing or None"),
        ({"st": {"a": 1, "zz": "lost"}}, "no column is called 'st.zz'"),
        ({"st": {"a": 1, "b": [{"c": 1, "zz": 1}]}}, "no column is called 'st.b.item.zz'"),
        ({"l": [1, None]}, "'l.item' is missing or None"),
        ({"f": [None, 1]}, "'f.item' is missing or None"),
        ({"f": [1]}, "it has 1 items"),
        ({"m": {"k": None}}, "'m.value' is missing or None"),
        ({"m": [("k", None)]}, "'m.value' is missing or None"),
        ({"m": {None: 1}}, "'m.key' is missing or None"),
        ({"l": "12"}, "'l' takes list"),
        ({"l": {1, 2}}, "'l' takes list"),
        ({"l": np.array(5)}, "'l' takes list"),
    ],
    ids=str,
)
def test_nulls_and_names_are_checked_in_what_is_nested(row: Any, said: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        RowCheck(DEEP)(row)
    assert said in str(caught.value)


def test_nested_values_may_be_null_where_their_type_says_so() -> None:
    row = {"st": {"a": 1, "b": [None, {"c": 1}]}, "l": None, "f": [1, 2], "m": {}}
    assert RowCheck(DEEP)(row) == {"st": {"a": 1, "b": [None, {"c": 1}]}, "f": [1, 2], "m": []}


# Values of other types that are the same.


class Colour(StrEnum):
    RED = "red"


class Shade(str, Enum):  # noqa: UP042 - whose str() is not its value
    DARK = "dark"


class Rank(IntEnum):
    FIRST = 1


@pytest.mark.parametrize(
    ("kind", "value", "same"),
    [
        (pa.int64(), np.int64(5), 5),
        (pa.int8(), np.uint64(5), 5),
        (pa.int64(), Rank.FIRST, 1),
        (pa.string(), Colour.RED, "red"),
        (pa.string(), Shade.DARK, "dark"),
        (pa.string(), np.str_("a"), "a"),
        (pa.binary(), np.bytes_(b"a"), b"a"),
        (pa.binary(1), np.bytes_(b"a"), b"a"),
        (pa.float64(), np.float64(1.5), 1.5),
        (pa.float64(), np.float32(1.5), 1.5),
        (pa.float64(), np.int64(2), 2),
        (pa.float16(), np.float32(1.5), 1.5),
        (pa.bool_(), np.bool_(True), True),
        (pa.decimal128(5, 2), np.int64(5), 5),
        (pa.list_(pa.int64()), np.array([1, 2]), [1, 2]),
        (pa.list_(pa.list_(pa.float32())), np.array([[1.5], [2.5]]), [[1.5], [2.5]]),
        (pa.list_(pa.string()), (Colour.RED, np.str_("a")), ["red", "a"]),
        (pa.map_(pa.string(), pa.int64()), MappingProxyType({Colour.RED: np.int64(1)}), [("red", 1)]),
        (pa.struct([("a", pa.int64())]), MappingProxyType({"a": Rank.FIRST}), {"a": 1}),
    ],
    ids=str,
)
def test_values_of_subclasses_and_numpy_are_stored_as_the_plain_value(kind: pa.DataType, value: Any, same: Any) -> None:
    taken = RowCheck(pa.schema([("a", kind)]))(MappingProxyType({"a": value}))
    assert type(taken) is dict
    assert repr(taken["a"]) == repr(same)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.int64(), np.bool_(True)),
        (pa.int64(), np.float64(1.0)),
        (pa.int8(), np.int64(128)),
        (pa.bool_(), np.int64(1)),
        (pa.string(), np.bytes_(b"a")),
        (pa.float32(), True),
        (pa.float32(), np.float64(1e300)),
        (pa.float64(), np.longdouble(1)),
        (pa.float64(), np.complex128(1)),
    ],
    ids=str,
)
def test_values_that_are_not_the_same_stay_refused(kind: pa.DataType, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match="column 'a' takes"):
        RowCheck(pa.schema([("a", kind)]))({"a": value})


def test_what_was_taken_is_not_changed_with_what_was_given() -> None:
    array = np.array([1, 2])
    row: dict[str, Any] = {"st": {"a": 1, "b": [{"c": 1}]}, "l": [1], "f": array, "m": {"k": 1}}
    taken = RowCheck(DEEP)(row)
    before = repr(taken)
    row["st"]["b"][0]["c"] = 2
    row["st"]["b"].append(None)
    row["l"].append(2)
    array[0] = 9
    row["m"]["k"] = 2
    assert repr(taken) == before


def test_the_size_of_a_text_is_that_of_its_utf_8() -> None:
    assert [row_size(text) for text in ("ab", "äb", "😀")] == [2, 3, 4]
