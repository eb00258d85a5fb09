"""Parquet: rows in groups, of which those before the position are not read."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq

from headwater.ingest.pieces import BAD, SHOWN_BYTES, BadRow, Piece, Position, sift
from headwater.ingest.sources import SourceFile, unreadable
from headwater.ingest.target import Target

_BATCH_BYTES = 8 * 1024 * 1024
_BATCH_ROWS = 65536


def read_parquet(file: SourceFile, start: Position, target: Target, *, keep_bad: bool) -> Iterator[Piece]:
    """The rows of a file from a position on."""
    with _opened(file) as opened:
        target.check_columns(opened.schema_arrow.names, file.path)
        metadata, size = opened.metadata, os.path.getsize(file.path)
        group, row = 0, 0
        while group < metadata.num_row_groups and row + metadata.row_group(group).num_rows <= start.rows:
            row += metadata.row_group(group).num_rows
            group += 1
        rows = max(1, min(_BATCH_ROWS, metadata.num_rows * _BATCH_BYTES // max(_plain_bytes(metadata), 1)))
        for batch in _batches(file, opened, rows, list(range(group, metadata.num_row_groups))):
            skip = min(batch.num_rows, max(0, start.rows - row))
            row += skip
            if skip < batch.num_rows:
                piece = fitted(batch.slice(skip), row, size * (row + batch.num_rows - skip) // metadata.num_rows, target, keep_bad=keep_bad)
                row = piece.end.rows
                yield piece


def fitted(batch: pa.RecordBatch, row: int, read_bytes: int, target: Target, *, keep_bad: bool) -> Piece:
    """Rows of a file that knows them, from number `row` on, as a piece."""
    end = Position(rows=row + batch.num_rows)

    def describe(index: int, error: Exception) -> BadRow:
        return BadRow(index, f"row {row + index + 1}", str(error), _shown(batch.slice(index, 1)))

    try:
        return Piece(Position(rows=row), target.fit(batch), (), end, read_bytes)
    except BAD:
        good, bad = sift(batch.num_rows, lambda first, last: target.fit(batch.slice(first, last - first)), describe, keep=keep_bad)
    return Piece(Position(rows=row), pa.concat_batches(good) if good else target.empty(), bad, end, read_bytes)


def _shown(row: pa.RecordBatch) -> str:
    """A row for people, also one with values that Python does not have."""
    values = {}
    for name, column in zip(row.schema.names, row.columns, strict=True):
        try:
            values[name] = column[0].as_py()
        except (ValueError, OverflowError, pa.ArrowException):
            values[name] = f"<{column.type}>"
    return str(values)[:SHOWN_BYTES]


def infer(file: SourceFile) -> pa.Schema | None:
    """The file's own schema."""
    with _opened(file) as opened:
        schema: pa.Schema = opened.schema_arrow.remove_metadata()
        return schema


def _opened(file: SourceFile) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(file.path)
    except (OSError, pa.ArrowException) as error:
        raise unreadable(file.path, error) from error


def _batches(file: SourceFile, opened: pq.ParquetFile, rows: int, groups: list[int]) -> Iterator[pa.RecordBatch]:
    if groups:
        try:
            yield from opened.iter_batches(rows, row_groups=groups, use_threads=False)
        except (OSError, pa.ArrowException) as error:
            raise unreadable(file.path, error) from error


def _plain_bytes(metadata: pq.FileMetaData) -> int:
    return sum(metadata.row_group(index).total_byte_size for index in range(metadata.num_row_groups))
