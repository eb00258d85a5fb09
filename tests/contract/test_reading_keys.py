"""`stream.read(key=...)`: the events with one routing key, in order, and no segment is read that can't have any."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import headwater as hw
from headwater.check import check_store
from headwater.segments import chunk as chunk_module
from headwater.segments.chunk import ChunkFile
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


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row groups of about ten events, each with its filter."""
    monkeypatch.setattr(chunk_module, "ROW_GROUP_BYTES", 1024)


def write_some(stream: hw.Stream, keys: Sequence[bytes | None]) -> None:
    """Each ten events as a block of their own: blocks are not cut."""
    with stream.writer() as writer:
        for start in range(0, len(keys), 10):
            for key in keys[start : start + 10]:
                writer.write(b"x" * 80, key=key)
            writer.flush()


def check_keys(stream: hw.Stream, keys: Sequence[bytes], rng: random.Random) -> None:
    """The events of each key are those of a whole read, between any two places."""
    everything = list(stream.read())
    middle = stream.cut_at(rng.choice(everything).time)
    for start, end in ((None, None), (None, middle), (middle, None)):
        scanned = list(stream.read(start, end))
        for key in keys:
            assert list(stream.read(start, end, key=key)) == [event for event in scanned if event.key == key], key


def test_row_groups_are_passed_over_as_a_scan_of_all_would_choose(seed: int, store: hw.Store, small_groups: None) -> None:
    """In chunks and blocks, after compaction, in a fork and in what was split."""
    rng = random.Random(seed)
    stream = store.create_stream("a/many", scaling=hw.Scaling.fixed(2))
    pool: list[bytes | None] = [None, b"", *[rng.randbytes(rng.randrange(1, 30)) for _ in range(60)], b"often"]
    keys = [key for key in pool if key is not None] + [b"nobody", b"\0"]
    for turn in range(5):
        some = rng.sample(pool, 12)
        write_some(stream, [rng.choice(some) for _ in range(120)])
        store.run_upkeep()
        if turn == 2:
            stream.split(stream.segments()[0].number)
        if turn == 3:
            fork = stream.fork("a/fork")
    write_some(stream, [rng.choice(pool) for _ in range(30)])
    write_some(fork, [rng.choice(pool) for _ in range(60)])
    check_keys(stream, keys, rng)
    check_keys(fork, keys, rng)
    store.run_upkeep()
    check_keys(fork, keys, rng)
    stream.truncate(stream.cut_at(sorted(event.time for event in stream.read())[200]))
    check_keys(stream, keys, rng)


def test_only_row_groups_that_may_have_the_key_are_fetched(store: hw.Store, small_groups: None, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = store.create_stream("a/ordered")
    write_some(stream, [b"key %d" % (number // 20) for number in range(1000)])
    store.run_upkeep()
    fetched: list[range] = []
    read = ChunkFile.read

    def note(file: ChunkFile, storage: Any, places: range, names: Any) -> Any:
        fetched.append(places)
        return read(file, storage, places, names)

    monkeypatch.setattr(ChunkFile, "read", note)
    list(stream.read())
    total = sum(map(len, fetched))
    assert total >= 50
    fetched.clear()
    assert len(list(stream.read(key="key 7"))) == 20
    assert 2 <= sum(map(len, fetched)) <= 10
    fetched.clear()
    assert list(stream.read(key="nobody")) == []
    assert sum(map(len, fetched)) <= 5
    follower = stream.read(key="key 49", follow=True)
    assert [next(follower).key for _ in range(20)] == [b"key 49"] * 20
    assert sum(map(len, fetched)) <= 20
    with stream.writer() as writer:
        writer.write("more", key="key 49")
    assert next(follower).value == b"more"
    follower.close()  # type: ignore[attr-defined]


def test_a_key_that_is_nowhere_is_followed_to_the_end(store: hw.Store, small_groups: None) -> None:
    stream = store.create_stream("a/sealed", scaling=hw.Scaling.fixed(2))
    write_some(stream, [b"key %d" % number for number in range(300)])
    store.run_upkeep()
    stream.seal()
    assert list(stream.read(key="nobody", follow=True)) == []


def test_a_damaged_filter_hides_no_event_and_a_check_tells_of_it(local_store: hw.Store, small_groups: None) -> None:
    stream = local_store.create_stream("a/damaged")
    write_some(stream, [b"key %d" % (number % 30) for number in range(100)])
    local_store.run_upkeep()
    (chunk,) = stream.chunks()
    path = Path(chunk.url.removeprefix("file://"))
    metadata = pq.read_metadata(path)
    (place,) = [place for place in range(metadata.num_columns) if metadata.row_group(0).column(place).path_in_schema == "_key"]
    # The first filter without its bits would deny every key.
    offset, length = (getattr(metadata.row_group(0).column(place), f"bloom_filter_{name}") for name in ("offset", "length"))
    data = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(data[: offset + length - 32] + bytes(32) + data[offset + length :])
    assert len(list(stream.read(key="key 1"))) == 4
    report = check_store(local_store)
    assert [(problem.kind, problem.object) for problem in report.problems] == [("damaged", str(path.relative_to(path.parents[4])))]
    assert "filters" in report.problems[0].message
