"""Keeping what lies past a cut: neither truncation nor retention nor deletion takes it, until the keep is forgotten or moved."""

from __future__ import annotations

from headwater.catalog import keeps, streams
from headwater.catalog.database import Tx
from headwater.catalog.operations import operation
from headwater.errors import InvalidRequestError, NotFoundError
from headwater.model.arguments import shown
from headwater.model.cuts import Cut, StreamCut
from headwater.model.names import parse_word
from headwater.segments.engine import Engine
from headwater.streams import cuts
from headwater.streams.forks import streams_of


def keep_from(engine: Engine, name: str, cut: Cut) -> None:
    """Keep everything of the cut's streams from the cut on; a keep of this name moves there."""
    engine.run(keep_cut, engine.store_id, name, cut)


@operation("commit", repeatable=True)
def keep_cut(tx: Tx, store_id: str, name: str, cut: Cut) -> None:
    """Make a cut the floor of its streams, under a name. TruncatedError if the cut lies before the head."""
    parse_word(name, "keep")
    if not isinstance(cut, Cut) or not cut.streams:
        raise InvalidRequestError(f"a keep begins at a cut of one or more streams, not at {shown(cut)}")
    floors = {}
    for ref in streams_of(tx, cut):
        # Truncation locks the stream too, so the head stays where it is until the floor is there.
        streams.lock_stream(tx, ref.id)
        floors[ref.id] = cuts.readable_numbers(tx, store_id, ref, cut)
    keeps.set_floors(tx, name, floors)


def list_keeps(engine: Engine) -> dict[str, Cut]:
    """The cut of every keep, with the present names of its streams."""
    found: dict[str, dict[str, StreamCut]] = {}
    for scope, stream, floor in engine.run(keeps.list_floors):
        found.setdefault(floor.name, {})[f"{scope}/{stream}"] = StreamCut(floor.stream, floor.numbers)
    return {name: Cut(engine.store_id, parts) for name, parts in found.items()}


def unkeep(engine: Engine, name: str) -> None:
    """Forget a keep. What only it kept may go from now on."""
    if not engine.run(keeps.delete_keep, parse_word(name, "keep")):
        raise NotFoundError(f"there is no keep {name!r}")
