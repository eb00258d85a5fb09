"""Queries: the events of a journal, all or some of them, up to a place or for ever; each knows where to go on from later."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from headwater.catalog import segments, words
from headwater.catalog.segments import SegmentRow
from headwater.catalog.words import TAG
from headwater.errors import InvalidRequestError, NotFoundError
from headwater.journals import index
from headwater.journals.events import Wanted, recorded
from headwater.model.cuts import Cut
from headwater.model.records import Recorded
from headwater.model.segmentmap import Front, SegmentMap
from headwater.segments.fetching import Fetched, from_batch
from headwater.streams import cuts, reading
from headwater.streams.cuts import Place, Range
from headwater.streams.lineage import Lineage

if TYPE_CHECKING:
    from headwater.journals.journal import Journal

#: A word that more than one in so many events have is found faster by reading them all.
_SCANNED_SHARE = 10


class Query:
    """An iterator over events of a journal. `cut` is where it is: a query that starts there goes on with the next event."""

    def __init__(self, journal: Journal, wanted: Wanted, start: Place, end: Place, follow: bool) -> None:
        self._journal = journal
        self._engine = journal._engine
        self._ref = journal._ref
        self._wanted = wanted
        self._follow = follow
        if follow and end is not None:
            raise InvalidRequestError("a live query has no end: leave out `end`, or `follow`")
        engine, ref = self._engine, self._ref
        self._start = dict(cuts.numbers(engine, ref, start if start is not None else "head"))
        self._end: Cut | None = None if follow else self._fixed(end)
        #: The next number of each segment that events were read of.
        self._numbers: dict[int, int] = {}
        self._is_done = False
        self._events = self._read()

    def _fixed(self, end: Place) -> Cut:
        if isinstance(end, Cut):
            return end
        return cuts.single(self._engine, self._ref, dict(cuts.numbers(self._engine, self._ref, end if end is not None else "tail")))

    def __iter__(self) -> Iterator[Recorded]:
        return self

    def __next__(self) -> Recorded:
        found = next(self._events)
        self._numbers[found.position.segment] = found.position.number + 1
        return found

    def __repr__(self) -> str:
        return f"<Query {self._ref.name}>"

    @property
    def cut(self) -> Cut:
        """The place after the last event that was handed out."""
        if self._is_done and self._end is not None:
            return self._end
        rows = self._engine.run(segments.list_segments, self._ref.id)
        return cuts.single(self._engine, self._ref, frontier(rows, self._start, self._numbers))

    # Reading.

    def _read(self) -> Iterator[Recorded]:
        start = cuts.single(self._engine, self._ref, self._start)
        if not self._follow:
            assert self._end is not None
            yield from self._between(start, self._end)
            self._is_done = True
            return
        if self._wanted.tag is not None or self._wanted.id is not None:
            # What is there by now is found by the index.
            tail = cuts.tail(self._engine, [self._ref])
            yield from self._between(start, tail)
            self._start, self._numbers = dict(tail.streams[self._ref.name].segments), {}
            start = tail
        for batch in reading.follow_batches(self._engine, self._ref, start, may_move=False):
            if batch is not None:
                yield from self._chosen(from_batch(batch, self._ref))

    def _between(self, start: Cut, end: Cut) -> Iterator[Recorded]:
        ranges = cuts.ranges(self._engine, self._ref, start, end)
        if self._wanted.id is not None and self._journal._is_ready():
            yield from self._of_entity(self._wanted.id, ranges)
            return
        rows = self._find_rows(ranges)
        if rows is not None and self._wanted.tag is not None:
            for found in self._by_tag(self._wanted.tag, ranges, rows):
                yield from self._chosen(found)
            return
        for batch in reading.read_batches(self._engine, self._ref, ranges):
            yield from self._chosen(from_batch(batch, self._ref))

    def _chosen(self, found: Fetched) -> Iterator[Recorded]:
        hidden = self._journal._hidden
        hidden.refresh()
        yield from recorded(found, hidden, self._wanted)
        # What was left out is behind the query too.
        self._numbers[found.segment] = found.numbers[-1] + 1

    def _find_rows(self, ranges: list[Range]) -> Mapping[int, words.WordRow] | None:
        """The tag's rows by segment; None if reading everything is faster, or if the index is not there."""
        if self._wanted.tag is None or not self._journal._is_ready():
            return None
        rows = {row.segment: row for row in self._engine.run(words.list_words, self._ref.id, TAG, self._wanted.tag)}
        events = sum(item.end - item.start for item in ranges)
        hits = sum(rows[item.segment.number].count for item in ranges if item.segment.number in rows)
        return rows if hits * _SCANNED_SHARE <= events else None

    def _by_tag(self, tag: str, ranges: list[Range], rows: Mapping[int, words.WordRow]) -> Iterator[Fetched]:
        """The events with a tag: segments side by side in the order of their appends, each after its predecessors."""
        lineage = Lineage()
        for item in ranges:
            lineage.add(item)
        sources: list[tuple[int, int, Fetched, Iterator[Fetched]]] = []
        while lineage or sources:
            # A segment without such events is done as it enters. Its successors enter before anything is given: their events may be older.
            while ready := lineage.take_ready():
                for item in ready:
                    self._enter(sources, item.segment.number, lineage, self._tagged(tag, item, rows.get(item.segment.number)))
            if not sources:
                continue
            _, segment, found, rest = heapq.heappop(sources)
            limit = sources[0][:2] if sources else None
            count = sum((time, segment) < limit for time in found.appended) if limit is not None else len(found.appended)
            count = max(count, 1)
            yield _first(found, count)
            if count < len(found.numbers):
                left = _rest(found, count)
                heapq.heappush(sources, (left.appended[0], segment, left, rest))
            else:
                self._enter(sources, segment, lineage, rest)

    def _enter(
        self, sources: list[tuple[int, int, Fetched, Iterator[Fetched]]], segment: int, lineage: Lineage, rest: Iterator[Fetched]
    ) -> None:
        found = next(rest, None)
        if found is None:
            lineage.finish(segment)
        else:
            heapq.heappush(sources, (found.appended[0], segment, found, rest))

    def _tagged(self, tag: str, item: Range, row: words.WordRow | None) -> Iterator[Fetched]:
        if row is not None:
            runs = index.tag_runs(self._engine, self._ref.id, tag, row, item.start, item.end)
            yield from self._engine.fetch(self._ref, runs)

    def _of_entity(self, id: str, ranges: list[Range]) -> Iterator[Recorded]:
        bounds = {item.segment.number: (item.start, item.end) for item in ranges}
        row = self._journal._get(id)
        runs = index.entity_runs(self._engine, self._ref.id, id, row, max(row.low, 1), row.sequence + 1)
        inside = (part for run in runs if run.segment in bounds and (part := index.within(run, *bounds[run.segment])))
        for found in self._engine.fetch(self._ref, inside):
            yield from self._chosen(found)


def _first(found: Fetched, count: int) -> Fetched:
    return Fetched(found.segment, found.numbers[:count], found.columns.slice(0, count), found.appended[:count])


def _rest(found: Fetched, count: int) -> Fetched:
    return Fetched(found.segment, found.numbers[count:], found.columns.slice(count), found.appended[count:])


def frontier(rows: list[SegmentRow], start: Mapping[int, int], numbers: Mapping[int, int]) -> dict[int, int]:
    """The place that a reader is at which began at `start`, and read each segment of `numbers` up to there: a tiling of the keys."""
    begun = {*start, *numbers}
    if not begun <= {row.number for row in rows}:
        raise NotFoundError("segments that this query read are gone: begin it again")
    # A segment begins when all before it are finished, so whatever precedes one that was begun is finished, and what precedes that too.
    past, left = Front(), []
    for row in sorted(rows, key=lambda row: row.number, reverse=True):
        is_finished = past.covers(row.keys)
        if not is_finished:
            left.append(row)
        if is_finished or row.number in begun:
            past.add(row)
    places = {**start, **numbers}
    return {row.number: places.get(row.number, row.head) for row in SegmentMap(left).oldest()}
