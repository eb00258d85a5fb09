"""Tables: the present entry of each key, kept in step with the stream of changes it comes from.

Every write appends to the table's one segment first, whose lock puts the writers of a table in order; so a look at an entry here sees
what the next commit will find.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from headwater.catalog.database import Tx
from headwater.catalog.flushes import Append, enter_blocks
from headwater.errors import ConditionFailedError, NotFoundError, SealedError

#: As an expected version: only if the key is missing.
ABSENT = 0


class EntryChange(NamedTuple):
    """A put or removal of a key, with the version it makes. `kind` "reader" is a reader's positions on their way with it."""

    kind: str
    target: int
    name: str
    expected: int | None
    data: bytes | None
    version: int


def check_entries(tx: Tx, changes: Sequence[EntryChange]) -> None:
    """ConditionFailedError unless each change finds the version it expects, seeing the changes before it."""
    if all(change.expected is None for change in changes):
        return
    seen: dict[tuple[int, str], int] = {}
    for change in changes:
        key = change.target, change.name
        if change.expected is not None:
            found = seen[key] if key in seen else _version(tx, *key)
            if found != change.expected:
                raise ConditionFailedError(
                    f"the entry {change.name!r} has version {found or 'none'}, not {change.expected or 'none'}: read it again, decide again"
                )
        seen[key] = ABSENT if change.kind == "remove" else change.version


def _version(tx: Tx, table: int, key: str) -> int:
    rows = tx.run("SELECT version FROM entry WHERE stream = ? AND key = ?", (table, key))
    return int(rows[0][0]) if rows else ABSENT


def apply_entries(tx: Tx, changes: Sequence[EntryChange]) -> None:
    """Put and remove, in order; of several changes to a key the last one stands."""
    last = {(change.target, change.name): change for change in changes}
    tx.defer(
        "DELETE FROM entry WHERE stream = ? AND key = ?",
        [key for key, change in last.items() if change.kind == "remove"],
    )
    tx.defer(
        "INSERT INTO entry (stream, key, version, value) VALUES (?, ?, ?, ?) "
        "ON CONFLICT (stream, key) DO UPDATE SET version = excluded.version, value = excluded.value",
        [(*key, change.version, change.data) for key, change in last.items() if change.kind == "put"],
    )


def find_entry(tx: Tx, table: int, key: str) -> tuple[int, bytes] | None:
    rows = tx.run("SELECT version, value FROM entry WHERE stream = ? AND key = ?", (table, key))
    return (rows[0][0], bytes(rows[0][1])) if rows else None


def list_entries(tx: Tx, table: int, prefix: str, after: str | None, limit: int) -> list[tuple[str, int, bytes]]:
    """Entries whose key begins with `prefix`, in the order of their keys, from behind `after`."""
    sql = "SELECT key, version, value FROM entry WHERE stream = ?"
    values: list[int | str] = [table]
    if prefix:
        sql += " AND key >= ?"
        values.append(prefix)
        bound = _behind(prefix)
        if bound is not None:
            sql += " AND key < ?"
            values.append(bound)
    if after is not None:
        sql += " AND key > ?"
        values.append(after)
    rows = tx.run(f"{sql} ORDER BY key LIMIT ?", (*values, limit))
    return [(row[0], row[1], bytes(row[2])) for row in rows]


def _behind(prefix: str) -> str | None:
    """The first text behind all that begin with `prefix`, by their bytes; None if there is none."""
    kept = prefix.rstrip("\U0010ffff")
    if not kept:
        return None
    following = ord(kept[-1]) + 1
    # Surrogates are no text: behind U+D7FF comes U+E000.
    return kept[:-1] + chr(0xE000 if 0xD800 <= following < 0xE000 else following)


def write_entries(tx: Tx, table: int, append: Append, changes: Sequence[EntryChange]) -> int:
    """Append one block of changes to a table's stream and apply them; returns the first one's version. `changes` count from there."""
    rows = tx.run("SELECT log, tail, sealed_epoch, appended_at, now_us() FROM segment WHERE stream = ? AND number = 0 FOR UPDATE", (table,))
    if not rows:
        raise NotFoundError("this table was deleted")
    log, tail, sealed, appended_at, now = rows[0]
    if sealed is not None:
        raise SealedError("this table is sealed")
    numbered = [change._replace(version=tail + 1 + index) for index, change in enumerate(changes)]
    check_entries(tx, numbered)
    at = max(now, appended_at)
    enter_blocks(tx, [(log, tail, at, append)])
    tx.defer(
        "UPDATE segment SET tail = ?, bytes = bytes + ?, appended_at = ? WHERE stream = ? AND number = 0",
        [(tail + append.count, append.length, at, table)],
    )
    apply_entries(tx, numbered)
    return int(tail + 1)


def count_entries(tx: Tx, table: int) -> int:
    return int(tx.run("SELECT count(*) FROM entry WHERE stream = ?", (table,))[0][0])
