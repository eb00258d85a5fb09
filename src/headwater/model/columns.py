"""Columns given as a whole: that their values can be read and tiered, are not null where they may not be, and how large their rows are."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, datetime, timedelta
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from headwater.errors import InvalidRequestError

Sizes = np.ndarray[Any, np.dtype[np.int64]]

_EPOCH = datetime(1970, 1, 1)
_YEARS = "the years 1 to 9999"
_STEPS = {"s": timedelta(seconds=1), "ms": timedelta(milliseconds=1), "us": timedelta(microseconds=1)}
#: Up to here Arrow's check of text takes no longer than finding out that it is ASCII.
_FEW_ROWS = 8192


class Text(NamedTuple):
    """A type of text: as bytes, and the numbers that say where values begin and end."""

    stored: pa.DataType
    offsets: type[np.signedinteger[Any]]


_TEXTS = {pa.string().id: Text(pa.binary(), np.int32), pa.large_string().id: Text(pa.large_binary(), np.int64)}


class Bounds(NamedTuple):
    """The first and the last number that a column of a type may hold."""

    first: int
    last: int
    called: str


def check_values(path: str, column: pa.Array) -> None:
    """Refuse a column with a value that no reader could get or no chunk could hold. What lies under a null counts: it is stored too."""
    if not pt.is_nested(column.type):
        if why := find_fault(column):
            raise InvalidRequestError(f"column {path!r} has a value that can't be stored: {why}")
        return
    try:
        children = _stored(column)
    except pa.ArrowInvalid as error:
        raise InvalidRequestError(f"column {path!r} has a value that can't be stored: {error}") from error
    for name, child in children:
        check_values(f"{path}.{name}", child)


def find_fault(column: pa.Array) -> str:
    """Why a value of a column, whose type is not nested, could not be read or tiered as it is; "" if all can."""
    kind = column.type
    bounds = _bounds(kind) if pt.is_temporal(kind) else None
    if bounds is not None:
        numbers = column.view(pa.int32() if pt.is_date32(kind) else pa.int64())
        lowest, highest = (bound.as_py() for bound in pc.min_max(numbers).values())
        if lowest is not None and not bounds.first <= lowest <= highest <= bounds.last:
            return f"{lowest if lowest < bounds.first else highest} as {kind} lies outside of {bounds.called}"
    return _arrow_fault(column)


def _arrow_fault(column: pa.Array) -> str:
    """What Arrow says of text that is not UTF-8, of offsets, of times of day and of digits that its type does not allow."""
    text = _TEXTS.get(column.type.id) if len(column) > _FEW_ROWS else None
    try:
        # Its check of text takes ten times as long as that of bytes, and most text is ASCII.
        if text is None or not _is_ascii(column.view(text.stored), text.offsets):
            column.validate(full=True)
    except pa.ArrowInvalid as error:
        return f"{error}, and chunks keep the day only" if pt.is_date64(column.type) else str(error)
    return ""


def _is_ascii(column: pa.Array, offsets: type[np.signedinteger[Any]]) -> bool:
    """Whether all bytes of binary values are ASCII. ArrowInvalid if it has wrong offsets."""
    column.validate(full=True)
    _, places, data = column.buffers()
    width = offsets().itemsize
    start, end = (int(np.frombuffer(places, offsets, 1, place * width)[0]) for place in (column.offset, column.offset + len(column)))
    return start == end or bool(np.max(np.frombuffer(data, np.uint8, end - start, start)) < 0x80)


@lru_cache(maxsize=256)
def _bounds(kind: pa.DataType) -> Bounds | None:
    """What of a type Python has too. None if it has all of it, or Arrow checks it."""
    if pt.is_date(kind):
        per_day = 1 if pt.is_date32(kind) else 86_400_000
        return Bounds((date.min - _EPOCH.date()).days * per_day, (date.max - _EPOCH.date()).days * per_day, _YEARS)
    if pt.is_duration(kind) and kind.unit in _STEPS:
        step = _STEPS[kind.unit]
        return Bounds(-(-timedelta.min // step), timedelta.max // step, f"Python's durations, {timedelta.max.days:,} days")
    if not pt.is_timestamp(kind) or kind.unit not in _STEPS:
        return None
    first, last, called = datetime.min - _EPOCH, datetime.max - _EPOCH, _YEARS
    if kind.tz:
        # Both in UTC and in the zone.
        zone = pa.scalar(0, kind).as_py().tzinfo
        first -= min(zone.utcoffset(datetime.min), timedelta())
        last -= max(zone.utcoffset(datetime.max), timedelta())
        called = f"{_YEARS} of its zone and of UTC"
    return Bounds(-(-first // _STEPS[kind.unit]), last // _STEPS[kind.unit], called)


def _stored(column: pa.Array) -> list[tuple[str, pa.Array]]:
    """The fields of a struct, or the items of lists or maps, each with all that is stored of this slice. ArrowInvalid if it is wrong."""
    kind = column.type
    if pt.is_struct(kind):
        return [(field.name, column.field(index)) for index, field in enumerate(kind)]
    if pt.is_fixed_size_list(kind):
        return [("item", column.values.slice(column.offset * kind.list_size, len(column) * kind.list_size))]
    found = []
    for field, lists in _lists(column) if len(column) else ():
        # Without the items, which may be many more than those of this slice.
        places = pa.large_list(pa.null()) if pt.is_large_list(kind) else pa.list_(pa.null())
        items = pa.nulls(len(lists.values))
        pa.Array.from_buffers(places, len(lists), lists.buffers()[:2], -1, lists.offset, [items]).validate(full=True)
        start, end = lists.offsets[0].as_py(), lists.offsets[-1].as_py()
        found.append((field.name, lists.values.slice(start, end - start)))
    return found


def plain_column(column: pa.Array) -> pa.Array:
    """A column with its values where offsets say, not by way of a dictionary or of views. ArrowException if those are wrong."""
    kind = column.type
    if pt.is_dictionary(kind):
        if not _is_plain(kind.value_type):
            # Arrow takes no values out of a dictionary of views, as Polars' Enum and Categorical are.
            column = pa.DictionaryArray.from_arrays(column.indices, plain_column(column.dictionary))
        return plain_column(column.dictionary_decode())
    if pt.is_string_view(kind) or pt.is_binary_view(kind):
        column.validate(full=True)
        return column.cast(pa.large_string() if pt.is_string_view(kind) else pa.large_binary())
    return column if _is_plain(kind) else _plain_nested(column)


@lru_cache(maxsize=256)
def _is_plain(kind: pa.DataType) -> bool:
    """Whether a type has neither dictionaries nor views in it. Arrow casts a map's parts itself."""
    if pt.is_nested(kind) and not pt.is_map(kind):
        return all(_is_plain(kind.field(place).type) for place in range(kind.num_fields))
    return not (pt.is_dictionary(kind) or pt.is_string_view(kind) or pt.is_binary_view(kind))


