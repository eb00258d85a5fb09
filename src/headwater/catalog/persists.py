"""Persists: what a commit checks and changes of journals' indexes. Entities are compared and moved, and words, with their events' numbers.

A segment's row is held by whoever appends to it, and by whoever watches it. So the last numbers of a word in the segments that are held
don't change between a look at them and the commit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from headwater.catalog import lonepersists, segments
from headwater.catalog.database import Row, Statement, Tx
from headwater.catalog.journals import BUILDING, READY, in_lists
from headwater.catalog.lonepersists import PAGE_CHARACTERS
from headwater.catalog.parts import Alone, Append, Ledger, Placed, Refusal, Refused, Term, dump_term
from headwater.catalog.tails import Tails, Watch
from headwater.catalog.words import TAG, TYPE
from headwater.errors import ConditionFailedError, ConflictError, HeadwaterError, NotFoundError, UnavailableError
from headwater.model.matches import EXISTS
from headwater.model.numbers import Numbers, run_text

_MOST = 1 << 62
#: Whether the index is whole, and the open segments with their tails.
_JOURNAL = (
    "SELECT j.state, s.number, s.tail FROM journal j LEFT JOIN segment s ON s.stream = j.stream AND s.sealed_epoch IS NULL "
    "WHERE j.stream = ?"
)
#: A segment that was to be watched is not open any more.
RESCALED = "rescaled"


class _Entity:
    """An entity while a commit is worked out."""

    __slots__ = ("count", "deleted", "ids", "is_changed", "low", "number", "paged", "recent", "segment", "sequence")

    def __init__(
        self,
        sequence: int = 0,
        segment: int = 0,
        number: int = 0,
        paged: int = 0,
        recent: str = "",
        count: int = 0,
        ids: bytes | None = None,
        deleted: int = 0,
        low: int = 1,
    ) -> None:
        self.sequence = sequence
        #: Of a new entity: the row of another one keeps its own.
        self.low = low
        self.segment = segment
        self.number = number
        self.paged = paged
        self.recent = recent
        self.count = count
        self.ids = ids
        self.deleted = deleted
        self.is_changed = False

    def may_have(self, segment: int, least: int) -> bool:
        """Whether one of its events may have a number of a segment from `least` on. Before a split or a merge it had others."""
        return self.number >= least if segment == self.segment else segment < self.segment and least < _MOST


class _Tag:
    """A tag in one segment while a commit is worked out."""

    __slots__ = ("count", "is_changed", "number", "recent")

    def __init__(self, number: int = -1, count: int = 0, recent: str = "") -> None:
        self.number = number
        self.count = count
        self.recent = recent
        self.is_changed = False


_NEW = _Entity()


class JournalLedger(Ledger["JournalTerm"]):
    """Checks and applies all terms of journals in one commit."""

    def __init__(self, tails: Tails, terms: Sequence[JournalTerm]) -> None:
        super().__init__(tails, terms)
        #: The segments to watch, where they are not those of the terms any more.
        self._found: dict[int, list[segments.SegmentRow]] = {}
        #: The tails of all open segments.
        self._open: dict[int, dict[int, int]] = {}
        self._states: dict[int, str] = {}
        self._entities: dict[tuple[int, str], _Entity] = {}
        #: The last numbers of words by segment; and of the tags that move, all that their rows have.
        self._last: dict[tuple[int, int, str], dict[int, int]] = {}
        self._tags: dict[tuple[int, str, int], _Tag] = {}
        self._types: dict[tuple[int, str, int], tuple[int, int]] = {}
        self._entity_pages: list[Row] = []
        self._tag_pages: list[Row] = []
        self._asked: list[tuple[str, int]] = []

    def find(self, tx: Tx) -> None:
        for stream in sorted({term.stream for term in self.terms if not isinstance(term, EntityMoves)}):
            self._found[stream] = segments.list_open_segments(tx, stream)

    def watched(self) -> Iterator[Watch]:
        for term in self.terms:
            if isinstance(term, NoMatch):
                yield from (Watch(term.stream, segment, True) for segment in self._segments(term))
            elif isinstance(term, EntityIs):
                yield from (Watch(term.stream, segment) for segment in self._segments(term))

    def _segments(self, term: NoMatch | EntityIs) -> list[int]:
        """The segments that a term is about, as far as is known."""
        found = self._found.get(term.stream)
        if isinstance(term, NoMatch):
            return list(term.segments) if found is None else [row.number for row in found]
        return [term.segment] if found is None else [row.number for row in found if row.keys.start <= term.key < row.keys.end]

    # What is looked up.

    def statements(self) -> list[Statement]:
        found: list[Statement] = []
        self._asked = []
        for stream in sorted({term.stream for term in self.terms}):
            terms = [term for term in self.terms if term.stream == stream]
            self._ask(found, "journal", stream, _JOURNAL, (stream,))
            ids, tags, types = _asked_for(terms)
            for marks, values in in_lists(ids):
                columns = "id, sequence, segment, number, paged, recent, last_count, last_ids, deleted"
                sql = f"SELECT {columns} FROM entity WHERE stream = ? AND id IN ({marks})"
                self._ask(found, "entity", stream, sql, (stream, *values))
            for kind, words in ((TAG, tags), (TYPE, types)):
                for marks, values in in_lists(words):
                    sql = f"SELECT word, segment, number, count, recent FROM word WHERE stream = ? AND kind = {kind} AND word IN ({marks})"
                    self._ask(found, "tag" if kind == TAG else "type", stream, sql, (stream, *values))
        return found

    def _ask(self, found: list[Statement], what: str, stream: int, sql: str, values: Sequence[Any]) -> None:
        self._asked.append((what, stream))
        found.append((sql, values))

    def load(self, answers: list[list[Row]]) -> None:
        for (what, stream), rows in zip(self._asked, answers, strict=True):
            if what == "journal":
                self._states[stream] = rows[0][0] if rows else "gone"
                self._open[stream] = {number: tail for _, number, tail in rows if number is not None}
            elif what == "entity":
                for id, sequence, segment, number, paged, recent, count, ids, deleted in rows:
                    row = sequence, segment, number, paged, recent, count, bytes(ids) if ids is not None else None, deleted
                    self._entities[stream, id] = _Entity(*row)
            else:
                kind = TAG if what == "tag" else TYPE
                for word, segment, number, count, recent in rows:
                    self._last.setdefault((stream, kind, word), {})[segment] = number
                    if kind == TAG:
                        self._tags[stream, word, segment] = _Tag(number, count, recent)

    # What is checked.

    def refusal(self, terms: Sequence[JournalTerm]) -> Refusal | None:
        moved: dict[tuple[int, str], int] = {}
        for term in terms:
            state = self._states[term.stream]
            if state != READY:
                return Refusal(term, "building" if state == BUILDING else "gone", {})
            if isinstance(term, NoMatch):
                refusal = self._unwatched(term) or (Refusal(term, "look", {}) if self._may_match(term) else None)
            elif isinstance(term, EntityIs):
                refusal = self._unwatched(term) or self._misses(term, self._entities.get((term.stream, term.id), _NEW), None)
            else:
                key = term.stream, term.id
                refusal = self._misses(term, self._entities.get(key, _NEW), moved.get(key))
                moved[key] = term.sequence + term.count
            if refusal is not None:
                return refusal
        return None

    def _unwatched(self, term: NoMatch | EntityIs) -> Refusal | None:
        """Every change of the open segments seals one. So if those that were looked up are open, they are all there are."""
        tails = [self.tails.get((term.stream, segment)) for segment in self._segments(term)]
        held = [tail is not None and (tail.is_open or tail.born_at is not None) for tail in tails]
        return None if held and all(held) else Refusal(term, RESCALED, {})

    def _misses(self, term: EntityMoves | EntityIs, entity: _Entity, moved: int | None) -> Refusal | None:
        """Why an entity is not as it must be; `moved` is where terms of the same part before this one left it."""
        sequence = entity.sequence if moved is None else moved
        if isinstance(term, EntityMoves) and term.may_repeat and moved is None and term.data is not None and entity.ids == term.data:
            return Refusal(term, "repeated", {"first": sequence - entity.count + 1, "last": sequence})
        if term.expected == -1 and moved is None and (not sequence or sequence < entity.deleted):
            return Refusal(term, "missing", {"actual": sequence, "deleted": sequence < entity.deleted})
        wanted = term.sequence if isinstance(term, EntityMoves) else term.expected
        if wanted not in (sequence, -1):
            return Refusal(term, "moved", {"actual": sequence})
        if isinstance(term, EntityMoves) and term.previous and (entity.ids or b"").hex() != term.previous:
            return Refusal(term, "moved", {"actual": sequence})
        return None

    def _may_match(self, term: NoMatch) -> bool:
        after = dict(term.after)
        groups = [[self._last.get((term.stream, TAG, tag), {})] for tag in term.tags]
        if term.types:
            groups.append([self._last.get((term.stream, TYPE, type), {}) for type in term.types])
        entities = [entity for id in term.ids if (entity := self._entities.get((term.stream, id))) is not None]
        places = {segment for lasts in groups[0] for segment in lasts} if groups else {entity.segment for entity in entities}
        # A match is one event, so all that it must have has a number in one segment.
        for segment in places:
            least = after.get(segment, 0 if segment > term.floor and segment not in term.done else _MOST)
            if term.ids and not any(entity.may_have(segment, least) for entity in entities):
                continue
            if all(any(last.get(segment, -1) >= least for last in lasts) for lasts in groups):
                return True
        return False

    # What is changed.

    def change(self, placed: Sequence[Placed]) -> Mapping[int, int]:
        """The tails of the journal's open segments right after the part: those that the commit found, with its parts so far."""
        for term, _, segment, first in placed:
            if isinstance(term, EntityMoves):
                self.move(term, segment, first + term.place)
        stream = placed[-1].term.stream
        known = ((number, self.tails.get((stream, number)), tail) for number, tail in self._open[stream].items())
        return {number: tail if held is None else held.tail for number, held, tail in known}

    def prepare(self, term: EntityMoves) -> bool:
        """Let an entity be at the sequence that a term moves it from, even if events before are gone; False if it is past that."""
        entity = self._entities.setdefault((term.stream, term.id), _Entity(term.sequence, paged=term.sequence, low=term.sequence + 1))
        if entity.sequence >= term.sequence:
            return entity.sequence == term.sequence
        if entity.recent:
            self._entity_pages.append((term.stream, term.id, entity.paged + 1, entity.recent))
        entity.sequence, entity.paged, entity.recent = term.sequence, term.sequence, ""
        return True

    def move(self, term: EntityMoves, segment: int, first: int) -> None:
        """Index the events of a term where they are, which is after all others of their entity and their tags."""
        key = term.stream, term.id
        entity = self._entities.get(key)
        if entity is None:
            entity = self._entities[key] = _Entity()
        run = Numbers(segment, first, term.count)
        token = run_text(run, entity.segment if entity.recent else None, entity.number + 1)
        if entity.recent and len(entity.recent) + len(token) >= PAGE_CHARACTERS:
            self._entity_pages.append((term.stream, term.id, entity.paged + 1, entity.recent))
            entity.paged, entity.recent = entity.sequence, ""
            token = run_text(run, None, 0)
        entity.recent = f"{entity.recent},{token}" if entity.recent else token
        entity.sequence += term.count
        entity.segment, entity.number = segment, run.end - 1
        entity.count, entity.ids, entity.is_changed = term.count, term.data, True
        for type, place, count in term.types:
            number, before = self._types.get((term.stream, type, segment), (-1, 0))
            self._types[term.stream, type, segment] = max(number, first + place), before + count
            self._note_last((term.stream, TYPE, type), segment, first + place)
        for tag, places in term.tags:
            self._move_tag(term.stream, tag, segment, [first + place for place in places])

    def _move_tag(self, stream: int, word: str, segment: int, numbers: list[int]) -> None:
        key = stream, word, segment
        tag = self._tags.get(key)
        if tag is None:
            tag = self._tags[key] = _Tag()
        for run in runs_of(segment, numbers):
            token = run_text(run, segment if tag.recent else None, tag.number + 1)
            if tag.recent and len(tag.recent) + len(token) >= PAGE_CHARACTERS:
                first = int(tag.recent.split(",", 1)[0].partition(":")[2].partition("x")[0])
                self._tag_pages.append((stream, word, segment, first, tag.recent))
                tag.recent, token = "", run_text(run, None, 0)
            tag.recent = f"{tag.recent},{token}" if tag.recent else token
            tag.number = run.end - 1
            tag.count += run.count
        tag.is_changed = True
        self._note_last((stream, TAG, word), segment, tag.number)

    def _note_last(self, key: tuple[int, int, str], segment: int, number: int) -> None:
        lasts = self._last.setdefault(key, {})
        lasts[segment] = max(lasts.get(segment, -1), number)

    def enter(self, tx: Tx) -> None:
        """Write what changed, with one statement for each kind of row."""
        tx.defer(
            "INSERT INTO entity (stream, id, sequence, low, segment, number, paged, recent, last_count, last_ids) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (stream, id) DO UPDATE SET sequence = excluded.sequence, "
            "segment = excluded.segment, number = excluded.number, paged = excluded.paged, recent = excluded.recent, "
            "last_count = excluded.last_count, last_ids = excluded.last_ids",
            [
                (*key, e.sequence, e.low, e.segment, e.number, e.paged, e.recent, e.count, e.ids)
                for key, e in sorted(self._entities.items(), key=lambda item: item[0])
                if e.is_changed
            ],
        )
        tx.defer("INSERT INTO entity_page (stream, id, first, numbers) VALUES (?, ?, ?, ?)", self._entity_pages)
        moved = [
            (stream, TAG, word, segment, tag.number, tag.count, tag.recent)
            for (stream, word, segment), tag in self._tags.items()
            if tag.is_changed
        ]
        tx.defer(
            "INSERT INTO word (stream, kind, word, segment, number, count, recent) VALUES (?, ?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (stream, kind, word, segment) DO UPDATE SET number = excluded.number, count = excluded.count, "
            "recent = excluded.recent",
            sorted(moved),
        )
        tx.defer(
            "INSERT INTO word (stream, kind, word, segment, number, count, recent) VALUES (?, ?, ?, ?, ?, ?, '') "
            "ON CONFLICT (stream, kind, word, segment) DO UPDATE SET number = excluded.number, count = word.count + excluded.count",
            sorted([(stream, TYPE, word, segment, *found) for (stream, word, segment), found in self._types.items()]),
        )
        tx.defer("INSERT INTO word_page (stream, word, segment, first, numbers) VALUES (?, ?, ?, ?, ?)", self._tag_pages)


