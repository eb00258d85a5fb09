"""write: lines become events, in Arrow batches, so that the disk and not Python is what one waits for.

A line that can't be stored ends the command; those before it are stored. With --writer-id and --number a repeated run stores nothing twice.
A named writer without numbers goes on after its last one: what is sent again is stored again.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import click
import numpy as np
import pyarrow as pa
from rich.progress import BarColumn, Progress, TextColumn, TransferSpeedColumn

import headwater as hw
from headwater.cli.app import Target, with_store
from headwater.cli.interrupts import interrupts
from headwater.cli.lines import BadLineError, Columns, Lines, Parser, parser_for, read_lines
from headwater.cli.output import console, emit, size

_PIECE_BYTES = 4 * 1024 * 1024
LINE = "line"


@dataclass
class Tally:
    """What a run of `write` did so far."""

    #: Events given to be stored: all of them, unless it fails.
    stored: int = 0
    skipped: int = 0
    bytes: int = 0
    lines: int = 0
    _durable: int = 0
    _acks: deque[tuple[hw.Ack, int]] = field(default_factory=deque)

    def give(self, ack: hw.Ack, count: int) -> None:
        self.stored += count
        self._acks.append((ack, count))
        self.count_durable()

    def count_durable(self) -> int:
        """How many events are stored by now."""
        while self._acks and self._acks[0][0].done:
            ack, count = self._acks.popleft()
            with contextlib.suppress(hw.HeadwaterError):  # Done is also what was refused.
                ack.result()
                self._durable += count
        return self._durable


@click.command("write")
@click.argument("name")
@click.option("--file", "file", type=click.File("rb"), default="-", help="Read this instead of standard input.")
@click.option("--key", "key", metavar="FIELD", help="The JSON field that is the routing key.")
@click.option("--key-regex", metavar="REGEX", help="The routing key is what this finds in a line: its first group, or all of it.")
@click.option("--time", "time_field", metavar="FIELD", help="The JSON field with the event time: ISO text, or seconds since 1970.")
@click.option("--writer-id", metavar="WORD", help="Write as this named writer, of which there is one at a time.")
@click.option(
    "--number",
    metavar="FIELD|line",
    help="The source's own numbers, so that a repeated run stores nothing twice: a JSON field, or `line` for input from its start.",
)
@with_store
def write_command(
    target: Target,
    name: str,
    file: BinaryIO,
    key: str | None,
    key_regex: str | None,
    time_field: str | None,
    writer_id: str | None,
    number: str | None,
) -> None:
    """Store the lines of standard input as events.

    A stream with a schema takes JSON objects, one per line. Any other takes lines as they are, and looks into them only for the fields
    that options name. A byte stream takes its input as it is.
    """
    if writer_id is None and number is not None:
        raise click.UsageError("--number is for a named writer: give its name with --writer-id", click.get_current_context())
    if key is not None and key_regex is not None:
        raise click.UsageError("a routing key comes from --key or from --key-regex, not from both", click.get_current_context())
    columns = Columns(key, _compiled(key_regex), time_field, number if number != LINE else None)
    started = time.monotonic()
    tally = Tally()
    interrupts.wait_for_place()
    try:
        with target.open() as store:
            stream = store.stream(name)
            with _progress(target, file) as show:
                if stream.kind == "bytes":
                    _refuse_options(columns, writer_id)
                    _write_bytes(stream, file, tally, show)
                else:
                    _write_lines(stream, file, columns, writer_id, number, tally, show)
    except BadLineError as error:
        raise hw.InvalidRequestError(f"{error}; events stored before it: {tally.stored:,}") from error
    except hw.UnavailableError as error:
        if not tally.stored:
            raise
        # Counted behind the store's close, which tries once more; and so does the end of the process.
        raise hw.UnavailableError(f"{error.message}; at least {tally.count_durable():,} events are stored") from error
    except KeyboardInterrupt:
        _report(target, name, tally, time.monotonic() - started)
        raise
    _report(target, name, tally, time.monotonic() - started)


def _compiled(regex: str | None) -> re.Pattern[bytes] | None:
    try:
        return re.compile(os.fsencode(regex)) if regex is not None else None
    except re.error as error:
        raise click.BadParameter(f"{regex!r} is no regular expression: {error}", param_hint="--key-regex") from error


def _refuse_options(columns: Columns, writer_id: str | None) -> None:
    if writer_id is not None or columns.looks_inside:
        raise click.UsageError("a byte stream has no events: no keys, times or numbers", click.get_current_context())


def _write_bytes(stream: hw.Stream, file: BinaryIO, tally: Tally, show: Callable[[Tally], None]) -> None:
    with stream.byte_writer() as writer:
        while piece := _read_some(file):
            writer.write(piece)
            tally.bytes += len(piece)
            show(tally)


def _read_some(file: BinaryIO) -> bytes:
    """What there is, as soon as there is something."""
    with interrupts.place():
        return file.read1(_PIECE_BYTES) if hasattr(file, "read1") else file.read(_PIECE_BYTES)


def _write_lines(
    stream: hw.Stream,
    file: BinaryIO,
    columns: Columns,
    writer_id: str | None,
    number: str | None,
    tally: Tally,
    show: Callable[[Tally], None],
) -> None:
    parse: Parser = parser_for(stream.schema, columns)
    with stream.writer(writer_id) as writer:
        given = writer.last_number if writer_id is not None else 0
        for lines in _until_interrupted(writer, read_lines(file, _read_some)):
            failure: BadLineError | None = None
            first_line = tally.lines + 1
            tally.lines += len(lines)
            try:
                parsed = parse(lines, first_line)
            except BadLineError as error:
                parsed, failure = error.before, error
            if parsed is not None and parsed.batch.num_rows:
                batch, total = parsed.batch, parsed.batch.num_rows
                if writer_id is None:
                    tally.give(writer.write_batch(batch, key=columns.key_column), total)
                elif number is None:
                    given += total
                    tally.give(writer.write_batch(batch, key=columns.key_column, number=given), total)
                else:
                    numbers = parsed.numbers if number != LINE else parsed.line_numbers
                    batch, given = _only_new(batch, numbers, given)
                    if batch.num_rows:
                        tally.give(writer.write_batch(batch, key=columns.key_column, number=given), batch.num_rows)
                tally.skipped += total - batch.num_rows
                tally.bytes += batch.nbytes
            if failure is not None:
                writer.flush()
                raise failure
            show(tally)


def _until_interrupted(writer: hw.Writer, pieces: Iterator[Lines]) -> Iterator[Lines]:
    """The same pieces. After a Ctrl-C, and a line that is too long, what was given is stored before anything is said of it."""
    try:
        yield from pieces
    except (KeyboardInterrupt, BadLineError):
        writer.flush()
        raise


def _only_new(batch: pa.RecordBatch, numbers: Any, given: int) -> tuple[pa.RecordBatch, int]:
    """The rows whose number is above all before them, and the last such number: those below were stored before."""
    highest = np.maximum.accumulate(np.concatenate([np.array([given], dtype=np.int64), numbers]))
    is_new = numbers > highest[:-1]
    return (batch if is_new.all() else batch.filter(pa.array(is_new))), int(highest[-1])


def _report(target: Target, name: str, tally: Tally, seconds: float) -> None:
    if target.json:
        emit(
            {
                "name": name,
                "stored": tally.stored,
                "skipped": tally.skipped,
                "bytes": tally.bytes,
                "seconds": round(seconds, 3),
            }
        )
        return
    what = f"{tally.stored:,} events" if tally.lines or not tally.bytes else size(tally.bytes)
    rate = f"{tally.stored / max(seconds, 1e-3):,.0f} events/s" if tally.stored else f"{size(int(tally.bytes / max(seconds, 1e-3)))}/s"
    skipped = f", {tally.skipped:,} skipped: stored before" if tally.skipped else ""
    console(stderr=True).print(f"{what} stored in {name}{skipped} ({seconds:.1f} s, {rate})")


@contextlib.contextmanager
def _progress(target: Target, file: BinaryIO) -> Iterator[Callable[[Tally], None]]:
    if target.json or not sys.stderr.isatty():
        yield lambda tally: None
        return
    columns = (BarColumn(), TextColumn("{task.fields[events]:,} events"), TransferSpeedColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None, events=0)

        def show(tally: Tally) -> None:
            progress.update(task, completed=tally.bytes, events=tally.stored)

        yield show
