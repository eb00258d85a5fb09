"""demo: the run as a live screen on a terminal, or as plain lines, and what it proves."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from headwater.cli.app import FAILED, OK
from headwater.cli.arguments import Number
from headwater.cli.output import console, emit, key_bar, size
from headwater.demo.chart import draw_chart, save_chart
from headwater.demo.mistake import DEPLOYED, RESTORED, SAVED
from headwater.demo.pipeline import ENRICHED, READINGS, WINDOWS
from headwater.demo.proof import Proof, WindowProof
from headwater.demo.run import DRIVER_KILL, KILL, SPLIT, Demo, Outcome, State, has_spark

_FRAMES_PER_SECOND = 10
_NEWS_LINES = 5


@click.command("demo")
@click.option(
    "--folder", type=click.Path(path_type=Path, file_okay=False), help="Where to put files and store; a new temporary folder if not given."
)
@click.option("--store", "-s", type=click.Path(path_type=Path, file_okay=False), help="Where to put the store; in the folder if not given.")
@click.option("--files", type=click.IntRange(1, 99), default=50, show_default=True)
@click.option("--events", type=click.IntRange(min=2), default=1000, show_default=True, help="In each file.")
@click.option("--kills", type=click.IntRange(min=0), default=6, show_default=True, help="Of the ingester; the Spark driver is killed once.")
@click.option("--rate", type=Number(1, 1e9), default=3000, show_default=True, help="Events per second, so that there is something to see.")
@click.option(
    "--spark/--no-spark", "spark", default=None, help="With the Spark pipeline, or without. By default with it, if PySpark is there."
)
@click.option("--seed", type=int, help="For the same files and kills again.")
@click.option("--json", "as_json", is_flag=True, help="Only the outcome, as JSON.")
def demo_command(
    folder: Path | None,
    store: Path | None,
    files: int,
    events: int,
    kills: int,
    rate: float,
    spark: bool | None,
    seed: int | None,
    as_json: bool,
) -> int:
    """See it work: files, to a stream, through Spark, to streams, and every event once.

    Files of sensor readings arrive in a folder. `headwater ingest` stores them; it is killed with SIGKILL again and again, at random. A
    Spark pipeline joins each reading with its sensor's site, and counts readings by site and minute; its driver is killed too. In the
    middle a wrong version of the pipeline is deployed, noticed by its counts, and undone: the pipeline is restored from a savepoint. The
    busy segment is split. Another process follows the tail. Then every event of every stage is counted.
    """
    for path, option in ((folder, "--folder"), (store, "--store")):
        if path is not None and path.exists() and any(path.iterdir()):
            raise click.BadParameter(f"{path} is not empty", param_hint=option)
    folder = folder or Path(tempfile.mkdtemp(prefix="headwater-demo-"))
    if spark and not has_spark():
        raise click.UsageError("PySpark is not there: pip install 'headwater[spark]'", click.get_current_context())
    seed = seed if seed is not None else time.time_ns() % 1_000_000
    chosen = has_spark() if spark is None else spark
    demo = Demo(folder, files=files, events=events, kills=kills, seed=seed, events_per_second=rate, spark=chosen, store=store)
    if as_json:
        outcome = demo.run(lambda state: None)
        _save_chart(outcome, demo)
        emit(_outcome_json(outcome, demo, seed))
        return OK if outcome.holds else FAILED
    out = console()
    out.print(f"{files} files of {events:,} sensor readings, an ingester that stores them, {kills} kills at random (seed {seed})")
    if chosen:
        out.print("Spark starts in the background, which takes a while; the second half of the files waits for it")
    elif spark is None:
        out.print("PySpark is not there, so this is without the pipeline: pip install 'headwater[spark]' for all of it")
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
                live.update(_screen(state, demo), refresh=True)

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
            spark = f", {state.enriched:,} through Spark" if demo.spark else ""
            print(f"  {state.stored:,} of {state.expected:,} stored, {state.seen:,} seen by the follower{spark}", flush=True)

    return demo.run(show)


def _screen(state: State, demo: Demo) -> RenderableType:
    facts = Table.grid(padding=(0, 2))
    facts.add_row("stored", ProgressBar(state.expected, state.stored, width=48), f"{state.stored:,} of {state.expected:,}")
    facts.add_row("followed", ProgressBar(state.expected, state.seen, width=48), f"{state.seen:,} seen at the tail")
    if demo.spark:
        said = f"{state.enriched:,} through Spark" if state.enriched else "Spark is starting"
        facts.add_row("joined", ProgressBar(state.expected, state.enriched, width=48), said)
        facts.add_row("windows", ProgressBar(state.expected, state.counted, width=48), f"{state.counted:,} counted by minute")
    kills = Text(f"{KILL} " * state.kills, style="red") + Text(f"{DRIVER_KILL} " * state.driver_kills, style="magenta")
    facts.add_row("killed", kills, f"{state.kills + state.driver_kills} times, by SIGKILL")
    segments = Table.grid(padding=(0, 2))
    for segment in state.contents.segments if state.contents is not None else ():
        style = "green" if segment.is_open else "dim"
        bar = Text(key_bar(segment.start, segment.end), style=style)
        segments.add_row(f"segment {segment.number}", bar, f"{segment.events:,} events", "open" if segment.is_open else "sealed")
    chart = Text("\n".join(draw_chart(state.samples, state.marks, width=62)))
    news = Text("\n".join(state.news[-_NEWS_LINES:]), style="dim")
    return Panel(Group(facts, Text(), segments, Text(), chart, Text(), news), title=READINGS, border_style="cyan", width=92)


def _show_outcome(outcome: Outcome, demo: Demo) -> None:
    out, state, report = console(), outcome.state, outcome.report
    out.print()
    for line in draw_chart(state.samples, state.marks):
        out.print(line)
    driver = f"   {DRIVER_KILL} a kill of the Spark driver" if demo.spark else ""
    out.print(f"{'':>12}{KILL} a kill of the ingester{driver}   {SPLIT} the split of the busy segment")
    if state.restores:
        out.print(f"{'':>12}{SAVED} the savepoint   {DEPLOYED} a wrong version deployed, and noticed   {RESTORED} the restore")
    out.print()
    _show_proof(out, f"{READINGS}, by headwater ingest", outcome.proof, "over a split")
    out.print(f"{state.seen:>10,} seen by the process that followed the tail, {state.seen_disordered:,} of them out of order")
    if outcome.enriched is not None:
        _show_proof(out, f"{ENRICHED}, by Spark", outcome.enriched, "over a split and a dead driver")
    if outcome.windows is not None:
        _show_windows(out, outcome.windows)
    if state.restores:
        out.print(f"{state.wrong_windows:>10,} windows of a wrong version were undone by the restore")
    found = "all is well" if report.ok else f"{report.problem_count:,} problems"
    out.print(f"{'check':>10} {found}: {report.blocks:,} blocks, {report.events:,} events, {size(report.bytes)}")
    out.print()
    if outcome.holds:
        spark = f" and the Spark driver {_times(state.driver_kills)}" if demo.spark else ""
        died = f"the ingester died {_times(state.kills)}{spark}"
        died += ", a wrong version ran and was undone" if state.restores else ""
        out.print(f"Exactly once: {died}, and every event counts once in every stage ({outcome.seconds:.1f} s).")
    else:
        out.print("This does not hold: please report it, with the folder below.")
    out.print()
    out.print(f"files  {demo.files_path}")
    out.print(f"store  {demo.store_path}")
    if _save_chart(outcome, demo):
        out.print(f"chart  {demo.chart_path}")
    # Run by `make demo` the program is in .venv, and on nobody's path.
    program = "headwater" if shutil.which("headwater") else shlex.quote(os.path.relpath(sys.argv[0]))
    out.print("Try next:")
    last = f"tail {WINDOWS} -n 6 --json" if demo.spark else f"tail {READINGS} -n 5 --json"
    for command in (f"describe {READINGS}", last, "check"):
        out.print(f"  {program} {command} --store {shlex.quote(str(demo.store_path))}")


def _times(count: int) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(count, f"{count} times")


def _show_proof(out: Console, stage: str, proof: Proof, through: str) -> None:
    out.print(f"{stage}:")
    for count, text in (
        (proof.stored, f"of {proof.expected:,} events stored"),
        (proof.lost, "lost"),
        (proof.repeated, "repeated"),
        (proof.altered, "altered"),
        (proof.disordered, f"out of order, of {proof.sensors:,} sensors, {through}"),
    ):
        out.print(f"{count:>10,} {text}")


def _show_windows(out: Console, proof: WindowProof) -> None:
    out.print(f"{WINDOWS}, by Spark:")
    for count, text in (
        (proof.counted, f"events counted in {proof.windows:,} windows of site and minute, and {proof.open:,} in windows still open"),
        (proof.late, "of them came late, and count in their minute"),
        (proof.wrong, "windows wrong or missing"),
        (proof.repeated, "windows repeated"),
    ):
        out.print(f"{count:>10,} {text}")


def _save_chart(outcome: Outcome, demo: Demo) -> bool:
    state = outcome.state
    stages = {"stored by headwater ingest": state.samples} | ({"written by Spark": state.enriched_samples} if demo.spark else {})
    meanings = {
        KILL: "ingester killed",
        DRIVER_KILL: "Spark driver killed",
        SPLIT: "segment split",
        SAVED: "savepoint",
        DEPLOYED: "wrong version deployed, and noticed",
        RESTORED: "restored",
    }
    return save_chart(demo.chart_path, stages, state.marks, meanings)


def _outcome_json(outcome: Outcome, demo: Demo, seed: int) -> dict[str, object]:
    stages: dict[str, object] = {READINGS: asdict(outcome.proof)}
    if outcome.enriched is not None and outcome.windows is not None:
        stages |= {ENRICHED: asdict(outcome.enriched), WINDOWS: asdict(outcome.windows)}
    return {
        "ok": outcome.holds,
        "expected": outcome.proof.expected,
        "stages": stages,
        "followed": outcome.state.seen,
        "kills": outcome.state.kills,
        "driver_kills": outcome.state.driver_kills,
        "wrong_windows": outcome.state.wrong_windows,
        "restores": outcome.state.restores,
        "problems": outcome.report.problem_count,
        "seconds": round(outcome.seconds, 3),
        "seed": seed,
        "files": str(demo.files_path),
        "store": str(demo.store_path),
        "chart": str(demo.chart_path) if demo.chart_path.exists() else None,
    }
