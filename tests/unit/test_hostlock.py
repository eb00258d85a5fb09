"""The lock of all processes of a host: one at a time, in turn, with a deadline, and never left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headwater.catalog.hostlock import HostLock
from headwater.errors import UnavailableError

# Processes that wait for each other: not for a quick run.
pytestmark = pytest.mark.slow

HOLD = """
import sys
from headwater.catalog.hostlock import HostLock
with HostLock(sys.argv[1], 10):
    print("held", flush=True)
    sys.stdin.read()
"""
COUNT = """
import sys
from headwater.catalog.hostlock import HostLock
lock, path = HostLock(sys.argv[1], 30), sys.argv[2]
for _ in range(int(sys.argv[3])):
    with lock:
        number = int(open(path).read())
        open(path, "w").write(str(number + 1))
"""


@contextmanager
def holder(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the lock, until its input is closed."""
    with subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.slow
def test_one_at_a_time_of_many_processes_and_threads(tmp_path: Path) -> None:
    counter = tmp_path / "counter"
    counter.write_text("0")
    command = [sys.executable, "-c", COUNT, str(tmp_path / "lock"), str(counter), "200"]
    processes = [subprocess.Popen(command) for _ in range(4)]
    lock = HostLock(str(tmp_path / "lock"), 30)

    def count() -> None:
        for _ in range(100):
            with lock:
                counter.write_text(str(int(counter.read_text()) + 1))

    threads = [threading.Thread(target=count) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [process.wait(60) for process in processes] == [0] * 4
    assert counter.read_text() == "1000"
    lock.close()


def check_that_it_is_free(path: Path, lock: HostLock) -> None:
    """For others, and for the one whose turn may have come when it no longer wanted it."""
    for patient in (HostLock(str(path), 10), lock):
        with patient:
            pass
        patient.close()


def test_who_waits_gets_it_when_its_holder_is_killed(tmp_path: Path) -> None:
    lock = HostLock(str(tmp_path / "lock"), 20)
    with holder(tmp_path / "lock") as process:
        threading.Timer(0.3, process.kill).start()
        begun = time.monotonic()
        with lock:
            assert 0.2 < time.monotonic() - begun < 10
    lock.close()


def test_who_waits_too_long_is_told_who_has_it_and_leaves_nothing_behind(tmp_path: Path) -> None:
    lock = HostLock(str(tmp_path / "lock"), 0.3)
    with holder(tmp_path / "lock") as process:
        for _ in range(2):
            with pytest.raises(UnavailableError, match=f"process {process.pid} "), lock:
                pass
    check_that_it_is_free(tmp_path / "lock", lock)


def test_a_ctrl_c_while_it_waits_leaves_nothing_behind(tmp_path: Path) -> None:
    lock = HostLock(str(tmp_path / "lock"), 20)
    with holder(tmp_path / "lock"):
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt), lock:
            pass
    check_that_it_is_free(tmp_path / "lock", lock)


def test_a_child_that_was_forked_does_not_keep_its_parents_lock(tmp_path: Path) -> None:
    """Also one that was waited for: it was taken by another descriptor."""
    lock = HostLock(str(tmp_path / "lock"), 20)
    with holder(tmp_path / "lock") as process:
        threading.Timer(0.3, process.kill).start()
        lock.__enter__()
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        lock.forget()
        os.read(read_end, 1)
        os._exit(0)
    try:
        # As if this process died: its descriptors are closed, without a word to the lock.
        assert lock._queue is not None and lock._descriptor is not None
        os.close(lock._queue.descriptor)
        os.close(lock._descriptor)
        with HostLock(str(tmp_path / "lock"), 5):
            pass
    finally:
        os.write(write_end, b"x")
        os.waitpid(child, 0)


def test_an_interpreter_that_exits_waits_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    timer = threading.Timer(0.3, lambda: process.kill())
    lock = HostLock(str(tmp_path / "lock"), 20)
    with holder(tmp_path / "lock") as process:
        timer.start()
        monkeypatch.setattr(threading.Thread, "start", refuse)
        with lock:
            assert not timer.is_alive() or timer.finished.is_set()
        monkeypatch.undo()
    lock.close()
    with HostLock(str(tmp_path / "lock"), 5):
        pass
