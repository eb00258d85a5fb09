"""Reading ahead: an iterator that runs in a thread of its own, so that parsing and storing happen at the same time."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")

_AHEAD = 3
_LOOK_SECONDS = 0.1


class _End:
    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def prefetch(items: Generator[T, None, None]) -> Generator[T, None, None]:
    """The same items, and the same error at the same place. Leaving it early ends the thread, within a look."""
    ready: queue.Queue[T | _End] = queue.Queue(_AHEAD)
    is_left = threading.Event()

    def put(item: T | _End) -> None:
        while not is_left.is_set():
            try:
                return ready.put(item, timeout=_LOOK_SECONDS)
            except queue.Full:
                continue

    def work() -> None:
        error: BaseException | None = None
        try:
            for item in items:
                put(item)
                if is_left.is_set():
                    break
        except BaseException as found:  # it is raised where the item would have been
            error = found
        finally:
            items.close()
            put(_End(error))

    thread = threading.Thread(target=work, name="headwater-ingest-reader", daemon=True)
    thread.start()
    try:
        while True:
            item = ready.get()
            if isinstance(item, _End):
                if item.error is not None:
                    raise item.error
                return
            yield item
    finally:
        is_left.set()
        thread.join()
