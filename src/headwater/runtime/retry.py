"""Repeating what may be repeated: exponential waits with full jitter, up to a deadline."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def retry(
    call: Callable[[], T],
    *,
    retryable: Callable[[Exception], bool],
    deadline_seconds: float,
    least_repeats: int = 0,
    first_wait_seconds: float = 0.02,
    longest_wait_seconds: float = 2.0,
    sleep: Callable[[float], None] = time.sleep,
    random: Callable[[], float] = random.random,
    monotonic: Callable[[], float] = time.monotonic,
) -> T:
    """Call until it succeeds, fails in a way that is not `retryable`, or the deadline passes (then its last error is raised).

    So many repetitions come before the deadline counts: a call that hangs may take longer than it by itself.
    """
    deadline = monotonic() + deadline_seconds
    repeats = 0
    longest = first_wait_seconds
    while True:
        try:
            return call()
        except Exception as error:
            wait = longest * random()
            if not retryable(error) or (repeats >= least_repeats and monotonic() + wait > deadline):
                raise
        sleep(wait)
        repeats += 1
        longest = min(longest * 2, longest_wait_seconds)
