"""Lines as Arrow batches: as they are, looked into for a few JSON fields, or as rows of a schema.

What can be done by Arrow for many lines at once is; only to say which line is wrong are they taken one by one.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, time
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json
import pyarrow.types as pt

from headwater.errors import InvalidRequestError
from headwater.ingest.fields import get_field, json_object, key_of, time_of
from headwater.ingest.jsonlines import has_no_json
from headwater.ingest.objects import count_objects
from headwater.model.columns import cast_column, check_nested_nulls, check_values, with_wide_floats
from headwater.model.keys import key_bytes, key_column
from headwater.model.limits import EVENT_BYTES
from headwater.model.schemas import TIME, is_opaque

KEY = "_key"


@dataclass(frozen=True)
class Columns:
    """What in a line is the routing key, the event time and the source number."""

    key: str | None = None
    key_regex: re.Pattern[bytes] | None = None
    time: str | None = None
    number: str | None = None

    @property
    def key_column(self) -> str | None:
        return KEY if self.key is not None or self.key_regex is not None else None

    @property
    def looks_inside(self) -> bool:
        return any((self.key, self.key_regex, self.time, self.number))


@dataclass
class Parsed:
    """Events, with the number of the line each came from, and its source number if a field has it."""

    batch: pa.RecordBatch
    line_numbers: Any
    numbers: Any = None


class BadLineError(Exception):
    """A line that can't be an event. `before` are the events of the lines in front of it."""

    def __init__(self, line: int, reason: str, before: Parsed | None = None) -> None:
        super().__init__(f"line {line}: {reason}")
        self.before = before


Lines: TypeAlias = pa.Array
Parser: TypeAlias = Callable[[Lines, int], Parsed | None]


def read_lines(file: BinaryIO, read: Callable[[BinaryIO], bytes]) -> Iterator[Lines]:
    """The lines of a file as they come in, without their line feeds, many at a time. The last one needs none."""
    rest: list[bytes] = []
    waiting = count = 0
    while piece := read(file):
        end = piece.rfind(b"\n")
        if waiting + (len(piece) if end < 0 else piece.index(b"\n")) > EVENT_BYTES:
            raise BadLineError(count + 1, f"it has over {EVENT_BYTES:,} bytes; an event may have that many")
        if end < 0:
            rest.append(piece)
            waiting += len(piece)
            continue
        lines = _split(b"".join([*rest, piece[:end]]))
        count += len(lines)
        yield lines
        rest, waiting = [piece[end + 1 :]], len(piece) - end - 1
    if last := b"".join(rest):
        yield _split(last)


def _split(block: bytes) -> Lines:
    return pc.split_pattern(pa.array([block], pa.binary()), pattern=b"\n").flatten()


def parser_for(schema: pa.Schema, columns: Columns) -> Parser:
    """What makes events of lines for a stream with this schema."""
    if is_opaque(schema):
        return (lambda lines, first: _look_inside(lines, first, columns)) if columns.looks_inside else _as_they_are
    for field in (columns.key, columns.time, columns.number):
        if field is not None and field not in schema.names:
            raise InvalidRequestError(f"the stream has no column {field!r}; it has {', '.join(schema.names)}")
    if columns.key_regex is not None:
        raise InvalidRequestError("--key-regex is for streams without a schema: use --key")
    for column in schema:
        if has_no_json(column.type):
            raise InvalidRequestError(
                f"JSON lines can't fill the column {column.name!r}: {column.type}: use the library, or ingest Parquet"
            )
    return lambda lines, first: _rows(lines, first, schema, columns)


def _as_they_are(lines: Lines, first: int) -> Parsed:
    return Parsed(pa.RecordBatch.from_arrays([lines], names=["value"]), np.arange(first, first + len(lines), dtype=np.int64))


# Lines of an opaque stream, looked into.


def _look_inside(lines: Lines, first: int, columns: Columns) -> Parsed | None:
    keys: list[Any] = []
    times: list[datetime | None] = []
    numbers: list[int] = []
    is_json = any((columns.key, columns.time, columns.number))
    kept: list[int] = []
    failure: BadLineError | None = None
    for index, line in enumerate(lines.to_pylist()):
        if is_json and not line.strip():
            continue
        try:
            fields = json_object(line) if is_json else {}
            key = _key_of(line, fields, columns)
            at = time_of(get_field(fields, columns.time)) if columns.time is not None else None
            number = _number_of(get_field(fields, columns.number)) if columns.number is not None else 0
        except ValueError as error:
            failure = BadLineError(first + index, str(error))
            break
        keys.append(key)
        times.append(at)
        numbers.append(number)
        kept.append(index)
    indices = np.array(kept, dtype=np.int64)
    arrays, names = [lines if len(kept) == len(lines) else lines.take(pa.array(indices))], ["value"]
    if columns.key_column is not None:
        arrays.append(pa.array(keys, pa.binary()))
        names.append(KEY)
    if columns.time is not None:
        arrays.append(pa.array(times, TIME))
        names.append("_time")
    parsed = Parsed(pa.RecordBatch.from_arrays(arrays, names=names), indices + first, np.array(numbers, dtype=np.int64))
    if failure is not None:
        failure.before = parsed
        raise failure
    return parsed


