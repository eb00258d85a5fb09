"""Lanes: the events of one writer on their way to a flush, in order, in runs that end together.

A run is what acks point at: events that are given one by one stay in Python lists until they are encoded, in the order of their segments.

Threads put events into an open run without a lock: `for index in run.places` takes a place, and the lines after it fill it. Python
changes threads, and handles signals, only at calls and jumps, of which there is none in between; and closing a run takes all the
places that are left in one call. So an event is in the run that was closed, or finds no place and goes to the next one.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections import deque
from datetime import datetime
from itertools import groupby
from time import sleep
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from headwater.errors import HeadwaterError
from headwater.model.limits import KIB, MIB
from headwater.model.positions import Position
from headwater.model.schemas import OPAQUE, TIME
from headwater.segments.block import Chunk

if TYPE_CHECKING:
    from collections.abc import Callable

    from headwater.catalog.parts import Term
    from headwater.segments.intake import Intake

#: An open run is closed at one of these, so that counting against the process's limit is done per run and not per event.
RUN_BYTES = 1 * MIB
RUN_EVENTS = 8192
#: The places of a run after one that was not full: making and closing it costs little.
_FEW_EVENTS = 64
#: An event that is put into a run without a look at the run's size.
SMALL_BYTES = 1024
#: What an event counts for beside its bytes, which count twice where it is given alone: what is freed event by event is used again, but not
#: all of it, and what is made of it is there besides.
EVENT_OVERHEAD_BYTES = 96
_JOINED_BYTES = 128 * KIB


class StreamRef(NamedTuple):
    """What a lane must know of its stream."""

    id: int
    name: str
    kind: str
    schema: pa.Schema
    schema_version: int
    is_opaque: bool


class Few(NamedTuple):
    """A few events that were checked, with their keys: too few to make columns of them."""

    values: list[Any]
    keys: list[bytes | None]


class Placement:
    """Where the events of a committed part are: position by index, worked out when asked for."""

    __slots__ = ("answer", "appended_at", "firsts", "segments", "which")

    def __init__(self, segments: tuple[int, ...], firsts: tuple[int, ...], which: Any, appended_at: int = 0, answer: Any = None) -> None:
        self.appended_at = appended_at
        #: Of a run with terms: what the commit answered to them, if that is known.
        self.answer = answer
        self.segments = segments
        self.firsts = firsts
        #: For each event the index of its segment, as an array or, for a few events, as bytes; None if all went to one segment.
        self.which = which

    def position(self, index: int) -> Position:
        if self.which is None:
            return Position(self.segments[0], self.firsts[0] + index)
        place = int(self.which[index])
        return Position(self.segments[place], self.firsts[place] + self._count(place, 0, index))

    def _count(self, place: int, start: int, end: int) -> int:
        if isinstance(self.which, bytes):
            return self.which.count(place, start, end)
        return int(np.count_nonzero(self.which[start:end] == place))

    def ranges(self, start: int, end: int) -> list[tuple[int, int, int]]:
        """(segment, first number, end number) of the events [start, end) of the part."""
        if self.which is None:
            return [(self.segments[0], self.firsts[0] + start, self.firsts[0] + end)]
        found = []
        for place, segment in enumerate(self.segments):
            before = self._count(place, 0, start)
            count = self._count(place, start, end)
            if count:
                found.append((segment, self.firsts[place] + before, self.firsts[place] + before + count))
        return found


class Run:
    """Events of one lane that become durable together. Ended when `placement` or `error` is set."""

    __slots__ = (
        "chunk",
        "count",
        "error",
        "keys",
        "lane",
        "last_number",
        "numbers",
        "offset",
        "placement",
        "places",
        "process",
        "size",
        "skipped",
        "times",
        "unused",
        "values",
    )

    def __init__(self, lane: Lane, room: int) -> None:
        self.lane = lane
        self.process = os.getpid()
        #: Of an open run: the places that are not taken yet.
        self.places = iter(range(room))
        self.unused: list[int] = []
        self.values: list[Any] = [None] * room
        self.keys: list[bytes | None] = [None] * room
        self.times: dict[int, datetime] = {}
        #: Of a named writer's events: the number of each.
        self.numbers: list[int] = [0] * room if lane.writer is not None else []
        #: Events at the front that were found to be stored already: their acks are of duplicates, and they are not here any more.
        self.skipped = 0
        self.chunk: Chunk | None = None
        self.count = 0
        #: What it is counted as against the process's limit.
        self.size = 0
        self.last_number = 0
        self.offset = 0
        self.placement: Placement | None = None
        self.error: HeadwaterError | None = None

    @property
    def ended(self) -> bool:
        return self.placement is not None or self.error is not None

    def put(self, value: Any, key: bytes | None, time: datetime | None, number: int | None) -> int | None:
        """Add an event; returns its index, or None if there is no place left."""
        for index in self.places:
            # No call in here: a Ctrl-C must not leave an event without its number, which would be stored again when it is repeated.
            self.keys[index] = key
            self.values[index] = value
            if time is not None:
                self.times[index] = time
            if number is not None:
                self.numbers[index] = self.last_number = self.lane.given_number = number
            return index
        return None

    def close(self) -> None:
        """Take no more events. The caller holds the lane's lock."""
        # No call in this line, and the others may be repeated: a Ctrl-C may end any of them.
        self.unused = [*self.unused, *self.places]
        if self.chunk is not None:
            return
        if self.unused:
            del self.values[self.unused[0] :], self.keys[self.unused[0] :], self.numbers[self.unused[0] :]
        self.count = len(self.values)
        if self.lane.stream.kind == "bytes" and self.values:
            # As objects, pieces of a few bytes would take many times as much.
            self.values, self.keys = [b"".join(self.values)], []
        if self.lane.stream.kind == "events" and self.lane.stream.is_opaque:
            size = self._measure()
            self.size = 2 * size + EVENT_OVERHEAD_BYTES * self.count

    def _measure(self) -> int:
        while True:
            try:
                # Values first: their keys are there when they are.
                return sum(map(len, self.values)) + sum(map(len, filter(None, self.keys)))
            except TypeError:
                sleep(0.001)  # None: a debugger, say, stopped a thread between taking its place and filling it.

    def skip(self, number: int) -> None:
        """Leave out a closed run's events up to a number, since they are stored already; ends the run if none is left."""
        if self.last_number <= number:
            self.skipped += self.count
            self.end(Placement((), (), None), None)
        elif self.chunk is None:
            gone = bisect_right(self.numbers, number)
            self.values, self.keys, self.numbers = self.values[gone:], self.keys[gone:], self.numbers[gone:]
            self.times = {index - gone: time for index, time in self.times.items() if index >= gone}
            self.skipped += gone
            self.count -= gone

    def end(self, placement: Placement | None, error: HeadwaterError | None) -> None:
        self.placement = placement
        self.error = error
        self.chunk = None
        # Who keeps an ack keeps no more than it says.
        self.values, self.keys, self.numbers, self.unused, self.times = [], [], [], [], {}


