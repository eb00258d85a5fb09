"""Places in streams: head, tail, times and cuts, resolved to event numbers, and the ranges between two of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from headwater.catalog import extents, looks, replacements, segments, streams, tags, undone
from headwater.catalog.database import Tx
from headwater.catalog.extents import InChunk
from headwater.catalog.operations import Right, operation
from headwater.catalog.segments import SegmentRow
from headwater.errors import CorruptDataError, InvalidRequestError, RolledBackError, TruncatedError
from headwater.model.arguments import MOST, check_time, check_whole, shown
from headwater.model.cuts import Cut, StreamCut, part_text
from headwater.model.markers import CommittedMarker, Look
from headwater.model.segmentmap import Front, SegmentMap
from headwater.runtime import clock
from headwater.segments.engine import Engine
from headwater.segments.lanes import StreamRef
from headwater.streams.lifecycle import bare_ref, deleted, naming

Place = Cut | datetime | str | None


class Range(NamedTuple):
    """Numbers [start, end) of one segment."""

    segment: SegmentRow
    start: int
    end: int


def head(engine: Engine, stream: StreamRef) -> Cut:
    rows = engine.run(segments.list_segments, stream.id)
    if not rows:
        raise deleted(stream)
    return single(engine, stream, SegmentMap(rows).head())


def tail(engine: Engine, streams: Sequence[StreamRef]) -> Cut:
    """One cut over the tails of all these streams, in one look."""
    found = engine.run(segments.list_segments_of, [stream.id for stream in streams])
    for stream in streams:
        if not found[stream.id]:
            raise deleted(stream)
    return Cut(engine.store_id, {stream.name: StreamCut(stream.id, SegmentMap(found[stream.id]).tail()) for stream in streams})


def look(engine: Engine, streams: Sequence[StreamRef], owners: Sequence[str]) -> Look:
    """The tails of streams and the last markers of owners, in one look."""
    found = engine.run(looks.look, [stream.id for stream in streams], owners)
    for stream in streams:
        if not found.segments[stream.id]:
            raise deleted(stream)
    parts = {stream.name: StreamCut(stream.id, SegmentMap(found.segments[stream.id]).tail()) for stream in streams}
    markers: dict[str, CommittedMarker | None] = dict.fromkeys(owners)
    for owner, sequence, fingerprint, tails in found.markers:
        # Streams that were deleted since have no place any more.
        places = {found.names[stream]: StreamCut(stream, numbers) for stream, numbers in tails.items() if stream in found.names}
        markers[owner] = CommittedMarker(owner, sequence, fingerprint, Cut(engine.store_id, places))
    return Look(Cut(engine.store_id, parts), markers)


def at_time(engine: Engine, stream: StreamRef, time: datetime) -> Cut:
    """Before it lies what was appended before `time`, behind it the rest."""
    check_time(time, "the time of a cut")
    time_us = clock.from_datetime(time)
    with naming(stream):
        found = engine.run(find_numbers_at, stream.id, time_us)
    return single(engine, stream, {segment: _search_chunks(engine, stream, segment, place, time_us) for segment, place in found.items()})


def _search_chunks(engine: Engine, stream: StreamRef, segment: int, place: int | InChunk | None, time_us: int) -> int:
    """The number that a time means in a segment: `place` if that is a number, or from the times in chunks."""
    failures = start = 0
    while isinstance(place, InChunk):
        start = place.end
        try:
            number = engine.find_time(place, time_us)
            if number < place.end:
                return max(number, place.start)
        except CorruptDataError:
            # Upkeep may have put another chunk in its place, with the same events and times.
            failures += 1
            if failures == 10:
                raise
            start = place.start
        place = engine.run(find_number_at, stream.id, segment, time_us, start)
    return start if place is None else place


@operation("read", right=Right("read", "stream"))
def find_numbers_at(tx: Tx, stream: int, time_us: int) -> dict[int, int | InChunk]:
    """The segments of a time, with the first number of each that was appended then or later, or the chunk that has it."""
    check_whole(time_us, "a time in microseconds", -MOST, MOST)
    _, rows = _look_at(tx, stream)
    stream_map = SegmentMap(rows)
    newest = {row.number for row in stream_map.newest()}
    active = [row for row in rows if row.made_at <= time_us and (row.number in newest or row.sealed_at is None or row.sealed_at > time_us)]
    # Where that time's segments are gone, or there were none yet, the head is the place.
    front = Front(active)
    rest = {row.number: row.head for row in stream_map.oldest() if not front.covers(row.keys)}
    return {row.number: extents.find_number_at(tx, row, time_us) for row in active} | rest


@operation("read", right=Right("read", "stream"))
def find_number_at(tx: Tx, stream: int, segment: int, time_us: int, start: int) -> int | InChunk | None:
    """The first number of a segment from `start` on that was appended at a time or later; None if the segment is gone."""
    check_whole(time_us, "a time in microseconds", -MOST, MOST)
    row = segments.find_segment(tx, stream, segment)
    return extents.find_number_at(tx, row, time_us, start) if row is not None else None


def fix(engine: Engine, stream: StreamRef, place: Place) -> Place:
    """A time as the cut it means, which may need a look into storage; any other place as it is."""
    return at_time(engine, stream, place) if isinstance(place, datetime) else place


def ranges(engine: Engine, stream: StreamRef, start: Place, end: Place, *, skip_truncated: bool = False) -> list[Range]:
    """What lies between two places, by segment in the order of their numbers.

    TruncatedError if some of it is gone, unless that is to be skipped.
    """
    places = fix(engine, stream, start), fix(engine, stream, end)
    with naming(stream):
        return engine.run(find_ranges, engine.store_id, stream.id, *places, skip_truncated, isinstance(end, Cut))


@operation("read", right=Right("read", "stream"))
def find_ranges(tx: Tx, store_id: str, stream: int, start: Place, end: Place, skip_truncated: bool, may_be_tagged: bool) -> list[Range]:
    """What lies between two places, neither of which is a time. With `may_be_tagged`, the head is where it was when the end was tagged."""
    ref, rows = _look_at(tx, stream)
    return _ranges(tx, store_id, ref, rows, start, end, skip_truncated, may_be_tagged=may_be_tagged)


def estimate_bytes(engine: Engine, stream: StreamRef, found: Sequence[Range]) -> list[int]:
    """About how many bytes each of these ranges has."""
    if all(extents.is_counted(item.segment, item.start) for item in found):
        return [extents.count_bytes(item.segment, item.start, item.end) for item in found]
    return engine.run(estimate_range_bytes, stream.id, [(item.segment.number, item.start, item.end) for item in found])


@operation("read", right=Right("read", "stream"))
def estimate_range_bytes(tx: Tx, stream: int, ranges: Sequence[tuple[int, int, int]]) -> list[int]:
    """About how many bytes each (segment, start, end) has; 0 if the segment is gone."""
    rows = {row.number: row for row in segments.list_segments(tx, stream, with_dropped=True)}
    return [extents.estimate_bytes(tx, rows[number], start, end) if number in rows else 0 for number, start, end in ranges]


def open_ranges(engine: Engine, stream: StreamRef, start: Place) -> list[Range]:
    """What lies behind a place as of now, with every segment that may still grow."""
    place = fix(engine, stream, start)
    with naming(stream):
        return engine.run(find_open_ranges, engine.store_id, stream.id, place)


@operation("read", right=Right("read", "stream"))
def find_open_ranges(tx: Tx, store_id: str, stream: int, start: Place) -> list[Range]:
    """What lies past a place, which is not a time, with every segment that may still grow."""
    ref, rows = _look_at(tx, stream)
    return _between(store_id, ref, rows, _resolve(tx, store_id, ref, rows, start, "head"), None)


def numbers(engine: Engine, stream: StreamRef, place: Place) -> dict[int, int]:
    """A place as event numbers by segment. TruncatedError if it lies before the head."""
    fixed = fix(engine, stream, place)
    with naming(stream):
        return engine.run(numbers_in, engine.store_id, stream.id, fixed)


@operation("read", right=Right("read", "stream"))
def numbers_in(tx: Tx, store_id: str, stream: int, place: Place) -> dict[int, int]:
    """A place, which is not a time, as event numbers by segment. TruncatedError if it lies before the head."""
    ref, rows = _look_at(tx, stream)
    found = _resolve(tx, store_id, ref, rows, place, "head")
    _between(store_id, ref, rows, found, None)
    return found


def readable_numbers(tx: Tx, store_id: str, stream: StreamRef, cut: Cut) -> dict[int, int]:
    """A cut's numbers for a stream. TruncatedError if the cut lies before the head."""
    _, rows = _look_at(tx, stream.id)
    found = resolve_cut(tx, store_id, stream, rows, cut)
    _between(store_id, stream, rows, found, None)
    return found


