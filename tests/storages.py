"""What tests do to storages: put them far away, fill their disk, break their system calls."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import pyarrow as pa
import pytest

from headwater.storage import Buffer, Journal, ObjectInfo, Storage
from headwater.storage.interface import Buffers, Push

_ROOM_BYTES = 64 * 1024


class DelayedStorage:
    """Any storage, with a wait before every put: an object store that is far away."""

    def __init__(self, storage: Storage, put_seconds: float, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self.url = storage.url
        self.local = storage.local
        self._storage = storage
        self._put_seconds = put_seconds
        self._sleep = sleep

    def put(self, key: str, buffers: Sequence[Buffer]) -> None:
        self._sleep(self._put_seconds)
        self._storage.put(key, buffers)

    def write(self, key: str, produce: Callable[[pa.NativeFile], None], push: Push | None = None) -> None:
        self._sleep(self._put_seconds)
        self._storage.write(key, produce, push)

    def get(self, key: str, start: int, length: int) -> Buffer:
        return self._storage.get(key, start, length)

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> Buffers:
        return self._storage.get_ranges(key, ranges)

    def expect(self, key: str, ranges: Sequence[tuple[int, int]]) -> bool:
        return self._storage.expect(key, ranges)

    def size(self, key: str) -> int | None:
        return self._storage.size(key)

    def delete(self, keys: Sequence[str], rest: Callable[[], None] = lambda: None) -> None:
        self._storage.delete(keys, rest)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return self._storage.list(prefix)

    def journal(self, key_for: Callable[[int], str]) -> Journal:
        return self._storage.journal(key_for)

    def close(self) -> None:
        self._storage.close()


class FullDisk(Protocol):
    """A place for files that can be filled, until only a little room is left, and freed."""

    root: Path

    def fill(self) -> None: ...

    def free(self) -> None: ...


class _SmallFileSystem:
    def __init__(self, root: Path) -> None:
        self.root = root
        self._filler = root / "filler"

    def fill(self) -> None:
        room = os.statvfs(self.root)
        self._filler.write_bytes(bytes(room.f_bavail * room.f_frsize - _ROOM_BYTES))

    def free(self) -> None:
        self._filler.unlink()


class _SizeLimit:
    """No file of this process may grow beyond the room that is left: all that a user without rights can do."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (_ROOM_BYTES, self._limits[1]))

    def free(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self._limits)


@contextlib.contextmanager
def filling(folder: Path, kind: str) -> Iterator[FullDisk]:
    """A disk to fill: a small "file system" of its own, or where mounting one is not allowed, and on request, a "file size limit"."""
    if kind == "file system":
        mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "headwater-test", str(folder)], capture_output=True, check=False)
        if mount.returncode == 0:
            try:
                yield _SmallFileSystem(folder)
            finally:
                subprocess.run(["umount", str(folder)], check=True)
            return
        print(f"{kind}: not allowed here, so a file size limit instead: {mount.stderr.decode()}")
    limit = _SizeLimit(folder)
    try:
        yield limit
    finally:
        limit.free()


def fail_once(monkeypatch: pytest.MonkeyPatch, name: str, code: int) -> None:
    """Let the next call of os.`name` fail, and those after it work."""
    real = getattr(os, name)

    def failing(*args: object, **kwargs: object) -> object:
        monkeypatch.setattr(os, name, real)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, name, failing)
