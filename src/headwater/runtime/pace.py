"""Background work that leaves room for writers: it rests while they write, and runs at full speed when they don't."""

from __future__ import annotations

import time
from collections.abc import Callable

#: A writer that stored something this long ago is still writing.
_BUSY_SECONDS = 0.05
#: The rest after a step, as a share of its time.
_REST = 0.5
_FREEING_REST = 2.0
_GIVEN_SECONDS = 50e-6


class Pace:
    """Knows when events were stored last, as far as it was told. `note` is called for every flush, so it costs one assignment."""

    def __init__(self) -> None:
        self._stored_at = float("-inf")

    def note(self) -> None:
        """Note that events are being stored."""
        self._stored_at = time.monotonic()

    def is_busy(self) -> bool:
        """Whether somebody writes now."""
        return time.monotonic() - self._stored_at < _BUSY_SECONDS

    def give_way(self) -> None:
        """Let the others have the interpreter if somebody writes. A short sleep, since a lock that is only given back is taken at once."""
        if self.is_busy():
            time.sleep(_GIVEN_SECONDS)

    def begin(self) -> Callable[[], None]:
        """Begin work of this thread. The returned call is made between two steps of it.

        While somebody writes, it sleeps for half of the processor's time that the step took. A wait for the disk is a rest by itself.
        """
        return self._begin(time.thread_time, _REST)

    def begin_freeing(self) -> Callable[[], None]:
        """The same for steps that keep the disk busy: twice their time is left to others."""
        return self._begin(time.monotonic, _FREEING_REST)

    def _begin(self, clock: Callable[[], float], share: float) -> Callable[[], None]:
        before = clock()

        def rest() -> None:
            nonlocal before
            if self.is_busy():
                time.sleep((clock() - before) * share)
            before = clock()

        return rest
