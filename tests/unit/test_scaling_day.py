"""The decision over hours and days of simulated load: segments stay within their target, and nothing goes back and forth."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from headwater.model.keys import KEY_SPACE
from headwater.model.policies import Scaling
from tests.city import City, Simulation

# Days take a while, even simulated: not for a quick run.
pytestmark = pytest.mark.slow

TARGET = 100
HOUR = 3600.0


def test_over_a_day_of_taxi_rides_segments_stay_within_their_target_without_flapping(seed: int) -> None:
    city = City(seed, low=3.0 * TARGET)
    assert max(np.max(city.rates(hour)) for hour in range(24)) < TARGET, "no zone alone is more than a segment may have"
    day = Simulation(Scaling.by_event_rate(TARGET, factor=2 + seed % 3))
    hot = measured_hot = segment_minutes = 0
    for _ in range(24 * 60):
        hour = day.now / HOUR
        rates = city.rates_by_segment(hour, day.loads)
        day.advance(60.0, city.chance.poisson(rates * 60.0).tolist())
        assert [load.keys.start for load in day.loads] == [0, *(load.keys.end for load in day.loads[:-1])]
        assert day.loads[-1].keys.end == KEY_SPACE
        if day.now > 0.5 * HOUR:  # it begins with one segment for the whole city
            segment_minutes += len(day.loads)
            hot += int(np.count_nonzero(rates > 1.5 * TARGET))
            measured_hot += sum(load.rates[2] > 1.2 * TARGET for load in day.loads)
            needed = city.volume(hour) / TARGET
            assert needed <= len(day.loads) <= 3.5 * needed + 2
    assert hot < 0.01 * segment_minutes
    assert measured_hot < 0.001 * segment_minutes

    changes = [change.kind for _, change, _ in day.changes]
    assert 40 < len(changes) < 500, "40 segments come and go again, some more because the crowds wander"
    assert changes.count("merge") > 15
    assert day.reversals("split", "merge")[0] >= 20 * 60
    undone = day.reversals("merge", "split")
    assert not undone or undone[0] >= 15 * 60
    assert sum(life < HOUR for life in undone) <= 0.15 * changes.count("merge")


@pytest.mark.parametrize("segments_worth", [0.4, 0.95, 1.05, 3.3, 7.0])
def test_a_steady_load_is_settled_once_and_for_all(seed: int, segments_worth: float) -> None:
    chance = np.random.default_rng(seed)
    steady = Simulation(Scaling.by_event_rate(TARGET, factor=3))
    for _ in range(12 * 60):
        widths = [(load.keys.end - load.keys.start) / KEY_SPACE for load in steady.loads]
        steady.advance(60.0, chance.poisson(np.array(widths) * segments_worth * TARGET * 60.0).tolist())
    assert all(time < 1.5 * HOUR for time, _, _ in steady.changes)
    assert segments_worth <= len(steady.loads) <= 4 * segments_worth + 1


def test_bursts_that_repeat_do_not_make_it_flap() -> None:
    # Three times the target for a minute, then nothing for four: 60 % of it on the whole.
    bursts = Simulation(Scaling.by_event_rate(TARGET))
    for minute in range(12 * 60):
        rate = 3.0 * TARGET if minute % 5 == 0 else 0.0
        bursts.advance(60.0, [rate * 60.0 / len(bursts.loads)] * len(bursts.loads))
    assert len(bursts.changes) <= 2


def test_a_wave_of_an_hour_is_followed_by_splits_only() -> None:
    # Merges wait for the wave's low to last; a wave of an hour's length does not give them that.
    wave = Simulation(Scaling.by_event_rate(TARGET))
    for minute in range(24 * 60):
        rate = TARGET * (2.0 + 1.5 * math.sin(2 * math.pi * minute / 60))
        wave.advance(60.0, [rate * 60.0 / len(wave.loads)] * len(wave.loads))
    assert [change.kind for _, change, _ in wave.changes].count("merge") <= 2
    assert 4 <= len(wave.loads) <= 8


def test_one_key_with_all_the_load_is_not_chased_for_ever() -> None:
    place = int(0.3 * KEY_SPACE)
    day = Simulation(Scaling.by_event_rate(TARGET))
    for _ in range(48 * 60):
        day.advance(60.0, [5.0 * TARGET * 60.0 if load.keys.start <= place < load.keys.end else 0.0 for load in day.loads])
    splits = [time for time, change, _ in day.changes if change.kind == "split"]
    assert len(splits) < 14
    waits = [after - before for before, after in pairwise(splits)]
    assert waits[-1] > 4 * HOUR and all(after >= before for before, after in pairwise(waits[3:]))
    assert len(day.loads) <= 5, "its cold halves are merged again"


def test_ten_times_the_load_at_once_is_met_within_minutes() -> None:
    jump = Simulation(Scaling.by_event_rate(TARGET, factor=4))
    for minute in range(3 * 60):
        rate = TARGET * (0.9 if minute < 60 else 9.0)
        jump.advance(60.0, [rate * 60.0 / len(jump.loads)] * len(jump.loads))
        if minute == 75:
            assert max(load.rates[0] for load in jump.loads) < 1.6 * TARGET
    assert len(jump.changes) < 25


def test_a_stream_that_falls_silent_shrinks_to_its_floor() -> None:
    silent = Simulation(Scaling.by_event_rate(TARGET, factor=8, min_segments=2))
    for minute in range(8 * 60):
        rate = 30.0 * TARGET if minute < 60 else 0.0
        silent.advance(60.0, [rate * 60.0 / len(silent.loads)] * len(silent.loads))
        assert minute == 0 or len(silent.loads) >= 2
    assert len(silent.loads) == 2
