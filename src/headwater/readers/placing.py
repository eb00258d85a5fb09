"""Operations that put a reader group at a place: when the group is made, and when it is reset."""

from __future__ import annotations

from collections.abc import Sequence

from headwater.catalog import groups, streams
from headwater.catalog.database import Tx
from headwater.catalog.groups import Ends, GroupRow
from headwater.catalog.operations import operation
from headwater.errors import InvalidRequestError
from headwater.model.names import parse_word
from headwater.streams import cuts
from headwater.streams.cuts import Place


@operation("commit", repeatable=True)
def create_group(
    tx: Tx, store_id: str, name: str, starts: Sequence[tuple[int, Place]], ends: Sequence[tuple[int, Place]] | None
) -> GroupRow | None:
    """The new group, at a place in each of these streams; None if the name is taken. No place is a time.

    A stream that `ends` lacks has no end.
    """
    parse_word(name, "reader group")
    rows, positions = _locked_positions(tx, store_id, starts)
    for row in rows:
        check_readable(row.full_name, row.kind)
    stops = _locked_positions(tx, store_id, ends)[1] if ends is not None else None
    return groups.create_group(tx, name, {row.id: row.full_name for row in rows}, positions, stops)


def check_readable(name: str, kind: str) -> None:
    """Refuse a stream of bytes. All other kinds hold events."""
    if kind == "bytes":
        raise InvalidRequestError(f"{name} is a stream of bytes: a reader group reads events; use byte_reader()")


@operation("commit")
def reset_group(tx: Tx, store_id: str, group: int, places: Sequence[tuple[int, Place]]) -> None:
    """Put the group at a place in each of its streams. No place is a time.

    Its readers go on from there. What they had not committed is lost to them.
    """
    _, positions = _locked_positions(tx, store_id, places)
    groups.reset_group(tx, group, positions)


def _locked_positions(tx: Tx, store_id: str, places: Sequence[tuple[int, Place]]) -> tuple[list[streams.StreamRow], Ends]:
    """The streams, and the places in them by number. They are locked, so that nothing is truncated before the group is there.

    Retention by what groups have read is decided before, and seen here, or sees where the group is.
    """
    ordered = sorted(places, key=lambda place: place[0])
    rows = [streams.lock_stream(tx, stream) for stream, _ in ordered]
    return rows, {stream: cuts.numbers_in(tx, store_id, stream, place) for stream, place in ordered}
