"""Columns given as a whole: that nothing nested in them is null where it may not be, and how large their rows are."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from headwater.errors import InvalidRequestError

Sizes = np.ndarray[Any, np.dtype[np.int64]]


def check_nested_nulls(path: str, column: pa.Array) -> None:
    """Refuse a column with a null where its type has none. What lies under a null does not count."""
    if not _has_required(column.type):
        return
    for field, child in _children(column):
        name = f"{path}.{field.name}"
        if child.null_count and not field.nullable:
            raise InvalidRequestError(f"column {name!r} has {child.null_count} nulls, and is not nullable")
        check_nested_nulls(name, child)


@lru_cache(maxsize=256)
def _has_required(kind: pa.DataType) -> bool:
    """Whether something nested in a type is not nullable. A map's keys are not, but can't be null either."""
    if pt.is_map(kind):
        return not kind.item_field.nullable or _has_required(kind.key_type) or _has_required(kind.item_type)
    fields = [kind.field(index) for index in range(kind.num_fields)] if pt.is_nested(kind) else []
    return any(not field.nullable or _has_required(field.type) for field in fields)


def _children(column: pa.Array) -> list[tuple[pa.Field, pa.Array]]:
    """The fields of a struct, or the items of lists or maps, each with its values: those of this slice that don't lie under a null."""
    kind = column.type
    if pt.is_struct(kind):
        column = column.drop_null() if column.null_count else column
        return [(field, column.field(index)) for index, field in enumerate(kind)]
    return [(field, lists.flatten()) for field, lists in _lists(column)]


def _lists(column: pa.Array) -> list[tuple[pa.Field, pa.Array]]:
    """A column of lists, or the two that a column of maps is: of keys and of values."""
    kind = column.type
    if not pt.is_map(kind):
        return [(kind.value_field.with_name("item"), column)]
    parts = (kind.key_field.with_name("key"), column.keys), (kind.item_field.with_name("value"), column.items)
    places = column.buffers()[:2]
    # Over the buffers, since a cast refuses the nulls that are looked for.
    return [(field, pa.Array.from_buffers(pa.list_(field), len(column), places, -1, column.offset, [part])) for field, part in parts]


def largest_row(columns: Sequence[pa.Array]) -> int:
    """The bytes of the largest row."""
    sizes = sum(map(_sizes, columns), np.zeros(1, dtype=np.int64))
    return int(sizes.max(initial=0))


def _sizes(column: pa.Array) -> Sizes:
    """The bytes of each value."""
    kind = column.type
    if pt.is_struct(kind):
        return sum(map(_sizes, column.flatten()), np.zeros(len(column), dtype=np.int64))
    if pt.is_nested(kind):
        return sum((_sizes_of_lists(lists) for _, lists in _lists(column)), np.zeros(len(column), dtype=np.int64))
    width = _width(kind)
    return _int64(pc.binary_length(column)) if width is None else np.full(len(column), width, dtype=np.int64)


def _sizes_of_lists(lists: pa.Array) -> Sizes:
    counts = _int64(pc.list_value_length(lists))
    width = _width(lists.type.value_type)
    if width is not None:
        return counts * width
    ends = np.cumsum(counts)
    # The bytes of all items before the first, the second, ..., and of all.
    before = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(_sizes(lists.flatten()))])
    sizes: Sizes = before[ends] - before[ends - counts]
    return sizes


def _width(kind: pa.DataType) -> int | None:
    """The bytes of any value of a type, None if they differ."""
    texts = pt.is_string, pt.is_large_string, pt.is_binary, pt.is_large_binary
    return None if pt.is_nested(kind) or any(test(kind) for test in texts) else max(1, kind.bit_width // 8)


def _int64(numbers: pa.Array) -> Sizes:
    return np.asarray(numbers.fill_null(0), dtype=np.int64)
