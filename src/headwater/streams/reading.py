"""Reading a whole stream: every segment after its predecessors, segments side by side in the order of their appends."""

from __future__ import annotations

import heapq
import os
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Self

from headwater.catalog import replacements, segments, streams, tags, undone
from headwater.catalog.database import Tx
from headwater.catalog.operations import Right, operation
from headwater.catalog.segments import SegmentRow
from headwater.catalog.streams import StreamRow
from headwater.errors import RolledBackError, TruncatedError
from headwater.segments.batches import Batch
from headwater.segments.engine import Engine
from headwater.segments.lanes import StreamRef
from headwater.segments.read import SegmentCursor, SegmentState
from headwater.streams import cuts
from headwater.streams.cuts import Place, Range
from headwater.streams.lifecycle import deleted, naming
from headwater.streams.lineage import Lineage

_LONGEST_WAIT_SECONDS = 1.0
#: A follower that always has something to read looks this often whether another stream took the name of its own.
_LOOK_SECONDS = 1.0
#: How long a running reader's hold lasts when it is not heard of.
_HOLD_SECONDS = 600.0


class _Hold:
    """Keeps what a running reader has still to read from being retained away, on a stream that does not keep everything."""

    def __init__(self, engine: Engine, stream: StreamRef) -> None:
        self._engine = engine
        self._stream = stream
        self._is_needed = engine.run(streams.is_retained, stream.id)
        self._begin()

    def _begin(self) -> None:
        self._name = f"reader-{uuid.uuid4().hex}"
        self._process = os.getpid()
        self._due = 0.0
        self._is_held = False

    def renew(self, left: Callable[[], Iterable[tuple[int, int, int]]]) -> None:
        """Hold (segment, start, end) from now on, if it is time to say so again."""
        if not self._is_needed:
            return
        if self._process != os.getpid():
            self._begin()  # In a forked child: the parent's hold is the parent's.
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + _HOLD_SECONDS / 4
        self._engine.run(hold_ranges, self._stream.id, self._name, list(left()))
        self._is_held = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self._is_held or self._process != os.getpid() or self._engine.is_closed:
            return
        self._engine.end_hold(self._name)
        # A reader that is let go of may be so anywhere: see there.
        if kind is not GeneratorExit:
            self._engine.release_ended()


@operation("commit", repeatable=True)
def hold_ranges(tx: Tx, stream: int, name: str, ranges: Sequence[tuple[int, int, int]]) -> None:
    """Keep what is left of each (segment, start, end) for a running reader, in place of what this name held before."""
    streams.lock_stream(tx, stream)
    # What was truncated before is not pinned: whoever looks for it would take it for kept, and its absence for damage.
    kept = cuts.still_kept(tx, stream, ranges)
    tags.hold(tx, name, [(stream, *numbers) for numbers in kept], int(_HOLD_SECONDS * 1_000_000))


def read_batches(
    engine: Engine, stream: StreamRef, ranges: list[Range], columns: Sequence[str] | None = None, key: bytes | None = None
) -> Iterator[Batch]:
    """The batches of ranges, each segment's in order; with these columns only, if they are named. `stream` was looked up after them.

    With a routing key, those that may have its events.
    """
    return (batch for _, batch in merge_batches(engine, [(stream, _of_key(ranges, key))], columns, key))


def merge_batches(
    engine: Engine, parts: Sequence[tuple[StreamRef, list[Range]]], columns: Sequence[str] | None = None, key: bytes | None = None
) -> Iterator[tuple[int, Batch]]:
    """The batches of ranges of several streams in the order of their appends, each with the place of its stream in `parts`.

    With these columns only, if they are named; without those that can't have an event with the routing key, if there is one.
    """
    if columns is not None and sum(len(ranges) for _, ranges in parts) > 1:
        columns = [*columns, "_appended"]
    lineages = [_lineage(ranges) for _, ranges in parts]
    lefts = [{item.segment.number: (item.segment.number, item.start, item.end) for item in ranges} for _, ranges in parts]
    reading: set[_Source] = set()
    with ExitStack() as stack:
        holds = [stack.enter_context(_Hold(engine, stream)) for stream, _ in parts]
        while any(lineages) or reading:
            for place, (stream, _) in enumerate(parts):
                holds[place].renew(lefts[place].values)
                for item in lineages[place].take_ready():
                    cursor = engine.cursor(stream, item.segment.number, item.start, item.end, columns, keeps_schema=True, key=key)
                    reading.add(_Source(engine, stream, cursor, place))
            source, batch = _earliest(reading)
            left = lefts[source.place]
            if source.is_done:
                reading.remove(source)
                lineages[source.place].finish(source.segment)
                del left[source.segment]
            else:
                left[source.segment] = (source.segment, source.number, left[source.segment][2])
            if batch is not None:
                yield source.place, batch


