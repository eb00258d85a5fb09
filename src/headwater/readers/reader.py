"""One reader of a group: it reads the segments it was given, and commits how far it got.

It gives a segment up only at one of its own commits, and takes one over at the committed position; so with commits that follow the
processing every event is processed at least once, and with commits in a transaction exactly once.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

import pyarrow as pa

from headwater.catalog import groups, segments, streams
from headwater.catalog.groups import GroupRow
from headwater.catalog.positions import Moves, ReaderMove, dump_moves
from headwater.errors import (
    ConflictError,
    FencedError,
    HeadwaterError,
    InvalidRequestError,
    NotFoundError,
    OutcomeUnknownError,
    RolledBackError,
    TruncatedError,
    UnavailableError,
)
from headwater.model.arguments import check_flag, check_seconds, check_whole
from headwater.model.events import Event
from headwater.model.limits import READER_SECONDS
from headwater.readers import progress
from headwater.segments.batches import Batch, Columns
from headwater.segments.engine import Engine
from headwater.segments.lanes import StreamRef
from headwater.segments.read import SegmentCursor
from headwater.streams import cuts

P = ParamSpec("P")
T = TypeVar("T")
Key = tuple[int, int]
Positions = dict[Key, int]

_AUTO_COMMIT_SECONDS = 5.0
#: How often a reader looks whether there is news of its group: while it has events to read; while it waits for some, after a change
#: of the catalog; and while nothing changes.
_BUSY_LOOK_SECONDS = 0.5
_IDLE_LOOK_SECONDS = 0.1
_QUIET_LOOK_SECONDS = 1.0
_BATCH_METADATA = ("_key", "_time", "_stream", "_segment", "_number")


class _Held:
    """A segment that this reader holds: read up to `handed`, of which `settled` was handed out before the latest read."""

    def __init__(self, cursor: SegmentCursor, position: int) -> None:
        self.cursor = cursor
        self.committed = position
        self.handed = position
        self.settled = position
        #: Behind what was committed by this reader, or given to a transaction: what is handed out from here on is in neither.
        self.origin = position


class Reader:
    """Reads its share of a group's events, in order for each key. For one thread; open as many as you like."""

    def __init__(self, engine: Engine, group: GroupRow, refs: dict[int, StreamRef], id: str, auto: bool) -> None:
        self._engine = engine
        self._group = group
        self._refs = refs
        self._id = id
        self._auto = auto
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._held: dict[Key, _Held] = {}
        self._order: deque[Key] = deque()
        self._events: Iterator[Event] | None = None
        self._batch: tuple[Key, Batch, int] | None = None
        self._arrow: pa.RecordBatch | None = None
        self._unsettled: Key | None = None
        self._surplus = 0
        #: Where those of its segments end that do, as of the last look.
        self._ends: Positions = {}
        self._finished = False
        self._alone = False
        self._is_closed = True
        #: A `close` waits for a read that is under way: it ends, and no other begins.
        self._is_leaving = False
        #: It lives no more to the group, also if nobody closes it again.
        self._has_failed_to_leave = False
        self._error: HeadwaterError | None = None
        self._looked = 0.0
        self._looked_version = -1
        self._must_report = True
        #: Whether the caller got the RolledBackError that the next report would raise.
        self._is_told = False
        #: What the last `read` was told to wait, and its seconds.
        self._wait = (1.0, 1.0)
        self._generation, self._group_generation, self._checkpoint = engine.run(groups.join_group, group.id, id)
        self._auto_committed = self._seen = time.monotonic()
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<Reader {self._id} of {self._group.name}>"

    @property
    def id(self) -> str:
        return self._id

    # Reading.

    def read(self, timeout: float = 1.0) -> Event | None:
        """Return the next event, or None after `timeout` seconds without one; at once after the end of a bounded group.

        None does not mean that the group is at its tail: `at_tail` says that. The segments of a reader that died come after 10 s.
        A manual reader gets the events after a split or merge when all before it is committed: commit when there is none, at the latest.
        """
        # For each event, and nearly always the same: so it is checked once. Both at once, since another thread may read too.
        given, seconds = self._wait
        if timeout is not given:
            seconds = check_seconds(timeout, "timeout")
            self._wait = timeout, seconds
        return self._hand_over(self._read, seconds)

    @property
    def at_tail(self) -> bool:
        """Whether every segment of the group is read and committed to its tail, or to the end of a bounded group, by whichever reader.

        After a `read` that returned None an auto reader commits first.
        """
        self._check_open()
        with self._lock:
            if self._auto and self._batch is None and self._unsettled is None:
                self._commit_settled()
            return self._engine.run(progress.is_at_tail, self._group.id)

    def _hand_over(self, read: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What a read finds. After an error, a Ctrl-C too, none of it counts as handed out."""
        is_settled = False
        self._check_open()
        try:
            with self._lock:
                self._check_open()
                self._settle()
                is_settled = True
                self._begin_read()
                found = read(*args, **kwargs)
            return found
        except BaseException:
            if is_settled:
                self._step_back()
            raise

    def _read(self, timeout: float) -> Event | None:
        deadline: float | None = None
        while True:
            if self._batch is not None:
                key, batch, at = self._batch
                if self._events is None:
                    self._events = batch.events()
                    for _ in range(at):
                        next(self._events)
                event = next(self._events, None)
                if event is not None:
                    self._hand_out(key, batch, at + 1)
                    return event
                self._drop_batch()
            if deadline is None:
                deadline = time.monotonic() + timeout
            if not self._next_batch(deadline):
                return None

    def read_batch(self, max_events: int = 65536, timeout: float = 1.0) -> pa.RecordBatch | None:
        """The next events of one segment, up to `max_events`, with `_key, _time, _stream, _segment, _number`; None if there are none."""
        check_whole(max_events, "max_events", 1)
        return self._hand_over(self._read_batch, max_events, check_seconds(timeout, "timeout"))

    def _read_batch(self, max_events: int, timeout: float) -> pa.RecordBatch | None:
        deadline = time.monotonic() + timeout
        while self._batch is None or self._batch[2] >= self._batch[1].count:
            self._drop_batch()
            if not self._next_batch(deadline):
                return None
        key, batch, at = self._batch
        self._events = None
        if self._arrow is None:
            self._arrow = batch.to_arrow(Columns([*batch.schema.names, *_BATCH_METADATA]))
        end = min(batch.count, at + max_events)
        found = self._arrow.slice(at, end - at)
        self._hand_out(key, batch, end)
        return found

    def __iter__(self) -> Iterator[Event]:
        """Events as they come. Ends only with a bounded group, when all of it is committed, or waits for this reader's commit only.

        InvalidRequestError if what comes next is given only when this manual reader commits: commit, and iterate again.
        """
        while True:
            event = self.read(timeout=1.0)
            if event is not None:
                yield event
            elif self._finished or (not self._auto and self._is_at_end()):
                return
            elif not self._auto and self._waits_for_itself():
                message = f"the reader {self._id!r} handed out all that comes before a split, a merge or a seal, and gets what follows when"
                raise InvalidRequestError(f"{message} that is committed: commit, then go on")

    def _is_at_end(self) -> bool:
        """Whether all that is left of a bounded group is this reader's, and handed out."""
        return self._group.ends is not None and self._alone and all(held.cursor.is_done for held in self._held.values())

    def _waits_for_itself(self) -> bool:
        """Whether all that this reader holds is sealed and handed out, and not committed: waiting would be for ever."""
        is_handed_out = all(held.handed >= self._ends.get(key, 1 << 62) for key, held in self._held.items())
        return is_handed_out and any(held.cursor.end is None and held.handed > held.committed for held in self._held.values())

    def _hand_out(self, key: Key, batch: Batch, end: int) -> None:
        self._batch = (key, batch, end)
        self._held[key].handed = batch.first + end
        self._unsettled = key

    def _drop_batch(self) -> None:
        self._batch = self._events = self._arrow = None

    def _step_back(self) -> None:
        """After an error, a Ctrl-C too: what the read had in hand was not handed out, and comes again."""
        with self._lock:
            self._drop_batch()
            self._unsettled = None
            for held in self._held.values():
                held.handed = held.settled
                if held.cursor.number != held.settled:
                    held.cursor.go_back(held.settled)

    def _begin_read(self) -> None:
        """Commit and look at the group, if that is due."""
        now = time.monotonic()
        if self._auto and now - self._auto_committed > _AUTO_COMMIT_SECONDS:
            self._commit_settled()
        if self._must_report or now - self._looked > _BUSY_LOOK_SECONDS:
            self._look()

    def _settle(self) -> None:
        """What a call for more events says: those handed out before are the caller's to commit."""
        # One read hands out events of one segment.
        if self._unsettled is not None:
            held = self._held.get(self._unsettled)
            if held is not None:
                held.settled = held.handed
            self._unsettled = None

    def _next_batch(self, deadline: float) -> bool:
        """Find the next batch in one of the segments, waiting for it; False after the deadline, or when a bounded group is at its end."""
        while True:
            seen = self._engine.changes.version()
            for _ in range(len(self._order)):
                key = self._order[0]
                self._order.rotate(-1)
                held = self._held.get(key)
                if held is None:
                    self._order.pop()  # A Ctrl-C came while it was taken or released.
                    continue
                try:
                    batch = None if held.cursor.is_done else held.cursor.next_batch()
                except TruncatedError as error:
                    raise self._truncated(key, error.message) from None
                if batch is not None:
                    # What was fetched with it goes next, while it is in the processor's cache.
                    if held.cursor.is_ready:
                        self._order.rotate(1)
                    self._batch = (key, batch, 0)
                    return True
            if self._look_at_end(seen):
                continue
            left = deadline - time.monotonic()
            if self._finished or left <= 0 or self._is_leaving:
                return False
            pause = _QUIET_LOOK_SECONDS if seen == self._looked_version else _IDLE_LOOK_SECONDS
            self._engine.wait_for_more([held.cursor for held in self._held.values()], seen, min(left, pause))

    def _look_at_end(self, version: int) -> bool:
        """With nothing left to read: commit if that lets successors in (auto), and look for other segments; whether there are new ones."""
        quiet = time.monotonic() - self._looked
        due = _QUIET_LOOK_SECONDS if version == self._looked_version else _IDLE_LOOK_SECONDS
        if not self._must_report and quiet < due:
            return False
        self._looked_version = version
        before = set(self._held)
        self._look()
        return bool(set(self._held) - before)

    def _truncated(self, key: Key, message: str) -> TruncatedError:
        return TruncatedError(f"{message}; reset the group to go on", cuts.head(self._engine, self._refs[key[0]]))

    # The group.

    def beat(self) -> bool:
        """Called by the store's heart: says that this reader lives, also while its caller works on an event."""
        if self._is_closed or self._has_failed_to_leave or self._error is not None or self._engine.is_closed:
            return False
        try:
            self._engine.run(groups.touch_reader, self._group.id, self._id, self._generation)
        except (UnavailableError, OutcomeUnknownError):
            return True
        except HeadwaterError as error:
            self._error = error
            return False
        self._seen = time.monotonic()
        return True

    def _look(self) -> None:
        """Report if there is news of the group, committing before what others wait for. A look is a read, a report a write under a lock."""
        if not self._must_report and time.monotonic() - self._seen < READER_SECONDS / 2:
            self._looked = time.monotonic()
            known = (self._group_generation, self._checkpoint, self._surplus)
            held = {key: held.cursor.number for key, held in self._held.items()}
            news = self._engine.run(groups.look, self._group.id, self._id, self._generation, known, held)
            for key in news.gone:
                # Going on quietly would skip events. Looked at again by the next read, which raises this again.
                self._looked = 0.0
                raise self._truncated(key, f"some of segment {key[1]} of {self._refs[key[0]].name} was truncated before it was read")
            self._ends, self._alone = news.ends, news.alone
            if not self._commit_at_ends() and not news.is_there:
                return
        self._report()

    def _commit_at_ends(self) -> bool:
        """Commit (auto) if some segment is read to its end, so that its successors, or the end of a bounded group, wait for that."""
        if self._auto and any(number >= self._ends.get(key, 1 << 62) for key, number in self._moved().items()):
            self._commit_settled()
            return True
        return False

    def _report(self) -> None:
        try:
            turn = self._engine.run(groups.report, self._group.id, self._id, self._generation)
        except (FencedError, NotFoundError) as error:
            self._error = error
            raise
        self._looked = self._seen = time.monotonic()
        self._must_report = False
        if turn.generation != self._group_generation:
            known, self._group_generation = self._group_generation, turn.generation
            handed = {key: held.handed for key, held in self._held.items() if held.handed > held.committed}
            self._drop()
            if not self._is_told:
                undone = self._engine.run(groups.explain_reset, self._group.id, known, handed)
                if undone is not None:
                    raise undone
            self._is_told = False
        self._surplus = turn.surplus
        self._finished = turn.finished
        self._alone = turn.alone
        mine = {(item.stream, item.segment): item for item in turn.mine}
        for key in [key for key in self._held if key not in mine]:
            self._release(key)
        for key, item in mine.items():
            if key in self._held:
                # It may have been committed by a transaction that another process ended.
                self._advance(key, item.position)
        self._take({key: item.position for key, item in mine.items() if key not in self._held})
        if turn.checkpoint > self._checkpoint:
            positions = {key: held.settled for key, held in self._held.items()}
            try:
                self._engine.run(groups.answer_checkpoint, self._group.id, self._id, self._generation, turn.checkpoint, positions)
            except ConflictError:
                self._drop()  # The catalog forgot events that were handed out. The next report answers, from the durable positions.
                return
            self._checkpoint = turn.checkpoint
        if self._surplus:
            self._give_up()

    def _give_up(self) -> None:
        """Leave segments to others: those where all that was handed out is committed, by an auto reader with this."""
        moved = self._moved() if self._auto else {}
        given = [key for key, held in self._held.items() if held.handed == moved.get(key, held.committed)][-self._surplus :]
        if given:
            with suppress(ConflictError):
                self._store_positions(moved, given)

    def _take(self, positions: Positions) -> None:
        """Hold these segments, each from its position on."""
        for stream in {stream for stream, _ in positions} - self._refs.keys():
            # It took the name of another one that the group read.
            self._refs[stream] = self._engine.stream_ref(self._engine.run(streams.get_stream, stream))
        numbers: dict[int, list[int]] = {}
        for stream, segment in positions:
            numbers.setdefault(stream, []).append(segment)
        for stream, some in numbers.items():
            rows = {row.number: row for row in self._engine.run(segments.list_segments_numbered, stream, some)}
            ends = (self._group.ends or {}).get(stream, {})
            for segment in some:
                key, row = (stream, segment), rows.get(segment)
                if row is None or row.dropped or positions[key] < row.head:
                    self._must_report = True
                    group = self._engine.run(groups.find_group, self._group.name)
                    if group is None or group.generation != self._group_generation:
                        return  # It was rolled back, or reset, after the report that gave this segment. The next report says so.
                    raise self._truncated(key, f"segment {segment} of {self._refs[stream].name} was truncated")
                cursor = self._engine.cursor(self._refs[stream], segment, positions[key], ends.get(segment))
                held = _Held(cursor, positions[key])
                self._order.append(key)
                self._held[key] = held

    def _advance(self, key: Key, position: int) -> None:
        """Note what is durable by now. If that is more than was handed out since this segment was taken, it is taken again from there.

        Unless something was handed out already: that is committed by another, and a transaction that it was given to must fail.
        """
        held = self._held[key]
        held.committed = max(held.committed, position)
        if held.origin == held.handed < held.committed:
            self._release(key)
            self._must_report = True

    def _release(self, key: Key) -> None:
        del self._held[key]
        with suppress(ValueError):
            self._order.remove(key)
        if self._batch is not None and self._batch[0] == key:
            self._drop_batch()

    def _drop(self) -> None:
        """Forget all that was read and not committed; the next report gives it again."""
        self._must_report = True
        order: deque[Key] = deque()
        # No call in this line: a Ctrl-C must not leave one of them.
        self._held, self._order, self._batch, self._events, self._arrow = {}, order, None, None, None

    # Positions.

    def commit(self) -> None:
        """Make durable that everything handed out so far is done with."""
        with self._lock:
            self._check_open()
            self._settle()
            self._store_positions(self._moved(), list(self._held)[-self._surplus :] if self._surplus else [])

    def _moved(self) -> Positions:
        """The positions that are not durable yet. The others are not sent: a segment that ended may be nobody's by now."""
        return {key: held.settled for key, held in self._held.items() if held.settled > held.committed}

    def _commit_settled(self) -> None:
        self._auto_committed = time.monotonic()
        moved = self._moved()
        if moved:
            # If the group was reset, what was read is no longer this reader's to commit, and nobody asked for it: it goes on from there.
            with suppress(ConflictError):
                self._store_positions(moved, [])

    def _store_positions(self, positions: Positions, given: list[Key]) -> None:
        """Make positions durable and give segments up, of which all that was handed out is committed by then."""
        place = self._group.id, self._id, self._generation, self._group_generation
        try:
            self._engine.run(groups.commit_positions, *place, positions, given)
        except (FencedError, NotFoundError) as error:
            self._error = error
            raise
        except (ConflictError, RolledBackError) as error:
            self._is_told = isinstance(error, RolledBackError)
            self._drop()
            raise
        self._seen = time.monotonic()
        for key, number in positions.items():
            self._held[key].origin = max(self._held[key].origin, number)
        self._mark_committed(positions)
        for key in given:
            self._release(key)
        self._surplus = max(0, self._surplus - len(given))

    def _mark_committed(self, positions: Positions) -> None:
        for key, number in positions.items():
            if key in self._held:
                self._advance(key, number)
        # A segment that ended with this has successors now, and others may wait for one of these.
        self._looked = 0.0
        self._must_report = self._must_report or self._surplus > 0

    def rewind(self) -> None:
        """Go back to the last durable positions: what was handed out since comes again."""
        with self._lock:
            if not self._is_closed:
                self._drop()

    def stage_positions(self, store_id: str, earlier: Moves) -> tuple[ReaderMove, Moves]:
        """For a transaction of the same store: from where to where it moves this reader as of now. `earlier` is what it was given before.

        It begins where the transaction before it ends, if events were handed out since, and is committed behind that one only. Else it is
        one for the same events, and only one of the two is committed. Events that were committed by another since they were handed out
        make it fail.
        """
        with self._lock:
            self._check_open()
            if self._engine.store_id != store_id:
                raise InvalidRequestError(f"the reader {self._id!r} is of another store than this transaction")
            if self._auto:
                raise InvalidRequestError("a transaction takes a manual reader: open it with commit='manual'")
            self._settle()
            moves: Moves = {}
            for key, held in self._held.items():
                number = held.settled
                if number > min(held.origin, held.committed):
                    since = held.origin if held.origin < number else held.committed
                    moves[key] = (earlier[key][0] if key in earlier else since, number)
                    held.origin = number
            data = dump_moves(moves)
            return ReaderMove(self._group.id, self._id, self._generation, self._group_generation, data), moves

    def positions_committed(self, moves: Moves) -> None:
        """A transaction committed the staged positions."""
        with self._lock:
            self._mark_committed({key: number for key, (_, number) in moves.items()})

    # The end.

    def _check_open(self) -> None:
        if self._error is not None:
            raise self._error.again()
        if self._is_closed or self._is_leaving:
            raise InvalidRequestError("this reader is closed")

    def close(self, *, commit: bool = True) -> None:
        """Leave the group. An auto reader commits what it handed out; with `commit` false, or by an exception, it does not.

        Closing again does nothing. UnavailableError if it can't leave now: it reads no more, and closing it again tries again. Without that
        it is taken for dead after 10 s.
        """
        check_flag(commit, "commit")
        self._is_leaving = True
        self._engine.changes.bump()
        with self._lock:
            # A store that was closed has told what its readers could not do.
            if self._is_closed or self._engine.is_closed:
                return
            try:
                if self._error is None:
                    self._leave(commit and self._auto)
                self._is_closed = True
            except (FencedError, NotFoundError, RolledBackError):
                self._is_closed = True  # Another reader has its seat, or the seat is gone; a rolled-back reader has left.
                raise
            finally:
                self._has_failed_to_leave = not self._is_closed
                if self._is_closed:
                    self._drop()

    def _leave(self, commit: bool) -> None:
        undone = None
        if commit:
            self._settle()
            try:
                self._commit_settled()
            except RolledBackError as error:
                undone = error
        # What is not committed by now never is: a close that is repeated does not know that there was an exception.
        self._drop()
        self._engine.run(groups.leave_group, self._group.id, self._id, self._generation)
        if undone is not None:
            raise undone

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if self._process != os.getpid():
            return  # A child that was forked in the block: the reader is the parent's, who reads on.
        if error is None:
            self.close()
            return
        try:
            self.close(commit=False)
        except HeadwaterError as second:
            error.add_note(f"leaving the reader group failed too: {second}")

    def __del__(self) -> None:
        # A close that failed said so.
        if not getattr(self, "_is_closed", True) and not self._is_leaving and self._error is None:
            warnings.warn(
                f"a reader of group {self._group.name} was abandoned: close it, or use it in a with block", ResourceWarning, stacklevel=2
            )
