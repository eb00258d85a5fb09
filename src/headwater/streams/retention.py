"""Retention: what a stream's policy says may go, goes, by truncating at a cut. What forks and tags need stays readable for them."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import NamedTuple

from headwater.catalog import groups, leases, segments, streams
from headwater.catalog.database import Tx
from headwater.catalog.operations import operation
from headwater.catalog.segments import SegmentRow
from headwater.catalog.streams import StreamRow
from headwater.errors import FencedError, HeadwaterError, NotFoundError, TruncatedError, UnavailableError
from headwater.model.cuts import Cut, StreamCut
from headwater.model.policies import Retention
from headwater.model.segmentmap import SegmentMap
from headwater.runtime import clock, failpoints
from headwater.segments.engine import Engine
from headwater.segments.lanes import StreamRef
from headwater.streams import cuts, truncation

#: Extents looked at in one round.
_MOST_EXTENTS = 100_000


class _Extent(NamedTuple):
    first: int
    events: int
    bytes: int
    last_at: int


_Next = tuple[int, int, _Extent, Iterator[_Extent]]


def retain(engine: Engine, session: int, now_us: int, note: Callable[[str], None]) -> int:
    """Truncate each stream as its retention says; returns how many were truncated. `note` is called with each reason why one was not.

    FencedError if the session does not have the upkeep's lease any more.
    """
    truncated = 0
    for row in engine.run(streams.list_retained):
        reasons: list[str] = []
        try:
            truncated += _retain_stream(engine, session, row, now_us, reasons)
        except (NotFoundError, TruncatedError):
            continue  # Deleted, or truncated by someone else meanwhile.
        except (FencedError, UnavailableError):
            raise
        except HeadwaterError as error:
            reasons.append(f"retention of {row.full_name}: {error}")  # The other streams are retained nevertheless.
        for reason in reasons:
            note(reason)
    return truncated


def _retain_stream(engine: Engine, session: int, row: StreamRow, now_us: int, reasons: list[str]) -> bool:
    """Truncate one stream for each reason that its policy gives; whether anything became unreadable."""
    policy = Retention.from_json(row.retention)
    stream = engine.stream_ref(row)
    found = []
    if policy.kind == "consumption":
        is_truncated, missing = engine.run(truncate_consumed, session, engine.store_id, stream.id, policy.groups)
        found.append(is_truncated)
        if missing is not None:
            reasons.append(f"nothing of {stream.name} goes by consumption: there is no reader group {missing!r} that reads it")
        _free(engine)
    for cut in _cuts(engine, stream, policy, now_us):
        found.append(engine.run(truncate_retained, session, engine.store_id, stream.id, cut))
        _free(engine)
    return any(found)


def _free(engine: Engine) -> None:
    failpoints.reach("truncate.committed")
    truncation.free_rows(engine)


def _cuts(engine: Engine, stream: StreamRef, policy: Retention, now_us: int) -> Iterator[Cut]:
    """The cuts before which a policy keeps nothing, by age and by size."""
    if policy.seconds is not None and policy.seconds * 1_000_000 < now_us:
        yield cuts.at_time(engine, stream, clock.to_datetime(now_us) - timedelta(seconds=policy.seconds))
    if policy.bytes is not None:
        oversized = engine.run(find_oversized, stream.id, policy.bytes)
        if oversized is not None:
            yield cuts.single(engine, stream, oversized)


@operation("commit", repeatable=True)
def truncate_retained(tx: Tx, session: int, store_id: str, stream: int, cut: Cut) -> bool:
    """Truncate a stream at a cut, as the session that has the upkeep's lease; whether anything became unreadable."""
    leases.hold(tx, session)
    return truncation.truncate_locked(tx, store_id, streams.lock_stream(tx, stream), cut, stops_at_keeps=True)


