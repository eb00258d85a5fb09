"""Retention: what a stream's policy says may go, goes, by truncating at a cut. What forks and tags need stays readable for them."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from datetime import timedelta

from headwater.catalog import groups, segments, streams
from headwater.catalog.database import Tx
from headwater.catalog.segments import SegmentRow
from headwater.errors import NotFoundError, TruncatedError
from headwater.model.cuts import Cut, Span, first_spans, is_before, last_spans
from headwater.model.policies import Retention
from headwater.runtime import clock
from headwater.segments.engine import Engine
from headwater.segments.lanes import StreamRef
from headwater.streams import cuts, truncation
from headwater.streams.lifecycle import stream_ref

#: Extents looked at in one round.
_MOST_EXTENTS = 100_000

_Extents = Iterator[tuple[int, int, int]]
_Next = tuple[int, int, int, int, _Extents]


def retain(engine: Engine, now_us: int, note: Callable[[str], None]) -> int:
    """Truncate every stream as its retention says; returns how many were. `note` hears what stands in the way."""
    truncated = 0
    for row in engine.read(streams.list_retained):
        policy = Retention.from_json(row.retention)
        try:
            stream = stream_ref(engine, row)
            found = [cut for cut in _cuts(engine, stream, policy, now_us, note) if _truncate(engine, stream, cut)]
            truncated += bool(found)
        except (NotFoundError, TruncatedError):
            continue  # Deleted, or truncated by someone else meanwhile.
    return truncated


def _cuts(engine: Engine, stream: StreamRef, policy: Retention, now_us: int, note: Callable[[str], None]) -> Iterator[Cut]:
    """Every cut before which things may go: each for its own reason."""
    if policy.kind == "consumption":
        consumed = _consumed(engine, stream, policy.groups, note)
        if consumed is not None:
            yield consumed
    if policy.seconds is not None:
        yield cuts.at_time(engine, stream, clock.to_datetime(now_us) - timedelta(seconds=policy.seconds))
    if policy.bytes is not None:
        oversized = engine.read(_oversized, stream, policy.bytes)
        if oversized is not None:
            yield cuts.single(engine, stream, oversized)


def _truncate(engine: Engine, stream: StreamRef, cut: Cut) -> bool:
    before = cuts.head(engine, stream)
    truncation.truncate(engine, stream, cut)
    return cuts.head(engine, stream) != before


def _consumed(engine: Engine, stream: StreamRef, names: tuple[str, ...], note: Callable[[str], None]) -> Cut | None:
    """Behind all that these groups have read; None while one of them is missing, so that nothing goes unread."""

    def look(tx: Tx) -> dict[int, int] | None:
        rows = segments.list_segments(tx, stream.id)
        heads = {row.number: row.tail for row in rows}
        for name in names:
            group = groups.find_group(tx, name)
            if group is None or stream.id not in group.streams:
                note(f"nothing of {stream.name} goes by consumption: there is no reader group {name!r} that reads it")
                return None
            numbers = {item.segment: item.position for item in groups.list_frontier(tx, group.id) if item.stream == stream.id}
            spans = [row.span for row in rows if row.number in numbers]
            for row in rows:
                read = numbers.get(row.number, row.tail if is_before(row.span, spans) else row.head)
                heads[row.number] = min(heads[row.number], read)
        return _cut_behind(rows, heads)

    numbers = engine.read(look)
    return None if numbers is None else cuts.single(engine, stream, numbers)


def _oversized(tx: Tx, stream: StreamRef, limit_bytes: int) -> dict[int, int] | None:
    """Behind the oldest events that are too many; None if there are none. At least `limit_bytes` stay."""
    rows = segments.list_segments(tx, stream.id)
    excess = sum(row.bytes for row in rows) - limit_bytes
    if excess <= 0:
        return None
    heads = {row.number: row.head for row in rows}
    # Times grow along every key, so the oldest extent of all is never behind one of a predecessor that stays.
    waiting: list[_Next] = []
    for row in rows:
        _push(waiting, row.number, _extents(tx, row))
    looked = 0
    while waiting and looked < _MOST_EXTENTS:
        _, number, end, size, rest = heapq.heappop(waiting)
        if size > excess:
            break
        excess -= size
        heads[number] = end
        looked += 1
        _push(waiting, number, rest)
    return _cut_behind(rows, heads)


def _push(waiting: list[_Next], number: int, rest: _Extents) -> None:
    found = next(rest, None)
    if found is not None:
        heapq.heappush(waiting, (found[0], number, found[1], found[2], rest))


def _extents(tx: Tx, row: SegmentRow) -> _Extents:
    """(when its last event was appended, its end, its bytes) of each extent of a segment's own log."""
    at = row.head
    while True:
        found = tx.run(
            "SELECT COALESCE(last_at, appended_at), first + count, COALESCE(raw, length) FROM extent "
            "WHERE log = ? AND first >= ? ORDER BY first LIMIT 500",
            (row.log, at),
        )
        if not found:
            return
        yield from ((last_at, end, size) for last_at, end, size in found)
        at = found[-1][1]


def _cut_behind(rows: list[SegmentRow], heads: dict[int, int]) -> dict[int, int]:
    """The cut with these heads: where a sealed segment is all gone, its successors' heads count."""
    newest = {span.number for span in last_spans(row.span for row in rows)}
    left = [Span(row.number, row.keys, heads[row.number], row.tail) for row in rows if row.number in newest or heads[row.number] < row.tail]
    return {span.number: span.head for span in first_spans(left)}
