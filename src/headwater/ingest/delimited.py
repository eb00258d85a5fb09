"""CSV and its kin: a header, then a record for each row, with line feeds in quotes if need be."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.types as pt

from headwater.errors import InvalidRequestError
from headwater.ingest.pieces import Position
from headwater.ingest.sources import SourceFile
from headwater.ingest.target import Target
from headwater.ingest.text import Quoting, TextFile, whole_records

#: Not NaN: that is a number, of its own kind.
_NULLS = ["", "NULL", "null", "NA", "N/A", "#N/A", "\\N"]


class Delimited:
    """Rows by the header's names, or by the stream's columns if the files have no header."""

    def __init__(self, target: Target, path: str, delimiter: str, has_header: bool) -> None:
        if target.is_opaque:
            raise InvalidRequestError(f"{path} has columns and the stream has none: make it with a schema, or give the format lines")
        self.target = target
        self._path = path
        self._delimiter = delimiter
        self._has_header = has_header
        self._quoting = Quoting(delimiter)
        self._names: list[str] = []

    def begin(self, text: TextFile) -> Position:
        mark = text.skip_mark()
        if not self._has_header:
            self._names = list(self.target.schema.names)
            return Position(mark)
        header = _first_record(text, self._quoting)
        if header.strip():
            self._names = _names(header, self._delimiter)
            self.target.check_columns(self._names, self._path)
            for name in self._names:
                kind = self.target.schema.field(name).type
                if pt.is_nested(kind):
                    raise InvalidRequestError(f"{self._path}: CSV can't fill the column {name!r}: {kind}: ingest JSON lines or Parquet")
        return Position(mark + len(header), header.count(b"\n"))

    def find_end(self, data: bytes) -> int:
        return self._quoting.end(data)

    def record_ends(self, data: bytes) -> Any:
        return self._quoting.ends(data)

    def is_row(self, record: bytes) -> bool:
        return bool(record.rstrip(b"\r\n"))

    def parse(self, data: bytes) -> pa.RecordBatch:
        if b'"' in data and self._quoting.is_open(data):
            raise ValueError("a quote is opened and not closed")
        try:
            batch = _read(data, self._names, self._delimiter, {name: self._read_type(name) for name in self._names})
        except pa.ArrowException as error:
            raise ValueError(self._explain(str(error))) from error
        for name in filter(self._is_zoned, self._names):
            column = batch.column(name)
            nulls = pc.is_in(column, value_set=pa.array(_NULLS))
            batch = batch.set_column(batch.schema.get_field_index(name), name, pc.if_else(nulls, None, column))
        return self.target.fit(batch)

    def _read_type(self, name: str) -> pa.DataType:
        # Arrow wants all of a column to have a zone, or none; ours without one are UTC, so `fit` reads the text.
        return pa.string() if self._is_zoned(name) else self.target.schema.field(name).type

    def _is_zoned(self, name: str) -> bool:
        kind = self.target.schema.field(name).type
        return bool(pt.is_timestamp(kind) and kind.tz is not None)

    def _explain(self, reason: str) -> str:
        for index, name in enumerate(self._names):
            reason = reason.replace(f"In CSV column #{index}: ", f"column {name!r}: ", 1)
        return reason.replace("CSV parse error: ", "").replace("CSV conversion error to", "can't become").replace("Row #1: ", "")


def infer(file: SourceFile, delimiter: str) -> pa.Schema | None:
    """The schema of a file's first rows, by its header; None if there are none."""
    quoting = Quoting(delimiter)
    with TextFile(file) as text:
        text.skip_mark()
        data = next(whole_records(text, quoting.end), b"")
    header = data[: int(quoting.ends(data)[0])] if data else b""
    rows = data[len(header) :]
    return _read(rows, _names(header, delimiter), delimiter, {}).schema if rows.strip() else None


def _first_record(text: TextFile, quoting: Quoting) -> bytes:
    data = next(whole_records(text, quoting.end), b"")
    return data[: int(quoting.ends(data)[0])] if data else b""


def _names(header: bytes, delimiter: str) -> list[str]:
    try:
        read = pyarrow.csv.read_csv(
            pa.BufferReader(header.rstrip(b"\r\n") + b"\n"),
            read_options=pyarrow.csv.ReadOptions(use_threads=False, block_size=len(header) + 2),
            parse_options=pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
        )
    except pa.ArrowException as error:
        raise InvalidRequestError(f"the header can't be read: {error}") from error
    return list(read.schema.names)


def _read(data: bytes, names: list[str], delimiter: str, types: dict[str, pa.DataType]) -> pa.RecordBatch:
    table = pyarrow.csv.read_csv(
        pa.BufferReader(data),
        read_options=pyarrow.csv.ReadOptions(use_threads=False, block_size=len(data) + 1, column_names=names),
        parse_options=pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
        convert_options=pyarrow.csv.ConvertOptions(column_types=types, null_values=_NULLS),
    )
    return table.combine_chunks().to_batches()[0] if table.num_rows else pa.RecordBatch.from_pylist([], schema=table.schema)
