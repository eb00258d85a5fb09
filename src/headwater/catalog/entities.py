"""Entities: where each one of a journal is, which of its events are deleted, and where its events are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from headwater.catalog.database import Tx
from headwater.catalog.journals import check_ready
from headwater.catalog.operations import Right, operation
from headwater.catalog.tables import behind
from headwater.errors import InvalidRequestError, NotFoundError
from headwater.runtime import failpoints

_SHIFT = 1 << 63


class EntityRow(NamedTuple):
    """An entity as the catalog has it; at sequence 0 if it is unknown. `state` is the journal's."""

    state: str
    sequence: int
    low: int
    deleted: int
    segment: int
    number: int
    paged: int
    recent: str
    snapshot: int | None


_COLUMNS = "e.sequence, e.low, e.deleted, e.segment, e.number, e.paged, e.recent"
_UNKNOWN = (0, 0, 0, 0, 0, 0, "")


@operation("statement", right=Right("read", "stream"))
def get_entity(tx: Tx, stream: int, id: str) -> EntityRow:
    """The entity of an id, at sequence 0 if there is none. NotFoundError if the journal is gone."""
    rows = tx.run(
        f"SELECT j.state, (SELECT max(sequence) FROM snapshot WHERE stream = j.stream AND id = ?), {_COLUMNS} "
        "FROM journal j LEFT JOIN entity e ON e.stream = j.stream AND e.id = ? WHERE j.stream = ?",
        (id, id, stream),
    )
    if not rows or rows[0][0] == "dead":
        raise NotFoundError("this journal was deleted")
    state, snapshot, *found = rows[0]
    return EntityRow(*(state, *(found if found[0] is not None else _UNKNOWN), snapshot))


@operation("statement", right=Right("read", "stream"))
def list_pages(tx: Tx, stream: int, id: str, first: int, end: int, limit: int, *, reverse: bool = False) -> list[tuple[int, str]]:
    """(first sequence, numbers) of the pages that hold some of an entity's events [first, end), from either side; at most `limit`."""
    order = "DESC" if reverse else "ASC"
    return [
        (row[0], row[1])
        for row in tx.run(
            "SELECT first, numbers FROM entity_page WHERE stream = ? AND id = ? AND first >= "
            "COALESCE((SELECT max(first) FROM entity_page WHERE stream = ? AND id = ? AND first <= ?), 0) AND first < ? "
            f"ORDER BY first {order} LIMIT ?",
            (stream, id, stream, id, first, end, limit),
        )
    ]


class ListedId(NamedTuple):
    """An entity in a list, and where its last event is."""

    id: str
    segment: int
    number: int


@operation("statement", right=Right("read", "stream"))
def list_ids(tx: Tx, stream: int, prefix: str, after: str | None, limit: int) -> list[ListedId]:
    """Entities that are not deleted, whose id begins with `prefix`, in the order of their ids' bytes, after `after`."""
    sql = "SELECT id, segment, number FROM entity WHERE stream = ? AND sequence >= deleted AND sequence > 0"
    values: list[int | str] = [stream]
    if prefix:
        sql += " AND id >= ?"
        values.append(prefix)
        bound = behind(prefix)
        if bound is not None:
            sql += " AND id < ?"
            values.append(bound)
    if after is not None:
        sql += " AND id > ?"
        values.append(after)
    return [ListedId(*row) for row in tx.run(f"{sql} ORDER BY id LIMIT ?", (*values, limit))]


def count_entities(tx: Tx, streams: Sequence[int]) -> dict[int, int]:
    """The number of entities that are not deleted, of journals that have any."""
    marks = ", ".join("?" * len(streams))
    sql = f"SELECT stream, count(*) FROM entity WHERE stream IN ({marks}) AND deleted = 0 AND sequence > 0 GROUP BY stream"
    return {stream: int(count) for stream, count in tx.run(sql, streams)}


class Hidden(NamedTuple):
    """An entity with deleted events: those below `low`. `deleted` is the first sequence after its last deletion as a whole, or 0."""

    id: str
    low: int
    deleted: int
    deletion: int


@operation("statement", right=Right("read", "stream"))
def list_hidden(tx: Tx, stream: int, after: int) -> list[Hidden]:
    """The entities with deleted events, of the deletions after this one."""
    # A rebuild of the index keeps them under the negative id for a while.
    sql = "SELECT id, low, deleted, deletion FROM entity WHERE stream IN (?, ?) AND deletion > ? ORDER BY deletion"
    return [Hidden(*row) for row in tx.run(sql, (stream, -stream, after))]


@operation("commit", repeatable=True)
def delete_events(tx: Tx, stream: int, id: str, key: int, sequence: int | None) -> None:
    """Hide an entity's events up to a sequence; None: delete the entity, with its snapshots. Again, it changes nothing.

    `key` is the id's place in the routing space: whoever persists the entity holds that segment.
    """
    # The stream first, as everywhere: while it is held, no other segment takes this one's place.
    if not tx.run("SELECT id FROM stream WHERE id = ? FOR SHARE", (stream,)):
        raise NotFoundError("this journal was deleted")
    tx.run(
        "SELECT number FROM segment WHERE stream = ? AND first_key <= ? AND last_key >= ? AND sealed_epoch IS NULL FOR UPDATE",
        (stream, key - _SHIFT, key - _SHIFT),
    )
    rows = tx.run("SELECT sequence, low, deleted FROM entity WHERE stream = ? AND id = ?", (stream, id))
    check_ready(tx, stream)
    last, low, deleted = rows[0] if rows else (0, 0, 0)
    if sequence is not None and sequence > last:
        raise InvalidRequestError(f"{id!r} is at sequence {last}: there is no sequence {sequence} to delete to")
    wanted = max(low, (last if sequence is None else sequence) + 1)
    if rows and (wanted > low or (sequence is None and deleted <= last)):
        [(deletion,)] = tx.run("UPDATE journal SET deletions = deletions + 1 WHERE stream = ? RETURNING deletions", (stream,))
        tx.run(
            "UPDATE entity SET low = ?, deleted = ?, deletion = ? WHERE stream = ? AND id = ?",
            (wanted, last + 1 if sequence is None else deleted, deletion, stream, id),
        )
    if sequence is None:
        tx.run("DELETE FROM snapshot WHERE stream = ? AND id = ?", (stream, id))
    else:
        tx.run("DELETE FROM snapshot WHERE stream = ? AND id = ? AND sequence < ?", (stream, id, sequence))
    failpoints.reach("entity.deleted")
