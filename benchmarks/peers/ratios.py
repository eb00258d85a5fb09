"""The README's chart: a few ratios of docs/benchmarks.md, one bar each.

`python -m benchmarks.peers.ratios` draws docs/ratios.png from the table that `python -m benchmarks.peers --markdown` printed.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parents[2] / "docs"
#: (job, variant, peer) as the table names them, and what the chart says. Rows where headwater is behind belong here too.
CHOSEN = {
    ("write-events", "100 B, 1 producer", "Kafka"): "write one by one, beside Kafka without sync",
    ("write-bulk", "1 kB", "Kafka"): "write in bulk, beside Kafka without sync",
    ("write-bulk", "1 kB", "Delta"): "write in bulk, beside Delta Lake",
    ("read-batches", "100 B, in batches", "Kafka"): "read in batches, beside Kafka",
    ("latency", "1 k/s, p50", "Kafka"): "latency at 1,000/s, p50, beside Kafka without sync",
    ("latency", "1 k/s, p99", "NATS"): "latency at 1,000/s, p99, beside NATS without sync",
    ("transactions", "1 event", "Kafka"): "transactions of one event, beside Kafka without sync",
    ("transactions", "1 event", "Redis"): "transactions of one event, beside Redis",
    ("spark-scan", "filter on a column, 5.0 GB as JSON", "Kafka"): "Spark scans 5 GB, beside Kafka",
    ("spark-scan", "all columns, 5.0 GB as JSON", "Parquet"): "Spark scans 5 GB, beside plain Parquet",
    ("cost", "writing, memory", "Kafka"): "memory while writing, beside Kafka",
}


class Ratio(NamedTuple):
    """How many times better headwater is; below 1 it is behind."""

    label: str
    times: float


def read_ratios(table: str) -> list[Ratio]:
    """The chosen rows of the table, in the chart's order. KeyError if a row is missing."""
    found = {}
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 8 and (match := re.fullmatch(r"([\d.]+)x", cells[5])):
            found[cells[0], cells[1], cells[3]] = float(match[1])
    return [Ratio(label, found[key]) for key, label in CHOSEN.items()]


def draw(ratios: list[Ratio], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 0.5 + 0.3 * len(ratios)))
    places = range(len(ratios))
    axes.barh(
        places, [ratio.times - 1 for ratio in ratios], left=1, color=["#3a8f5c" if ratio.times >= 1 else "#c8553d" for ratio in ratios]
    )
    axes.set_xscale("log")
    for place, ratio in zip(places, ratios, strict=True):
        axes.text(max(ratio.times, 1) * 1.08, place, f"{ratio.times:.3g}x", va="center", fontsize=8)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks(list(places), [ratio.label for ratio in ratios], fontsize=8)
    axes.set_xlim(0.1, 250)
    axes.set_xticks([0.1, 1, 10, 100], ["0.1x", "1x: the same", "10x", "100x"], fontsize=8)
    axes.set_xlabel("times better than the other system", fontsize=8)
    axes.invert_yaxis()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    draw(read_ratios((DOCS / "benchmarks.md").read_text(encoding="utf-8")), DOCS / "ratios.png")
