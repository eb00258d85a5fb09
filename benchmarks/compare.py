"""Two versions of headwater beside each other: `python -m benchmarks.compare BASE/src OTHER/src --only ack`.

Each round runs the benchmarks of both versions in fresh processes. The version that goes first changes with every round, so that a machine
that becomes slower slows both. Each version runs the benchmarks of its own tree, because some of them use what is inside headwater.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import click
from rich.console import Console
from rich.table import Table

from benchmarks.__main__ import BENCHMARKS, readable
from benchmarks.results import in_turns

_CHOSEN = ("ack", "tail", "write-events", "transactions", "groups", "state")


class Figure(NamedTuple):
    value: float
    unit: str
    is_rate: bool


#: The figures of one run, by the name and the variant of the benchmark.
Run = dict[tuple[str, str], Figure]


class Comparison(NamedTuple):
    """One figure of both versions: the medians, and for each round by what share the other version is worse."""

    name: str
    variant: str
    unit: str
    base: float
    other: float
    worse: list[float]


@click.command()
@click.argument("base", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("other", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--only", "names", multiple=True, type=click.Choice(list(BENCHMARKS)), help=f"May be given again; else {', '.join(_CHOSEN)}.")
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(1), help="Runs of each version.")
@click.option("--catalog", default="both", show_default=True, type=click.Choice(["sqlite", "postgresql", "both"]))
@click.option("--quick", is_flag=True, help="Less in each run.")
@click.option("--ratios", is_flag=True, help="Compare ratios to the limits of the same run, which vary less on a busy machine.")
def main(base: Path, other: Path, names: tuple[str, ...], rounds: int, catalog: str, quick: bool, ratios: bool) -> None:
    """Compare two versions of headwater, given as their `src` folders."""
    only = [word for name in names or _CHOSEN for word in ("--only", name)]
    options = ["--json", "--catalog", catalog, *only, *(["--quick"] if quick else [])]
    with Console(stderr=True).status(f"{rounds} rounds of {base} and {other}"):
        base_runs, other_runs = in_turns(rounds, *(partial(_run, source.resolve(), options, ratios) for source in (base, other)))
    Console(width=None if sys.stdout.isatty() else 140).print(_make_table(compare(base_runs, other_runs)))


def _run(source: Path, options: Sequence[str], ratios: bool) -> Run:
    environment = os.environ | {"PYTHONPATH": str(source)}
    run = partial(subprocess.run, cwd=source.parent, env=environment, capture_output=True, text=True)
    where = run([sys.executable, "-c", "from importlib.util import find_spec; print(find_spec('headwater').origin)"]).stdout.strip()
    if not Path(where).is_relative_to(source):
        raise click.ClickException(f"{source} is not the source of a headwater: Python imports {where or 'none'}")
    done = run([sys.executable, "-m", "benchmarks", *options])
    if not done.stdout:  # With figures, a status of 1 means that one is far from its goal.
        raise click.ClickException(f"the benchmarks of {source} failed:\n{done.stderr}")
    figures: Run = {}
    for found in json.loads(done.stdout)["results"]:
        is_rate = "/s" in found["unit"]
        figure = Figure(found["value"], found["unit"], is_rate)
        if ratios and found["ratio"] is not None:
            figure = Figure(found["ratio"], "x", is_rate)
        # Some figures stand beside several limits, the most telling one first.
        figures.setdefault((found["name"], found["variant"]), figure)
    return figures


def compare(base_runs: Sequence[Run], other_runs: Sequence[Run]) -> list[Comparison]:
    """What both versions measured in each round, in the order of the benchmarks."""
    found = []
    for name, variant in base_runs[0]:
        key = name, variant
        if all(key in run for run in (*base_runs, *other_runs)):
            _, unit, is_rate = base_runs[0][key]
            base, other = ([run[key].value for run in runs] for runs in (base_runs, other_runs))
            slower, faster = (base, other) if is_rate else (other, base)
            worse = [one / another - 1 for one, another in zip(slower, faster, strict=True)]
            found.append(Comparison(name, variant, unit, statistics.median(base), statistics.median(other), worse))
    return found


def _make_table(comparisons: Sequence[Comparison]) -> Table:
    table = Table("what", "on", title_justify="left", title="worse: the median of the rounds, and the lowest and the highest")
    for heading in ("base", "other", "worse by", "spread"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, variant, unit, base, other, worse in comparisons:
        spread = f"{min(worse):+.1%} to {max(worse):+.1%}"
        table.add_row(name, variant, readable(base), f"{readable(other)} {unit}", f"{statistics.median(worse):+.1%}", spread)
    return table


if __name__ == "__main__":
    main()
