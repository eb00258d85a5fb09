"""Tags: their cuts can be read, and everything that they name is kept."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from headwater.catalog.database import Database, Tx
from headwater.check.report import Problem
from headwater.errors import InvalidRequestError
from headwater.model.cuts import Cut


def find_tag_faults(database: Database) -> Iterator[Problem]:
    """What is wrong with tags, each in one look. Readers' holds, which expire, have no cuts."""
    for (name,) in database.query("SELECT name FROM tag WHERE expires_at IS NULL ORDER BY name"):
        yield from database.read(partial(_tag_faults, name=name))


def _tag_faults(tx: Tx, name: str) -> list[Problem]:
    pins = set(tx.run("SELECT stream, segment FROM pin WHERE tag = ?", (name,)))
    faults = []
    for row in tx.run("SELECT cut, head FROM tag WHERE name = ?", (name,)):
        for what, text in zip(("cut", "head"), row, strict=True):
            try:
                cut = Cut.parse(text)
            except InvalidRequestError as error:
                faults.append(Problem("catalog", f"the tag {name}: its {what} can't be read: {error.message}"))
                continue
            for stream, part in cut.streams.items():
                if not tx.run("SELECT 1 FROM stream WHERE id = ?", (part.id,)):
                    faults.append(Problem("dangling", f"the tag {name}: its {what} is of the stream {stream}, which does not exist"))
                elif lost := [segment for segment in part.segments if (part.id, segment) not in pins]:
                    message = f"the tag {name}: its {what} names the segments {lost} of {stream}, which it does not keep"
                    faults.append(Problem("dangling", message, stream))
    return faults
