"""Truncation: what lies before a cut becomes unreadable at once. Its rows are deleted after that, in slices that hold no lock for long."""

from __future__ import annotations

from headwater.catalog import extents, journals, rebuilds, segments, streams
from headwater.catalog.database import Tx
from headwater.catalog.operations import Right, operation
from headwater.errors import InvalidRequestError, NotFoundError
from headwater.model.cuts import Cut
from headwater.runtime import failpoints
from headwater.segments.engine import Engine
from headwater.segments.lanes import StreamRef
from headwater.streams.cuts import check_truncation
from headwater.streams.lifecycle import bare_ref


def truncate(engine: Engine, stream: StreamRef, cut: Cut, *, force: bool = False) -> None:
    """Make everything before the cut unreadable. A cut before the head changes nothing. Of a journal only with `force`."""
    try:
        engine.run(truncate_stream, engine.store_id, stream.id, cut, force=force)
    except NotFoundError:
        raise NotFoundError(f"stream {stream.name} was deleted") from None
    failpoints.reach("truncate.committed")
    free_rows(engine)


@operation("commit", repeatable=True, right=Right("manage", "stream"))
def truncate_stream(tx: Tx, store_id: str, stream: int, cut: Cut, *, force: bool = False) -> bool:
    """Make everything of a stream before the cut unreadable; False if the head is there or past it already.

    Of a journal, which needs `force`, the index is rebuilt then.
    """
    row = streams.lock_stream(tx, stream)
    if row.kind == "journal" and not force:
        raise InvalidRequestError(
            f"{row.full_name} is a journal, whose entities would lose their first events: delete_to and delete are for that, "
            "or truncate with force=True"
        )
    return truncate_locked(tx, store_id, row, cut)


def truncate_locked(tx: Tx, store_id: str, row: streams.StreamRow, cut: Cut) -> bool:
    """Like `truncate_stream`, of a stream that the caller has locked.

    A reader group's reset looks for the head under this lock too: it comes either before or after.
    """
    heads, dropped = check_truncation(store_id, bare_ref(row), segments.list_segments(tx, row.id), cut)
    if heads or dropped:
        if row.kind == "journal":
            rebuilds.begin(tx, row.id, "sequence")
        segments.advance_heads(tx, row.id, heads, dropped)
    return bool(heads or dropped)


def free_rows(engine: Engine) -> int:
    """Delete the extents of what was truncated or deleted, and that no fork or tag needs; returns how many rows went."""
    gone = 0
    for step in (extents.delete_unneeded, extents.delete_dead_extents, journals.delete_dead):
        while found := engine.run(step):
            gone += found
            failpoints.reach("truncate.sliced")
    return gone
