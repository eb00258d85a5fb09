"""Background work that leaves room for writers of its process: it rests while they write, and runs at full speed when they don't."""

from __future__ import annotations

import time
from collections.abc import Callable

#: A writer that stored something this long ago is still writing.
_BUSY_SECONDS = 0.05
#: Of the time of a step, the rest after it.
_REST = 0.5
_GIVEN_SECONDS = 50e-6


class Pace:
    """Knows when this process stored events last. `note` is called for every flush, so it costs one assignment."""

    def __init__(self) -> None:
        self._stored_at = float("-inf")

    def note(self) -> None:
        """Note that events are being stored."""
        self._stored_at = time.monotonic()

    @property
    def is_busy(self) -> bool:
        """Whether somebody in this process writes now."""
        return time.monotonic() - self._stored_at < _BUSY_SECONDS

    def give_way(self) -> None:
        """Let the others have the interpreter if somebody writes. A short sleep, since a lock that is only given back is taken at once."""
        if self.is_busy:
            time.sleep(_GIVEN_SECONDS)

    def begin(self, clock: Callable[[], float] = time.thread_time) -> Callable[[], None]:
        """Begin work of this thread. The returned call is made between two steps of it.

        While somebody writes, it sleeps for a part of the time that the step took by `clock`: by default the processor's, so that a step
        that waited for the disk is not made slower.
        """
        before = clock()

        def rest() -> None:
            nonlocal before
            if self.is_busy:
                time.sleep((clock() - before) * _REST)
            before = clock()

        return rest
