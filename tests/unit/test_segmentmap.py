"""The map of segments answers as comparisons of each segment with each other one do, over any history of splits and merges."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from headwater.catalog.segments import SegmentRow
from headwater.model.keys import KEY_SPACE, KeyRange
from headwater.model.segmentmap import Front, SegmentMap
from tests.lineage import Span, first_spans, is_before, last_spans, span_of
from tests.unit.test_retention_cut import _history


def _place(chance: random.Random, spans: list[Span]) -> dict[int, int]:
    """Where a reader may be that went through the segments in order."""
    place = {span.number: 0 for span in first_spans(spans)}
    for _ in range(chance.randrange(6)):
        later = [span for span in spans if span.number not in place and not is_before(span, [s for s in spans if s.number in place])]
        if not later:
            break
        span = later[0]
        passed = [number for number in place if spans[number].keys.overlaps(span.keys)]
        family = [s for s in later if any(spans[number].keys.overlaps(s.keys) for number in passed)]
        if sum(s.keys.end - s.keys.start for s in family) == sum(spans[n].keys.end - spans[n].keys.start for n in passed):
            place = {number: at for number, at in place.items() if number not in passed} | {s.number: 0 for s in family}
    return {number: chance.randint(0, spans[number].tail) for number in place}


@pytest.mark.parametrize("block", range(4))
def test_it_answers_as_comparing_all_with_all_does(block: int) -> None:
    for number in range(250):
        chance = random.Random(block * 250 + number)
        rows, _ = _history(chance, chance.randrange(8))
        spans = [span_of(row) for row in rows]
        found = SegmentMap(rows)
        assert found.head() == {span.number: span.head for span in first_spans(spans)}
        assert found.tail() == {span.number: span.tail for span in last_spans(spans)}
        lower, upper = _place(chance, spans), _place(chance, spans)
        for place in (lower, upper):
            named = [spans[segment] for segment in place]
            before = {span.number for span in spans if span.number not in place and is_before(span, named)}
            assert {segment.number for segment in found.before(place)} == before
            assert found.reached(place) == {
                span.number: place.get(span.number, span.tail if span.number in before else span.head) for span in spans
            }
            keys = sorted(span.keys for span in named)
            covers = sum(end - start for start, end in keys) == KEY_SPACE
            assert found.tiles(place) == (covers and all(a.end <= b.start for a, b in pairwise(keys)))
        assert found.passes(upper, lower) == any(at > found.reached(lower)[segment] for segment, at in found.reached(upper).items())
        _check_between(found, spans, lower, upper)
        earlier = found.earlier(lower, upper)
        assert found.tiles(earlier) and not found.passes(earlier, lower) and not found.passes(earlier, upper)


def _check_between(found: SegmentMap[SegmentRow], spans: list[Span], lower: dict[int, int], upper: dict[int, int]) -> None:
    begun, ended = [spans[number] for number in lower], [spans[number] for number in upper]
    expected = []
    for span in spans:
        if span.number not in lower and is_before(span, begun):
            continue
        if span.number in upper or is_before(span, ended):
            expected.append((span.number, lower.get(span.number, span.head), upper.get(span.number, span.tail)))
    assert [(part.segment.number, part.start, part.end) for part in found.between(lower, upper)] == expected


def test_a_front_finds_what_overlaps_in_any_order_of_adding() -> None:
    chance = random.Random(7)
    for _ in range(300):
        spans = []
        for number in range(chance.randrange(1, 9)):
            start = chance.randrange(100)
            spans.append(Span(number, KeyRange(start, start + chance.randrange(1, 60)), 0, 0))
        one, other = Front(), Front(_Open(*span) for span in spans)
        for span in chance.sample(spans, len(spans)):
            one.add(_Open(*span))
        keys = KeyRange(chance.randrange(100), 100 + chance.randrange(1, 60))
        overlapping = {span.number for span in spans if span.keys.overlaps(keys)}
        assert set(one.over(keys)) == set(other.over(keys)) == overlapping


class _Open(Span):
    is_open = True
