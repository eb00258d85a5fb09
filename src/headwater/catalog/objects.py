"""Stored objects that nothing needs any more.

An object is named by extents, and only the one who made it may name it again: its session while that is live, its transaction while
that is open. So what no extent names, and nobody may name, is garbage for ever. Age decides nothing of that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from headwater.catalog.database import Tx
from headwater.catalog.leases import hold
from headwater.catalog.operations import operation
from headwater.model.limits import KEPT_SECONDS, MARKER_SECONDS, SLICE_ROWS

_KEPT_US = int(KEPT_SECONDS * 1_000_000)
_MARKER_US = int(MARKER_SECONDS * 1_000_000)
#: Rows of each kind that `prune` deletes under one lock.
_PRUNED_ROWS = SLICE_ROWS // 4


class ObjectRow(NamedTuple):
    id: int
    key: str
    dead_at: int | None = None


class Owners(NamedTuple):
    """Who may still name objects: live sessions, each with the first file of its journal that it may still name, and open transactions."""

    sessions: Mapping[int, int]
    transactions: frozenset[str]


def list_unnamed(tx: Tx) -> list[ObjectRow]:
    """The objects that no extent names, in one consistent look with `get_owners`."""
    # Tiering keeps blocks few and chunks large, so both lists are short; an index would cost every append.
    named = {row[0] for row in tx.run("SELECT DISTINCT object FROM extent WHERE object IS NOT NULL")}
    named |= {row[0] for row in tx.run("SELECT DISTINCT object FROM txn_extent WHERE object IS NOT NULL")}
    return [ObjectRow(*row) for row in tx.run("SELECT id, key, dead_at FROM object ORDER BY id") if row[0] not in named]


def get_owners(tx: Tx) -> Owners:
    sessions = {row[0]: row[1] for row in tx.run("SELECT id, first_file FROM session WHERE live = 1")}
    open_ones = frozenset(row[0] for row in tx.run("SELECT id FROM txn WHERE state IN ('open', 'committing')"))
    return Owners(sessions, open_ones)


@operation("read")
def find_known(tx: Tx, ids: Sequence[int], staged: Sequence[str]) -> frozenset[str]:
    """Return the keys of the objects that have a row, of one page of a listing: sessions' objects by id, staged objects by key."""
    # Only the rows of staged objects, whose ids are negative, are indexed by key: an index of all rows would slow every append.
    known: set[str] = set()
    for condition, values in (("id", ids), ("id < 0 AND key", staged)):
        if values:
            sql = f"SELECT key FROM object WHERE {condition} IN ({', '.join('?' * len(values))})"
            known.update(row[0] for row in tx.run(sql, values))
    return frozenset(known)


@operation("commit", repeatable=True)
def note_dead(tx: Tx, session: int, ids: list[int]) -> None:
    """Note that these are garbage, from now on."""
    hold(tx, session)
    tx.defer("UPDATE object SET dead_at = now_us() WHERE id = ? AND dead_at IS NULL", [(id,) for id in ids])


@operation("commit", repeatable=True)
def forget(tx: Tx, session: int, ids: list[int]) -> None:
    """Delete the rows of objects that are gone."""
    hold(tx, session)
    tx.defer("DELETE FROM object WHERE id = ?", [(id,) for id in ids])


@operation("commit", repeatable=True)
def prune(tx: Tx, session: int) -> int:
    """Forget some of the transactions and sessions that ended KEPT_SECONDS ago, and of the markers not committed for MARKER_SECONDS.

    Returns how many rows went, 0 at the end.
    """
    hold(tx, session)
    gone = 0
    for table, key, condition, age in (
        # By the index on `expires_at`, which is about when it ended: those that stay are not looked at.
        ("txn", "id", "state IN ('committed', 'aborted') AND expires_at < now_us() - ? AND ended_at < now_us() - ?", _KEPT_US),
        ("session", "id", "live = 0 AND renewed_at < now_us() - ?", _KEPT_US),
        ("marker", "owner", "committed_at > 0 AND committed_at < now_us() - ?", _MARKER_US),
    ):
        ages = [age] * condition.count("?")
        # The condition twice, for PostgreSQL: a marker may be committed again between the look and the deletion.
        sql = f"DELETE FROM {table} WHERE {key} IN (SELECT {key} FROM {table} WHERE {condition} LIMIT ?) AND {condition} RETURNING {key}"
        gone += len(tx.run(sql, (*ages, _PRUNED_ROWS, *ages)))
    return gone


@operation("commit", repeatable=True)
def bury(tx: Tx, session: int, transactions: Sequence[str]) -> None:
    """Enter transactions that were never begun as aborted, so that they never will be committed."""
    hold(tx, session)
    tx.defer(
        "INSERT INTO txn (id, state, begun_at, lease, expires_at, ended_at, next_ordinal, result) "
        "VALUES (?, 'aborted', now_us(), 0, now_us(), now_us(), 0, ?) ON CONFLICT (id) DO NOTHING",
        [(id, json.dumps({"reason": "nothing was heard of it for too long", "error": None})) for id in transactions],
    )
