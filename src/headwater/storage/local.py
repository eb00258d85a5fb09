"""Storage in files of this host. An object appears under its name whole and durable, or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from urllib.parse import quote

import pyarrow as pa

from headwater.errors import AlreadyExistsError
from headwater.model.limits import KIB, MIB
from headwater.runtime import failpoints
from headwater.storage import layout
from headwater.storage.files import Folder, begin_sync, explaining, sync_data, wait_sync, write_all
from headwater.storage.interface import Buffer, Buffers, Journal, ObjectInfo, Push, byte_views, is_equal, missing_error, short_error
from headwater.storage.journal import FileJournal
from headwater.storage.ranges import Range, merge, read_merged

#: Files kept open for reading. Each may hold on to the space of a file that another process deleted, so they are few.
_OPEN_FILES = 32
#: One larger read is cheaper than two over a gap this small; above 1 MiB it no longer is, as it leaves the processor's cache.
_GAP_BYTES = 4 * KIB
_READ_BYTES = MIB
#: While a large file is written, the disk is given parts of at least this size.
_PACED_BYTES = 2 * MIB
#: A write-ahead file is freed in parts of this size. Freeing 40 MiB at once keeps some disks busy for 50 ms.
_FREED_BYTES = MIB
#: What comes from the kernel's cache takes less: a fast disk reads 1 to 2 GB/s in pieces of this kind.
_CACHED_SECONDS = 30e-6
_CACHED_BYTES_PER_SECOND = 3e9


class LocalStorage:
    """Objects as files below `root`. Nothing is made there before the first write."""

    local = True

    def __init__(self, root: str) -> None:
        self._folder = Folder(root)
        self.url = f"file://{quote(self._folder.root)}"
        # lru_cache has no lock of its own that a fork could copy in a locked state, and dropping an entry never closes a file
        # that another thread is still reading from.
        self._open = lru_cache(_OPEN_FILES)(_OpenFile)

    def put(self, key: str, buffers: Sequence[Buffer]) -> None:
        views = byte_views(buffers)
        temporary = layout.temporary_key(key, secrets.token_hex(8))
        with explaining("write", self._folder.path(key)):
            try:
                self._write(temporary, views)
                failpoints.reach("object.put")
                # A link, unlike a rename, never replaces what is there.
                self._folder.link(temporary, key)
            except FileExistsError:
                self._check_equal(key, views)
            finally:
                with contextlib.suppress(OSError):
                    os.unlink(self._folder.path(temporary))

    def write(self, key: str, produce: Callable[[pa.NativeFile], None], push: Push | None = None) -> None:
        temporary = layout.temporary_key(key, secrets.token_hex(8))
        path = self._folder.path(temporary)
        with explaining("write", self._folder.path(key)):
            try:
                fd = self._folder.create(temporary)
                try:
                    if push is not None:
                        push.bind(_Parts(fd).give)
                    with pa.OSFile(path, "wb") as file:
                        produce(file)
                    failpoints.reach("object.put")
                    sync_data(fd)
                finally:
                    os.close(fd)
                self._folder.link(temporary, key)
            except FileExistsError:
                raise AlreadyExistsError(f"{key} exists", key=key) from None
            finally:
                with contextlib.suppress(OSError):
                    os.unlink(path)

    def get(self, key: str, start: int, length: int) -> Buffer:
        return self.get_ranges(key, [(start, length)])[0]

    def get_ranges(self, key: str, ranges: Sequence[Range]) -> Buffers:
        return read_merged(ranges, merge(ranges, gap_bytes=_GAP_BYTES, most_bytes=_READ_BYTES), partial(self._read, key))

    def _read(self, key: str, ranges: Sequence[Range]) -> list[Buffer]:
        path = self._folder.path(key)
        with explaining("read", path):
            try:
                file = self._open(path)
            except (FileNotFoundError, NotADirectoryError):
                raise missing_error(key, *ranges[0]) from None
            return [file.read(key, start, length) for start, length in ranges]

    def expect(self, key: str, ranges: Sequence[Range]) -> bool:
        # The kernel reads ahead into its cache.
        with contextlib.suppress(OSError, AttributeError):  # It is only a hint, and not known to every system.
            file = self._open(self._folder.path(key))
            if not file.is_cached:
                for start, length in ranges:
                    os.posix_fadvise(file.fd, start, length, os.POSIX_FADV_WILLNEED)
        return True

    def size(self, key: str) -> int | None:
        path = self._folder.path(key)
        with explaining("read", path):
            try:
                return os.stat(path).st_size
            except (FileNotFoundError, NotADirectoryError):
                return None

    def delete(self, keys: Sequence[str], rest: Callable[[], None] = lambda: None) -> None:
        with explaining("delete in", self._folder.root):
            for key in keys:
                if key.startswith(layout.JOURNAL_PREFIX):
                    self._shrink(self._folder.path(key), rest)
            self._folder.remove(keys)
        # Open files keep their space: forget them all, it costs a few microseconds each to open them again.
        self._open.cache_clear()

    def _shrink(self, path: str, rest: Callable[[], None]) -> None:
        """Free a file's space a little at a time. Who still reads from it finds it too short, and plans again as if it were gone."""
        try:
            status = os.stat(path)
            # Under another name, as in a backup by hard links, it is another's.
            if status.st_nlink == 1:
                for size in range(status.st_size - _FREED_BYTES, 0, -_FREED_BYTES):
                    os.truncate(path, size)
                    rest()
        except OSError:
            return  # It is gone, or another user's, who lets others delete it and not write to it.

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        assert not prefix or prefix.endswith("/"), prefix
        with explaining("list", os.path.join(self._folder.root, prefix)):
            yield from self._walk(prefix)

    def journal(self, key_for: Callable[[int], str]) -> Journal:
        return FileJournal(self._folder, key_for)

    def close(self) -> None:
        self._open.cache_clear()

    def _write(self, key: str, views: Sequence[memoryview]) -> None:
        fd = self._folder.create(key)
        try:
            write_all(fd, views, 0)
            sync_data(fd)
        finally:
            os.close(fd)

    def _check_equal(self, key: str, views: Sequence[memoryview]) -> None:
        """The key exists: fine if an earlier try of this put made it, and only its outcome was not known."""
        given, stored = sum(view.nbytes for view in views), self.size(key)
        if given != stored or not is_equal(views, self.get(key, 0, given)):
            raise AlreadyExistsError(f"{key} exists with other bytes: {stored} are stored, {given} were given", key=key)
        self._folder.sync_name(key)

    def _walk(self, prefix: str) -> Iterator[ObjectInfo]:
        try:
            with os.scandir(os.path.join(self._folder.root, prefix)) as found:
                # With its slash, a directory sorts to where its keys belong.
                entries = sorted((f"{prefix}{entry.name}{'/' if entry.is_dir(follow_symlinks=False) else ''}", entry) for entry in found)
        except FileNotFoundError:
            return
        for name, entry in entries:
            if name.endswith("/"):
                if name != layout.TEMPORARY_PREFIX:
                    yield from self._walk(name)
            elif prefix:  # Files directly in the root are not ours: the catalog may live there.
                try:
                    status = entry.stat()
                except FileNotFoundError:
                    continue  # Deleted meanwhile.
                yield ObjectInfo(name, status.st_size, status.st_mtime_ns // 1000)


class _Parts:
    """A file being written, whose bytes go to the disk in parts, and not all at once in the last sync.

    Others on the same disk, such as a commit of a few KiB, wait for what is on its way to the disk when they come.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        #: Where the last part begins that the disk was given, and where it ends.
        self._begun = 0
        self._given = 0

    def give(self, end: int) -> None:
        if end - self._given < _PACED_BYTES:
            return
        # One part is written by the disk while the next one is made.
        wait_sync(self._fd, self._begun, self._given - self._begun)
        begin_sync(self._fd, self._given, end - self._given)
        self._begun, self._given = self._given, end


class _OpenFile:
    """A file open for reading, closed when the last one who uses it is done."""

    fd = -1
    #: Whether the last read was as fast as memory: then hints for the kernel only cost time.
    is_cached = False

    def __init__(self, path: str) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, key: str, start: int, length: int) -> Buffer:
        # Into Arrow's memory: as fast as pread into bytes, 1.1-2 times a bytearray, which is zeroed first. Bytes freed by several
        # threads stay in each one's arena: reading 4 MiB blocks took 100 MB more. mmap made 12-15 GB/s instead of 4.5-12, but a
        # bad sector or a truncated file would kill the process by SIGBUS.
        data = memoryview(pa.allocate_buffer(length)).cast("B")
        at, begun = 0, time.perf_counter()
        while at < length:
            more = os.preadv(self.fd, [data[at:]], start + at)
            if not more:
                raise short_error(key, start, length, at)
            at += more
        self.is_cached = time.perf_counter() - begun < _CACHED_SECONDS + length / _CACHED_BYTES_PER_SECOND
        return data.toreadonly()

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
