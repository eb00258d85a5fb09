"""Which segments may be read: the quick way agrees with looking at all pairs, and stays quick with thousands."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from headwater.catalog.segments import SegmentRow
from headwater.model.keys import KEY_SPACE, WHOLE, KeyRange
from headwater.streams.cuts import Range
from headwater.streams.lineage import Lineage

ROW = SegmentRow(0, 0, WHOLE, 0, 0, None, None, 0, 1, 0, 0, 0, 0)


def item(number: int, keys: KeyRange) -> Range:
    return Range(ROW._replace(number=number, keys=keys), 0, 1)


def scaled(choices: list[tuple[int, int]]) -> list[Range]:
    """The segments of a stream that was split and merged in this way, by number."""
    made, open_ranges, number = [item(0, WHOLE)], [WHOLE], 0
    for place, parts in choices:
        chosen = open_ranges[place % len(open_ranges)]
        if parts:
            new = chosen.split(parts + 1)
            open_ranges.remove(chosen)
        else:
            neighbours = sorted(open_ranges)
            index = neighbours.index(chosen)
            merged = neighbours[index : index + 2]
            new = [KeyRange(merged[0].start, merged[-1].end)]
            open_ranges = [keys for keys in open_ranges if keys not in merged]
        open_ranges += new
        for keys in new:
            number += 1
            made.append(item(number, keys))
    return made


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 3)), max_size=30), st.randoms(use_true_random=False), st.integers(0, 20))
def test_a_segment_is_ready_exactly_when_no_predecessor_is_left(choices: list[tuple[int, int]], random: object, late: int) -> None:
    items = scaled(choices)
    lineage = Lineage()
    left = {found.segment.number: found.segment for found in items}
    now = max(0, len(items) - late)
    first, rest = items[:now], items[now:]
    reading: set[int] = set()
    for found in first:
        lineage.add(found)
    while lineage or reading or rest:
        if rest:
            lineage.add(rest.pop(0))
        reading |= {found.segment.number for found in lineage.take_ready()}
        known = {number: row for number, row in left.items() if number not in {found.segment.number for found in rest}}
        wanted = {
            number for number, row in known.items() if not any(other < number and known[other].keys.overlaps(row.keys) for other in known)
        }
        assert reading == wanted
        if reading:
            done = random.choice(sorted(reading))  # type: ignore[attr-defined]
            reading.remove(done)
            del left[done]
            lineage.finish(done)


def test_ten_thousand_segments_are_ordered_in_a_moment() -> None:
    begun = time.perf_counter()
    lineage = Lineage()
    keys = KeyRange(0, KEY_SPACE).split(100)
    for number in range(10_000):
        lineage.add(item(number, keys[number % 100]))
    finished = 0
    while lineage:
        for found in lineage.take_ready():
            lineage.finish(found.segment.number)
            finished += 1
    assert finished == 10_000
    assert time.perf_counter() - begun < 5
