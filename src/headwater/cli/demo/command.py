"""demo: the run as a live screen on a terminal, or as plain lines, and what it proves."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import tempfile
import time
from pathlib import Path

import click
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from headwater.cli.app import FAILED, OK
from headwater.cli.demo.chart import draw_chart
from headwater.cli.demo.run import KILL, SPLIT, STREAM, Demo, Outcome, State
from headwater.cli.output import console, emit, key_bar, size

_FRAMES_PER_SECOND = 10
_NEWS_LINES = 4


@click.command("demo")
@click.option(
    "--folder", type=click.Path(path_type=Path, file_okay=False), help="Where to put files and store; a new temporary folder if not given."
)
@click.option("--files", type=click.IntRange(1, 99), default=50, show_default=True)
@click.option("--events", type=click.IntRange(min=1), default=1000, show_default=True, help="In each file.")
@click.option("--kills", type=click.IntRange(min=0), default=8, show_default=True)
@click.option(
    "--rate", type=click.FloatRange(min=1), default=6000, show_default=True, help="Events per second, so that there is something to see."
)
@click.option("--seed", type=int, help="For the same files and kills again.")
@click.option("--json", "as_json", is_flag=True, help="Only the outcome, as JSON.")
def demo_command(folder: Path | None, files: int, events: int, kills: int, rate: float, seed: int | None, as_json: bool) -> int:
    """See it work: ingest files exactly once while the ingester is killed.

    A worker stores the lines of sensor files, one named writer for each file. It is killed with SIGKILL again and again, at random. Another
    process follows the tail; the busy segment is split in the middle. Then every event is counted.
    """
    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix="headwater-demo-"))
    elif folder.exists() and any(folder.iterdir()):
        raise click.BadParameter(f"{folder} is not empty", param_hint="--folder")
    seed = seed if seed is not None else time.time_ns() % 1_000_000
    demo = Demo(folder, files=files, events=events, kills=kills, seed=seed, events_per_second=rate)
    if as_json:
        outcome = demo.run(lambda state: None)
        emit(_outcome_json(outcome, demo, seed))
        return OK if outcome.holds else FAILED
    out = console()
    out.print(f"{files} files of {events:,} sensor readings, a worker that stores them, {kills} kills at random (seed {seed})")
    outcome = _run_live(demo) if sys.stdout.isatty() else _run_plainly(demo)
    _show_outcome(outcome, demo)
    return OK if outcome.holds else FAILED


def _run_live(demo: Demo) -> Outcome:
    shown = 0.0
    with Live(console=console(), auto_refresh=False, transient=True) as live:

        def show(state: State) -> None:
            nonlocal shown
            if time.monotonic() - shown >= 1 / _FRAMES_PER_SECOND:
                shown = time.monotonic()
                live.update(_screen(state), refresh=True)

        return demo.run(show)


def _run_plainly(demo: Demo) -> Outcome:
    told = tenth = 0

    def show(state: State) -> None:
        nonlocal told, tenth
        for line in state.news[told:]:
            print(f"  {line}", flush=True)
        told = len(state.news)
        if state.stored * 10 // state.expected > tenth:
            tenth = state.stored * 10 // state.expected
            print(f"  {state.stored:,} of {state.expected:,} stored, {state.seen:,} seen by the follower", flush=True)

    return demo.run(show)


def _screen(state: State) -> RenderableType:
    facts = Table.grid(padding=(0, 2))
    facts.add_row("stored", ProgressBar(state.expected, state.stored, width=48), f"{state.stored:,} of {state.expected:,}")
    facts.add_row("followed", ProgressBar(state.expected, state.seen, width=48), f"{state.seen:,} seen at the tail")
    facts.add_row("killed", Text(f"{KILL} " * state.kills, style="red"), f"{state.kills} times, by SIGKILL")
    segments = Table.grid(padding=(0, 2))
    for segment in state.contents.segments if state.contents is not None else ():
        style = "green" if segment.is_open else "dim"
        bar = Text(key_bar(segment.start, segment.end), style=style)
        segments.add_row(f"segment {segment.number}", bar, f"{segment.events:,} events", "open" if segment.is_open else "sealed")
    chart = Text("\n".join(draw_chart(state.samples, state.marks, width=62)))
    news = Text("\n".join(state.news[-_NEWS_LINES:]), style="dim")
    return Panel(Group(facts, Text(), segments, Text(), chart, Text(), news), title=STREAM, border_style="cyan", width=92)


def _show_outcome(outcome: Outcome, demo: Demo) -> None:
    out, state, proof, report = console(), outcome.state, outcome.proof, outcome.report
    out.print()
    for line in draw_chart(state.samples, state.marks):
        out.print(line)
    out.print(f"{'':>12}{KILL} a kill of the worker   {SPLIT} the split of the busy segment")
    out.print()
    for count, text in (
        (proof.stored, f"of {proof.expected:,} events stored"),
        (proof.lost, "lost"),
        (proof.repeated, "repeated"),
        (proof.altered, "altered"),
        (proof.disordered, f"out of order, over {proof.sensors:,} sensors and a split"),
        (state.seen, f"seen by the process that followed the tail, {state.seen_disordered:,} of them out of order"),
    ):
        out.print(f"{count:>10,} {text}")
    found = "all is well" if report.ok else f"{report.problem_count:,} problems"
    out.print(f"{'check':>10} {found}: {report.blocks:,} blocks, {report.events:,} events, {size(report.bytes)}")
    out.print()
    if outcome.holds:
        out.print(f"Exactly once: the worker died {state.kills} times, and every event is there once ({outcome.seconds:.1f} s).")
    else:
        out.print("This does not hold: please report it, with the folder below.")
    out.print()
    out.print(f"files  {demo.files_path}")
    out.print(f"store  {demo.store_path}")
    # Run by `make demo` the program is in .venv, and on nobody's path.
    program = "headwater" if shutil.which("headwater") else shlex.quote(os.path.relpath(sys.argv[0]))
    out.print("Try next:")
    for command in (f"describe {STREAM}", f"tail {STREAM} -n 5 --json", "check"):
        out.print(f"  {program} {command} --store {shlex.quote(str(demo.store_path))}")


def _outcome_json(outcome: Outcome, demo: Demo, seed: int) -> dict[str, object]:
    proof = outcome.proof
    return {
        "ok": outcome.holds,
        "expected": proof.expected,
        "stored": proof.stored,
        "lost": proof.lost,
        "repeated": proof.repeated,
        "altered": proof.altered,
        "disordered": proof.disordered,
        "followed": outcome.state.seen,
        "kills": outcome.state.kills,
        "problems": outcome.report.problem_count,
        "seconds": round(outcome.seconds, 3),
        "seed": seed,
        "files": str(demo.files_path),
        "store": str(demo.store_path),
    }
