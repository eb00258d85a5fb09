"""Commands that change what streams there are and how they are cut up: create, split, merge, truncate, seal, delete."""

from __future__ import annotations

from datetime import datetime, timedelta

import click

import headwater as hw
from headwater.check import stream_contents
from headwater.cli.app import Target, confirm, with_store
from headwater.cli.arguments import PLACE, Number, parse_place, parse_schema
from headwater.cli.output import console, emit, key_bar, table


@click.command("create")
@click.argument("name")
@click.option("--segments", type=click.IntRange(min=1), default=1, show_default=True, help="How many segments it begins with.")
@click.option(
    "--events-per-second", type=click.IntRange(min=1), metavar="N", help="Split segments that get more, merge those that get less."
)
@click.option("--bytes-per-second", type=click.IntRange(min=1), metavar="N", help="The same, by bytes.")
@click.option("--factor", type=click.IntRange(min=2), help="With a rate: how many parts a segment is split into at most. Default 2.")
@click.option("--max-segments", type=click.IntRange(min=1), help="With a rate: never more segments than this; never fewer than --segments.")
@click.option("--keep-days", type=Number(0, 1e8, min_open=True), metavar="N", help="Older events go. Without any --keep: never.")
@click.option("--keep-bytes", type=click.IntRange(min=1), metavar="N", help="The oldest events go when there are more bytes than this.")
@click.option("--keep-until-read", multiple=True, metavar="GROUP", help="Events go when these groups read them, or by the other --keeps.")
@click.option("--schema", metavar="FIELDS|FILE", help="'a:int64,b:string!' or a JSON file; ! means never null. Without: lines of bytes.")
@click.option("--kind", type=click.Choice(["events", "bytes"]), default="events", show_default=True)
@click.option("--label", "labels", multiple=True, metavar="WORD", help="A label to list it by; may be repeated.")
@click.option("--exist-ok", is_flag=True, help="Fine if there is one of the same kind and schema.")
@with_store
def create_command(
    target: Target,
    name: str,
    segments: int,
    events_per_second: int | None,
    bytes_per_second: int | None,
    factor: int | None,
    max_segments: int | None,
    keep_days: float | None,
    keep_bytes: int | None,
    keep_until_read: tuple[str, ...],
    schema: str | None,
    kind: str,
    labels: tuple[str, ...],
    exist_ok: bool,
) -> None:
    """Make a stream, and its store if there is none. NAME is scope/name."""
    scaling = _scaling(segments, events_per_second, bytes_per_second, factor, max_segments)
    retention = _retention(keep_days, keep_bytes, keep_until_read)
    arrow = parse_schema(schema) if schema is not None else None
    with target.open(create=True) as store:
        stream = store.create_stream(name, scaling=scaling, retention=retention, schema=arrow, kind=kind, labels=labels, exist_ok=exist_ok)
        open_segments = len(stream.segments())
        if target.json:
            emit({"name": stream.name, "kind": stream.kind, "segments": open_segments, "labels": list(stream.labels)})
        else:
            console().print(f"{stream.name} is there, with {_counted(open_segments, 'segment')}")


def _scaling(segments: int, events: int | None, bytes: int | None, factor: int | None, most: int | None) -> hw.Scaling:
    if events is not None and bytes is not None:
        raise click.UsageError("a stream scales by --events-per-second or by --bytes-per-second, not by both")
    if events is not None:
        return hw.Scaling.by_event_rate(events, factor or 2, segments, most)
    if bytes is not None:
        return hw.Scaling.by_data_rate(bytes, factor or 2, segments, most)
    if factor is not None or most is not None:
        raise click.UsageError("--factor and --max-segments are for streams that scale by a rate: give --events-per-second, say")
    return hw.Scaling.fixed(segments)


def _retention(days: float | None, bytes: int | None, groups: tuple[str, ...]) -> hw.Retention:
    age = timedelta(days=days) if days is not None else None
    if groups:
        return hw.Retention.by_consumption(groups, max_size=bytes, max_age=age)
    if age is not None and bytes is not None:
        raise click.UsageError("events are kept by --keep-days or by --keep-bytes; both together go with --keep-until-read")
    if age is not None:
        return hw.Retention.by_time(age)
    return hw.Retention.by_size(bytes) if bytes is not None else hw.Retention.forever()


