"""A few daemon threads for I/O. Unlike concurrent.futures they still work while the interpreter exits, when the last flush runs."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_IDLE_SECONDS = 1.0


class Task(Generic[T]):
    """A call under way. `result` waits for it."""

    def __init__(self, call: Callable[[], T], when_done: Callable[[], None] | None) -> None:
        self._call = call
        self._when_done = when_done
        # Taken until it ended. A lock, and not an event, which a Ctrl-C in the one who waits could leave locked for the worker.
        self._running = threading.Lock()
        self._running.acquire()
        self._is_done = False
        self._value: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._value = self._call()
        except BaseException as error:
            self._error = error
        self._call = None  # type: ignore[assignment]
        self._is_done = True
        self._running.release()
        if self._when_done is not None:
            self._when_done()

    @property
    def done(self) -> bool:
        return self._is_done

    @property
    def failed(self) -> bool:
        return self._error is not None

    def wait(self) -> None:
        """Return when the call ended, however it did."""
        with self._running:
            pass

    def result(self) -> T:
        self.wait()
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[no-any-return]


class Later(Generic[T]):
    """A call that is made when its result is asked for."""

    def __init__(self, call: Callable[[], T]) -> None:
        self.result = call


class Workers:
    """Runs calls on up to `limit` threads, which are begun as they are needed.

    Of those that wait, the one that was busy last is called first: it has memory at hand, and the others give theirs back. `when_idle` is
    called on a thread that had nothing to do for a second.
    """

    def __init__(self, name: str, limit: int, when_idle: Callable[[], None] | None = None) -> None:
        self._name = name
        self._limit = limit
        self._when_idle = when_idle
        self._lock = threading.Lock()
        self._tasks: deque[Task[Any]] = deque()
        self._threads: list[threading.Thread] = []
        #: The bells of those that wait, the one that was busy last at the end.
        self._idle: list[queue.SimpleQueue[None]] = []
        self._closed = False

    def submit(self, call: Callable[[], T], when_done: Callable[[], None] | None = None) -> Task[T]:
        task = Task(call, when_done)
        is_ours = False
        with self._lock:
            if self._closed:
                raise RuntimeError("these workers are closed")
            self._tasks.append(task)
            if self._idle:
                # Rung before it is taken from the list: after a Ctrl-C in between it is rung once too often, and not never.
                self._idle[-1].put(None)
                self._idle.pop()
            elif len(self._threads) < self._limit:
                thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                try:
                    thread.start()
                    self._threads.append(thread)
                except RuntimeError:
                    # Python 3.12 begins no threads while it exits, and what waits is still to be stored.
                    is_ours = not self._threads
                    if is_ours:
                        self._tasks.remove(task)
        if is_ours:
            task.run()
        return task

    def _work(self) -> None:
        bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        while True:
            task = None
            with self._lock:
                if self._tasks:
                    task = self._tasks.popleft()
                elif self._closed:
                    return
                elif bell not in self._idle:
                    self._idle.append(bell)
            if task is None:
                self._wait(bell)
            else:
                task.run()

    def _wait(self, bell: queue.SimpleQueue[None]) -> None:
        try:
            bell.get(timeout=_IDLE_SECONDS if self._when_idle is not None else None)
        except queue.Empty:
            assert self._when_idle is not None
            self._when_idle()
            bell.get()

    def close(self) -> None:
        """Let running calls end, then the threads."""
        with self._lock:
            self._closed = True
            threads = list(self._threads)
            for bell in self._idle:
                bell.put(None)
        for thread in threads:
            thread.join(timeout=10)
