"""Truncation: what lies before a cut becomes unreadable at once; its rows go after that, in slices that hold no lock for long."""

from __future__ import annotations

from collections.abc import Callable

from headwater.catalog import extents, segments, streams
from headwater.catalog.database import Tx
from headwater.errors import NotFoundError
from headwater.model.cuts import Cut
from headwater.model.limits import SLICE_ROWS
from headwater.runtime import failpoints
from headwater.segments.engine import Engine
from headwater.segments.lanes import StreamRef
from headwater.streams.cuts import check_truncation


def truncate(engine: Engine, stream: StreamRef, cut: Cut | Callable[[Tx], Cut | None]) -> None:
    """Make everything before the cut unreadable. A cut before the head changes nothing.

    It may be decided under the stream's lock: so that who looks for the head under it too, as a group's reset does, comes before or after.
    """

    def work(tx: Tx) -> None:
        streams.lock_stream(tx, stream.id)
        found = cut if isinstance(cut, Cut) else cut(tx)
        if found is None:
            return
        rows = segments.list_segments(tx, stream.id)
        heads, dropped = check_truncation(engine.store_id, stream, rows, found)
        if heads or dropped:
            segments.advance_heads(tx, stream.id, heads, dropped)

    try:
        engine.write_once(work)
    except NotFoundError:
        raise NotFoundError(f"stream {stream.name} was deleted") from None
    failpoints.reach("truncate.committed")
    free_rows(engine)


def free_rows(engine: Engine) -> int:
    """Delete the extents of what was truncated or deleted, and that no fork or tag needs; returns how many rows went."""
    gone = 0
    for step in (extents.delete_unneeded, extents.delete_dead_extents):
        while found := engine.write_once(step, SLICE_ROWS):
            gone += found
            failpoints.reach("truncate.sliced")
    return gone
