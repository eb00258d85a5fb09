"""A stream's history as a heat map: time to the right, the key space upwards, and in each cell the rate of the segment that was there.

A minute that was sampled shows its rates. Where nothing was sampled, because the stream did not scale by rate then, a segment shows its
mean rate over its life.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

import headwater as hw
from headwater.model.scaling_history import RangeRate, SegmentLife

#: Of older history one sample of each ten minutes is kept. Longer without one, and the stream was idle.
_HELD = timedelta(minutes=20)
_SAMPLED = timedelta(minutes=1)

Column = list[float | None]


@dataclass(frozen=True)
class HeatMap:
    """`columns[x][y]` is a rate, or None where no segment was; y counts from the lowest key. `segments[x]` is how many were open."""

    start: datetime
    end: datetime
    unit: str
    target: int | None
    columns: list[Column]
    segments: list[int]

    @property
    def highest(self) -> float:
        return max((rate for column in self.columns for rate in column if rate is not None), default=0.0)

    @property
    def full(self) -> float:
        """The rate that the scale of colours ends with: the target, or the highest where there is none."""
        return float(self.target) if self.target else max(self.highest, 1e-9)


def draw(history: hw.ScalingHistory, *, width: int, height: int, now: datetime, since: datetime | None = None) -> HeatMap:
    """The history up to now, from `since` or its beginning on, in a grid of cells."""
    samples = sorted(history.samples)
    start = min([life.made for life in history.segments] + [sample.time for sample in samples[:1]], default=now)
    end = max([now] + [sample.time + _SAMPLED for sample in samples[-1:]])
    start = max(start, since) if since is not None else start
    if end <= start:
        start = end - _SAMPLED
    kind = samples[-1].kind if samples else "event_rate"
    samples = [sample for sample in samples if sample.kind == kind]
    times = [sample.time for sample in samples]
    columns, counts = [], []
    for index in range(width):
        left, right = start + (end - start) * index / width, start + (end - start) * (index + 1) / width
        before = bisect_left(times, right)
        some = samples[bisect_right(times, left - _SAMPLED) : before]
        if not some:
            some = [sample for sample in samples[max(0, before - 1) : before] if right - sample.time < _HELD]
        layouts: list[Sequence[RangeRate]] = [sample.rates for sample in some]
        if not layouts:
            layouts = [_lives(history.segments, left, right, end, kind, is_idle=bool(times) and right > times[0])]
        columns.append(_mean([_column(rates, height) for rates in layouts]))
        counts.append(max(map(len, layouts)))
    unit = "bytes/s" if kind == "data_rate" else "events/s"
    return HeatMap(start, end, unit, samples[-1].target if samples else None, columns, counts)


def _lives(lives: Iterable[SegmentLife], left: datetime, right: datetime, end: datetime, kind: str, *, is_idle: bool) -> list[RangeRate]:
    """The segments that were there in the middle of a column, each with its mean rate; 0 if it is known that there was no load."""
    middle = left + (right - left) / 2
    found = []
    for life in lives:
        if life.made <= middle and (life.sealed is None or middle < life.sealed):
            seconds = max(((life.sealed or end) - life.made).total_seconds(), 1.0)
            amount = life.bytes if kind == "data_rate" else life.events
            found.append(RangeRate(life.start, life.end, 0.0 if is_idle else amount / seconds))
    return found


def _column(rates: Sequence[RangeRate], height: int) -> Column:
    cells: Column = [None] * height
    for start, end, rate in rates:
        first = min(math.floor(start * height + 1e-9), height - 1)
        for row in range(first, max(first + 1, math.ceil(end * height - 1e-9))):
            found = cells[row]
            # Narrow segments share a cell: the hottest shows.
            cells[row] = rate if found is None else max(found, rate)
    return cells


def _mean(columns: Sequence[Column]) -> Column:
    found: Column = []
    for cells in zip(*columns, strict=True):
        known = [cell for cell in cells if cell is not None]
        found.append(sum(known) / len(known) if known else None)
    return found
