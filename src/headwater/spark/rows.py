"""A DataFrame's rows on their way into a store: checked against the stream before the first one, then shaped for it, batch by batch."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import StructType

from headwater import InvalidRequestError, NotFoundError, Scaling, Store
from headwater.spark.options import SinkOptions
from headwater.spark.types import TIME, convert, spark_arrow_type, to_arrow

#: Columns of the source that say where a row came from: they are not written.
_ORIGIN = ("_stream", "_segment", "_number", "_appended")


def check_target(store: Store, options: SinkOptions, schema: StructType) -> None:
    """Refuse rows that don't fit where they go, before the first of them; make the stream or table if that was asked for."""
    given = to_arrow(schema)
    for option, column in (("key", options.key), ("time", options.time), ("stream_column", options.stream_column)):
        if column is not None and given.get_field_index(column) < 0:
            raise InvalidRequestError(f"option {option!r} names the column {column!r}, and there are only: {', '.join(given.names)}")
    if options.table is not None:
        if options.create or options.table in store.tables():
            store.table(options.table)
            return
        raise NotFoundError(f"there is no table {options.table} in {store.url}: give option('create', 'true') to make it")
    if options.stream is None:
        return
    try:
        stream = store.stream(options.stream)
    except NotFoundError:
        if not options.create:
            raise NotFoundError(f"there is no stream {options.stream} in {store.url}: give option('create', 'true') to make it") from None
        made = stream_schema(given, options)
        stream = store.create_stream(options.stream, schema=made, scaling=Scaling.fixed(options.segments), exist_ok=True)
    if stream.kind != "events":
        raise InvalidRequestError(f"{stream.name} is of kind {stream.kind!r}: Spark writes to streams of events")
    empty = pa.RecordBatch.from_pylist([], schema=given)
    # A transaction that is never begun checks a batch as a commit would, and stores nothing.
    check = store.transaction()
    try:
        check.write_batch(stream.name, shape(empty, options, stream.schema), key=options.key, missing="null")
    finally:
        check.abort()


def stream_schema(given: pa.Schema, options: SinkOptions) -> pa.Schema | None:
    """The schema of a stream that is made for these rows; None for opaque bytes."""
    fields = [field for field in given if not field.name.startswith("_") and field.name != options.stream_column]
    if [(field.name, field.type) for field in fields] == [("value", pa.binary())]:
        return None
    if not fields:
        raise InvalidRequestError(f"no column is left to store of {', '.join(given.names)}: names that begin with _ are headwater's own")
    return pa.schema([field.with_nullable(True) for field in fields]).remove_metadata()


def shape(batch: pa.RecordBatch, options: SinkOptions, schema: pa.Schema) -> pa.RecordBatch:
    """The rows as `write_batch` takes them: event time as `_time`, types as the stream has them where Spark has no such types."""
    names, columns = [], []
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if name in _ORIGIN or name == options.stream_column or (name == "_time" and options.time is not None):
            continue
        index = schema.get_field_index(name)
        if name == "_time":
            column = convert(column, TIME)
        elif index >= 0:
            column = _as_stored(column, schema.field(index).type)
        names.append(name)
        columns.append(column)
    if options.time is not None:
        names.append("_time")
        columns.append(_event_time(batch.column(options.time), options.time))
        if schema.get_field_index(options.time) < 0 and options.time in names:
            at = names.index(options.time)
            del names[at], columns[at]
    return pa.RecordBatch.from_arrays(columns, names=names)


def _as_stored(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Spark has fewer types than Arrow: what became another one there becomes what it was, if it fits."""
    if column.type.equals(kind) or not spark_arrow_type(kind).equals(spark_arrow_type(column.type)):
        return column
    try:
        return column.cast(kind)
    except pa.ArrowException as error:
        raise InvalidRequestError(f"a value can't be stored as {kind}: {error}") from error


def _event_time(column: pa.Array, name: str) -> pa.Array:
    if not pa.types.is_timestamp(column.type):
        raise InvalidRequestError(f"column {name!r} is {column.type}, not a timestamp: it can't be the event time")
    return convert(column, TIME) if column.type.tz is not None else convert(column, pa.timestamp("us")).cast(TIME)


def by_stream(batch: pa.RecordBatch, options: SinkOptions) -> Iterator[tuple[str, pa.RecordBatch]]:
    """The rows by the stream they go to."""
    if options.stream_column is None:
        yield str(options.stream), batch
        return
    targets = batch.column(options.stream_column)
    if targets.null_count:
        raise InvalidRequestError(f"{targets.null_count} rows have no stream in the column {options.stream_column!r}")
    for name in pc.unique(targets).to_pylist():
        yield name, batch.filter(pc.equal(targets, name))


def without_strangers(batch: pa.RecordBatch, stream: str, schema: pa.Schema, options: SinkOptions) -> pa.RecordBatch:
    """Of rows for several streams: without the columns that this stream lacks, all of whose values must be null."""
    kept = []
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if name.startswith("_") or name in (options.key, options.time, options.stream_column) or schema.get_field_index(name) >= 0:
            kept.append(name)
        elif column.null_count < len(column):
            raise InvalidRequestError(f"stream {stream} has no column {name!r}, and rows for it have values there")
    return batch.select(kept)


def to_entries(batch: pa.RecordBatch, options: SinkOptions) -> Iterator[tuple[str, bytes]]:
    """Rows as a table's entries: the column `value` alone is the value, several columns are a JSON object."""
    key = str(options.key)
    keys = batch.column(key)
    if keys.null_count:
        raise InvalidRequestError(f"{keys.null_count} rows have no key in the column {key!r}")
    rest = [name for name in batch.schema.names if name != key and name not in _ORIGIN]
    try:
        texts = [value.decode() if isinstance(value, bytes) else str(value) for value in keys.to_pylist()]
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"a table's key is a text, and a row has {error.object!r} in the column {key!r}: give hex({key})"
        ) from None
    if rest == ["value"] and _is_raw(batch.schema.field("value").type):
        values = batch.column("value").cast(pa.binary()).to_pylist()
        if None in values:
            raise InvalidRequestError("a row has no value")
        yield from zip(texts, values, strict=True)
        return
    for text, row in zip(texts, batch.select(rest).to_pylist(), strict=True):
        yield text, _to_json(row).encode()


def _is_raw(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_string(kind))


def _to_json(row: dict[str, Any]) -> str:
    try:
        return json.dumps(row, default=_json, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(_without_nan(row), default=_json, separators=(",", ":"))


def _without_nan(value: Any) -> Any:
    """NaN and the infinities, which JSON lacks, as the texts that Spark's `to_json` has for them."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {name: _without_nan(item) for name, item in value.items()}
    return [_without_nan(item) for item in value] if isinstance(value, list | tuple) else value


def _json(value: Any) -> Any:
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    raise InvalidRequestError(f"a {type(value).__name__} can't be stored in a table")
