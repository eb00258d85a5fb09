"""Tails: the segments that a commit appends to or watches. All are locked in one pass, and know where their next event goes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from headwater.catalog.database import Row, Statement


class Watch(NamedTuple):
    """A segment to lock: exclusively by those who append to it or forbid appends, shared by those who only rely on it."""

    stream: int
    segment: int
    is_exclusive: bool = False


class Tail:
    """A locked segment: its next number, and the bytes that the commit adds to it."""

    __slots__ = ("appended_at", "born_at", "bytes", "claim", "is_open", "log", "number", "tail")

    def __init__(
        self, number: int, log: int, tail: int, is_open: bool, appended_at: int, claim: str | None, born_at: int | None = None
    ) -> None:
        self.number = number
        self.log = log
        self.tail = tail
        self.is_open = is_open
        self.appended_at = appended_at
        #: Who alone may append: see catalog/claims.py.
        self.claim = claim
        #: Of a segment that was sealed when it was made, to be rolled into: everything in it has this time.
        self.born_at = born_at
        self.bytes = 0

    def append_time(self, now: int) -> int:
        """Never decreasing in a segment."""
        return max(now, self.appended_at) if self.born_at is None else self.born_at

    def grow(self, events: int, size: int, appended_at: int) -> int:
        """Take a block; returns its first number."""
        first = self.tail
        self.tail += events
        self.bytes += size
        self.appended_at = appended_at
        return first


#: By stream and segment. Of a transaction's staged blocks several segments may have one tail: where their keys are now.
Tails = dict[tuple[int, int], Tail]

#: Few sizes of IN lists, so that prepared statements are used again.
_IN_SIZES = (1, 4, 16, 64, 256)


def lock(watches: Iterable[Watch]) -> list[Statement]:
    """Statements that lock segments, ascending, each in its strongest mode at once."""
    strongest: dict[tuple[int, int], bool] = {}
    for stream, segment, is_exclusive in watches:
        strongest[stream, segment] = is_exclusive or strongest.get((stream, segment), False)
    found: list[Statement] = []
    for (stream, is_exclusive), keys in groupby(sorted(strongest), key=lambda key: (key[0], strongest[key])):
        numbers = [number for _, number in keys]
        for start in range(0, len(numbers), _IN_SIZES[-1]):
            some = numbers[start : start + _IN_SIZES[-1]]
            size = next(size for size in _IN_SIZES if size >= len(some))
            some += [some[-1]] * (size - len(some))
            sql = (
                "SELECT stream, number, log, tail, sealed_epoch IS NULL, appended_at, claim FROM segment "
                f"WHERE stream = ? AND number IN ({', '.join('?' * size)}) ORDER BY number FOR {'UPDATE' if is_exclusive else 'SHARE'}"
            )
            found.append((sql, (stream, *some)))
    return found


def load(answers: Sequence[Sequence[Row]]) -> Tails:
    """The segments that `lock` found."""
    return {(row[0], row[1]): Tail(row[1], row[2], row[3], bool(row[4]), row[5], row[6]) for rows in answers for row in rows}
