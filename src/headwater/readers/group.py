"""A reader group: its readers, its positions, and going back to other ones."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Concatenate, NamedTuple, ParamSpec, TypeVar

from headwater.catalog import extents, groups, segments, streams, watermarks
from headwater.catalog.database import Tx
from headwater.catalog.groups import Assigned, GroupRow
from headwater.catalog.segments import SegmentRow
from headwater.errors import AlreadyExistsError, InvalidRequestError, NotFoundError, UnavailableError
from headwater.model.arguments import check_seconds, items_of, shown
from headwater.model.cuts import Cut, Span, StreamCut, is_before
from headwater.model.keys import KEY_SPACE
from headwater.model.limits import READER_SECONDS
from headwater.model.names import parse_stream_name, parse_word
from headwater.model.positions import Segment
from headwater.readers.reader import Reader
from headwater.runtime import clock
from headwater.segments.engine import Engine
from headwater.segments.lanes import StreamRef
from headwater.streams import cuts
from headwater.streams.cuts import Place
from headwater.streams.lifecycle import deleted, open_stream

if TYPE_CHECKING:
    from headwater.store import Store

_DEAD_AFTER_US = int(READER_SECONDS * 1_000_000)
P = ParamSpec("P")
T = TypeVar("T")


class Lag(NamedTuple):
    """How far a group is behind: events and bytes not committed yet, and the age of the oldest of them in seconds."""

    events: int
    bytes: int
    seconds: float


class HeldSegment(NamedTuple):
    """A segment that a group is at, and who holds it; None if nobody does."""

    reader: str | None
    stream: str
    segment: Segment
    position: int
    since: datetime


class TimeWindow(NamedTuple):
    """Bounds of event time at a group's position; None where unknown."""

    lower: datetime | None
    upper: datetime | None


