"""Files and directories that survive a power cut, and what the operating system's errors mean to the caller.

A file's bytes are durable after `sync_data`, its name after `sync_directory` of the directory it is in, and that directory's own name
after the same for the one above.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from headwater.errors import InvalidRequestError, UnavailableError, is_of_system
from headwater.storage.interface import Buffer, byte_view

T = TypeVar("T")

#: Buffers that one pwritev takes; the kernel refuses more.
IOV_MAX = os.sysconf("SC_IOV_MAX")
#: What waits for one pwritev, and is then on its way to the disk: no less than pays for the calls.
_WRITE_BYTES = 4 * 1024 * 1024

_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.~=+-]*(/[A-Za-z0-9_][A-Za-z0-9_.~=+-]*)+")
#: How often a directory may vanish between making it and using it.
_ATTEMPTS = 8

_ADVICE = {
    errno.ENOSPC: "no space left: free some, then flush again",
    errno.EDQUOT: "this user's quota is used up: free some space, then flush again",
    errno.EFBIG: "larger than this process may write: raise its file size limit (ulimit -f), then flush again",
    errno.EACCES: "permission denied: let this user read and write there, then repeat",
    errno.EPERM: "not permitted here: the directory must allow this user to create files and hard links; then repeat",
    errno.EROFS: "the file system is read-only: mount it for writing, then repeat",
    errno.EMFILE: "this process has too many files open: raise its limit (ulimit -n) or close some, then repeat",
    errno.EIO: "the device reported an input/output error: see the kernel's log; repeat once it is healthy",
}

if sys.platform == "darwin":
    import fcntl

    def sync_data(fd: int) -> None:
        """Make a file's bytes durable. fsync on macOS leaves them in the drive's cache."""
        fcntl.fcntl(fd, fcntl.F_FULLFSYNC)

    def preallocate(fd: int, length: int) -> None:
        os.ftruncate(fd, length)
else:

    def sync_data(fd: int) -> None:
        """Make a file's bytes, and the size needed to find them, durable."""
        os.fdatasync(fd)

    def preallocate(fd: int, length: int) -> None:
        """Reserve the space now, so that a full disk shows before there is data, and a sync has no size to update."""
        os.posix_fallocate(fd, 0, length)


# Of Linux; others have nothing like it.
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)
_SYNC_FILE_RANGE_WAIT_BEFORE, _SYNC_FILE_RANGE_WRITE, _SYNC_FILE_RANGE_WAIT_AFTER = 1, 2, 4
if _sync_file_range is not None:
    _sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


def begin_sync(fd: int, offset: int, length: int) -> None:
    """Let the disk begin to write these bytes. Nothing is durable by that; what goes wrong is for `sync_data` to tell."""
    if _sync_file_range is not None:
        _sync_file_range(fd, offset, length, _SYNC_FILE_RANGE_WRITE)


def wait_sync(fd: int, offset: int, length: int) -> None:
    """Let the disk write these bytes, and wait until it has. As with `begin_sync`, nothing is durable by that."""
    if _sync_file_range is not None:
        _sync_file_range(fd, offset, length, _SYNC_FILE_RANGE_WAIT_BEFORE | _SYNC_FILE_RANGE_WRITE | _SYNC_FILE_RANGE_WAIT_AFTER)


@contextlib.contextmanager
def explaining(action: str, path: str) -> Iterator[None]:
    """Turn what the operating system says into an UnavailableError that names the path and what to do."""
    try:
        yield
    except OSError as error:
        if not is_of_system(error):
            raise
        reason = _ADVICE.get(error.errno or 0) or error.strerror or str(error)
        raise UnavailableError(f"cannot {action} {path}: {reason}", path=path, errno=error.errno) from error


