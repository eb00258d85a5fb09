"""Fetching events by their numbers: only the blocks and row groups that hold them, those of a window side by side."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa

from headwater.catalog import extents
from headwater.catalog.extents import PARQUET, Extent
from headwater.errors import CorruptDataError
from headwater.model.numbers import Numbers
from headwater.model.schemas import upgrade
from headwater.runtime.workers import Task
from headwater.segments.batches import Batch
from headwater.segments.block import Chunk, decode, verify
from headwater.segments.lanes import StreamRef

if TYPE_CHECKING:
    from headwater.segments.engine import Engine

#: What is planned with one look into the catalog, and fetched side by side.
_WINDOW_RUNS = 256
_WINDOW_EVENTS = 4096
_FIRST_EVENTS = 64


class Fetched(NamedTuple):
    """Events of one segment with ascending numbers, and when each was appended."""

    segment: int
    numbers: list[int]
    columns: pa.RecordBatch
    appended: list[int]


def fetch(engine: Engine, stream: StreamRef, runs: Iterable[Numbers], reverse: bool) -> Iterator[Fetched]:
    """See `Engine.fetch`."""
    waiting: deque[Iterator[Fetched]] = deque()
    for window in _windows(_pieces(runs) if reverse else runs):
        waiting.append(_Window(engine, stream, window, reverse).results())
        if len(waiting) > 1:
            yield from waiting.popleft()
    for results in waiting:
        yield from results


def _pieces(runs: Iterable[Numbers]) -> Iterator[Numbers]:
    """Runs given the last one first, in parts of the size that a window takes whole."""
    for run in runs:
        end = run.end
        while end > run.first:
            start = max(run.first, end - _FIRST_EVENTS)
            yield Numbers(run.segment, start, end - start)
            end = start


def _windows(runs: Iterable[Numbers]) -> Iterator[list[Numbers]]:
    """The runs in windows, the first ones small: whoever wants one event does not wait for thousands."""
    window: list[Numbers] = []
    limit, count = _FIRST_EVENTS, 0
    for run in runs:
        while run.count:
            # A piece of the first window's size is taken whole.
            taken = run.count if run.count <= _FIRST_EVENTS else min(run.count, limit - count)
            window.append(Numbers(run.segment, run.first, taken))
            run = Numbers(run.segment, run.first + taken, run.count - taken)
            count += taken
            if count >= limit or len(window) == _WINDOW_RUNS:
                yield window
                window, count, limit = [], 0, _WINDOW_EVENTS
    if window:
        yield window


class _Source(NamedTuple):
    """A block, or neighbouring row groups of a chunk, and the numbers that are wanted of it."""

    segment: int
    extent: Extent
    numbers: list[int]


class _Window:
    """Some runs, whose bytes are on their way once this is made."""

    def __init__(self, engine: Engine, stream: StreamRef, runs: list[Numbers], reverse: bool) -> None:
        self._engine = engine
        self._reverse = reverse
        self._stream = stream
        by_place: dict[int, list[Extent]] = {}
        for place, extent in engine.run(extents.find_extents, stream.id, runs):
            by_place.setdefault(place, []).append(extent)
        self._parts: list[Task[Fetched] | _Source | Numbers] = []
        for source in self._sources(runs, by_place):
            self._parts.append(source if isinstance(source, Numbers) or self._is_near(source) else self._submit(source))

    def _is_near(self, source: _Source) -> bool:
        """Whether reading it takes less than waking a thread."""
        return source.extent.data is not None or (source.extent.form != PARQUET and self._engine.storage.local)

    def _submit(self, source: _Source) -> Task[Fetched]:
        return self._engine.workers.submit(lambda: self._read(source))

    def _sources(self, runs: list[Numbers], found: dict[int, list[Extent]]) -> Iterator[_Source | Numbers]:
        """The runs by where they are, in their order. A run that is not all in the segment's own extents stays as it is."""
        source: _Source | None = None
        for place, run in enumerate(runs):
            there = sorted(found.get(place, ()), key=lambda extent: extent.first)
            at = run.first
            for extent in there:
                at = extent.end if extent.first <= at else at
            if at < run.end:
                if source is not None:
                    yield source
                source = None
                yield run
                continue
            for extent in reversed(there) if self._reverse else there:
                numbers = range(max(run.first, extent.first), min(run.end, extent.end))
                if source is not None and source.segment == run.segment and source.extent.first == extent.first:
                    if self._reverse:
                        source.numbers[:0] = numbers
                    else:
                        source.numbers.extend(numbers)
                    continue
                if source is not None:
                    yield source
                source = _Source(run.segment, extent, list(numbers))
        if source is not None:
            yield source

    def results(self) -> Iterator[Fetched]:
        for part in self._parts:
            if isinstance(part, Numbers):
                yield from self._read_along([part])
                continue
            try:
                yield self._read(part) if isinstance(part, _Source) else part.result()
            except _Moved as moved:
                # Upkeep put other bytes in the place of these: a cursor finds them, or says what is wrong.
                yield from self._read_along(list(_runs(moved.source.segment, moved.source.numbers)))

    def _read_along(self, runs: list[Numbers]) -> Iterator[Fetched]:
        found = (part for run in runs for part in _read_along(self._engine, self._stream, run))
        return reversed(list(found)) if self._reverse else found

    def _read(self, source: _Source) -> Fetched:
        try:
            if source.extent.form == PARQUET:
                return self._read_chunk(source)
            return self._read_block(source)
        except CorruptDataError as error:
            raise _Moved(source) from error

    def _read_block(self, source: _Source) -> Fetched:
        extent = source.extent
        name = extent.key or "the catalog (inline block)"
        if extent.data is not None:
            data = pa.py_buffer(extent.data)
        elif extent.key is None:
            raise CorruptDataError(f"{name} is missing", object=name)
        else:
            [found] = self._engine.storage.get_ranges(extent.key, [(extent.position, extent.length)])
            data = pa.py_buffer(found)
        verify(data, extent.crc, name)
        block = decode(data, lambda version: self._engine.schema(self._stream.id, version), name)
        if block.chunk.count != extent.count:
            raise CorruptDataError(f"a block in {name} has {block.chunk.count} events, the catalog says {extent.count}", object=name)
        columns = _take(block.chunk, [number - extent.first for number in source.numbers])
        return Fetched(source.segment, source.numbers, columns, [extent.appended_at] * len(source.numbers))

    def _read_chunk(self, source: _Source) -> Fetched:
        """Of a chunk only the row groups that hold what is wanted."""
        file = self._engine.chunks.open(source.extent)
        parts: list[pa.RecordBatch] = []
        appended: list[int] = []
        numbers = deque(source.numbers)
        while numbers:
            [group] = file.row_groups(numbers[0], numbers[0] + 1)
            end = file.firsts[group.places.stop]
            mine = []
            while numbers and numbers[0] < end:
                mine.append(numbers.popleft() - group.first)
            chunk, times = file.read(self._engine.storage, group.places, None)
            parts.append(_take(chunk, mine))
            assert times is not None, "all columns were asked for"
            appended += times.cast(pa.int64()).take(indices(mine)).to_pylist()
        columns = parts[0] if len(parts) == 1 else pa.concat_batches(parts)
        return Fetched(source.segment, source.numbers, columns, appended)