class ReaderGroup:
    """Readers that share the segments of streams. Order holds for each key, across splits, merges and changes of readers."""

    def __init__(self, store: Store, row: GroupRow) -> None:
        self._store = store
        self._engine: Engine = store._engine
        self._row = row

    def __repr__(self) -> str:
        return f"<ReaderGroup {self.name}>"

    @property
    def name(self) -> str:
        return self._row.name

    @property
    def streams(self) -> list[str]:
        return sorted(self._row.streams.values())

    def reader(self, id: str, commit: str = "auto") -> Reader:
        """A reader of this name. An older holder of the name is fenced.

        "auto" commits positions every 5 s and on a clean close; "manual" only with `commit` or in a transaction.
        """
        if not isinstance(commit, str) or commit not in ("auto", "manual"):
            raise InvalidRequestError(f"a reader commits 'auto' or 'manual', not {shown(commit)}")
        refs = {ref.id: ref for ref in self._refs()}
        reader = Reader(self._engine, self._row, refs, parse_word(id, "reader"), commit == "auto")
        self._store._heart.add(reader.beat, READER_SECONDS / 4)
        self._store._readers.add(reader)
        return reader

    def _refs(self) -> list[StreamRef]:
        refs = [open_stream(self._engine, parse_stream_name(name)) for name in self._row.streams.values()]
        for ref in refs:
            if ref.id not in self._row.streams:
                raise NotFoundError(f"the reader group {self.name} reads a deleted stream; another has its name {ref.name} by now")
        return refs

    def positions(self) -> Cut:
        """The group's committed positions."""
        return self._cut(self._read(_positions, self._row.id))

    def _cut(self, positions: dict[int, dict[int, int]]) -> Cut:
        if not positions:
            raise NotFoundError(f"the reader group {self.name} was deleted")
        names = self._row.streams
        return Cut(self._engine.store_id, {names[stream]: StreamCut(stream, numbers) for stream, numbers in positions.items()})

    def checkpoint(self, timeout: float = 30.0) -> Cut:
        """A cut of where every reader is: what it has handed out, as of its next read. Raises UnavailableError if some don't answer.

        Readers are not stopped, and their committed positions stay as they are.
        """
        timeout = check_seconds(timeout, "timeout")
        number = self._engine.write_once(groups.request_checkpoint, self._row.id)
        deadline = time.monotonic() + timeout
        while True:
            seen = self._engine.changes.version()
            missing, positions = self._engine.read(groups.read_checkpoint, self._row.id, number, _DEAD_AFTER_US)
            if not missing:
                return self._cut(positions)
            left = deadline - time.monotonic()
            if left <= 0:
                raise UnavailableError(f"no checkpoint of group {self.name} in {timeout:g} s: {', '.join(missing)} did not read on")
            self._engine.changes.wait(seen, min(left, 0.25))

    def reset(self, cut: Cut | datetime | str) -> None:
        """Put the group at a cut (or at "head", "tail" or a time). TruncatedError if some of what lies behind it is gone."""
        if cut is None:
            raise InvalidRequestError("a reset takes the cut to go on from")
        places = [(ref, cuts.fix(self._engine, ref, cut)) for ref in sorted(self._refs(), key=lambda ref: ref.id)]

        def work(tx: Tx) -> None:
            groups.reset_group(tx, self._row.id, _locked_positions(tx, self._engine.store_id, places))

        self._engine.write(work)

    def lag(self) -> Lag:
        """How far the committed positions are behind the tails (of a bounded group: behind its end)."""
        return Lag(*self._read(_lag, self._row))

    def time_window(self) -> TimeWindow:
        """Between which event times the group is, by what writers noted: all events still to come are not older than `lower`, all that
        were committed not newer than `upper`. None where nothing is known."""
        bounds = self._read(_time_window, self._row)
        lower, upper = (clock.to_datetime(bound) if bound is not None else None for bound in bounds)
        return TimeWindow(lower, upper)

    def assignments(self) -> dict[str, list[Segment]]:
        """Who reads what, by reader; the segments that nobody holds are under the empty name."""
        frontier, rows = self._read(_frontier_rows, self._row)
        found: dict[str, list[Segment]] = {}
        for item in frontier:
            row = rows.get((item.stream, item.segment))
            if row is not None and not item.done:
                found.setdefault(item.reader or "", []).append(_segment(row))
        return {reader: found.get(reader, []) for reader in self.readers()} | ({"": found[""]} if "" in found else {})

    def held_segments(self) -> list[HeldSegment]:
        """The segments the group is at: who holds each and since when, and the committed position."""
        frontier, rows = self._read(_frontier_rows, self._row)
        return [
            HeldSegment(
                item.reader,
                self._row.streams[item.stream],
                _segment(rows[item.stream, item.segment]),
                item.position,
                clock.to_datetime(item.since),
            )
            for item in frontier
            if not item.done and (item.stream, item.segment) in rows
        ]

    def readers(self) -> list[str]:
        """The readers that are there now."""
        return [reader for reader, seen_at in self._read(groups.list_readers, self._row.id) if seen_at]

    def _read(self, look: Callable[Concatenate[Tx, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a catalog function over one look, in which the group is there. NotFoundError if it was deleted."""

        def both(tx: Tx) -> T:
            if not groups.is_there(tx, self._row.id):
                raise NotFoundError(f"the reader group {self.name} was deleted")
            return look(tx, *args, **kwargs)

        return self._engine.read(both)

    def remove_reader(self, id: str) -> None:
        """Let a reader go: it is fenced, and its segments are read on from their committed positions."""
        reader = parse_word(id, "reader")
        generation = self._engine.look(groups.get_generation, self._row.id, reader)
        self._engine.write_once(groups.leave_group, self._row.id, reader, generation)

    def delete(self) -> None:
        """Delete the group. Its readers get NotFoundError; the streams are not touched."""
        self._engine.write(groups.delete_group, self._row.id)


def open_group(store: Store, name: str, streams: list[str] | None, start: Place, end: Place) -> ReaderGroup:
    """The group of this name, made if streams are given and it is missing. AlreadyExistsError if it has other streams."""
    engine = store._engine
    parse_word(name, "reader group")
    if streams is None:
        found = engine.read(groups.find_group, name)
        if found is None:
            raise NotFoundError(f"there is no reader group {name!r}: give the streams it shall read to create it")
        return ReaderGroup(store, found)
    given = list(map(parse_stream_name, items_of(streams, "what a reader group reads", "streams")))
    if not given:
        raise InvalidRequestError("a reader group takes a list of one or more streams")
    refs = [open_stream(engine, name) for name in given]
    for ref in refs:
        if ref.kind != "events":
            raise InvalidRequestError(f"{ref.name} is of kind {ref.kind!r}: a reader group reads streams of events")
    while (found := engine.read(groups.find_group, name)) is None:
        made = _create(engine, name, sorted(refs, key=lambda ref: ref.id), start, end)
        if made is not None:
            return ReaderGroup(store, made)
    if set(found.streams) != {ref.id for ref in refs}:
        reads, wanted = ", ".join(sorted(found.streams.values())), ", ".join(sorted(map(str, given)))
        raise AlreadyExistsError(f"the reader group {name!r} exists and reads {reads}, not {wanted}")
    return ReaderGroup(store, found)


def _create(engine: Engine, name: str, refs: list[StreamRef], start: Place, end: Place) -> GroupRow | None:
    """The new group; None if the name is taken by now."""
    starts = [(ref, cuts.fix(engine, ref, start)) for ref in refs]
    stops = [(ref, cuts.fix(engine, ref, end)) for ref in refs] if end is not None else None

    def work(tx: Tx) -> GroupRow | None:
        positions = _locked_positions(tx, engine.store_id, starts)
        ends = _locked_positions(tx, engine.store_id, stops) if stops is not None else None
        return groups.create_group(tx, name, {ref.id: ref.name for ref in refs}, positions, ends)

    return engine.write_once(work)


def _locked_positions(tx: Tx, store_id: str, places: list[tuple[StreamRef, Place]]) -> dict[int, dict[int, int]]:
    """Where a group shall be, in streams given in the order of their ids. They are locked: none of it is truncated before it is there.

    Retention by what groups have read is decided before, and seen here, or sees where the group is.
    """
    for ref, _ in places:
        try:
            streams.lock_stream(tx, ref.id)
        except NotFoundError:
            raise deleted(ref) from None
    return {ref.id: cuts.numbers_in(tx, store_id, ref, place) for ref, place in places}


def _positions(tx: Tx, group: int) -> dict[int, dict[int, int]]:
    found: dict[int, dict[int, int]] = {}
    for item in groups.list_frontier(tx, group):
        found.setdefault(item.stream, {})[item.segment] = item.position
    return found


def _frontier_rows(tx: Tx, group: GroupRow) -> tuple[list[Assigned], dict[tuple[int, int], SegmentRow]]:
    rows = {(stream, row.number): row for stream in group.streams for row in segments.list_segments(tx, stream)}
    return groups.list_frontier(tx, group.id), rows


def _lag(tx: Tx, group: GroupRow) -> tuple[int, int, float]:
    events = size = 0
    oldest: int | None = None
    positions = _positions(tx, group.id)
    for stream, numbers in positions.items():
        rows = segments.list_segments(tx, stream)
        ends = group.ends.get(stream) if group.ends is not None else None
        for item in cuts.between_numbers(rows, numbers, ends):
            row = item.segment
            events += item.end - item.start
            size += extents.estimate_bytes(tx, row, item.start, item.end)
            appended_at = extents.find_append_time(tx, row, item.start)
            if appended_at is not None:
                oldest = appended_at if oldest is None else min(oldest, appended_at)
    now = tx.run("SELECT now_us()")[0][0]
    return events, size, max(0.0, (now - oldest) / 1_000_000) if oldest is not None else 0.0


def _time_window(tx: Tx, group: GroupRow) -> tuple[int | None, int | None]:
    lowers: list[int | None] = []
    uppers: list[int | None] = []
    for stream, numbers in _positions(tx, group.id).items():
        spans = {row.number: row.span for row in segments.list_segments(tx, stream)}
        frontier = [spans[segment] for segment in numbers if segment in spans]
        passed: int | None = None
        ahead: int | None = None
        for mark in watermarks.list_marks(tx, stream):
            behind = [_is_passed(segment, number, numbers, spans, frontier) for segment, number in mark.numbers.items()]
            if all(behind):
                passed = mark.low
            if ahead is None and all(_reaches(segment, number, numbers, spans) for segment, number in mark.numbers.items()):
                ahead = mark.high
        lowers.append(passed)
        uppers.append(ahead)
    return (
        None if None in lowers else min(bound for bound in lowers if bound is not None),
        None if None in uppers else max(bound for bound in uppers if bound is not None),
    )


def _is_passed(segment: int, number: int, positions: dict[int, int], spans: dict[int, Span], frontier: list[Span]) -> bool:
    """Whether a group at `positions` has all before this number of the segment behind it."""
    if segment in positions:
        return positions[segment] >= number
    return segment not in spans or is_before(spans[segment], frontier)


def _reaches(segment: int, number: int, positions: dict[int, int], spans: dict[int, Span]) -> bool:
    """Whether a mark at this number of the segment lies at or behind the group's positions."""
    if segment in positions:
        return number >= positions[segment]
    frontier = [spans[other] for other in positions if other in spans]
    return segment in spans and not is_before(spans[segment], frontier)


def _segment(row: SegmentRow) -> Segment:
    return Segment(row.number, row.keys.start / KEY_SPACE, row.keys.end / KEY_SPACE, row.tail - row.head, row.bytes, row.made_epoch)


__all__ = ["Lag", "ReaderGroup", "StreamRef", "open_group"]