@click.command("split")
@click.argument("name")
@click.argument("segment", type=int)
@click.option("--parts", type=click.IntRange(min=2), default=2, show_default=True)
@with_store
def split_command(target: Target, name: str, segment: int, parts: int) -> None:
    """Replace an open SEGMENT by equal parts of its keys. Order holds for each key; writers and readers go on."""
    with target.open() as store:
        stream = store.stream(name)
        _show_segments(target, stream, stream.split(segment, parts), f"segment {segment} became")


@click.command("merge")
@click.argument("name")
@click.argument("segments", type=int, nargs=-1, required=True)
@with_store
def merge_command(target: Target, name: str, segments: tuple[int, ...]) -> None:
    """Replace neighbouring open SEGMENTS by one. Order holds for each key; writers and readers go on."""
    with target.open() as store:
        stream = store.stream(name)
        shown = ", ".join(map(str, segments))
        _show_segments(target, stream, stream.merge(segments), f"segments {shown} became")


def _show_segments(target: Target, stream: hw.Stream, made: list[hw.Segment], what: str) -> None:
    if target.json:
        fields = [{"number": part.number, "start": part.start, "end": part.end} for part in made]
        emit({"name": stream.name, "epoch": stream.epoch, "segments": fields})
        return
    shown = table("segment", "keys", right=("segment",))
    for part in made:
        shown.add_row(str(part.number), key_bar(part.start, part.end))
    console().print(f"{stream.name} is in epoch {stream.epoch}: {what}")
    console().print(shown)


@click.command("truncate")
@click.argument("name")
@click.option("--at", "place", type=parse_place, metavar=PLACE, required=True, help="Everything before this place goes.")
@click.option("--force", is_flag=True, help="A journal needs it: its entities lose events, and upkeep rebuilds its index.")
@click.option("--yes", "-y", is_flag=True, help="Don't ask.")
@with_store
def truncate_command(target: Target, name: str, place: hw.Cut | datetime | str, force: bool, yes: bool) -> None:
    """Delete what lies before a place, for good."""
    with target.open() as store:
        stream = store.stream(name)
        if isinstance(place, datetime):
            place = stream.cut_at(place)
        cut = {"head": stream.head, "tail": stream.tail}[place]() if isinstance(place, str) else place
        before = stream_contents(stream).events
        confirm(f"Delete for good what lies before {cut} in {name}?", yes)
        stream.truncate(cut, force=force)
        after = stream_contents(stream)
        if target.json:
            emit({"name": name, "head": str(stream.head()), "events": after.events})
        else:
            unit = _unit(stream)
            console().print(f"{_counted(before - after.events, unit)} of {name} deleted, {_counted(after.events, unit)} left")


@click.command("seal")
@click.argument("name")
@with_store
def seal_command(target: Target, name: str) -> None:
    """End a stream: it stays readable, and is never written again."""
    with target.open() as store:
        stream = store.stream(name)
        stream.seal()
        if target.json:
            emit({"name": name, "sealed": True, "tail": str(stream.tail())})
        else:
            console().print(f"{name} is sealed")


@click.command("delete")
@click.argument("name")
@click.option("--seal", is_flag=True, help="Seal it first, if it is open.")
@click.option("--yes", "-y", is_flag=True, help="Don't ask.")
@with_store
def delete_command(target: Target, name: str, seal: bool, yes: bool) -> None:
    """Delete a sealed stream with all its data, for good."""
    with target.open() as store:
        stream = store.stream(name)
        events = stream_contents(stream).events
        confirm(f"Delete {name} with all its data ({_counted(events, _unit(stream))}) for good?", yes)
        store.delete_stream(name, seal=seal)
        if target.json:
            emit({"name": name, "deleted": True})
        else:
            console().print(f"{name} is deleted")


def _unit(stream: hw.Stream) -> str:
    return "byte" if stream.kind == "bytes" else "event"


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
