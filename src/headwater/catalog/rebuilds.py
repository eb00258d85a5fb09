"""Rebuilds: the index of a journal is made again from its events, in slices, each of which is one commit of upkeep.

A rebuild has three steps. "aside": the rows of the entities move to the negative id of the stream; pages and words are deleted. "scan":
the events are indexed. "merge": the rows that were set aside give the new ones what no event says, which is what was deleted. A rebuild
that is begun during another one starts over. Until the end, persists are refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from headwater.catalog import leases
from headwater.catalog.database import Tx
from headwater.catalog.journals import BUILDING, DEAD, READY, delete_slice, in_lists
from headwater.catalog.operations import operation
from headwater.catalog.persists import EntityMoves, JournalLedger
from headwater.errors import ConditionFailedError
from headwater.model.limits import REBUILD_ROWS

#: Which sequence an entity keeps if the stream has fewer events of it: the one that it had, the last one that was deleted, or none.
Floor = Literal["sequence", "deleted", "none"]
_FLOORS: tuple[Floor, ...] = ("none", "deleted", "sequence")
Step = Literal["aside", "scan", "merge"]

_ENTITY = "sequence, low, segment, number, paged, recent, last_count, last_ids, deleted, deletion"


class Build(NamedTuple):
    """A rebuild that is under way, and its number: `numbers` are the next ones to scan by segment."""

    stream: int
    number: int
    step: Step
    floor: Floor
    numbers: dict[int, int]


class Moved(NamedTuple):
    """Events of one entity with consecutive sequences and numbers, with the places of their types and tags: see `EntityMoves`."""

    segment: int
    first: int
    id: str
    sequence: int
    count: int  # type: ignore[assignment]  # the tuple method of this name is of no use here
    types: tuple[tuple[str, int, int], ...]
    tags: tuple[tuple[str, tuple[int, ...]], ...]


def begin(tx: Tx, stream: int, floor: Floor) -> None:
    """Mark the index of a journal as to be rebuilt, in the commit that changes its events; of other streams nothing is done.

    From this commit on persist and replay raise UnavailableError, until upkeep has rebuilt the index. A commit that takes events from
    the front has the floor "sequence": sequences go on. One that takes events from the end has "deleted": their sequences are used again.
    """
    # All segments first: a persist is either before this commit, or sees that the index is to be rebuilt.
    tx.run("SELECT number FROM segment WHERE stream = ? ORDER BY number FOR UPDATE", (stream,))
    rows = tx.run("SELECT state, build FROM journal WHERE stream = ? FOR UPDATE", (stream,))
    if not rows or rows[0][0] == DEAD:
        return
    if rows[0][1] is not None:
        floor = min(floor, json.loads(rows[0][1])["floor"], key=_FLOORS.index)
    _note(tx, stream, "aside", floor, {}, "builds = builds + 1, ")


@operation("commit", repeatable=True)
def begin_repair(tx: Tx, stream: int) -> None:
    """Mark the index of a journal as to be rebuilt, because it is not what the events say."""
    begin(tx, stream, "deleted")


def begin_fork(tx: Tx, parent: int, fork: int) -> None:
    """Mark the index of a new fork as to be built, and give it its parent's deletions. Snapshots stay with the parent."""
    tx.run("UPDATE journal SET deletions = (SELECT deletions FROM journal WHERE stream = ?) WHERE stream = ?", (parent, fork))
    _note(tx, fork, "scan", "none", {})
    # An index that is being rebuilt itself has deletions in both places.
    for stream in (-parent, parent):
        tx.run(
            f"INSERT INTO entity (stream, id, {_ENTITY}) SELECT ?, id, 0, low, 0, 0, 0, '', 0, NULL, deleted, deletion "
            "FROM entity WHERE stream = ? AND deletion IS NOT NULL ON CONFLICT (stream, id) DO NOTHING",
            (-fork, stream),
        )


def _note(tx: Tx, stream: int, step: Step, floor: Floor, numbers: Mapping[int, int], more: str = "") -> None:
    text = json.dumps({"step": step, "floor": floor, "numbers": {str(segment): number for segment, number in numbers.items()}})
    tx.run(f"UPDATE journal SET {more}state = ?, build = ? WHERE stream = ?", (BUILDING, text, stream))


@operation("statement")
def list_builds(tx: Tx) -> list[Build]:
    """The journals whose index is to be rebuilt."""
    rows = tx.run("SELECT stream, builds, build FROM journal WHERE state = ? ORDER BY stream", (BUILDING,))
    return [_to_build(*row) for row in rows]


def _to_build(stream: int, number: int, text: str) -> Build:
    found = json.loads(text)
    return Build(stream, number, found["step"], found["floor"], {int(segment): at for segment, at in found["numbers"].items()})


def _hold(tx: Tx, session: int, stream: int, number: int, step: Step) -> Build:
    """The rebuild, kept as it is until this transaction ends. ConditionFailedError if another one was begun since."""
    leases.hold(tx, session)
    rows = tx.run("SELECT stream, builds, build FROM journal WHERE stream = ? AND state = ? FOR UPDATE", (stream, BUILDING))
    found = _to_build(*rows[0]) if rows else None
    if found is None or found.number != number or found.step != step:
        raise ConditionFailedError("the rebuild of this index was begun anew, or is done")
    return found


