"""Reading ahead: an iterator that runs in a thread of its own, so that parsing and storing happen at the same time."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")

_AHEAD = 3


class _End:
    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def prefetch(items: Generator[T, None, None]) -> Generator[T, None, None]:
    """The same items, and the same error at the same place. Leaving it early ends the thread after the item it is at."""
    ready: queue.SimpleQueue[T | _End] = queue.SimpleQueue()
    # For each that may be read ahead. Not a bounded queue: a Ctrl-C in its Python code would leave it locked for both threads.
    room: queue.SimpleQueue[None] = queue.SimpleQueue()
    for _ in range(_AHEAD):
        room.put(None)
    is_left = False

    def work() -> None:
        error: BaseException | None = None
        try:
            for item in items:
                room.get()
                if is_left:
                    break
                ready.put(item)
        except BaseException as found:  # it is raised where the item would have been
            error = found
        finally:
            items.close()
            ready.put(_End(error))

    thread = threading.Thread(target=work, name="headwater-ingest-reader", daemon=True)
    thread.start()
    try:
        while True:
            item = ready.get()
            if isinstance(item, _End):
                if item.error is not None:
                    raise item.error
                return
            room.put(None)
            yield item
    finally:
        is_left = True
        room.put(None)
        thread.join()
