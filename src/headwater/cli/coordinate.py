"""Commands that show who works with a store: groups, transactions; and those parts of describe."""

from __future__ import annotations

import json
from typing import Any

import click

import headwater as hw
from headwater.cli.app import Target, with_store
from headwater.cli.output import console, emit, key_bar, size, table, time_text


@click.command("groups")
@click.argument("name", required=False)
@with_store
def groups_command(target: Target, name: str | None) -> None:
    """Show the reader groups of a store with their lag, or one group: who reads what, and since when."""
    with target.open() as store:
        if name is not None:
            group = store.reader_group(name)
            if target.json:
                emit(_group_json(group, with_segments=True))
            else:
                _show_group(group)
            return
        groups = [store.reader_group(found) for found in store.reader_groups()]
        if target.json:
            for group in groups:
                emit(_group_json(group))
        elif groups:
            console().print(group_table(groups))
        else:
            console(stderr=True).print("no reader groups")


@click.command("transactions")
@click.option("--limit", default=50, show_default=True, type=click.IntRange(1, 100_000), help="How many, the newest first.")
@click.option("--open", "only_open", is_flag=True, help="Only those that are open.")
@with_store
def transactions_command(target: Target, limit: int, only_open: bool) -> None:
    """Show the transactions of a store, the newest first; not those that were aborted before anything was staged."""
    with target.open() as store:
        found = store.transactions(limit, only_open=only_open)
    if target.json:
        for info in found:
            emit(_transaction_json(info))
    elif found:
        console().print(transaction_table(found))
    else:
        console(stderr=True).print("no transactions")


def group_table(groups: list[hw.ReaderGroup]) -> Any:
    columns = ("group", "streams", "readers", "behind", "data behind", "seconds behind")
    shown = table(*columns, right=("behind", "data behind", "seconds behind"))
    for group in groups:
        lag = group.lag()
        readers = " ".join(group.readers()) or "none"
        shown.add_row(group.name, " ".join(group.streams), readers, f"{lag.events:,}", size(lag.bytes), f"{lag.seconds:,.1f}")
    return shown


def transaction_table(found: list[hw.TransactionInfo]) -> Any:
    shown = table("transaction", "state", "begun", "ends", "writes to")
    for info in found:
        ends = f"times out {time_text(info.expires)}" if info.ended is None else time_text(info.ended)
        shown.add_row(info.id, info.status.value, time_text(info.begun), ends, " ".join(info.streams))
    return shown


def _show_group(group: hw.ReaderGroup) -> None:
    out = console()
    out.print(group_table([group]))
    out.print()
    shown = table("reader", "stream", "segment", "keys", "position", "since", right=("segment", "position"))
    for held in group.held_segments():
        segment = held.segment
        shown.add_row(
            held.reader or "nobody",
            held.stream,
            str(segment.number),
            key_bar(segment.start, segment.end),
            f"{held.position:,}",
            time_text(held.since),
        )
    out.print(shown)
    window = group.time_window()
    if window.lower is not None or window.upper is not None:
        bounds = (time_text(bound) if bound is not None else "unknown" for bound in window)
        out.print("event time: from {} to {}".format(*bounds))


def _group_json(group: hw.ReaderGroup, *, with_segments: bool = False) -> dict[str, Any]:
    lag = group.lag()
    answer: dict[str, Any] = {
        "name": group.name,
        "streams": group.streams,
        "readers": group.readers(),
        "lag": {"events": lag.events, "bytes": lag.bytes, "seconds": lag.seconds},
        "positions": json.loads(str(group.positions())),
    }
    if with_segments:
        answer["segments"] = [
            {
                "reader": held.reader,
                "stream": held.stream,
                "segment": held.segment.number,
                "position": held.position,
                "since": time_text(held.since),
            }
            for held in group.held_segments()
        ]
    return answer


def _transaction_json(info: hw.TransactionInfo) -> dict[str, Any]:
    return {
        "id": info.id,
        "status": info.status.value,
        "begun": time_text(info.begun),
        "expires": time_text(info.expires),
        "ended": time_text(info.ended) if info.ended is not None else None,
        "streams": list(info.streams),
    }


def around_store(store: hw.Store) -> dict[str, Any]:
    """What describe adds for a whole store."""
    return {
        "groups": [_group_json(store.reader_group(name)) for name in store.reader_groups()],
        "open_transactions": [_transaction_json(info) for info in store.transactions(only_open=True)],
        "tables": store.tables(),
        "tags": {name: json.loads(str(cut)) for name, cut in store.tags().items()},
    }


def around_stream(store: hw.Store, stream: hw.Stream) -> dict[str, Any]:
    """What describe adds for one stream."""
    return {
        "groups": [_group_json(group) for group in _groups_of(store, stream)],
        "open_transactions": [_transaction_json(info) for info in _transactions_of(store, stream)],
        "forked_from": stream.origin,
        "forks": stream.forks(),
        "tags": [name for name, cut in store.tags().items() if stream.name in cut.streams],
    }


def show_around_store(store: hw.Store) -> None:
    _show(
        [store.reader_group(name) for name in store.reader_groups()],
        store.transactions(only_open=True),
        {"tables": store.tables(), "tags": list(store.tags())},
    )


def show_around_stream(store: hw.Store, stream: hw.Stream) -> None:
    names = {
        "forked from": [stream.origin] if stream.origin else [],
        "forks": stream.forks(),
        "tags": [name for name, cut in store.tags().items() if stream.name in cut.streams],
    }
    _show(_groups_of(store, stream), _transactions_of(store, stream), names)


def _show(groups: list[hw.ReaderGroup], transactions: list[hw.TransactionInfo], names: dict[str, list[str]]) -> None:
    out = console()
    if groups:
        out.print()
        out.print(group_table(groups))
    if transactions:
        out.print()
        out.print(transaction_table(transactions))
    for what, found in names.items():
        if found:
            out.print(f"\n{what}: {' '.join(found)}")


def _groups_of(store: hw.Store, stream: hw.Stream) -> list[hw.ReaderGroup]:
    return [group for group in map(store.reader_group, store.reader_groups()) if stream.name in group.streams]


def _transactions_of(store: hw.Store, stream: hw.Stream) -> list[hw.TransactionInfo]:
    return [info for info in store.transactions(only_open=True) if stream.name in info.streams]
