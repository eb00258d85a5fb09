"""The ratios as one picture: a bar for each peer in each job, to the right where headwater is better."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers.figures import Line


def draw(lines: Sequence[Line], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    # Where there is a goal, and the one that most people use; the table has them all.
    shown = [line for line in lines if line.goal is not None or (line.other.peer.startswith("Kafka") and "p99.9" not in line.own.variant)]
    names = [f"{line.own.job}, {line.own.variant}  |  {line.other.peer}" for line in shown]
    colours = {None: "#8fa3b8", True: "#3a8f5c", False: "#c8553d"}
    figure, axes = pyplot.subplots(figsize=(10, 1 + 0.19 * len(shown)))
    places = range(len(shown))
    axes.barh(places, [line.ratio for line in shown], left=0, color=[colours[line.reached] for line in shown], log=True)
    for place, line in zip(places, shown, strict=True):
        if line.goal is not None:
            axes.plot([line.goal.bound] * 2, [place - 0.45, place + 0.45], color="black", linewidth=1.5)
        axes.text(line.ratio * 1.05, place, f"{line.ratio:.3g}x", va="center", fontsize=6)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks(list(places), names, fontsize=6)
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.set_xlabel("times better than the peer (black marks: the goal; green: reached; red: not; grey: no goal)", fontsize=7)
    axes.tick_params(axis="x", labelsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110, bbox_inches="tight")
    pyplot.close(figure)
