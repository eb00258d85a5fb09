"""An event that a Ctrl-C can't break."""

from __future__ import annotations

import threading


class Flag:
    """Like `threading.Event`, whose lock stays taken for ever if a Ctrl-C comes in the Python code that enters or leaves it."""

    def __init__(self) -> None:
        self._mutex = threading.RLock()
        self._condition = threading.Condition(self._mutex)
        self._is_set = False

    @property
    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        with self._mutex:
            self._is_set = True
            self._condition.notify_all()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it is set, by then."""
        with self._mutex:
            if not self._is_set:
                self._condition.wait(timeout)
            return self._is_set
