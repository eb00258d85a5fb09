"""Where retention cuts, over any history of splits and merges: all keys are covered, and nothing that stays lies before the cut."""

from __future__ import annotations

import random

from headwater.catalog.segments import SegmentRow
from headwater.model.keys import KEY_SPACE, KeyRange
from headwater.model.segmentmap import SegmentMap
from tests.lineage import Span, is_before, span_of


def _history(chance: random.Random, steps: int) -> tuple[list[SegmentRow], set[int]]:
    """Segments by number, and which of them are open."""
    rows: list[SegmentRow] = []
    live: list[SegmentRow] = []

    def make(keys: KeyRange) -> None:
        tail = chance.choice([0, 3, 10])
        rows.append(SegmentRow(len(rows), len(rows), keys, 0, 0, None, None, 0, tail, 0, 0, 0, 0))
        live.append(rows[-1])
        live.sort(key=lambda row: row.keys.start)

    for part in range(2):
        make(KeyRange(part * KEY_SPACE // 2, (part + 1) * KEY_SPACE // 2))
    for _ in range(steps):
        place = chance.randrange(len(live))
        if chance.random() < 0.5 or len(live) == 1:
            start, end = live.pop(place).keys
            parts = chance.choice([2, 3])
            for part in range(parts):
                make(KeyRange(start + (end - start) * part // parts, start + (end - start) * (part + 1) // parts))
        else:
            some = live[place : place + chance.choice([2, 3])]
            del live[place : place + len(some)]
            make(KeyRange(some[0].keys.start, some[-1].keys.end))
    return rows, {row.number for row in live}


def _heads(chance: random.Random, rows: list[SegmentRow]) -> dict[int, int]:
    """How far each may go: into a segment only when all before it are gone, as far as the policies know."""
    heads: dict[int, int] = {}
    for row in rows:
        blocked = any(other.number < row.number and other.keys.overlaps(row.keys) and heads[other.number] < other.tail for other in rows)
        heads[row.number] = 0 if blocked else chance.choice([0, row.tail // 2, row.tail, row.tail])
    return heads


def test_nothing_that_stays_lies_before_the_cut() -> None:
    for number in range(2000):
        _check_one(random.Random(number))


def _check_one(chance: random.Random) -> None:
    rows, live = _history(chance, chance.randrange(8))
    heads = _heads(chance, rows)
    kept = {row.number for row in rows if chance.random() < 0.1 and heads[row.number] == row.tail}
    cut = SegmentMap(rows).frontier(heads, kept)
    keys = sorted(rows[number].keys for number in cut)
    assert [start for start, _ in keys] == [0, *(end for _, end in keys[:-1])] and keys[-1].end == KEY_SPACE, "each key once"
    spans = [Span(number, rows[number].keys, at, rows[number].tail) for number, at in cut.items()]
    for row in rows:
        at = cut.get(row.number, row.tail if is_before(span_of(row), spans) else 0)
        assert at <= heads[row.number], f"events of segment {row.number} from {heads[row.number]} on stay"
        assert row.number not in kept or row.number in cut or not is_before(span_of(row), spans), "a group is there"
        assert row.number not in live or not is_before(span_of(row), spans)
