"""A session's journal: preallocated files that blocks are appended to, each durable before `append` returns.

Nothing is read back or repaired here: the catalog names the ranges that count, and a range without a row is garbage.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from headwater.errors import AlreadyExistsError
from headwater.model import limits
from headwater.runtime import failpoints
from headwater.runtime.workers import Task, Workers
from headwater.storage.files import Folder, explaining, preallocate, sync_data, write_all
from headwater.storage.interface import Buffer, Place, byte_views

_ALIGNMENT = 8
#: The next file is begun when this part of one is used: two flushes before it is needed.
_AHEAD = 4


@dataclass
class _File:
    key: str
    index: int
    path: str
    size: int
    #: Where the next append goes. Everything below is written, or being written by someone.
    used: int = 0
    #: Appends under way.
    appends: int = 0


class FileJournal:
    """Appends to files of a `Folder`. Threads reserve their place one after the other, then write and sync side by side."""

    def __init__(self, folder: Folder, key_for: Callable[[int], str], *, file_bytes: int = limits.JOURNAL_BYTES) -> None:
        self._folder = folder
        self._key_for = key_for
        self._file_bytes = file_bytes
        self._mutex = threading.Lock()
        self._file: _File | None = None
        #: The file to come, begun while this one fills: its name is synced behind whatever else the disk has to do.
        self._next: Task[_File] | None = None
        self._workers = Workers("headwater-journal", 1)
        self._next_index = 0
        self._first_index = 0
        self._closed = False

    def append(self, buffers: Iterable[Buffer], length: int | None = None) -> Place:
        """Store the buffers one after the other, durable on return.

        When a write or sync fails, nothing of this append counts and the file takes no more; those that returned stay good.
        """
        if length is None:
            buffers = byte_views(buffers)
            length = sum(view.nbytes for view in buffers)
        assert length, "an empty append has no place"
        for is_last in (False, True):
            file, offset = self._reserve(length)
            try:
                with explaining("write", file.path):
                    _write(file.path, buffers, offset, length)
            except BaseException as error:
                # Never sync this file again: the kernel reports a lost page once, and the next sync succeeds without it.
                self._end(file, is_good=False)
                # Upkeep took this session for dead and deleted its file. The commit will say so, and all is stored under a new one.
                if is_last or not isinstance(error.__cause__, FileNotFoundError):
                    raise
            else:
                self._end(file)
                return Place(file.key, file.index, offset)
        raise AssertionError("the last try returned or raised")

    @property
    def first_index(self) -> int:
        return self._first_index

    def rest(self) -> None:
        with self._mutex:
            self._leave()
            self._drop_next()

    def close(self) -> None:
        with self._mutex:
            self._closed = True
        self.rest()
        self._workers.close()

    def _reserve(self, length: int) -> tuple[_File, int]:
        with self._mutex:
            assert not self._closed, "the journal is closed"
            file = self._file
            if file is None or file.used + length > file.size:
                self._leave()
                with explaining("begin a journal file in", self._folder.root):
                    file = self._file = self._take_next(length) or self._create(length)
                self._first_index = file.index
            offset = file.used
            file.used = _align(offset + length)
            file.appends += 1
            # A smaller file than usual is what a nearly full disk had left.
            if self._next is None and file.used > file.size // _AHEAD and file.size >= self._file_bytes:
                self._next = self._workers.submit(lambda: self._create_sized(_align(self._file_bytes)))
            return file, offset

    def _take_next(self, length: int) -> _File | None:
        """The file that was begun ahead, if it could be, and is large enough."""
        if self._next is None:
            return None
        self._next.wait()
        if self._next.failed or self._next.result().size < length:
            self._drop_next()
            return None
        file, self._next = self._next.result(), None
        return file

    def _drop_next(self) -> None:
        task, self._next = self._next, None
        if task is not None:
            task.wait()
            if not task.failed:
                self._remove(task.result())

    def _leave(self) -> None:
        """Let no more appends go to the file."""
        file, self._file = self._file, None
        if file is not None:
            self._first_index = file.index + 1
            if not file.appends:
                self._trim(file)

    def _end(self, file: _File, *, is_good: bool = True) -> None:
        """Note that an append ended. The last one to a file that takes no more gives back what is left of it."""
        with self._mutex:
            file.appends -= 1
            if self._file is file:
                if not is_good:
                    self._leave()
            elif not file.appends:
                self._trim(file)

    def _create(self, length: int) -> _File:
        """Begin the next file, large enough for `length`."""
        preferred, least = _align(max(self._file_bytes, length)), _align(length)
        try:
            return self._create_sized(preferred)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or preferred == least:
                raise
        # The disk is nearly full: use what is left of it.
        return self._create_sized(least)

    def _create_sized(self, size: int) -> _File:
        # An index is used up even if its file fails and stays, so that no key ever means two files. If nothing stays, it is used again.
        index, self._next_index = self._next_index, self._next_index + 1
        key = self._key_for(index)
        path = self._folder.path(key)
        try:
            fd = self._folder.create(key)
        except FileExistsError as error:
            raise AlreadyExistsError(f"{path} exists: another process writes as this session", key=key) from error
        except OSError:
            self._next_index = index
            raise
        try:
            preallocate(fd, size)
            self._folder.sync_name(key)
            failpoints.reach("journal.created")
        except OSError:
            with contextlib.suppress(OSError):
                self._folder.remove([key])
                self._next_index = index
            raise
        finally:
            os.close(fd)
        return _File(key, index, path, size)

    def _remove(self, file: _File) -> None:
        """Remove the newest file, of which nothing is used, and use its index again."""
        with contextlib.suppress(OSError):
            self._folder.remove([file.key])
            self._next_index = file.index

    def _trim(self, file: _File) -> None:
        """Give back what was preallocated and not used. Not while there are appends, behind which it would wait for the kernel's lock."""
        with contextlib.suppress(OSError):  # Only space is at stake, so nothing is synced.
            if file.used:
                os.truncate(file.path, file.used)
            else:
                self._folder.remove([file.key])


def _write(path: str, buffers: Iterable[Buffer], offset: int, length: int) -> None:
    # Opened for each append (3.5 us of at least 260, measured), because a sync's error goes to one of those who share an open
    # file: with an fd of their own, two threads that lost pages are both told. And if someone removed the file, this fails.
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        written = write_all(fd, buffers, offset)
        assert written == length, f"{written} bytes were to be {length}"
        failpoints.reach("journal.written")
        sync_data(fd)
    finally:
        os.close(fd)


def _align(length: int) -> int:
    return length + -length % _ALIGNMENT
