"""Going on through streams in steps: where a reader gets to with so many events, no segment before its predecessors are finished.

A step holds a segment together with its successor only where all of both that it holds is small enough to be read as one piece, in order.
So whoever reads the segments of a step in parallel, a piece at a time, keeps the order of each key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headwater.catalog import extents, segments, streams
from headwater.catalog.database import Tx
from headwater.catalog.operations import operation
from headwater.catalog.segments import SegmentRow
from headwater.errors import NotFoundError, TruncatedError
from headwater.model.arguments import check_whole
from headwater.model.cuts import Cut, StreamCut
from headwater.model.limits import MIB
from headwater.model.names import parse_stream_name
from headwater.model.segmentmap import SegmentMap
from headwater.segments.lanes import StreamRef
from headwater.streams import cuts
from headwater.streams.cuts import Range
from headwater.streams.lifecycle import bare_ref
from headwater.streams.lineage import Lineage

#: Up to this size a segment and its successor may be in one step.
PIECE_BYTES = 64 * MIB


@operation("read")
def advance(
    tx: Tx,
    store_id: str,
    start: Cut,
    end: Cut | None,
    max_events: int | None,
    max_bytes: int | None,
    skip_truncated: bool,
    piece_bytes: int,
) -> Cut:
    """The place up to `max_events` and about `max_bytes` behind `start`, and not behind `end`; `start` itself if there is nothing."""
    walks = [_walk(tx, store_id, *found, start, end, skip_truncated, piece_bytes) for found in _find_streams(tx, start)]
    events, size = max_events, max_bytes
    # It grows with every event that is read, so that segments which can't all be read in each step take turns.
    turn = sum(number for part in start.streams.values() for number in part.segments.values())
    has_moved = False
    while ready := [(walk, item) for walk in walks for item in walk.enter_ready()]:
        counts = [item.end - item.start for _, item in ready]
        limit = total = sum(counts)
        if events is not None:
            limit = min(limit, events)
        if size is not None:
            whole = sum(walk.bytes(item) for walk, item in ready)
            limit = min(limit, max(0, total * size // max(1, whole)))
        if total and not has_moved:
            limit = max(1, limit)
        shares = share(counts, limit, turn)
        for (walk, item), count in zip(ready, shares, strict=True):
            walk.take(item, count)
            if size is not None:
                size -= walk.bytes(item, count)
        if events is not None:
            events -= limit
        has_moved = has_moved or limit > 0
        if limit < total:
            break
    if not has_moved:
        return start
    return Cut(store_id, {walk.stream.name: StreamCut(walk.stream.id, walk.place()) for walk in walks})


def share(counts: Sequence[int], limit: int, turn: int) -> list[int]:
    """How many to take of each, `limit` in all: one of each that has some, and the rest by how much each has.

    Where there are more than `limit`, the first to get one is that whose turn it is: with a turn that grows by `limit`, all come to theirs.
    """
    if limit >= sum(counts):
        return list(counts)
    first = turn % len(counts)
    order = [index for index in (*range(first, len(counts)), *range(first)) if counts[index]]
    shares = [0] * len(counts)
    for index in order[:limit]:
        shares[index] = 1
    left, rest = limit - sum(shares), sum(counts) - sum(shares)
    for index in order if left else ():
        shares[index] += left * (counts[index] - 1) // rest
    # What rounding left goes to the smallest.
    left = limit - sum(shares)
    for index in sorted((index for index in order if shares[index] < counts[index]), key=lambda index: counts[index])[:left]:
        shares[index] += 1
    return shares


class _Piece:
    """Segments of a step, each overlapping a predecessor or successor among them, that are read as one, in order."""

    def __init__(self, size: int) -> None:
        self.size = size


@dataclass
class _Walk:
    """One stream's part of a step: how far it is in each segment it entered."""

    stream: StreamRef
    lineage: Lineage
    piece_bytes: int
    numbers: dict[int, int]
    rows: dict[int, SegmentRow]
    #: About how many bytes each segment's part has.
    sizes: dict[int, int]
    #: For each segment that this step has events of, or of its predecessors, the piece it belongs to.
    pieces: dict[int, _Piece] = field(default_factory=dict)

    def bytes(self, item: Range, count: int | None = None) -> int:
        """About how many bytes a segment's part, or the first events of it, have."""
        size = self.sizes[item.segment.number]
        return size if count is None else size * count // max(1, item.end - item.start)

    def enter_ready(self) -> list[Range]:
        """Enter the segments whose predecessors are finished. Those that don't fit into one piece with them wait for the next step.

        Successors of the same segments are entered together or not at all, since a place covers all keys.
        """
        families: list[tuple[set[_Piece], list[Range]]] = []
        for item in self.lineage.take_ready():
            parents = self._parents(item)
            family = (parents, [item])
            for other in [other for other in families if other[0] & parents]:
                families.remove(other)
                family = (family[0] | other[0], family[1] + other[1])
            families.append(family)
        entered = []
        for parents, items in families:
            size = sum(piece.size for piece in parents)
            if parents and size + sum(self.bytes(item) for item in items) > self.piece_bytes:
                continue
            joined = _Piece(size)
            self.pieces = {number: joined if piece in parents else piece for number, piece in self.pieces.items()}
            self.numbers |= {item.segment.number: item.start for item in items}
            entered += items
        return entered

    def _parents(self, item: Range) -> set[_Piece]:
        return {piece for number, piece in self.pieces.items() if self.rows[number].keys.overlaps(item.segment.keys)}

    def take(self, item: Range, count: int) -> None:
        number = item.segment.number
        self.numbers[number] = item.start + count
        piece = next(iter(self._parents(item)), None)
        # An empty one too, behind what this step has: its successors go on from there together.
        if count or piece is not None:
            piece = piece or _Piece(0)
            piece.size += self.bytes(item, count)
            self.pieces[number] = piece
        if item.start + count == item.segment.tail and not item.segment.is_open:
            self.lineage.finish(number)

    def place(self) -> dict[int, int]:
        return _newest(self.rows, self.numbers)


