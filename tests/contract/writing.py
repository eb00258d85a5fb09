"""What the tests of writing share: values to write, and catalogs that take none for a while."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import pyarrow as pa

import headwater as hw

Place = hw.Cut | datetime | str | None
_numbers = itertools.count()
#: For anything that should take milliseconds. A busy machine is not a bug.
WAIT_SECONDS = 60.0


def values(stream: hw.Stream, start: Place = None, end: Place = None) -> list[Any]:
    return [event.value for event in stream.read(start, end)]


def write_some(stream: hw.Stream, count: int) -> None:
    """Add events, each different from all others, with keys of their own."""
    with stream.writer() as writer:
        for _ in range(count):
            text = f"e{next(_numbers)}"
            writer.write(text, key=text)


def batch(*rows: bytes) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(rows, pa.binary())], names=["value"])


@contextmanager
def blocked(store: hw.Store) -> Iterator[Callable[[], None]]:
    """Hold the catalog's lock, as another process may: nothing can be committed. The block's value lets go of it."""
    held, let_go = threading.Event(), threading.Event()

    def hold(tx: Any) -> None:
        if store._catalog is not None:
            tx.run("LOCK TABLE session IN EXCLUSIVE MODE")  # on SQLite to be in a transaction is to hold the lock
        held.set()
        assert let_go.wait(WAIT_SECONDS)

    database = store._engine.database
    with ThreadPoolExecutor(1) as pool:
        holder = pool.submit(database.write, hold)
        assert held.wait(WAIT_SECONDS)
        try:
            yield let_go.set
        finally:
            let_go.set()
            holder.result(WAIT_SECONDS)
