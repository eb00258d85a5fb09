"""Memory that this process has and does not use, given back to the system.

Events that are given one by one are a million small objects at a time. The C library gives back what lies at the end of its heap, where
one that stays is enough to keep 80 MB; Arrow's allocator keeps what it freed for each thread, also for those that do nothing any more.
"""

from __future__ import annotations

import ctypes
import time

import pyarrow as pa

from headwater.model.limits import MIB

#: Less than this is not worth the time.
_BURST_BYTES = 16 * MIB
_PAUSE_SECONDS = 1.0
_AGAIN_SECONDS = 10.0


def release_unused() -> None:
    """Give back what Arrow's allocator keeps for this thread."""
    pa.default_memory_pool().release_unused()


def give_back() -> None:
    """Give back all that is free. It takes some milliseconds, in which others wait for memory: not to be done often."""
    release_unused()
    if _trim is not None:
        _trim(0)


class Burst:
    """Events that were given one by one, and freed: their memory is kept for the next ones, and given back when the burst is over.

    It is over when batches follow, or nothing does.
    """

    def __init__(self) -> None:
        self._freed_bytes = 0
        self._gave_back_at = float("-inf")

    @property
    def pause_seconds(self) -> float | None:
        """After so long without events it is over. None: there is nothing to give back."""
        return _PAUSE_SECONDS if self._freed_bytes > _BURST_BYTES else None

    def note(self, freed_bytes: int) -> None:
        self._freed_bytes += freed_bytes

    def end(self) -> None:
        now = time.monotonic()
        if self._freed_bytes > _BURST_BYTES and now - self._gave_back_at > _AGAIN_SECONDS:
            self._freed_bytes, self._gave_back_at = 0, now
            give_back()


# Of glibc; others have none, or need none.
_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