class Loose:
    """Events as they were given one by one, which become a chunk, or bytes, in the order that is asked for: that saves a copy."""

    def __init__(self, stream: StreamRef, values: list[Any], keys: list[bytes | None], times: dict[int, datetime]) -> None:
        self._stream = stream
        self._values = values
        self._array: Any = None
        self._lengths: Any = None
        self.count = len(values)
        self.keys = _key_array(keys)
        self.times = pa.array([times.get(index) for index in range(self.count)], TIME) if times else None

    def lengths(self) -> Any:
        if self._lengths is None:
            self._lengths = _lengths(self._values)
        return self._lengths

    def data(self, indices: pa.Array | None) -> pa.Buffer:
        if indices is None:
            return _joined(self._values, int(self.lengths().sum()))
        chosen = indices.to_numpy()
        return _joined(self._taken(chosen), int(self.lengths()[chosen].sum()))

    def _taken(self, indices: Any) -> list[Any]:
        if self._array is None:
            self._array = np.fromiter(self._values, dtype=object, count=self.count)
        return self._array[indices].tolist()  # type: ignore[no-any-return]

    def take(self, indices: Any) -> Chunk:
        chosen = pa.array(indices)
        return Chunk(
            _columns(self._stream, self._taken(indices)),
            self.keys.take(chosen) if self.keys is not None else None,
            self.times.take(chosen) if self.times is not None else None,
        )

    def whole(self) -> Chunk:
        return Chunk(_columns(self._stream, self._values), self.keys, self.times)


def given(runs: list[Run]) -> list[Chunk | Loose]:
    """What the runs were given, in order; events that were given one by one together, as far as no batch comes between."""
    found: list[Chunk | Loose] = []
    for is_loose, some in groupby(runs, key=lambda run: run.chunk is None):
        if not is_loose:
            found += [run.chunk for run in some if run.chunk is not None]
            continue
        values: list[Any] = []
        keys: list[bytes | None] = []
        times: dict[int, datetime] = {}
        for run in some:
            times.update({len(values) + index: time for index, time in run.times.items()})
            values += run.values
            keys += run.keys
        found.append(Loose(runs[0].lane.stream, values, keys, times))
    return found


def make_chunk(stream: StreamRef, values: list[Any], keys: list[bytes | None], times: dict[int, datetime]) -> Chunk:
    """Events that were checked one by one as a chunk."""
    return Loose(stream, values, keys, times).whole()


def _columns(stream: StreamRef, values: list[Any]) -> pa.RecordBatch:
    if stream.is_opaque:
        return pa.RecordBatch.from_arrays([_binary(values)], schema=OPAQUE)
    return pa.RecordBatch.from_pylist(values, schema=stream.schema)


def _key_array(keys: list[bytes | None]) -> pa.Array | None:
    missing = keys.count(None)
    if missing == len(keys):
        return None
    return pa.array(keys, pa.binary()) if missing else _binary(keys)


