"""A query's cut covers every key once, and neither skips nor repeats, whatever was split, merged or left empty."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

from headwater.journals.queries import frontier
from headwater.model.keys import WHOLE, KeyRange
from headwater.model.segmentmap import SegmentMap

_UNIT = WHOLE.end // 64


class Made(NamedTuple):
    """A segment as the frontier needs it."""

    number: int
    keys: KeyRange
    head: int = 0
    tail: int = 1
    is_open: bool = False


def grow(rng: random.Random) -> tuple[list[Made], dict[int, list[int]]]:
    """Segments after some splits and merges, and the predecessors of each."""
    rows, opened, before = [Made(0, WHOLE)], [0], {0: list[int]()}
    for _ in range(rng.randrange(1, 14)):
        order = sorted(opened, key=lambda number: rows[number].keys.start)
        if rng.random() < 0.5 and len(order) > 1:
            at = rng.randrange(len(order) - 1)
            sealed = order[at : at + rng.choice((2, 3))]
            ranges = [KeyRange(rows[sealed[0]].keys.start, rows[sealed[-1]].keys.end)]
        else:
            sealed = [rng.choice(order)]
            start, end = rows[sealed[0]].keys
            if end - start < 2 * _UNIT:
                continue
            middle = start + rng.randrange(1, (end - start) // _UNIT) * _UNIT
            ranges = [KeyRange(start, middle), KeyRange(middle, end)]
        for keys in ranges:
            before[len(rows)] = [number for number in sealed if rows[number].keys.overlaps(keys)]
            opened.append(len(rows))
            rows.append(Made(len(rows), keys))
        opened = [number for number in opened if number not in sealed]
    return rows, before


def test_a_frontier_tiles_the_keys_and_neither_skips_nor_repeats() -> None:
    for seed in range(1000):
        walk(seed)


def walk(seed: int) -> None:
    """Read the segments of a stream in any order that a reader may, and look at each place."""
    rng = random.Random(seed)
    rows, before = grow(rng)
    found: Any = rows
    stream_map = SegmentMap(rows)
    empty = {row.number for row in rows if rng.random() < 0.6}
    done: set[int] = set()
    numbers: dict[int, int] = {}
    while ready := [row.number for row in rows if row.number not in done and done.issuperset(before[row.number])]:
        number = rng.choice(ready)
        done.add(number)
        if number in empty:
            continue
        numbers[number] = 1
        place = frontier(found, {0: 0}, numbers)
        assert stream_map.tiles(place) and sum(rows[one].keys.end - rows[one].keys.start for one in place) == WHOLE.end, f"seed {seed}"
        reached = stream_map.reached(place)
        for row in rows:
            if row.number not in empty:
                assert reached[row.number] == (1 if row.number in numbers else 0), f"seed {seed}"
