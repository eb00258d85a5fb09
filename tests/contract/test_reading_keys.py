"""`stream.read(key=...)`: the events with one routing key, in order, and no segment is read that can't have any."""

from __future__ import annotations

import threading
from typing import Any

import pyarrow as pa
import pytest

import headwater as hw
from headwater.segments.read import SegmentCursor

KEYS = [f"key{number}" for number in range(20)]


def write(stream: hw.Stream, turns: range) -> None:
    with stream.writer() as writer:
        for turn in turns:
            for key in KEYS:
                writer.write(f"{key} {turn}", key=key)
            writer.write(f"nobody's {turn}")


@pytest.fixture
def stream(store: hw.Store) -> hw.Stream:
    """Split and merged, in chunks and in blocks."""
    stream = store.create_stream("a/stream", scaling=hw.Scaling.fixed(4))
    write(stream, range(10))
    stream.split(1, 3)
    store.run_upkeep()
    write(stream, range(10, 20))
    stream.merge([2, 3])
    write(stream, range(20, 30))
    return stream


def test_one_keys_events_are_those_of_a_whole_read(stream: hw.Stream) -> None:
    everything = list(stream.read())
    for key in KEYS:
        found = list(stream.read(key=key))
        assert found == [event for event in everything if event.key == key.encode()]
        assert [event.value for event in found] == [b"%s %d" % (key.encode(), turn) for turn in range(30)]
        assert [event.position for event in found] == [event.position for event in everything if event.key == key.encode()]
    assert list(stream.read(key="unknown")) == []
    assert list(stream.read(key=b"key1")) == list(stream.read(key="key1"))
    middle = stream.tail()
    write(stream, range(30, 31))
    assert [event.value for event in stream.read(middle, key="key3")] == [b"key3 30"]
    assert len(list(stream.read(end=middle, key="key3"))) == 30


def test_a_key_may_be_a_number_and_events_may_be_typed(store: hw.Store) -> None:
    stream = store.create_stream("a/typed", schema=pa.schema([("id", pa.int64()), ("s", pa.string())]))
    with stream.writer() as writer:
        writer.write_batch(pa.table({"id": [1, 2, 1, 2], "s": ["a", "b", "c", "d"]}), key="id")
    stream.update(schema=pa.schema([("id", pa.int64()), ("s", pa.string()), ("more", pa.int8())]))
    assert [event.value for event in stream.read(key=2)] == [{"id": 2, "s": "b", "more": None}, {"id": 2, "s": "d", "more": None}]
    with pytest.raises(hw.InvalidRequestError, match="a routing key is bytes, str, int"):
        stream.read(key=1.5)  # type: ignore[arg-type]
    store.table("a/table").put("k", b"1")
    store.table("a/table").put("l", b"2")
    assert [event.value for event in store.stream("a/table").read(key="l")] == [{"key": "l", "value": b"2"}]


def test_only_the_segments_of_the_key_are_read(stream: hw.Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: set[int] = set()
    begin = SegmentCursor.__init__

    def note(cursor: SegmentCursor, engine: Any, ref: Any, segment: int, *rest: Any, **options: Any) -> None:
        opened.add(segment)
        begin(cursor, engine, ref, segment, *rest, **options)

    monkeypatch.setattr(SegmentCursor, "__init__", note)
    list(stream.read())
    everything = set(opened)
    opened.clear()
    found = list(stream.read(key="key1"))
    assert opened == {event.position.segment for event in found} < everything


def test_a_follower_of_a_key_sees_its_events_across_splits(stream: hw.Stream) -> None:
    seen: list[bytes] = []
    follower = threading.Thread(target=lambda: seen.extend(event.value for event in stream.read(key="key5", follow=True)))
    follower.start()
    write(stream, range(30, 32))
    for segment in stream.segments():
        stream.split(segment.number)
    write(stream, range(32, 34))
    stream.merge([segment.number for segment in stream.segments()])
    write(stream, range(34, 36))
    stream.seal()
    follower.join(60)
    assert seen == [b"key5 %d" % turn for turn in range(36)]
