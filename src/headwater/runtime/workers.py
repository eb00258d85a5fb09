"""A few daemon threads for I/O. Unlike concurrent.futures they still work while the interpreter exits, when the last flush runs."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


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
    """Runs calls on up to `limit` threads, which are begun as they are needed."""

    def __init__(self, name: str, limit: int) -> None:
        self._name = name
        self._limit = limit
        self._queue: queue.SimpleQueue[Task[Any] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._closed = False

    def submit(self, call: Callable[[], T], when_done: Callable[[], None] | None = None) -> Task[T]:
        task = Task(call, when_done)
        with self._lock:
            if self._closed:
                raise RuntimeError("these workers are closed")
            if self._idle <= self._queue.qsize() and len(self._threads) < self._limit:
                thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                thread.start()
                self._threads.append(thread)
        self._queue.put(task)
        return task

    def _work(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
            task = self._queue.get()
            with self._lock:
                self._idle -= 1
            if task is None:
                self._queue.put(None)  # for the next one
                return
            task.run()
            # Or its result would be kept until the next one comes: eight threads had 60 MB of what was read last.
            del task

    def close(self) -> None:
        """Let running calls end, then the threads."""
        with self._lock:
            self._closed = True
            threads = list(self._threads)
        self._queue.put(None)
        for thread in threads:
            thread.join(timeout=10)
