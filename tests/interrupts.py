"""A Ctrl-C at every moment at which one can come, one after the other."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any

#: The interpreter looks for signals when a function begins, and when a call returned.
_MOMENTS = ("call", "return", "c_return")


def interrupt_everywhere(call: Callable[[], Any]) -> int:
    """Make the call again and again, with a Ctrl-C at its first moment, at its second, and so on; returns how many it has."""
    at = 0
    while interrupt(call, at):
        at += 1
    return at


def interrupt(call: Callable[[], Any], at: int, *, moments: Collection[str] = _MOMENTS, not_in: str | None = None) -> bool:
    """Make the call with a Ctrl-C at one of its moments, those in one file left out; False if it has not as many."""
    seen = 0

    def look(frame: FrameType, event: str, _: object) -> None:
        nonlocal seen
        if event in moments and frame.f_code.co_filename != not_in:
            seen += 1
            if seen == at + 1:
                sys.setprofile(None)
                raise KeyboardInterrupt

    # hypothesis has a callback for the collector: an interrupt in there is lost, and spoken of.
    gc.disable()
    sys.setprofile(look)
    try:
        call()
    except (KeyboardInterrupt, RuntimeError):  # `Condition.wait` may lose its own lock to an interrupt, and says so
        pass
    finally:
        sys.setprofile(None)
        gc.enable()
    # Not whether it was raised: what comes while an object is deleted is lost in Python.
    return seen > at


def count_moments(call: Callable[[], Any]) -> int:
    count = 0

    def look(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        count += event in _MOMENTS

    gc.disable()
    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def ends(call: Callable[[], Any], timeout: float = 5.0) -> bool:
    """Whether another thread can do it."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(timeout)
    return not thread.is_alive()
