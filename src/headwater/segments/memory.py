"""Memory that this process has and does not use, given back to the system.

Events that are given one by one are a million small objects at a time. The C library gives back what lies at the end of its heap, where
one that stays is enough to keep 80 MB; Arrow's allocator keeps what it freed for each thread, also for those that do nothing any more.
"""

from __future__ import annotations

import ctypes

import pyarrow as pa


def release_unused() -> None:
    """Give back what Arrow's allocator keeps for this thread."""
    pa.default_memory_pool().release_unused()


def give_back() -> None:
    """Give back all that is free. It takes some milliseconds, in which others wait for memory: not to be done often."""
    release_unused()
    if _trim is not None:
        _trim(0)


# Of glibc; others have none, or need none.
_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
