"""Writing events: one at a time or as Arrow batches, buffered, stored by the process's flusher."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from time import monotonic
from typing import Any
from uuid import uuid4

from headwater.batch import SegmentRange
from headwater.catalog import streams, watermarks
from headwater.errors import HeadwaterError, InvalidRequestError, UnavailableError
from headwater.frames import counted_bytes, frame_chunk, to_batch
from headwater.lanewriter import LaneWriter
from headwater.model.arguments import MOST, check_seconds, check_time, check_whole
from headwater.model.keys import key_bytes
from headwater.model.limits import BATCH_BYTES, EVENT_BYTES, NOTE_SECONDS
from headwater.model.positions import Position
from headwater.model.rows import RowCheck, row_size
from headwater.runtime import clock
from headwater.segments.block import Chunk
from headwater.segments.flush import Flusher
from headwater.segments.lanes import EVENT_OVERHEAD_BYTES, RUN_BYTES, SMALL_BYTES, Lane, Run, StreamRef

#: The times that a datetime can have.
_FIRST_TIME = clock.from_datetime(datetime.min.replace(tzinfo=UTC))
_LAST_TIME = clock.from_datetime(datetime.max.replace(tzinfo=UTC))
#: Events are put into a run without a lock (see headwater.segments.lanes), which needs the interpreter's.
_HAS_GIL = getattr(sys, "_is_gil_enabled", lambda: True)()


class Ack:
    """The promise of a write. `result` waits until it is durable and readable."""

    __slots__ = ("_index", "_run")

    #: What it waits for; None if there is nothing to wait for.
    _run: Run | None
    #: Which event of the run; None for a duplicate.
    _index: int | None

    @property
    def duplicate(self) -> bool:
        """Whether a named writer had been given this number before: nothing was stored again."""
        return self._index is None or (self._run is not None and self._index < self._run.skipped)

    @property
    def done(self) -> bool:
        """Whether `result` would return, or raise, at once."""
        return self._run is None or self._run.ended

    def result(self, timeout: float | None = None) -> Any:
        """A `Position`; for a batch a list of `SegmentRange`; for a duplicate None.

        Raises what went wrong. After UnavailableError or TimeoutError the event is still buffered: ask again.
        """
        if timeout is not None:
            timeout = check_seconds(timeout, "timeout")
        run = self._run
        if run is not None:
            if not run.ended:
                run.lane.wait_for(run, timeout)
            if run.error is not None:
                raise run.error.again()
        return None if self._index is None or self.duplicate else self._place(run, self._index)

    def _place(self, run: Run | None, index: int) -> Any:
        assert run is not None and run.placement is not None
        return run.placement.position(run.offset + index)

    def __repr__(self) -> str:
        return f"<Ack {'done' if self.done else 'pending'}{', duplicate' if self.duplicate else ''}>"


class _BatchAck(Ack):
    """The ack of a batch: its runs' ranges."""

    __slots__ = ("_ranges",)

    _ranges: Callable[[], list[SegmentRange]]

    def _place(self, run: Run | None, index: int) -> Any:
        return self._ranges()


def _ack(run: Run | None, index: int | None) -> Ack:
    ack = Ack()
    ack._run, ack._index = run, index
    return ack


def _batch_ack(run: Run | None, ranges: Callable[[], list[SegmentRange]]) -> Ack:
    """The ack of a batch whose last run this is."""
    ack = _BatchAck()
    ack._run, ack._index, ack._ranges = run, 0, ranges
    return ack


class EventCheck:
    """Checks an event as it is given, so that nothing is refused later, and makes it ours."""

    def __init__(self, stream: StreamRef) -> None:
        self._check = None if stream.is_opaque else RowCheck(stream.schema)

    def __call__(self, value: Any, key: bytes | str | int | None, time: datetime | None) -> tuple[Any, bytes | None, int]:
        """(the value, the key as bytes, the size of both) of an event that can be stored; else InvalidRequestError."""
        if self._check is not None:
            # What is buffered is ours: the caller may fill the same mapping anew for the next event.
            value = self._check(value)
            size = sum(map(row_size, value.values()))
        else:
            if type(value) is not bytes:
                value = _opaque_bytes(value)
            size = len(value)
        if size > EVENT_BYTES:
            raise InvalidRequestError(f"this event has {size:,} bytes; an event may have {EVENT_BYTES:,}")
        if time is not None:
            _check_stored_time(time, "an event's time")
        routing_key = key_bytes(key)
        return value, routing_key, size + len(routing_key or b"")


