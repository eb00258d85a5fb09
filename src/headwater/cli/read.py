"""read and tail: events on standard output, as their values, as JSON lines or as a table."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from itertools import islice
from typing import Any

import click
import pyarrow as pa

import headwater as hw
from headwater.cli.app import Target, with_store
from headwater.cli.arguments import PLACE, parse_place
from headwater.cli.interrupts import interrupts
from headwater.cli.output import console, dump, event_json, plain, table, text_field, time_text
from headwater.model.schemas import is_opaque, python_schema

_MANY = 4096
_BYTES_TAIL = 1 << 20
_BYTES_PIECE = 1 << 20
_POLL_SECONDS = 0.05
_TABLE_ROWS = 10_000

_FORMATS = click.Choice(["value", "json", "table"])
_FORMAT_HELP = "value: the event alone, rows as JSON; json: with its segment, number, time and key."


@click.command("read")
@click.argument("name")
@click.option("--start", type=parse_place, metavar=PLACE, help="Where to begin; the head if not given.")
@click.option("--end", type=parse_place, metavar=PLACE, help="Where to stop; the tail as of now if not given.")
@click.option("--limit", "-n", type=click.IntRange(0, sys.maxsize), help="At most so many events (or bytes of a byte stream).")
@click.option("--format", "form", type=_FORMATS, help=_FORMAT_HELP)
@with_store
def read_command(
    target: Target,
    name: str,
    start: hw.Cut | datetime | str | None,
    end: hw.Cut | datetime | str | None,
    limit: int | None,
    form: str | None,
) -> None:
    """Print the events of a stream, in order for each key.

    A byte stream comes as it is; as JSON in pieces, each with its offset and its data (data_base64 if it is no text).
    """
    with target.open() as store:
        stream = store.stream(name)
        if stream.kind == "bytes":
            show = _piece_maker(target, form)
            first, last = _offset(stream, start, "head"), _offset(stream, end, "tail")
            _copy_bytes(stream, show, first, last if limit is None else min(last, first + limit))
            return
        if form == "table" and not target.json:
            rows = _TABLE_ROWS if limit is None else min(limit, _TABLE_ROWS)
            events = stream.read(start, end)
            _print_table(list(islice(events, rows)))
            if rows == _TABLE_ROWS and next(events, None) is not None:
                console(stderr=True).print(f"only the first {rows:,}: a table is for reading; use another format")
            return
        line = _line_maker("json" if target.json else form)
        events = islice(stream.read(start, end), limit)
        out = sys.stdout.buffer
        while some := list(islice(events, _MANY)):
            out.write(b"".join([line(event) for event in some]))
        out.flush()


@click.command("tail")
@click.argument("name")
@click.option("--lines", "-n", "count", type=click.IntRange(min=0), default=10, show_default=True, help="So many of the last events.")
@click.option("--follow", "-f", is_flag=True, help="Then print those to come, until Ctrl-C or the stream is sealed.")
@click.option("--format", "form", type=_FORMATS, help=_FORMAT_HELP)
@with_store
def tail_command(target: Target, name: str, count: int, follow: bool, form: str | None) -> None:
    """Print the last events of a stream; with -f also those to come.

    Of a byte stream the last lines, as they are or as JSON with their offset.
    """
    interrupts.end_well()
    with target.open() as store:
        stream = store.stream(name)
        if stream.kind == "bytes":
            _tail_bytes(stream, _piece_maker(target, form), count, follow)
            return
        cut = stream.tail()
        events = _last_events(stream, cut, count)
        if form == "table" and not target.json:
            _print_table(events)
        line = _line_maker("json" if target.json else form)
        out = sys.stdout.buffer
        if form != "table" or target.json:
            out.write(b"".join(line(event) for event in events))
        out.flush()
        if follow:
            for event in stream.read(cut, follow=True):
                out.write(line(event))
                out.flush()


def _line_maker(form: str | None) -> Callable[[hw.Event], bytes]:
    if form == "json":
        return lambda event: f"{dump(event_json(event))}\n".encode()
    return _value_line


def _value_line(event: hw.Event) -> bytes:
    value = event.value
    return value + b"\n" if type(value) is bytes else f"{dump(plain(value))}\n".encode()


def _print_table(events: list[hw.Event]) -> None:
    shown = table("segment", "number", "time", "key", "value", right=("segment", "number"))
    for event in events:
        key = event.key.decode(errors="replace") if event.key is not None else ""
        value = event.value.decode(errors="replace") if isinstance(event.value, bytes) else dump(plain(event.value))
        position = event.position
        shown.add_row(str(position.segment), f"{position.number:,}", time_text(event.time), key, value)
    console().print(shown)


def _last_events(stream: hw.Stream, cut: hw.Cut, count: int) -> list[hw.Event]:
    """The last events before a cut, in the order of their appends over all segments."""
    if not count:
        return []
    schema = stream.schema
    names = [*schema.names, "_key", "_time", "_segment", "_number", "_appended"]
    # The last of all are among the last of each.
    ranges = [replace(found, start=max(found.start, found.end - count)) for found in stream.ranges(None, cut)]
    if not ranges:
        return []
    rows = pa.concat_tables([found.to_arrow(names) for found in ranges])
    rows = rows.sort_by([("_appended", "ascending"), ("_segment", "ascending"), ("_number", "ascending")])
    rows = rows.slice(max(rows.num_rows - count, 0))
    ours = python_schema(rows.schema)
    return list(_events(rows if ours is None else rows.cast(ours, safe=False), is_opaque(schema)))


def _events(rows: pa.Table, opaque: bool) -> Iterator[hw.Event]:
    for row in rows.to_pylist():
        value: Any = {name: item for name, item in row.items() if not name.startswith("_")}
        time_utc = row["_time"].astimezone(UTC)
        yield hw.Event(value["value"] if opaque else value, row["_key"], time_utc, hw.Position(row["_segment"], row["_number"]))


# Byte streams.


def _piece_maker(target: Target, form: str | None) -> Callable[[int, bytes], bytes]:
    """What makes output of an offset and the bytes that begin there."""
    if target.json or form == "json":
        return lambda offset, data: f"{dump({'offset': offset, **text_field('data', data)})}\n".encode()
    if form == "table":
        raise click.UsageError("a byte stream has no events: it comes as it is, or as JSON", click.get_current_context())
    return lambda _, data: data


def _offset(stream: hw.Stream, place: hw.Cut | datetime | str | None, default: str) -> int:
    """A place in a byte stream, as an offset."""
    return stream.byte_reader(default if place is None else place).tell()


def _copy_bytes(stream: hw.Stream, show: Callable[[int, bytes], bytes], start: int, end: int) -> None:
    reader = stream.byte_reader(start)
    while start < end and (piece := reader.read(min(_BYTES_PIECE, end - start))):
        sys.stdout.buffer.write(show(start, piece))
        start += len(piece)
    sys.stdout.buffer.flush()


def _tail_bytes(stream: hw.Stream, show: Callable[[int, bytes], bytes], count: int, follow: bool) -> None:
    """The last lines, of what may be the last megabyte; then what comes."""
    head, end = _offset(stream, "head", "head"), _offset(stream, "tail", "tail")
    start = max(head, end - _BYTES_TAIL)
    reader = stream.byte_reader(start)
    data = b""
    while len(data) < end - start and (piece := reader.read(end - start - len(data))):
        data += piece
    out = sys.stdout.buffer
    if last := b"".join(data.splitlines(keepends=True)[-count:]) if count else b"":
        out.write(show(start + len(data) - len(last), last))
    out.flush()
    while follow:
        is_sealed = stream.is_sealed  # asked before reading: nothing comes after it
        offset = reader.tell()
        piece = reader.read(_BYTES_PIECE)
        if piece:
            out.write(show(offset, piece))
            out.flush()
        elif is_sealed:
            return
        else:
            time.sleep(_POLL_SECONDS)
