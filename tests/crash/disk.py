"""A disk whose power may fail: what a process does to its files is recorded, and laid out again as it may be found afterwards.

Bytes are there for sure if their file was synced after them, names if their directory was. Of everything else any part may be there, in
sectors, in whatever order it was written: POSIX promises no more. File systems keep more than that, each in its own way.
"""

from __future__ import annotations

import io
import os
import random
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import apsw
import pyarrow as pa

SECTOR_BYTES = 512


@dataclass(frozen=True)
class Write:
    """Bytes of a file; without them, its new length."""

    file: int
    offset: int
    data: bytes | None = None


@dataclass(frozen=True)
class Name:
    """What a path stands for from now on: a file, a directory ("/"), or nothing."""

    path: str
    target: int | str | None


@dataclass(frozen=True)
class Sync:
    """A file or a directory was synced, with what had been noted when that began."""

    target: int | str
    began: int


@dataclass(frozen=True)
class Said:
    """What the process told others, who count on it."""

    message: Any


Op = Write | Name | Sync | Said


class Recorder:
    """Records what this process does below `root`, from now on and for good: through `os`, Arrow's files, and SQLite.

    An op is noted when it was done, and a sync covers what was noted before it began: so never too much counts as durable. Syncs of paths
    for which `is_deaf` is true are not noted, as if the disk had not heard them.
    """

    def __init__(self, root: str, is_deaf: Callable[[str], bool]) -> None:
        self.ops: list[Op] = []
        self._root = root + os.sep
        self._is_deaf = is_deaf
        self._mutex = threading.Lock()
        self._files: dict[str, int] = {}
        self._paths: list[str] = []
        instead = _Os(self)
        for name in dir(instead):
            if not name.startswith("_"):
                setattr(os, name, getattr(instead, name))
        vars(pa)["OSFile"] = lambda path, mode: pa.PythonFile(_ArrowFile(path), "w")
        self._vfs = _Vfs(self)

    def send(self, message: Any) -> None:
        """Stands in for the channel to the test."""
        self.note(Said(message))

    def note(self, op: Op) -> None:
        with self._mutex:
            self.ops.append(op)

    def is_below(self, path: Any) -> bool:
        return isinstance(path, str) and (path + os.sep).startswith(self._root)

    def find(self, path: str) -> int | None:
        return self._files.get(path)

    def note_made(self, path: str) -> None:
        with self._mutex:
            self._files[path] = len(self._paths)
            self._paths.append(path)
            self.ops.append(Name(path, self._files[path]))

    def note_linked(self, source: str, path: str) -> None:
        self._files[path] = self._files[source]
        self.note(Name(path, self._files[path]))

    def note_gone(self, path: str) -> None:
        self._files.pop(path, None)
        self.note(Name(path, None))

    def sync(self, target: int | str | None, do: Callable[[], Any]) -> None:
        began = len(self.ops)
        do()
        if target is not None and not self._is_deaf(self._paths[target] if isinstance(target, int) else target + os.sep):
            self.note(Sync(target, began))


class _Os:
    """Stands in for the functions of `os` that have these names."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._real = {name: getattr(os, name) for name in dir(self) if not name.startswith("_")}
        #: What is open: a file, or the path of a directory.
        self._open: dict[int, int | str] = {}

    def open(self, path: Any, flags: int, mode: int = 0o777, **more: Any) -> int:
        path = os.fspath(path)
        is_new = not os.path.lexists(path)
        fd: int = self._real["open"](path, flags, mode, **more)
        if self._recorder.is_below(path):
            if os.path.isdir(path):
                self._open[fd] = path
            else:
                if is_new:
                    self._recorder.note_made(path)
                if (file := self._recorder.find(path)) is not None:
                    self._open[fd] = file
        return fd

    def close(self, fd: int) -> None:
        self._open.pop(fd, None)
        self._real["close"](fd)

    def pwritev(self, fd: int, buffers: Sequence[Any], offset: int, *flags: int) -> int:
        written: int = self._real["pwritev"](fd, buffers, offset, *flags)
        if isinstance(file := self._open.get(fd), int):
            self._recorder.note(Write(file, offset, b"".join(buffers)[:written]))
        return written

    def posix_fallocate(self, fd: int, offset: int, length: int) -> None:
        self._real["posix_fallocate"](fd, offset, length)
        if isinstance(file := self._open.get(fd), int):
            self._recorder.note(Write(file, offset + length))

    def truncate(self, path: Any, length: int) -> None:
        self._real["truncate"](path, length)
        if (file := self._recorder.find(path)) is not None:
            self._recorder.note(Write(file, length))

    def fsync(self, fd: int) -> None:
        self._recorder.sync(self._open.get(fd), lambda: self._real["fsync"](fd))

    def fdatasync(self, fd: int) -> None:
        self._recorder.sync(self._open.get(fd), lambda: self._real["fdatasync"](fd))

    def link(self, source: Any, path: Any, **more: Any) -> None:
        source, path = os.fspath(source), os.fspath(path)
        self._real["link"](source, path, **more)
        if self._recorder.is_below(path):
            self._recorder.note_linked(source, path)

    def unlink(self, path: Any, **more: Any) -> None:
        path = os.fspath(path)
        self._real["unlink"](path, **more)
        if self._recorder.is_below(path):
            self._recorder.note_gone(path)

    def mkdir(self, path: Any, *mode: int, **more: Any) -> None:
        path = os.fspath(path)
        self._real["mkdir"](path, *mode, **more)
        if self._recorder.is_below(path):
            self._recorder.note(Name(path, "/"))

    def rmdir(self, path: Any, **more: Any) -> None:
        path = os.fspath(path)
        self._real["rmdir"](path, **more)
        if self._recorder.is_below(path):
            self._recorder.note_gone(path)


class _ArrowFile(io.RawIOBase):
    """What Arrow writes to a file, through `os`."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY)
        self._at = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def write(self, data: Any) -> int:
        written = os.pwritev(self._fd, [bytes(data)], self._at)
        self._at += written
        return written

    def close(self) -> None:
        if not self.closed:
            os.close(self._fd)
        super().close()


