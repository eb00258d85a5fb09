"""Rows given one at a time: whether they fit a schema, and what of them is stored.

For each type of a schema two functions are made, once. `fits` is quick and tells whether a value can be stored as it is; `take` makes a
plain value of one that can't, or refuses it. What would be lost is refused: digits of a time, a zone, a number too large, an unknown name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from headwater.errors import InvalidRequestError
from headwater.model.arguments import shown
from headwater.model.columns import find_fault
from headwater.model.schemas import python_type

Fits = Callable[[Any], bool]
Take = Callable[[Any], Any]
#: Why a value of a known type can't be stored; "" if Arrow has to tell. None: it is of another type.
Loss = Callable[[Any], str | None]

#: Microseconds of the units of time that have fewer digits than Python's times.
_STEPS = {"s": 1_000_000, "ms": 1000}
#: From here on a float rounds to infinity.
_FLOAT_LIMITS = {16: 65520.0, 32: 2.0**128 - 2.0**103}
_EXACT_INTS = {16: 1 << 11, 32: 1 << 24}


class RowCheck:
    """Takes a mapping with the columns of a schema, or refuses it at once, so that a flush never fails on one."""

    def __init__(self, schema: Iterable[pa.Field], path: str = "") -> None:
        self._schema = schema
        self._path = path
        self._fields = [(field.name, field.nullable, *_taking(f"{path}{field.name}", field)) for field in schema]
        self._names = frozenset(field.name for field in schema)

    def __call__(self, row: Any) -> dict[str, Any]:
        """The row as a dict of plain values, all of them our own; InvalidRequestError with the column and the reason if it does not fit."""
        if type(row) is not dict and not isinstance(row, Mapping):
            raise InvalidRequestError(f"an event of this stream is a mapping with the columns {self._shown()}, not {type(row).__name__}")
        own = {}
        for name, nullable, fits, take in self._fields:
            value = row.get(name)
            if value is not None or not nullable:
                own[name] = value if fits(value) else take(value)
        if not self._names.issuperset(row):
            extra = ", ".join(repr(f"{self._path}{name}") for name in row if name not in self._names)
            raise InvalidRequestError(f"no column is called {extra}; this stream has {self._shown()}")
        return own

    def _shown(self) -> str:
        return ", ".join(f"{self._path}{field.name}: {field.type}" for field in self._schema)


def row_size(value: Any) -> int:
    """The rough size in bytes of what `RowCheck` took."""
    kind = type(value)
    if kind is str:
        return len(value) if value.isascii() else len(value.encode())
    if kind is bytes:
        return len(value)
    if kind is dict:
        return sum(map(row_size, value.values())) + 8 * len(value)
    return sum(map(row_size, value)) if kind is list or kind is tuple else 8


def plain(value: Any) -> Any:
    """A value of a subclass (an enum's, say), or a scalar of numpy, as the value of Python's own type. Anything else as it is."""
    if isinstance(value, str):
        return str.__str__(value)  # str() is the name of an enum's member
    if isinstance(value, bytes):
        return bytes(value)
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return value.item()
    if isinstance(value, int) and not isinstance(value, bool):
        return int(value)
    return float(value) if isinstance(value, float) else value


def _taking(path: str, field: pa.Field) -> tuple[Fits, Take]:
    """Both functions for a column, or for what is nested in one: `path` names it."""
    fits, take = _taking_type(path, field.type)

    def take_or_none(value: Any) -> Any:
        if value is not None:
            return take(value)
        if not field.nullable:
            raise InvalidRequestError(f"column {path!r} is missing or None, and is not nullable")
        return None

    return fits, take_or_none


def _taking_type(path: str, kind: pa.DataType) -> tuple[Fits, Take]:
    if pt.is_struct(kind):
        return _never, _struct(path, kind)
    if pt.is_map(kind):
        return _never, _map(path, kind)
    if pt.is_nested(kind):
        return _never, _list(path, kind)
    fits = _fits_exactly(kind)
    if fits is not None:
        return fits, _exactly(path, kind, fits)
    fits, loss = _time(kind) if pt.is_temporal(kind) else (_never, _decimal)
    return fits, _by_arrow(path, kind, fits, loss)


def _unfit(path: str, kind: pa.DataType, value: Any, why: str | None = None) -> InvalidRequestError:
    reason = f": {why}" if why else ""
    return InvalidRequestError(f"column {path!r} takes {kind}; {shown(value)} of type {type(value).__name__} does not fit{reason}")


def _never(value: Any) -> bool:
    return False


# Types whose values Python has too.


def _fits_exactly(kind: pa.DataType) -> Fits | None:
    """The test for a type, if no more than it is needed."""
    if pt.is_integer(kind):
        low = -(1 << (kind.bit_width - 1)) if pt.is_signed_integer(kind) else 0
        high = (1 << (kind.bit_width - 1)) if pt.is_signed_integer(kind) else 1 << kind.bit_width
        return lambda value: type(value) is int and low <= value < high
    if pt.is_float64(kind):
        return lambda value: type(value) is float or (type(value) is int and abs(value) <= 1 << 53)
    if pt.is_floating(kind):
        limit, most = _FLOAT_LIMITS[kind.bit_width], _EXACT_INTS[kind.bit_width]
        return lambda value: (
            (type(value) is float and (-limit < value < limit or value - value != 0)) or (type(value) is int and abs(value) <= most)
        )
    if pt.is_string(kind) or pt.is_large_string(kind):
        return lambda value: type(value) is str and (value.isascii() or _is_utf8(value))
    if pt.is_binary(kind) or pt.is_large_binary(kind):
        return lambda value: type(value) is bytes
    if pt.is_fixed_size_binary(kind) and not pt.is_decimal(kind):
        return lambda value: type(value) is bytes and len(value) == kind.byte_width
    if pt.is_boolean(kind):
        return lambda value: type(value) is bool
    return None


def _is_utf8(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _exactly(path: str, kind: pa.DataType, fits: Fits) -> Take:
    def take(value: Any) -> Any:
        own = plain(value)
        if not fits(own):
            raise _unfit(path, kind, value, "it would become infinite" if type(own) is float and pt.is_floating(kind) else None)
        return own

    return take


# Types whose values Arrow converts.


def _by_arrow(path: str, kind: pa.DataType, fits: Fits, loss: Loss) -> Take:
    def take(value: Any) -> Any:
        own = plain(value)
        if fits(own):
            return own
        why = None
        try:
            why = loss(own)
            if why == "":
                column = pa.array([own], kind)
                why = find_fault(column)
                if why == "" and _is_read_as_given(column):
                    return own
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            pass
        raise _unfit(path, kind, value, why)

    return take


def _is_read_as_given(column: pa.Array) -> bool:
    """Whether a reader gets what Arrow made of a value."""
    ours = python_type(column.type)
    stored = column.cast(ours, safe=False)
    return stored.null_count == 0 and bool(pa.array(stored.to_pylist(), ours).equals(stored))


def _decimal(value: Any) -> str | None:
    return "" if isinstance(value, Decimal) or type(value) is int else None


def _time(kind: pa.DataType) -> tuple[Fits, Loss]:
    """For dates and times of each kind. An int is the number that Arrow stores, in the type's unit."""
    if pt.is_date(kind):
        return lambda value: type(value) is date, _loss_of_date
    unit = kind.unit
    step = _STEPS.get(unit, 1)
    finer = f"it is finer than the unit {unit}"
    if pt.is_timestamp(kind):
        return _timestamp(bool(kind.tz), unit, step, finer)
    if pt.is_duration(kind):
        # About 292 years, or as many thousands of them.
        most_days = {"ns": 106_751, "us": 106_751_990}.get(unit, 999_999_999)

        def loss_of_duration(value: Any) -> str | None:
            if isinstance(value, timedelta):
                return finer if value.microseconds % step or _has_nanoseconds(value, unit) else ""
            return "" if type(value) is int or isinstance(value, np.timedelta64) else None

        return (
            lambda value: type(value) is timedelta and -most_days <= value.days < most_days and not value.microseconds % step
        ), loss_of_duration

    def loss_of_time(value: Any) -> str | None:
        if isinstance(value, time):
            return "it has a zone, and the column has none" if value.tzinfo is not None else finer if value.microsecond % step else ""
        return "" if type(value) is int else None

    return lambda value: type(value) is time and value.tzinfo is None and not value.microsecond % step, loss_of_time


def _timestamp(is_zoned: bool, unit: str, step: int, finer: str) -> tuple[Fits, Loss]:
    # Inside of these years no zone takes a time to where it can't be stored or read.
    first, last = (1678, 2261) if unit == "ns" else (2, 9998)

    def fits(value: Any) -> bool:
        return (
            type(value) is datetime
            and first <= value.year <= last
            and (value.utcoffset() is not None) is is_zoned
            and not value.microsecond % step
        )

    def loss(value: Any) -> str | None:
        if isinstance(value, datetime):
            if (value.utcoffset() is not None) is not is_zoned:
                return "it has no zone" if is_zoned else "it has a zone, and the column has none"
            return finer if value.microsecond % step or _has_nanoseconds(value, unit) else ""
        if isinstance(value, np.datetime64):
            return "it has no zone" if is_zoned else ""
        return "" if type(value) is int else None

    return fits, loss


def _loss_of_date(value: Any) -> str | None:
    if isinstance(value, datetime):
        return "give its date()"
    return "" if isinstance(value, date) or type(value) is int else None


def _has_nanoseconds(value: Any, unit: str) -> bool:
    # Of pandas: subclasses of Python's types with more digits.
    return unit != "ns" and bool(getattr(value, "nanosecond", 0) or getattr(value, "nanoseconds", 0))


# Nested types.


def _struct(path: str, kind: pa.DataType) -> Take:
    check = RowCheck(list(kind), f"{path}.")

    def take(value: Any) -> Any:
        # Arrow takes pairs and tuples too, but not mixed in one column.
        if not isinstance(value, Mapping):
            raise _unfit(path, kind, value)
        return check(value)

    return take


def _list(path: str, kind: pa.DataType) -> Take:
    fits, take_item = _taking(f"{path}.item", kind.value_field)
    size = kind.list_size if pt.is_fixed_size_list(kind) else None

    def take(value: Any) -> Any:
        items = _items(value)
        if items is None:
            raise _unfit(path, kind, value)
        if size is not None and len(items) != size:
            raise _unfit(path, kind, value, f"it has {len(items)} items")
        return [item if fits(item) else take_item(item) for item in items]

    return take


def _items(value: Any) -> list[Any] | tuple[Any, ...] | None:
    if isinstance(value, np.ndarray) and value.ndim:
        # Times stay numpy's: as plain values they would be numbers.
        return value.tolist() if value.dtype.kind in "biuf" else list(value)
    return value if isinstance(value, list | tuple) else None


def _map(path: str, kind: pa.DataType) -> Take:
    fits_key, take_key = _taking(f"{path}.key", kind.key_field)
    fits_item, take_item = _taking(f"{path}.value", kind.item_field)

    def take(value: Any) -> Any:
        pairs = list(value.items()) if isinstance(value, Mapping) else _items(value)
        # Arrow aborts the process on a map's missing pair.
        if pairs is None or not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
            raise _unfit(path, kind, value)
        return [(key if fits_key(key) else take_key(key), item if fits_item(item) else take_item(item)) for key, item in pairs]

    return take
