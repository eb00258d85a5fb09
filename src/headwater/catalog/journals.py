"""Journals: whether a journal's index is whole, and the deletion of the index when its stream is gone.

See `rebuilds` for how an index is made anew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from headwater.catalog.database import Tx
from headwater.catalog.operations import Right, operation
from headwater.errors import NotFoundError, UnavailableError
from headwater.model.limits import SLICE_ROWS

READY, BUILDING, DEAD = "ready", "building", "dead"

#: The tables of the index, those with many rows first, with what tells their rows apart within a stream.
_TABLES = {
    "word_page": "word, segment, first",
    "entity_page": "id, first",
    "word": "kind, word, segment",
    "entity": "id",
    "snapshot": "id, sequence",
}
_IN_SIZES = (1, 4, 16, 64, 256)


def in_lists(values: Sequence[Any]) -> Iterator[tuple[str, list[Any]]]:
    """Values as IN lists: (marks, values) of each. There are few sizes of them, so that prepared statements are used again."""
    for start in range(0, len(values), _IN_SIZES[-1]):
        some = list(values[start : start + _IN_SIZES[-1]])
        size = next(size for size in _IN_SIZES if size >= len(some))
        yield ", ".join("?" * size), some + [some[-1]] * (size - len(some))


def insert_journal(tx: Tx, stream: int) -> None:
    tx.run("INSERT INTO journal (stream, state, deletions, builds) VALUES (?, ?, 0, 0)", (stream, READY))


def bury_journal(tx: Tx, stream: int) -> None:
    """Leave the index of a deleted stream to `delete_dead`."""
    tx.run("UPDATE journal SET state = ? WHERE stream = ?", (DEAD, stream))


@operation("statement", right=Right("read", "stream"))
def find_state(tx: Tx, stream: int) -> str | None:
    """Whether the index is whole; None if there is no such journal."""
    rows = tx.run("SELECT state FROM journal WHERE stream = ?", (stream,))
    return rows[0][0] if rows else None


def check_ready(tx: Tx, stream: int) -> None:
    """UnavailableError while the index is being rebuilt. Under a segment's lock or the journal's, it stays ready."""
    state = find_state(tx, stream)
    if state is None or state == DEAD:
        raise NotFoundError("this journal was deleted")
    if state == BUILDING:
        raise UnavailableError("the index of this journal is being rebuilt by upkeep: repeat the call")


@operation("commit", repeatable=True)
def delete_dead(tx: Tx) -> int:
    """Delete a slice of the indexes of deleted streams; returns how many rows went."""
    for (stream,) in tx.run("SELECT stream FROM journal WHERE state = ? ORDER BY stream LIMIT 1 FOR UPDATE", (DEAD,)):
        for table in _TABLES:
            # A rebuild keeps old rows under the negative id.
            gone = delete_slice(tx, table, stream) or delete_slice(tx, table, -stream)
            if gone:
                return gone
        tx.run("DELETE FROM journal WHERE stream = ?", (stream,))
        return 1
    return 0


def delete_slice(tx: Tx, table: str, stream: int, condition: str = "TRUE") -> int:
    """Delete some of a stream's rows of an index table; returns how many."""
    columns = _TABLES[table]
    some = f"SELECT {columns} FROM {table} WHERE stream = ? AND {condition} ORDER BY {columns} LIMIT {SLICE_ROWS}"
    return len(tx.run(f"DELETE FROM {table} WHERE stream = ? AND ({columns}) IN ({some}) RETURNING stream", (stream, stream)))
