"""Commands for those who look after a store: upkeep, check."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict

import click
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from headwater import UpkeepReport, check
from headwater.cli.app import FAILED, OK, Target, with_store
from headwater.cli.arguments import Number
from headwater.cli.interrupts import interrupts
from headwater.cli.output import console, emit, size

_SHOWN_UNUSED = 10


@click.command("upkeep")
@click.option("--once", is_flag=True, help="One full round now, whatever is due, then end.")
@click.option("--every", type=Number(0.1, 86400), default=2.0, show_default=True, metavar="SECONDS", help="Between two rounds.")
@with_store
def upkeep_command(target: Target, once: bool, every: float) -> None:
    """Do the store's housekeeping, once or until Ctrl-C: tier to Parquet, scale, retain, time out, collect garbage."""
    interrupts.end_well()
    with target.open(upkeep=False) as store:
        if once:
            _show_round(target, store.run_upkeep(), quiet=False)
            return
        holds = None
        for report in store.upkeep_rounds(every):
            if holds is not (report is not None) and not target.json:
                console(stderr=True).print("this process does the upkeep" if report is not None else "another process does the upkeep")
            holds = report is not None
            if report is not None:
                _show_round(target, report, quiet=not target.json)


def _show_round(target: Target, report: UpkeepReport, *, quiet: bool) -> None:
    done = _what_was_done(report)
    if quiet and not done and not report.problems:
        return
    if target.json:
        emit(asdict(report))
    else:
        console().print(done or "nothing to do")
        for problem in report.problems:
            console(stderr=True).print(f"problem: {problem}")
    sys.stdout.flush()


def _what_was_done(report: UpkeepReport) -> str:
    counts = {
        f"{report.events_tiered:,} events tiered ({size(report.bytes_tiered)} to {size(report.bytes_stored)})": report.events_tiered,
        f"{report.chunks_compacted:,} chunks compacted": report.chunks_compacted,
        f"{report.indexes_rebuilt:,} indexes of journals rebuilt": report.indexes_rebuilt,
        f"{report.segments_split:,} segments split": report.segments_split,
        f"{report.segments_merged:,} segments merged": report.segments_merged,
        f"{report.streams_truncated:,} streams truncated": report.streams_truncated,
        f"{report.transactions_aborted:,} transactions timed out": report.transactions_aborted,
        f"{report.sessions_fenced:,} sessions fenced": report.sessions_fenced,
        f"{report.rows_deleted:,} rows deleted": report.rows_deleted,
        f"{report.objects_deleted:,} objects deleted": report.objects_deleted,
    }
    return ", ".join(text for text, count in counts.items() if count)


@click.command("check")
@click.option("--repair", is_flag=True, help="Rebuild the indexes of journals that differ from their events, by a round of upkeep.")
@with_store
def check_command(target: Target, repair: bool) -> int:
    """Verify every block and row of a store. Ends with 1 if anything is damaged and not repaired, and says what."""
    with target.open(upkeep=False) as store, _progress(target) as on_progress:
        report = check.check_store(store, on_progress, repair=repair)
    if target.json:
        emit(report.to_json())
        return OK if report.ok else FAILED
    out = console()
    for problem in report.problems:
        out.print(f"{problem.kind}: {problem.message}")
    for problem in report.repaired:
        out.print(f"repaired: {problem.message}")
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
