"""Arrow schemas of streams: which are allowed, and how they may change."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pyarrow as pa
import pyarrow.types as pt

from headwater.errors import InvalidRequestError
from headwater.model.limits import NESTED_TYPES

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
    try:
        for field in schema:
            if field.name.startswith("_"):
                raise InvalidRequestError(f"column {field.name!r}: names that begin with _ are headwater's own")
            if field.name in seen:
                raise InvalidRequestError(f"column {field.name!r} stands in the schema twice")
            seen.add(field.name)
            _check_type(field.name, field.type)
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"a column's name is not UTF-8: {error}") from error
    schema = schema.remove_metadata()
    # The metadata of a field may make an extension type of it.
    stored = pa.ipc.read_schema(schema.serialize())
    if not stored.equals(schema):
        raise InvalidRequestError(f"this schema would be stored as another one: {difference(stored, schema)}")
    return schema


def is_opaque(schema: pa.Schema) -> bool:
    return bool(schema.equals(OPAQUE))


def _check_type(name: str, kind: pa.DataType, depth: int = 0) -> None:
    """Refuse a type that blocks, or the Parquet of chunks, can't hold: for some its writer would even end the process."""
    if depth > NESTED_TYPES:
        raise InvalidRequestError(f"column {name[:80]!r}: types may be nested {NESTED_TYPES} deep")
    if pt.is_timestamp(kind) and kind.tz:
        _check_zone(name, kind)
    if pt.is_decimal(kind) and not 0 <= kind.scale <= kind.precision:
        raise InvalidRequestError(f"column {name!r}: the scale of {kind} is not from 0 to its precision, so no chunk could hold it")
    if (pt.is_fixed_size_list(kind) and not kind.list_size) or (pt.is_fixed_size_binary(kind) and not kind.byte_width):
        raise InvalidRequestError(f"column {name!r}: values of {kind} have the size 0, so no chunk could hold them")
    if isinstance(kind, pa.BaseExtensionType) or not any(test(kind) for test in _FLAT):
        if pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind):
            return _check_type(f"{name}.item", kind.value_type, depth + 1)
        if pt.is_struct(kind):
            if not kind.num_fields:
                raise InvalidRequestError(f"column {name!r}: a struct has at least one field")
            if len({field.name for field in kind}) < kind.num_fields:
                raise InvalidRequestError(f"column {name!r}: a field stands in the struct twice")
            for field in kind:
                _check_type(f"{name}.{field.name}", field.type, depth + 1)
            return None
        if pt.is_map(kind):
            _check_type(f"{name}.key", kind.key_type, depth + 1)
            return _check_type(f"{name}.value", kind.item_type, depth + 1)
        raise InvalidRequestError(f"column {name!r}: a stream can't hold the type {kind}; dictionaries are given as their values' type")
    return None


def _check_zone(name: str, kind: pa.DataType) -> None:
    try:
        pa.scalar(0, kind).as_py()
    except (LookupError, ValueError, OSError) as error:
        raise InvalidRequestError(f"column {name!r}: {kind.tz!r} is no time zone known here, so {kind} could not be read") from error


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
        if not widens(field.type, other.type):
            reasons.append(f"column {field.name!r} goes from {field.type} to {other.type}")
    added = [field for field in new if old.get_field_index(field.name) < 0]
    reasons += [f"the new column {field.name!r} is not nullable" for field in added if not field.nullable]
    if is_opaque(old) and not is_opaque(new):
        reasons.append("an opaque stream stays opaque")
    if reasons:
        raise InvalidRequestError(
            f"this schema can't follow the one in use: {'; '.join(reasons)}. A schema may add nullable columns and widen types.\n"
            f"in use:\n{indented(old)}\nasked for:\n{indented(new)}"
        )
    return new


def indented(schema: pa.Schema) -> str:
    return "\n".join(f"  {field}" for field in schema)


def widens(old: pa.DataType, new: pa.DataType) -> bool:
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
    return f"it has\n{indented(old)}\nand not\n{indented(new)}"


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
    fields = [pa.field(field.name, python_type(field.type), field.nullable) for field in schema]
    found = pa.schema(fields)
    return None if found.equals(schema) else found


def python_type(kind: pa.DataType) -> pa.DataType:
    """The type whose values are Python's own."""
    if pt.is_timestamp(kind) and kind.unit == "ns":
        return pa.timestamp("us", kind.tz)
    if pt.is_duration(kind) and kind.unit == "ns":
        return pa.duration("us")
    if pt.is_time64(kind) and kind.unit == "ns":
        return pa.time64("us")
    if pt.is_struct(kind):
        return pa.struct([_python_field(field) for field in kind])
    if pt.is_map(kind):
        return pa.map_(_python_field(kind.key_field), _python_field(kind.item_field), keys_sorted=kind.keys_sorted)
    if pt.is_fixed_size_list(kind):
        return pa.list_(_python_field(kind.value_field), kind.list_size)
    if pt.is_list(kind):
        return pa.list_(_python_field(kind.value_field))
    return pa.large_list(_python_field(kind.value_field)) if pt.is_large_list(kind) else kind


def _python_field(field: pa.Field) -> pa.Field:
    return field.with_type(python_type(field.type))
