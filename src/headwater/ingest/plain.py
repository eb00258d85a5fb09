"""Plain lines: each is an event of a stream without a schema, as it is."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from headwater.errors import InvalidRequestError
from headwater.ingest.pieces import Position
from headwater.ingest.target import Target
from headwater.ingest.text import TextFile, end_of_lines, line_ends


class PlainLines:
    """Lines end with LF or CR LF, which are no part of the event. An empty line is an empty event."""

    def __init__(self, target: Target) -> None:
        if not target.is_opaque:
            raise InvalidRequestError("plain lines go to a stream without a schema; this one has columns: give the files' format")
        if target.key is not None or target.time is not None:
            raise InvalidRequestError("plain lines have no fields for a key or a time: give the files' format, for example jsonl")
        self.target = target

    def begin(self, text: TextFile) -> Position:
        return Position(text.skip_mark())

    def find_end(self, data: bytes) -> int:
        return end_of_lines(data)

    def record_ends(self, data: bytes) -> Any:
        return line_ends(data)

    def is_row(self, record: bytes) -> bool:
        return True

    def parse(self, data: bytes) -> pa.RecordBatch:
        return self.target.opaque(split_lines(data))


def split_lines(data: bytes) -> pa.Array:
    """Each line without its end."""
    text = data.replace(b"\r\n", b"\n").removesuffix(b"\n")
    return pc.split_pattern(pa.array([text], pa.binary()), pattern=b"\n").flatten()
