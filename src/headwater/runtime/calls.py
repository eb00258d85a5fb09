"""Calls under way: telling what a signal handler, a finaliser or a logging handler does in the midst of a call from what comes after it."""

from __future__ import annotations

import sys
from types import FrameType


def this_call() -> FrameType:
    """The caller's own frame, to be asked about later. Whoever keeps it keeps all the caller's variables: let go of it at the end."""
    return sys._getframe(1)


def is_under_way(call: FrameType | None) -> bool:
    """Whether this thread is still in that call, and so runs in the midst of it. One that a Ctrl-C ended is not."""
    frame: FrameType | None = sys._getframe(1)
    while call is not None and frame is not None:
        if frame is call:
            return True
        frame = frame.f_back
    return False
