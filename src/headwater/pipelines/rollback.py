"""Rolling an output back as part of a restore's one commit: a stream to a cut, a table to a version."""

from __future__ import annotations

from headwater import Cut, Store, Transaction


def add_roll_back(tx: Transaction, store: Store, target: str, cut: Cut, keep_as: str) -> None:
    """Let an output end at a cut again, at the commit of `tx`. What lies past it in a stream stays readable as `keep_as`."""
    if store.stream(target).kind == "table":
        # A table has one segment, and its version is that segment's number.
        tx.roll_back(target, sum(cut.streams[target].segments.values()))
    elif store.stream(target).ranges(cut):
        tx.roll_back(target, cut, keep_as=keep_as)
