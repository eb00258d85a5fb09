"""Shared state: revisioned streams, whose appends may be conditional, and synchronizers, which keep state in one."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import pyarrow as pa

from headwater.catalog.conditions import TailIs
from headwater.catalog.parts import Append
from headwater.catalog.segments import SegmentRow
from headwater.errors import ConditionFailedError, InvalidRequestError, TruncatedError
from headwater.model.arguments import MOST, check_callable, shown
from headwater.model.limits import EVENT_BYTES
from headwater.model.schemas import OPAQUE
from headwater.segments.block import Chunk
from headwater.segments.encoding import encode
from headwater.segments.engine import Engine
from headwater.segments.flush import Flusher
from headwater.segments.lanes import StreamRef
from headwater.segments.read import SegmentCursor
from headwater.streams import cuts, reading, truncation

S = TypeVar("S")
U = TypeVar("U")
#: What tells that a value has no JSON text: its type, NaN or a number without end, itself within it, or too much within each other.
_NO_JSON = (TypeError, ValueError, RecursionError)


class Revision(int):
    """A place in a revisioned stream: how many values lie before it. `Revision.START` is before the first."""

    START: Revision

    def __repr__(self) -> str:
        return f"Revision({int(self)})"


Revision.START = Revision(0)


class Revisioned:
    """A stream of values in which an append can be made to depend on nobody having appended before."""

    def __init__(self, engine: Engine, flusher: Flusher, ref: StreamRef) -> None:
        self._engine = engine
        self._flusher = flusher
        self._ref = ref

    def __repr__(self) -> str:
        return f"<Revisioned {self._ref.name}>"

    @property
    def name(self) -> str:
        return self._ref.name

    @property
    def latest(self) -> Revision:
        """The revision behind the last value; `Revision.START` if there is none."""
        return Revision(self._look().tail)

    def _look(self) -> SegmentRow:
        # What an append that raised OutcomeUnknownError came to must be seen: it may not land behind a look that did not show it.
        self._flusher.settle(self._ref.id)
        return reading.get_single_segment(self._engine, self._ref)

    def append(self, value: bytes | str, expected: int | None = None) -> Revision:
        """Append a value, durably; returns the revision behind it.

        With `expected`, ConditionFailedError if the stream has moved past that revision. After a lost answer it is found out what
        happened, so a retry never appends twice. OutcomeUnknownError if that takes too long: `latest` and `read` wait for it, and then
        tell; until they can, they raise UnavailableError.
        """
        return self._append(value, expected)[0]

    def _append(self, value: bytes | str, expected: int | None) -> tuple[Revision, int]:
        """(The revision behind a new value, when it was appended)."""
        data = _checked(value)
        if expected is not None:
            _check_revision(expected, "expected")
        self._flusher.settle(self._ref.id)
        terms = () if expected is None else (TailIs(self._ref.id, 0, expected),)
        placement = self._flusher.append(self._ref, _chunk([data]), len(data), terms)
        return Revision(placement.firsts[0] + 1), placement.appended_at

    def read(self, after: int | None = None) -> Iterator[tuple[Revision, bytes]]:
        """(revision, value) of every value behind `after`, to now. TruncatedError if some were truncated."""
        return self._begin_reading(after)[2]

    def _begin_reading(self, after: int | None = None) -> tuple[SegmentRow, int, Iterator[tuple[Revision, bytes]]]:
        """The segment as it is now, the revision that `read` begins behind, and what it gives."""
        if after is not None:
            _check_revision(after, "after")
        row = self._look()
        start = int(after) if after is not None else row.head
        if start < row.head:
            raise TruncatedError(f"what lies behind revision {start} of {self.name} was truncated", cuts.head(self._engine, self._ref))
        if start > row.tail:
            raise InvalidRequestError(f"{self.name} is at revision {row.tail}; there is no revision {start}")
        return row, start, self._values(self._engine.cursor(self._ref, row.number, start, row.tail))

    def _values(self, cursor: SegmentCursor) -> Iterator[tuple[Revision, bytes]]:
        while (batch := reading.next_batch(self._engine, self._ref, cursor)) is not None:
            for index, event in enumerate(batch.events()):
                yield Revision(batch.first + index + 1), event.value

    def truncate(self, revision: int) -> None:
        """Make the values before a revision unreadable."""
        _check_revision(revision, "what a revisioned stream is truncated at")
        row = self._look()
        cut = cuts.single(self._engine, self._ref, {row.number: int(revision)})
        truncation.truncate(self._engine, self._ref, cut)


class _WentBack(Exception):
    """What was read before is not there any more: the catalog forgot its last commits."""


class Synchronizer(Generic[S, U]):
    """State shared by many processes: each applies the same updates in the same order.

    `apply(state, update)` returns the next state and has no side effects; state and updates are JSON values. Thread-safe.
    """

    def __init__(self, log: Revisioned, initial: S, apply: Callable[[S, U], S]) -> None:
        self._log = log
        self._initial = _json_copy(initial, "the initial state")
        self._apply = apply
        self._lock = threading.RLock()
        self._state: S = _json_copy(initial, "the initial state")
        self._revision = Revision.START
        #: The value that lies before that revision, and when it was appended, if that is known and it was the last.
        self._last = b""
        self._last_at: int | None = None

    def __repr__(self) -> str:
        return f"<Synchronizer {self._log.name} at {int(self._revision)}>"

    @property
    def name(self) -> str:
        return self._log.name

    @property
    def state(self) -> S:
        """The state as of the last `fetch` or `update` of this process. A copy, the caller's own."""
        return _copied(self._state)

    @property
    def revision(self) -> Revision:
        """Up to where the state was fetched."""
        return self._revision

    def fetch(self) -> S:
        """Apply what others appended since; returns the state. TruncatedError if the stream was truncated by other means than `compact`."""
        with self._lock:
            self._fetch()
            return _copied(self._state)

    def _fetch(self) -> None:
        state, revision = self._state, self._revision
        while True:
            try:
                found = self._replay(state, revision)
            except (TruncatedError, _WentBack):
                # Others compacted: what is left begins with the whole state. Ours stays until that is read.
                state, revision = _json_copy(self._initial, "the initial state"), Revision.START
                continue
            if found is None:
                raise TruncatedError(f"the history of {self.name} was truncated, and not by compact(): its state can't be known")
            self._state, self._revision, self._last, self._last_at = found
            return

    def _begin_replay(self, revision: Revision) -> tuple[SegmentRow, int, Iterator[tuple[Revision, bytes]]]:
        """What to read behind a revision that is known, once it was seen that what lies before it is what was read there."""
        try:
            row, start, values = self._log._begin_reading(revision - 1)
        except TruncatedError:
            return self._log._begin_reading(revision)
        except InvalidRequestError:
            raise _WentBack from None
        if row.tail == revision and row.appended_at == self._last_at:
            return row, start, iter(())
        if next(values, (None, None))[1] != self._last:
            raise _WentBack
        return row, start, values

    def _replay(self, state: S, revision: Revision) -> tuple[S, Revision, bytes, int | None] | None:
        """The state with what was appended behind a revision, and the last value; None if what would tell it is gone."""
        is_ours = False
        row, start, values = self._begin_replay(revision) if revision else self._log._begin_reading()
        is_whole = revision > 0 or start == 0
        value = self._last
        for found, value in values:
            revision = found
            record = self._record(value)
            is_whole = is_whole or "state" in record
            if not is_whole:
                break
            if "state" in record:
                state, is_ours = record["state"], True
                continue
            if not is_ours:
                state, is_ours = _copied(state), True
            for update in record["updates"]:
                state = self._apply(state, update)
        return (state, revision, value, row.appended_at if row.tail == revision else None) if is_whole else None

    def _record(self, value: bytes) -> dict[str, Any]:
        try:
            record = json.loads(value)
            if isinstance(record, dict) and ("state" in record or isinstance(record.get("updates"), list)):
                return record
        except ValueError:
            pass
        raise InvalidRequestError(f"{self.name} holds a value that no synchronizer wrote: {value[:80]!r}")

    def update(self, decide: Callable[[S], Sequence[U]]) -> S:
        """Append the updates that `decide(state)` returns, if the state is still what it saw; else fetch and decide again.

        An empty list changes nothing. What `decide` raises is raised, and nothing changes: it is given a copy.
        """
        check_callable(decide, "what decides on an update")
        while True:
            with self._lock:
                self._fetch()
                value = _dumped(decide(_copied(self._state)))
                updates = json.loads(value)["updates"]
                if not updates:
                    return _copied(self._state)
                after = self._try(updates)
                try:
                    revision, appended_at = self._log._append(value, self._revision)
                except ConditionFailedError:
                    continue
                self._state, self._revision, self._last, self._last_at = after, revision, value, appended_at
                return _copied(after)

    def _try(self, updates: Sequence[U]) -> S:
        """The state with these updates. Tried here first: what can't be applied, or be stored afterwards, must not reach the others."""
        after: S = _copied(self._state)
        for update in updates:
            after = self._apply(after, update)
        if _json_copy(after, "the state") != after:
            raise InvalidRequestError("the state that `apply` returned is no JSON value: lists, not tuples; str as keys; no NaN")
        return after

    def compact(self) -> None:
        """Replace the history by the present state, so that those who join later need not read it all."""
        while True:
            with self._lock:
                self._fetch()
                at = self._revision
                try:
                    self._log.append(json.dumps({"state": self._state}).encode(), expected=at)
                except ConditionFailedError:
                    continue
                self._log.truncate(at)
                self._fetch()
                return

    def stage(self, store_id: str, updates: Sequence[U]) -> tuple[StreamRef, Append, TailIs]:
        """For a transaction of the same store: the block that holds these updates, and that it must land at the present revision."""
        with self._lock:
            if self._log._engine.store_id != store_id:
                raise InvalidRequestError(f"{self.name} is of another store than this transaction")
            data = _dumped(updates)
            self._try(json.loads(data)["updates"])
            block = encode([_chunk([data])], self._log._ref.schema_version, True)
            stream = self._log._ref.id
            return self._log._ref, block.inline(stream, 0), TailIs(stream, 0, int(self._revision))


