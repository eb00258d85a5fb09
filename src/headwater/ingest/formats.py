"""Which reader a format has, and the schema that files suggest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pyarrow as pa
import pyarrow.types as pt

from headwater.errors import InvalidRequestError
from headwater.ingest import avro, columnar, delimited, jsonlines
from headwater.ingest.delimited import Delimited
from headwater.ingest.jsonlines import JsonLines
from headwater.ingest.pieces import BAD, Piece, Position
from headwater.ingest.plain import PlainLines
from headwater.ingest.rows import TextLayout, read_text
from headwater.ingest.sources import SourceFile, naming
from headwater.ingest.target import Target
from headwater.model.schemas import OPAQUE, TIME


class Dialect(NamedTuple):
    """What CSV files leave open. A delimiter of None is the format's own."""

    delimiter: str | None = None
    has_header: bool = True

    def delimiter_of(self, format: str) -> str:
        return self.delimiter or ("\t" if format == "tsv" else ",")


def check_dialect(dialect: Dialect) -> None:
    delimiter = dialect.delimiter
    if delimiter is not None and (len(delimiter) != 1 or not delimiter.isascii() or delimiter in '"\r\n'):
        raise InvalidRequestError(f"a delimiter is one ASCII character, and no quote or line feed, not {delimiter!r}")


def read_file(file: SourceFile, start: Position, target: Target, dialect: Dialect, *, keep_bad: bool) -> Iterator[Piece]:
    """The rows of a file from a position on, as events of the target."""
    if file.format in ("parquet", "avro"):
        if target.is_opaque:
            raise InvalidRequestError(f"{file.path} has columns and the stream has none: make it with a schema")
        read = columnar.read_parquet if file.format == "parquet" else avro.read_avro
        return read(file, start, target, keep_bad=keep_bad)
    return read_text(file, start, _layout(file, target, dialect), keep_bad=keep_bad)


def _layout(file: SourceFile, target: Target, dialect: Dialect) -> TextLayout:
    if file.format == "lines":
        return PlainLines(target)
    if file.format == "jsonl":
        return JsonLines(target)
    return Delimited(target, file.path, dialect.delimiter_of(file.format), dialect.has_header)


def infer_schema(file: SourceFile, dialect: Dialect) -> pa.Schema | None:
    """The schema for a stream of such files; None if this one is empty."""
    if file.format == "lines":
        return OPAQUE
    if file.format in ("csv", "tsv") and not dialect.has_header:
        raise InvalidRequestError(f"{file.path}: files without a header don't name their columns: give a schema")
    try:
        if file.format in ("csv", "tsv"):
            found = delimited.infer(file, dialect.delimiter_of(file.format))
        elif file.format == "jsonl":
            found = jsonlines.infer(file)
        else:
            found = (columnar if file.format == "parquet" else avro).infer(file)
    except BAD as error:
        if isinstance(error, InvalidRequestError):
            raise naming(file.path, error) from None
        raise InvalidRequestError(f"{file.path}: no schema fits its first rows: {error}. Give a schema", path=file.path) from error
    is_guess = file.format not in ("parquet", "avro")
    return (
        pa.schema([pa.field(field.name, _settled(field.type, is_guess), field.nullable) for field in found]) if found is not None else None
    )


def _settled(kind: pa.DataType, is_guess: bool) -> pa.DataType:
    """A type that a stream can have, and that later files are likely to fit."""
    if pt.is_null(kind):
        return pa.string()
    if pt.is_dictionary(kind):
        return kind.value_type
    if is_guess and pt.is_timestamp(kind):
        return TIME
    if pt.is_list(kind):
        return pa.list_(_settled(kind.value_type, is_guess))
    if pt.is_struct(kind):
        return pa.struct([pa.field(field.name, _settled(field.type, is_guess), field.nullable) for field in kind])
    return kind