def write_all(fd: int, buffers: Iterable[Buffer], offset: int) -> int:
    """Write all buffers at `offset`, and return how many bytes they have. Those that are made as they are asked for are soon let go of.

    The disk begins with the first ones while the others are made: else it would have nothing to do until the sync.
    """
    start, begun, waiting, size = offset, offset, list[memoryview](), 0
    for view in map(byte_view, buffers):
        if view.nbytes:
            waiting.append(view)
            size += view.nbytes
        if size >= _WRITE_BYTES or len(waiting) >= IOV_MAX:
            offset = _write_views(fd, waiting, offset)
            waiting, size = [], 0
        if offset - begun >= _WRITE_BYTES:
            begin_sync(fd, begun, offset - begun)
            begun = offset
    return _write_views(fd, waiting, offset) - start


def _write_views(fd: int, rest: list[memoryview], offset: int) -> int:
    """Write them all, however often the kernel takes only a part. Returns where they end."""
    while rest:
        written = os.pwritev(fd, rest, offset)
        offset += written
        done = 0
        while done < len(rest) and written >= rest[done].nbytes:
            written -= rest[done].nbytes
            done += 1
        del rest[:done]
        if written:
            rest[0] = rest[0][written:]
    return offset


def sync_directory(path: str) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_directory(path: str) -> None:
    """Make a directory, and those above it that are missing, durably; fine if it is there. FileExistsError if a file is."""
    parent = os.path.dirname(path)
    if not os.path.isdir(parent):
        make_directory(parent)
    try:
        os.mkdir(path)
    except FileExistsError:
        if os.path.isfile(path):
            raise
    # Also of one that is there: its maker may have been killed before this. One may be allowed to make names that one may not list.
    with contextlib.suppress(PermissionError):
        sync_directory(parent)


class Folder:
    """A directory tree that holds one file per key, and makes and removes directories as keys come and go."""

    def __init__(self, root: str) -> None:
        self.root = os.path.abspath(root)
        # A root that was there is not made again: whoever moved it away, or unmounted it, has the catalog and all other files there.
        self._has_root = os.path.isdir(self.root)
        # Directories whose names are known to be durable, all the way up to the root.
        self._durable: set[str] = set()

    def path(self, key: str) -> str:
        if not _KEY.fullmatch(key):
            raise InvalidRequestError(f"{key!r} is no key: it needs a folder and a name, like l0/0000000000a1/000003.hwb")
        return os.path.join(self.root, key)

    def create(self, key: str) -> int:
        """Create a file that must not exist, and return it open for writing. Its name is not durable yet."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        return self._in_directory(self.path(key), lambda path: os.open(path, flags, 0o644))

    def link(self, source: str, key: str) -> None:
        """Give the file `source` the name `key`, durably; FileExistsError if there is one already."""
        self._in_directory(self.path(key), lambda path: os.link(self.path(source), path))
        self.sync_name(key)

    def sync_name(self, key: str) -> None:
        """Make the name of an existing file durable."""
        sync_directory(os.path.dirname(self.path(key)))

    def remove(self, keys: Sequence[str]) -> None:
        """Remove files, and the directories that become empty by it; missing ones are fine."""
        directories = set()
        for key in keys:
            path = self.path(key)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
                directories.add(os.path.dirname(path))
        for directory in directories:
            try:
                os.rmdir(directory)
            except OSError:
                with contextlib.suppress(FileNotFoundError):
                    sync_directory(directory)

    def _in_directory(self, path: str, make: Callable[[str], T]) -> T:
        directory = os.path.dirname(path)
        for _ in range(_ATTEMPTS):
            if directory not in self._durable:
                self._make_directory(directory)
                self._durable.add(directory)
            try:
                return make(path)
            except FileNotFoundError as error:
                # Another process's `remove` found the directory empty, perhaps just after we made it: make it again.
                self._durable.discard(directory)
                vanished = error
        raise vanished

    def _make_directory(self, path: str) -> None:
        if path != self.root:
            self._make_directory(os.path.dirname(path))
        elif self._has_root:
            if not os.path.isdir(path):
                raise UnavailableError(f"the directory {path} is gone: put it back, or open the store where it is now")
            return
        make_directory(path)
