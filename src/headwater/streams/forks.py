"""Forks and tags: a stream that begins as another one was at a cut, and cuts with a name. No bytes are copied for either."""

from __future__ import annotations

from headwater.catalog import journals, rebuilds, replacements, streams, tags, views
from headwater.catalog.database import Tx
from headwater.catalog.operations import operation
from headwater.errors import AlreadyExistsError, InvalidRequestError, NotFoundError
from headwater.model.arguments import shown
from headwater.model.cuts import Cut, StreamCut
from headwater.model.limits import HOLD_SECONDS
from headwater.model.names import StreamName, parse_stream_name, parse_word
from headwater.segments.engine import Engine
from headwater.segments.lanes import StreamRef
from headwater.streams import cuts, truncation
from headwater.streams.cuts import Place
from headwater.streams.lifecycle import bare_ref


def fork(engine: Engine, stream: StreamRef, new_name: str, at: Place) -> StreamRef:
    """A new stream with all that is readable before a place of this one, from then on independent of it.

    It has none of its parent's writers, groups or transactions, and keeps what it needs when the parent is truncated or deleted.
    """
    name = parse_stream_name(new_name)
    place = cuts.fix(engine, stream, at if at is not None else "tail")
    try:
        return engine.stream_ref(engine.run(fork_stream, engine.store_id, stream.id, name, place))
    except NotFoundError:
        raise NotFoundError(f"stream {stream.name} was deleted") from None


@operation("commit")
def fork_stream(tx: Tx, store_id: str, stream: int, name: StreamName, place: Place) -> streams.StreamRow:
    """A new stream that reads the logs of another one up to a place, which is not a time."""
    parent = streams.lock_stream(tx, stream)
    if parent.kind == "table":
        raise InvalidRequestError(
            f"{parent.full_name} is a table: it can't be forked, since its entries are no part of its stream of changes"
        )
    numbers = cuts.numbers_in(tx, store_id, stream, place)
    row = streams.copy_stream(tx, stream, name)
    if row is None:
        raise AlreadyExistsError(f"stream {name} exists")
    views.copy_segments(tx, stream, row.id, numbers)
    replacements.note_fork(tx, row.id, stream, numbers)
    if row.kind == "journal":
        journals.insert_journal(tx, row.id)
        rebuilds.begin_fork(tx, stream, row.id)
    return row


def tag(engine: Engine, name: str, cut: Cut) -> None:
    """Name a cut: what is readable before it now stays so, also after a truncation, until `untag`."""
    if not engine.run(tag_cut, engine.store_id, name, cut):
        raise AlreadyExistsError(f"there is a tag {name!r}: untag it first")


@operation("commit")
def tag_cut(tx: Tx, store_id: str, name: str, cut: Cut) -> bool:
    """Name a cut, and pin what is readable before it; False if the name is taken."""
    parse_word(name, "tag")
    if not isinstance(cut, Cut) or not cut.streams:
        raise InvalidRequestError(f"a tag names a cut of one or more streams, not {shown(cut)}")
    heads, pins = {}, []
    for ref in streams_of(tx, cut):
        streams.lock_stream(tx, ref.id)
        found, head = cuts.ranges_to(tx, store_id, ref, cut)
        heads[ref.name] = StreamCut(ref.id, head)
        kept = {item.segment.number: (item.start, item.end) for item in found}
        # Segments of the two cuts are kept even if they are empty, since the cuts name them.
        for segment, number in (*head.items(), *cut.streams[ref.name].segments.items()):
            kept.setdefault(segment, (number, number))
        pins += [(ref.id, segment, *bounds) for segment, bounds in kept.items()]
    return tags.insert_tag(tx, name, str(cut), str(Cut(store_id, heads)), pins)


def streams_of(tx: Tx, cut: Cut) -> list[StreamRef]:
    """The streams that have the names of a cut's, in the order of their ids: that is the order in which they are locked."""
    found = []
    for name in cut.streams:
        row = streams.find_stream(tx, parse_stream_name(name))
        if row is None:
            raise NotFoundError(f"there is no stream {name}")
        found.append(bare_ref(row))
    return sorted(found, key=lambda ref: ref.id)


def hold(engine: Engine, name: str, start: Cut | None, end: Cut, seconds: float) -> None:
    """Keep what lies between two cuts readable for a while, in place of what was held under this name before.

    Without a start it is what `ranges` gives up to the end: from the head, or from where a tagged cut was tagged.
    """
    engine.run(hold_range, engine.store_id, name, start, end, seconds)


@operation("commit", repeatable=True)
def hold_range(tx: Tx, store_id: str, name: str, start: Cut | None, end: Cut, seconds: float) -> None:
    """Pin what is readable, or kept by a tag, between two cuts for a while, in place of what this name held before."""
    parse_word(name, "hold")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not abs(seconds) <= HOLD_SECONDS:
        raise InvalidRequestError(f"a hold is for a number of seconds, up to {HOLD_SECONDS / 86400:g} days, not {shown(seconds)}")
    for cut in (start, end) if start is not None else (end,):
        cuts.check_cut(cut)
    refs = streams_of(tx, end)
    tags.lock_held(tx, name, [ref.id for ref in refs])
    pins = []
    for ref in refs:
        streams.lock_stream(tx, ref.id)
        found = cuts.kept_between(tx, store_id, ref, start, end)
        kept = {item.segment.number: (item.start, item.end) for item in found}
        # Segments of the two cuts are kept even if they are empty: a reader between these cuts names them.
        for segment, number in (item for cut in (start, end) if cut is not None for item in cut.streams[ref.name].segments.items()):
            kept.setdefault(segment, (number, number))
        pins += [(ref.id, segment, *bounds) for segment, bounds in kept.items()]
    tags.hold(tx, name, pins, int(seconds * 1_000_000))


def release(engine: Engine, name: str) -> None:
    """Forget a hold, if there is one."""
    if engine.run(tags.end_hold, parse_word(name, "hold")):
        truncation.free_rows(engine)


def list_tags(engine: Engine) -> dict[str, Cut]:
    return {name: Cut.parse(cut) for name, cut, _ in engine.run(tags.list_tags)}


def untag(engine: Engine, name: str) -> None:
    """Forget a tag. What only it kept is freed."""
    if not engine.run(tags.delete_tag, parse_word(name, "tag")):
        raise NotFoundError(f"there is no tag {name!r}")
    truncation.free_rows(engine)