@operation("commit", repeatable=True)
def truncate_consumed(tx: Tx, session: int, store_id: str, stream: int, names: Sequence[str]) -> tuple[bool, str | None]:
    """Truncate a stream past all that these reader groups have read, as the session that has the upkeep's lease.

    Returns whether anything became unreadable, and the name of a group that is missing: then nothing does.
    """
    leases.hold(tx, session)
    row = streams.lock_stream(tx, stream)
    found = _consumed(tx, stream, names)
    if isinstance(found, str):
        return False, found
    cut = Cut(store_id, {row.full_name: StreamCut(stream, found)})
    return truncation.truncate_locked(tx, store_id, row, cut, stops_at_keeps=True), None


def _consumed(tx: Tx, stream: int, names: Sequence[str]) -> dict[int, int] | str:
    """The cut past all that these groups have read; or the name of one that is missing, so that nothing goes unread."""
    rows = segments.list_segments(tx, stream)
    stream_map = SegmentMap(rows)
    heads = {row.number: row.tail for row in rows}
    # Where the groups are, also at the end of a segment: they find their way to its successors from there.
    entered: set[int] = set()
    for name in names:
        group = groups.find_group(tx, name)
        if group is None or stream not in group.streams:
            return name
        numbers = {item.segment: item.position for item in groups.list_frontier(tx, group.id) if item.stream == stream}
        entered.update(numbers)
        for number, read in stream_map.reached(numbers).items():
            heads[number] = min(heads[number], read)
    return stream_map.frontier(heads, entered)


@operation("read")
def find_oversized(tx: Tx, stream: int, limit_bytes: int) -> dict[int, int] | None:
    """Behind the oldest events that are too many; None if there are none. About `limit_bytes` stay."""
    rows = segments.list_segments(tx, stream)
    if sum(row.bytes for row in rows) <= limit_bytes:
        return None
    # What a tag or a running reader keeps below the head counts in the rows, and does not count here.
    excess = sum(_count_bytes(tx, row) for row in rows) - limit_bytes
    if excess <= 0:
        return None
    # What a fork has of its parent is older than all of its own, of which some is to go, and is not counted.
    heads = {row.number: max(row.head, min(row.base_until, row.tail)) for row in rows}
    # Times grow along every key, so the oldest extent of all is never behind one of a predecessor that stays.
    waiting: list[_Next] = []
    for row in rows:
        _push(waiting, row.number, _extents(tx, row))
    for _ in range(_MOST_EXTENTS):
        if not waiting:
            break
        _, number, extent, rest = heapq.heappop(waiting)
        if extent.bytes > excess:
            heads[number] = extent.first + extent.events * excess // extent.bytes
            break
        excess -= extent.bytes
        heads[number] = extent.first + extent.events
        _push(waiting, number, rest)
    return SegmentMap(rows).frontier(heads)


def _push(waiting: list[_Next], number: int, rest: Iterator[_Extent]) -> None:
    extent = next(rest, None)
    if extent is not None:
        heapq.heappush(waiting, (extent.last_at, number, extent, rest))


def _count_bytes(tx: Tx, row: SegmentRow) -> int:
    return sum(extent.bytes for extent in _extents(tx, row))


def _extents(tx: Tx, row: SegmentRow) -> Iterator[_Extent]:
    """The extents of a segment's own log from its head on. One that the head cuts counts with what is left of it."""
    at = row.head
    while found := tx.run(
        "SELECT first, count, COALESCE(raw, length), COALESCE(last_at, appended_at) FROM extent WHERE log = ? AND first + count > ? "
        "AND first >= COALESCE((SELECT max(first) FROM extent WHERE log = ? AND first <= ?), 0) ORDER BY first LIMIT 500",
        (row.log, at, row.log, at),
    ):
        for first, count, size, last_at in found:
            start = max(first, row.head)
            left = first + count - start
            yield _Extent(start, left, size * left // count, last_at)
        at = found[-1][0] + found[-1][1]
