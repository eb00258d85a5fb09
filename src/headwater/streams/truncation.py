"""Truncation: what lies before a cut becomes unreadable at once. Its rows are deleted after that, in slices that hold no lock for long."""

from __future__ import annotations

from headwater.catalog import extents, journals, keeps, rebuilds, segments, streams
from headwater.catalog.database import Tx
from headwater.catalog.operations import Operation, Right, operation
from headwater.errors import ConflictError, InvalidRequestError, NotFoundError
from headwater.model.cuts import Cut
from headwater.model.segmentmap import SegmentMap
from headwater.runtime import failpoints
from headwater.segments.engine import Engine
from headwater.segments.lanes import StreamRef
from headwater.streams.cuts import resolve_cut
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


def truncate_locked(tx: Tx, store_id: str, row: streams.StreamRow, cut: Cut, *, stops_at_keeps: bool = False) -> bool:
    """Like `truncate_stream`, of a stream that the caller has locked.

    A cut past a keep is a ConflictError, or, with `stops_at_keeps`, moved back to the keep. A reader group's reset looks for the head under
    this lock too: it comes either before or after.
    """
    listed, floors = tx.run_all([segments.listed(row.id), keeps.floors_of(row.id)])
    rows = [segments.to_row(found) for found in listed]
    numbers = resolve_cut(tx, store_id, bare_ref(row), rows, cut)
    stream_map = SegmentMap(rows)
    # Segments of the cut that are gone lie before the head already.
    numbers = {segment: number for segment, number in numbers.items() if segment in stream_map.segments}
    for floor in keeps.to_floors(floors):
        if not stops_at_keeps and stream_map.passes(numbers, floor.numbers):
            raise ConflictError(f"the keep {floor.name!r} keeps some of what this truncates of {row.full_name}: move it, or unkeep it")
        # Also where no event lies between the two: the segments that the keep names stay.
        numbers = stream_map.earlier(numbers, floor.numbers)
    heads = {segment: number for segment, number in numbers.items() if number > stream_map.segments[segment].head}
    dropped = [segment.number for segment in stream_map.before(numbers)]
    if heads or dropped:
        if row.kind == "journal":
            rebuilds.begin(tx, row.id, "sequence")
        segments.advance_heads(tx, row.id, heads, dropped)
    return bool(heads or dropped)


def free_rows(engine: Engine) -> int:
    """Delete the extents of what was truncated or deleted, and that no fork or tag needs; returns how many rows went."""
    return _free(engine, extents.delete_unneeded, extents.delete_dead_extents)


def free_deleted(engine: Engine) -> int:
    """Like `free_rows`, with the indexes of deleted journals."""
    return _free(engine, extents.delete_unneeded, extents.delete_dead_extents, journals.delete_dead)


def _free(engine: Engine, *steps: Operation[[], int]) -> int:
    gone = 0
    for step in steps:
        while found := engine.run(step):
            gone += found
            failpoints.reach("truncate.sliced")
    return gone
