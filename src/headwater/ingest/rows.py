"""Text files as pieces of rows: parsed many at once, and by halves where some are bad."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import pyarrow as pa

from headwater.ingest.pieces import BAD, SHOWN_BYTES, BadRow, Piece, Position, sift
from headwater.ingest.sources import SourceFile
from headwater.ingest.target import Target
from headwater.ingest.text import TextFile, whole_records


class TextLayout(Protocol):
    """What a format says of a text: where its rows begin and end, and what they hold."""

    target: Target

    def begin(self, text: TextFile) -> Position:
        """Read what stands before the rows; where they begin."""

    def find_end(self, data: bytes) -> int:
        """Behind the last whole record, 0 if there is none."""

    def record_ends(self, data: bytes) -> Any:
        """The offset behind each record."""

    def is_row(self, record: bytes) -> bool:
        """Whether a record is one; else it is left out."""

    def parse(self, data: bytes) -> pa.RecordBatch:
        """Whole records as events. If one is no event, one of `pieces.BAD` is raised."""


def read_text(file: SourceFile, start: Position, layout: TextLayout, *, keep_bad: bool) -> Iterator[Piece]:
    """The rows of a file from a position on."""
    with TextFile(file) as text:
        body = layout.begin(text)
        offset, lines, skip = start if start != Position() else body
        text.go_to(offset)
        for data in whole_records(text, layout.find_end):
            batch, bad = _parse(layout, data, lines, keep_bad)
            behind = Position(offset + len(data), lines + data.count(b"\n"))
            piece = Piece(Position(offset, lines), batch, bad, behind, text.read_bytes)
            offset, lines, _ = behind
            rest = piece.skip(skip)
            skip = max(0, skip - piece.rows)
            if rest is not None:
                yield rest


def _parse(layout: TextLayout, data: bytes, lines: int, keep_bad: bool) -> tuple[pa.RecordBatch, tuple[BadRow, ...]]:
    try:
        return layout.parse(data), ()
    except BAD:
        pass
    ends = layout.record_ends(data).tolist()
    rows = [(first, last) for first, last in zip([0, *ends], ends, strict=False) if layout.is_row(data[first:last])]

    def describe(index: int, error: Exception) -> BadRow:
        first, last = rows[index]
        text = data[first:last].rstrip(b"\r\n")[:SHOWN_BYTES].decode(errors="backslashreplace")
        line = lines + data.count(b"\n", 0, first) + 1
        return BadRow(index, f"line {line}", str(error), text)

    batches, bad = sift(len(rows), lambda first, last: layout.parse(data[rows[first][0] : rows[last - 1][1]]), describe, keep=keep_bad)
    return pa.concat_batches(batches) if batches else layout.target.empty(), bad
