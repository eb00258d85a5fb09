"""Listing the ids of a journal's entities, once or for ever."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from headwater.catalog import entities
from headwater.segments.fetching import Fetched, from_batch
from headwater.streams import reading

if TYPE_CHECKING:
    from headwater.journals.journal import Journal

_PAGE = 1000


def list_ids(journal: Journal, prefix: str, after: str | None, limit: int | None, follow: bool) -> Iterator[str]:
    """The ids in order; with `follow`, then those of new entities."""
    engine, ref = journal._engine, journal._ref
    journal._check_there()
    # Following begins at this cut. An entity that is listed with events past the cut is followed by its later events only.
    cut = journal._tail() if follow else None
    numbers = cut.streams[ref.name].segments if cut is not None else {}
    newest = max(numbers, default=0)
    listed: dict[str, tuple[int, int]] = {}
    left = limit
    while left is None or left > 0:
        size = _PAGE if left is None else min(_PAGE, left)
        rows = engine.run(entities.list_ids, ref.id, prefix, after, size)
        for row in rows:
            if follow and row.number >= numbers.get(row.segment, 0 if row.segment > newest else 1 << 62):
                listed[row.id] = row.segment, row.number
            yield row.id
        left = None if left is None else left - len(rows)
        if len(rows) < size:
            break
        after = rows[-1].id
    if cut is None or left == 0:
        return
    for batch in reading.follow_batches(engine, ref, cut, may_move=False):
        for id in _new_ids(journal, from_batch(batch, ref), listed) if batch is not None else ():
            if not id.startswith(prefix):
                continue
            yield id
            left = None if left is None else left - 1
            if left == 0:
                return


def _new_ids(journal: Journal, found: Fetched, listed: dict[str, tuple[int, int]]) -> Iterator[str]:
    """The ids of entities whose first event is among these, without those that were `listed` with it. A deleted entity may be new again."""
    hidden = journal._hidden
    hidden.refresh()
    ids, sequences = found.columns.column("id").to_pylist(), found.columns.column("sequence").to_pylist()
    for id, sequence, number in zip(ids, sequences, found.numbers, strict=True):
        if id in listed and (found.segment, number) <= listed[id]:
            continue
        listed.pop(id, None)
        if sequence == hidden.first(id):
            yield id
