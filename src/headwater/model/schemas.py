"""Arrow schemas of streams: which are allowed, how they may change, and whether a row fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from headwater.errors import InvalidRequestError

#: The schema of a stream that was given none: opaque bytes.
OPAQUE = pa.schema([pa.field("value", pa.binary(), nullable=False)])

TIME = pa.timestamp("us", tz="UTC")
#: Columns that headwater adds to those of the schema, with their types.
METADATA = {
    "_key": pa.binary(),
    "_time": TIME,
    "_stream": pa.string(),
    "_segment": pa.int64(),
    "_number": pa.int64(),
    "_appended": TIME,
}

_FLAT = (
    pt.is_boolean,
    pt.is_integer,
    pt.is_floating,
    pt.is_decimal,
    pt.is_string,
    pt.is_large_string,
    pt.is_binary,
    pt.is_large_binary,
    pt.is_fixed_size_binary,
    pt.is_date,
    pt.is_time,
    pt.is_timestamp,
    pt.is_duration,
)


def check_schema(schema: Any) -> pa.Schema:
    """The schema itself, without metadata, if a stream may have it."""
    if not isinstance(schema, pa.Schema):
        raise InvalidRequestError(f"a schema is a pyarrow.Schema, not {type(schema).__name__}")
    if not len(schema):
        raise InvalidRequestError("a schema has at least one column")
    seen = set()
    for field in schema:
        if field.name.startswith("_"):
            raise InvalidRequestError(f"column {field.name!r}: names that begin with _ are headwater's own")
        if field.name in seen:
            raise InvalidRequestError(f"column {field.name!r} stands in the schema twice")
        seen.add(field.name)
        _check_type(field.name, field.type)
    return schema.remove_metadata()


def is_opaque(schema: pa.Schema) -> bool:
    return bool(schema.equals(OPAQUE))


def _check_type(name: str, kind: pa.DataType) -> None:
    if isinstance(kind, pa.BaseExtensionType) or not any(test(kind) for test in _FLAT):
        if pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind):
            return _check_type(f"{name}.item", kind.value_type)
        if pt.is_struct(kind):
            if not kind.num_fields:
                raise InvalidRequestError(f"column {name!r}: a struct has at least one field")
            for field in kind:
                _check_type(f"{name}.{field.name}", field.type)
            return None
        if pt.is_map(kind):
            _check_type(f"{name}.key", kind.key_type)
            return _check_type(f"{name}.value", kind.item_type)
        raise InvalidRequestError(f"column {name!r}: a stream can't hold the type {kind}; dictionaries are given as their values' type")
    return None


def evolve(old: pa.Schema, new: Any) -> pa.Schema:
    """`new`, if every event written with `old` can be read with it: nullable columns added, types widened, nothing else."""
    new = check_schema(new)
    reasons = []
    for field in old:
        index = new.get_field_index(field.name)
        if index < 0:
            reasons.append(f"column {field.name!r} is missing")
            continue
        other = new.field(index)
        if field.nullable and not other.nullable:
            reasons.append(f"column {field.name!r} is no longer nullable")
        if not _widens(field.type, other.type):
            reasons.append(f"column {field.name!r} goes from {field.type} to {other.type}")
    added = [field for field in new if old.get_field_index(field.name) < 0]
    reasons += [f"the new column {field.name!r} is not nullable" for field in added if not field.nullable]
    if is_opaque(old) and not is_opaque(new):
        reasons.append("an opaque stream stays opaque")
    if reasons:
        raise InvalidRequestError(
            f"this schema can't follow the one in use: {'; '.join(reasons)}. A schema may add nullable columns and widen types.\n"
            f"in use:\n{_indented(old)}\nasked for:\n{_indented(new)}"
        )
    return new


def _indented(schema: pa.Schema) -> str:
    return "\n".join(f"  {field}" for field in schema)


def _widens(old: pa.DataType, new: pa.DataType) -> bool:
    if old.equals(new):
        return True
    if pt.is_integer(old) and pt.is_integer(new):
        signs = pt.is_signed_integer(old), pt.is_signed_integer(new)
        return bool(new.bit_width > old.bit_width and signs in ((True, True), (False, False), (False, True)))
    if pt.is_floating(old) and pt.is_floating(new):
        return bool(new.bit_width > old.bit_width)
    if pt.is_decimal(old) and pt.is_decimal(new):
        return bool(new.scale == old.scale and new.precision >= old.precision and new.bit_width >= old.bit_width)
    return bool((pt.is_string(old) and pt.is_large_string(new)) or (pt.is_binary(old) and pt.is_large_binary(new)))


def difference(old: pa.Schema, new: pa.Schema) -> str:
    """Both schemas, for an error's text."""
    return f"it has\n{_indented(old)}\nand not\n{_indented(new)}"


