"""What a transaction was given for one journal: persists, conditions, and entities that must be as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import pyarrow as pa

from headwater.catalog.parts import Term
from headwater.catalog.persists import EntityIs, NoMatch
from headwater.catalog.transactions import Batch
from headwater.errors import ConditionFailedError
from headwater.journals.journal import Journal
from headwater.journals.persisting import Condition, Known, find_matches, ids_hash, moves, no_matches
from headwater.model.cuts import Cut, StreamCut
from headwater.model.keys import hash_key
from headwater.model.matches import EXISTS, Expected, Match
from headwater.model.records import Row, columns_of, row_bytes
from headwater.segments.block import Chunk, EncodedBlock
from headwater.segments.encoding import encode
from headwater.segments.lanes import EVENT_OVERHEAD_BYTES, StreamRef

#: A block with its stream, its segment and that segment's log.
Block = tuple[int, int, int, EncodedBlock]


class _Given(NamedTuple):
    """A persist, or without rows an entity that must be at a sequence (-1: exist)."""

    id: str
    rows: Sequence[Row]
    sequence: int
    expected: int
    condition: Condition | None


class JournalContents:
    """Not thread-safe: its transaction is."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._given: list[_Given] = []
        #: Where entities are after what was given, staged or not.
        self._heads: dict[str, int] = {}

    @property
    def ref(self) -> StreamRef:
        return self._journal._ref

    @property
    def is_empty(self) -> bool:
        return not self._given

    def persist(self, id: str, rows: list[Row], expected: int | Expected | None, condition: Condition | None) -> int:
        """Take events that were checked; returns their size. Without `expected` it is the sequence as of now."""
        if isinstance(expected, int):
            sequence = expected
        else:
            sequence = self._heads[id] if id in self._heads else self._journal._get(id).sequence
        self._given.append(_Given(id, rows, sequence, -1 if expected is EXISTS else sequence, condition))
        self._heads[id] = sequence + len(rows)
        return sum(map(row_bytes, rows)) + EVENT_OVERHEAD_BYTES * len(rows)

    def require(self, id: str, expected: int | Expected) -> None:
        self._given.append(_Given(id, (), 0, expected if isinstance(expected, int) else -1, None))

    def emptied(self) -> JournalContents:
        """The same without what was given: that is staged, or the transaction ended."""
        found = JournalContents(self._journal)
        found._heads = self._heads
        return found

    def gather(self, batch: Batch, blocks: list[Block]) -> None:
        """Add a block for each segment, and the terms."""
        ref, route = self.ref, self._journal._router.route(self.ref)
        batch.widths[ref.id] = len(route.numbers)
        segments = [route.find(hash_key(given.id.encode())) for given in self._given]
        terms: list[list[Term]] = [[] for _ in self._given]
        for segment in sorted({segment for given, segment in zip(self._given, segments, strict=True) if given.rows}):
            place = 0
            parts, keys = [], []
            for index, given in enumerate(self._given):
                if segments[index] == segment and given.rows:
                    head = Known(given.sequence, "")
                    term = moves(ref.id, ref.name, given.id, head, given.expected, given.rows, ids_hash(given.rows))
                    terms[index].append(replace(term, may_repeat=False, place=place, block=len(blocks)))
                    parts.append(columns_of(given.id, given.sequence + 1, given.rows))
                    keys += [given.id.encode()] * len(given.rows)
                    place += len(given.rows)
            chunk = Chunk(pa.concat_batches(parts), pa.array(keys, pa.binary()), None)
            blocks.append((ref.id, segment, route.logs[segment], encode([chunk], ref.schema_version, False)))
        for given, segment, own in zip(self._given, segments, terms, strict=True):
            if not given.rows:
                own.append(EntityIs(ref.id, ref.name, given.id, given.expected, segment, hash_key(given.id.encode())))
            elif given.condition is not None:
                own += no_matches(self._journal, given.id, given.condition, route.numbers)
            batch.terms += own


def look(journal: Journal, term: NoMatch) -> NoMatch:
    """Read what a transaction's condition forbids; returns the condition from there on. ConditionFailedError if an event matches."""
    ref = journal._ref
    after = Cut(journal._engine.store_id, {ref.name: StreamCut(ref.id, dict(term.after))}) if term.after else None
    condition = Condition((Match(term.tags, term.types, term.ids),), after)
    tail = journal._tail()
    for found in find_matches(journal, condition, tail):
        raise ConditionFailedError(
            f"{journal.name}: {found.id!r} has an event that may not be there, of type {found.type!r} at {found.position}: "
            "read again, decide again",
            term.id,
            position=found.position,
        )
    [again] = no_matches(journal, term.id, Condition(condition.matches, tail), term.segments)
    return again
