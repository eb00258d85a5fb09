"""What was measured of each system, and the one table of ratios that it makes."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from benchmarks.results import Goal, at_least

OWN = "headwater"


@dataclass(frozen=True)
class Figure:
    """One system's result in one job: the median of its rounds. `less_is_better` for times and costs."""

    job: str
    variant: str
    peer: str
    value: float
    unit: str
    less_is_better: bool = False
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True)
class Line:
    """Headwater beside one peer. `ratio` above 1 means that headwater is better."""

    own: Figure
    other: Figure
    goal: Goal | None

    @property
    def ratio(self) -> float:
        first, second = (self.other, self.own) if self.own.less_is_better else (self.own, self.other)
        return first.value / second.value

    @property
    def reached(self) -> bool | None:
        return None if self.goal is None else self.goal.share(self.ratio) >= 1.0

    def to_json(self) -> dict[str, Any]:
        return {
            "job": self.own.job,
            "variant": self.own.variant,
            "unit": self.own.unit,
            "headwater": self.own.value,
            "peer": self.other.peer,
            "value": self.other.value,
            "ratio": self.ratio,
            "goal": None if self.goal is None else self.goal.bound,
            "reached": self.reached,
            "note": self.other.note,
        }


def _ratio(bound: float) -> Goal:
    return at_least(bound, of="ratio")


#: By job (its beginning) and peer: the ratio that is wanted.
GOALS: dict[tuple[str, str], Goal] = {
    ("write-events", "Kafka"): _ratio(3.0),
    ("write-events", "Redis"): _ratio(20.0),
    ("write-bulk", "disk"): _ratio(0.8),
    ("read-events", "Kafka"): _ratio(2.0),
    ("read-batches", "Kafka"): _ratio(50.0),
    ("latency", "Kafka"): _ratio(1.0),
    ("acks", "UmaDB"): _ratio(0.9),
    ("spark-scan", "Kafka"): _ratio(5.0),
    ("spark-scan", "Parquet"): _ratio(0.9),
    ("spark-stream", "Kafka"): _ratio(2.0),
    ("growth", "small store"): _ratio(1 / 1.2),
    ("growth", "1 segment"): _ratio(0.5),
}
#: Shown, and wanted by nobody.
_WITHOUT_GOAL = ("p99.9",)


def goal_for(figure: Figure) -> Goal | None:
    if any(word in figure.variant for word in _WITHOUT_GOAL):
        return None
    return GOALS.get((figure.job, figure.peer))


def merge(figures: Iterable[Figure]) -> list[Figure]:
    """One figure for each job, variant and peer: headwater is measured before and after the peers, and counts as the mean of the two."""
    found: dict[tuple[str, str, str], list[Figure]] = {}
    for figure in figures:
        found.setdefault((figure.job, figure.variant, figure.peer), []).append(figure)
    merged = []
    for same in found.values():
        first = same[0]
        merged.append(
            Figure(
                first.job,
                first.variant,
                first.peer,
                statistics.mean(figure.value for figure in same),
                first.unit,
                first.less_is_better,
                first.note,
            )
        )
    return merged


def make_lines(figures: Iterable[Figure], jobs: Sequence[str]) -> list[Line]:
    """Every peer's figure beside headwater's of the same job and variant, in the order of the jobs."""
    merged = merge(figures)
    own = {(figure.job, figure.variant): figure for figure in merged if figure.peer == OWN}
    lines = [
        Line(own[figure.job, figure.variant], figure, goal_for(figure))
        for figure in merged
        if figure.peer != OWN and (figure.job, figure.variant) in own
    ]
    variants = list(own)
    return sorted(lines, key=lambda line: (jobs.index(line.own.job), variants.index((line.own.job, line.own.variant))))


_HEADINGS = ("what", "on", "headwater", "beside", "its figure", "ratio", "goal", "reached")


def _cells(line: Line) -> tuple[str, ...]:
    note = f" ({line.other.note})" if line.other.note else ""
    return (
        line.own.job,
        line.own.variant,
        f"{readable(line.own.value)} {line.own.unit}",
        f"{line.other.peer}{note}",
        readable(line.other.value),
        f"{line.ratio:,.0f}x" if line.ratio >= 100 else f"{line.ratio:.3g}x",
        "" if line.goal is None else f">= {line.goal.bound:.2g}x",
        {None: "", True: "yes", False: "no"}[line.reached],
    )


def make_table(lines: Sequence[Line], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in _HEADINGS:
        table.add_column(heading, justify="right" if heading in ("headwater", "its figure", "ratio", "goal") else "left")
    earlier = None
    for line in lines:
        if earlier not in (None, line.own.job):
            table.add_section()
        cells = list(_cells(line))
        cells[-1] = {"yes": "[green]yes", "no": "[red]no", "": ""}[cells[-1]]
        table.add_row(*cells)
        earlier = line.own.job
    return table


def make_markdown(lines: Sequence[Line]) -> str:
    rows = [" | ".join(_HEADINGS), "---|---|---:|---|---:|---:|---:|---", *(" | ".join(_cells(line)) for line in lines)]
    return "\n".join(f"|{row}|" if row.startswith("---") else f"| {row} |" for row in rows)


def readable(figure: float) -> str:
    if figure >= 1_000_000:
        return f"{figure / 1_000_000:.2f} M"
    if figure >= 10_000:
        return f"{figure / 1000:.0f} k"
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.3g}"