def _plain_nested(column: pa.Array) -> pa.Array:
    kind = column.type
    column.validate(full=True)
    if pt.is_struct(kind):
        parts = [plain_column(column.field(place)) for place in range(kind.num_fields)]
        fields = [field.with_type(part.type) for field, part in zip(kind, parts, strict=True)]
        return pa.StructArray.from_arrays(parts, fields=fields, mask=column.is_null())
    if pt.is_list(kind) or pt.is_large_list(kind):
        values = plain_column(column.values)
        field = kind.value_field.with_type(values.type)
        plain = pa.list_(field) if pt.is_list(kind) else pa.large_list(field)
        return pa.Array.from_buffers(plain, len(column), column.buffers()[:2], -1, column.offset, [values])
    if pt.is_fixed_size_list(kind):
        values = plain_column(column.values)
        plain = pa.list_(kind.value_field.with_type(values.type), kind.list_size)
        return pa.Array.from_buffers(plain, len(column), column.buffers()[:1], -1, column.offset, [values])
    return column


def cast_column(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """A column in another type. ArrowException if a value does not fit; Arrow itself makes infinite what is too large for a float."""
    cast = column.cast(kind)
    if _infinities(cast) > _infinities(column):
        raise pa.ArrowInvalid(f"a number is too large for {kind}: it would become infinite")
    return cast


def _infinities(column: pa.Array) -> int:
    kind = column.type
    if pt.is_floating(kind):
        return int(np.isinf(column.drop_null().to_numpy(zero_copy_only=False)).sum())
    return sum(_infinities(child) for _, child in _children(column)) if pt.is_nested(kind) else 0


def with_wide_floats(kind: pa.DataType) -> pa.DataType:
    """A type of JSON with room for any number, for `cast_column` to see what does not fit."""
    if pt.is_float32(kind):
        return pa.float64()
    if pt.is_list(kind):
        return pa.list_(kind.value_field.with_type(with_wide_floats(kind.value_type)))
    if pt.is_struct(kind):
        return pa.struct([field.with_type(with_wide_floats(field.type)) for field in kind])
    return kind


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
    return int(np.max(sizes, initial=0))


def data_bytes(columns: Sequence[pa.Array]) -> int:
    """The bytes of all rows together, counted as those of one: without what Arrow keeps beside the values."""
    return sum(int(_sizes(column).sum()) for column in columns)


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
