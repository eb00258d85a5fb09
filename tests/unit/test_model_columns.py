"""Columns given as a whole: nulls where there may be none, in slices and under nulls too, and the size of rows."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from headwater.errors import InvalidRequestError
from headwater.model.columns import check_nested_nulls, largest_row

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
