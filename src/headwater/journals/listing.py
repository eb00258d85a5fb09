"""Listing the ids of a journal's entities, once or for ever."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from headwater.catalog import entities
from headwater.segments.fetching import from_batch
from headwater.streams import reading

if TYPE_CHECKING:
    from headwater.journals.journal import Journal

_PAGE = 1000


def list_ids(journal: Journal, prefix: str, after: str | None, limit: int | None, follow: bool) -> Iterator[str]:
    """The ids in order; with `follow`, then those of new entities."""
    engine, ref = journal._engine, journal._ref
    if not journal._is_ready():
        journal._check_ready("")
    # What is committed after this cut is seen by following from it; what of that was listed already is remembered until then.
    cut = journal._tail() if follow else None
    numbers = cut.streams[ref.name].segments if cut is not None else {}
    newest = max(numbers, default=0)
    listed: set[str] = set()
    left = limit
    while left is None or left > 0:
        size = _PAGE if left is None else min(_PAGE, left)
        rows = engine.run(entities.list_ids, ref.id, prefix, after, size)
        for row in rows:
            if follow and row.number >= numbers.get(row.segment, 0 if row.segment > newest else 1 << 62):
                listed.add(row.id)
            yield row.id
        left = None if left is None else left - len(rows)
        if len(rows) < size:
            break
        after = rows[-1].id
    if cut is None or left == 0:
        return
    for batch in reading.follow_batches(engine, ref, cut):
        if batch is None:
            continue
        journal._hidden.refresh()
        found = from_batch(batch, ref).columns
        for id, sequence in zip(found.column("id").to_pylist(), found.column("sequence").to_pylist(), strict=True):
            is_back = journal._hidden.was_deleted(id) and sequence == journal._hidden.low(id)
            if not (sequence == 1 or is_back) or not id.startswith(prefix):
                continue
            if id in listed:
                listed.discard(id)
                continue
            yield id
            left = None if left is None else left - 1
            if left == 0:
                return
