"""Dividing ranges among Spark's partitions: large ones are cut, small ones joined, and no key's events are put out of order.

A segment and its successors have keys in common, so their ranges make one *piece*, read in the order of their numbers by one task. What is
too large for one partition is cut into several that follow each other. Partitions are listed in that order too, and the sink keeps it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from headwater import SegmentRange

#: Pieces are joined up to this size: a task costs about as much as reading that.
_JOINED_BYTES = 4 * 1024 * 1024


def divide(ranges: Iterable[SegmentRange], partition_bytes: int) -> list[list[SegmentRange]]:
    """The ranges as partitions."""
    partitions: list[list[SegmentRange]] = []
    open_bytes: int | None = None
    for piece in _cut(_pieces(list(ranges)), partition_bytes):
        size = sum(part.bytes for part in piece)
        if open_bytes is not None and open_bytes + size <= min(_JOINED_BYTES, partition_bytes):
            partitions[-1] += piece
            open_bytes += size
        else:
            partitions.append(piece)
            open_bytes = size
    return partitions


def _pieces(ranges: list[SegmentRange]) -> list[list[SegmentRange]]:
    """Ranges of one stream that overlap in the key space, directly or over others, each in the order of numbers."""
    pieces: list[list[SegmentRange]] = []
    end = stream = None
    for part in sorted(ranges, key=lambda part: (part.stream, part.keys.start, part.segment)):
        if end is None or part.stream != stream or part.keys.start >= end:
            pieces.append([part])
            end, stream = part.keys.end, part.stream
        else:
            pieces[-1].append(part)
            end = max(end, part.keys.end)
    for piece in pieces:
        piece.sort(key=lambda part: part.segment)
    return sorted(pieces, key=lambda piece: (piece[0].stream, piece[0].segment))


def _cut(pieces: Sequence[list[SegmentRange]], partition_bytes: int) -> list[list[SegmentRange]]:
    found: list[list[SegmentRange]] = []
    for piece in pieces:
        if sum(part.bytes for part in piece) <= partition_bytes:
            found.append(piece)
            continue
        for part in piece:
            count = max(1, min(part.count, -(-part.bytes // partition_bytes)))
            bounds = [part.start + part.count * index // count for index in range(count + 1)]
            found += [[replace(part, start=start, end=end, bytes=part.bytes // count)] for start, end in pairwise(bounds)]
    return found
