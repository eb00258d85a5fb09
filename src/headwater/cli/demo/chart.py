"""Events per second over time, as text, with marks for what happened."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

_EIGHTHS = " ▁▂▃▄▅▆▇█"

Sample = tuple[float, int]
Mark = tuple[float, str]


def draw_chart(samples: Sequence[Sample], marks: Sequence[Mark], *, width: int = 64, height: int = 6) -> list[str]:
    """Lines of a bar chart from (seconds, events so far), and below it each mark's letter at its time."""
    if len(samples) < 2 or samples[-1][0] <= samples[0][0]:
        return []
    start, end = samples[0][0], samples[-1][0]
    step = (end - start) / width
    totals = [_at(samples, start + step * index) for index in range(width + 1)]
    rates = [(after - before) / step for before, after in pairwise(totals)]
    top = max(max(rates), 1.0)
    lines = []
    for row in range(height, 0, -1):
        cells = [_EIGHTHS[max(0, min(8, round((rate / top * height - row + 1) * 8)))] for rate in rates]
        label = f"{top:,.0f}/s" if row == height else ""
        lines.append(f"{label:>10} │{''.join(cells)}")
    axis = ["─"] * width
    for time, letter in marks:
        wanted = max(0, min(width - 1, int((time - start) / step)))
        # Two at one place: the second stands beside the first.
        free = sorted((cell for cell in range(width) if axis[cell] == "─"), key=lambda cell: abs(cell - wanted))
        if free:
            axis[free[0]] = letter
    lines.append(f"{'':>10} └{''.join(axis)}")
    lines.append(f"{'':>12}{'0 s':<{width - 6}}{end - start:>5.1f} s")
    return lines


def _at(samples: Sequence[Sample], time: float) -> float:
    """Events so far at a time, between two samples in proportion."""
    index = bisect_right(samples, time, key=lambda sample: sample[0])
    if index <= 0:
        return samples[0][1]
    if index >= len(samples):
        return samples[-1][1]
    (before, low), (after, high) = samples[index - 1], samples[index]
    return low + (high - low) * (time - before) / (after - before)
