"""JSON lines: an object in each line, as rows of a schema, or as they are with a look at the fields that are asked for."""

from __future__ import annotations

import contextlib
from datetime import time
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json
import pyarrow.types as pt

from headwater.errors import InvalidRequestError
from headwater.ingest.fields import get_field, json_object, key_of, time_of
from headwater.ingest.objects import check_levels, count_objects
from headwater.ingest.pieces import Position
from headwater.ingest.plain import split_lines
from headwater.ingest.sources import SourceFile
from headwater.ingest.target import Target, as_utc
from headwater.ingest.text import TextFile, end_of_lines, line_ends, whole_records
from headwater.model.columns import with_wide_floats
from headwater.model.schemas import TIME


class JsonLines:
    """Lines of white space alone are no rows, and no mistake either."""

    def __init__(self, target: Target) -> None:
        self.target = target
        for field in target.schema:
            if has_no_json(field.type):
                raise InvalidRequestError(f"JSON lines can't fill the column {field.name!r}: {field.type}: ingest Parquet or Avro")
        # Arrow reads times of day and dates from JSON as numbers only; as text they are cast. What is missing, `fit` says best.
        fields = [field.with_type(pa.string() if _is_text(field.type) else with_wide_floats(field.type)) for field in target.schema]
        self._written = pa.schema([field.with_nullable(True) for field in fields])

    def begin(self, text: TextFile) -> Position:
        return Position(text.skip_mark())

    def find_end(self, data: bytes) -> int:
        return end_of_lines(data)

    def record_ends(self, data: bytes) -> Any:
        return line_ends(data)

    def is_row(self, record: bytes) -> bool:
        return bool(record.strip())

    def parse(self, data: bytes) -> pa.RecordBatch:
        return self._as_they_are(data) if self.target.is_opaque else self._rows(data)

    def _rows(self, data: bytes) -> pa.RecordBatch:
        count = count_objects(data)
        try:
            batch = _read(data, self._written, "error")
        except pa.ArrowException as error:
            raise ValueError(self._explain(data, error)) from error
        if batch.num_rows != count:
            raise ValueError("not one JSON object in each line")
        columns = [_from_text(batch.column(field.name), field.type) for field in self.target.schema]
        return self.target.fit(pa.RecordBatch.from_arrays(columns, names=self.target.schema.names))

    def _explain(self, data: bytes, error: Exception) -> str:
        """What is wrong with a row, in words that name its field. Of many rows nobody asks."""
        reason = str(error).removeprefix("JSON parse error: ").removesuffix(" in row 0")
        if b"\n" in data.strip():
            return reason
        fields = json_object(data)
        if extra := [name for name in fields if name not in self.target.schema.names]:
            return f"no column is called {', '.join(map(repr, extra))}; the stream has {self.target.shown()}"
        return f"{reason}; the stream has {self.target.shown()}"

    def _as_they_are(self, data: bytes) -> pa.RecordBatch:
        lines = split_lines(data)
        texts = [line for line in lines.to_pylist() if line.strip()]
        key, at = self.target.key, self.target.time
        rows = [json_object(line) for line in texts]
        keys = pa.array([key_of(get_field(row, key), key) for row in rows], pa.binary()) if key is not None else None
        times = pa.array([time_of(get_field(row, at)) for row in rows], TIME) if at is not None else None
        return self.target.opaque(lines if len(texts) == len(lines) else pa.array(texts, pa.binary()), keys, times)


def infer(file: SourceFile) -> pa.Schema | None:
    """The schema of a file's first rows; None if there are none."""
    with TextFile(file) as text:
        text.skip_mark()
        data = next(whole_records(text, end_of_lines), b"")
    if not data.strip():
        return None
    count_objects(data)
    check_levels(data)
    batch = _read(data, None, "infer")
    return pa.schema([pa.field(name, _time_or_not(batch.column(name))) for name in batch.schema.names])


def _read(data: bytes, schema: pa.Schema | None, unexpected: str) -> pa.RecordBatch:
    table = pyarrow.json.read_json(
        pa.BufferReader(data),
        read_options=pyarrow.json.ReadOptions(use_threads=False, block_size=max(len(data) + 1, 1 << 16)),
        parse_options=pyarrow.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior=unexpected),
    )
    return table.combine_chunks().to_batches()[0] if table.num_rows else pa.RecordBatch.from_pylist([], schema=table.schema)


def _is_text(kind: pa.DataType) -> bool:
    return bool(pt.is_date(kind) or pt.is_time(kind))


def _from_text(column: pa.Array, kind: pa.DataType) -> pa.Array:
    if pt.is_time(kind):
        return pa.array([None if text is None else time.fromisoformat(text) for text in column.to_pylist()], kind)
    return column.cast(kind) if pt.is_date(kind) else column


def has_no_json(kind: pa.DataType) -> bool:
    """Whether a type has something in it that Arrow does not read from JSON."""
    if pt.is_map(kind) or pt.is_float16(kind) or pt.is_duration(kind):
        return True
    return any(has_no_json(kind.field(index).type) for index in range(kind.num_fields)) if pt.is_nested(kind) else False


def _time_or_not(column: pa.Array) -> pa.DataType:
    """The column's type. Arrow takes text for times only if they have no fraction of a second."""
    # A column of nulls alone has no text, and so no answer.
    if pt.is_string(column.type) and pc.all(pc.match_substring_regex(column, r"^\d{4}-\d\d-\d\d[T ]\d\d:\d\d"), min_count=1).as_py():
        with contextlib.suppress(pa.ArrowException):
            as_utc(column)
            return TIME
    return column.type