class _Source:
    """A segment that is read beside others, in the order of append times: a batch that reaches too far is handed out in parts.

    Its errors of what was truncated have the head of its stream, which has a place among the streams that are read.
    """

    def __init__(self, engine: Engine, stream: StreamRef, cursor: SegmentCursor, place: int) -> None:
        self.segment = cursor.segment
        self.place = place
        self._engine = engine
        self._stream = stream
        self._order = place, cursor.segment
        self._cursor = cursor
        self._rest: Batch | None = None

    @property
    def is_done(self) -> bool:
        return self._rest is None and self._cursor.is_done

    @property
    def number(self) -> int:
        """The first one that was not handed out."""
        return self._cursor.number if self._rest is None else self._rest.first

    def turn(self) -> tuple[int, tuple[int, int]]:
        """When its next event was appended; among equals the first stream and the lower segment go first."""
        try:
            time = self._rest.appended_at if self._rest is not None else self._cursor.next_time()
        except TruncatedError as error:
            raise with_head(self._engine, self._stream, error) from None
        return 1 << 62 if time is None else time, self._order

    def next_batch(self, turn: tuple[int, tuple[int, int]] | None) -> Batch | None:
        """The next events, as far as they come before another one's turn."""
        try:
            batch = self._rest if self._rest is not None else self._cursor.next_batch()
        except TruncatedError as error:
            raise with_head(self._engine, self._stream, error) from None
        self._rest = None
        if batch is None or turn is None:
            return batch
        count = batch.count_until(turn[0], inclusive=self._order < turn[1])
        if not count:
            # Where it begins within a chunk, its turn was that of the chunk's first event.
            self._rest = batch
            return None
        if count < batch.count:
            batch, self._rest = batch.split(count)
        return batch


def _earliest(reading: set[_Source]) -> tuple[_Source, Batch | None]:
    """The source whose turn it is, and what it has."""
    if len(reading) == 1:
        source = next(iter(reading))
        return source, source.next_batch(None)
    (_, source), (turn, _) = heapq.nsmallest(2, ((source.turn(), source) for source in reading), key=lambda found: found[0])
    return source, source.next_batch(turn)


def _lineage(ranges: Iterable[Range]) -> Lineage:
    lineage = Lineage()
    for item in sorted(ranges, key=lambda item: item.segment.number):
        lineage.add(item)
    return lineage


def with_head(engine: Engine, stream: StreamRef, error: TruncatedError) -> TruncatedError:
    """The same error, with the stream's head as of now."""
    return TruncatedError(error.message, cuts.head(engine, stream))


def next_batch(engine: Engine, stream: StreamRef, cursor: SegmentCursor) -> Batch | None:
    """What a cursor has next, None if there is nothing. TruncatedError, with the stream's head, if it was truncated."""
    try:
        return None if cursor.is_done else cursor.next_batch()
    except TruncatedError as error:
        raise with_head(engine, stream, error) from None


def look(engine: Engine, stream: StreamRef, cursor: SegmentCursor) -> SegmentState:
    """Where a cursor is in its segment now. TruncatedError, with the stream's head, if its next event was truncated."""
    try:
        return cursor.look()
    except TruncatedError as error:
        raise with_head(engine, stream, error) from None


def _of_key(ranges: Iterable[Range], key: bytes | None) -> list[Range]:
    """The ranges that may have events with a routing key; all of them if it is None."""
    return [item for item in ranges if key is None or item.segment.keys.covers(key)]


def follow_batches(
    engine: Engine, stream: StreamRef, start: Place, key: bytes | None = None, *, may_move: bool = True
) -> Iterator[Batch | None]:
    """The batches from a place on, forever: None whenever there is nothing for a while. Ends when the stream is sealed and read.

    With a routing key, those that may have its events. If another stream takes the name, the follower continues in that stream, or raises
    RolledBackError if it `may_move` to no other one.
    """
    return _following(engine, stream, cuts.open_ranges(engine, stream, start), key, may_move)


def _following(engine: Engine, stream: StreamRef, ranges: list[Range], key: bytes | None, may_move: bool) -> Iterator[Batch | None]:
    while True:
        newest = max((item.segment.number for item in ranges), default=-1)
        with _Hold(engine, stream) as hold:
            onward = yield from _follow(engine, stream, _lineage(_of_key(ranges, key)), newest, hold, key)
        if onward is None:
            return
        stream = engine.stream_ref(onward.stream)
        place = cuts.single(engine, stream, onward.numbers)
        if not onward.holds:
            raise RolledBackError(
                f"another stream has the name {stream.name} by now, without what was read: read on from the cut of this error", place
            )
        if not may_move:
            raise RolledBackError(f"another stream has the name {stream.name} by now: read on from the cut of this error", place)
        ranges = cuts.open_ranges(engine, stream, place)


