"""Going on in steps: limits, the order of segments, ends, truncation, and several streams at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

import headwater as hw
from headwater.check import check_store
from tests.crash.processes import Place

NAME = "s/x"


@pytest.fixture
def store(place: Place) -> Iterator[hw.Store]:
    with place.open(create=True) as store:
        store.create_stream(NAME, scaling=hw.Scaling.fixed(2))
        yield store
        assert check_store(store).ok


def write(store: hw.Store, first: int, until: int, name: str = NAME) -> None:
    with store.stream(name).writer() as writer:
        for number in range(first, until):
            writer.write(str(number), key=str(number % 20))


def scaled(store: hw.Store) -> hw.Stream:
    """300 numbers: 100 before a split, 100 before a merge, 100 behind it."""
    stream = store.stream(NAME)
    write(store, 0, 100)
    stream.split(0)
    write(store, 100, 200)
    neighbours = sorted(stream.segments(), key=lambda segment: segment.start)
    stream.merge([segment.number for segment in neighbours[:2]])
    write(store, 200, 300)
    return stream


def read(stream: hw.Stream, start: hw.Cut, end: hw.Cut) -> list[tuple[bytes, int]]:
    found = []
    for part in stream.ranges(start, end):
        for batch in part.to_batches(["_key", "value"]):
            found += [(row["_key"], int(row["value"])) for row in batch.to_pylist()]
    return found


@pytest.mark.parametrize("piece_bytes", [1, 500, 1 << 20])
@pytest.mark.parametrize("max_events", [1, 7, 37, None])
def test_steps_are_within_their_limit_and_keep_each_keys_order(store: hw.Store, max_events: int | None, piece_bytes: int) -> None:
    stream = scaled(store)
    at, events = stream.head(), []
    while (behind := store.advance(at, max_events=max_events, piece_bytes=piece_bytes)) != at:
        step = read(stream, at, behind)
        assert 0 < len(step) <= (max_events or 300)
        events += step
        at = behind
    assert sorted(number for _, number in events) == list(range(300))
    latest: dict[bytes, int] = {}
    for key, number in events:
        assert latest.get(key, -1) < number
        latest[key] = number


def test_a_segment_and_its_successor_are_in_one_step_only_if_they_are_small(store: hw.Store) -> None:
    stream = scaled(store)
    assert store.advance(stream.head()) == stream.tail()
    first = store.advance(stream.head(), piece_bytes=1)
    assert {part.segment for part in stream.ranges(stream.head(), first)} == {0, 1}
    second = store.advance(first, piece_bytes=1)
    assert {part.segment for part in stream.ranges(first, second)} <= {2, 3, 4}


def test_a_limit_of_bytes_is_about_kept_and_always_gets_on(store: hw.Store) -> None:
    stream = scaled(store)
    whole = sum(part.bytes for part in stream.ranges())
    step = store.advance(stream.head(), max_bytes=whole // 10)
    taken = sum(part.count for part in stream.ranges(stream.head(), step))
    assert 10 <= taken <= 60
    assert sum(part.count for part in stream.ranges(stream.head(), store.advance(stream.head(), max_bytes=1))) == 1


def test_an_end_is_not_passed_also_if_it_lies_in_segments_that_were_sealed_since(store: hw.Store) -> None:
    stream = store.stream(NAME)
    write(store, 0, 50)
    end = stream.tail()
    write(store, 50, 100)
    stream.split(0)
    write(store, 100, 150)
    at = stream.head()
    while (behind := store.advance(at, end=end, max_events=20)) != at:
        at = behind
    assert len(read(stream, stream.head(), at)) == 50
    assert store.advance(at, end=end) == at


def test_nothing_new_is_the_same_place(store: hw.Store) -> None:
    stream = store.stream(NAME)
    write(store, 0, 10)
    tail = stream.tail()
    stream.split(0)
    assert store.advance(tail) == tail


def test_a_wait_ends_with_the_first_event(store: hw.Store) -> None:
    stream = store.stream(NAME)
    tail = stream.tail()
    writing = threading.Timer(0.1, write, (store, 0, 1))
    writing.start()
    assert store.advance(tail, wait=60.0) != tail
    writing.join()


def test_several_streams_share_the_limit(store: hw.Store) -> None:
    store.create_stream("s/y")
    write(store, 0, 100)
    write(store, 0, 300, "s/y")
    start = hw.Cut(store.id, {**store.stream(NAME).head().streams, **store.stream("s/y").head().streams})
    step = store.advance(start, max_events=40)
    counts = {name: sum(part.count for part in store.stream(name).ranges(start, step)) for name in (NAME, "s/y")}
    assert 28 <= counts["s/y"] <= 30 and counts[NAME] == 40 - counts["s/y"]


def test_more_segments_than_events_in_a_step_take_turns(store: hw.Store) -> None:
    stream = store.create_stream("s/many", scaling=hw.Scaling.fixed(16))
    with stream.writer() as writer:
        for number in range(1600):
            writer.write(b"x", key=str(number))
    at, read_of = stream.head(), dict.fromkeys(range(16), 0)
    for _ in range(8):
        behind = store.advance(at, max_events=10)
        for part in stream.ranges(at, behind):
            read_of[part.segment] += part.count
        at = behind
    assert sum(read_of.values()) == 80 and set(read_of.values()) == {5}


def test_a_segment_with_little_is_read_beside_one_that_grows_as_fast_as_it_is_read(store: hw.Store) -> None:
    stream = store.stream(NAME)
    with stream.writer() as writer:
        segments = {writer.write(b"x", key=key).result().segment: key for key in map(str, range(20))}
    assert len(segments) == 2
    at, cold = stream.tail(), 0
    with stream.writer() as writer:
        for _ in range(5):
            writer.write(b"cold", key=segments[0])
        for _ in range(5000):
            writer.write(b"hot", key=segments[1])
        writer.flush()
        for _ in range(5):
            behind = store.advance(at, max_events=100)
            counts = {part.segment: part.count for part in stream.ranges(at, behind)}
            assert sum(counts.values()) == 100
            cold += counts.get(0, 0)
            at = behind
            for _ in range(100):
                writer.write(b"hot", key=segments[1])
            writer.flush()
    assert cold == 5


def test_what_was_truncated_is_told_or_skipped(store: hw.Store) -> None:
    stream = scaled(store)
    start = store.advance(stream.head(), max_events=30)
    cut = store.advance(stream.head(), max_events=150)
    stream.truncate(cut)
    with pytest.raises(hw.TruncatedError, match="were truncated before they were read") as caught:
        store.advance(start)
    assert caught.value.head == stream.head()
    behind = store.advance(start, skip_truncated=True)
    left = [number for part in stream.ranges(start, behind, skip_truncated=True) for number in range(part.start, part.end)]
    assert len(left) == sum(part.count for part in stream.ranges())
    assert behind == stream.tail()


def test_where_all_was_truncated_there_are_no_ranges(store: hw.Store) -> None:
    stream = store.stream(NAME)
    write(store, 0, 20)
    end = stream.tail()
    write(store, 20, 40)
    start = stream.head()
    stream.truncate(stream.tail())
    assert stream.ranges(start, end, skip_truncated=True) == []


def test_bytes_of_a_fork_and_of_what_is_held_are_counted(store: hw.Store) -> None:
    stream = store.create_stream("s/one")
    cuts = []
    with stream.writer() as writer:
        for number in range(1000):
            writer.write(bytes(1000), key="k")
            if number % 10 == 9:
                writer.flush()
                cuts.append(stream.tail())
    fork = stream.fork("s/fork")
    store.reader_group("g", ["s/fork"])
    assert 1_000_000 <= store.reader_group("g").lag().bytes <= 1_100_000
    assert 1_000_000 <= fork.ranges()[0].bytes <= 1_100_000
    step = store.advance(fork.head(), max_bytes=100_000)
    assert 85 <= sum(part.count for part in fork.ranges(fork.head(), step)) <= 100
    store.hold("h", cuts[79], stream.tail(), 600)
    stream.truncate(cuts[89])
    store.delete_stream("s/fork", seal=True)
    store.run_upkeep()
    step = store.advance(cuts[79], max_bytes=20_000)
    assert 15 <= sum(part.count for part in stream.ranges(cuts[79], step)) <= 20


def test_a_segment_that_stayed_empty_leaves_no_hole(store: hw.Store) -> None:
    stream = store.stream(NAME)
    with stream.writer() as writer:
        writer.write(b"first", key="k3").result()
        stream.merge([0, 1])
        stream.split(2, parts=3)
        for number in range(300):
            writer.write(bytes(1000), key=str(number))
    at, found = stream.head(), 0
    while (behind := store.advance(at, piece_bytes=64_000)) != at:
        found += sum(part.count for part in stream.ranges(at, behind))
        at = behind
    assert found == 301 and at == stream.tail()


def test_what_a_tag_keeps_is_still_read_in_steps(store: hw.Store) -> None:
    stream = scaled(store)
    start, tail = stream.head(), stream.tail()
    store.tag("kept", tail)
    stream.truncate(tail)
    at, count = start, 0
    while (behind := store.advance(at, end=tail, max_events=50)) != at:
        count += sum(part.count for part in stream.ranges(at, behind))
        at = behind
    assert count == 300
    store.untag("kept")


def test_a_cut_of_another_store_is_refused(store: hw.Store) -> None:
    other = hw.Cut("another", store.stream(NAME).head().streams)
    with pytest.raises(hw.InvalidRequestError, match="another store"):
        store.advance(other)
    with pytest.raises(hw.InvalidRequestError, match="at least 1"):
        store.advance(store.stream(NAME).head(), max_events=0)
