"""Rates from samples, and how they are handed on when segments are split, merged or rolled."""

from __future__ import annotations

import pytest

from headwater.model.keys import KEY_SPACE, WHOLE, KeyRange
from headwater.model.load import NO_RATES, WINDOWS_SECONDS, Amount, Rates, SegmentLoad, hand_on, observe

HALF = KEY_SPACE // 2
LEFT, RIGHT = KeyRange(0, HALF), KeyRange(HALF, KEY_SPACE)


def observed(rate: float, seconds: float, step: float = 10.0, rates: Rates = NO_RATES, age: float = 0.0) -> Rates:
    """A constant rate, sampled every `step` seconds."""
    for index in range(round(seconds / step)):
        rates = observe(rates, [Amount(rate * step, 0.0)], step, age + index * step)
    return rates


def test_a_constant_rate_is_measured_over_every_window_from_the_first_sample_on() -> None:
    for seconds in (10.0, 60.0, 3600.0):
        assert observed(7.0, seconds) == pytest.approx((7.0,) * 4)


def test_how_often_is_sampled_makes_no_difference() -> None:
    steady = observed(3.0, 7200.0)
    often, seldom = (observed(9.0, 600.0, step, steady, 7200.0) for step in (1.0, 300.0))
    assert often == pytest.approx(seldom)


def test_a_change_shows_in_short_windows_first() -> None:
    quiet = observed(1.0, 7200.0)
    after = observed(10.0, 120.0, rates=quiet, age=7200.0)
    assert list(after) == sorted(after, reverse=True)
    assert after[0] == pytest.approx(1.0 + 9.0 * 0.632, rel=0.01), "after one window, 63 % of the change"
    assert after[3] < 2.0
    gone = observed(0.0, 6 * 3600.0, rates=after, age=7320.0)
    assert all(rate < 1e-3 for rate in gone)


def test_a_transaction_counts_over_its_lifetime_and_not_as_a_peak() -> None:
    quiet = observed(0.0, 3600.0)
    lump = observe(quiet, [Amount(600_000.0, 0.0)], 10.0, 3600.0)
    spread = observe(quiet, [Amount(600_000.0, 600.0)], 10.0, 3600.0)
    assert lump[0] > 4000.0, "seen as coming at once, it is four times what it was"
    assert all(rate < 1001.0 for rate in spread)
    assert spread[0] == pytest.approx(1000.0, rel=0.01)


def test_transactions_one_after_the_other_are_as_good_as_a_steady_rate() -> None:
    rates = NO_RATES
    for index in range(30):
        rates = observe(rates, [Amount(100.0 * 600.0, 600.0)], 10.0, index * 600.0)
        assert max(rates) <= 101.0
        for quiet in range(59):
            rates = observe(rates, [], 10.0, index * 600.0 + 10.0 + quiet * 10.0)
    assert rates[3] > 50.0


def test_a_transaction_from_before_the_first_sample_counts_as_far_as_it_was_watched() -> None:
    rates = observe(NO_RATES, [Amount(36_000.0, 3600.0)], 10.0, 0.0)
    assert rates == pytest.approx((10.0,) * 4)


def test_successors_of_a_split_begin_with_their_share_of_the_rates() -> None:
    old = [SegmentLoad(0, WHOLE, 5, (8.0, 6.0, 4.0, 2.0))]
    parts = WHOLE.split(4)
    made = hand_on(old, [(number + 1, keys) for number, keys in enumerate(parts)], 77)
    assert [load.keys for load in made] == parts
    assert all(load.rates == (2.0, 1.5, 1.0, 0.5) and load.changed_at == 77 and load.origin == WHOLE for load in made)


def test_the_successor_of_a_merge_has_the_sum() -> None:
    old = [SegmentLoad(1, LEFT, 5, (1.0,) * 4), SegmentLoad(2, RIGHT, 6, (2.0,) * 4, WHOLE, 3)]
    assert hand_on(old, [(3, WHOLE)], 77) == [SegmentLoad(3, WHOLE, 77, (3.0,) * 4)]


def test_a_roll_changes_nothing_but_the_number() -> None:
    old = [SegmentLoad(1, LEFT, 5, (1.0,) * 4, WHOLE, 2), SegmentLoad(2, RIGHT, 5)]
    made = hand_on(old, [(7, LEFT), (8, RIGHT)], 77)
    assert made == [old[0]._replace(number=7), old[1]._replace(number=8)]


def test_what_stays_open_stays_as_it_is_and_all_come_in_the_order_of_their_keys() -> None:
    old = [SegmentLoad(1, LEFT, 5, (1.0,) * 4), SegmentLoad(2, RIGHT, 5, (2.0,) * 4)]
    quarter, next_quarter = LEFT.split(2)
    made = hand_on(old, [(2, RIGHT), (4, next_quarter), (3, quarter)], 77)
    assert [load.number for load in made] == [3, 4, 2]
    assert made[2] is old[1]
    assert sum(load.latest for load in made) == 3.0


def test_splits_in_a_row_that_leave_the_load_in_one_piece_are_counted() -> None:
    loads, keys = [SegmentLoad(0, WHOLE, 0, (10.0,) * 4)], WHOLE
    for depth in range(1, 5):
        left, right = keys.split(2)
        loads = hand_on(loads, [(2 * depth - 1, left), *((load.number, load.keys) for load in loads[1:]), (2 * depth, right)], depth)
        # All of it turns out to belong to the left one, as with a single hot key.
        loads = [load._replace(rates=(10.0,) * 4 if load.keys == left else NO_RATES) for load in loads]
        keys = left
        assert loads[0].in_vain == depth - 1
    loads = [load._replace(rates=(5.0,) * 4) for load in loads]
    left, right = keys.split(2)
    made = hand_on(loads, [(99, left), (100, right), *((load.number, load.keys) for load in loads[1:])], 9)
    assert made[0].in_vain == 0, "its sibling has as much: that split helped"


def test_there_is_a_window_of_2_5_10_and_20_minutes() -> None:
    assert [seconds / 60 for seconds in WINDOWS_SECONDS] == [2, 5, 10, 20]