def runs_of(segment: int, numbers: Iterable[int]) -> Iterator[Numbers]:
    """Ascending numbers as runs."""
    first = end = -1
    for number in numbers:
        if number == end:
            end += 1
            continue
        if end > first:
            yield Numbers(segment, first, end - first)
        first, end = number, number + 1
    if end > first:
        yield Numbers(segment, first, end - first)


def _asked_for(terms: Sequence[JournalTerm]) -> tuple[list[str], list[str], list[str]]:
    """The entities, tags and types that are looked up for terms of one journal."""
    ids: set[str] = set()
    tags: set[str] = set()
    types: set[str] = set()
    for term in terms:
        if isinstance(term, NoMatch):
            ids.update(term.ids)
            tags.update(term.tags)
            types.update(term.types)
        else:
            ids.add(term.id)
            if isinstance(term, EntityMoves):
                tags.update([tag for tag, _ in term.tags])
    return sorted(ids), sorted(tags), sorted(types)


class Repeated(ConflictError):
    """This very persist was committed before: `first` and `last` are its sequences."""


@dataclass(frozen=True, slots=True)
class EntityMoves(Term):
    """An entity is at a sequence, and moves on by events of a block: `count` of them, from the block's event `place` on.

    `tags` are the places of the events with each tag; `types` the last place and the number of events of each type; `data` is a hash of
    the events' ids. `expected` is what the caller said, for the error: a sequence, -1 for "exists", None for "any". `previous` is the
    hash, as text, of the persist that must have brought the entity there; "": any. `may_repeat`: it may be stored already.
    """

    ledger = JournalLedger
    stream: int
    name: str
    id: str
    sequence: int
    expected: int | None
    count: int
    types: tuple[tuple[str, int, int], ...]
    tags: tuple[tuple[str, tuple[int, ...]], ...]
    data: bytes | None
    previous: str = ""
    may_repeat: bool = True
    place: int = 0
    block: int = 0

    def alone(self, append: Append) -> Alone | None:
        return lonepersists.move_alone(self, append)

    def error(self, refused: Refused) -> HeadwaterError:
        if refused.reason == "repeated":
            return Repeated(f"this persist of {self.id!r} is stored already", **refused.facts)
        return _entity_error(self.name, self.id, self.expected, refused)


