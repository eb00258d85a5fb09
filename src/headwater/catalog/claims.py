"""Claims: a stream that only commits which require a table's entry may append to.

A claim is kept on the rows of the open segments, which every commit reads anyway, and whoever opens successors copies it. Appends lock
those rows, so of a claim and an append one comes first.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import NamedTuple

from headwater.catalog import segments, streams, tails
from headwater.catalog.database import Tx
from headwater.catalog.operations import Right, operation
from headwater.catalog.parts import CLAIMED, Refused, Term
from headwater.catalog.segments import SegmentRow
from headwater.catalog.tables import EntryIs
from headwater.catalog.tails import Watch
from headwater.errors import ConditionFailedError, ConflictError, InvalidRequestError, SealedError
from headwater.model.names import StreamName


class Claim(NamedTuple):
    """Who claimed a stream, and the entry at a version that a commit must require to append."""

    owner: str
    table: int
    key: str
    version: int


def load_claim(text: str) -> Claim:
    return Claim(*json.loads(text))


def find_refusal(claims: Iterable[str | None], terms: Iterable[Term]) -> Refused | None:
    """Why a part with these terms may not append to segments with these claims."""
    required = None
    for text in {text for text in claims if text is not None}:
        if required is None:
            required = {(term.table, term.key, term.expected) for term in terms if isinstance(term, EntryIs)}
        claim = load_claim(text)
        if claim[1:] not in required:
            return Refused(CLAIMED, {"owner": claim.owner})
    return None


def claimed(stream: str, owner: str) -> ConflictError:
    """The error of a commit that does not require what a claim needs."""
    return ConflictError(f"stream {stream} is claimed by {owner!r}: only its owner appends to it until the claim is released", owner=owner)


@operation("statement", right=Right("read", "stream"))
def find_owner(tx: Tx, stream: int) -> str | None:
    """Who claimed a stream, None if nobody did."""
    rows = tx.run("SELECT claim FROM segment WHERE stream = ? AND claim IS NOT NULL AND sealed_epoch IS NULL LIMIT 1", (stream,))
    return load_claim(rows[0][0]).owner if rows else None


@operation("commit", repeatable=True)
def claim_stream(tx: Tx, stream: int, owner: str, table: StreamName, key: str, version: int) -> None:
    """Claim a stream, or move the owner's claim to another version. ConditionFailedError unless the entry has that version now."""
    row = streams.lock_stream(tx, stream)
    if row.sealed_at is not None:
        raise SealedError(f"stream {row.full_name} is sealed: nobody appends to it any more")
    guard = streams.get_named(tx, table)
    if guard.kind != "table":
        raise InvalidRequestError(f"{table} is of kind {guard.kind!r}, not 'table'")
    found, held = _lock(tx, stream, guard.id, key)
    present = _present(found)
    if present is not None and present.owner != owner:
        raise ConflictError(f"stream {row.full_name} is claimed by {present.owner!r}: wait for its release", owner=present.owner)
    if held != version:
        raise ConditionFailedError(
            f"the entry {key!r} of {table} has version {held or 'none'}, not {version or 'none'}: {owner!r} can't claim by it", found=held
        )
    text = json.dumps(Claim(owner, guard.id, key, version))
    tx.run("UPDATE segment SET claim = ? WHERE stream = ? AND sealed_epoch IS NULL", (text, stream))


@operation("commit", repeatable=True)
def release_claim(tx: Tx, stream: int, *, force: bool) -> None:
    """End the claim of a stream, if there is one. ConflictError if its entry still holds, unless `force`."""
    row = streams.lock_stream(tx, stream)
    claim = _present(segments.list_open_segments(tx, stream))
    if claim is None:
        return
    found, held = _lock(tx, stream, claim.table, claim.key)
    if not force and held == claim.version:
        raise ConflictError(
            f"stream {row.full_name} is claimed by {claim.owner!r}, and what the claim requires still holds: "
            "change that entry first, or release the claim by force",
            owner=claim.owner,
        )
    tx.run("UPDATE segment SET claim = NULL WHERE stream = ? AND sealed_epoch IS NULL", (stream,))
    assert found, "an open stream has open segments"


def owner_of(rows: Iterable[SegmentRow]) -> str | None:
    """Who claimed a stream with these segments, None if nobody did."""
    claim = _present(row for row in rows if row.is_open)
    return None if claim is None else claim.owner


def _present(rows: Iterable[SegmentRow]) -> Claim | None:
    return next((load_claim(row.claim) for row in rows if row.claim is not None), None)


def _lock(tx: Tx, stream: int, table: int, key: str) -> tuple[list[SegmentRow], int | None]:
    """Lock the open segments of a stream, which is locked, and share the lock of a table; the version of the table's entry.

    None if the table is not open any more: then no requirement of it is ever fulfilled.
    """
    rows = segments.list_open_segments(tx, stream)
    watches = [Watch(stream, row.number, True) for row in rows] + [Watch(table, 0)]
    found = tails.load(tx.run_all(tails.lock(watches)))
    guard = found.get((table, 0))
    if guard is None or not guard.is_open:
        return rows, None
    entries = tx.run("SELECT version FROM entry WHERE stream = ? AND key = ?", (table, key))
    # The stream's lock keeps its claim as it is, and its segments open.
    return rows, entries[0][0] if entries else 0
