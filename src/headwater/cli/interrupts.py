"""Ctrl-C ends a command at once and not by an exception.

An exception that is raised between any two instructions leaves locks held for ever (seen: a follower that never ended). Nothing needs to be
undone either: a store survives a kill. Only `write` ends in order, at the places it chooses.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SHOW_CURSOR = b"\x1b[?25h"


class Interrupts:
    """What Ctrl-C does in this process, while `handled`."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._code: int | None = 1
        self._pending = False
        self._may_raise = False

    @contextmanager
    def handled(self, message: str) -> Iterator[None]:
        """End with 1 and a message, unless the command asks for something else. A process started to ignore Ctrl-C still does."""
        if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            yield
            return
        line = f"{message}\n".encode()

        def handle(number: int, frame: FrameType | None) -> None:
            if self._code is None and not self._pending:
                self._pending = True
                if self._may_raise:
                    raise KeyboardInterrupt
                return
            # A progress bar hides the cursor.
            os.write(2, (_SHOW_CURSOR if os.isatty(2) else b"") + (line if self._code != 0 else b""))
            os._exit(1 if self._code is None else self._code)

        self._begin()
        before = signal.signal(signal.SIGINT, handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def end_well(self) -> None:
        """From here on Ctrl-C is how one leaves: no error, no message."""
        self._code = 0

    def wait_for_place(self) -> None:
        """From here on Ctrl-C is a KeyboardInterrupt in the next `place`; a second one ends at once."""
        self._code = None

    @contextmanager
    def place(self) -> Iterator[None]:
        """Where an exception does no harm."""
        self._may_raise = True
        try:
            if self._pending:
                raise KeyboardInterrupt
            yield
        finally:
            self._may_raise = False


interrupts = Interrupts()
