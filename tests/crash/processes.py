"""Processes to be killed and stopped: started quickly from a warm one, spoken to over a pipe, never left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import psutil

import headwater as hw

#: For anything that should take milliseconds. A busy machine is not a bug.
PATIENCE_SECONDS = 60.0

# Each process is forked from one that has imported everything and opened nothing: as good as a fresh one, in 20 ms instead of a second.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["pytest", "headwater", "headwater.catalog.postgres", "headwater.storage.objects", "tests.crash.workers"])


class Place(NamedTuple):
    """Where a store is, for this process and any other."""

    url: str
    catalog: str | None = None
    options: dict[str, str] | None = None

    def open(self, *, create: bool = False) -> hw.Store:
        store = hw.open(self.url, catalog=self.catalog, create=create, upkeep=False, storage_options=self.options)
        # Garbage goes at once, as on SQLite; what stays for a while in case of a fail-over has tests of its own.
        store._engine.database.garbage_seconds = 0.0
        return store


class Worker:
    """A process that runs `target(channel, *args)`."""

    def __init__(self, target: Callable[..., None], *args: Any) -> None:
        self._channel, theirs = _context.Pipe()
        self._process = _context.Process(target=_run, args=(target, theirs, args))
        self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def tell(self, message: Any) -> None:
        self._channel.send(message)

    def hear(self, timeout: float = PATIENCE_SECONDS) -> Any:
        """The next message; EOFError if the process ended instead."""
        if not self._channel.poll(timeout):
            raise TimeoutError(f"process {self.pid} said nothing for {timeout:g} s")
        return self._channel.recv()

    def ask(self, *message: Any, timeout: float = PATIENCE_SECONDS) -> Any:
        self.tell(message)
        return self.hear(timeout)

    def hear_all(self) -> Iterator[Any]:
        """Messages until the process ends, however it does."""
        while True:
            try:
                yield self.hear()
            except (EOFError, ConnectionResetError):
                return

    def wait(self) -> int:
        """The exit code: negative for a signal."""
        self._process.join(PATIENCE_SECONDS)
        assert self._process.exitcode is not None, f"process {self.pid} does not end"
        return self._process.exitcode

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.wait()

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        self.wait_until_stopped()

    def wait_until_stopped(self) -> None:
        process = psutil.Process(self.pid)
        wait_until(lambda: process.status() == psutil.STATUS_STOPPED)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join(PATIENCE_SECONDS)
        self._channel.close()


def _run(target: Callable[..., None], channel: Connection, args: tuple[Any, ...]) -> None:
    target(channel, *args)


class Crew:
    """Starts workers and ends those that are left."""

    def __init__(self) -> None:
        self._workers: list[Worker] = []

    def start(self, target: Callable[..., None], *args: Any) -> Worker:
        worker = Worker(target, *args)
        self._workers.append(worker)
        return worker

    def close(self) -> None:
        for worker in self._workers:
            worker.close()


def wait_until(condition: Callable[[], bool], timeout: float = PATIENCE_SECONDS) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "this should have happened by now"
        time.sleep(0.002)