def _key_of(line: bytes, fields: dict[str, Any], columns: Columns) -> bytes | None:
    if columns.key_regex is not None:
        found = columns.key_regex.search(line)
        if found is None:
            raise ValueError(f"{columns.key_regex.pattern.decode(errors='backslashreplace')!r} finds no key in it")
        return key_bytes(found[1] if found.re.groups else found[0])
    if columns.key is None:
        return None
    return key_of(get_field(fields, columns.key), columns.key)


def _number_of(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 62:
        raise ValueError(f"{reprlib.repr(value)} is no source number: it is a whole number from 1 to 2**62")
    return value


# Lines of a stream with a schema.


def _rows(lines: Lines, first: int, schema: pa.Schema, columns: Columns) -> Parsed | None:
    # A line of white space alone is no row, and no mistake either.
    has_text = np.array([bool(line.strip()) for line in lines.to_pylist()], dtype=np.bool_)
    indices = np.flatnonzero(has_text)
    texts = lines if has_text.all() else lines.filter(pa.array(has_text))
    if not len(texts):
        return None
    try:
        return _decorate(_parse(texts, schema), indices + first, columns)
    except (pa.ArrowException, ValueError) as error:
        at, reason = _find_bad_line(texts, schema, columns, str(error))
        before = _decorate(_parse(texts.slice(0, at), schema), indices[:at] + first, columns) if at else None
        raise BadLineError(int(indices[at]) + first, reason, before) from None


def _parse(texts: Lines, schema: pa.Schema) -> pa.RecordBatch:
    data = b"\n".join(texts.to_pylist())
    count_objects(data)
    # Arrow reads times of day and dates from JSON as numbers only; as text they are cast.
    written = pa.schema([field.with_type(_written_type(field.type)) for field in schema])
    table = pyarrow.json.read_json(
        pa.BufferReader(data),
        read_options=pyarrow.json.ReadOptions(use_threads=False, block_size=max(len(data) + 1, 1 << 16)),
        parse_options=pyarrow.json.ParseOptions(explicit_schema=written, unexpected_field_behavior="error"),
    )
    if table.num_rows != len(texts):
        raise ValueError("not one JSON object in each line")
    batch = table.combine_chunks().to_batches()[0]
    for field in schema:
        if not field.nullable and batch.column(field.name).null_count:
            raise ValueError(f"the column {field.name!r} is never null")
    columns = [_cast(batch.column(field.name), field.type) for field in schema]
    for field, column in zip(schema, columns, strict=True):
        check_values(field.name, column)
        check_nested_nulls(field.name, column)
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _written_type(kind: pa.DataType) -> pa.DataType:
    return pa.string() if pt.is_date(kind) or pt.is_time(kind) else with_wide_floats(kind)


def _cast(column: pa.Array, kind: pa.DataType) -> pa.Array:
    if column.type.equals(kind):
        return column
    if pt.is_time(kind):
        return pa.array([None if text is None else time.fromisoformat(text) for text in column.to_pylist()], kind)
    return cast_column(column, kind)


def _decorate(batch: pa.RecordBatch, line_numbers: Any, columns: Columns) -> Parsed:
    """Add what the options ask for: key and time as columns of their own, numbers beside."""
    if columns.key is not None:
        batch = batch.append_column(KEY, key_column(batch.column(columns.key), columns.key))
    if columns.time is not None:
        column = batch.column(columns.time)
        times = column.cast(TIME) if pt.is_timestamp(column.type) else pa.array([time_of(value) for value in column.to_pylist()], TIME)
        check_values("_time", times)
        batch = batch.append_column("_time", times)
    numbers = None
    if columns.number is not None:
        column = batch.column(columns.number)
        if not pt.is_integer(column.type):
            raise InvalidRequestError(f"the column {columns.number!r} is {column.type}: source numbers are whole numbers")
        numbers = np.array([_number_of(value) for value in column.to_pylist()], dtype=np.int64)
    return Parsed(batch, line_numbers, numbers)


def _find_bad_line(texts: Lines, schema: pa.Schema, columns: Columns, reason: str) -> tuple[int, str]:
    """Which line can't be a row, and why, in words that name its field."""
    for index in range(len(texts)):
        try:
            _decorate(_parse(texts.slice(index, 1), schema), np.zeros(1, dtype=np.int64), columns)
        except (pa.ArrowException, ValueError) as error:
            return index, _explain(texts[index].as_py(), schema, str(error))
    return 0, reason


def _explain(line: bytes, schema: pa.Schema, reason: str) -> str:
    try:
        fields = json_object(line)
    except ValueError as error:
        return str(error)
    shown = ", ".join(f"{field.name}: {field.type}" for field in schema)
    if extra := [name for name in fields if name not in schema.names]:
        return f"no column is called {', '.join(map(repr, extra))}; the stream has {shown}"
    if missing := [field.name for field in schema if not field.nullable and fields.get(field.name) is None]:
        return f"the column {missing[0]!r} is missing or null, and is never null"
    return f"{reason.removeprefix('JSON parse error: ').removesuffix(' in row 0')}; the stream has {shown}"