class Writer(LaneWriter):
    """Appends events to one stream, in order for each routing key.

    `write` returns at once; its ack, or `flush`, says when the events are durable. A full buffer blocks: nothing is dropped.
    """

    def __init__(self, store: Any, flusher: Flusher, stream: StreamRef, lane: Lane) -> None:
        super().__init__(flusher, stream, lane)
        self._store = store
        self._named = lane.writer is not None
        self._noted_us: int | None = None
        self._noted_at = float("-inf")
        self._note_name = lane.writer or uuid4().hex
        #: The lane whose open run takes small events of bytes as they are: the own one of an anonymous, open writer of opaque events.
        self._plain_lane = lane if stream.is_opaque and lane.writer is None and _HAS_GIL else None
        self._check = EventCheck(stream)

    @property
    def id(self) -> str | None:
        return self._lane.writer

    @property
    def last_number(self) -> int:
        """The last source number stored, 0 if none. Only a named writer has one."""
        if not self._named:
            raise InvalidRequestError("only a named writer has numbers: open it with stream.writer(id)")
        return self._lane.stored_number

    def write(
        self,
        value: bytes | str | Mapping[str, Any],
        key: bytes | str | int | None = None,
        *,
        time: datetime | None = None,
        number: int | None = None,
    ) -> Ack:
        """Give an event to be stored. Returns at once, unless this process has as much waiting as it may.

        An event that can't be stored (its type, its size) is refused here, and nothing else is touched.
        """
        # The hot path, for bytes in an open run: nothing here but what each event needs.
        if (
            type(value) is bytes
            and len(value) <= SMALL_BYTES
            and (key is None or (type(key) is bytes and len(key) <= SMALL_BYTES))
            and time is None
            and number is None
        ):
            lane = self._plain_lane
            run = lane.run if lane is not None else None
            if run is not None:
                # As in `Run.put`, without the call.
                for index in run.places:
                    run.keys[index] = key
                    run.values[index] = value
                    ack = Ack()
                    ack._run = run
                    ack._index = index
                    return ack
        try:
            checked = self._check(value, key, time)
        except InvalidRequestError as error:
            raise self._explained(error) from error.__cause__
        return self._write_slowly(*checked, time, number)

    def _explained(self, error: InvalidRequestError) -> InvalidRequestError:
        """The same; with what to do if the schema that an event does not fit is no longer the stream's."""
        with suppress(HeadwaterError):
            if not self._stream.is_opaque:
                row = self._store._engine.run(streams.get_stream, self._stream.id)
                if row.schema_version != self._stream.schema_version:
                    now = "the stream's schema was changed since this writer was opened: open another one"
                    return InvalidRequestError(f"{error.message}; {now}", **error.facts)
        return error

    def _write_slowly(self, value: Any, key: bytes | None, size: int, time: datetime | None, number: int | None) -> Ack:
        if number is not None and not self._named:
            raise InvalidRequestError("only a named writer takes numbers: open it with stream.writer(id)")
        self._flusher.wait_for_room()
        lane = self._lane
        with lane.lock:
            self._check_open()
            number = self._next_number(number)
            if number is not None and number <= lane.given_number:
                return _ack(lane.last_run, None)
            run, index = lane.put(value, key, time, number)
            run.size += 2 * size + EVENT_OVERHEAD_BYTES
            if run.size >= RUN_BYTES:
                lane.close_run()
            return _ack(run, index)

    def _next_number(self, number: int | None) -> int | None:
        if not self._named:
            return None
        if number is None:
            return self._lane.given_number + 1
        return check_whole(number, "a source number", 1, MOST)

    def write_batch(self, frame: Any, key: str | None = None, *, number: int | None = None, missing: str | None = None) -> Ack:
        """Write the rows of a frame: a pyarrow, pandas, Polars, DuckDB or nanoarrow object, or any other that exports Arrow data.

        Match columns by name, and cast them if no value changes. A missing column is an error; with `missing="null"`, a nullable one is
        filled with nulls. `key` names the column with the routing keys; a column `_time` is event time. Up to 64 MiB are stored whole or
        not at all. A named writer's batch has one number as a whole.
        """
        self._check_open()
        if number is not None and not self._named:
            raise InvalidRequestError("only a named writer takes numbers: open it with stream.writer(id)")
        try:
            chunk = frame_chunk(to_batch(frame), key, self._stream, missing)
        except InvalidRequestError as error:
            raise self._explained(error) from error.__cause__
        total = int(chunk.columns.nbytes)
        size = total + (chunk.keys.nbytes if chunk.keys is not None else 0) + 8 * chunk.count
        if chunk.count == 0:
            return _batch_ack(None, list) if number is None else self._write_empty(number)
        # By its data: `size` counts what it takes in memory and in the catalog besides.
        if (data := counted_bytes(chunk, total)) > BATCH_BYTES:
            if self._named:
                limit = f"a named writer stores a batch whole, up to {BATCH_BYTES:,}: give it in smaller ones"
                raise InvalidRequestError(f"this batch has {data:,} bytes; {limit}")
            return self._write_pieces(chunk, size)
        self._flusher.wait_for_room()
        lane = self._lane
        with lane.lock:
            self._check_open()
            given = self._next_number(number)
            if given is not None and given <= lane.given_number:
                return _ack(lane.last_run, None)
            run = lane.add_chunk(chunk, size, given)
        return _batch_ack(run, lambda: self._ranges([run]))

    def _write_empty(self, number: int) -> Ack:
        raise InvalidRequestError(f"the batch with number {number} has no rows: there is nothing to store")

    def _write_pieces(self, chunk: Chunk, size: int) -> Ack:
        """A batch too large to be stored whole, as pieces in order; the ack is for all of them."""
        rows = max(1, chunk.count * (BATCH_BYTES // 2) // size)
        runs: list[Run] = []
        for start in range(0, chunk.count, rows):
            piece = chunk.slice(start, min(start + rows, chunk.count))
            self._flusher.wait_for_room()
            with self._lane.lock:
                self._check_open()
                runs.append(self._lane.add_chunk(piece, size * piece.count // chunk.count))
        return _batch_ack(runs[-1], lambda: self._ranges(runs))

    def _ranges(self, runs: list[Run]) -> list[SegmentRange]:
        found: list[tuple[int, int, int]] = []
        for run in runs:
            if run.error is not None:
                raise run.error.again()
            assert run.placement is not None
            found += run.placement.ranges(run.offset, run.offset + run.count)
        return [SegmentRange(self._store, self._stream.name, segment, start, end, self._stream.id) for segment, start, end in found]

    def note_time(self, time: datetime) -> None:
        """Promise that no later event of this writer is older than `time`, for `group.time_window()`.

        It is stored once the events before it are durable, at most once a second, and when the writer is closed.
        """
        _check_stored_time(time, "the time to note")
        if self._is_closed:
            raise InvalidRequestError("this writer is closed")
        noted_us = clock.from_datetime(time)
        if self._noted_us is None or noted_us > self._noted_us:
            self._noted_us = noted_us
        if monotonic() - self._noted_at >= NOTE_SECONDS:
            self._store_note()

    def _store_note(self) -> None:
        assert self._noted_us is not None
        self._noted_at = monotonic()
        self.flush()
        engine = self._store._engine
        engine.run(watermarks.note_time, self._stream.id, self._note_name, self._noted_us)

    def close(self) -> None:
        """Flush, then end. Closing again does nothing."""
        if not self._is_closed:
            if self._noted_us is not None:
                told = self._told
                try:
                    self._store_note()
                    self._store._engine.run(watermarks.forget_writer, self._stream.id, self._note_name)
                except UnavailableError:
                    raise
                except HeadwaterError:
                    # Sealed, gone or fenced: it needs no note. Whether its events were stored, the flush below tells, once.
                    self._told = told
            self._plain_lane = None
            super().close()
            if self._named:
                self._flusher.forget(self._lane)

    def abandon(self) -> None:
        self._plain_lane = None
        super().abandon()


def _check_stored_time(time: Any, what: str) -> None:
    check_time(time, what)
    # Only at the ends can its zone take it to where no datetime is: a reader could not get it.
    if not 1 < time.year < 9999 and not _FIRST_TIME <= clock.from_datetime(time) <= _LAST_TIME:
        raise InvalidRequestError(f"{what} lies in the years 1 to 9999 of UTC, which {time!r} does not")


def _opaque_bytes(value: Any) -> bytes:
    if isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(f"this text can't be stored as UTF-8: {error}") from error
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise InvalidRequestError(f"an event of a stream without a schema is bytes or str, not {type(value).__name__}")


__all__ = ["Ack", "EventCheck", "Position", "Writer"]