def check_rules(initial: Any, apply: Any) -> None:
    """Refuse what no state can begin with or go on by, before there is a stream for it."""
    _json_copy(initial, "the initial state")
    check_callable(apply, "apply")


def _check_revision(value: Any, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST:
        raise InvalidRequestError(f"{what} is a Revision, not {shown(value)}")


def _dumped(updates: Any) -> bytes:
    if not isinstance(updates, list | tuple):
        raise InvalidRequestError(f"updates of shared state are given as a list, not {shown(updates)}")
    try:
        text = json.dumps({"updates": updates}, allow_nan=False)
    except _NO_JSON as error:
        raise InvalidRequestError(f"updates of shared state are JSON values: {error}") from error
    return _checked(text)


def _json_copy(value: Any, what: str) -> Any:
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except _NO_JSON as error:
        raise InvalidRequestError(f"{what} is a JSON value: {error}") from error


def _copied(state: S) -> S:
    """One's own copy of a state, which is a JSON value already."""
    return state if isinstance(state, str | int | float | bool | None) else json.loads(json.dumps(state))


def _checked(value: bytes | str) -> bytes:
    try:
        data = value.encode() if isinstance(value, str) else value
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"this value can't be stored as UTF-8: {error}") from error
    if not isinstance(data, bytes):
        raise InvalidRequestError(f"a value is bytes or str, not {type(value).__name__}")
    if len(data) > EVENT_BYTES:
        raise InvalidRequestError(f"this value has {len(data):,} bytes; it may have {EVENT_BYTES:,}")
    return data


def _chunk(values: list[bytes]) -> Chunk:
    return Chunk(pa.RecordBatch.from_arrays([pa.array(values, pa.binary())], schema=OPAQUE), None, None)


__all__ = ["Revision", "Revisioned", "Synchronizer", "check_rules"]