def ranges_to(tx: Tx, store_id: str, stream: StreamRef, cut: Cut) -> tuple[list[Range], dict[int, int]]:
    """What lies before a cut, and the head."""
    _, rows = _look_at(tx, stream.id)
    first = SegmentMap(rows).head()
    return _between(store_id, stream, rows, first, resolve_cut(tx, store_id, stream, rows, cut)), first


def kept_between(tx: Tx, store_id: str, stream: StreamRef, start: Cut | None, end: Cut) -> list[Range]:
    """What is readable, or kept by a tag, between two cuts; without a start from the head, as `ranges` takes it."""
    _, rows = _look_at(tx, stream.id)
    return _ranges(tx, store_id, stream, rows, start, end, True, may_be_tagged=True)


def between_numbers(rows: list[SegmentRow], lower: dict[int, int], upper: dict[int, int] | None) -> list[Range]:
    """What lies between two places that are resolved already, of what is still there."""
    parts = [Range(row, max(start, row.head), end) for row, start, end in SegmentMap(rows).between(lower, upper)]
    return [part for part in parts if part.start < part.end]


def single(engine: Engine, stream: StreamRef, numbers: dict[int, int]) -> Cut:
    """A cut of one stream at these numbers."""
    return Cut(engine.store_id, {stream.name: StreamCut(stream.id, numbers)})


