"""A few events are encoded and routed without arrays, to the same bytes and the same segments as many."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from headwater.model.keys import KEY_SPACE, hash_key
from headwater.model.schemas import OPAQUE
from headwater.segments.block import Chunk, encode, encode_few
from headwater.segments.lanes import StreamRef, make_chunk
from headwater.segments.routing import Route

STREAM = StreamRef(1, "a/b", "events", OPAQUE, 3, True)
MOMENT = datetime(2026, 1, 1, tzinfo=UTC)
EVENTS = st.lists(st.tuples(st.binary(max_size=40), st.none() | st.binary(max_size=12)), min_size=1, max_size=40)


def contents(chunk: Chunk) -> list[tuple[Any, Any, Any]]:
    """(value, key, time) of each event."""
    nothing = [None] * chunk.count
    keys = chunk.keys.to_pylist() if chunk.keys is not None else nothing
    times = chunk.times.to_pylist() if chunk.times is not None else nothing
    return list(zip(chunk.columns.column(0).to_pylist(), keys, times, strict=True))


@given(events=EVENTS)
def test_few_events_make_the_same_block_as_an_arrow_chunk_of_them(events: list[tuple[bytes, bytes | None]]) -> None:
    values, keys = [value for value, _ in events], [key for _, key in events]
    usual = encode([make_chunk(STREAM, values, keys, {})], 3, True)
    few = encode_few(values, keys, 3)
    assert few.to_bytes() == usual.to_bytes()
    assert (few.count, few.length, few.crc) == (usual.count, usual.length, usual.crc)


@given(events=EVENTS, segments=st.integers(1, 7), turn=st.integers(0, 20))
def test_few_events_go_to_the_same_segments_in_the_same_order(events: list[tuple[bytes, bytes | None]], segments: int, turn: int) -> None:
    values, keys = [value for value, _ in events], [key for _, key in events]
    route = Route([number + 10 for number in range(segments)], [KEY_SPACE * number // segments for number in range(segments)])
    usual, usual_which = route.spread([make_chunk(STREAM, values, keys, {})], turn)
    few, which = route.spread_few(values, keys, turn)
    found = [(segment, some[0].columns.column(0).to_pylist()) for segment, some in usual]
    assert [(segment, some) for segment, some, _ in few] == found
    places = [0] * len(events) if which is None else which.tolist()
    assert places == ([0] * len(events) if usual_which is None else usual_which.tolist())


@given(runs=st.lists(EVENTS, min_size=1, max_size=5), segments=st.integers(2, 7), turn=st.integers(0, 20), with_times=st.booleans())
def test_events_of_several_chunks_are_spread_in_their_order_with_their_keys_and_times(
    runs: list[list[tuple[bytes, bytes | None]]], segments: int, turn: int, with_times: bool
) -> None:
    route = Route(list(range(segments)), [KEY_SPACE * number // segments for number in range(segments)])
    chunks = [
        make_chunk(STREAM, [value for value, _ in run], [key for _, key in run], {0: MOMENT} if with_times and number % 2 else {})
        for number, run in enumerate(runs)
    ]
    given = [event for chunk in chunks for event in contents(chunk)]
    spread, which = route.spread(chunks, turn)
    found = {segment: [event for chunk in some for event in contents(chunk)] for segment, some in spread}
    wanted: dict[int, list[tuple[Any, Any, Any]]] = {}
    for event in given:
        segment = turn % segments if event[1] is None else hash_key(event[1]) * segments // KEY_SPACE
        wanted.setdefault(segment, []).append(event)
    assert found == wanted
    used = [segment for segment, _ in spread]
    ends = dict.fromkeys(used, 0)
    for event, place in zip(given, [0] * len(given) if which is None else which.tolist(), strict=True):
        assert found[used[place]][ends[used[place]]] == event
        ends[used[place]] += 1
