"""Commands for journals: their entities' ids, events, heads and snapshots, and the deletion of an entity's events."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from itertools import islice
from typing import Any

import click

import headwater as hw
from headwater.cli.app import Target, confirm, with_store
from headwater.cli.arguments import PLACE, parse_place
from headwater.cli.interrupts import interrupts
from headwater.cli.output import console, dump, emit, size, table, time_text

_MANY = 4096
_TABLE_ROWS = 10_000
_SHOWN_STATE = 120
_SEQUENCE = click.IntRange(1, (1 << 62) - 1)


@click.group("journal")
def journal_command() -> None:
    """List, read and delete the entities of a journal and their events. NAME is scope/name, ID an entity's id."""


@journal_command.command("ids")
@click.argument("name")
@click.option("--prefix", default="", metavar="TEXT", help="Only ids that begin with this text.")
@click.option("--after", metavar="ID", help="Only ids after this one: the last id of a page gives the next page.")
@click.option("--limit", "-n", type=click.IntRange(0, sys.maxsize), help="At most this number of ids.")
@click.option("--follow", "-f", is_flag=True, help="Then print the ids of new entities, until Ctrl-C or the journal is sealed.")
@with_store
def ids_command(target: Target, name: str, prefix: str, after: str | None, limit: int | None, follow: bool) -> None:
    """List the ids of a journal's entities in the order of their bytes, one per line. Deleted entities are left out."""
    with _opened(target, name, follow) as journal:
        found = journal.ids(prefix, after=after, limit=limit, follow=follow)
        _print_lines((f"{dump({'id': id})}\n" if target.json else f"{_printable(id)}\n" for id in found), follow)


@journal_command.command("events")
@click.argument("name")
@click.option("--id", "id", metavar="ID", help="Only the events of this entity.")
@click.option("--tag", metavar="WORD", help="Only events with this tag.")
@click.option("--type", "type", metavar="WORD", help="Only events of this type.")
@click.option("--start", type=parse_place, metavar=PLACE, help="Where to begin; the head if not given.")
@click.option("--end", type=parse_place, metavar=PLACE, help="Where to stop; the tail as of now if not given.")
@click.option("--limit", "-n", type=click.IntRange(0, sys.maxsize), help="At most this number of events.")
@click.option("--follow", "-f", is_flag=True, help="Then print new events, until Ctrl-C or the journal is sealed.")
@with_store
def events_command(
    target: Target,
    name: str,
    id: str | None,
    tag: str | None,
    type: str | None,
    start: hw.Cut | datetime | str | None,
    end: hw.Cut | datetime | str | None,
    limit: int | None,
    follow: bool,
) -> None:
    """Print events of a journal, in order for each entity. Options together are joined by "and"."""
    if follow and end is not None:
        raise click.UsageError("--follow never ends: leave out --end, or --follow")
    with _opened(target, name, follow) as journal:
        events = islice(journal.events(id=id, tag=tag, type=type, start=start, end=end, follow=follow), limit)
        if target.json:
            _print_lines((f"{dump(_event_json(event))}\n" for event in events), follow)
        elif follow:
            _print_lines(map(_event_line, events), follow)
        else:
            _print_events(events)


@journal_command.command("head")
@click.argument("name")
@click.argument("id")
@with_store
def head_command(target: Target, name: str, id: str) -> None:
    """Show the last sequence of an entity, its first readable one, and its last snapshot's. An unknown ID is at sequence 0."""
    with _opened(target, name) as journal:
        head = journal.head(id)
    if target.json:
        emit({"id": id, "sequence": head.sequence, "low": head.low, "snapshot": head.snapshot})
        return
    shown = table("id", "sequence", "first readable", "last snapshot", right=("sequence", "first readable", "last snapshot"))
    first = f"{head.low:,}" if 0 < head.low <= head.sequence else "none"
    shown.add_row(_printable(id), f"{head.sequence:,}", first, "none" if head.snapshot is None else f"{head.snapshot:,}")
    console().print(shown)


@journal_command.command("snapshots")
@click.argument("name")
@click.argument("id")
@click.option("--limit", "-n", type=click.IntRange(0, sys.maxsize), help="At most this number of snapshots.")
@with_store
def snapshots_command(target: Target, name: str, id: str, limit: int | None) -> None:
    """List the snapshots of an entity, the newest first."""
    with _opened(target, name) as journal:
        found = list(islice(_snapshots(journal, id), limit))
    if target.json:
        for snapshot in found:
            emit({"id": id, "sequence": snapshot.sequence, "version": snapshot.version, "state": snapshot.state})
    elif found:
        shown = table("sequence", "version", "size", "state", right=("sequence", "version", "size"))
        for snapshot in found:
            state = dump(snapshot.state)
            cut = state if len(state) <= _SHOWN_STATE else f"{state[:_SHOWN_STATE]}…"
            shown.add_row(f"{snapshot.sequence:,}", f"{snapshot.version:,}", size(len(state.encode())), cut)
        console().print(shown)
    else:
        console(stderr=True).print("no snapshots")


