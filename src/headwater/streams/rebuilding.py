"""Rebuilding the index of a journal: the slices of `rebuilds`, one after the other, with the events that the journal's readers see.

Killed anywhere, the rebuild goes on with its next slice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

from headwater.catalog import rebuilds, streams
from headwater.catalog.rebuilds import Build, Moved
from headwater.model.limits import REBUILD_ROWS
from headwater.runtime import failpoints
from headwater.segments.batches import Columns
from headwater.segments.engine import Engine
from headwater.segments.lanes import StreamRef
from headwater.streams import cuts, reading
from headwater.streams.cuts import Range

_COLUMNS = ["id", "sequence", "type", "tags"]


def rebuild(engine: Engine, session: int, build: Build, may_go_on: Callable[[], bool]) -> bool:
    """Go on with a rebuild; True if the index is whole. ConditionFailedError if another rebuild was begun meanwhile."""
    ref = engine.stream_ref(engine.run(streams.get_stream, build.stream))
    stream, number = build.stream, build.number
    step = build.step
    while step == "aside" and may_go_on():
        step = "scan" if engine.run(rebuilds.set_aside, session, stream, number) else step
        failpoints.reach("rebuild.sliced")
    if step == "scan":
        for events, numbers in _slices(engine, ref, build.numbers):
            if not may_go_on():
                return False
            engine.run(rebuilds.add_events, session, stream, number, events, numbers)
            failpoints.reach("rebuild.sliced")
        engine.run(rebuilds.end_scan, session, stream, number)
        step = "merge"
    while step == "merge" and may_go_on():
        if engine.run(rebuilds.merge, session, stream, number):
            return True
        failpoints.reach("rebuild.sliced")
    return False


def _slices(engine: Engine, stream: StreamRef, done: dict[int, int]) -> Iterator[tuple[list[Moved], dict[int, int]]]:
    """The events that are not indexed yet in slices of REBUILD_ROWS, with the next number of each segment that a slice has events of."""
    ranges = [
        Range(item.segment, max(item.start, done.get(item.segment.number, 0)), item.end) for item in cuts.ranges(engine, stream, None, None)
    ]
    events: list[Moved] = []
    numbers: dict[int, int] = {}
    count = 0
    for batch in reading.read_batches(engine, stream, [item for item in ranges if item.start < item.end], _COLUMNS):
        rows = batch.to_arrow(Columns(_COLUMNS))
        for start in range(0, batch.count, REBUILD_ROWS):
            part = rows.slice(start, REBUILD_ROWS)
            events += _moved(batch.segment, batch.first + start, zip(*(column.to_pylist() for column in part.columns), strict=True))
            numbers[batch.segment] = batch.first + start + part.num_rows
            count += part.num_rows
            if count >= REBUILD_ROWS:
                yield events, numbers
                events, numbers, count = [], {}, 0
    if events:
        yield events, numbers


def _moved(segment: int, first: int, rows: Any) -> Iterator[Moved]:
    """Events with numbers from `first` on, those of one entity that follow each other as one."""
    placed = [(id, sequence - place, place, sequence, type, tags) for place, (id, sequence, type, tags) in enumerate(rows)]
    for (id, _), group in groupby(placed, key=lambda row: row[:2]):
        mine = list(group)
        types: dict[str, tuple[int, int]] = {}
        tags: dict[str, list[int]] = {}
        for place, (_, _, _, _, type, words) in enumerate(mine):
            types[type] = place, types.get(type, (0, 0))[1] + 1
            for word in words:
                tags.setdefault(word, []).append(place)
        by_type = tuple([(type, *found) for type, found in types.items()])
        yield Moved(segment, first + mine[0][2], id, mine[0][3], len(mine), by_type, tuple([(tag, tuple(at)) for tag, at in tags.items()]))
