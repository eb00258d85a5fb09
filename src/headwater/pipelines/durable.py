"""Files and folders that outlive a power cut: Spark syncs nothing that it writes, and a hard link syncs nothing either."""

from __future__ import annotations

import os
import sys
from pathlib import Path

if sys.platform == "darwin":
    import fcntl

    def _sync(fd: int) -> None:
        """Make a file durable. fsync on macOS leaves its bytes in the drive's cache."""
        fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
else:

    def _sync(fd: int) -> None:
        os.fsync(fd)


def _sync_path(path: str | os.PathLike[str]) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _sync(fd)
    finally:
        os.close(fd)


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it that are missing, durably; fine if it is there."""
    if not folder.parent.is_dir():
        make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    _sync_path(folder.parent)


def sync_folder(folder: Path) -> None:
    """Make all files in a folder, and their names, durable."""
    for place, _, names in os.walk(folder, topdown=False):
        for name in names:
            _sync_path(os.path.join(place, name))
        _sync_path(place)


def write_durably(path: Path, text: str) -> None:
    """Write a new file; its bytes and its name are durable when this returns."""
    data = memoryview(text.encode())
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        at = 0
        while at < len(data):
            at += os.pwritev(fd, [data[at:]], at)
        _sync(fd)
    finally:
        os.close(fd)
    _sync_path(path.parent)
