"""Columns given as a whole: values that can't be read or tiered, nulls where there may be none, in slices too, and the size of rows."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import date, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest

from headwater.errors import InvalidRequestError
from headwater.model import columns
from headwater.model.columns import check_nested_nulls, check_values, find_fault, largest_row

ITEM = pa.field("item", pa.int32(), nullable=False)
STRUCT = pa.struct([ITEM.with_name("a")])

#: A type, a value that has a null where there may be none, where that is, and one that has none.
CASES = [
    (STRUCT, {"a": None}, "c.a", {"a": 1}),
    (pa.list_(ITEM), [1, None], "c.item", [1, 2]),
    (pa.large_list(ITEM), [1, None], "c.item", [1]),
    (pa.list_(ITEM, 2), [1, None], "c.item", [1, 2]),
    (pa.map_(pa.string(), ITEM.with_name("value")), [("k", None)], "c.value", [("k", 1)]),
    (pa.map_(pa.string(), ITEM.with_name("named")), [("k", None)], "c.value", [("k", 1)]),
    (pa.map_(pa.string(), pa.list_(STRUCT)), [("k", [{"a": None}])], "c.value.item.a", [("k", [None, {"a": 1}]), ("q", None)]),
    (pa.struct([("l", pa.list_(pa.map_(pa.int8(), STRUCT), 1))]), {"l": [[(1, {"a": None})]]}, "c.l.item.value.a", {"l": [None]}),
]


@pytest.mark.parametrize(("kind", "bad", "path", "good"), CASES, ids=[str(case[0]) for case in CASES])
def test_a_nested_null_is_found_where_there_may_be_none(kind: pa.DataType, bad: Any, path: str, good: Any) -> None:
    check_nested_nulls("c", pa.array([good, None, good], kind))
    column = pa.array([good, bad, None, good], kind)
    for part in (column, column.slice(1), column.slice(1, 1)):
        with pytest.raises(InvalidRequestError, match=f"column '{path}' has 1 nulls, and is not nullable"):
            check_nested_nulls("c", part)
    for part in (column.slice(2), column.slice(0, 1), column.slice(4), pa.nulls(3, kind), pa.array([], kind)):
        check_nested_nulls("c", part)


def test_what_lies_under_a_null_does_not_count() -> None:
    inner = pa.Array.from_buffers(STRUCT, 2, [pa.py_buffer(b"\x01")], children=[pa.array([1, None], pa.int32())])
    assert inner.to_pylist() == [{"a": 1}, None] and inner.field(0).null_count == 1
    check_nested_nulls("c", inner)
    # A list that is null, and yet has a range of items.
    lists = pa.ListArray.from_arrays(
        pa.array([0, 2, 4]), pa.array([1, 2, None, 3], pa.int32()), pa.list_(ITEM), mask=pa.array([False, True])
    )
    check_nested_nulls("c", lists)
    with pytest.raises(InvalidRequestError, match=r"'c\.item' has 1 nulls"):
        check_nested_nulls("c", pa.ListArray.from_arrays(pa.array([0, 2, 4]), lists.values, pa.list_(ITEM)))


def numbers(kind: pa.DataType, *values: int | None) -> pa.Array:
    """Values of a type by the numbers that Arrow stores, unchecked."""
    return pa.array(values, pa.int32() if kind.bit_width == 32 else pa.int64()).view(kind)


DAY_MS = 86_400_000
FIRST_DAY, LAST_DAY = (date.min - date(1970, 1, 1)).days, (date.max - date(1970, 1, 1)).days
FIRST_SECOND, LAST_SECOND = FIRST_DAY * 86_400, (LAST_DAY + 1) * 86_400 - 1
MOST = timedelta.max.days
YEARS = "lies outside of the years 1 to 9999"

#: A type, the first and the last number of it that can be read, and what is said of others.
BOUNDS = [
    (pa.date32(), FIRST_DAY, LAST_DAY, YEARS),
    (pa.date64(), FIRST_DAY * DAY_MS, LAST_DAY * DAY_MS, YEARS),
    (pa.timestamp("s"), FIRST_SECOND, LAST_SECOND, YEARS),
    (pa.timestamp("ms"), FIRST_SECOND * 1000, LAST_SECOND * 1000 + 999, YEARS),
    (pa.timestamp("us"), FIRST_SECOND * 10**6, LAST_SECOND * 10**6 + 999_999, YEARS),
    (pa.timestamp("us", "UTC"), FIRST_SECOND * 10**6, LAST_SECOND * 10**6 + 999_999, YEARS),
    (pa.timestamp("s", "+14:00"), FIRST_SECOND, LAST_SECOND - 14 * 3600, YEARS),
    (pa.timestamp("ms", "-12:00"), (FIRST_SECOND + 12 * 3600) * 1000, LAST_SECOND * 1000 + 999, YEARS),
    (pa.timestamp("s", "Pacific/Auckland"), FIRST_SECOND, LAST_SECOND - 13 * 3600, YEARS),
    (pa.timestamp("s", "America/New_York"), FIRST_SECOND + 4 * 3600 + 56 * 60 + 2, LAST_SECOND, YEARS),
    (pa.duration("s"), -MOST * 86_400, (MOST + 1) * 86_400 - 1, "lies outside of Python's durations, 999,999,999 days"),
    (pa.duration("ms"), -MOST * DAY_MS, (MOST + 1) * DAY_MS - 1, "lies outside of Python's durations"),
    (pa.time32("s"), 0, 86_399, "not within the acceptable range"),
    (pa.time32("ms"), 0, DAY_MS - 1, "not within the acceptable range"),
    (pa.time64("us"), 0, DAY_MS * 1000 - 1, "not within the acceptable range"),
    (pa.time64("ns"), 0, DAY_MS * 10**6 - 1, "not within the acceptable range"),
]


@pytest.mark.parametrize(("kind", "first", "last", "said"), BOUNDS, ids=[str(case[0]) for case in BOUNDS])
def test_times_that_python_does_not_have_are_found(kind: pa.DataType, first: int, last: int, said: str) -> None:
    within = numbers(kind, first, None, last)
    assert find_fault(within) == "" == find_fault(numbers(kind)) == find_fault(numbers(kind, None))
    # As a reader would get them.
    (within.cast(pa.time64("us"), safe=False) if kind == pa.time64("ns") else within).to_pylist()
    step = DAY_MS if kind == pa.date64() else 1
    for beyond in (first - step, last + step):
        column = numbers(kind, first, beyond, None, last)
        assert str(beyond) in find_fault(column) and said in find_fault(column)
        assert find_fault(column.slice(1, 1)) and not find_fault(column.slice(2))
        if not said.startswith("not"):
            with pytest.raises(OverflowError):
                column.to_pylist()


@pytest.mark.parametrize("kind", [pa.timestamp("ns"), pa.timestamp("ns", "Asia/Tokyo"), pa.duration("ns"), pa.duration("us")], ids=str)
def test_python_has_all_times_of_some_types(kind: pa.DataType) -> None:
    assert find_fault(numbers(kind, -(2**63) + 1, 2**63 - 1)) == ""


STRING = pa.string()


def text(*values: bytes, kind: pa.DataType = STRING) -> pa.Array:
    return pa.array(values, pa.binary() if kind == STRING else pa.large_binary()).view(kind)


def lists(kind: pa.DataType, offsets: list[int], items: pa.Array) -> pa.Array:
    """Lists, whatever their offsets are."""
    places = pa.array(offsets, pa.int64() if kind.id == pa.large_list(pa.int8()).id else pa.int32())
    return pa.Array.from_buffers(kind, len(offsets) - 1, [None, places.buffers()[1]], children=[items])


@pytest.mark.parametrize("few", [8192, 0], ids=["few", "many"])
def test_text_is_utf_8(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "_FEW_ROWS", few)
    for kind in (pa.string(), pa.large_string()):
        for good in (text(b"", kind=kind), text(b"abc", b"\xc3\xa4", kind=kind), text(kind=kind), pa.array([None, "", "ä"], kind)):
            assert find_fault(good) == ""
        places = pa.array([0, 5, 2, 6], pa.int64() if kind == pa.large_string() else pa.int32()).buffers()[1]
        assert "non-monotonic offset" in find_fault(pa.Array.from_buffers(kind, 3, [None, places, pa.py_buffer(b"abcdef")]))
        # Also half of a character at the end of a value, where the next one has the other half.
        for bad in (text(b"a", b"\xff", kind=kind), text(b"a\xc3", b"\xa4", kind=kind)):
            assert "Invalid UTF8 sequence at string index" in find_fault(bad)
        column = text(b"a", b"\xff", b"c", kind=kind)
        assert find_fault(column.slice(1, 1)) and not find_fault(column.slice(2)) and not find_fault(column.slice(0, 1))


def test_what_is_no_valid_value_of_its_type_is_found() -> None:
    places = pa.array([0, 5, 2, 6], pa.int32()).buffers()[1]
    for kind in (pa.binary(), pa.string()):
        assert "non-monotonic offset" in find_fault(pa.Array.from_buffers(kind, 3, [None, places, pa.py_buffer(b"abcdef")]))
    assert "whole number of days, and chunks keep the day only" in find_fault(numbers(pa.date64(), 0, 1))
    digits = pa.array([10**7], pa.decimal128(10, 0)).buffers()
    assert "does not fit in precision" in find_fault(pa.Array.from_buffers(pa.decimal128(7, 2), 1, digits))


BAD_TIME = numbers(pa.timestamp("s"), 0, 2**61)
BAD_TEXT = text(b"a", b"\xff")
NESTED: list[tuple[Callable[[pa.Array], pa.Array], str]] = [
    (lambda bad: lists(pa.list_(bad.type), [0, 1, 2], bad), "c.item"),
    (lambda bad: lists(pa.large_list(bad.type), [0, 1, 2], bad), "c.item"),
    (lambda bad: pa.FixedSizeListArray.from_arrays(bad, 1), "c.item"),
    (lambda bad: pa.StructArray.from_arrays([pa.array([1, 2]), bad], ["a", "b"]), "c.b"),
    (lambda bad: pa.MapArray.from_arrays([0, 1, 2], bad, pa.array([1, 2])), "c.key"),
    (lambda bad: pa.MapArray.from_arrays([0, 1, 2], pa.array([1, 2]), bad), "c.value"),
    (lambda bad: pa.FixedSizeListArray.from_arrays(pa.MapArray.from_arrays([0, 1, 2], pa.array([1, 2]), bad), 1), "c.item.value"),
    (lambda bad: pa.StructArray.from_arrays([lists(pa.list_(bad.type), [0, 1, 2], bad)], ["a"]), "c.a.item"),
]


@pytest.mark.parametrize("bad", [BAD_TIME, BAD_TEXT], ids=["time", "text"])
@pytest.mark.parametrize(("nest", "path"), NESTED, ids=[str(nest(BAD_TIME).type) for nest, _ in NESTED])
def test_nested_values_are_checked_as_far_as_they_are_stored(nest: Callable[[pa.Array], pa.Array], path: str, bad: pa.Array) -> None:
    column = nest(bad)
    for part in (column, column.slice(1), pa.concat_arrays([column, column]).slice(2)):
        with pytest.raises(InvalidRequestError, match=re.escape(f"column {path!r} has a value that can't be stored: ")):
            check_values("c", part)
    for part in (column.slice(0, 1), column.slice(2), pa.nulls(2, column.type), pa.array([], column.type)):
        check_values("c", part)


def test_what_lies_under_a_null_is_checked_as_it_is_stored_too() -> None:
    # Parquet's writer would refuse it.
    hidden = pa.Array.from_buffers(pa.struct([("t", BAD_TIME.type)]), 2, [pa.py_buffer(b"\x01")], children=[BAD_TIME])
    assert hidden.to_pylist() == [{"t": datetime(1970, 1, 1)}, None]
    with pytest.raises(InvalidRequestError, match=r"'c\.t' .* years 1 to 9999"):
        check_values("c", hidden)


@pytest.mark.parametrize("kind", [pa.list_(pa.int8()), pa.large_list(pa.int8()), pa.struct([("a", pa.list_(pa.int8()))])], ids=str)
def test_the_places_of_nested_items_are_checked(kind: pa.DataType) -> None:
    inner = kind.field(0).type if kind.num_fields and kind.id == pa.struct([]).id else kind
    for offsets in ([0, 2, 1, 3], [0, 9, 9, 3], [0, -1, 1, 3]):
        wrong = lists(inner, offsets, pa.array([1, 2, 3], pa.int8()))
        column = wrong if inner == kind else pa.Array.from_buffers(kind, 3, [None], children=[wrong])
        with pytest.raises(InvalidRequestError, match=r"has a value that can't be stored: .*[Oo]ffset"):
            check_values("c", column)
        # A slice whose own first and last place is wrong.
        inside = pa.Array.from_buffers(pa.list_(inner), 2, [None, pa.array([1, 2, 2], pa.int32()).buffers()[1]], children=[wrong])
        with pytest.raises(InvalidRequestError, match="has a value that can't be stored: "):
            check_values("c", inside)


@pytest.mark.parametrize(
    ("kind", "values", "largest"),
    [
        (pa.int64(), [1, None], 8),
        (pa.bool_(), [True], 1),
        (pa.decimal128(5, 2), [None], 16),
        (pa.binary(5), [b"abcde"], 5),
        (pa.string(), ["a", "äöü", None], 6),
        (pa.large_binary(), [b"a", b"abc"], 3),
        (pa.struct([("a", pa.binary()), ("b", pa.int32())]), [{"a": b"abc", "b": 1}, None, {"a": b"abcde", "b": None}], 9),
        (pa.list_(pa.string()), [["a", "bc"], None, [], ["abcd", None]], 4),
        (pa.large_list(pa.list_(pa.int16())), [[[1], [2, 3], None], [[]]], 6),
        (pa.list_(pa.binary(), 2), [[b"a", b"b"], None, [b"abc", b"de"]], 5),
        (pa.map_(pa.string(), pa.binary()), [[("a", b"bcd")], None, [("ab", b"cd"), ("e", None)]], 5),
    ],
    ids=str,
)
def test_the_largest_row_has_all_its_values(kind: pa.DataType, values: list[Any], largest: int) -> None:
    column = pa.array([*values[:1], *values], kind).slice(1)
    assert largest_row([column]) == largest
    assert largest_row([column, pa.array([1] * len(values), pa.int8())]) == largest + 1
    assert largest_row([column.slice(len(values))]) == 0
