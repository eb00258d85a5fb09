"""Commits of other connections and processes are heard of at once, with polling only as the safety net."""

from __future__ import annotations

import gc
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import headwater as hw
from headwater.catalog import sqlite
from headwater.catalog.sqlite import SqliteChanges, SqliteDatabase
from headwater.catalog.walwatch import WalWatch


def watching_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "headwater-watch"]


def seconds_until_seen(path: Path) -> list[float]:
    """How long events take to a follower that waits for them, each written by another opening of the store, as by another process."""
    written: list[float] = []
    with hw.open(path, upkeep=False) as store, hw.open(path, upkeep=False) as other, ThreadPoolExecutor(1) as pool:
        stream = store.create_stream("a/x")
        events = other.stream("a/x").read(follow=True)
        with stream.writer() as writer:
            seen = pool.submit(lambda: [(next(events), time.monotonic())[1] for _ in range(10)])
            for number in range(10):
                time.sleep(0.15)
                writer.write(f"{number}").result(60)
                written.append(time.monotonic())
            return sorted(after - before for before, after in zip(written, seen.result(60), strict=True))


def test_a_commit_is_seen_without_a_poll(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SqliteChanges, "WATCHED_POLL_SECONDS", 5.0)
    assert seconds_until_seen(tmp_path / "store")[5] < 0.1
    assert watching_threads() == [], "a closed store watches nothing"


def test_where_files_cannot_be_watched_it_polls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> WalWatch:
        raise OSError("too many watches")

    monkeypatch.setattr(sqlite, "WalWatch", refuse)
    assert seconds_until_seen(tmp_path / "store")[5] < 0.1


def test_a_file_that_is_made_anew_is_watched_again(tmp_path: Path) -> None:
    path, looked = tmp_path / "file", threading.Event()

    def look() -> bool:
        looked.set()
        return True

    path.write_bytes(b"1")
    watch = WalWatch(str(path), look)
    try:
        (tmp_path / "other").write_bytes(b"2")
        os.replace(tmp_path / "other", path)
        deadline = time.monotonic() + 10
        while not looked.is_set() and time.monotonic() < deadline:
            with path.open("ab") as file:
                file.write(b"3")
            time.sleep(0.05)
        assert looked.is_set()
    finally:
        watch.close()
    assert not watch.is_alive


def test_a_file_that_is_not_there_cannot_be_watched(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        WalWatch(str(tmp_path / "none"), lambda: True)
    assert watching_threads() == []


def test_a_forked_child_lets_go_of_what_its_parent_watches(tmp_path: Path) -> None:
    with hw.open(tmp_path / "store", upkeep=False) as store:
        with store.create_stream("a/x").writer() as writer:
            writer.write("1")
        store._engine.changes.wait(store._engine.changes.version(), 0.01)
        assert len(watching_threads()) == 1
        files = {os.readlink(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd") if _is_there(number)}
        assert "anon_inode:inotify" in files
        child = os.fork()
        if not child:
            left = {os.readlink(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd") if _is_there(number)}
            os._exit(int("anon_inode:inotify" in left))
        assert os.waitpid(child, 0)[1] == 0
        assert len(watching_threads()) == 1


def test_a_catalog_that_is_dropped_and_not_closed_is_watched_no_longer(tmp_path: Path) -> None:
    database = SqliteDatabase(str(tmp_path / "catalog.sqlite"))
    database.changes.wait(database.changes.version(), 0.01)
    (thread,) = watching_threads()
    del database
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def _is_there(number: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{number}")
