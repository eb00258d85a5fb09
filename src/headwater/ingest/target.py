"""What rows have to become: the columns of the stream, with routing key and event time beside them."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from headwater.errors import InvalidRequestError
from headwater.ingest.fields import time_of
from headwater.model.columns import cast_column, check_nested_nulls, check_values
from headwater.model.keys import key_column
from headwater.model.schemas import OPAQUE, TIME, is_opaque

#: A date, or a date and a time with no zone behind it.
_LOCAL_TIME = r"^\d{4}-\d\d-\d\d($|[T ][^Zz+-]*$)"


class Target:
    """The stream's schema, and which columns are routing key and event time."""

    def __init__(self, schema: pa.Schema, key: str | None, time: str | None) -> None:
        self.schema = schema
        self.key = key
        self.time = time
        self.is_opaque = is_opaque(schema)
        if self.is_opaque:
            return
        for name in filter(None, (key, time)):
            if name not in schema.names:
                raise InvalidRequestError(f"the stream has no column {name!r}; it has {', '.join(schema.names)}")
        if key is not None and not any(test(schema.field(key).type) for test in _KEY_TYPES):
            raise InvalidRequestError(f"the column {key!r} is {schema.field(key).type}: a routing key is text, bytes or a whole number")

    def check_columns(self, names: list[str], path: str) -> None:
        """Refuse a file whose columns are not those of the stream, before its first row."""
        if len(set(names)) < len(names):
            raise InvalidRequestError(f"{path} has a column twice: {', '.join(names)}", path=path)
        extra = [name for name in names if name not in self.schema.names]
        missing = [field.name for field in self.schema if not field.nullable and field.name not in names]
        if extra or missing:
            said = [f"the stream has no column {', '.join(map(repr, extra))}"] * bool(extra)
            said += [f"it lacks {', '.join(map(repr, missing))}, which is never null"] * bool(missing)
            raise InvalidRequestError(f"{path}: {'; '.join(said)}; the stream has {self.shown()}", path=path)

    def shown(self) -> str:
        return ", ".join(f"{field.name}: {field.type}" for field in self.schema)

    def fit(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The batch as events: the stream's columns and types, `_key`, `_time`. What does not fit raises one of `pieces.BAD`."""
        columns = [self._column(batch, field) for field in self.schema]
        names = list(self.schema.names)
        if self.key is not None:
            columns.append(key_column(columns[names.index(self.key)], self.key))
        if self.time is not None:
            columns.append(event_times(columns[names.index(self.time)]))
        names += ["_key"] * (self.key is not None) + ["_time"] * (self.time is not None)
        return pa.RecordBatch.from_arrays(columns, names=names)

    def _column(self, batch: pa.RecordBatch, field: pa.Field) -> pa.Array:
        at = batch.schema.get_field_index(field.name)
        if at < 0:
            column = pa.nulls(batch.num_rows, field.type)
        else:
            column = as_type(batch.column(at), field.type, field.name)
        if not field.nullable and column.null_count:
            raise ValueError(f"the column {field.name!r} is missing or null, and is never null")
        # As `write_batch` does, but here the row is found.
        check_values(field.name, column)
        check_nested_nulls(field.name, column)
        return column

    def empty(self) -> pa.RecordBatch:
        """No events."""
        return pa.RecordBatch.from_pylist([], schema=self.schema)

    def opaque(self, values: pa.Array, keys: pa.Array | None = None, times: pa.Array | None = None) -> pa.RecordBatch:
        """Bytes as events of a stream without a schema."""
        arrays = {OPAQUE.names[0]: values, "_key": keys, "_time": times}
        return pa.RecordBatch.from_pydict({name: array for name, array in arrays.items() if array is not None})


_KEY_TYPES = (pt.is_integer, pt.is_string, pt.is_large_string, pt.is_binary, pt.is_large_binary)


def as_type(column: pa.Array, kind: pa.DataType, name: str) -> pa.Array:
    """A column in another type, if no value is changed by it."""
    if column.type.equals(kind):
        return column
    if pt.is_dictionary(column.type):
        column = column.dictionary_decode()
    try:
        if pt.is_timestamp(kind) and kind.tz is not None:
            return as_utc(column).cast(kind)
        return cast_column(column, kind)
    except pa.ArrowException as error:
        raise ValueError(f"the column {name!r} takes {kind}: {error}") from error


def as_utc(column: pa.Array) -> pa.Array:
    """Times in UTC, which is also what those without a zone are taken for."""
    if pt.is_timestamp(column.type):
        return column if column.type.tz is not None else column.cast(pa.timestamp(column.type.unit, "UTC"))
    if pt.is_string(column.type) or pt.is_large_string(column.type):
        ending = pc.if_else(pc.less_equal(pc.binary_length(column), 10), "T00:00:00Z", "Z")
        is_local = pc.match_substring_regex(column, _LOCAL_TIME)
        return pc.if_else(is_local, pc.binary_join_element_wise(column, ending, ""), column).cast(TIME)
    return column


def event_times(column: pa.Array) -> pa.Array:
    """A column of times, of ISO text or of seconds since 1970 as event times."""
    kind = column.type
    if pt.is_timestamp(kind) or pt.is_string(kind) or pt.is_large_string(kind):
        times = as_utc(column).cast(TIME)
    elif pt.is_date(kind):
        times = column.cast(pa.timestamp("us")).cast(TIME)
    else:
        times = pa.array(_seconds(column), TIME)
    check_values("_time", times)
    return times


def _seconds(column: pa.Array) -> list[Any]:
    return [time_of(value) for value in column.to_pylist()]
