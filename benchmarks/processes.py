"""Processes that a benchmark starts: a pipe to each, and none left behind."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

_READY = "ready"
_START_SECONDS = 120.0


@contextmanager
def started(work: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
    """Run `work(pipe, *arguments)` in a new process and wait until it said it is ready. It should end when its pipe does."""
    # Spawned: nothing of this process's threads, connections or memory is in it.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs, *arguments))
    process.start()
    theirs.close()
    try:
        if not ours.poll(_START_SECONDS) or ours.recv() != _READY:
            raise RuntimeError(f"a process for {work.__name__} did not become ready")
        yield ours
    finally:
        ours.close()
        process.join(10)
        if process.is_alive():
            process.kill()
            process.join()


def say_ready(pipe: Connection) -> None:
    pipe.send(_READY)