def _find_streams(tx: Tx, cut: Cut) -> list[tuple[StreamRef, list[SegmentRow]]]:
    """The streams that have the names of a cut's, with their segments; without them, if the cut is of another stream of that name."""
    names = [parse_stream_name(name) for name in cut.streams]
    looks = [streams.found(name) for name in names] + [segments.listed(part.id) for part in cut.streams.values()]
    answers = tx.run_all(looks) if looks else []
    found = []
    for name, rows, listed in zip(names, answers[: len(names)], answers[len(names) :], strict=True):
        if not rows:
            raise NotFoundError(f"there is no stream {name}")
        found.append((bare_ref(streams.StreamRow(*rows[0])), [segments.to_row(row) for row in listed]))
    return found


def _walk(
    tx: Tx,
    store_id: str,
    stream: StreamRef,
    rows: list[SegmentRow],
    start: Cut,
    end: Cut | None,
    skip_truncated: bool,
    piece_bytes: int,
) -> _Walk:
    if all(part.id != stream.id for part in start.streams.values()):
        rows = segments.list_segments(tx, stream.id)
    lower = cuts.resolve_cut(tx, store_id, stream, rows, start)
    upper = cuts.resolve_cut(tx, store_id, stream, rows, end) if end is not None else None
    is_held = False
    if _is_truncated(rows, lower):
        # Tags and holds may keep what was truncated. Then it is not skipped either: who reads this step is given it.
        kept = _find_kept(tx, stream, rows, lower, upper)
        if kept is not None:
            rows, is_held = kept, True
        elif skip_truncated:
            lower = _skip_truncated(rows, lower)
        else:
            head = SegmentMap(rows).head()
            raise TruncatedError(
                f"{describe_loss(stream.name, rows, lower)}; read on from its head",
                Cut(store_id, {stream.name: StreamCut(stream.id, head)}),
            )
    lineage, sizes = Lineage(), {}
    for item in _parts(rows, lower, upper):
        sizes[item.segment.number] = extents.estimate_bytes(tx, *item, is_held=is_held)
        lineage.add(item)
    return _Walk(stream, lineage, piece_bytes, dict(lower), {row.number: row for row in rows}, sizes)


def _parts(rows: Sequence[SegmentRow], lower: dict[int, int], upper: dict[int, int] | None) -> list[Range]:
    """The numbers that a walk may read of each segment past a place.

    A segment past the end has an empty part, since a place names a segment for each key.
    """
    stream_map = SegmentMap(rows)
    ends = {row.number: end for row, _, end in stream_map.between(lower, upper)}
    parts = stream_map.between(lower, None)
    return [Range(row, first, max(first, min(tail, ends.get(row.number, first)))) for row, first, tail in parts]


def _is_truncated(rows: Sequence[SegmentRow], lower: dict[int, int]) -> bool:
    heads = {row.number: row.head for row in rows}
    return any(number not in heads or at < heads[number] for number, at in lower.items())


def _skip_truncated(rows: Sequence[SegmentRow], lower: dict[int, int]) -> dict[int, int]:
    """The later one of a place and the head, for each key."""
    stream_map = SegmentMap(rows)
    numbers = stream_map.head()
    for number, at in lower.items():
        if number in stream_map.segments:
            numbers[number] = max(at, stream_map.segments[number].head)
    return _newest(stream_map.segments, numbers)


def _newest(rows: Mapping[int, SegmentRow], numbers: Mapping[int, int]) -> dict[int, int]:
    """The numbers in the newest of these segments over each key."""
    return {row.number: numbers[row.number] for row in SegmentMap(rows[number] for number in numbers).newest()}


def _find_kept(
    tx: Tx, stream: StreamRef, rows: Sequence[SegmentRow], lower: dict[int, int], upper: dict[int, int] | None
) -> list[SegmentRow] | None:
    """All segments with the truncated ones, if what lies behind the place is kept; else None."""
    tails = upper or SegmentMap(rows).tail()
    if cuts.kept_ranges(tx, stream, lower, tails) is None:
        return None
    return [row._replace(head=0) for row in segments.list_segments(tx, stream.id, with_dropped=True)]


def describe_loss(name: str, rows: Sequence[SegmentRow], lower: dict[int, int]) -> str:
    """What of a stream lies behind a place and was truncated, as a sentence."""
    heads = {row.number: row.head for row in rows}
    lost = [
        f"events {at:,} to {heads[number] - 1:,} of segment {number}" if number in heads else f"segment {number} from event {at:,} on"
        for number, at in sorted(lower.items())
        if number not in heads or at < heads[number]
    ]
    shown = ", ".join(lost[:5]) + (f" and {len(lost) - 5} more" if len(lost) > 5 else "")
    return f"{shown} of {name} and what followed up to its head were truncated before they were read"


def check_limit(value: int | None, what: str) -> None:
    if value is not None:
        check_whole(value, what, 1)
