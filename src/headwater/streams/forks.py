"""Forks and tags: a stream that begins as another one was at a cut, and cuts with a name. No bytes are copied for either."""

from __future__ import annotations

from headwater.catalog import segments, streams, tags
from headwater.catalog.database import Tx
from headwater.errors import AlreadyExistsError, InvalidRequestError, NotFoundError
from headwater.model.arguments import shown
from headwater.model.cuts import Cut, StreamCut
from headwater.model.limits import HOLD_SECONDS
from headwater.model.names import parse_stream_name, parse_word
from headwater.segments.engine import Engine
from headwater.segments.lanes import StreamRef
from headwater.streams import cuts, truncation
from headwater.streams.cuts import Place
from headwater.streams.lifecycle import open_stream, stream_ref


def fork(engine: Engine, stream: StreamRef, new_name: str, at: Place) -> StreamRef:
    """A new stream with all that is readable before a place of this one, from then on independent of it.

    It has none of its parent's writers, groups or transactions, and keeps what it needs when the parent is truncated or deleted.
    """
    name = parse_stream_name(new_name)
    if stream.kind == "table":
        raise InvalidRequestError(f"{stream.name} is a table: it can't be forked, since its entries are no part of its stream of changes")
    place = cuts.fix(engine, stream, at if at is not None else "tail")

    def work(tx: Tx) -> streams.StreamRow:
        streams.lock_stream(tx, stream.id)
        numbers = cuts.numbers_in(tx, engine.store_id, stream, place)
        row = streams.copy_stream(tx, stream.id, name)
        if row is None:
            raise AlreadyExistsError(f"stream {name} exists")
        segments.copy_segments(tx, stream.id, row.id, numbers)
        return row

    try:
        return stream_ref(engine, engine.write(work))
    except NotFoundError:
        raise NotFoundError(f"stream {stream.name} was deleted") from None


def tag(engine: Engine, name: str, cut: Cut) -> None:
    """Name a cut: what is readable before it now stays so, also after a truncation, until `untag`."""
    parse_word(name, "tag")
    if not isinstance(cut, Cut) or not cut.streams:
        raise InvalidRequestError(f"a tag names a cut of one or more streams, not {shown(cut)}")
    refs = [open_stream(engine, parse_stream_name(stream)) for stream in cut.streams]

    def work(tx: Tx) -> bool:
        heads, pins = {}, []
        for ref in sorted(refs, key=lambda ref: ref.id):
            streams.lock_stream(tx, ref.id)
            found, head = cuts.ranges_to(tx, engine.store_id, ref, cut)
            heads[ref.name] = StreamCut(ref.id, head)
            kept = {item.segment.number: (item.start, item.end) for item in found}
            # Segments of the two cuts are kept also where they are empty, since the cuts name them.
            for segment, number in (*head.items(), *cut.streams[ref.name].segments.items()):
                kept.setdefault(segment, (number, number))
            pins += [(ref.id, segment, *bounds) for segment, bounds in kept.items()]
        return tags.insert_tag(tx, name, str(cut), str(Cut(engine.store_id, heads)), pins)

    if not engine.write(work):
        raise AlreadyExistsError(f"there is a tag {name!r}: untag it first")


def hold(engine: Engine, name: str, start: Cut | None, end: Cut, seconds: float) -> None:
    """Keep what lies between two cuts readable for a while, in place of what was held under this name before.

    Without a start it is what `ranges` gives up to the end: from the head, or from where a tagged cut was tagged.
    """
    parse_word(name, "hold")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not abs(seconds) <= HOLD_SECONDS:
        raise InvalidRequestError(f"a hold is for a number of seconds, up to {HOLD_SECONDS / 86400:g} days, not {shown(seconds)}")
    for cut in (start, end) if start is not None else (end,):
        cuts.check_cut(cut)
    refs = [open_stream(engine, parse_stream_name(stream)) for stream in end.streams]

    def work(tx: Tx) -> None:
        tags.lock_pinned(tx, _hold_name(name), [ref.id for ref in refs])
        pins = []
        for ref in sorted(refs, key=lambda ref: ref.id):
            streams.lock_stream(tx, ref.id)
            found = cuts.kept_between(tx, engine.store_id, ref, start, end)
            kept = {item.segment.number: (item.start, item.end) for item in found}
            # Also where they are empty: who reads between these cuts names their segments.
            for segment, number in (item for cut in (start, end) if cut is not None for item in cut.streams[ref.name].segments.items()):
                kept.setdefault(segment, (number, number))
            pins += [(ref.id, segment, *bounds) for segment, bounds in kept.items()]
        tags.hold(tx, _hold_name(name), pins, int(seconds * 1_000_000))

    engine.write_once(work)


def release(engine: Engine, name: str) -> None:
    """Forget a hold, if there is one."""
    if engine.write_once(tags.delete_tag, _hold_name(parse_word(name, "hold"))):
        truncation.free_rows(engine)


def _hold_name(name: str) -> str:
    # With a space, which no tag's name has: a hold never takes the place of a tag.
    return f"hold {name}"


def list_tags(engine: Engine) -> dict[str, Cut]:
    return {name: Cut.parse(cut) for name, cut, _ in engine.read(tags.list_tags)}


def untag(engine: Engine, name: str) -> None:
    """Forget a tag. What only it kept is freed."""
    if not engine.write(tags.delete_tag, parse_word(name, "tag")):
        raise NotFoundError(f"there is no tag {name!r}")
    truncation.free_rows(engine)
