"""A heart: one thread of a process that calls what must be called every few seconds, such as renewing a lease."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable

log = logging.getLogger(__name__)


class Heart:
    """Calls `beat` of each object every `interval` seconds, until it returns False or the object is gone. Begun when first needed."""

    def __init__(self) -> None:
        # Entered as a mutex: a Ctrl-C in a condition's `__enter__`, which is Python code, would leave it locked for ever.
        self._mutex = threading.RLock()
        self._condition = threading.Condition(self._mutex)
        self._due: list[tuple[float, float, weakref.WeakMethod[Callable[[], bool]]]] = []
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, beat: Callable[[], bool], interval: float) -> None:
        """`beat` is a method, called outside of any lock of the heart's. One that raises is called again: the others depend on it."""
        with self._mutex:
            self._due.append((time.monotonic() + interval, interval, weakref.WeakMethod(beat)))
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="headwater-heart", daemon=True)
                thread.start()
                self._thread = thread
            self._condition.notify()

    def _run(self) -> None:
        while True:
            with self._mutex:
                if self._closed:
                    return
                now = time.monotonic()
                ready = [item for item in self._due if item[0] <= now]
                self._due = [item for item in self._due if item[0] > now]
                if not ready:
                    wait = min((item[0] for item in self._due), default=now + 60) - now
                    self._condition.wait(wait)
                    continue
            for _, interval, reference in ready:
                beat = reference()
                if beat is not None and _goes_on(beat):
                    with self._mutex:
                        self._due.append((time.monotonic() + interval, interval, reference))
                del beat

    def close(self) -> None:
        with self._mutex:
            self._closed = True
            self._condition.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5)


def _goes_on(beat: Callable[[], bool]) -> bool:
    try:
        return beat()
    except Exception:
        log.exception("a beat failed; it is tried again")
        return True
