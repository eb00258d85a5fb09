"""Merged reading: the events of several streams and journals as one stream in the order of their appends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from headwater.catalog import segments
from headwater.errors import InvalidRequestError
from headwater.journals.events import recorded
from headwater.journals.hidden import HiddenEvents
from headwater.journals.queries import frontier
from headwater.model.cuts import Cut, StreamCut
from headwater.model.events import Event
from headwater.model.records import Recorded
from headwater.segments.batches import Batch
from headwater.segments.engine import Engine
from headwater.segments.fetching import from_batch
from headwater.segments.lanes import StreamRef
from headwater.streams import cuts, lifecycle, reading
from headwater.streams.cuts import Place

_LONGEST_WAIT_SECONDS = 1.0


class Merged:
    """An iterator over the events of several streams and journals. `stream` is the name of the one that the last event came from.

    `cut` is a place in all of them: a merged read that starts there goes on with the next event.
    """

    def __init__(self, engine: Engine, refs: Sequence[StreamRef], start: Place, end: Place, follow: bool) -> None:
        if not refs or len({ref.id for ref in refs}) < len(refs):
            raise InvalidRequestError("a merged read takes the names of one or more streams, each once")
        if follow and end is not None:
            raise InvalidRequestError("a follower has no end: leave out `end`, or `follow`")
        self._engine = engine
        self._refs = refs
        self._hidden = {ref.id: HiddenEvents(engine, ref.id) for ref in refs if ref.kind == "journal"}
        self._start = self._fixed("head" if start is None else start)
        self._end = None if follow else self._fixed("tail" if end is None else end)
        #: By stream, the next number of each segment that events were read of.
        self._numbers: dict[str, dict[int, int]] = {ref.name: {} for ref in refs}
        self._is_done = False
        self._events = self._read()
        self.stream: str | None = None

    def _fixed(self, place: Place) -> Cut:
        """A place as a cut of all streams, of one look where it is their tails."""
        if place == "tail":
            return cuts.tail(self._engine, self._refs)
        found = {ref.name: StreamCut(ref.id, cuts.numbers(self._engine, ref, place)) for ref in self._refs}
        return Cut(self._engine.store_id, found)

    def __iter__(self) -> Iterator[Event | Recorded]:
        return self

    def __next__(self) -> Event | Recorded:
        name, found = next(self._events)
        self._numbers[name][found.position.segment] = found.position.number + 1
        self.stream = name
        return found

    def __repr__(self) -> str:
        return f"<Merged {', '.join(ref.name for ref in self._refs)}>"

    @property
    def cut(self) -> Cut:
        """The place after the last event that was handed out."""
        if self._is_done and self._end is not None:
            return self._end
        rows = self._engine.run(segments.list_segments_of, [ref.id for ref in self._refs])
        return Cut(
            self._engine.store_id,
            {ref.name: StreamCut(ref.id, frontier(rows[ref.id], self._part(ref), self._numbers[ref.name])) for ref in self._refs},
        )

    def _part(self, ref: StreamRef) -> Mapping[int, int]:
        return self._start.streams[ref.name].segments

    def _read(self) -> Iterator[tuple[str, Event | Recorded]]:
        if self._end is not None:
            yield from self._between(self._start, self._end)
            self._is_done = True
            return
        is_idle = False
        while True:
            seen = self._engine.changes.version()
            # Asked before the tails, which are final then.
            is_sealed = is_idle and all(lifecycle.current_row(self._engine, ref).sealed_at is not None for ref in self._refs)
            # One look at all tails: where the effect is, its cause is.
            tail = cuts.tail(self._engine, self._refs)
            if tail != self._start:
                yield from self._between(self._start, tail)
                self._start, self._numbers = tail, {ref.name: {} for ref in self._refs}
                is_idle = False
            elif is_sealed:
                return
            elif is_idle:
                self._engine.changes.wait(seen, _LONGEST_WAIT_SECONDS)
            else:
                is_idle = True

    def _between(self, start: Cut, end: Cut) -> Iterator[tuple[str, Event | Recorded]]:
        parts = [(ref, cuts.ranges(self._engine, ref, start, end)) for ref in self._refs]
        for place, batch in reading.merge_batches(self._engine, parts):
            ref = parts[place][0]
            for event in self._events_of(ref, batch):
                yield ref.name, event
            # Deleted events are read too.
            self._numbers[ref.name][batch.segment] = batch.end

    def _events_of(self, ref: StreamRef, batch: Batch) -> Iterator[Event] | Iterator[Recorded]:
        hidden = self._hidden.get(ref.id)
        if hidden is None:
            return batch.events()
        hidden.refresh()
        return recorded(from_batch(batch, ref), hidden)
