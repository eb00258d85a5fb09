"""Commands that show what is there: list, describe."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import click

import headwater as hw
from headwater.check import SegmentContents, StoreContents, StreamContents, list_contents, store_contents, stream_contents
from headwater.cli.app import Target, with_store
from headwater.cli.coordinate import around_store, around_stream, show_around_store, show_around_stream
from headwater.cli.output import console, emit, key_bar, size, table, time_text
from headwater.model.names import parse_word

_SHOWN_SEGMENTS = 64
_SHOWN_WRITERS = 100
_KINDS_OF_EVENTS = ("events", "journal")


@click.command("list")
@click.option("--scope", metavar="WORD", help="Only the streams of this scope.")
@click.option("--label", metavar="WORD", help="Only the streams with this label.")
@with_store
def list_command(target: Target, scope: str | None, label: str | None) -> None:
    """List the streams of a store."""
    for word, what in ((scope, "scope"), (label, "label")):
        if word is not None:
            parse_word(word, what)
    with target.open() as store:
        found = list_contents(store, scope, label)
    if target.json:
        for stream in found:
            emit(_stream_json(stream))
    elif found:
        console().print(_stream_table(found))
    else:
        console(stderr=True).print("no streams")


@click.command("describe")
@click.argument("name", required=False)
@click.option("--all-segments", is_flag=True, help=f"Also those after the first {_SHOWN_SEGMENTS}.")
@with_store
def describe_command(target: Target, name: str | None, all_segments: bool) -> None:
    """Show what a store holds, or one stream of it."""
    with target.open() as store:
        if name is None:
            contents = store_contents(store)
            if target.json:
                emit({**_store_json(store, contents), **around_store(store)})
            else:
                _show_store(store, contents)
                show_around_store(store)
            return
        stream = store.stream(name)
        if target.json:
            emit({**_described(stream, stream_contents(stream)), **around_stream(store, stream)})
        else:
            _show_stream(stream, stream_contents(stream), all_segments)
            show_around_stream(store, stream)


def _stream_json(stream: StreamContents) -> dict[str, Any]:
    return {
        "name": stream.name,
        "kind": stream.kind,
        "events": stream.events,
        "bytes": stream.bytes,
        "chunks": stream.chunks,
        "chunk_bytes": stream.chunk_bytes,
        "segments": stream.open_segments,
        "epoch": stream.epoch,
        "sealed": stream.is_sealed,
        "labels": list(stream.labels),
        "claimed_by": stream.claimed_by,
        **({} if stream.entities is None else {"entities": stream.entities}),
    }


def _store_json(store: hw.Store, contents: StoreContents) -> dict[str, Any]:
    return {
        "store": store.url,
        "id": contents.id,
        "catalog": contents.catalog,
        "format": contents.format,
        "created": time_text(_time(contents.created_at)),
        "events": sum(stream.events for stream in contents.streams if stream.kind in _KINDS_OF_EVENTS),
        "bytes": sum(stream.bytes for stream in contents.streams),
        "segments": sum(stream.open_segments for stream in contents.streams),
        "catalog_bytes": contents.catalog_bytes,
        "stored_bytes": contents.stored_bytes,
        "objects": contents.objects,
        "live_sessions": contents.live_sessions,
        "upkeep": contents.upkeep,
        "streams": [_stream_json(stream) for stream in contents.streams],
    }


def _described(stream: hw.Stream, contents: StreamContents) -> dict[str, Any]:
    schema = [{"name": field.name, "type": str(field.type), "nullable": field.nullable} for field in stream.schema]
    return {
        **_stream_json(contents),
        "schema": schema if stream.kind == "events" else None,
        "scaling": asdict(stream.scaling),
        "retention": asdict(stream.retention),
        "head": str(stream.head()),
        "tail": str(stream.tail()),
        "all_segments": [_segment_json(segment) for segment in contents.segments],
        **({} if contents.index is None else {"index": contents.index}),
        "writers": [{"id": id, "last_number": last_number} for id, last_number in contents.writers],
    }


def _segment_json(segment: SegmentContents) -> dict[str, Any]:
    return {
        "number": segment.number,
        "open": segment.is_open,
        "start": segment.start,
        "end": segment.end,
        "head": segment.head,
        "tail": segment.tail,
        "bytes": segment.bytes,
        "made_epoch": segment.made_epoch,
        "sealed_epoch": segment.sealed_epoch,
    }


def _show_store(store: hw.Store, contents: StoreContents) -> None:
    out = console()
    facts = table("", "")
    facts.show_header = False
    facts.add_row("store", f"{store.url}")
    facts.add_row("id", contents.id)
    facts.add_row("catalog", f"{contents.catalog}, format {contents.format}, {size(contents.catalog_bytes)}")
    if contents.objects is not None:
        facts.add_row("storage", f"{size(contents.stored_bytes)} in {contents.objects:,} files, preallocated ones as a whole")
    facts.add_row("made", time_text(_time(contents.created_at)))
    facts.add_row("sessions", f"{contents.live_sessions} live")
    facts.add_row("upkeep", contents.upkeep or "nobody does it now")
    facts.add_row("streams", f"{len(contents.streams):,}")
    facts.add_row("events", f"{sum(stream.events for stream in contents.streams if stream.kind in _KINDS_OF_EVENTS):,}")
    facts.add_row("data", size(sum(stream.bytes for stream in contents.streams)))
    out.print(facts)
    if contents.streams:
        out.print()
        out.print(_stream_table(contents.streams))


def _stream_table(streams: tuple[StreamContents, ...] | list[StreamContents]) -> Any:
    columns = ["stream", "kind", "events", "data", "segments", "epoch", "state", "labels"]
    has_journals = any(stream.entities is not None for stream in streams)
    if has_journals:
        columns.insert(2, "entities")
    shown = table(*columns, right=("entities", "events", "data", "segments", "epoch"))
    for stream in streams:
        shown.add_row(
            stream.name,
            stream.kind,
            *([f"{stream.entities:,}" if stream.entities is not None else ""] if has_journals else []),
            f"{stream.events:,}" if stream.kind in _KINDS_OF_EVENTS else "",
            size(stream.bytes),
            f"{stream.open_segments:,}",
            f"{stream.epoch:,}",
            "sealed" if stream.is_sealed else "open",
            " ".join(stream.labels),
        )
    return shown


def _show_stream(stream: hw.Stream, contents: StreamContents, all_segments: bool) -> None:
    out = console()
    facts = table("", "")
    facts.show_header = False
    facts.add_row("stream", contents.name)
    facts.add_row("kind", contents.kind)
    facts.add_row("state", f"{'sealed' if contents.is_sealed else 'open'}, epoch {contents.epoch}")
    if contents.claimed_by is not None:
        facts.add_row("claimed by", contents.claimed_by)
    if contents.entities is not None:
        facts.add_row("entities", f"{contents.entities:,}")
    if contents.index is not None:
        facts.add_row("index", "complete" if contents.index == "ready" else "being built: persist and replay wait for it")
    facts.add_row("events" if contents.kind in _KINDS_OF_EVENTS else "bytes", f"{contents.events:,}")
    facts.add_row("data", size(contents.bytes))
    if contents.chunks:
        facts.add_row(
            "history", f"{contents.chunks:,} {'Parquet files' if contents.kind != 'bytes' else 'files'}, {size(contents.chunk_bytes)}"
        )
    if contents.kind == "events":
        facts.add_row("schema", "\n".join(f"{field.name}: {field.type}{'' if field.nullable else ' not null'}" for field in stream.schema))
    scaling = stream.scaling
    facts.add_row(
        "scaling", f"fixed, {scaling.min_segments} at first" if scaling.kind == "fixed" else f"{scaling.kind} {scaling.target:,}/s"
    )
    facts.add_row("retention", _retention(stream.retention))
    if contents.labels:
        facts.add_row("labels", " ".join(contents.labels))
    facts.add_row("head", str(stream.head()))
    facts.add_row("tail", str(stream.tail()))
    out.print(facts)
    out.print()
    shown = table("segment", "keys", "head", "tail", "data", "epochs", right=("segment", "head", "tail", "data"))
    # Open ones first: they are what one looks for.
    ordered = sorted(contents.segments, key=lambda segment: (not segment.is_open, segment.number))
    limit = len(ordered) if all_segments else _SHOWN_SEGMENTS
    for segment in ordered[:limit]:
        shown.add_row(
            str(segment.number),
            key_bar(segment.start, segment.end),
            f"{segment.head:,}",
            f"{segment.tail:,}",
            size(segment.bytes),
            f"{segment.made_epoch}, open" if segment.is_open else f"{segment.made_epoch}-{segment.sealed_epoch}, sealed",
        )
    out.print(shown)
    if len(ordered) > limit:
        out.print(f"and {len(ordered) - limit:,} more: --all-segments shows them")
    if contents.writers:
        out.print()
        writers = table("writer", "last number", right=("last number",))
        for id, last_number in contents.writers[:_SHOWN_WRITERS]:
            writers.add_row(id, f"{last_number:,}")
        out.print(writers)
        if len(contents.writers) > _SHOWN_WRITERS:
            out.print(f"and {len(contents.writers) - _SHOWN_WRITERS:,} more: --json shows them")


def _retention(policy: hw.Retention) -> str:
    parts = [f"until read by {', '.join(policy.groups)}"] if policy.groups else []
    if policy.seconds is not None:
        parts.append(f"{policy.seconds / 86400:g} days")
    if policy.bytes is not None:
        parts.append(size(policy.bytes))
    return ", at most ".join(parts) if parts else "forever"


def _time(time_us: int) -> datetime:
    return datetime.fromtimestamp(time_us / 1_000_000, UTC)
