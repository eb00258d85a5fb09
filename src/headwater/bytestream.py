"""Byte streams: an append-only file of unlimited length, written and read as bytes."""

from __future__ import annotations

import io
import operator
from datetime import datetime
from typing import Any

from headwater.catalog import segments
from headwater.errors import InvalidRequestError, NotFoundError, TruncatedError
from headwater.lanewriter import LaneWriter
from headwater.model.arguments import MOST, shown
from headwater.model.cuts import Cut
from headwater.model.limits import MIB
from headwater.segments.engine import Engine
from headwater.segments.lanes import RUN_BYTES, StreamRef
from headwater.segments.read import SegmentCursor
from headwater.streams import cuts, reading
from headwater.streams.cuts import Place

_PIECE_BYTES = 8 * MIB
_READ_BYTES = 64 * MIB


class ByteWriter(LaneWriter, io.RawIOBase):
    """Appends bytes to a byte stream. `write` buffers; `flush` returns when all is durable. A raw file, for what writes to files."""

    @property
    def closed(self) -> bool:
        return self._is_closed

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        """Give bytes, or what has a buffer, to be stored; returns how many. Blocks while this process has as much waiting as it may."""
        self._check_open()
        try:
            content = data if type(data) is bytes else bytes(memoryview(data))
        except TypeError:
            raise InvalidRequestError(f"a byte stream takes bytes, not {type(data).__name__}") from None
        for start in range(0, len(content), _PIECE_BYTES):
            piece = content if len(content) <= _PIECE_BYTES else content[start : start + _PIECE_BYTES]
            self._flusher.wait_for_room()
            with self._lane.lock:
                self._check_open()
                run, _ = self._lane.put(piece)
                run.size += len(piece)
                if run.size >= RUN_BYTES:
                    self._lane.close_run()
        return len(content)


class ByteReader(io.RawIOBase):
    """Reads a byte stream from an offset or a place. At the tail `read` gives b"" for now; read again for what was appended since."""

    def __init__(self, engine: Engine, stream: StreamRef, start: int | Place) -> None:
        super().__init__()
        self._engine = engine
        self._stream = stream
        self._offset = 0
        self._cursor: SegmentCursor | None = None
        self._block = memoryview(b"")
        self._block_start = 0
        if start is None or isinstance(start, Cut | datetime | str):
            # A cut names an offset as the number of the one segment that a byte stream has.
            [start] = cuts.numbers(engine, stream, start).values()
        self.seek(start)

    def _row(self) -> segments.SegmentRow:
        rows = self._engine.run(segments.list_segments, self._stream.id)
        if not rows:
            raise NotFoundError(f"stream {self._stream.name} was deleted")
        return rows[0]

    def _check_open(self) -> None:
        if self.closed:
            raise InvalidRequestError("this reader is closed")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        self._check_open()
        return self._offset

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to an offset. TruncatedError if it lies before the head; behind the tail there is nothing to read yet."""
        self._check_open()
        row = self._row()
        bases = {io.SEEK_SET: 0, io.SEEK_CUR: self._offset, io.SEEK_END: row.tail}
        base = bases.get(whence) if isinstance(whence, int) else None
        if base is None:
            raise InvalidRequestError(f"seek goes from the start (0), the present offset (1) or the end (2), not {shown(whence)}")
        try:
            target = base + operator.index(offset)
        except TypeError:
            raise InvalidRequestError(f"an offset in a byte stream is a whole number, not {shown(offset)}") from None
        if not 0 <= target <= MOST:
            raise InvalidRequestError(f"there is no offset {shown(target)} in a byte stream")
        if target < row.head:
            raise TruncatedError(
                f"offset {target} of {self._stream.name} was truncated; its head is {row.head}", cuts.head(self._engine, self._stream)
            )
        self._offset = target
        return target

    def read(self, size: int | None = -1, /) -> bytes:
        """Up to `size` bytes, as many as are at hand; all to the tail as of now if it is negative or None. b"" at the tail."""
        if size is None:
            return self.readall()
        try:
            # More are never at hand, and room for them would be made.
            most = min(operator.index(size), _READ_BYTES)
        except TypeError:
            raise InvalidRequestError(f"how much to read is a whole number of bytes, not {shown(size)}") from None
        return super().read(max(most, -1)) or b""

    def readinto(self, buffer: Any) -> int:
        self._check_open()
        try:
            target = memoryview(buffer).cast("B")
        except TypeError as error:
            raise InvalidRequestError(f"bytes are read into a bytearray or the like: {error}") from None
        if target.readonly:
            raise InvalidRequestError(f"bytes are read into a bytearray or the like, not into {type(buffer).__name__}: it can't be changed")
        if not len(target):
            return 0
        at = self._offset - self._block_start
        if not 0 <= at < len(self._block) and not self._next_block():
            return 0
        at = self._offset - self._block_start
        count = min(len(target), len(self._block) - at)
        target[:count] = self._block[at : at + count]
        self._offset += count
        return count

    def readall(self) -> bytes:
        """All from here to the tail as of now."""
        found = []
        while piece := self.read(_PIECE_BYTES):
            found.append(piece)
        return b"".join(found)

    def _next_block(self) -> bool:
        if self._cursor is None or self._cursor.number != self._offset:
            self._cursor = self._engine.cursor(self._stream, 0, self._offset, None)
        try:
            found = self._cursor.next_block()
        except TruncatedError as error:
            raise reading.with_head(self._engine, self._stream, error) from None
        if found is None:
            reading.look(self._engine, self._stream, self._cursor)
            return False
        self._block = memoryview(found.data).cast("B")
        self._block_start = found.first
        return True