def upgrade(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """A batch of an older version of the schema, with the columns and types of this one."""
    if batch.schema.equals(schema):
        return batch
    columns = []
    for field in schema:
        index = batch.schema.get_field_index(field.name)
        if index < 0:
            columns.append(pa.nulls(batch.num_rows, field.type))
        else:
            columns.append(fit(batch.column(index), field.type))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def fit(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """A column with the type that it has by now."""
    if column.type.equals(kind):
        return column
    if column.null_count == len(column):
        # A fork and its parent may have added different columns of one name: what they share was written before, without either.
        return pa.nulls(len(column), kind)
    return column.cast(kind)


@lru_cache(maxsize=256)
def python_schema(schema: pa.Schema) -> pa.Schema | None:
    """The schema whose values are Python's own: its times have microseconds, where Arrow may have nanoseconds. None if it is the same."""
    fields = [pa.field(field.name, _python_type(field.type), field.nullable) for field in schema]
    found = pa.schema(fields)
    return None if found.equals(schema) else found


def _python_type(kind: pa.DataType) -> pa.DataType:
    if pt.is_timestamp(kind) and kind.unit == "ns":
        return pa.timestamp("us", kind.tz)
    if pt.is_duration(kind) and kind.unit == "ns":
        return pa.duration("us")
    if pt.is_time64(kind) and kind.unit == "ns":
        return pa.time64("us")
    if pt.is_struct(kind):
        return pa.struct([pa.field(field.name, _python_type(field.type), field.nullable) for field in kind])
    if pt.is_list(kind):
        return pa.list_(_python_type(kind.value_type))
    if pt.is_large_list(kind):
        return pa.large_list(_python_type(kind.value_type))
    return kind


Check = Callable[[Any], bool]
_INT_TYPES = (bool, int)


def _check_for(kind: pa.DataType) -> Check:
    """A quick test that a Python value fits a type; what it can't tell quickly, Arrow decides by converting."""
    if pt.is_integer(kind):
        low = -(1 << (kind.bit_width - 1)) if pt.is_signed_integer(kind) else 0
        high = (1 << (kind.bit_width - 1)) if pt.is_signed_integer(kind) else 1 << kind.bit_width
        return lambda value: type(value) is int and low <= value < high
    if pt.is_float64(kind):
        return lambda value: type(value) is float or (type(value) is int and abs(value) <= 1 << 53)
    if pt.is_string(kind) or pt.is_large_string(kind):
        return lambda value: type(value) is str and (value.isascii() or _is_utf8(value))
    if pt.is_binary(kind) or pt.is_large_binary(kind):
        return lambda value: type(value) is bytes
    if pt.is_boolean(kind):
        return lambda value: type(value) is bool
    if pt.is_nested(kind):
        return lambda value: _is_shaped(value, kind) and _converts(value, kind)
    return lambda value: _converts(value, kind)


def _is_shaped(value: Any, kind: pa.DataType) -> bool:
    """Whether lists, dicts and pairs stand where a type wants them.

    Arrow takes structs as pairs and tuples too, but not mixed in one column; and it aborts the process on a map's missing pair.
    """
    if value is None or not pt.is_nested(kind):
        return True
    if pt.is_struct(kind):
        return isinstance(value, dict) and all(_is_shaped(value.get(field.name), field.type) for field in kind)
    if not isinstance(value, list | tuple | np.ndarray) and not (pt.is_map(kind) and isinstance(value, dict)):
        return False
    if not pt.is_map(kind):
        return all(_is_shaped(item, kind.value_type) for item in value)
    pairs = value.items() if isinstance(value, dict) else value
    return all(
        isinstance(pair, tuple | list) and len(pair) == 2 and _is_shaped(pair[0], kind.key_type) and _is_shaped(pair[1], kind.item_type)
        for pair in pairs
    )


def _is_utf8(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _converts(value: Any, kind: pa.DataType) -> bool:
    try:
        pa.array([value], type=kind)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return False
    return True


def _size(value: Any) -> int:
    if type(value) in (str, bytes):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_size, value.values())) + 8 * len(value)
    return sum(map(_size, value)) if isinstance(value, list | tuple) else 8


class RowCheck:
    """Tells at once, at `write`, whether a mapping fits a schema, so that a flush never fails on one."""

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        self._names = frozenset(schema.names)
        self._checks = [(field.name, field.nullable, _check_for(field.type)) for field in schema]

    def __call__(self, row: Any) -> int:
        """The row's rough size in bytes; InvalidRequestError with the column and the reason if it does not fit."""
        if not isinstance(row, Mapping):
            raise InvalidRequestError(f"an event of this stream is a mapping with the columns {self._shown()}, not {type(row).__name__}")
        size = 0
        for name, nullable, check in self._checks:
            value = row.get(name)
            if value is None:
                if not nullable:
                    raise InvalidRequestError(f"column {name!r} is missing or None, and is not nullable")
            elif check(value):
                size += _size(value)
            else:
                shown = repr(value)
                kind = self.schema.field(name).type
                raise InvalidRequestError(f"column {name!r} takes {kind}; {shown[:80]} of type {type(value).__name__} does not fit")
        if len(row) > len(self._names) or not self._names.issuperset(row):
            extra = ", ".join(repr(name) for name in row if name not in self._names)
            if extra:
                raise InvalidRequestError(f"no column is called {extra}; this stream has {self._shown()}")
        return size

    def _shown(self) -> str:
        return ", ".join(f"{field.name}: {field.type}" for field in self.schema)


def check_batch_schema(given: pa.Schema, wanted: pa.Schema) -> None:
    """Refuse a batch whose columns can't become those of the stream without loss."""
    reasons = []
    for field in wanted:
        index = given.get_field_index(field.name)
        if index < 0:
            if not field.nullable:
                reasons.append(f"column {field.name!r} is missing")
        elif not _fits(given.field(index).type, field.type):
            reasons.append(f"column {field.name!r} is {given.field(index).type}, not {field.type}")
    reasons += [f"column {name!r} is not in the stream's schema" for name in given.names if wanted.get_field_index(name) < 0]
    if reasons:
        raise InvalidRequestError(
            f"this batch does not fit the stream: {'; '.join(reasons)}.\nstream:\n{_indented(wanted)}\nbatch:\n{_indented(given)}"
        )


def _fits(given: pa.DataType, wanted: pa.DataType) -> bool:
    if _widens(given, wanted) or pt.is_null(given):
        return True
    if pt.is_dictionary(given):
        return _fits(given.value_type, wanted)
    texts = pt.is_string, pt.is_large_string, pt.is_string_view
    blobs = pt.is_binary, pt.is_large_binary, pt.is_binary_view
    if any(test(given) for test in texts) and any(test(wanted) for test in (*texts, *blobs)):
        return True
    if any(test(given) for test in blobs) and any(test(wanted) for test in blobs):
        return True
    if pt.is_timestamp(given) and pt.is_timestamp(wanted):
        order = ("s", "ms", "us", "ns")
        return given.tz == wanted.tz and order.index(given.unit) <= order.index(wanted.unit)
    if pt.is_nested(given) and pt.is_nested(wanted):
        return bool(given.equals(wanted)) or _nested_fits(given, wanted)
    return False


def _nested_fits(given: pa.DataType, wanted: pa.DataType) -> bool:
    if pt.is_struct(given) and pt.is_struct(wanted):
        return [f.name for f in given] == [f.name for f in wanted] and all(
            _fits(a.type, b.type) for a, b in zip(given, wanted, strict=True)
        )
    lists = pt.is_list, pt.is_large_list, pt.is_fixed_size_list
    if any(test(given) for test in lists) and any(test(wanted) for test in lists):
        return _fits(given.value_type, wanted.value_type)
    return bool(
        pt.is_map(given) and pt.is_map(wanted) and _fits(given.key_type, wanted.key_type) and _fits(given.item_type, wanted.item_type)
    )
