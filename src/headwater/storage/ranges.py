"""Reading many ranges of one object with few requests. Pure: the caller brings the reading."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import eq

from headwater.storage.interface import Buffer

Range = tuple[int, int]


def merge(ranges: Sequence[Range], *, gap_bytes: int, most_bytes: int | None = None) -> list[Range]:
    """The fewest ranges (start, length), ascending, that cover all of `ranges`.

    Neighbours are merged over a gap of up to `gap_bytes`, as long as the result has at most `most_bytes`; overlapping ones always are,
    so each of `ranges` lies in exactly one of the result.
    """
    merged: list[Range] = []
    for start, length in sorted(found for found in ranges if found[1]):
        end = start + length
        if merged:
            before, before_length = merged[-1]
            reach = before + before_length
            fits = most_bytes is None or end - before <= most_bytes
            if start < reach or (start - reach <= gap_bytes and fits):
                merged[-1] = (before, max(reach, end) - before)
                continue
        merged.append((start, length))
    return merged


def read_merged(ranges: Sequence[Range], merged: Sequence[Range], read: Callable[[Sequence[Range]], Sequence[Buffer]]) -> list[Buffer]:
    """Read the `merged` ranges and cut `ranges`, in their own order, out of them without copying."""
    if not merged:
        return [b"" for _ in ranges]
    if len(merged) == len(ranges) and all(map(eq, merged, ranges)):
        return list(read(merged))
    pieces = [memoryview(piece) for piece in read(merged)]
    places = sorted(range(len(ranges)), key=lambda place: ranges[place])
    found: list[Buffer] = [b""] * len(ranges)
    piece = 0
    for place in places:
        start, length = ranges[place]
        if not length:
            continue
        while start >= merged[piece][0] + merged[piece][1]:
            piece += 1
        offset = start - merged[piece][0]
        found[place] = pieces[piece][offset : offset + length]
    return found