def _binary(values: list[Any]) -> pa.Array:
    # Joining and summing is three times as fast as pa.array over a list of bytes.
    offsets = np.zeros(len(values) + 1, dtype=np.int32)
    np.cumsum(_lengths(values), out=offsets[1:])
    return pa.Array.from_buffers(pa.binary(), len(values), [None, pa.py_buffer(offsets), _joined(values, int(offsets[-1]))])


def _lengths(values: list[Any]) -> Any:
    return np.fromiter(map(len, values), dtype=np.int32, count=len(values))


def _joined(values: list[Any], size: int) -> pa.Buffer:
    # In parts that the processor's cache holds, to memory of Arrow's: Python's own, of megabytes at a time, is new each time, and each
    # thread's allocator keeps some of it.
    found = pa.allocate_buffer(size)
    view = memoryview(found).cast("B")
    count = max(1, _JOINED_BYTES * len(values) // max(1, size))
    at = 0
    for start in range(0, len(values), count):
        part = b"".join(values[start : start + count])
        view[at : at + len(part)] = part
        at += len(part)
    return found


class Lane:
    """The events of one named writer, or all anonymous events of one stream, that a process has not stored yet."""

    def __init__(
        self,
        intake: Intake,
        wait_for: Callable[[Run, float | None], None],
        stream: StreamRef,
        writer: str | None,
        generation: int,
        last_number: int,
        terms: tuple[Term, ...] = (),
        when_refused: Callable[[], None] | None = None,
    ) -> None:
        self.intake = intake
        #: How those who have a run of it wait for its end.
        self.wait_for = wait_for
        self.stream = stream
        self.writer = writer
        self.generation = generation
        #: Of a lane of one run: what must hold for it to be committed, and what it changes beside its stream.
        self.terms = terms
        self.when_refused = when_refused
        #: Named writers: the last number stored, and the last one given.
        self.stored_number = last_number
        self.given_number = last_number
        self.error: HeadwaterError | None = None
        self.forget()

    def forget(self) -> None:
        """Begin empty, as in a forked child: what waits here is the parent's to store."""
        self.lock = threading.Lock()
        self.run: Run | None = None
        self.queue: deque[Run] = deque()
        self.last_run: Run | None = None
        self._room = _FEW_EVENTS

    def put(self, value: Any, key: bytes | None = None, time: datetime | None = None, number: int | None = None) -> tuple[Run, int]:
        """Add an event; returns its run and its index there. The caller holds the lane's lock."""
        run = self.run
        index = run.put(value, key, time, number) if run is not None else None
        if run is None or index is None:
            self.close_run()
            run = self._begin_run(self._room)
            index = run.put(value, key, time, number)
        assert index is not None
        return run, index

    def _begin_run(self, room: int) -> Run:
        if self.error is not None:
            raise self.error.again()
        # In this order: a Ctrl-C may come while this waits for the flusher, and a run that was never announced would wait for ever. The
        # flusher can't look too early, since the caller holds the lane's lock.
        self.intake.activate(self)
        run = self.run = self.last_run = Run(self, room)
        return run

    def close_run(self) -> None:
        """Close the open run, if there is one. The caller holds the lane's lock."""
        run = self.run
        if run is not None:
            run.close()
            self._room = RUN_EVENTS if run.count >= _FEW_EVENTS else _FEW_EVENTS
            if not run.count:
                # A Ctrl-C came before its first event.
                run.end(Placement((), (), None), None)
                self.run = None
                return
            # Queued before it is counted, and once, with no call in between: a Ctrl-C may come in any, and while `account` waits.
            self.run = None
            self.queue.append(run)
            self.intake.account(run.size)

    def add_chunk(self, chunk: Chunk, size: int, number: int | None = None) -> Run:
        """Add a whole batch as a run of its own. The caller holds the lane's lock."""
        self.close_run()
        run = self._begin_run(0)
        count = chunk.count
        # From here on without a call, as in `Run.put`.
        run.chunk, run.count, run.size = chunk, count, size
        if number is not None:
            run.last_number = self.given_number = number
        self.close_run()
        return run

    def add_few(self, events: Few, size: int) -> Run:
        """Add a few events as the only run of a lane that is used for nothing else. The caller holds the lane's lock."""
        run = self._begin_run(0)
        run.values, run.keys, run.size = events.values, events.keys, size
        self.close_run()
        return run

    def take(self, limit_bytes: int) -> list[Run]:
        """The oldest runs, up to a size; at least one if there is any."""
        taken: list[Run] = []
        size = 0
        with self.lock:
            self.close_run()
            while self.queue and (not taken or size + self.queue[0].size <= limit_bytes):
                taken.append(self.queue.popleft())
                size += taken[-1].size
        return taken

    def put_back(self, runs: list[Run]) -> None:
        """Give back runs that were taken, in their order, before anything newer."""
        with self.lock:
            self.queue.extendleft(reversed(runs))

    def fail(self, error: HeadwaterError, runs: list[Run]) -> list[Run]:
        """End the lane: these runs and all that wait carry the error. Returns them."""
        with self.lock:
            self.error = error
            self.close_run()
            failed = [*runs, *self.queue]
            self.queue.clear()
        for run in failed:
            run.end(None, error)
        return failed
