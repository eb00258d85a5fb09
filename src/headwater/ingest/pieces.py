"""A file in pieces: so many rows, those that are none, and the place behind them from which reading can go on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import pyarrow as pa

from headwater.errors import InvalidRequestError

#: So much of a bad row is shown.
SHOWN_BYTES = 4096


class Position(NamedTuple):
    """A place in a file: so many rows behind an offset at which a row begins. `lines` lie before the offset.

    Of a compressed file the offset counts what is decompressed; in files that know their rows it is always 0.
    """

    offset: int = 0
    lines: int = 0
    rows: int = 0


class BadRow(NamedTuple):
    """Something that is no event of the stream: `at` counts all rows of its piece, `place` is for people."""

    at: int
    place: str
    reason: str
    text: str


@dataclass(frozen=True)
class Piece:
    """Rows of a file, as events. `read_bytes` of the file were read so far."""

    start: Position
    batch: pa.RecordBatch
    bad: tuple[BadRow, ...]
    end: Position
    read_bytes: int

    @property
    def rows(self) -> int:
        return int(self.batch.num_rows) + len(self.bad)

    def cut(self, rows: int) -> tuple[Piece, Piece | None]:
        """The first rows, and the rest if there is one."""
        if self.rows <= rows:
            return self, None
        bad = tuple(row for row in self.bad if row.at < rows)
        middle = self.start._replace(rows=self.start.rows + rows)
        good = rows - len(bad)
        rest = tuple(row._replace(at=row.at - rows) for row in self.bad[len(bad) :])
        return (
            replace(self, batch=self.batch.slice(0, good), bad=bad, end=middle),
            replace(self, start=middle, batch=self.batch.slice(good), bad=rest),
        )

    def skip(self, rows: int) -> Piece | None:
        """What is behind the first rows."""
        return self if not rows else self.cut(rows)[1]


class BadRowError(Exception):
    """Rows that can't be events, where that ends it."""

    def __init__(self, row: BadRow) -> None:
        super().__init__(f"{row.place}: {row.reason}")
        self.row = row


Parse = Callable[[int, int], pa.RecordBatch]
Describe = Callable[[int, Exception], BadRow]

#: What parsing raises for rows that are no events of the stream.
BAD = (pa.ArrowException, InvalidRequestError, ValueError, TypeError, OverflowError)


def sift(count: int, parse: Parse, describe: Describe, *, keep: bool) -> tuple[list[pa.RecordBatch], tuple[BadRow, ...]]:
    """Parse rows that can't all be parsed: by halves, until the bad ones are found. Unless `keep`, the first one ends it."""
    batches: list[pa.RecordBatch] = []
    bad: list[BadRow] = []
    todo = [(0, count)]
    while todo:
        start, end = todo.pop()
        try:
            batches.append(parse(start, end))
        except BAD as error:
            if end - start > 1:
                middle = (start + end) // 2
                todo += [(middle, end), (start, middle)]
                continue
            bad.append(describe(start, error))
            if not keep:
                raise BadRowError(bad[-1]) from error
    return batches, tuple(bad)