def _follow(
    engine: Engine, stream: StreamRef, lineage: Lineage, newest: int, hold: _Hold, key: bytes | None
) -> Generator[Batch | None, None, replacements.Onward | None]:
    """Follow one stream. Returns where to go on if another stream took its name."""
    reading: set[SegmentCursor] = set()
    news: list[SegmentCursor] = []
    #: How far each segment was read that is finished.
    finished: dict[int, int] = {}
    name = stream.name

    def find_onward() -> replacements.Onward | None:
        waiting = {item.segment.number: item.start for item in lineage.waiting}
        numbers = finished | waiting | {cursor.segment: cursor.number for cursor in reading}
        return engine.run(replacements.find_onward, stream.id, name, numbers, newest, key)

    look_at = time.monotonic() + _LOOK_SECONDS
    while True:
        seen = engine.changes.version()
        for item in lineage.take_ready():
            end = item.end if not item.segment.is_open else None
            reading.add(engine.cursor(stream, item.segment.number, item.start, end, key=key))
        if time.monotonic() >= look_at:
            look_at = time.monotonic() + _LOOK_SECONDS
            with naming(stream):
                new_name = engine.run(streams.get_stream, stream.id).full_name
            if new_name != name:
                onward = find_onward()
                if onward is not None:
                    return onward
                name = new_name
        hold.renew(lambda: _unread(engine, stream, reading, lineage))
        found = False
        tails = None
        # Those go first of which there was a notice; then all are looked at, since notices may be lost.
        news = [cursor for cursor in reading if cursor.has_news()] if not news else []
        for cursor in sorted(news or reading, key=lambda cursor: cursor.segment):
            if not news and len(reading) > 4:
                # With many segments one look at all their tails is cheaper than a plan for each.
                tails = tails if tails is not None else _tails(engine, stream)
                if tails.get(cursor.segment, 1 << 62) <= cursor.number:
                    continue
            before = cursor.number
            batch = next_batch(engine, stream, cursor)
            found = found or cursor.number > before
            if batch is not None:
                yield batch
        if found:
            continue
        with naming(stream):
            present, rows = engine.run(look_at_segments, stream.id)
        look_at = time.monotonic() + _LOOK_SECONDS
        if present.full_name != name:
            onward = find_onward()
            if onward is not None:
                return onward
            name = present.full_name
        progressed = False
        for cursor in list(reading):
            row = rows.get(cursor.segment)
            if row is None or cursor.number > row.tail:
                read = {**finished, **({cursor.segment: cursor.number} if cursor.number else {})}
                if _is_rolled_back(engine, stream, cursor.segment, read):
                    # Nothing of it was read, nor anything else past the cut: others take its place.
                    reading.remove(cursor)
                    lineage.finish(cursor.segment)
                    progressed = True
                    continue
            if not cursor.is_done and (row is None or cursor.number < row.head):
                # If the segment is gone, nobody knows whether we had read all of it: going on quietly might skip events.
                raise with_head(engine, stream, TruncatedError(f"segment {cursor.segment} of {stream.name} was truncated"))
            if row is None or (not row.is_open and cursor.number >= row.tail):
                progressed = True
                reading.remove(cursor)
                lineage.finish(cursor.segment)
                finished[cursor.segment] = cursor.number
        for number in range(newest + 1, max(rows) + 1):
            row = rows.get(number)
            if row is None and _is_rolled_back(engine, stream, number, {}):
                continue
            progressed = True
            if row is not None and key is not None and not row.keys.covers(key):
                continue
            if row is None or row.head:
                raise with_head(engine, stream, TruncatedError(f"segment {number} of {stream.name} was truncated before it was read"))
            lineage.add(Range(row, row.head, row.tail))
        newest = max(newest, *rows)
        if not reading and not lineage and present.sealed_at is not None:
            return None
        if not progressed:
            engine.wait_for_more(reading, seen, _LONGEST_WAIT_SECONDS)
            yield None


def _is_rolled_back(engine: Engine, stream: StreamRef, segment: int, read: dict[int, int]) -> bool:
    """Whether a roll-back took a segment away. RolledBackError if something of what was read is undone."""
    if read:
        error = engine.run(undone.explain, stream.id, read)
        if error is not None:
            raise error
    return segment in engine.run(undone.list_gone, stream.id)


def _unread(engine: Engine, stream: StreamRef, reading: Iterable[SegmentCursor], lineage: Lineage) -> list[tuple[int, int, int]]:
    """(segment, start, end) of what is there to be read at the moment, now or after its predecessors."""
    tails = _tails(engine, stream)
    found = [(cursor.segment, cursor.number, cursor.end) for cursor in reading]
    found += [(item.segment.number, item.start, None if item.segment.is_open else item.end) for item in lineage.waiting]
    known = [(segment, start, tails.get(segment, 0) if end is None else end) for segment, start, end in found]
    return [(segment, start, end) for segment, start, end in known if start < end]


def get_single_segment(engine: Engine, stream: StreamRef) -> SegmentRow:
    """The one segment of a stream that can't scale."""
    rows = engine.run(segments.list_segments, stream.id)
    if not rows:
        raise deleted(stream)
    return rows[0]


def _tails(engine: Engine, stream: StreamRef) -> dict[int, int]:
    return {row.number: row.tail for row in engine.run(segments.list_open_segments, stream.id)}


@operation("read", right=Right("read", "stream"))
def look_at_segments(tx: Tx, stream: int) -> tuple[StreamRow, dict[int, SegmentRow]]:
    """A stream, and its segments by number."""
    found, rows = tx.run_all([streams.looked_up(stream), segments.listed(stream)])
    return streams.to_stream(stream, found), {row.number: row for row in map(segments.to_row, rows)}
