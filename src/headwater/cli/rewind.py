"""Commands for second thoughts: rolling a stream back, keeping what is needed, ending a claim by hand."""

from __future__ import annotations

from datetime import datetime

import click

import headwater as hw
from headwater.check import stream_contents
from headwater.cli.app import Target, confirm, with_store
from headwater.cli.arguments import parse_place
from headwater.cli.output import console, emit, table


@click.command("roll-back")
@click.argument("name")
@click.option("--to", "place", type=parse_place, metavar="PLACE", help="Where the stream ends again.")
@click.option("--version", type=click.IntRange(min=0), help="Of a table: the version that its entries get again.")
@click.option("--keep-as", metavar="NAME", help="The stream to make of what it was.")
@click.option("--force", is_flag=True, help="Don't ask.")
@with_store
def roll_back_command(
    target: Target, name: str, place: hw.Cut | datetime | str | None, version: int | None, keep_as: str | None, force: bool
) -> None:
    """End a stream at a place again, or give a table the entries of a version.

    Who is past that place is told. All that a stream was stays readable under another name, and a table keeps its history.
    """
    with target.open() as store:
        stream = store.stream(name)
        if stream.kind == "table":
            if version is None or place is not None or keep_as is not None:
                raise click.UsageError("a table is rolled back by --version alone")
            confirm(f"Give {name} the entries of version {version:,} again?", force)
            store.table(name).roll_back(version)
            _say(target, {"name": name, "version": version}, f"{name} has the entries of version {version:,}")
            return
        if place is None or keep_as is None or version is not None:
            raise click.UsageError("give --to, the place where the stream ends again, and --keep-as, a name for what it was")
        cut = _cut(stream, place)
        gone = stream_contents(stream).events - sum(part.count for part in stream.ranges("head", cut))
        confirm(f"Roll {name} back by {gone:,} events? Whoever has read them is told; {keep_as} will have them.", force)
        stream.roll_back(cut, keep_as=keep_as, force=True)
        _say(target, {"name": name, "tail": str(cut), "kept_as": keep_as}, f"{name} is rolled back by {gone:,} events; {keep_as} has them")


@click.command("replace")
@click.argument("name")
@click.option("--by", required=True, metavar="NAME", help="The stream that takes the name.")
@click.option("--keep-as", required=True, metavar="NAME", help="What the old stream is called from then on.")
@click.option("--continue", "continues", is_flag=True, help="Reader groups go on at the tail; all must have read all.")
@click.option("--force", is_flag=True, help="Don't ask.")
@with_store
def replace_command(target: Target, name: str, by: str, keep_as: str, continues: bool, force: bool) -> None:
    """Give the name of a stream to another one, in one step. The old stream is sealed and kept."""
    with target.open() as store:
        confirm(f"Give the name {name} to {by}? What is {name} now is sealed, and called {keep_as}.", force)
        store.replace_stream(name, by=by, keep_as=keep_as, consumers="continue" if continues else "reread")
        _say(target, {"name": name, "by": by, "kept_as": keep_as}, f"{by} is {name} now; {keep_as} is what {name} was")


@click.command("keep")
@click.argument("keep")
@click.argument("name")
@click.option("--from", "place", type=parse_place, metavar="PLACE", default="tail", show_default=True, help="From where on.")
@with_store
def keep_command(target: Target, keep: str, name: str, place: hw.Cut | datetime | str) -> None:
    """Keep everything of stream NAME from a place on: neither truncation nor retention nor deletion takes it.

    A KEEP of this name moves there.
    """
    with target.open() as store:
        cut = _cut(store.stream(name), place)
        store.keep_from(keep, cut)
        _say(target, {"keep": keep, "cut": str(cut)}, f"{keep} keeps {name} from {cut} on")


@click.command("kept")
@with_store
def kept_command(target: Target) -> None:
    """List what is kept: each keep with its streams and where it begins."""
    with target.open() as store:
        found = store.kept()
    if target.json:
        for keep, cut in found.items():
            emit({"keep": keep, "cut": str(cut)})
    elif found:
        shown = table("keep", "streams", "from")
        for keep, cut in found.items():
            shown.add_row(keep, " ".join(cut.streams), str(cut))
        console().print(shown)
    else:
        console(stderr=True).print("nothing is kept")


@click.command("unkeep")
@click.argument("keep")
@with_store
def unkeep_command(target: Target, keep: str) -> None:
    """Forget a keep: what only it kept may go from now on."""
    with target.open() as store:
        store.unkeep(keep)
        _say(target, {"keep": keep, "forgotten": True}, f"{keep} is forgotten")


def _cut(stream: hw.Stream, place: hw.Cut | datetime | str) -> hw.Cut:
    if isinstance(place, datetime):
        return stream.cut_at(place)
    return {"head": stream.head, "tail": stream.tail}[place]() if isinstance(place, str) else place


def _say(target: Target, fields: dict[str, object], sentence: str) -> None:
    if target.json:
        emit(fields)
    else:
        console().print(sentence)


@click.command("release-claim")
@click.argument("name")
@click.option("--force", is_flag=True, help="Also while what the claim requires still holds. Don't ask.")
@with_store
def release_claim_command(target: Target, name: str, force: bool) -> None:
    """End the claim of a stream, so that everybody may append to it again.

    Without --force this asks first, and then ends even a claim whose owner still lives.
    """
    with target.open() as store:
        stream = store.stream(name)
        owner = stream.claimed_by
        if owner is not None:
            confirm(f"{name} is claimed by {owner}. End the claim? Its owner can't append any more, and others can.", force)
            stream.release_claim(force=True)
        if target.json:
            emit({"name": name, "released": owner})
        else:
            console().print(f"{name} is no longer claimed by {owner}" if owner is not None else f"nobody claims {name}")
