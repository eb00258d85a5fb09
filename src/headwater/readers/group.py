"""A reader group: its readers, its positions, and going back to other ones."""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from headwater.catalog import groups
from headwater.catalog.groups import GroupRow
from headwater.catalog.operations import Operation
from headwater.catalog.segments import SegmentRow
from headwater.errors import AlreadyExistsError, InvalidRequestError, NotFoundError, UnavailableError
from headwater.model.arguments import check_seconds, items_of, shown
from headwater.model.cuts import Cut, StreamCut
from headwater.model.keys import KEY_SPACE
from headwater.model.limits import READER_SECONDS
from headwater.model.names import parse_stream_name, parse_word
from headwater.model.positions import Segment
from headwater.readers import placing, progress
from headwater.readers.progress import Lag
from headwater.readers.reader import Reader
from headwater.runtime import clock
from headwater.segments.engine import Engine
from headwater.segments.lanes import StreamRef
from headwater.streams import cuts
from headwater.streams.cuts import Place
from headwater.streams.lifecycle import naming, open_stream

if TYPE_CHECKING:
    from headwater.store import Store

T = TypeVar("T")


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
        self._names({ref.id for ref in refs})
        for ref in refs:
            if ref.id not in self._row.streams:
                raise NotFoundError(f"the reader group {self.name} reads a deleted stream; another has its name {ref.name} by now")
        return refs

    def _names(self, streams: Iterable[int]) -> dict[int, str]:
        """The group's streams and their names, looked up again if one of these took another one's name."""
        if not self._row.streams.keys() >= set(streams):
            found = self._engine.run(groups.find_group, self._row.name)
            if found is not None and found.id == self._row.id:
                self._row = found
        return self._row.streams

    def positions(self) -> Cut:
        """The group's committed positions."""
        return self._cut(self._run(progress.positions))

    def _cut(self, positions: dict[int, dict[int, int]]) -> Cut:
        if not positions:
            raise self._deleted()
        names = self._names(positions)
        return Cut(self._engine.store_id, {names[stream]: StreamCut(stream, numbers) for stream, numbers in positions.items()})

    def checkpoint(self, timeout: float = 30.0) -> Cut:
        """A cut of where every reader is: what it has handed out, as of its next read. Raises UnavailableError if some don't answer.

        Readers are not stopped, and their committed positions stay as they are.
        """
        timeout = check_seconds(timeout, "timeout")
        number = self._engine.run(groups.request_checkpoint, self._row.id)
        deadline = time.monotonic() + timeout
        while True:
            seen = self._engine.changes.version()
            missing, positions = self._engine.run(groups.read_checkpoint, self._row.id, number)
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
        refs = self._refs()
        places = [(ref.id, cuts.fix(self._engine, ref, cut)) for ref in refs]
        with naming(*refs):
            self._engine.run(placing.reset_group, self._engine.store_id, self._row.id, places)

    def lag(self) -> Lag:
        """How far the committed positions are behind the tails (of a bounded group: behind its end)."""
        return self._run(progress.lag)

    def time_window(self) -> TimeWindow:
        """Between which event times the group is, by what writers noted: all events still to come are not older than `lower`, all that
        were committed not newer than `upper`. None where nothing is known."""
        bounds = self._run(progress.time_window)
        lower, upper = (clock.to_datetime(bound) if bound is not None else None for bound in bounds)
        return TimeWindow(lower, upper)

    def assignments(self) -> dict[str, list[Segment]]:
        """Who reads what, by reader; the segments that nobody holds are under the empty name."""
        frontier, rows = self._run(progress.frontier)
        found: dict[str, list[Segment]] = {}
        for item in frontier:
            row = rows.get((item.stream, item.segment))
            if row is not None and not item.done:
                found.setdefault(item.reader or "", []).append(_segment(row))
        return {reader: found.get(reader, []) for reader in self.readers()} | ({"": found[""]} if "" in found else {})

    def held_segments(self) -> list[HeldSegment]:
        """The segments the group is at: who holds each and since when, and the committed position."""
        frontier, rows = self._run(progress.frontier)
        names = self._names({item.stream for item in frontier})
        return [
            HeldSegment(
                item.reader,
                names[item.stream],
                _segment(rows[item.stream, item.segment]),
                item.position,
                clock.to_datetime(item.since),
            )
            for item in frontier
            if not item.done and (item.stream, item.segment) in rows
        ]

    def readers(self) -> list[str]:
        """The readers that are there now."""
        return self._run(progress.list_readers)

    def _run(self, look: Operation[[int], T]) -> T:
        """Look at the group. NotFoundError if it was deleted."""
        try:
            return self._engine.run(look, self._row.id)
        except NotFoundError:
            raise self._deleted() from None

    def _deleted(self) -> NotFoundError:
        return NotFoundError(f"the reader group {self.name} was deleted")

    def remove_reader(self, id: str) -> None:
        """Let a reader go: it is fenced, and its segments are read on from their committed positions."""
        reader = parse_word(id, "reader")
        generation = self._engine.run(groups.get_generation, self._row.id, reader)
        self._engine.run(groups.leave_group, self._row.id, reader, generation)

    def delete(self) -> None:
        """Delete the group. Its readers get NotFoundError; the streams are not touched."""
        self._engine.run(groups.delete_group, self._row.id)


def open_group(store: Store, name: str, streams: list[str] | None, start: Place, end: Place) -> ReaderGroup:
    """The group of this name, made if streams are given and it is missing. AlreadyExistsError if it has other streams."""
    engine = store._engine
    parse_word(name, "reader group")
    if streams is None:
        found = engine.run(groups.find_group, name)
        if found is None:
            raise NotFoundError(f"there is no reader group {name!r}: give the streams it shall read to create it")
        return ReaderGroup(store, found)
    given = list(map(parse_stream_name, items_of(streams, "what a reader group reads", "streams")))
    if not given:
        raise InvalidRequestError("a reader group takes a list of one or more streams")
    refs = [open_stream(engine, name) for name in given]
    for ref in refs:
        placing.check_readable(ref.name, ref.kind)
    while (found := engine.run(groups.find_group, name)) is None:
        made = _create(engine, name, refs, start, end)
        if made is not None:
            return ReaderGroup(store, made)
    if set(found.streams) != {ref.id for ref in refs}:
        reads, wanted = ", ".join(sorted(found.streams.values())), ", ".join(sorted(map(str, given)))
        raise AlreadyExistsError(f"the reader group {name!r} exists and reads {reads}, not {wanted}")
    return ReaderGroup(store, found)


def _create(engine: Engine, name: str, refs: list[StreamRef], start: Place, end: Place) -> GroupRow | None:
    """The new group; None if the name is taken by now."""
    starts = [(ref.id, cuts.fix(engine, ref, start)) for ref in refs]
    ends = None
    if end is not None:
        bounded = [ref for ref in refs if not isinstance(end, Cut) or ref.name in end.streams]
        if not bounded:
            raise InvalidRequestError(f"the end names none of the streams that the group reads: {', '.join(ref.name for ref in refs)}")
        ends = [(ref.id, cuts.fix(engine, ref, end)) for ref in bounded]
    with naming(*refs):
        return engine.run(placing.create_group, engine.store_id, name, starts, ends)


def _segment(row: SegmentRow) -> Segment:
    return Segment(row.number, row.keys.start / KEY_SPACE, row.keys.end / KEY_SPACE, row.tail - row.head, row.bytes, row.made_epoch)


__all__ = ["Lag", "ReaderGroup", "StreamRef", "open_group"]
