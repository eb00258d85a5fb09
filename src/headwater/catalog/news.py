"""News: which segments a flush went to, told along with the notice of its commit, so that a follower of many looks there first.

They may be lost, so followers look at all of them now and then. They don't say what was written: a notice can be heard by anyone who may
connect to the database.
"""

from __future__ import annotations

from collections.abc import Mapping

from headwater.catalog.flushes import Flush


def of_flush(store: str, flush: Flush) -> Mapping[str, str]:
    """For each place that a flush goes to, what is new there."""
    which = f"{flush.session}.{flush.number}"
    return {place(store, append.stream, append.segment): which for part in flush.parts for append in part.appends}


def place(store: str, stream: int, segment: int) -> str:
    # Two stores may share a database, and with it the channel for their notices.
    return f"{store}/{stream}/{segment}"
