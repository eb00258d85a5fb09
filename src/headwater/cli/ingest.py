"""ingest: files become events, each once. What is done is in the store, so a run that ended anyhow is simply run again."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import click
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from headwater.cli.app import Target, with_store
from headwater.cli.arguments import Number, parse_schema
from headwater.cli.engines import spark_spread
from headwater.cli.interrupts import interrupts
from headwater.cli.output import console, emit, size
from headwater.ingest import Progress as IngestProgress
from headwater.ingest import Report, ingest
from headwater.ingest.sources import FORMATS


@click.command("ingest")
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@click.option("--stream", required=True, metavar="NAME", help="The stream; it is made if it is missing.")
@click.option("--format", type=click.Choice(FORMATS), help="What the files are; by default their names say it.")
@click.option("--key", metavar="COLUMN", help="The column that is the routing key.")
@click.option("--time", "time_column", metavar="COLUMN", help="The column with the event time: a time, ISO text, or seconds since 1970.")
@click.option(
    "--schema", metavar="FIELDS|FILE", help="'a:int64,b:string!' or a JSON file. Without: the stream's, or what the first file suggests."
)
@click.option("--segments", type=click.IntRange(min=1), default=1, show_default=True, help="How many segments a new stream begins with.")
@click.option("--delimiter", metavar="CHARACTER", help="Between the columns of CSV files.")
@click.option("--no-header", is_flag=True, help="CSV files have no header: their columns are the stream's, in order.")
@click.option(
    "--events-per-transaction",
    type=click.IntRange(min=1),
    metavar="N",
    help="Commit after so many rows, of one file or of many. Without: each file.",
)
@click.option("--bad-rows", metavar="NAME", help="A stream for rows that are no events. Without: the first one ends it.")
@click.option("--skip-changed", is_flag=True, help="Leave files alone that changed since they were stored. Without: they end it.")
@click.option("--watch", is_flag=True, help="Go on with files that arrive, until Ctrl-C.")
@click.option(
    "--settle",
    type=Number(0, 86400),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="With --watch: take files not written for so long.",
)
@click.option("--standby", is_flag=True, help="While another ingests, wait to take over. Without: end.")
@click.option("--take-over", is_flag=True, help="Take over at once, whoever ingests now: that one will stop.")
@click.option(
    "--lease",
    type=Number(1, 86400),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="Who shows no life for so long is taken for dead.",
)
@click.option(
    "--name", default="ingest", show_default=True, metavar="WORD", help="What was stored is remembered under this name, for each stream."
)
@click.option("--engine", type=click.Choice(["here", "spark"]), default="here", show_default=True, help="With spark each file is a task.")
@click.option("--master", metavar="URL", help="Of Spark; by default this machine. Its workers must see the same files and store.")
@with_store
def ingest_command(
    target: Target,
    sources: tuple[str, ...],
    stream: str,
    schema: str | None,
    time_column: str | None,
    no_header: bool,
    engine: str,
    master: str | None,
    **options: Any,
) -> None:
    """Store the rows of files in a stream, each once.

    SOURCE is a file, a folder, or a pattern in quotes, like 'in/**/*.csv': CSV, JSON lines, Parquet, Avro or plain lines, also .gz and
    .zst. Kill it, run it again: it goes on where it was.
    """
    arrow = parse_schema(schema) if schema is not None else None
    if engine == "spark":
        options["spread"] = spark_spread(master)
    now = IngestProgress()
    began = time.monotonic()

    def notice(text: str) -> None:
        if target.json:
            emit({"notice": text})
            sys.stdout.flush()
        else:
            console(stderr=True).print(f"headwater: {text}")

    interrupts.wait_for_place()
    with _terminated_like_interrupted(), target.open(create=True) as store:
        try:
            with _shown(target) as show:

                def progress(found: IngestProgress) -> None:
                    nonlocal now
                    now = found
                    show(found)

                options |= {"schema": arrow, "time": time_column, "header": not no_header}
                report = ingest(store, sources, stream, progress=progress, notice=notice, pause=_pause, **options)
        except KeyboardInterrupt:
            seconds = time.monotonic() - began
            _report(target, Report(stream, now.files_done, 0, 0, now.events, now.bad_rows, now.bytes_done, now.transactions, seconds))
            if options["watch"]:
                return
            raise
        except BrokenPipeError:
            raise click.ClickException(f"nobody reads its output any more: it ended after {now.files_done:,} files") from None
    _report(target, report)


def _pause(seconds: float) -> None:
    """Where Ctrl-C does no harm: between two pieces, or while there is nothing to do."""
    with interrupts.place():
        if seconds:
            time.sleep(seconds)


@contextlib.contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM ends this in order, as Ctrl-C does."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _report(target: Target, report: Report) -> None:
    if target.json:
        emit({**asdict(report), "seconds": round(report.seconds, 3)})
        return
    said = [f"{report.events:,} events of {report.files:,} files stored in {report.stream}"]
    said += [f"{report.bad_rows:,} bad rows put aside"] * bool(report.bad_rows)
    said += [f"{report.files_before:,} files were stored before"] * bool(report.files_before)
    said += [f"{report.files_changed:,} files changed since and were left alone"] * bool(report.files_changed)
    rate = f", {size(int(report.bytes / max(report.seconds, 1e-3)))}/s" if report.bytes else ""
    console(stderr=True).print(f"{', '.join(said)} ({report.seconds:.1f} s{rate})")


@contextlib.contextmanager
def _shown(target: Target) -> Iterator[Callable[[IngestProgress], None]]:
    if target.json:
        yield _emit_files
        return
    if not sys.stderr.isatty():
        yield lambda now: None
        return
    columns = (
        TextColumn("{task.fields[files]}"),
        BarColumn(),
        TextColumn("{task.fields[events]:,} events"),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None, events=0, files="")

        def show(now: IngestProgress) -> None:
            files = f"{now.files_done:,} of {now.files:,} files"
            bar.update(task, total=now.bytes, completed=now.bytes_done, events=now.events, files=files)

        yield show


def _emit_files(now: IngestProgress) -> None:
    for done in now.finished:
        emit({"file": done.path, "events": done.events, "bad_rows": done.bad_rows})
    if now.finished:
        sys.stdout.flush()
