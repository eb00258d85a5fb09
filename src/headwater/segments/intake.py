"""The intake: counts the buffered events of all lanes of a process, and is where its threads wait for each other.

Lanes report their events here. Threads wait here for acks and for room. The flusher's thread takes the lanes that have events.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from headwater.errors import HeadwaterError, InvalidRequestError, UnavailableError
from headwater.model.limits import BUFFERED_BYTES

if TYPE_CHECKING:
    from headwater.segments.lanes import Lane, Run

#: The flusher's thread expects a thread of the crowd within this time after the one before. A woken thread needs it for its turn at the
#: interpreter's lock.
_CROWD_SECONDS = 0.0003


class Intake:
    """Counts what waits, and knows which lanes have something to store. Its `mutex` guards these, and the flusher's own state.

    `start` makes sure that a thread stores. `is_storing` says whether a flush is under way.
    """

    def __init__(self, start: Callable[[], None], is_storing: Callable[[], bool]) -> None:
        self._start = start
        self._is_storing = is_storing
        self.begin()

    def begin(self) -> None:
        """Begin empty, as in a forked child."""
        # Entered as a mutex, and not as a condition, whose `__enter__` is Python code: a Ctrl-C in there would leave it locked forever.
        self.mutex = threading.RLock()
        #: The flusher's thread waits for `work`; threads that wait for room wait for `news`.
        self.work = threading.Condition(self.mutex)
        self.news = threading.Condition(self.mutex)
        #: The threads that wait for a run, each at a locked lock of its own, its gate. A flush opens the gates of the runs that it ended:
        #: it wakes no other thread, and a woken thread does not need the mutex to continue.
        self._gates: dict[threading.Lock, Run] = {}
        #: How many threads waited for runs when the last flush ended.
        self._crowd = 0
        #: The flusher's thread waits until the crowd waits again.
        self._is_gathering = False
        #: The lanes that have something, the next one first.
        self.active: dict[Lane, None] = {}
        self.buffered_bytes = 0
        #: Nothing new is taken.
        self.is_closed = False
        #: The thread looks for itself whether there is something to do, so nobody wakes it.
        self.is_looking = False
        #: A close of the store raised that the buffered events, all of them, can't be stored now.
        self.is_told = False
        #: A thread began to wait after the last failure: the flusher's thread retries at once.
        self.is_hurried = False
        self._failures = 0
        self._failure: UnavailableError | None = None

    # What lanes and writers call.

    def activate(self, lane: Lane) -> None:
        """Note that a lane has something to store."""
        with self.mutex:
            if self.is_closed:
                raise InvalidRequestError("the store is closed")
            self.active[lane] = None
            self.is_told = False
            self._start()
            if not self.is_looking:
                self.work.notify()

    def account(self, size: int) -> None:
        """Count a closed run against the process's limit."""
        with self.mutex:
            self.buffered_bytes += size
            if self._is_storing():
                self.work.notify()  # It may be enough for another flush.

    def wait_for_room(self) -> None:
        """Block while this process has as many events waiting as it may. UnavailableError if they can't be stored now."""
        if self.buffered_bytes < BUFFERED_BYTES:
            return
        with self.mutex:
            failures = self._failures
            while self.buffered_bytes >= BUFFERED_BYTES:
                if self._failures > failures:
                    self._raise_failure()
                self.news.wait(1.0)

    def wait_for_end(self, run: Run, timeout: float | None) -> None:
        """Return when a run ended. UnavailableError if an attempt fails meanwhile, TimeoutError after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        gate = threading.Lock()
        gate.acquire()
        with self.mutex:
            failures = self._failures
            self.is_hurried = True
            self._gates[gate] = run
            if not self._is_gathering or len(self._gates) >= self._crowd:
                self.work.notify()
        try:
            # The gate is there before the run is looked at, so the end of the run is seen here or opens the gate.
            while not run.ended:
                if self._failures > failures:
                    self._raise_failure()
                left = -1 if deadline is None else deadline - time.monotonic()
                if deadline is not None and left <= 0:
                    raise TimeoutError("the events are not durable yet; they stay buffered and will be stored")
                gate.acquire(timeout=min(left, threading.TIMEOUT_MAX))
        finally:
            self._gates.pop(gate, None)

    @property
    def has_waiters(self) -> bool:
        """Whether a thread waits for a run."""
        return bool(self._gates)

    def _raise_failure(self) -> NoReturn:
        assert self._failure is not None
        copy: HeadwaterError = type(self._failure)(self._failure.message, **self._failure.facts)
        copy.__cause__ = self._failure.__cause__
        raise copy

    # What the flusher calls.

    def take_active(self) -> list[Lane]:
        """Take the lanes that have something to store, the oldest first. Give back those that are not emptied with `put_first`."""
        with self.mutex:
            lanes = list(self.active)
            self.active.clear()
        return lanes

    @property
    def is_crowded(self) -> bool:
        """Whether several threads waited for runs when the last flush ended: they share a commit by the flusher's thread."""
        return self._crowd > 1

    def wait_for_crowd(self) -> None:
        """Wait until the threads that waited when the last flush ended have given their next events, or until no more of them come.

        One commit for all of them is faster than two. A thread that waits alone never waits here.
        """
        if not self.is_crowded or not self._gates:
            return
        with self.mutex:
            self._is_gathering = self.is_looking = True
            came = 0
            while came < len(self._gates) < self._crowd:
                came = len(self._gates)
                self.work.wait(_CROWD_SECONDS)
            self._is_gathering = self.is_looking = False

    def put_first(self, lanes: Iterable[Lane]) -> None:
        """Note lanes that have something to store, before all others."""
        with self.mutex:
            self.active = {**dict.fromkeys(lanes), **self.active}

    def release(self, runs: Iterable[Run], *, waiters: int = 0) -> None:
        """Stop counting runs that ended, and wake the threads that wait for them. `waiters` more wait for them in another way."""
        with self.mutex:
            for run in runs:
                # Once, even if a Ctrl-C comes: there is no call in these two lines.
                self.buffered_bytes -= run.size
                run.size = 0
            self.news.notify_all()
            self._crowd = len(self._gates) + waiters
        self._open_gates(lambda run: run.ended)

    def note_failure(self, error: UnavailableError) -> None:
        """Raise a failed attempt's error in all threads that wait."""
        with self.mutex:
            self._failure = error
            self._failures += 1
            self.is_hurried = False
            self.news.notify_all()
        self._open_gates(lambda run: True)

    def _open_gates(self, is_due: Callable[[Run], bool]) -> None:
        for gate, run in list(self._gates.items()):
            if is_due(run):
                with suppress(RuntimeError):  # Another thread opened it just now.
                    gate.release()
                self._gates.pop(gate, None)
