"""When a stream is split and merged: each rule of the decision by itself."""

from __future__ import annotations

import pytest

from headwater.model.keys import WHOLE, KeyRange
from headwater.model.load import Rates, SegmentLoad
from headwater.model.policies import Scaling
from headwater.model.scaling_decision import Change, decide

MINUTE = 60_000_000
LONG = 24 * 60
POLICY = Scaling.by_event_rate(100)


def loads(*rates: float | Rates, minutes: float | list[float] = LONG) -> list[SegmentLoad]:
    """Segments of equal width with these rates, unchanged for so many minutes at the time `NOW`."""
    ages = minutes if isinstance(minutes, list) else [minutes] * len(rates)
    return [
        SegmentLoad(number, keys, NOW - round(age * MINUTE), rate if isinstance(rate, tuple) else (float(rate),) * 4)
        for number, (keys, rate, age) in enumerate(zip(WHOLE.split(len(rates)), rates, ages, strict=True))
    ]


NOW = 10 * LONG * MINUTE


def kinds(changes: list[Change]) -> list[tuple[str, tuple[int, ...], int]]:
    return [(change.kind, change.seal, len(change.ranges)) for change in changes]


@pytest.mark.parametrize(
    ("rates", "is_split"),
    [
        ((100.0, 100.0, 100.0, 100.0), False),
        ((101.0, 101.0, 101.0, 101.0), True),
        ((110.0, 110.0, 99.0, 50.0), False),
        ((150.0, 201.0, 80.0, 20.0), True),
        ((501.0, 190.0, 60.0, 10.0), True),
        ((499.0, 190.0, 60.0, 10.0), False),
        ((50.0, 90.0, 120.0, 150.0), False),
        ((90.0, 250.0, 150.0, 90.0), False),
    ],
    ids=["at target", "above", "not for long", "twice over 5", "5 times over 2", "not quite", "cooling down", "a burst that is over"],
)
def test_a_segment_is_split_when_a_window_is_above_its_threshold_and_it_is_still_hot(rates: Rates, is_split: bool) -> None:
    assert kinds(decide(POLICY, loads(rates), NOW)) == ([("split", (0,), 2)] if is_split else [])


@pytest.mark.parametrize(("rate", "parts"), [(101, 2), (200, 2), (201, 3), (350, 4), (900, 4)])
def test_a_segment_is_split_into_as_many_parts_as_it_needs_up_to_the_factor(rate: float, parts: int) -> None:
    [change] = decide(Scaling.by_event_rate(100, factor=4), loads(rate), NOW)
    assert change.ranges == tuple(WHOLE.split(parts))
    assert change.reason == f"{'2' if rate > 500 else '5' if rate > 200 else '10'}-minute rate {rate}/s, target 100/s"


def test_all_hot_segments_are_split_at_once_the_hottest_first_as_far_as_there_is_room() -> None:
    hot = loads(150, 10, 300, 200)
    assert kinds(decide(POLICY, hot, NOW)) == [("split", (2,), 2), ("split", (3,), 2), ("split", (0,), 2)]
    narrow = Scaling.by_event_rate(100, max_segments=5)
    assert kinds(decide(narrow, hot, NOW)) == [("split", (2,), 2)]
    assert decide(Scaling.by_event_rate(100, max_segments=4), hot, NOW) == []


def test_a_segment_is_left_alone_for_a_minute_before_a_split() -> None:
    assert decide(POLICY, loads(900, minutes=0.99), NOW) == []
    assert len(decide(POLICY, loads(900, minutes=1.0), NOW)) == 1


def test_a_split_that_would_be_in_vain_again_waits_twice_as_long_each_time() -> None:
    for in_vain, minutes in ((0, 1), (1, 2), (4, 16), (10, 1024)):
        soon, later = ([load._replace(in_vain=in_vain) for load in loads(900, minutes=age)] for age in (minutes - 0.01, minutes))
        assert decide(POLICY, soon, NOW) == []
        assert len(decide(POLICY, later, NOW)) == 1


def test_a_range_of_one_key_is_not_split() -> None:
    assert decide(POLICY, [SegmentLoad(0, KeyRange(5, 6), 0, (900.0,) * 4)], NOW) == []


def test_cold_neighbours_are_merged_if_they_have_room_to_grow_together() -> None:
    assert kinds(decide(POLICY, loads(29, 30), NOW)) == [("merge", (0, 1), 1)]
    assert decide(POLICY, loads(30, 31), NOW) == []
    [change] = decide(POLICY, loads(0, 0), NOW)
    assert change.ranges == (WHOLE,)


def test_what_was_hot_over_any_window_is_not_cold() -> None:
    for window in range(4):
        rates = tuple(70.0 if index == window else 1.0 for index in range(4))
        assert decide(POLICY, loads((rates[0], rates[1], rates[2], rates[3]), 1), NOW) == []


def test_the_coldest_pair_is_merged_first_and_no_segment_twice() -> None:
    assert kinds(decide(POLICY, loads(20, 10, 5, 30, 20), NOW)) == [("merge", (1, 2), 1), ("merge", (3, 4), 1)]


def test_a_segment_is_left_alone_for_twenty_minutes_before_a_merge() -> None:
    assert decide(POLICY, loads(1, 1, minutes=[LONG, 19.9]), NOW) == []
    assert len(decide(POLICY, loads(1, 1, minutes=[LONG, 20]), NOW)) == 1


def test_no_merge_goes_below_the_floor() -> None:
    cold = loads(0, 0, 0, 0)
    assert len(decide(Scaling.by_event_rate(100, min_segments=3), cold, NOW)) == 1
    assert decide(Scaling.by_event_rate(100, min_segments=4), cold, NOW) == []


def test_a_segment_between_two_that_are_split_is_not_merged_with_them() -> None:
    assert kinds(decide(POLICY, loads(300, 1, 1), NOW)) == [("split", (0,), 2), ("merge", (1, 2), 1)]
    assert kinds(decide(POLICY, loads(1, 300, 1), NOW)) == [("split", (1,), 2)]


def test_a_floor_that_was_raised_is_reached_at_once() -> None:
    changes = decide(Scaling.by_event_rate(100, min_segments=7), loads(1, 5, 1, minutes=0), NOW)
    assert sum(len(change.ranges) - 1 for change in changes) == 4
    assert changes[0].seal == (1,), "the hottest first"
    assert changes[0].reason == "at least 7 segments"


def test_a_ceiling_that_was_lowered_is_reached_in_a_few_rounds_whatever_the_load() -> None:
    policy = Scaling.by_event_rate(100, max_segments=2)
    changes = decide(policy, loads(900, 900, 500, 400, 900, minutes=0), NOW)
    assert ("merge", (2, 3), 1) in kinds(changes)
    assert len(changes) == 2, "five become three; two, the next time"


def test_bytes_are_as_good_as_events() -> None:
    assert kinds(decide(Scaling.by_data_rate(1 << 20), loads(3 << 20, 1, 1), NOW)) == [("split", (0,), 2), ("merge", (1, 2), 1)]
