"""Tables: the present entry of each key, kept in step with the stream of changes it comes from.

Every write appends to the table's one segment first, whose lock puts the writers of a table in order; so a look at an entry here sees
what the next commit will find.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headwater.catalog.database import Row, Statement, Tx
from headwater.catalog.operations import Right, operation
from headwater.catalog.parts import Alone, Append, Ledger, Placed, Refusal, Refused, Term
from headwater.catalog.tails import Watch
from headwater.errors import ConditionFailedError, HeadwaterError, SealedError

#: As an expected version: only if the key is missing.
ABSENT = 0


#: A table was sealed or deleted, and its name may be another table's.
_ENDED = "ended"

_VERSION = "SELECT version FROM entry WHERE stream = ? AND key = ?"
_DELETE = "DELETE FROM entry WHERE stream = ? AND key = ?"
_INSERT = "INSERT INTO entry (stream, key, version, value)"
_REPLACE = "ON CONFLICT (stream, key) DO UPDATE SET version = excluded.version, value = excluded.value"
_PUT_AT_TAIL = f"{_INSERT} SELECT s.stream, ?, s.tail, ? FROM segment AS s WHERE s.stream = ? AND s.number = ? {_REPLACE}"


class Entries(Ledger["EntryChange | EntryIs"]):
    """The versions of the entries that parts change or require."""

    def watched(self) -> list[Watch]:
        # A table's one segment guards all of its entries, so the entries' own rows are never locked.
        return [Watch(term.table, 0) for term in self.terms if isinstance(term, EntryIs)]

    def statements(self) -> list[Statement]:
        return [(_VERSION, key) for key in self._keys()]

    def _keys(self) -> list[tuple[int, str]]:
        return sorted({(term.table, term.key) for term in self.terms if term.expected is not None})

    def load(self, answers: list[list[Row]]) -> None:
        self._versions = {key: rows[0][0] if rows else ABSENT for key, rows in zip(self._keys(), answers, strict=True)}
        #: The last change of each key, with the version it makes.
        self._last: dict[tuple[int, str], tuple[EntryChange, int]] = {}

    def refusal(self, terms: Sequence[EntryChange | EntryIs]) -> Refusal | None:
        """Each change must find the version that it expects, seeing the changes before it; each requirement, what was before the part."""
        for term in terms:
            if isinstance(term, EntryIs):
                guard = self.tails.get((term.table, 0))
                if guard is None or not guard.is_open:
                    return Refusal(term, _ENDED, {})
                if self._versions[term.table, term.key] != term.expected:
                    return Refusal(term, "moved", {"found": self._versions[term.table, term.key]})
        seen: dict[tuple[int, str], int | None] = {}
        for term in terms:
            if isinstance(term, EntryIs):
                continue
            place = term.table, term.key
            if term.expected is not None:
                found = seen[place] if place in seen else self._versions[place]
                if found != term.expected:
                    return Refusal(term, "moved", {"found": found})
            # What an earlier change of the part makes is no version that its caller can know.
            seen[place] = ABSENT if term.data is None else None
        return None

    def change(self, placed: Sequence[Placed]) -> None:
        for term, _, _, first in placed:
            if isinstance(term, EntryIs):
                continue
            version = first + term.place + 1
            self._last[term.table, term.key] = term, version
            self._versions[term.table, term.key] = ABSENT if term.data is None else version

    def enter(self, tx: Tx) -> None:
        tx.defer(_DELETE, [place for place, (term, _) in self._last.items() if term.data is None])
        tx.defer(
            f"{_INSERT} VALUES (?, ?, ?, ?) {_REPLACE}",
            [(*place, version, term.data) for place, (term, version) in self._last.items() if term.data is not None],
        )


@dataclass(frozen=True, slots=True)
class EntryChange(Term):
    """A put of a key (a removal if `data` is None), by the event `place` of a block; with `expected`, only if the key has that version."""

    ledger = Entries
    table: int
    key: str
    data: bytes | None
    expected: int | None
    place: int = 0
    block: int = 0

    def alone(self, append: Append) -> Alone | None:
        # The version of a block's only change is the segment's new tail.
        if append.count != 1:
            return None
        entry = self.table, self.key
        condition: Statement = "TRUE", ()
        if self.expected is not None:
            condition = f"COALESCE(({_VERSION}), {ABSENT}) = ?", (*entry, self.expected)
        if self.data is None:
            return Alone(condition, [(_DELETE, entry)])
        return Alone(condition, [(_PUT_AT_TAIL, (self.key, self.data, self.table, append.segment))])

    def error(self, refused: Refused) -> HeadwaterError:
        found = refused.facts["found"]
        return ConditionFailedError(
            f"the entry {self.key!r} has version {found or 'none'}, not {self.expected or 'none'}: read it again, decide again",
            found=found,
        )


@dataclass(frozen=True, slots=True)
class EntryIs(Term):
    """The part commits if a key has a version, which may be ABSENT, before the part changes anything."""

    ledger = Entries
    table: int
    key: str
    expected: int
    block: int = -1

    def error(self, refused: Refused) -> HeadwaterError:
        if refused.reason == _ENDED:
            return SealedError(f"the table of the required entry {self.key!r} was sealed or deleted: open the table again")
        found = refused.facts["found"]
        return ConditionFailedError(
            f"the required entry {self.key!r} has version {found or 'none'}, not {self.expected or 'none'}: read it again, decide again",
            found=found,
        )


@operation("statement", right=Right("read", "table"))
def find_entry(tx: Tx, table: int, key: str) -> tuple[int, bytes] | None:
    rows = tx.run("SELECT version, value FROM entry WHERE stream = ? AND key = ?", (table, key))
    return (rows[0][0], bytes(rows[0][1])) if rows else None


@operation("statement")
def list_entries(tx: Tx, table: int, prefix: str, after: str | None, limit: int) -> list[tuple[str, int, bytes]]:
    """Entries whose key begins with `prefix`, in the order of their keys, from behind `after`."""
    sql = "SELECT key, version, value FROM entry WHERE stream = ?"
    values: list[int | str] = [table]
    if prefix:
        sql += " AND key >= ?"
        values.append(prefix)
        bound = behind(prefix)
        if bound is not None:
            sql += " AND key < ?"
            values.append(bound)
    if after is not None:
        sql += " AND key > ?"
        values.append(after)
    rows = tx.run(f"{sql} ORDER BY key LIMIT ?", (*values, limit))
    return [(row[0], row[1], bytes(row[2])) for row in rows]


def behind(prefix: str) -> str | None:
    """The first text behind all that begin with `prefix`, by their bytes; None if there is none."""
    kept = prefix.rstrip("\U0010ffff")
    if not kept:
        return None
    following = ord(kept[-1]) + 1
    # Surrogates are no text: behind U+D7FF comes U+E000.
    return kept[:-1] + chr(0xE000 if 0xD800 <= following < 0xE000 else following)


@operation("statement", right=Right("read", "table"))
def count_entries(tx: Tx, table: int) -> int:
    return int(tx.run("SELECT count(*) FROM entry WHERE stream = ?", (table,))[0][0])
