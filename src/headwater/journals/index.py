"""Reading a journal's index: the numbers of an entity's events, and of a tag's."""

from __future__ import annotations

from collections.abc import Iterator

from headwater.catalog import entities, words
from headwater.catalog.entities import EntityRow
from headwater.catalog.words import WordRow
from headwater.model.numbers import Numbers, parse
from headwater.segments.engine import Engine

#: Pages that are read with one look.
_PAGES = 32


def entity_runs(engine: Engine, stream: int, id: str, row: EntityRow, first: int, end: int) -> Iterator[Numbers]:
    """Where an entity's events of the sequences [first, end) are, in order. `row` was looked up before."""
    at = first
    while at <= row.paged and at < end:
        pages = engine.run(entities.list_pages, stream, id, at, min(end, row.paged + 1), _PAGES)
        if not pages:
            return
        for sequence, text in pages:
            for run in parse(text):
                found = _cut(run, sequence, at, end)
                if found is not None:
                    yield found
                sequence += run.count
            at = max(at, sequence)
    sequence = row.paged + 1
    for run in parse(row.recent) if end > sequence else ():
        found = _cut(run, sequence, at, end)
        if found is not None:
            yield found
        sequence += run.count


def entity_runs_reversed(engine: Engine, stream: int, id: str, row: EntityRow, first: int, end: int) -> Iterator[Numbers]:
    """The same, the last ones first; the numbers of each run ascend."""
    yield from _reversed(row.recent, row.paged + 1, first, end)
    until = min(end, row.paged + 1)
    while first < until:
        pages = engine.run(entities.list_pages, stream, id, first, until, _PAGES, reverse=True)
        if not pages:
            return
        for sequence, text in pages:
            yield from _reversed(text, sequence, first, end)
            until = sequence


def _reversed(text: str, sequence: int, first: int, end: int) -> Iterator[Numbers]:
    runs = []
    for run in parse(text):
        found = _cut(run, sequence, first, end)
        if found is not None:
            runs.append(found)
        sequence += run.count
    yield from reversed(runs)


def _cut(run: Numbers, sequence: int, first: int, end: int) -> Numbers | None:
    """What a run that begins with this sequence has of the sequences [first, end)."""
    start, until = max(first, sequence), min(end, sequence + run.count)
    if start >= until:
        return None
    return run if until - start == run.count else Numbers(run.segment, run.first + start - sequence, until - start)


def tag_runs(engine: Engine, stream: int, tag: str, row: WordRow, first: int, end: int) -> Iterator[Numbers]:
    """Where a tag's events are among the numbers [first, end) of a segment, in order. `row` was looked up before."""
    recent = next(parse(row.recent)).first if row.recent else 1 << 62
    at = first
    while at < min(end, recent):
        pages = engine.run(words.list_word_pages, stream, tag, row.segment, at, min(end, recent), _PAGES)
        if not pages:
            break
        for _, text in pages:
            for run in parse(text):
                if found := within(run, at, end):
                    yield found
                    at = found.end
        if len(pages) < _PAGES:
            break
        at = max(at, pages[-1][0] + 1)
    for run in parse(row.recent):
        if found := within(run, at, end):
            yield found


def within(run: Numbers, first: int, end: int) -> Numbers | None:
    """What of a run is among the numbers [first, end)."""
    start, until = max(first, run.first), min(end, run.end)
    return Numbers(run.segment, start, until - start) if start < until else None
