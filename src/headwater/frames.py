"""Frames that users give: any object that exports Arrow data, as one record batch, and as a stream's columns, keys and times."""

from __future__ import annotations

import sys
from typing import Any

import pyarrow as pa

from headwater.errors import InvalidRequestError
from headwater.model.arguments import shown
from headwater.model.columns import check_values, data_bytes, largest_row
from headwater.model.fitting import check_frame_schema, fit_column
from headwater.model.keys import key_column
from headwater.model.limits import BATCH_BYTES, EVENT_BYTES
from headwater.model.schemas import METADATA, TIME
from headwater.segments.block import Chunk
from headwater.segments.lanes import StreamRef

#: How pyarrow names an index of pandas that has no name of its own.
_UNNAMED_INDEX = "__index_level_"


def to_batch(frame: Any) -> pa.RecordBatch:
    """A frame's rows as one record batch. Collect a LazyFrame; leave out an index of pandas that has no name."""
    if isinstance(frame, pa.RecordBatch):
        _validate(frame)
        return frame
    table = _without_unnamed_index(_to_table(frame))
    _validate(table)
    try:
        batches = table.combine_chunks().to_batches()
        return pa.concat_batches(batches) if batches else pa.RecordBatch.from_pylist([], schema=table.schema)
    except pa.ArrowException as error:
        raise InvalidRequestError(f"this table is too large for one batch ({error}): give its parts, table.to_batches()") from error


def _to_table(frame: Any) -> pa.Table:
    if isinstance(frame, pa.Table):
        return frame
    if (polars := sys.modules.get("polars")) is not None and isinstance(frame, polars.LazyFrame):
        frame = frame.collect()
    try:
        if hasattr(frame, "__arrow_c_stream__"):
            return pa.RecordBatchReader.from_stream(frame).read_all()
        if hasattr(frame, "__arrow_c_array__"):
            return pa.Table.from_batches([pa.record_batch(frame)])
    except pa.ArrowException as error:
        raise InvalidRequestError(f"this {type(frame).__name__} can't be read as Arrow data: {error}") from error
    raise InvalidRequestError(
        f"write_batch takes rows as Arrow data, from pyarrow, pandas, Polars, DuckDB or any object with __arrow_c_stream__; "
        f"not {type(frame).__name__}"
    )


def _validate(batch: pa.RecordBatch | pa.Table) -> None:
    try:
        batch.validate()
    except pa.ArrowInvalid as error:
        raise InvalidRequestError(f"this batch is not valid as Arrow data: {error}") from error


def _without_unnamed_index(table: pa.Table) -> pa.Table:
    """Rows that were filtered or sorted keep their old places in such an index, which are nobody's data."""
    if b"pandas" not in (table.schema.metadata or {}):
        return table
    return table.select([name for name in table.schema.names if not name.startswith(_UNNAMED_INDEX)])


def frame_chunk(batch: pa.RecordBatch, key: str | None, stream: StreamRef, missing: str | None) -> Chunk:
    """A batch as the stream's columns, keys and times. InvalidRequestError if it does not fit.

    The metadata of a batch that was read from a stream is left aside, except `_key` and `_time`: the rows get their own.
    """
    if missing not in (None, "null"):
        raise InvalidRequestError(f'missing is None or "null", not {shown(missing)}')
    names = batch.schema.names
    if len(set(names)) < len(names):
        raise InvalidRequestError(f"this batch has a column twice: {names}")
    keys = times = None
    if key is not None:
        if not isinstance(key, str) or key not in names:
            raise InvalidRequestError(f"the batch has no column {shown(key)} for the routing key; it has {', '.join(names)}")
        keys = key_column(batch.column(key), key)
    elif "_key" in names:
        keys = key_column(batch.column("_key"), "_key")
    if "_time" in names:
        times = _time_column(batch.column("_time"))
    aside = METADATA.keys() | ({key} if stream.schema.get_field_index(key or "") < 0 and key is not None else set())
    rest = batch.select([name for name in names if name not in aside])
    check_frame_schema(rest.schema, stream.schema, fills_missing=missing == "null")
    columns = [_column(rest, field) for field in stream.schema]
    # Only a batch that is large as a whole can hold an event that is too large.
    if sum(column.nbytes for column in columns) > EVENT_BYTES and (largest := largest_row(columns)) > EVENT_BYTES:
        raise InvalidRequestError(f"an event of this batch has {largest:,} bytes; an event may have {EVENT_BYTES:,}")
    return Chunk(pa.RecordBatch.from_arrays(columns, schema=stream.schema), keys, times)


def _time_column(column: pa.Array) -> pa.Array:
    if not pa.types.is_timestamp(column.type) or column.type.tz is None:
        raise InvalidRequestError(f"the column _time is a timestamp with a zone, not {column.type}")
    try:
        times = column.cast(TIME)
    except pa.ArrowException as error:
        raise InvalidRequestError(f"the column _time can't be stored in microseconds: {error}") from error
    check_values("_time", times)
    return times


def _column(batch: pa.RecordBatch, field: pa.Field) -> pa.Array:
    index = batch.schema.get_field_index(field.name)
    return pa.nulls(batch.num_rows, field.type) if index < 0 else fit_column(batch.column(index), field)


def counted_bytes(chunk: Chunk, total: int) -> int:
    """What counts of a batch: its values, as for single events. Offsets and nulls count only where they are more than a batch may have."""
    return min(total, data_bytes(chunk.columns.columns)) if BATCH_BYTES < total <= 2 * BATCH_BYTES else total
