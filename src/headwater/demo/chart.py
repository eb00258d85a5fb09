"""Events per second over time, with marks for what happened: as text, and as a picture."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_STEP_SECONDS = 0.5
_COLORS = ("tab:red", "tab:purple", "tab:green", "tab:cyan", "tab:orange", "tab:blue")

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
        from matplotlib.lines import Line2D
    except ImportError:
        return False
    figure = Figure(figsize=(10, 2 + 2.2 * len(stages)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    end = max((samples[-1][0] for samples in stages.values() if samples), default=1.0)
    colors = dict(zip(meanings, _COLORS, strict=False))
    grid = figure.subplots(len(stages), 1, sharex=True, squeeze=False)
    for axes, (name, samples) in zip(grid[:, 0], stages.items(), strict=True):
        times, rates = _rates(samples, end)
        axes.step(times, rates, where="pre", linewidth=1.4)
        axes.fill_between(times, rates, step="pre", alpha=0.2)
        for time, letter in marks:
            axes.axvline(time, color=colors[letter], linestyle="--", linewidth=1, alpha=0.8)
        axes.set(title=name, ylabel="events per second", xlim=(0, end), ylim=(0, None))
        axes.grid(alpha=0.2)
    seen = [letter for letter in meanings if any(letter == mark for _, mark in marks)]
    lines = [Line2D([], [], color=colors[letter], linestyle="--", label=meanings[letter]) for letter in seen]
    figure.legend(handles=lines, loc="outside upper right", ncols=max(1, len(lines)), fontsize="small")
    grid[-1, 0].set_xlabel("seconds")
    figure.savefig(path)
    return True


def _rates(samples: Sequence[Sample], end: float) -> tuple[list[float], list[float]]:
    """Events per second in steps of equal length, each with the time of its end. A roll-back counts as none."""
    steps = max(1, int(end / _STEP_SECONDS))
    times = [end * index / steps for index in range(steps + 1)]
    totals = [_at(samples, time) if samples else 0.0 for time in times]
    return times[1:], [max(0.0, after - before) * steps / end for before, after in pairwise(totals)]
