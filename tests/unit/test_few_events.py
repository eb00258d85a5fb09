"""A few events are encoded and routed without arrays, to the same bytes and the same segments as many."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headwater.model.keys import KEY_SPACE
from headwater.model.schemas import OPAQUE
from headwater.segments.block import encode, encode_few
from headwater.segments.lanes import StreamRef, make_chunk
from headwater.segments.routing import Route

STREAM = StreamRef(1, "a/b", "events", OPAQUE, 3, True)
EVENTS = st.lists(st.tuples(st.binary(max_size=40), st.none() | st.binary(max_size=12)), min_size=1, max_size=40)


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
