"""Keeps: named floors, below which a stream's past may go and above which nothing does.

A floor names no segments but those of its cut, so it keeps what segments that are made later will hold too. Whoever truncates or deletes
a stream has locked the stream, and so has whoever moves a floor of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from headwater.catalog.database import Row, Statement, Tx
from headwater.catalog.operations import operation


class Floor(NamedTuple):
    """The cut from which on a keep keeps one stream, as numbers by segment."""

    name: str
    stream: int
    numbers: dict[int, int]


def floors_of(stream: int) -> Statement:
    """The statement that looks up the floors of a stream, by name; `to_floors` takes its rows."""
    return "SELECT name, stream, numbers FROM floor WHERE stream = ? ORDER BY name", (stream,)


def to_floors(rows: Sequence[Row]) -> list[Floor]:
    return [Floor(name, stream, {int(segment): at for segment, at in json.loads(numbers).items()}) for name, stream, numbers in rows]


def named_of(stream: int) -> Statement:
    """The statement that lists the names of the keeps of a stream."""
    return "SELECT name FROM floor WHERE stream = ? ORDER BY name", (stream,)


def set_floors(tx: Tx, name: str, floors: Mapping[int, Mapping[int, int]]) -> None:
    """Give a keep these floors, by stream, in place of those it had. The caller has locked the streams."""
    tx.run("DELETE FROM floor WHERE name = ?", (name,))
    tx.defer(
        "INSERT INTO floor (name, stream, numbers) VALUES (?, ?, ?)",
        [(name, stream, json.dumps(numbers)) for stream, numbers in floors.items()],
    )


@operation("read")
def list_floors(tx: Tx) -> list[tuple[str, str, Floor]]:
    """(scope and name of the stream, floor) of every keep, by the keep's name."""
    rows = tx.run(
        "SELECT s.scope, s.name, f.name, f.stream, f.numbers FROM floor f JOIN stream s ON s.id = f.stream ORDER BY f.name, f.stream"
    )
    return [(scope, name, *to_floors([tuple(floor)])) for scope, name, *floor in rows]


@operation("commit")
def delete_keep(tx: Tx, name: str) -> bool:
    """Forget a keep; False if there is none."""
    return bool(tx.run("DELETE FROM floor WHERE name = ? RETURNING name", (name,)))