@operation("commit", repeatable=True)
def set_aside(tx: Tx, session: int, stream: int, number: int) -> bool:
    """Take a slice of the old index out of the way; True if that was the last one."""
    build = _hold(tx, session, stream, number, "aside")
    rows = tx.run("SELECT id FROM entity WHERE stream = ? ORDER BY id LIMIT ?", (stream, REBUILD_ROWS))
    if rows:
        # What was set aside by a rebuild that was given up is older, and says all that this row can.
        tx.run(
            f"INSERT INTO entity (stream, id, {_ENTITY}) SELECT ?, id, {_ENTITY} FROM entity WHERE stream = ? AND id <= ? "
            "ON CONFLICT (stream, id) DO NOTHING",
            (-stream, stream, rows[-1][0]),
        )
        tx.run("DELETE FROM entity WHERE stream = ? AND id <= ?", (stream, rows[-1][0]))
        return False
    for table in ("word_page", "entity_page", "word"):
        if delete_slice(tx, table, stream):
            return False
    _note(tx, stream, "scan", build.floor, {})
    return True


@operation("commit", repeatable=True)
def add_events(tx: Tx, session: int, stream: int, number: int, events: Sequence[Moved], numbers: Mapping[int, int]) -> None:
    """Index events that were scanned, each entity's in order; `numbers` are the next ones to scan of these segments."""
    build = _hold(tx, session, stream, number, "scan")
    if all(build.numbers.get(segment) == at for segment, at in numbers.items()):
        return  # The answer to the first time was lost.
    index = _Index(stream, events)
    index.load(tx.run_all(index.statements()))
    for event in events:
        index.add(event)
    index.enter(tx)
    _note(tx, stream, "scan", build.floor, build.numbers | dict(numbers))


@operation("commit", repeatable=True)
def end_scan(tx: Tx, session: int, stream: int, number: int) -> None:
    """Note that all events are indexed."""
    build = _hold(tx, session, stream, number, "scan")
    _note(tx, stream, "merge", build.floor, {})


@operation("commit", repeatable=True)
def merge(tx: Tx, session: int, stream: int, number: int) -> bool:
    """Give a slice of entities what only their old rows know; True if that was the last one, and the index is whole."""
    build = _hold(tx, session, stream, number, "merge")
    old = _entities(tx, -stream, f"ORDER BY id LIMIT {REBUILD_ROWS}", ())
    if not old:
        tx.run("UPDATE journal SET state = ?, build = NULL WHERE stream = ?", (READY, stream))
        return True
    new: dict[str, dict[str, Any]] = {}
    for marks, ids in in_lists(list(old)):
        new |= _entities(tx, stream, f"AND id IN ({marks})", ids)
    changed = [(id, _merged(row, new.get(id), build.floor)) for id, row in old.items()]
    # Where sequences go on past those that were found, the numbers of the latter are a page.
    ended = [
        (stream, id, new[id]["paged"] + 1, new[id]["recent"]) for id, row in changed if id in new and row["recent"] != new[id]["recent"]
    ]
    tx.defer("INSERT INTO entity_page (stream, id, first, numbers) VALUES (?, ?, ?, ?)", ended)
    columns = [name.strip() for name in _ENTITY.split(",")]
    tx.defer(
        f"INSERT INTO entity (stream, id, {_ENTITY}) VALUES (?, ?{', ?' * len(columns)}) ON CONFLICT (stream, id) DO UPDATE SET "
        + ", ".join(f"{name} = excluded.{name}" for name in columns),
        [(stream, id, *(row[name] for name in columns)) for id, row in changed if row["sequence"]],
    )
    tx.run("DELETE FROM entity WHERE stream = ? AND id <= ?", (-stream, list(old)[-1]))
    return False


def _entities(tx: Tx, stream: int, which: str, values: Sequence[Any]) -> dict[str, dict[str, Any]]:
    names = [name.strip() for name in _ENTITY.split(",")]
    rows = tx.run(f"SELECT id, {_ENTITY} FROM entity WHERE stream = ? {which}", (stream, *values))
    return {row[0]: dict(zip(names, row[1:], strict=True)) for row in rows}


def _merged(old: dict[str, Any], new: dict[str, Any] | None, floor: Floor) -> dict[str, Any]:
    """An entity's row of the events that were found, and of the row that it had."""
    if old["low"] > old["sequence"] + 1 and old["deletion"] is None:
        old = old | {"low": 1}  # No deletion, and no truncation, made it so.
    found = new if new is not None else old | {"sequence": 0, "low": 1, "paged": 0, "recent": ""}
    least = {"sequence": old["sequence"], "deleted": old["low"] - 1, "none": 0}[floor]
    sequence = max(found["sequence"], least)
    if new is None:
        is_same = sequence == old["sequence"]
    else:
        is_same = (new["segment"], new["number"]) == (old["segment"], old["number"])
    if sequence > found["sequence"]:
        # The events up to there are gone, so the page that follows begins after them.
        found = found | {"low": sequence + 1, "paged": sequence, "recent": ""}
    return found | {
        "sequence": sequence,
        "low": min(max(old["low"], found["low"]), sequence + 1),
        "deleted": min(old["deleted"], sequence + 1),
        "deletion": old["deletion"],
        # The last persist is recognised if its events are still the last ones, even if they are deleted.
        "last_count": old["last_count"] if is_same else found["last_count"],
        "last_ids": old["last_ids"] if is_same else None,
    }


class _Index(JournalLedger):
    """Indexes events where they are, as the commits of their persists did."""

    def __init__(self, stream: int, events: Sequence[Moved]) -> None:
        self._stream = stream
        terms = [EntityMoves(stream, "", e.id, e.sequence - 1, None, e.count, e.types, e.tags, None) for e in events]
        self._terms = dict(zip(map(id, events), terms, strict=True))
        super().__init__({}, terms)

    def add(self, event: Moved) -> None:
        term = self._terms[id(event)]
        if self.prepare(term):
            self.move(term, event.segment, event.first)
