"""A measured figure, the limit it stands beside, and what it should reach."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")

#: Below this share of a goal something is broken, whatever else the machine is doing. A ratio hardly depends on the machine; a value
#: (of events a second, of milliseconds) is meant for a quiet one.
LARGE_LOSS = {"ratio": 0.4, "value": 0.2}


@dataclass(frozen=True)
class Goal:
    """What a figure (`of` is "value") or its ratio to the limit (`of` is "ratio") should be: at least, or at most, `bound`."""

    of: str
    bound: float
    at_least: bool

    def share(self, found: float) -> float:
        """How much of the goal is reached: 1 or more is all of it."""
        if self.at_least:
            return found / self.bound
        return self.bound / found if found > 0 else 1.0


@dataclass(frozen=True)
class Result:
    """One line of the table. `ratio` is figure to limit, as the goal wants it: the median over the rounds, not of the medians."""

    name: str
    variant: str
    value: float
    unit: str
    limit: float | None = None
    limit_name: str = ""
    ratio: float | None = None
    goal: Goal | None = None

    @property
    def share(self) -> float | None:
        """How much of the goal is reached; None where there is none."""
        if self.goal is None:
            return None
        found = self.value if self.goal.of == "value" else self.ratio
        assert found is not None, f"{self.name} has a goal for its ratio and no limit"
        return self.goal.share(found)

    @property
    def reached(self) -> bool | None:
        return None if self.share is None else self.share >= 1.0

    @property
    def is_large_loss(self) -> bool:
        return self.goal is not None and self.share is not None and self.share < LARGE_LOSS[self.goal.of]

    def to_json(self) -> dict[str, Any]:
        goal = None if self.goal is None else {"of": self.goal.of, "at_least" if self.goal.at_least else "at_most": self.goal.bound}
        return {
            "name": self.name,
            "variant": self.variant,
            "value": self.value,
            "unit": self.unit,
            "limit": self.limit,
            "limit_name": self.limit_name,
            "ratio": self.ratio,
            "goal": goal,
            "reached": self.reached,
        }


def at_least(bound: float, of: str = "value") -> Goal:
    return Goal(of, bound, True)


def at_most(bound: float, of: str = "value") -> Goal:
    return Goal(of, bound, False)


def in_turns(rounds: int, *measures: Callable[[], T]) -> list[list[T]]:
    """Run each measure once a round, and give the figures of each. The order changes with every round, so that none is always first."""
    found: list[list[T]] = [[] for _ in measures]
    for turn in range(rounds):
        for place in range(len(measures)):
            index = (place + turn) % len(measures)
            found[index].append(measures[index]())
    return found


def median_ratio(figures: Sequence[float], limits: Sequence[float]) -> float:
    """The median of the rounds' own ratios: what slowed a whole round slowed both of its sides."""
    return statistics.median(figure / limit for figure, limit in zip(figures, limits, strict=True))


def percentile(figures: Sequence[float], share: float) -> float:
    ordered = sorted(figures)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
