"""Columns given under a stream's schema: which types may be cast to the stream's, and the cast, which changes no value.

A type is refused before any value is looked at if only some conversion of its meaning could help, as text into numbers. Between
numbers, between times and between decimals the values decide: a digit that would be lost is an error.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from headwater.errors import InvalidRequestError
from headwater.model.columns import check_nested_nulls, check_values, plain_column
from headwater.model.schemas import indented, widens

_TEXTS = pt.is_string, pt.is_large_string, pt.is_string_view
_BLOBS = pt.is_binary, pt.is_large_binary, pt.is_binary_view
_NUMBERS = pt.is_integer, pt.is_floating, pt.is_decimal
_LISTS = pt.is_list, pt.is_large_list, pt.is_fixed_size_list, pt.is_list_view, pt.is_large_list_view
_TIMES_OF_DAY = pt.is_time32, pt.is_time64


def check_frame_schema(given: pa.Schema, wanted: pa.Schema, *, fills_missing: bool) -> None:
    """Refuse a frame with a column that the stream lacks, or whose type can't be cast to the stream's.

    A column of the stream that the frame lacks is refused too, unless it is nullable and `fills_missing`.
    """
    reasons = []
    for field in wanted:
        index = given.get_field_index(field.name)
        if index >= 0:
            if not can_fit(given.field(index).type, field.type):
                reasons.append(f"column {field.name!r} is {given.field(index).type}, not {field.type}")
        elif not field.nullable:
            reasons.append(f"column {field.name!r} is missing")
        elif not fills_missing:
            reasons.append(f'column {field.name!r} is missing: give missing="null" to store nulls')
    reasons += [f"column {name!r} is not in the stream's schema" for name in given.names if wanted.get_field_index(name) < 0]
    if reasons:
        raise InvalidRequestError(
            f"this batch does not fit the stream: {'; '.join(reasons)}.\nstream:\n{indented(wanted)}\nbatch:\n{indented(given)}"
        )


def can_fit(given: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether values of one type can be stored as another, at least some of them."""
    if pt.is_null(given) or widens(given, wanted):
        return True
    if pt.is_dictionary(given):
        return can_fit(given.value_type, wanted)
    if any(test(given) for test in _TEXTS):
        return any(test(wanted) for test in (*_TEXTS, *_BLOBS))
    for kinds in (_BLOBS, _NUMBERS, _TIMES_OF_DAY, (pt.is_duration,)):
        if any(test(given) for test in kinds):
            return any(test(wanted) for test in kinds)
    if pt.is_timestamp(given):
        # An instant is the same in every zone; a time without a zone is no instant.
        return bool(pt.is_timestamp(wanted) and (given.tz is None) == (wanted.tz is None))
    return bool(given.equals(wanted)) or _can_fit_nested(given, wanted)


def _can_fit_nested(given: pa.DataType, wanted: pa.DataType) -> bool:
    if pt.is_struct(given) and pt.is_struct(wanted):
        return [f.name for f in given] == [f.name for f in wanted] and all(
            can_fit(a.type, b.type) for a, b in zip(given, wanted, strict=True)
        )
    if any(test(given) for test in _LISTS) and any(test(wanted) for test in _LISTS):
        return can_fit(given.value_type, wanted.value_type)
    return bool(
        pt.is_map(given) and pt.is_map(wanted) and can_fit(given.key_type, wanted.key_type) and can_fit(given.item_type, wanted.item_type)
    )


def fit_column(column: pa.Array, field: pa.Field) -> pa.Array:
    """A column as the stream stores it. InvalidRequestError if a value would change, can't be stored, or is null where none may be."""
    if not column.type.equals(field.type):
        try:
            if pt.is_nested(column.type):
                column.validate(full=True)
            column = _cast(plain_column(column), field.type)
        except pa.ArrowException as error:
            raise InvalidRequestError(f"column {field.name!r} can't be stored as {field.type}: {error}") from error
    # Check after the cast: a dictionary-encoded column can hide nulls in its values.
    if column.null_count and not field.nullable:
        raise InvalidRequestError(f"column {field.name!r} has {column.null_count} nulls, and is not nullable")
    check_values(field.name, column)
    check_nested_nulls(field.name, column)
    return column


def _cast(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """ArrowInvalid if a value would change. Arrow checks that itself, except where it rounds to a float or from a float to a decimal."""
    cast = column.cast(kind)
    if _may_round(column.type, kind):
        _check_same(column, cast)
    return cast


def _may_round(given: pa.DataType, kind: pa.DataType) -> bool:
    """Whether Arrow's cast may change a value without an error."""
    if pt.is_nested(given) and pt.is_nested(kind):
        return any(_may_round(given.field(place).type, kind.field(place).type) for place in range(given.num_fields))
    if widens(given, kind) or not (pt.is_floating(given) or pt.is_decimal(given)):
        return False
    return bool(pt.is_floating(kind) or (pt.is_floating(given) and pt.is_decimal(kind)))


def _check_same(column: pa.Array, cast: pa.Array) -> None:
    back = cast.cast(column.type)
    if pt.is_nested(column.type):
        # NaN equals itself here, which `equals` of arrays denies: it is told from a changed value by its text.
        same = back.equals(column) or back.to_pylist().__repr__() == column.to_pylist().__repr__()
    elif pt.is_floating(column.type):
        same = pc.all(pc.or_(pc.equal(back, column), pc.is_nan(column)), min_count=0).as_py()
    else:
        same = back.equals(column)
    if not same:
        raise pa.ArrowInvalid(f"a value would be rounded from {column.type} to {cast.type}")
