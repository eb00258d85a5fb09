"""Fills: tables that a fork makes, whose entries are filled in slices. Such a table has a name that nobody can give until it is whole.

A fill lives as long as its process renews it, which each slice does. Upkeep drops a fill that was not renewed for FILL_SECONDS; from then
on its process is refused. So what a crash leaves is garbage-collected, and time never decides what a table contains.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from headwater.catalog import replacements, segments, streams, views
from headwater.catalog.database import Tx
from headwater.catalog.operations import operation
from headwater.catalog.streams import FILLING, StreamRow
from headwater.errors import AlreadyExistsError, ConflictError, InvalidRequestError, NotFoundError, TruncatedError
from headwater.model.limits import FILL_BYTES, FILL_ROWS, FILL_SECONDS
from headwater.model.names import StreamName
from headwater.runtime import failpoints

#: `renewed_at` of a fill that is being dropped.
_DROPPED = 0


@operation("commit", repeatable=True)
def begin_fill(tx: Tx, table: int, name: StreamName, version: int | None) -> StreamRow:
    """A table without entries and without a name, which has the changes of another one up to a version (None: up to now)."""
    # If the answer is lost, this runs again, and the first table is dropped by upkeep.
    parent = streams.lock_stream(tx, table)
    if parent.kind != "table":
        raise InvalidRequestError(f"{parent.full_name} is of kind {parent.kind!r}, not a table")
    _check_free(tx, name)
    [segment] = segments.list_segments(tx, table)
    end = segment.tail if version is None else version
    if end > segment.tail:
        raise InvalidRequestError(f"{parent.full_name} is at version {segment.tail}; there is no version {end}")
    if end < segment.head:
        raise TruncatedError(f"changes of {parent.full_name} up to version {end} were truncated")
    row = streams.copy_stream(tx, table, StreamName(parent.scope, f"~{uuid.uuid4().hex}"))
    assert row is not None, "no other stream has this name"
    views.copy_segments(tx, table, row.id, {segment.number: end})
    replacements.note_fork(tx, row.id, table, {segment.number: end})
    tx.run("UPDATE stream SET kind = ? WHERE id = ?", (FILLING, row.id))
    tx.run("INSERT INTO filling (stream, renewed_at) VALUES (?, now_us())", (row.id,))
    return streams.get_stream(tx, row.id)


def _check_free(tx: Tx, name: StreamName) -> None:
    if streams.find_stream(tx, name) is not None:
        raise AlreadyExistsError(f"stream {name} exists: a fork has a new name")


def _hold(tx: Tx, fill: int) -> None:
    """Renew a fill, and keep it until this transaction ends."""
    rows = tx.run("SELECT renewed_at FROM filling WHERE stream = ? FOR UPDATE", (fill,))
    if not rows or rows[0][0] == _DROPPED:
        raise ConflictError(f"this fork was not heard of for {FILL_SECONDS:g} seconds, and upkeep dropped it: fork the table again")
    tx.run("UPDATE filling SET renewed_at = now_us() WHERE stream = ?", (fill,))


@operation("statement")
def find_slice(tx: Tx, table: int, version: int, after: str | None) -> str | None:
    """The last key of the next slice of the entries up to a version, after a key; None if there are no more."""
    sql = "SELECT key, length(value) FROM entry WHERE stream = ? AND version <= ?"
    values: list[int | str] = [table, version]
    if after is not None:
        sql += " AND key > ?"
        values.append(after)
    last, size = None, 0
    for key, length in tx.run(f"{sql} ORDER BY key LIMIT ?", (*values, FILL_ROWS)):
        size += length
        if last is not None and size > FILL_BYTES:
            break
        last = key
    return last


@operation("commit", repeatable=True)
def copy_entries(tx: Tx, fill: int, table: int, version: int, after: str | None, last: str) -> None:
    """Copy the entries up to a version from a slice of the table's keys: after one key, up to another one."""
    _hold(tx, fill)
    sql = "INSERT INTO entry (stream, key, version, value) SELECT ?, key, version, value FROM entry WHERE stream = ? AND version <= ?"
    values: list[int | str] = [fill, table, version]
    if after is not None:
        sql += " AND key > ?"
        values.append(after)
    tx.run(f"{sql} AND key <= ? ON CONFLICT (stream, key) DO NOTHING", (*values, last))
    failpoints.reach("fill.applied")


@operation("commit", repeatable=True)
def set_entries(tx: Tx, fill: int, entries: Sequence[tuple[str, int, bytes | None]]) -> None:
    """Set entries (key, version, value), or remove those without a value. With no entries, only renew the fill."""
    _hold(tx, fill)
    tx.defer("DELETE FROM entry WHERE stream = ? AND key = ?", [(fill, key) for key, _, value in entries if value is None])
    tx.defer(
        "INSERT INTO entry (stream, key, version, value) VALUES (?, ?, ?, ?) "
        "ON CONFLICT (stream, key) DO UPDATE SET version = excluded.version, value = excluded.value",
        [(fill, key, version, value) for key, version, value in entries if value is not None],
    )
    failpoints.reach("fill.applied")


@operation("commit", repeatable=True)
def end_fill(tx: Tx, fill: int, name: StreamName) -> StreamRow:
    """Give a table that is whole its name. Repeated after a lost answer, this changes nothing."""
    if not tx.run("SELECT 1 FROM filling WHERE stream = ?", (fill,)):
        row = _find(tx, fill)
        if row is not None and row.kind == "table":
            return row
    _hold(tx, fill)
    streams.keep_scope(tx, name.scope, alone=True)
    _check_free(tx, name)
    tx.run("UPDATE stream SET kind = 'table', scope = ?, name = ?, created_at = now_us() WHERE id = ?", (*name, fill))
    tx.run("DELETE FROM filling WHERE stream = ?", (fill,))
    failpoints.reach("fill.named")
    return streams.get_stream(tx, fill)


def _find(tx: Tx, fill: int) -> StreamRow | None:
    try:
        return streams.get_stream(tx, fill)
    except NotFoundError:
        return None


@operation("statement")
def list_expired(tx: Tx) -> list[int]:
    """The fills that were not renewed for FILL_SECONDS."""
    rows = tx.run("SELECT stream FROM filling WHERE renewed_at < now_us() - ? ORDER BY stream", (int(FILL_SECONDS * 1_000_000),))
    return [row[0] for row in rows]


@operation("commit", repeatable=True)
def drop_slice(tx: Tx, fill: int, *, expired: bool) -> bool:
    """Delete a slice of a fill's entries, or the fill once it has none; True if there is nothing left to do.

    With `expired`, only if nobody renewed the fill meanwhile.
    """
    rows = tx.run("SELECT renewed_at, now_us() FROM filling WHERE stream = ? FOR UPDATE", (fill,))
    if not rows or (expired and rows[0][0] >= rows[0][1] - int(FILL_SECONDS * 1_000_000)):
        return True
    tx.run("UPDATE filling SET renewed_at = ? WHERE stream = ?", (_DROPPED, fill))
    gone = "DELETE FROM entry WHERE stream = ? AND key IN (SELECT key FROM entry WHERE stream = ? ORDER BY key LIMIT ?) RETURNING 1"
    if tx.run(gone, (fill, fill, FILL_ROWS)):
        failpoints.reach("fill.sliced")
        return False
    tx.run("DELETE FROM filling WHERE stream = ?", (fill,))
    streams.seal_stream(tx, fill)
    streams.delete_stream(tx, fill)
    return True
