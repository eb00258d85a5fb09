"""Callers of the map of segments answer as the loops did that they had of their own, over any history of splits, merges and truncations.

The old loops stand here as they were.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.catalog.segments import SegmentRow
from headwater.errors import TruncatedError
from headwater.model.keys import WHOLE, KeyRange
from headwater.model.segmentmap import Progress, SegmentMap
from headwater.readers import progress
from headwater.segments.lanes import StreamRef
from headwater.streams import cuts, steps
from tests.lineage import first_spans, is_before, last_spans, span_of

Numbers = dict[int, int]
Found = list[tuple[int, int, int]]


@dataclass
class Chance:
    """Choices that Hypothesis draws, and makes smaller when a test fails."""

    data: st.DataObject

    def below(self, end: int) -> int:
        return self.data.draw(st.integers(0, end - 1))

    def is_true(self) -> bool:
        return self.data.draw(st.booleans())

    def some(self, items: list[Any]) -> list[Any]:
        return [item for item in items if self.is_true()]


def histories(chance: Chance) -> list[SegmentRow]:
    """The segments of a stream that was split, merged, rolled back and truncated; numbers may be missing."""
    rows: list[SegmentRow] = []
    live: list[KeyRange] = []

    def make(ranges: list[KeyRange]) -> None:
        for keys in ranges:
            tail = (0, 3, 10)[chance.below(3)]
            rows.append(SegmentRow(len(rows), len(rows), keys, 0, 0, 1, 0, 0, tail, 0, 0, 0, 0))
        live.extend(ranges)
        live.sort()

    make(WHOLE.split(1 + chance.below(3)))
    for _ in range(chance.below(7)):
        place, what = chance.below(len(live)), chance.below(3)
        if what == 0:
            make(live.pop(place).split(2 + chance.below(2)))
        elif what == 1:
            merged = live[place : place + 2]
            del live[place : place + 2]
            make([KeyRange(merged[0].start, merged[-1].end)])
        else:
            # A roll, of a stream that is rolled back too: the same keys again under new numbers.
            again, live[:] = list(live), []
            make(again)
    newest = {row.number for row in SegmentMap(rows).newest()}
    is_sealed = chance.is_true()
    sealed = [row if is_sealed or row.number not in newest else _with(row, sealed_epoch=None) for row in rows]
    # Truncated from the head: what precedes a segment that stays is gone, or its head moved.
    left: list[SegmentRow] = []
    for row in sealed:
        blocked = any(other.keys.overlaps(row.keys) for other in left)
        if not blocked and row.number not in newest and chance.below(3) == 0:
            continue
        left.append(row if blocked else _with(row, head=chance.below(row.tail + 1)))
    return left


def _with(row: SegmentRow, **fields: Any) -> SegmentRow:
    return row._replace(**fields)


def a_place(chance: Chance, rows: list[SegmentRow]) -> Numbers:
    """Segments that cover every key once, of which some may be gone."""
    stream_map = SegmentMap(rows)
    place = {row.number: row.keys for row in stream_map.oldest()}
    for row in rows:
        near = [number for number, keys in place.items() if keys.overlaps(row.keys) and number < row.number]
        family = [other for other in rows if other.number not in place and any(place[number].overlaps(other.keys) for number in near)]
        covered = sum(place[number].end - place[number].start for number in near)
        if near and chance.is_true() and sum(other.keys.end - other.keys.start for other in family) == covered:
            place = {number: keys for number, keys in place.items() if number not in near} | {other.number: other.keys for other in family}
    numbers = {number: chance.below(stream_map.segments[number].tail + 1) for number in place}
    if chance.below(5) == 0:
        # Segments before the oldest, which are gone.
        numbers = {-1: 2} if chance.is_true() else {number: at for number, at in numbers.items() if chance.is_true()} | {-1: 2}
    return numbers


def any_place(chance: Chance, rows: list[SegmentRow]) -> Numbers:
    """Any segments, whether or not they cover every key, with any numbers."""
    numbers = {row.number: chance.below(12) for row in chance.some(rows)}
    return numbers | ({-1: 2} if chance.is_true() else {})


def listed(parts: Any) -> Found:
    return [(part.segment.number, part.start, part.end) for part in parts]


def old_between_numbers(rows: list[SegmentRow], lower: Numbers, upper: Numbers | None) -> Found:
    by_number = {row.number: row for row in rows}
    lower_spans = [span_of(by_number[segment]) for segment in lower if segment in by_number]
    upper_spans = [span_of(by_number[segment]) for segment in upper or {} if segment in by_number]
    found = []
    for row in rows:
        start = max(lower.get(row.number, 0), row.head)
        if row.number not in lower and is_before(span_of(row), lower_spans):
            continue
        end = row.tail
        if upper is not None:
            if row.number in upper:
                end = upper[row.number]
            elif not is_before(span_of(row), upper_spans):
                continue
        if start < end:
            found.append((row.number, start, end))
    return found


def old_between(rows: list[SegmentRow], lower: Numbers, upper: Numbers | None) -> Found | None:
    """None where it raised TruncatedError."""
    by_number = {row.number: row for row in rows}
    for place in (lower, upper or {}):
        for segment, number in place.items():
            if segment not in by_number or number < by_number[segment].head:
                return None
    lower_spans = [span_of(by_number[segment]) for segment in lower]
    upper_spans = [span_of(by_number[segment]) for segment in upper or {}]
    found = []
    for row in rows:
        if row.number in lower:
            start = lower[row.number]
        elif is_before(span_of(row), lower_spans):
            continue
        else:
            start = row.head
        if upper is None:
            end = row.tail
        elif row.number in upper:
            end = upper[row.number]
        elif is_before(span_of(row), upper_spans):
            end = row.tail
        else:
            continue
        if start < end or (upper is None and start <= end):
            found.append((row.number, start, end))
    return found


def old_parts(rows: list[SegmentRow], lower: Numbers, upper: Numbers | None) -> Found:
    by_number = {row.number: row for row in rows}
    lower_spans = [span_of(by_number[number]) for number in lower if number in by_number]
    upper_spans = [span_of(by_number[number]) for number in upper or {} if number in by_number]
    found = []
    for row in rows:
        first = lower.get(row.number, row.head)
        if row.number not in lower and is_before(span_of(row), lower_spans):
            continue
        until = row.tail
        if upper is not None:
            if row.number in upper:
                until = min(until, upper[row.number])
            elif not is_before(span_of(row), upper_spans):
                until = first
        found.append((row.number, first, max(first, until)))
    return found


def old_skip_truncated(rows: list[SegmentRow], lower: Numbers) -> Numbers:
    by_number = {row.number: row for row in rows}
    numbers = {span.number: span.head for span in first_spans(map(span_of, rows))}
    for number, at in lower.items():
        if number in by_number:
            numbers[number] = max(at, by_number[number].head)
    return {span.number: numbers[span.number] for span in last_spans(span_of(by_number[number]) for number in numbers)}


def old_is_passed(segment: int, number: int, place: Numbers, rows: list[SegmentRow]) -> bool:
    spans = {row.number: span_of(row) for row in rows}
    if segment in place:
        return place[segment] >= number
    return segment not in spans or is_before(spans[segment], [spans[other] for other in place if other in spans])


def old_reaches(segment: int, number: int, place: Numbers, rows: list[SegmentRow]) -> bool:
    spans = {row.number: span_of(row) for row in rows}
    if segment in place:
        return number >= place[segment]
    return segment in spans and not is_before(spans[segment], [spans[other] for other in place if other in spans])


def old_advance_once(rows: dict[int, SegmentRow], frontier: dict[int, Any], ends: Numbers | None) -> bool:
    changed = False
    for number, (position, done) in list(frontier.items()):
        row = rows.get(number)
        if done or row is None:
            continue
        if ends is not None and number in ends:
            done = position >= ends[number]
        else:
            done = (not row.is_open and position >= row.tail) or (ends is not None and old_is_behind(row, ends, rows))
        if done:
            frontier[number] = (position, True)
            changed = True
    if any(number not in rows and not done for number, (_, done) in frontier.items()):
        return changed
    blocked: list[SegmentRow] = []
    for number, row in sorted(rows.items()):
        if number in frontier or (ends is not None and old_is_behind(row, ends, rows)):
            continue
        near = [other for other in frontier if other in rows and rows[other].keys.overlaps(row.keys)]
        if any(other > number for other in near):
            continue
        if not all(frontier[other][1] for other in near) or any(other.keys.overlaps(row.keys) for other in blocked):
            blocked.append(row)
            continue
        frontier[number] = (0, False)
        changed = True
    present = [rows[number].keys for number in frontier if number in rows]
    for number in [number for number, (_, done) in frontier.items() if done]:
        if number not in rows:
            is_passed = old_covers(present, WHOLE)
        else:
            newer = [
                rows[other].keys for other in frontier if other > number and other in rows and rows[other].keys.overlaps(rows[number].keys)
            ]
            is_passed = old_covers(newer, rows[number].keys)
        if is_passed:
            del frontier[number]
            changed = True
    return changed


def old_is_behind(row: SegmentRow, ends: Numbers, rows: dict[int, SegmentRow]) -> bool:
    return row.number not in ends and not any(end > row.number and end in rows and rows[end].keys.overlaps(row.keys) for end in ends)


def old_covers(ranges: list[KeyRange], whole: KeyRange) -> bool:
    at = whole.start
    for start, end in sorted(ranges):
        if start <= at:
            at = max(at, end)
    return at >= whole.end


def old_advance(rows: list[SegmentRow], places: dict[int, Progress], ends: Numbers | None) -> dict[int, Any]:
    found: dict[int, Any] = dict(places)
    while old_advance_once({row.number: row for row in rows}, found, ends):
        pass
    return found


REF = StreamRef(1, "a/x", "events", pa.schema([]), 0, False)


@given(st.data())
def test_what_lies_between_two_places(data: st.DataObject) -> None:
    chance = Chance(data)
    rows = histories(chance)
    for make in (a_place, any_place):
        lower = make(chance, rows)
        upper = make(chance, rows) if chance.is_true() else None
        assert listed(cuts.between_numbers(rows, lower, upper)) == old_between_numbers(rows, lower, upper)
        assert listed(steps._parts(rows, lower, upper)) == old_parts(rows, lower, upper)
        assert steps._skip_truncated(rows, lower) == old_skip_truncated(rows, lower)
        expected = old_between(rows, lower, upper)
        if expected is not None:
            assert listed(cuts._between("store", REF, rows, lower, upper)) == expected
            continue
        with pytest.raises(TruncatedError) as caught:
            cuts._between("store", REF, rows, lower, upper)
        assert caught.value.head is not None
        assert dict(caught.value.head.streams["a/x"].segments) == {span.number: span.head for span in first_spans(map(span_of, rows))}


@given(st.data())
def test_how_far_a_mark_of_event_time_is_from_a_group(data: st.DataObject) -> None:
    chance = Chance(data)
    rows = histories(chance)
    stream_map = SegmentMap(rows)
    for make in (a_place, any_place):
        place, mark = make(chance, rows), make(chance, rows)
        front = stream_map.front(place)
        for segment, number in mark.items():
            assert progress._is_passed(segment, number, place, stream_map, front) == old_is_passed(segment, number, place, rows)
            assert progress._reaches(segment, number, place, stream_map, front) == old_reaches(segment, number, place, rows)


@given(st.data())
def test_how_a_group_moves_on_until_it_is_at_its_end(data: st.DataObject) -> None:
    chance = Chance(data)
    rows = histories(chance)
    ends = a_place(chance, rows) if chance.is_true() else None
    places = {number: Progress(at, False) for number, at in a_place(chance, rows).items()}
    for _ in range(20):
        found = SegmentMap(rows).advance(places, ends)
        assert found == old_advance(rows, places, ends)
        assert SegmentMap(rows).advance(found, ends) == found
        live = [number for number, place in found.items() if not place.is_done]
        if not live:
            break
        places = dict(found)
        tails = {row.number: row.tail for row in rows}
        for number in chance.some(live) or live[:1]:
            # Some are read to the end, some in part.
            tail = max(tails.get(number, 0), places[number].number)
            places[number] = Progress(
                tail if chance.below(4) else places[number].number + chance.below(tail - places[number].number + 1), False
            )
        if chance.below(6) == 0 and len(rows) > 1:
            rows = rows[1:]  # Truncated meanwhile, maybe before it was read.