class _Vfs(apsw.VFS):
    """SQLite's way to the disk."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        super().__init__("recorded", "unix", makedefault=True)

    def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:
        return _VfsFile(self._recorder, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:
        super().xDelete(filename, syncdir)
        self._recorder.note_gone(filename)
        if syncdir:
            self._recorder.sync(os.path.dirname(filename), lambda: None)


class _VfsFile(apsw.VFSFile):
    def __init__(self, recorder: Recorder, name: Any, flags: list[int]) -> None:
        self._recorder = recorder
        path = name.filename() if isinstance(name, apsw.URIFilename) else name
        is_new = path is not None and not os.path.exists(path)
        super().__init__("unix", name, flags)
        if is_new:
            recorder.note_made(path)
        self._file = recorder.find(path) if path is not None else None
        # With the first sync of a journal or WAL that it would have made, SQLite syncs the directory too.
        self._unsynced = os.path.dirname(path) if _is_log(flags[0]) and flags[0] & apsw.SQLITE_OPEN_CREATE else None

    def xWrite(self, data: bytes, offset: int) -> None:
        super().xWrite(data, offset)
        if self._file is not None:
            self._recorder.note(Write(self._file, offset, bytes(data)))

    def xTruncate(self, newsize: int) -> None:
        super().xTruncate(newsize)
        if self._file is not None:
            self._recorder.note(Write(self._file, newsize))

    def xSync(self, flags: int) -> None:
        directory, self._unsynced = self._unsynced, None
        self._recorder.sync(self._file, lambda: super(_VfsFile, self).xSync(flags))
        if directory is not None:
            self._recorder.sync(directory, lambda: None)


def _is_log(flags: int) -> bool:
    return bool(flags & (apsw.SQLITE_OPEN_WAL | apsw.SQLITE_OPEN_MAIN_JOURNAL))


@dataclass
class _File:
    durable: list[Write] = field(default_factory=list)
    #: Written since the last sync.
    perhaps: list[Write] = field(default_factory=list)


class PowerCut:
    """What a disk may hold after it lost power behind the first `at` ops."""

    def __init__(self, ops: Sequence[Op], at: int) -> None:
        self.said = [op.message for op in ops[:at] if isinstance(op, Said)]
        synced: dict[int | str, int] = defaultdict(int)
        for op in ops[:at]:
            if isinstance(op, Sync):
                synced[op.target] = max(synced[op.target], op.began)
        self._files: dict[int, _File] = defaultdict(_File)
        #: What each name stands for if nothing more survives, then what else it may stand for.
        self._names: dict[str, list[int | str | None]] = defaultdict(lambda: [None])
        for index, op in enumerate(ops[:at]):
            if isinstance(op, Write):
                file = self._files[op.file]
                (file.durable if index < synced[op.file] else file.perhaps).append(op)
            elif isinstance(op, Name):
                states = self._names[op.path]
                if index < synced[os.path.dirname(op.path)]:
                    states.clear()
                states.append(op.target)

    def lay_out(self, root: str, folder: Path, rng: random.Random) -> None:
        """Make in `folder` what is found where `root` was. At worst nothing that was not synced is there, at best all, else a part."""
        share = rng.choice((0.0, 0.0, 0.5, 0.9, 1.0))
        for path, states in sorted(self._names.items()):
            # One name's changes come in order, those of several names don't.
            kept = sum(rng.random() < share for _ in states[1:]) if share < 1 else len(states) - 1
            target, place = states[kept], folder / os.path.relpath(path, root)
            if target is None or not place.parent.is_dir():
                continue  # Lost with its directory, in the latter case.
            if isinstance(target, str):
                place.mkdir()
            else:
                self._write(place, self._files[target], share, rng)

    def _write(self, place: Path, file: _File, share: float, rng: random.Random) -> None:
        with place.open("wb") as found:
            for op in file.durable:
                _apply(found, op.offset, op.data)
            for op in file.perhaps:
                if op.data is None:
                    if rng.random() < share:
                        _apply(found, op.offset, None)
                    continue
                at = 0
                while at < len(op.data):
                    end = min(len(op.data), at + SECTOR_BYTES - (op.offset + at) % SECTOR_BYTES)
                    if rng.random() < share:
                        _apply(found, op.offset + at, op.data[at:end])
                    at = end


def _apply(file: io.BufferedWriter, offset: int, data: bytes | None) -> None:
    if data is None:
        file.truncate(offset)
    else:
        file.seek(offset)
        file.write(data)
