"""A city of taxi rides: how many begin in each of its zones, hour by hour. Its peak is ten times its low, and the crowds wander."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from headwater.model.keys import KEY_SPACE, WHOLE
from headwater.model.load import Amount, SegmentLoad, hand_on, observe
from headwater.model.policies import Scaling
from headwater.model.scaling_decision import Change, decide

Floats = np.ndarray[Any, np.dtype[np.float64]]


class City:
    """Zones lie at random places of the key space [0, 1), each with a popularity of its own; crowds wander over that space."""

    def __init__(self, seed: int, *, low: float, zones: int = 3000, crowds: int = 5, crowd: float = 5.0) -> None:
        self.chance = np.random.default_rng(seed)
        self.low = low
        self.places: Floats = np.sort(self.chance.random(zones))
        self._popularity: Floats = np.minimum(self.chance.pareto(2.5, zones) + 0.2, 2.5)
        self._starts: Floats = self.chance.random(crowds)
        self._speeds: Floats = self.chance.choice([-1.0, 1.0], crowds) * self.chance.uniform(0.01, 0.04, crowds)
        self._crowd = crowd

    def volume(self, hour: float) -> float:
        """Rides per second in the whole city: lowest at 4, highest at 16 o'clock."""
        return self.low * (1.0 + 9.0 * (0.5 - 0.5 * math.cos(2 * math.pi * (hour - 4) / 24)))

    def rates(self, hour: float) -> Floats:
        """Rides per second in each zone."""
        crowded = np.ones_like(self.places)
        for start, speed in zip(self._starts, self._speeds, strict=True):
            distance = np.abs(self.places - (start + speed * hour) % 1.0)
            crowded += self._crowd * np.exp(-((np.minimum(distance, 1.0 - distance) / 0.02) ** 2))
        weights = self._popularity * crowded
        return np.asarray(weights * (self.volume(hour) / weights.sum()), dtype=np.float64)

    def rates_by_segment(self, hour: float, loads: Sequence[SegmentLoad]) -> Floats:
        """Rides per second of each segment; `loads` tile the key space, in order."""
        total = np.concatenate([[0.0], np.cumsum(self.rates(hour))])
        bounds = np.searchsorted(self.places, [*(load.keys.start / KEY_SPACE for load in loads), 1.0])
        return np.asarray(total[bounds[1:]] - total[bounds[:-1]], dtype=np.float64)


class Simulation:
    """Segments that exist only here, scaled by `decide` and nothing else."""

    def __init__(self, policy: Scaling) -> None:
        self.policy = policy
        self.now = 0.0
        self.loads = hand_on([], [(0, WHOLE)], 0)
        #: (time, change, and for each segment it sealed: how it was made, and how long before)
        self.changes: list[tuple[float, Change, list[tuple[str, float]]]] = []
        self._made: dict[int, tuple[str, float]] = {0: ("create", 0.0)}
        self._next = 1

    def advance(self, seconds: float, counts: Sequence[float]) -> list[Change]:
        """Append so much to each segment over so many seconds, then decide; returns what was changed."""
        age, self.now = self.now, self.now + seconds
        self.loads = [
            load._replace(rates=observe(load.rates, [Amount(float(count), 0.0)], seconds, age))
            for load, count in zip(self.loads, counts, strict=True)
        ]
        changes = decide(self.policy, self.loads, int(self.now * 1e6))
        if changes:
            opened = {load.number: load.keys for load in self.loads}
            for change in changes:
                lives = [(kind, self.now - made) for kind, made in (self._made[number] for number in change.seal)]
                self.changes.append((self.now, change, lives))
                for number in change.seal:
                    del opened[number]
                for keys in change.ranges:
                    opened[self._next] = keys
                    self._made[self._next] = (change.kind, self.now)
                    self._next += 1
            self.loads = hand_on(self.loads, opened.items(), int(self.now * 1e6))
        return changes

    def reversals(self, made_by: str, undone_by: str) -> list[float]:
        """After how many seconds segments made by the one kind of change were sealed by the other, shortest first."""
        return sorted(life for _, change, lives in self.changes if change.kind == undone_by for kind, life in lives if kind == made_by)