def _look_at(tx: Tx, stream: int) -> tuple[StreamRef, list[SegmentRow]]:
    """A stream without its schema, and its segments."""
    found, rows = tx.run_all([streams.looked_up(stream), segments.listed(stream)])
    return bare_ref(streams.to_stream(stream, found)), [segments.to_row(row) for row in rows]


def _resolve(tx: Tx, store_id: str, stream: StreamRef, rows: list[SegmentRow], place: Place, default: str) -> dict[int, int]:
    if place is None:
        place = default
    if isinstance(place, str) and place == "head":
        return SegmentMap(rows).head()
    if isinstance(place, str) and place == "tail":
        return SegmentMap(rows).tail()
    if isinstance(place, Cut):
        return resolve_cut(tx, store_id, stream, rows, place)
    raise InvalidRequestError(f"a place in a stream is a Cut, 'head', 'tail' or a datetime, not {shown(place)}")


def resolve_cut(tx: Tx, store_id: str, stream: StreamRef, rows: list[SegmentRow], cut: Cut) -> dict[int, int]:
    """A cut's numbers for a stream. RolledBackError if the cut is past a place that the stream was rolled back to."""
    check_cut(cut)
    part = _part_of(cut, stream)
    if part is not None and cut.store == store_id:
        moved = replacements.follow(tx, part.id, stream.id, part.segments) if part.id != stream.id else None
        if moved is not None:
            part = StreamCut(stream.id, moved.numbers)
            cut = Cut(store_id, {stream.name: part})
        # Only a place that looks wrong is looked up.
        if part.id == stream.id and undone.is_suspect({row.number: row for row in rows}, part.segments):
            error = undone.find_error(tx, stream.id, part.segments, rows)
            if error is not None:
                raise error
        if moved is not None and not moved.holds:
            place = Cut(store_id, {stream.name: StreamCut(stream.id, SegmentMap(rows).readable(part.segments))})
            raise RolledBackError(
                f"another stream has the name {stream.name} by now, without this place: read on from the cut of this error", place
            )
    return cut_numbers(store_id, stream, rows, cut)


@operation("read", right=Right("read", "stream"))
def find_cut(tx: Tx, store_id: str, stream: int, cut: Cut) -> dict[int, int]:
    """A cut's numbers for a stream; some of them may lie before the head."""
    ref, rows = _look_at(tx, stream)
    return resolve_cut(tx, store_id, ref, rows, cut)


def check_readable(store_id: str, stream: StreamRef, rows: list[SegmentRow], numbers: dict[int, int]) -> None:
    """TruncatedError if a place lies before the head."""
    _between(store_id, stream, rows, numbers, None)


def _part_of(cut: Cut, stream: StreamRef) -> StreamCut | None:
    """A cut's part for a stream, found by the stream's id: names can move."""
    return next((part for part in cut.streams.values() if part.id == stream.id), cut.streams.get(stream.name))


def check_cut(cut: Any) -> None:
    """Refuse what is no cut, where no other place will do."""
    if not isinstance(cut, Cut):
        raise InvalidRequestError(f"a cut is needed here, as stream.tail() or stream.cut_at(time) give it, not {shown(cut)}")


