"""One lock for all processes of a host, first come first served, with a deadline and the holder's name.

SQLite's own lock lets processes starve each other: 8 to 16 of them waited up to 2.1 s. Asking for a lock again and again leaves it unused
in between; so who finds it taken waits in the kernel's queue, in a thread, since that wait has no deadline.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from types import TracebackType

from headwater.errors import UnavailableError


class HostLock:
    """`flock` on a file, with a mutex in front, since flock does not separate threads that share a descriptor.

    Descriptors belong to one process: a forked child must call `forget`, or a killed parent's lock would live on in it.
    """

    def __init__(self, path: str, wait_seconds: float) -> None:
        self._path = path
        self._wait_seconds = wait_seconds
        self._begin()

    def _begin(self) -> None:
        # Of a kind that knows its owner: see `leave`.
        self._mutex = threading.RLock()
        self._descriptor: int | None = None
        self._queue: _Queue | None = None

    def forget(self) -> None:
        """Begin anew in a forked child. The parent's lock stays the parent's."""
        for descriptor in (self._descriptor, self._queue.descriptor if self._queue is not None else None):
            if descriptor is not None:
                os.close(descriptor)
        self._begin()

    def __enter__(self) -> None:
        deadline = time.monotonic() + self._wait_seconds
        try:
            # It is never taken twice: then a second Ctrl-C, while the first one was handled, has left it taken.
            self.leave()
            if not self._mutex.acquire(timeout=self._wait_seconds):
                raise self._late(f"another thread of this process ({os.getpid()})")
            self._lock(deadline)
        except BaseException:
            # It may have been taken already, when the disk was too full for our name or a Ctrl-C came.
            self.leave()
            raise

    @property
    def is_mine(self) -> bool:
        """Whether this thread has it."""
        return self._mutex._is_owned()  # type: ignore[attr-defined, no-any-return]

    def leave(self) -> None:
        """Give it back if this thread has it. For who got a Ctrl-C too, which may come at the very begin of `__exit__`."""
        if self.is_mine:
            self._unlock()
            self._mutex.release()

    def _lock(self, deadline: float) -> None:
        if self._descriptor is None:
            self._descriptor = _open(self._path)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if self._queue is None:
                self._queue = _Queue(_open(self._path))
            if not self._queue.take(deadline):
                raise self._late(f"process {self.holder()}") from None
        name = b"%-20d" % os.getpid()
        # Looking is cheaper than writing, and mostly one process takes it again and again.
        if os.pread(self._descriptor, len(name), 0) != name:
            os.pwrite(self._descriptor, name, 0)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.leave()

    def _unlock(self) -> None:
        if self._queue is not None:
            self._queue.leave()
        if self._descriptor is not None:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def holder(self) -> str:
        """The process that took the lock last."""
        assert self._descriptor is not None
        return os.pread(self._descriptor, 20, 0).decode().strip() or "unknown"

    def _late(self, holder: str) -> UnavailableError:
        return UnavailableError(
            f"the store's lock {self._path} is held by {holder} for over {self._wait_seconds:g} s: let it go on, or end it, then repeat"
        )

    def close(self) -> None:
        with self._mutex:
            if self._queue is not None:
                self._queue.close()
                self._queue = None
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None


class _Queue:
    """A place in the kernel's queue for the lock. Who no longer wants it when its turn comes gives it to the next.

    Its descriptor is its own, so that its lock is another one than that of who asks without waiting.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        # Entered as a mutex: a Ctrl-C inside a condition's own `__enter__`, which is Python code, would leave it locked for ever.
        self._mutex = threading.RLock()
        self._condition = threading.Condition(self._mutex)
        self._is_asked = False
        self._is_wanted = False
        self._is_had = False
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def take(self, deadline: float) -> bool:
        """Wait for the lock; False after the deadline. `leave` in any case."""
        with self._mutex:
            self._is_wanted = self._is_asked = True
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="headwater-lock", daemon=True)
                try:
                    thread.start()
                except RuntimeError:
                    return self._ask_again_and_again(deadline)
                self._thread = thread
            self._condition.notify_all()
            while not self._is_had:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._condition.wait(left)
            return True

    def _ask_again_and_again(self, deadline: float) -> bool:
        """While the interpreter exits there are no new threads, and what waits is still to be stored."""
        while not self._is_had:
            try:
                fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._is_had = True
            except BlockingIOError:
                if time.monotonic() > deadline:
                    self._is_asked = False
                    return False
                time.sleep(0.001)
        return True

    def leave(self) -> None:
        """Give the lock back, or the wish for it."""
        with self._mutex:
            self._is_wanted = False
            if self._is_had:
                self._is_had = self._is_asked = False
                fcntl.flock(self.descriptor, fcntl.LOCK_UN)

    def _run(self) -> None:
        while True:
            with self._mutex:
                while (not self._is_asked or self._is_had) and not self._is_closed:
                    self._condition.wait()
                if self._is_closed and not self._is_asked:
                    os.close(self.descriptor)
                    return
            fcntl.flock(self.descriptor, fcntl.LOCK_EX)
            with self._mutex:
                if self._is_wanted:
                    self._is_had = True
                    self._condition.notify_all()
                else:
                    self._is_asked = False
                    fcntl.flock(self.descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        with self._mutex:
            self._is_closed = True
            if self._thread is None:
                os.close(self.descriptor)
            self._condition.notify_all()


def _open(path: str) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
