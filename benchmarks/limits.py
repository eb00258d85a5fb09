"""What the machine does without headwater: the same bytes, written, synced, committed or copied with as little around it as can be."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import apsw
import numpy as np

#: Bytes written before each sync: as many as one of headwater's own flushes holds at most.
FLUSH_BYTES = 32 * 1024 * 1024
#: Bytes copied in memory at once: less than a processor's cache holds.
_COPY_BYTES = 16 * 1024 * 1024
_PAGE = bytes(4096)
_SYNCED_PAGES = 200
_KEPT = np.frombuffer(np.random.default_rng(0).bytes(FLUSH_BYTES), dtype=np.uint8)


def seconds_to_write(path: Path, size: int, *, preallocated: bool) -> float:
    """Write and fdatasync `size` bytes to one new file, a flush at a time.

    The file stays, as what headwater writes does: memory that a deleted file gave back is faster to write to than new memory, on some
    virtual machines ten times.
    """
    started = time.perf_counter()
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        if preallocated:
            os.posix_fallocate(fd, 0, size)
        at = 0
        while at < size:
            at += os.pwrite(fd, _KEPT[: size - at].data, at)
            os.fdatasync(fd)
        return time.perf_counter() - started
    finally:
        os.close(fd)


def take_memory(path: Path, size: int) -> None:
    """Fill a file's cache with `size` bytes and drop it, so that the host has given that memory. The disk is left alone."""
    with path.open("xb", buffering=0) as file:
        for at in range(0, size, FLUSH_BYTES):
            file.write(_KEPT[: size - at].data)
    path.unlink()


def seconds_to_copy(size: int) -> float:
    """Copy `size` bytes in memory, a part at a time."""
    target = np.zeros(_COPY_BYTES, dtype=np.uint8)
    target[:] = 1
    started = time.perf_counter()
    for at in range(0, size, _COPY_BYTES):
        length = min(_COPY_BYTES, size - at)
        np.copyto(target[:length], _KEPT[:length])
    return time.perf_counter() - started


@contextmanager
def bare_sqlite(path: Path) -> Iterator[Callable[[], float]]:
    """Gives the seconds that one commit of one small row takes, with the pragmas of headwater's catalog."""
    connection = apsw.Connection(str(path))
    connection.execute("PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL; CREATE TABLE bare (id INTEGER PRIMARY KEY, data BLOB)").fetchall()

    # Once over the size at which SQLite checkpoints, so that its WAL has the length it keeps: commits into a growing one are slower.
    connection.execute("INSERT INTO bare (data) VALUES (zeroblob(5000000))")

    def commit() -> float:
        started = time.perf_counter()
        connection.execute("INSERT INTO bare (data) VALUES (?)", (bytes(150),))
        return time.perf_counter() - started

    try:
        yield commit
    finally:
        connection.close()
        for suffix in ("", "-wal", "-shm"):
            Path(f"{path}{suffix}").unlink(missing_ok=True)


@contextmanager
def bare_postgres(url: str) -> Iterator[Callable[[], float]]:
    """The same on PostgreSQL: the seconds of one synchronous commit of one small row."""
    import psycopg  # an extra, and not to be counted in the memory of a process that does without

    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE TABLE bare (id BIGSERIAL PRIMARY KEY, data BYTEA)")

        def commit() -> float:
            started = time.perf_counter()
            connection.execute("INSERT INTO bare (data) VALUES (%s)", (bytes(150),), prepare=True)
            return time.perf_counter() - started

        yield commit


@contextmanager
def bare_file(path: Path) -> Iterator[Callable[[], float]]:
    """Gives the seconds that write and fdatasync of 100 bytes to a preallocated file take."""
    size, at = 1 << 20, 0
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    os.posix_fallocate(fd, 0, size)

    def sync() -> float:
        nonlocal at
        started = time.perf_counter()
        os.pwrite(fd, bytes(100), at)
        os.fdatasync(fd)
        at = (at + 100) % (size - 100)
        return time.perf_counter() - started

    try:
        yield sync
    finally:
        os.close(fd)
        os.unlink(path)


def sync_at_rate(path: Path, seconds: float, rate: int = 1000) -> list[float]:
    """Seconds of a pwrite and fdatasync of one page, from when each is due."""
    found = []
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        os.posix_fallocate(fd, 0, _SYNCED_PAGES * len(_PAGE))
        begun = time.monotonic()
        for number in range(int(seconds * rate)):
            due = begun + number / rate
            time.sleep(max(0.0, due - time.monotonic()))
            os.pwrite(fd, _PAGE, number % _SYNCED_PAGES * len(_PAGE))
            os.fdatasync(fd)
            found.append(time.monotonic() - due)
    finally:
        os.close(fd)
        path.unlink()
    return found


def seconds_of_a_hop(pipe: Connection, count: int) -> float:
    """Half the time a message takes to a process that echoes and back, at best: one process waking another."""
    best = float("inf")
    for _ in range(count):
        started = time.perf_counter()
        pipe.send("echo")
        pipe.recv()
        best = min(best, (time.perf_counter() - started) / 2)
    return best