class _Moved(Exception):
    """The bytes of a source are not where the catalog said."""

    def __init__(self, source: _Source) -> None:
        super().__init__(source.segment, source.numbers)
        self.source = source


def _take(chunk: Chunk, places: list[int]) -> pa.RecordBatch:
    if len(places) == places[-1] - places[0] + 1:
        return chunk.columns.slice(places[0], len(places))
    return chunk.columns.take(indices(places))


def indices(places: list[int]) -> pa.Array:
    """Places for Arrow's `take`.

    `pa.array` imports pandas, where it is installed, to ask whether a list is of pandas: that is most of the first read's time.
    """
    return pa.Array.from_buffers(pa.int64(), len(places), [None, pa.py_buffer(np.array(places, dtype=np.int64))])


def _runs(segment: int, numbers: list[int]) -> Iterator[Numbers]:
    values = np.array(numbers)
    for part in np.split(values, np.flatnonzero(np.diff(values) != 1) + 1):
        yield Numbers(segment, int(part[0]), len(part))


def _read_along(engine: Engine, stream: StreamRef, run: Numbers) -> Iterator[Fetched]:
    """A run as a reader of the segment sees it: in a fork's parent too, and with the errors that say what is wrong."""
    cursor = engine.cursor(stream, run.segment, run.first, run.end, keeps_schema=True)
    while (batch := cursor.next_batch()) is not None:
        yield from_batch(batch, stream)


def from_batch(batch: Batch, stream: StreamRef) -> Fetched:
    """A batch of a stream's reader as it is."""
    return Fetched(batch.segment, list(range(batch.first, batch.end)), upgrade(batch.columns(), stream.schema), batch.append_times())
