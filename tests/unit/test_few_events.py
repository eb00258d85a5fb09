"""A few events are encoded and routed without arrays, to the same bytes and the same segments as many."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.model.keys import KEY_SPACE, hash_key
from headwater.model.schemas import OPAQUE
from headwater.segments import encoding
from headwater.segments.block import Chunk, EncodedBlock, decode, verify
from headwater.segments.encoding import encode, encode_few
from headwater.segments.lanes import Loose, StreamRef, make_chunk
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


def decoded(block: EncodedBlock) -> Chunk:
    data = pa.py_buffer(block.to_bytes())
    assert data.size == block.length
    verify(data, block.crc, "here")
    return decode(data, {1: OPAQUE}.__getitem__, "here").chunk


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
    numbers = range(segments)
    route = Route([number + 10 for number in numbers], [KEY_SPACE * number // segments for number in numbers], list(numbers))
    usual = route.spread([make_chunk(STREAM, values, keys, {})], turn)
    few, which = route.spread_few(values, keys, turn)
    found = [(segment, decoded(block).columns.column(0).to_pylist()) for segment, block in usual.encode(1, True)]
    assert [(segment, some) for segment, some, _ in few] == found
    places = [0] * len(events) if which is None else list(which)
    assert places == ([0] * len(events) if usual.which is None else usual.which.tolist())


@given(
    runs=st.lists(EVENTS, min_size=1, max_size=5),
    segments=st.integers(2, 7),
    turn=st.integers(0, 20),
    with_times=st.booleans(),
    loose=st.booleans(),
    opaque=st.booleans(),
    copied_bytes=st.sampled_from([1, 50, encoding._COPIED_BYTES]),
)
def test_events_of_several_chunks_are_spread_in_their_order_with_their_keys_and_times(
    runs: list[list[tuple[bytes, bytes | None]]], segments: int, turn: int, with_times: bool, loose: bool, opaque: bool, copied_bytes: int
) -> None:
    numbers = list(range(segments))
    route = Route(numbers, [KEY_SPACE * number // segments for number in numbers], numbers)
    times = {index: MOMENT + timedelta(seconds=index) for index in range(0, 40, 2)} if with_times else {}
    sources = [
        Loose(STREAM, [value for value, _ in run], [key for _, key in run], times if number % 2 else {}) for number, run in enumerate(runs)
    ]
    given = [event for source in sources for event in contents(source.whole())]
    spread = route.spread(sources if loose else [source.whole() for source in sources], turn)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoding, "_COPIED_BYTES", copied_bytes)
        # So that they are made after all of them are encoded.
        patch.setattr(encoding, "_SMALL_BYTES", 0)
        blocks = spread.encode(1, opaque)
    found = {segment: contents(decoded(block)) for segment, block in blocks}
    wanted: dict[int, list[tuple[Any, Any, Any]]] = {}
    for event in given:
        segment = turn % segments if event[1] is None else hash_key(event[1]) * segments // KEY_SPACE
        wanted.setdefault(segment, []).append(event)
    assert found == wanted
    used = [segment for segment, _ in blocks]
    ends = dict.fromkeys(used, 0)
    for event, place in zip(given, [0] * len(given) if spread.which is None else spread.which.tolist(), strict=True):
        assert found[used[place]][ends[used[place]]] == event
        ends[used[place]] += 1
