"""Text in pieces that end with a whole record, decompressed, from any offset; and where the records of a piece begin.

A record is a line; in CSV it may hold line feeds in quotes. Memory holds one piece and one record, whatever the file's size.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from headwater.errors import InvalidRequestError
from headwater.ingest.sources import SourceFile, unreadable
from headwater.model.limits import EVENT_BYTES

PIECE_BYTES = 4 * 1024 * 1024
_QUOTE, _FEED, _RETURN = b'"'[0], b"\n"[0], b"\r"[0]


class TextFile:
    """An open text file: its bytes from an offset on, and how many of the file's own were read for them."""

    def __init__(self, file: SourceFile) -> None:
        self._file = file
        self._open()

    def _open(self) -> None:
        self._raw = self._file.open()
        self._stream: Any = pa.CompressedInputStream(pa.PythonFile(self._raw), self._file.codec) if self._file.codec else self._raw

    def _close(self) -> None:
        self._stream.close()
        self._raw.close()

    def __enter__(self) -> TextFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    @property
    def read_bytes(self) -> int:
        return self._raw.tell()

    def read(self, size: int) -> bytes:
        try:
            data = self._stream.read(size)
        except (OSError, EOFError) as error:
            raise unreadable(self._file.path, error) from error
        return bytes(data)

    def skip_mark(self) -> int:
        """Go behind a byte order mark, or stay at the start; the offset."""
        first = self.read(len(codecs.BOM_UTF8))
        if first == codecs.BOM_UTF8:
            return len(first)
        self.go_to(0)
        return 0

    def go_to(self, offset: int) -> None:
        """Go to an offset. What is compressed is read again from its start."""
        if self._file.codec is None:
            self._raw.seek(offset)
            return
        self._close()
        self._open()
        while offset:
            read = len(self.read(min(offset, PIECE_BYTES)))
            if not read:
                raise unreadable(self._file.path, EOFError("it ends before the place that was reached before"))
            offset -= read


FindEnd = Callable[[bytes], int]


def whole_records(file: TextFile, find_end: FindEnd) -> Iterator[bytes]:
    """The rest of a file in pieces of whole records. The last record needs no line feed."""
    rest = b""
    while data := file.read(PIECE_BYTES):
        data = rest + data
        end = find_end(data)
        if end:
            yield data[:end]
        rest = data[end:]
        if len(rest) > EVENT_BYTES:
            raise InvalidRequestError(f"a row has over {EVENT_BYTES:,} bytes; an event may have that many (is a quote not closed?)")
    if rest:
        yield rest


def end_of_lines(data: bytes) -> int:
    """Behind the last whole line."""
    return data.rfind(b"\n") + 1


def line_ends(data: bytes) -> Any:
    """The offset behind each line."""
    ends = np.flatnonzero(np.frombuffer(data, np.uint8) == _FEED) + 1
    return ends if data.endswith(b"\n") else np.append(ends, len(data))


class Quoting:
    """Where the records of CSV end: at line feeds that stand outside of quotes."""

    def __init__(self, delimiter: str) -> None:
        self._delimiter = delimiter.encode()
        # A quote opens only where a field begins; within a quoted field two stand for one.
        self._quoted = re.compile(rb"(?:\A|(?<=[\r\n" + re.escape(self._delimiter) + rb']))"[^"]*(?:""[^"]*)*("|\Z)')

    def end(self, data: bytes) -> int:
        """Behind the last whole record, 0 if there is none."""
        if _QUOTE not in data:
            return end_of_lines(data)
        feeds = self._feeds(data)
        return int(feeds[-1]) + 1 if len(feeds) else 0

    def ends(self, data: bytes) -> Any:
        """The offset behind each record."""
        ends = self._feeds(data) + 1
        return ends if len(ends) and ends[-1] == len(data) else np.append(ends, len(data))

    def is_open(self, record: bytes) -> bool:
        """Whether a quote is opened in the last record and not closed."""
        return len(self._edges(record)) % 2 == 1

    def drop_quoted(self, record: bytes) -> bytes:
        """What of a record stands outside of quotes."""
        return self._quoted.sub(b"", record)

    def _feeds(self, data: bytes) -> Any:
        feeds = np.flatnonzero(np.frombuffer(data, np.uint8) == _FEED)
        return feeds[np.searchsorted(self._edges(data), feeds) % 2 == 0]

    def _edges(self, data: bytes) -> Any:
        """Offsets of the quotes at which what is quoted begins and ends, by turns."""
        letters = np.frombuffer(data, np.uint8)
        quotes = np.flatnonzero(letters == _QUOTE)
        if self._alternate(letters, quotes):
            return quotes
        # Quotes that are part of an unquoted text, as in 5" nails: slower, one by one.
        pairs = [(match.start(), match.end() - 1)[: 2 if match[1] else 1] for match in self._quoted.finditer(data)]
        return np.array([edge for pair in pairs for edge in pair], dtype=np.int64)

    def _alternate(self, letters: Any, quotes: Any) -> bool:
        """Whether each quote with an even index can open a field, or doubles the one before, and each other can close one."""
        outside = np.array([_FEED, _RETURN, self._delimiter[0], _QUOTE], dtype=np.uint8)
        opening, closing = quotes[0::2], quotes[1::2]
        before = letters[opening[opening > 0] - 1]
        behind = letters[closing[closing < len(letters) - 1] + 1]
        return bool(np.isin(before, outside).all() and np.isin(behind, outside).all())
