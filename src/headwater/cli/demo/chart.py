"""Events per second over time, with marks for what happened: as text, and as a picture."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_STEP_SECONDS = 0.5

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


def save_chart(path: Path, stages: Mapping[str, Sequence[Sample]], marks: Sequence[Mark], meanings: Mapping[str, str]) -> bool:
    """Write the rates of all stages as a PNG, with a line for each mark. False if matplotlib, an extra, is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(10, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    end = max((samples[-1][0] for samples in stages.values() if samples), default=1.0)
    steps = max(1, int(end / _STEP_SECONDS))
    for name, samples in stages.items():
        if samples:
            times = [end * index / steps for index in range(steps + 1)]
            totals = [_at(samples, time) for time in times]
            rates = [(after - before) * steps / end for before, after in pairwise(totals)]
            axes.step(times[1:], rates, where="pre", label=name, linewidth=1.4)
            axes.fill_between(times[1:], rates, step="pre", alpha=0.15)
    colors = dict(zip(meanings, ("tab:red", "tab:purple", "tab:green"), strict=False))
    named: set[str] = set()
    for time, letter in marks:
        label = meanings[letter] if letter not in named else None
        named.add(letter)
        axes.axvline(
            time, color=colors[letter], linestyle="-" if letter == next(iter(meanings)) else "--", linewidth=1, alpha=0.7, label=label
        )
    axes.set(xlabel="seconds", ylabel="events per second", xlim=(0, end))
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left", fontsize="small", framealpha=0.9)
    axes.grid(alpha=0.2)
    figure.savefig(path)
    return True
