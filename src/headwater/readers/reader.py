"""One reader of a group: it reads the segments it was given, and commits how far it got.

It gives a segment up only at one of its own commits, and takes one over at the committed position; so with commits that follow the
processing every event is processed at least once, and with commits in a transaction exactly once.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from headwater.catalog import groups, segments
from headwater.catalog.database import Tx
from headwater.catalog.groups import GroupRow
from headwater.catalog.transactions import Change
from headwater.errors import (
    ConflictError,
    FencedError,
    HeadwaterError,
    InvalidRequestError,
    NotFoundError,
    TruncatedError,
    UnavailableError,
)
from headwater.model.events import Event
from headwater.model.limits import READER_SECONDS
from headwater.segments.engine import Engine
from headwater.segments.lanes import StreamRef
from headwater.segments.read import Batch, SegmentCursor
from headwater.streams import cuts

Key = tuple[int, int]

_AUTO_COMMIT_SECONDS = 5.0
_REPORT_SECONDS = 1.0
_DEAD_AFTER_US = int(READER_SECONDS * 1_000_000)
_BATCH_METADATA = ("_key", "_time", "_stream", "_segment", "_number")


class _Held:
    """A segment that this reader holds: read up to `handed`, of which `settled` was handed out before the latest read."""

    def __init__(self, cursor: SegmentCursor, position: int) -> None:
        self.cursor = cursor
        self.committed = position
        self.handed = position
        self.settled = position


class Reader:
    """Reads its share of a group's events, in order for each key. For one thread; open as many as you like."""

    def __init__(self, engine: Engine, group: GroupRow, refs: dict[int, StreamRef], id: str, auto: bool) -> None:
        self._engine = engine
        self._group = group
        self._refs = refs
        self._id = id
        self._auto = auto
        self._lock = threading.RLock()
        self._held: dict[Key, _Held] = {}
        self._order: deque[Key] = deque()
        self._events: Iterator[Event] | None = None
        self._batch: tuple[Key, Batch, int] | None = None
        self._group_generation = group.generation
        self._checkpoint = group.checkpoint
        self._surplus = 0
        self._finished = False
        self._is_closed = False
        self._error: HeadwaterError | None = None
        self._reported = 0.0
        self._auto_committed = time.monotonic()
        self._generation = engine.write(groups.join_group, group.id, id)

    def __repr__(self) -> str:
        return f"<Reader {self._id} of {self._group.name}>"

    @property
    def id(self) -> str:
        return self._id

    # Reading.

    def read(self, timeout: float = 1.0) -> Event | None:
        """The next event, None if there is none within `timeout` seconds."""
        with self._lock:
            self._begin_read()
            deadline = time.monotonic() + timeout
            while True:
                if self._batch is not None:
                    key, batch, at = self._batch
                    if self._events is None:
                        self._events = batch.events()
                        for _ in range(at):
                            next(self._events)
                    event = next(self._events, None)
                    if event is not None:
                        self._batch = (key, batch, at + 1)
                        self._held[key].handed = batch.first + at + 1
                        return event
                    self._batch = self._events = None
                if not self._next_batch(deadline):
                    return None

    def read_batch(self, max_events: int = 65536, timeout: float = 1.0) -> pa.RecordBatch | None:
        """The next events of one segment, up to `max_events`, with `_key, _time, _stream, _segment, _number`; None if there are none."""
        if isinstance(max_events, bool) or not isinstance(max_events, int) or max_events < 1:
            raise InvalidRequestError(f"max_events is a whole number of at least 1, not {max_events!r}")
        with self._lock:
            self._begin_read()
            deadline = time.monotonic() + timeout
            while self._batch is None or self._batch[2] >= self._batch[1].count:
                self._batch = self._events = None
                if not self._next_batch(deadline):
                    return None
            key, batch, at = self._batch
            self._events = None
            end = min(batch.count, at + max_events)
            self._batch = (key, batch, end)
            self._held[key].handed = batch.first + end
            return batch.to_arrow([*batch.schema.names, *_BATCH_METADATA]).slice(at, end - at)

    def __iter__(self) -> Iterator[Event]:
        """Events as they come. Ends only with a bounded group, when all of it is committed."""
        while True:
            event = self.read(timeout=1.0)
            if event is not None:
                yield event
            elif self._auto and self._group.ends is not None:
                self._settle()
                self._commit_settled()
            if event is None and self._finished:
                return

    def _begin_read(self) -> None:
        """What a call for more events says: those handed out before are the caller's to commit."""
        self._check_open()
        self._settle()
        now = time.monotonic()
        if self._auto and now - self._auto_committed > _AUTO_COMMIT_SECONDS:
            self._commit_settled()
        if now - self._reported > _REPORT_SECONDS:
            self._report()

    def _settle(self) -> None:
        for held in self._held.values():
            held.settled = held.handed

    def _next_batch(self, deadline: float) -> bool:
        """Find the next batch in one of the segments, waiting for it; False after the deadline, or when a bounded group is at its end."""
        while True:
            seen = self._engine.changes.version()
            for _ in range(len(self._order)):
                key = self._order[0]
                self._order.rotate(-1)
                held = self._held[key]
                try:
                    batch = None if held.cursor.is_done else held.cursor.next_batch()
                except TruncatedError as error:
                    ref = self._refs[key[0]]
                    raise TruncatedError(f"{error.message}; reset the group to go on", cuts.head(self._engine, ref)) from None
                if batch is not None:
                    self._batch = (key, batch, 0)
                    return True
            if self._report_at_end():
                continue
            if self._finished or time.monotonic() >= deadline:
                return False
            self._engine.changes.wait(seen, min(deadline - time.monotonic(), 0.25))

    def _report_at_end(self) -> bool:
        """With nothing left to read: commit if that lets successors in (auto), and ask for other segments; whether there are new ones."""
        before = set(self._held)
        self._settle()
        if self._auto and any(held.settled > held.committed for held in self._held.values()) and self._is_worth_a_commit():
            self._commit_settled()
        if not self._held or time.monotonic() - self._reported > 0.1:
            self._report()
        return set(self._held) - before != set()

    def _is_worth_a_commit(self) -> bool:
        """Whether some segment is read to its end, so that its successors wait for the commit; or this reader holds too many."""
        if self._surplus:
            return True
        ended = self._engine.read(_ended_segments, list(self._held))
        return any(held.settled >= ended.get(key, 1 << 62) > held.committed for key, held in self._held.items()) or (
            self._group.ends is not None and any(held.cursor.is_done and held.settled > held.committed for held in self._held.values())
        )

    # The group.

    def beat(self) -> bool:
        """Called by the store's heart: says that this reader lives, also while its caller works on an event."""
        if self._is_closed or self._error is not None or self._engine.is_closed:
            return False
        try:
            self._engine.write(groups.touch_reader, self._group.id, self._id, self._generation)
        except UnavailableError:
            return True
        except HeadwaterError as error:
            self._error = error
            return False
        return True

    def _report(self) -> None:
        try:
            turn = self._engine.write(groups.report, self._group.id, self._id, self._generation, _DEAD_AFTER_US)
        except (FencedError, NotFoundError) as error:
            self._error = error
            raise
        self._reported = time.monotonic()
        if turn.generation != self._group_generation:
            self._group_generation = turn.generation
            self._drop()
        self._surplus = turn.surplus
        self._finished = turn.finished
        mine = {(item.stream, item.segment): item for item in turn.mine}
        for key in [key for key in self._held if key not in mine]:
            self._release(key)
        for key, item in mine.items():
            if key not in self._held:
                self._take(key, item.position)
        if turn.checkpoint > self._checkpoint:
            positions = {key: held.settled for key, held in self._held.items()}
            self._engine.write(groups.answer_checkpoint, self._group.id, self._id, self._generation, turn.checkpoint, positions)
            self._checkpoint = turn.checkpoint
        if self._surplus and self._auto:
            self._commit_settled()

    def _take(self, key: Key, position: int) -> None:
        stream, segment = key
        end = (self._group.ends or {}).get(stream, {}).get(segment)
        row = self._engine.read(segments.find_segment, stream, segment)
        if row is None or row.dropped:
            head = cuts.head(self._engine, self._refs[stream])
            raise TruncatedError(f"segment {segment} of {self._refs[stream].name} was truncated; reset the group to go on", head)
        self._held[key] = _Held(SegmentCursor(self._engine, self._refs[stream], row, position, end), position)
        self._order.append(key)

    def _release(self, key: Key) -> None:
        del self._held[key]
        self._order.remove(key)
        if self._batch is not None and self._batch[0] == key:
            self._batch = self._events = None

    def _drop(self) -> None:
        self._held.clear()
        self._order.clear()
        self._batch = self._events = None

    # Positions.

    def commit(self) -> None:
        """Make durable that everything handed out so far is done with."""
        with self._lock:
            self._check_open()
            self._settle()
            self._commit_settled(always=True)

    def _commit_settled(self, *, always: bool = False) -> None:
        positions = {key: held.settled for key, held in self._held.items()}
        changed = any(held.settled > held.committed for held in self._held.values())
        self._auto_committed = time.monotonic()
        if not changed and not always and not self._surplus:
            return
        try:
            given = self._engine.write(
                groups.commit_positions, self._group.id, self._id, self._generation, self._group_generation, positions, self._surplus
            )
        except FencedError as error:
            self._error = error
            raise
        except ConflictError:
            self._drop()
            self._reported = 0.0
            raise
        self._surplus = 0
        for held in self._held.values():
            held.committed = held.settled
        for key in given:
            self._release(key)
        self._reported = 0.0

    def rewind(self) -> None:
        """Go back to the last durable positions: what was handed out since comes again."""
        with self._lock:
            if not self._is_closed:
                self._drop()
                self._reported = 0.0

    def stage_positions(self) -> Change:
        """For a transaction: the positions as of now."""
        with self._lock:
            self._check_open()
            if self._auto:
                raise InvalidRequestError("a transaction takes a manual reader: open it with commit='manual'")
            self._settle()
            positions = {key: held.settled for key, held in self._held.items()}
            data = groups.dump_positions(self._group_generation, positions)
            return Change(0, 0, "reader", self._group.id, self._id, self._generation, data)

    def positions_committed(self) -> None:
        """A transaction committed the staged positions."""
        with self._lock:
            for held in self._held.values():
                held.committed = max(held.committed, held.settled)
            self._reported = 0.0

    # The end.

    def _check_open(self) -> None:
        if self._error is not None:
            raise self._error
        if self._is_closed:
            raise InvalidRequestError("this reader is closed")

    def close(self, *, commit: bool = True) -> None:
        """Leave the group. An auto reader commits what it handed out; with `commit` false, or by an exception, it does not."""
        with self._lock:
            if self._is_closed:
                return
            try:
                if self._error is None:
                    if commit and self._auto:
                        self._settle()
                        self._commit_settled()
                    self._engine.write(groups.leave_group, self._group.id, self._id, self._generation)
            finally:
                self._is_closed = True
                self._drop()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close(commit=False)
        except HeadwaterError as second:
            error.add_note(f"leaving the reader group failed too: {second}")

    def __del__(self) -> None:
        if not getattr(self, "_is_closed", True) and getattr(self, "_error", None) is None:
            warnings.warn(
                f"a reader of group {self._group.name} was abandoned: close it, or use it in a with block", ResourceWarning, stacklevel=2
            )


def _ended_segments(tx: Tx, keys: list[Key]) -> dict[Key, int]:
    """The tails of those segments that are sealed."""
    return {key: tail for key in keys if (tail := groups.find_sealed_tail(tx, *key)) is not None}
