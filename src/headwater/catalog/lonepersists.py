"""Lone persists: SQL moves an entity and its words by what it finds, so that a persist which shares no flush takes one round trip.

The index rows are the ledger's of `persists`, made from the segment's new tail. SQL begins no page and words no refusal: what needs one
makes a condition false or violates a constraint, and then the ledger decides. A test compares the rows that the two make.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headwater.catalog.database import Statement
from headwater.catalog.journals import READY, in_lists
from headwater.catalog.parts import Alone, Append
from headwater.catalog.tails import Watch
from headwater.catalog.words import TAG, TYPE

if TYPE_CHECKING:
    from headwater.catalog.persists import EntityMoves, NoMatch

#: An entity's or a tag's newest numbers are a page of their own from this many characters on.
PAGE_CHARACTERS = 400

#: A run as a text of its own, and after an entity's last one. Values: how far before the tail it begins, and what `_count_text` gives.
_RUN = "CAST(s.number AS TEXT) || ':' || CAST(s.tail - ? AS TEXT) || ?"
_NEXT_RUN = "CAST(s.tail - ? - entity.number - 1 AS TEXT) || ?"
_IN_SEGMENT = "FROM segment AS s WHERE s.stream = ? AND s.number = ?"
_HAS_ROOM = f"BETWEEN 1 AND {PAGE_CHARACTERS}"
_IS_READY = "(SELECT state FROM journal WHERE stream = ?) = ?"
_IS_AT = (
    f"(SELECT sequence FROM entity WHERE stream = ? AND id = ? AND length(recent) {_HAS_ROOM} "
    "AND last_ids IS DISTINCT FROM ? AND last_ids = COALESCE(?, last_ids)) = ?"
)
_INSERT_ENTITY = (
    "INSERT INTO entity (stream, id, sequence, low, segment, number, paged, recent, last_count, last_ids) "
    f"SELECT s.stream, ?, ?, 1, s.number, s.tail - ?, 0, {_RUN}, ?, ? {_IN_SEGMENT}"
)
_MOVE_ENTITY = (
    "UPDATE entity SET sequence = sequence + ?, segment = s.number, number = s.tail - ?, last_count = ?, last_ids = ?, "
    f"recent = recent || ',' || CASE WHEN segment = s.number THEN {_NEXT_RUN} ELSE {_RUN} END "
    f"{_IN_SEGMENT} AND entity.stream = ? AND entity.id = ?"
)
_MOVE_WORD = "ON CONFLICT (stream, kind, word, segment) DO UPDATE SET number = excluded.number, count = word.count + excluded.count"
_MOVE_TAG = (
    "INSERT INTO word (stream, kind, word, segment, number, count, recent) "
    f"SELECT s.stream, {TAG}, ?, s.number, s.tail - ?, ?, {_RUN} {_IN_SEGMENT} {_MOVE_WORD}, "
    f"recent = CASE WHEN length(word.recent) {_HAS_ROOM} "
    "THEN word.recent || ',' || CAST(excluded.number - excluded.count - word.number AS TEXT) || ? END"
)
_MOVE_TYPE = (
    "INSERT INTO word (stream, kind, word, segment, number, count, recent) "
    f"SELECT s.stream, {TYPE}, ?, s.number, s.tail - ?, ?, '' {_IN_SEGMENT} {_MOVE_WORD}"
)
_TAILS = "SELECT number, tail FROM segment WHERE stream = ? AND sealed_epoch IS NULL"


def move_alone(term: EntityMoves, append: Append) -> Alone | None:
    """How to move an entity by a block's events in one round trip; None if SQL can't: a tag has events that don't follow each other, or
    the caller asks only that the entity exists."""
    if term.expected == -1 or any(places[-1] - places[0] >= len(places) for _, places in term.tags):
        return None
    # Places are given by how far they lie before the tail.
    first, place = append.count - term.place, (append.stream, append.segment)
    last = first - term.count + 1
    condition: Statement = _IS_READY, (term.stream, READY)
    run = _count_text(term.count)
    if term.sequence:
        previous = bytes.fromhex(term.previous) if term.previous else None
        values = (*condition[1], term.stream, term.id, term.data, previous, term.sequence)
        condition = f"{_IS_READY} AND {_IS_AT}", values
        moved: tuple[Any, ...] = (term.count, last, term.count, term.data, first, run, first, run, *place, term.stream, term.id)
        changes: list[Statement] = [(_MOVE_ENTITY, moved)]
    else:
        changes = [(_INSERT_ENTITY, (term.id, term.count, last, first, run, term.count, term.data, *place))]
    for tag, places in term.tags:
        run = _count_text(len(places))
        changes.append((_MOVE_TAG, (tag, first - places[-1], len(places), first - places[0], run, *place, run)))
    changes += [(_MOVE_TYPE, (type, first - at, count, *place)) for type, at, count in term.types]
    return Alone(condition, changes, (_TAILS, (term.stream,)))


def forbid_alone(term: NoMatch) -> Alone | None:
    """How to check in one round trip that no event matches, if one of the tags was never used. None if SQL is not asked: the match has no
    tag, it looks at events after a cut only, which need not be the tag's last ones, or more segments are open than one list names."""
    lists = list(in_lists(term.segments))
    if not term.tags or term.after or len(lists) > 1:
        return None
    [(marks, numbers)] = lists
    are_open = f"(SELECT count(*) FROM segment WHERE stream = ? AND number IN ({marks}) AND sealed_epoch IS NULL) = ?"
    is_unused = f"(SELECT max(number) FROM word WHERE stream = ? AND kind = {TAG} AND word = ?) IS NULL"
    values = [value for tag in term.tags for value in (term.stream, tag)]
    return Alone(
        (
            f"{_IS_READY} AND {are_open} AND ({' OR '.join([is_unused] * len(term.tags))})",
            (term.stream, READY, term.stream, *numbers, len(term.segments), *values),
        ),
        watched=[Watch(term.stream, number, True) for number in term.segments],
    )


def _count_text(count: int) -> str:
    return "" if count == 1 else f"x{count}"
