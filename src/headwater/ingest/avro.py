"""Avro container files, by fastavro: an extra, `pip install 'headwater[avro]'`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, BinaryIO
from uuid import UUID

import pyarrow as pa

from headwater.errors import InvalidRequestError
from headwater.ingest.columnar import fitted
from headwater.ingest.pieces import Piece, Position
from headwater.ingest.sources import SourceFile, unreadable
from headwater.ingest.target import Target

_BATCH_ROWS = 8192
_DECIMAL_DIGITS = 38
_PLAIN = {
    "null": pa.null(),
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "bytes": pa.binary(),
    "string": pa.string(),
}
_LOGICAL = {
    "date": pa.date32(),
    "time-millis": pa.time32("ms"),
    "time-micros": pa.time64("us"),
    "timestamp-millis": pa.timestamp("ms", "UTC"),
    "timestamp-micros": pa.timestamp("us", "UTC"),
    "local-timestamp-millis": pa.timestamp("ms"),
    "local-timestamp-micros": pa.timestamp("us"),
    "uuid": pa.string(),
}


def read_avro(file: SourceFile, start: Position, target: Target, *, keep_bad: bool) -> Iterator[Piece]:
    """The rows of a file from a position on; those before it are read and left out."""
    with _opened(file) as (raw, reader):
        schema = _arrow_schema(reader.writer_schema, file.path)
        target.check_columns(schema.names, file.path)
        row = 0
        while rows := _next_rows(file, reader, min(_BATCH_ROWS, start.rows - row) if row < start.rows else _BATCH_ROWS):
            if row < start.rows:
                row += len(rows)
                continue
            try:
                batch = _batch(rows, schema)
            except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
                raise InvalidRequestError(f"{file.path}, rows {row + 1} to {row + len(rows)}: {error}", path=file.path) from error
            piece = fitted(batch, row, raw.tell(), target, keep_bad=keep_bad)
            row = piece.end.rows
            yield piece


def infer(file: SourceFile) -> pa.Schema | None:
    """The file's own schema."""
    with _opened(file) as (_, reader):
        return _arrow_schema(reader.writer_schema, file.path)


@contextmanager
def _opened(file: SourceFile) -> Iterator[tuple[BinaryIO, Any]]:
    try:
        import fastavro  # an extra, which only Avro files need
    except ImportError as error:
        raise InvalidRequestError("reading Avro files needs fastavro: pip install 'headwater[avro]'") from error
    with file.open() as raw:
        try:
            reader = fastavro.reader(raw)
        except Exception as error:  # whatever its decoder stumbles over: the file is damaged
            raise unreadable(file.path, error) from error
        yield raw, reader


def _next_rows(file: SourceFile, reader: Any, count: int) -> list[dict[str, Any]]:
    try:
        return list(islice(reader, count))
    except Exception as error:  # whatever its decoder stumbles over: the file is damaged
        raise unreadable(file.path, error if str(error) else EOFError("it ends in the middle of a row")) from error


def _batch(rows: list[dict[str, Any]], schema: pa.Schema) -> pa.RecordBatch:
    columns = []
    for field in schema:
        values = [row[field.name] for row in rows]
        if _has_text(field.type):
            values = [_without_uuids(value) for value in values]
        columns.append(pa.array(values, field.type))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _has_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or any(_has_text(kind.field(index).type) for index in range(kind.num_fields))


def _without_uuids(value: Any) -> Any:
    """With text in place of UUIDs, also in lists, records and maps."""
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, list):
        return [_without_uuids(item) for item in value]
    return {name: _without_uuids(item) for name, item in value.items()} if isinstance(value, dict) else value


def _arrow_schema(schema: Any, path: str) -> pa.Schema:
    if not isinstance(schema, dict) or schema.get("type") != "record":
        raise InvalidRequestError(f"{path}: its values are no records, but {schema!r}", path=path)
    return pa.schema([_field(field, path) for field in schema["fields"]])


def _field(field: dict[str, Any], path: str) -> pa.Field:
    kind, nullable = _type(field["type"], f"{path}: {field['name']}")
    return pa.field(field["name"], kind, nullable)


def _type(schema: Any, place: str) -> tuple[pa.DataType, bool]:
    """An Avro type as Arrow's, and whether it may be null."""
    if isinstance(schema, list):
        others = [item for item in schema if item != "null"]
        if len(others) != 1:
            raise InvalidRequestError(f"{place}: a union of {len(others)} types can't be a column")
        return _type(others[0], place)[0], len(others) < len(schema)
    if not isinstance(schema, dict):
        if schema not in _PLAIN:
            raise InvalidRequestError(f"{place}: the type {schema!r} can't be a column")
        return _PLAIN[schema], schema == "null"
    word, logical = schema["type"], schema.get("logicalType")
    if logical == "decimal":
        digits = schema["precision"]
        if digits > _DECIMAL_DIGITS:
            raise InvalidRequestError(f"{place}: a decimal of {digits} digits can't be a column; one has up to {_DECIMAL_DIGITS}")
        return pa.decimal128(digits, schema.get("scale", 0)), False
    if logical in _LOGICAL:
        return _LOGICAL[logical], False
    if word == "record":
        return pa.struct([_field(field, place) for field in schema["fields"]]), False
    if word == "array":
        return pa.list_(_type(schema["items"], place)[0]), False
    if word == "map":
        return pa.map_(pa.string(), _type(schema["values"], place)[0]), False
    if word in ("enum", "fixed"):
        return pa.string() if word == "enum" else pa.binary(schema["size"]), False
    return _type(word, place)