@dataclass(frozen=True, slots=True)
class EntityIs(Term):
    """An entity, whose id routes to `segment`, is at a sequence; -1: it exists. `key` is its place in the routing space."""

    ledger = JournalLedger
    stream: int
    name: str
    id: str
    expected: int
    segment: int
    key: int
    block: int = -1

    def error(self, refused: Refused) -> HeadwaterError:
        return _entity_error(self.name, self.id, self.expected, refused)


@dataclass(frozen=True, slots=True)
class NoMatch(Term):
    """No event that has all of these tags, one of the types and one of the ids is at or after the cut `after`.

    `segments` are all that were open. `after` gives the cut's numbers by segment. Of others those in `done`, and those numbered up to
    `floor`, lie before the cut; the rest count from their start.
    """

    ledger = JournalLedger
    stream: int
    name: str
    id: str
    segments: tuple[int, ...]
    tags: tuple[str, ...]
    types: tuple[str, ...]
    ids: tuple[str, ...]
    after: tuple[tuple[int, int], ...] = ()
    done: tuple[int, ...] = ()
    floor: int = -1
    block: int = -1

    def alone(self, append: Append) -> Alone | None:
        return lonepersists.forbid_alone(self)

    def error(self, refused: Refused) -> HeadwaterError:
        if refused.reason != "look":
            return _entity_error(self.name, self.id, None, refused)
        return ConditionFailedError(
            f"{self.name}: an event that may match was persisted meanwhile: read again, decide again",
            self.id,
            reason="look",
            match=dump_term(self)[1],
        )


JournalTerm: TypeAlias = EntityMoves | EntityIs | NoMatch


def _entity_error(name: str, id: str, expected: int | None, refused: Refused) -> HeadwaterError:
    if refused.reason == "building":
        return UnavailableError(f"the index of the journal {name} is being rebuilt by upkeep: repeat the call")
    if refused.reason == "gone":
        return NotFoundError(f"the journal {name} was deleted")
    if refused.reason == RESCALED:
        return ConditionFailedError(f"{name} was scaled meanwhile: repeat the call", id, reason=RESCALED)
    actual = refused.facts["actual"]
    what = "to exist" if expected == -1 else f"at sequence {expected}"
    is_at = f"is at sequence {actual}{' and deleted' if refused.facts.get('deleted') else ''}"
    message = f"the entity {id!r} of {name} {is_at}, and was expected {what}: read again, decide again"
    return ConditionFailedError(message, id, EXISTS if expected == -1 else expected, actual, reason=refused.reason)
