"""Hearing of other processes' commits to SQLite: Linux tells when the WAL is written to, which is sooner and cheaper than polling."""

from __future__ import annotations

import ctypes
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

_MODIFY = 0x2
#: Frames are written first, synced, and then the commit is there to be seen: look until it is, or this is over.
_COMMIT_SECONDS = 0.02
_LOOK_SECONDS = 0.0002
#: The file may be made anew while no connection is open, as during a fork.
_CHECK_SECONDS = 0.5


class WalWatch:
    """A thread that calls `look` after each write to a file, until it returns True, and now and then; what it raises ends the thread.

    OSError if this system can't watch files.
    """

    def __init__(self, path: str, look: Callable[[], bool]) -> None:
        if not sys.platform.startswith("linux"):
            raise OSError("only Linux has inotify")
        self._path = path
        self._look = look
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._inotify = _checked(self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        try:
            self._file = self._watch()
            self._closing = os.eventfd(0, os.EFD_CLOEXEC)
        except OSError:
            os.close(self._inotify)
            raise
        self._is_open = True
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="headwater-watch", daemon=True)
        self._thread.start()

    def _watch(self) -> int:
        """Watch what is at the path now; returns its inode."""
        found = os.stat(self._path).st_ino
        _checked(self._libc.inotify_add_watch(self._inotify, os.fsencode(self._path), _MODIFY))
        return found

    @property
    def is_alive(self) -> bool:
        return self._is_open and self._process == os.getpid()

    def _run(self) -> None:
        files = select.poll()
        files.register(self._inotify, select.POLLIN)
        files.register(self._closing, select.POLLIN)
        try:
            while True:
                ready = [file for file, _ in files.poll(_CHECK_SECONDS * 1000)]
                if self._closing in ready:
                    return
                if not ready:
                    self._look()
                    if os.stat(self._path).st_ino != self._file:
                        self._file = self._watch()
                    continue
                os.read(self._inotify, 65536)
                deadline = time.monotonic() + _COMMIT_SECONDS
                while not self._look() and time.monotonic() < deadline:
                    time.sleep(_LOOK_SECONDS)
        except Exception:
            return  # Those who wait see that it ended, and poll.
        finally:
            self._is_open = False
            os.close(self._inotify)
            os.close(self._closing)

    def close(self) -> None:
        if self.is_alive:
            with suppress(OSError):  # It ended by itself just now.
                os.eventfd_write(self._closing, 1)
            self._thread.join(timeout=5)

    def forget(self) -> None:
        """In a forked child, which has no such thread: let go of its files."""
        if self._is_open:
            self._is_open = False
            os.close(self._inotify)
            os.close(self._closing)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