@journal_command.command("delete")
@click.argument("name")
@click.argument("id")
@click.option("--to", "sequence", type=_SEQUENCE, metavar="SEQUENCE", help="Delete only the events up to this one.")
@click.option("--yes", "-y", is_flag=True, help="Don't ask. A script must give it.")
@with_store
def delete_command(target: Target, name: str, id: str, sequence: int | None, yes: bool) -> None:
    """Delete an entity, or its first events: replay and queries don't give them any more. The next sequence goes on."""
    with _opened(target, name) as journal:
        before = journal.head(id)
        if not before.sequence:
            raise hw.NotFoundError(f"{name} has no entity {_printable(id)}")
        what = "all events" if sequence is None else f"the events up to {sequence:,}"
        if not yes and not sys.stdin.isatty():
            raise click.UsageError(f"this deletes {what} of {_printable(id)}: a script says so with --yes", click.get_current_context())
        confirm(f"Delete {what} of {_printable(id)} in {name}?", yes)
        if sequence is None:
            journal.delete(id)
        else:
            journal.delete_to(id, sequence)
        after = journal.head(id)
    if target.json:
        emit({"name": name, "id": id, "sequence": after.sequence, "low": after.low})
    else:
        left = after.sequence - after.low + 1
        console().print(f"{what} of {_printable(id)} in {name} are deleted, {left:,} left")


@contextmanager
def _opened(target: Target, name: str, follow: bool = False) -> Iterator[hw.Journal]:
    """A journal that exists, while the block lasts. Ctrl-C is how one leaves a follower."""
    if follow:
        interrupts.end_well()
    with target.open() as store:
        # Ask for the stream first: `store.journal` creates a journal that is missing.
        kind = store.stream(name).kind
        if kind != "journal":
            raise hw.InvalidRequestError(f"{name} is of kind {kind!r}, not 'journal'")
        yield store.journal(name)


def _snapshots(journal: hw.Journal, id: str) -> Iterator[hw.Snapshot]:
    found = journal.find_snapshot(id)
    while found is not None:
        yield found
        found = journal.find_snapshot(id, found.sequence - 1) if found.sequence else None


def _print_lines(lines: Iterable[str], follow: bool) -> None:
    """Print lines: a follower's at once, others many at a time."""
    lines = iter(lines)
    while some := list(islice(lines, 1 if follow else _MANY)):
        sys.stdout.write("".join(some))
        if follow:
            sys.stdout.flush()


def _print_events(events: Iterator[hw.Recorded]) -> None:
    found = list(islice(events, _TABLE_ROWS))
    shown = table("id", "sequence", "time", "type", "data", "tags", right=("sequence",))
    for event in found:
        shown.add_row(
            _printable(event.id), f"{event.sequence:,}", time_text(event.time), _type(event), dump(event.data), " ".join(event.tags)
        )
    console().print(shown)
    if len(found) == _TABLE_ROWS and next(events, None) is not None:
        console(stderr=True).print(f"only the first {_TABLE_ROWS:,}: a table is for reading; use --json, or --limit")


def _event_line(event: hw.Recorded) -> str:
    """An event on a line of its own: nobody knows how wide the columns of events to come will be."""
    words = [time_text(event.time), _printable(event.id), f"{event.sequence:,}", _type(event), dump(event.data), *event.tags]
    return f"{'  '.join(words)}\n"


def _event_json(event: hw.Recorded) -> dict[str, Any]:
    return {
        "id": event.id,
        "sequence": event.sequence,
        "type": event.type,
        "version": event.version,
        "data": event.data,
        "tags": list(event.tags),
        "meta": event.meta,
        "event_id": str(event.event_id),
        "time": time_text(event.time),
        "segment": event.position.segment,
        "number": event.position.number,
    }


def _type(event: hw.Recorded) -> str:
    return event.type if event.version == 1 else f"{event.type} v{event.version}"


def _printable(id: str) -> str:
    """An id on one line: one with control characters as a JSON text."""
    return id if id.isprintable() else json.dumps(id)
