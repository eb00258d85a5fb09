"""Commands for those who look after a store: upkeep, check."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

import click
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from headwater import check
from headwater.cli.app import FAILED, OK, Target, with_store
from headwater.cli.interrupts import interrupts
from headwater.cli.output import console, emit, size

_SHOWN_UNUSED = 10


@click.command("upkeep")
@click.option("--once", is_flag=True, help="One round, then end.")
@click.option("--every", type=click.FloatRange(min=0.1), default=5.0, show_default=True, metavar="SECONDS", help="Between two rounds.")
@with_store
def upkeep_command(target: Target, once: bool, every: float) -> None:
    """Do the store's housekeeping, once or until Ctrl-C: fence sessions of dead processes, free what was truncated or deleted."""
    interrupts.end_well()
    with target.open() as store:
        while True:
            report = store.run_upkeep()
            if target.json:
                emit({"sessions_fenced": report.sessions_fenced, "rows_deleted": report.rows_deleted})
            elif once or report.sessions_fenced or report.rows_deleted:
                console().print(f"{report.sessions_fenced:,} sessions fenced, {report.rows_deleted:,} rows deleted")
            sys.stdout.flush()
            if once:
                return
            time.sleep(every)


@click.command("check")
@with_store
def check_command(target: Target) -> int:
    """Verify every block and row of a store. Ends with 1 if anything is damaged, and says what."""
    with target.open() as store, _progress(target) as on_progress:
        report = check.check_store(store, on_progress)
    if target.json:
        emit(report.to_json())
        return OK if report.ok else FAILED
    out = console()
    for problem in report.problems:
        out.print(f"{problem.kind}: {problem.message}")
    if report.problem_count > len(report.problems):
        out.print(f"and {report.problem_count - len(report.problems):,} more problems")
    for unused in report.unused[:_SHOWN_UNUSED]:
        out.print(f"unused, no damage: {unused.key} ({size(unused.bytes)}): {unused.reason}")
    if report.unused_count > _SHOWN_UNUSED:
        out.print(f"unused, no damage: {report.unused_count:,} objects in all, {size(report.unused_bytes)}")
    if report.leftover_rows:
        out.print(f"unused, no damage: {report.leftover_rows:,} rows of truncated or deleted data, until the next upkeep")
    looked = f"{report.streams:,} streams, {report.segments:,} segments, {report.blocks:,} blocks, {report.events:,} events"
    out.print(f"{'all is well' if report.ok else f'{report.problem_count:,} problems found'}: {looked}, {size(report.bytes)}")
    return OK if report.ok else FAILED


@contextlib.contextmanager
def _progress(target: Target) -> Iterator[Callable[[check.Progress], None] | None]:
    if target.json or not sys.stderr.isatty():
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(True), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as progress:
        task = progress.add_task("checking")

        def on_progress(at: check.Progress) -> None:
            progress.update(task, description=at.stream or "rows", completed=at.done_bytes, total=at.total_bytes)

        yield on_progress
