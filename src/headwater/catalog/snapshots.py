"""Snapshots: the states of entities as of a sequence. Those made by hand stay; of the others the last few."""

from __future__ import annotations

from headwater.catalog.database import Tx
from headwater.catalog.journals import check_ready
from headwater.catalog.operations import Right, operation
from headwater.errors import InvalidRequestError
from headwater.runtime import failpoints

#: Snapshots of one entity that nobody made by hand.
KEPT_SNAPSHOTS = 3


@operation("commit", repeatable=True)
def put_snapshot(tx: Tx, stream: int, id: str, sequence: int, version: int, state: str, *, by_hand: bool = True) -> None:
    """Keep an entity's state as of a sequence, in place of an earlier one of that sequence."""
    # The journal's row is held, so that the entity is not deleted at this moment: its snapshots go with it.
    tx.run("SELECT state FROM journal WHERE stream = ? FOR SHARE", (stream,))
    check_ready(tx, stream)
    rows = tx.run("SELECT sequence, deleted FROM entity WHERE stream = ? AND id = ?", (stream, id))
    last, deleted = rows[0] if rows else (0, 0)
    if sequence > last or last < deleted:
        is_at = "was deleted" if last < deleted else f"is at sequence {last}"
        raise InvalidRequestError(f"{id!r} {is_at}: there is no sequence {sequence} to take a snapshot of")
    tx.run(
        "INSERT INTO snapshot (stream, id, sequence, version, by_hand, state) VALUES (?, ?, ?, ?, ?, ?) "
        "ON CONFLICT (stream, id, sequence) DO UPDATE SET version = excluded.version, by_hand = excluded.by_hand, state = excluded.state",
        (stream, id, sequence, version, int(by_hand), state),
    )
    if not by_hand:
        tx.run(
            "DELETE FROM snapshot WHERE stream = ? AND id = ? AND by_hand = 0 AND sequence < (SELECT min(sequence) FROM "
            "(SELECT sequence FROM snapshot WHERE stream = ? AND id = ? AND by_hand = 0 ORDER BY sequence DESC LIMIT ?) AS kept)",
            (stream, id, stream, id, KEPT_SNAPSHOTS),
        )
    failpoints.reach("snapshot.applied")


@operation("statement", right=Right("read", "stream"))
def find_snapshot(tx: Tx, stream: int, id: str, until: int) -> tuple[int, int, str] | None:
    """(sequence, version, state) of an entity's newest snapshot up to a sequence."""
    rows = tx.run(
        "SELECT sequence, version, state FROM snapshot WHERE stream = ? AND id = ? AND sequence <= ? ORDER BY sequence DESC LIMIT 1",
        (stream, id, until),
    )
    return (rows[0][0], rows[0][1], rows[0][2]) if rows else None


@operation("statement", right=Right("read", "stream"))
def list_snapshots(tx: Tx, stream: int, id: str) -> list[tuple[int, int, int, int]]:
    """(sequence, version, by hand, bytes) of an entity's snapshots, in order."""
    sql = "SELECT sequence, version, by_hand, length(state) FROM snapshot WHERE stream = ? AND id = ? ORDER BY sequence"
    return [(row[0], row[1], row[2], row[3]) for row in tx.run(sql, (stream, id))]


@operation("commit", repeatable=True)
def delete_snapshots(tx: Tx, stream: int, id: str, until: int) -> None:
    """Forget an entity's snapshots up to a sequence."""
    tx.run("DELETE FROM snapshot WHERE stream = ? AND id = ? AND sequence <= ?", (stream, id, until))