def cut_numbers(store_id: str, stream: StreamRef, rows: list[SegmentRow], cut: Cut) -> dict[int, int]:
    """A cut's numbers for this stream, if it is a cut of this stream."""
    check_cut(cut)
    if cut.store != store_id:
        raise InvalidRequestError(f"this cut is of another store ({cut.store}), not of this one ({store_id})")
    part = _part_of(cut, stream)
    if part is None:
        raise InvalidRequestError(f"this cut is of {', '.join(cut.streams) or 'no stream'}, not of {stream.name}")
    if part.id != stream.id:
        raise InvalidRequestError(f"this cut is of a deleted stream that was called {stream.name} too")
    stream_map = SegmentMap(rows)
    newest = max(stream_map.segments)
    for segment, number in part.segments.items():
        row = stream_map.segments.get(segment)
        if row is None and segment > newest:
            raise InvalidRequestError(f"stream {stream.name} has no segment {segment}")
        if row is not None and number > row.tail:
            raise InvalidRequestError(f"this cut lies past the tail: segment {segment} of {stream.name} ends at {row.tail}, not {number}")
    if not stream_map.tiles(part.segments):
        raise InvalidRequestError(f"this cut does not cover the keys of {stream.name} once each: segments {list(part.segments)}")
    return dict(part.segments)


def _ranges(
    tx: Tx,
    store_id: str,
    stream: StreamRef,
    rows: list[SegmentRow],
    start: Place,
    end: Place,
    skip_truncated: bool,
    *,
    may_be_tagged: bool,
) -> list[Range]:
    upper = _resolve(tx, store_id, stream, rows, end, "tail")
    lower = _tagged_head(tx, stream, upper) if may_be_tagged and (start is None or (isinstance(start, str) and start == "head")) else None
    if lower is None:
        lower = _resolve(tx, store_id, stream, rows, start, "head")
    try:
        return _between(store_id, stream, rows, lower, upper)
    except TruncatedError:
        kept = kept_ranges(tx, stream, lower, upper)
        if kept is None and skip_truncated:
            return between_numbers(rows, lower, upper)
        if kept is None:
            raise
        return kept


def _tagged_head(tx: Tx, stream: StreamRef, cut: dict[int, int]) -> dict[int, int] | None:
    """Up to a tagged cut, the head is where it was when the cut was tagged."""
    # Without the name, which may have been another one when the tag was made.
    _, text = part_text(stream.name, StreamCut(stream.id, cut)).split(":", 1)
    head = tags.find_head(tx, stream.id, cut, text)
    part = _part_of(Cut.parse(head), stream) if head is not None else None
    return None if part is None else dict(part.segments)


def kept_ranges(tx: Tx, stream: StreamRef, lower: dict[int, int], upper: dict[int, int]) -> list[Range] | None:
    """What lies between two places of which some is truncated, if tags keep all of it; else None."""
    pins = tags.get_pins(tx, stream.id)
    by_number = {row.number: row for row in segments.list_segments(tx, stream.id, with_dropped=True)}
    if any(segment not in by_number for segment in (*lower, *upper)):
        return None
    # What was truncated is asked for too, so every segment behind the lower place is wanted from its very first number.
    whole = [row._replace(head=0) for row in by_number.values()]
    found = between_numbers(whole, lower, upper)
    if not all(tags.is_kept(by_number[item.segment.number], item.start, item.end, pins) for item in found):
        return None
    return [Range(by_number[item.segment.number], item.start, item.end) for item in found]


def still_kept(tx: Tx, stream: int, ranges: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Those (segment, start, end) that are readable, or kept by a tag. For good, if the caller has locked the stream and pins them."""
    pins = tags.get_pins(tx, stream)
    rows = {row.number: row for row in segments.list_segments(tx, stream, with_dropped=True)}
    return [item for item in ranges if item[0] in rows and tags.is_kept(rows[item[0]], item[1], item[2], pins)]


def _between(store_id: str, stream: StreamRef, rows: list[SegmentRow], lower: dict[int, int], upper: dict[int, int] | None) -> list[Range]:
    stream_map = SegmentMap(rows)
    there = stream_map.segments
    places = (lower, upper or {})
    gone = [segment for place in places for segment in place if segment not in there]
    gone += [segment for place in places for segment, number in place.items() if segment in there and number < there[segment].head]
    if gone:
        first = Cut(store_id, {stream.name: StreamCut(stream.id, stream_map.head())})
        raise TruncatedError(
            f"some of what was asked for of {stream.name} (in segment {gone[0]}) was truncated; read on from its head", first
        )
    # Without an upper place, empty segments too: they may grow, or have successors that will.
    parts = stream_map.between(lower, upper)
    return [Range(*part) for part in parts if part.start < part.end or (upper is None and part.start == part.end)]
