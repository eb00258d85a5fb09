"""CSV and its kin: a header, then a record for each row, with line feeds in quotes if need be."""

from __future__ import annotations

import re
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
_INFINITE = re.compile(r"[+-]?inf(inity)?", re.IGNORECASE)
_BLANK_LINES = re.compile(rb"\A(?:[ \t\r]*\n)+")


class Delimited:
    """Rows by the header's names, or by the stream's columns if the files have no header."""

    def __init__(self, target: Target, path: str, delimiter: str, has_header: bool) -> None:
        self.target = target
        self._path = path
        self._delimiter = delimiter
        self._has_header = has_header
        self._quoting = Quoting(delimiter)
        self._names: list[str] = []

    def begin(self, text: TextFile) -> Position:
        mark = text.skip_mark()
        if not self._has_header:
            self._refuse_opaque()
            self._names = list(self.target.schema.names)
            return Position(mark)
        header, begin = _read_header(text, self._quoting)
        if header:
            self._refuse_opaque()
            self._names = _names(header, self._quoting, self._delimiter)
            self.target.check_columns(self._names, self._path)
            for name in self._names:
                kind = self.target.schema.field(name).type
                if pt.is_nested(kind):
                    raise InvalidRequestError(f"{self._path}: CSV can't fill the column {name!r}: {kind}: ingest JSON lines or Parquet")
        return begin._replace(offset=mark + begin.offset)

    def _refuse_opaque(self) -> None:
        if self.target.is_opaque:
            raise InvalidRequestError(f"{self._path} has columns and the stream has none: make it with a schema, or give the format lines")

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
        self._check_infinite(data, batch)
        for name in filter(self._is_zoned, self._names):
            column = batch.column(name)
            nulls = pc.is_in(column, value_set=pa.array(_NULLS))
            batch = batch.set_column(batch.schema.get_field_index(name), name, pc.if_else(nulls, None, column))
        return self.target.fit(batch)

    def _check_infinite(self, data: bytes, batch: pa.RecordBatch) -> None:
        """Arrow also makes infinite what is too large: only what says so may be."""
        for name in self._names:
            column = batch.column(name)
            if not pt.is_floating(column.type) or not pc.any(pc.is_inf(column)).as_py():
                continue
            texts = _read(data, self._names, self._delimiter, dict.fromkeys(self._names, pa.string())).column(name)
            for text in texts.filter(pc.is_inf(column)).to_pylist():
                if not _INFINITE.fullmatch(text.strip()):
                    raise ValueError(f"column {name!r}: {text.strip()} is too large for {column.type}: it would become infinite")

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
        mark = text.skip_mark()
        header, begin = _read_header(text, quoting)
        text.go_to(mark + begin.offset)
        rows = next(whole_records(text, quoting.end), b"")
    names = _names(header, quoting, delimiter) if header else []
    return _read(rows, names, delimiter, {}).schema if rows.strip() else None


def _read_header(text: TextFile, quoting: Quoting) -> tuple[bytes, Position]:
    """The first record that is not blank, empty if there is none, and where the rows begin, counted from here."""
    offset = lines = 0
    for data in whole_records(text, quoting.end):
        rest = _BLANK_LINES.sub(b"", data)
        header = rest[: int(quoting.ends(rest)[0])] if rest.strip() else rest
        read = data[: len(data) - len(rest) + len(header)]
        offset, lines = offset + len(read), lines + read.count(b"\n")
        if header.strip():
            return header, Position(offset, lines)
    return b"", Position(offset, lines)


def _names(header: bytes, quoting: Quoting, delimiter: str) -> list[str]:
    try:
        header.decode()
        if b"\r" in quoting.drop_quoted(header).strip(b"\r\n"):
            raise InvalidRequestError("its lines end with CR alone: make them end with LF or CR LF")
        read = pyarrow.csv.read_csv(
            pa.BufferReader(header.rstrip(b"\r\n") + b"\n"),
            read_options=pyarrow.csv.ReadOptions(use_threads=False, block_size=len(header) + 2),
            parse_options=pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
        )
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"the header is no text in UTF-8: {error}") from error
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
