"""Forks and tags: independent of their parent, readable after it was truncated or deleted, and no bytes are copied."""

from __future__ import annotations

from datetime import UTC, datetime

import pyarrow as pa
import pytest

import headwater as hw
from headwater.catalog import tags
from headwater.streams import reading

KEYS = [f"key {number}" for number in range(7)]


@pytest.fixture
def stream(store: hw.Store) -> hw.Stream:
    return store.create_stream("a/parent", scaling=hw.Scaling.fixed(2), labels=["one"])


def write(stream: hw.Stream, mark: str, count: int, size: int = 0) -> None:
    with stream.writer() as writer:
        for number in range(count):
            writer.write(f"{mark}{number}".ljust(size, "."), key=KEYS[number % len(KEYS)])


def values(stream: hw.Stream, **places: hw.Cut | str | datetime | None) -> list[bytes]:
    """The events by key, in order for each."""
    found: dict[bytes | None, list[bytes]] = {}
    for event in stream.read(**places):  # type: ignore[arg-type]
        found.setdefault(event.key, []).append(event.value.rstrip(b"."))
    return [value for key in sorted(found, key=str) for value in found[key]]


def extents(store: hw.Store) -> int:
    return int(store._engine.database.query("SELECT count(*) FROM extent")[0][0])


@pytest.mark.parametrize("size", [0, 30_000])
def test_a_fork_begins_with_its_parents_events_and_then_goes_its_own_way(store: hw.Store, stream: hw.Stream, size: int) -> None:
    write(stream, "p", 20, size)
    before = values(stream)
    count = extents(store)
    fork = stream.fork("b/fork")
    assert extents(store) == count, "nothing is copied"
    assert values(fork) == before and fork.schema.equals(stream.schema)
    assert [event.position for event in fork.read()] == [event.position for event in stream.read()]
    write(stream, "more", 5, size)
    write(fork, "own", 3, size)
    assert len(values(stream)) == 25 and len(values(fork)) == 23
    assert not any(value.startswith(b"more") for value in values(fork))
    assert not any(value.startswith(b"own") for value in values(stream))
    assert fork.to_arrow().num_rows == 23 and sum(item.count for item in fork.ranges()) == 23
    assert fork.origin == "a/parent" and stream.forks() == ["b/fork"] and stream.origin is None


def test_a_fork_has_order_by_key_across_the_place_where_it_began_and_its_own_splits_and_merges(store: hw.Store, stream: hw.Stream) -> None:
    write(stream, "p", 30)
    stream.split(0)
    write(stream, "q", 30)
    fork = stream.fork("a/fork")
    merged = fork.merge([segment.number for segment in fork.segments()][-2:])
    write(fork, "r", 30)
    fork.split(merged[0].number, 3)
    write(fork, "s", 30)
    by_key: dict[bytes | None, list[bytes]] = {}
    for event in fork.read():
        by_key.setdefault(event.key, []).append(event.value)
    for index, key in enumerate(KEYS):
        wanted = [f"{mark}{number}".encode() for mark in "pqrs" for number in range(30) if number % len(KEYS) == index]
        assert by_key[key.encode()] == wanted


def test_a_fork_at_a_cut_or_a_time_has_what_lay_before_it(store: hw.Store, stream: hw.Stream) -> None:
    write(stream, "p", 10)
    cut = stream.tail()
    moment = datetime.now(UTC)
    stream.split(1)
    write(stream, "q", 10)
    assert values(stream.fork("a/cut", at=cut)) == values(stream, end=cut)
    at_time = stream.fork("a/time", at=moment)
    assert values(at_time) == values(stream, end=cut)
    assert values(stream.fork("a/head", at="head")) == []
    write(at_time, "r", 4)
    assert len(values(at_time)) == 14


def test_a_fork_keeps_what_it_needs_when_its_parent_is_truncated_and_deleted(store: hw.Store, stream: hw.Stream) -> None:
    write(stream, "p", 20)
    fork = stream.fork("a/fork")
    second = fork.fork("a/second")
    write(second, "s", 5)
    before, later = values(fork), values(second)
    write(stream, "q", 20)
    stream.truncate(stream.tail())
    assert values(fork) == before and values(stream) == []
    stream.seal()
    store.delete_stream("a/parent")
    store.run_upkeep()
    assert values(fork) == before and values(second) == later and fork.origin is None
    fork.truncate(fork.tail())
    assert values(fork) == [] and values(second) == later
    for name in ("a/fork", "a/second"):
        store.stream(name).seal()
        store.delete_stream(name)
    store.run_upkeep()
    assert extents(store) == 0, "what nobody needs is freed"
    assert not store._engine.database.query("SELECT 1 FROM dead_log") and not store._engine.database.query("SELECT 1 FROM base")


def test_a_fork_has_none_of_its_parents_writers_groups_or_transactions(store: hw.Store, stream: hw.Stream) -> None:
    with stream.writer("source") as writer:
        writer.write(b"1", number=5)
    store.reader_group("group", ["a/parent"])
    tx = store.transaction()
    tx.write("a/parent", b"2")
    tx.flush()
    fork = stream.fork("a/fork")
    with fork.writer("source") as writer:
        assert writer.last_number == 0
    tx.commit()
    assert [event.value for event in fork.read()] == [b"1"]
    assert store.reader_group("group").streams == ["a/parent"]


def test_a_fork_of_a_typed_and_of_a_byte_stream(store: hw.Store) -> None:
    schema = pa.schema([("n", pa.int32())])
    typed = store.create_stream("a/typed", schema=schema)
    with typed.writer() as writer:
        writer.write({"n": 1})
    typed.update(schema=pa.schema([("n", pa.int64()), ("text", pa.string())]))
    fork = typed.fork("a/typed-fork")
    with fork.writer() as writer:
        writer.write({"n": 1 << 40, "text": "x"})
    assert [event.value for event in fork.read()] == [{"n": 1, "text": None}, {"n": 1 << 40, "text": "x"}]
    data = store.create_stream("a/bytes", kind="bytes")
    with data.byte_writer() as byte_writer:
        byte_writer.write(b"abc" * 50_000)
    copy = data.fork("a/bytes-fork")
    with copy.byte_writer() as byte_writer:
        byte_writer.write(b"own")
    data.truncate(data.tail())
    reader = copy.byte_reader(149_998)
    assert reader.read(2) == b"bc" and reader.readall() == b"own"


def test_readers_of_a_fork_begin_at_its_head(store: hw.Store, stream: hw.Stream) -> None:
    write(stream, "p", 12)
    fork = stream.fork("a/fork")
    write(fork, "f", 5)
    stream.truncate(stream.tail())
    group = store.reader_group("group", ["a/fork"], end="tail")
    assert group.lag().events == 17 and group.lag().seconds > 0
    with group.reader("reader") as reader:
        assert len(list(reader)) == 17


def test_a_fork_whose_name_is_taken_or_whose_place_is_truncated_is_refused(store: hw.Store, stream: hw.Stream) -> None:
    write(stream, "p", 5)
    beginning = stream.head()
    with pytest.raises(hw.AlreadyExistsError):
        stream.fork("a/parent")
    stream.truncate(stream.tail())
    with pytest.raises(hw.TruncatedError) as caught:
        stream.fork("a/fork", at=beginning)
    assert caught.value.head == stream.head() and store.streams() == ["a/parent"]
    stream.seal()
    store.delete_stream("a/parent")
    with pytest.raises(hw.NotFoundError):
        stream.fork("a/fork")


def test_a_tag_keeps_what_lies_before_it_readable_until_it_is_taken_away(store: hw.Store, stream: hw.Stream) -> None:
    write(stream, "p", 20)
    beginning, middle = stream.head(), stream.tail()
    stream.split(0)
    write(stream, "q", 10)
    cut = stream.tail()
    before = values(stream)
    store.tag("release-1", cut)
    assert store.tags() == {"release-1": cut}
    write(stream, "r", 10)
    stream.truncate(stream.tail())
    assert values(stream) == []
    assert values(stream, end=cut) == before and values(stream, start=beginning, end=cut) == before
    assert values(stream, start=beginning, end=middle) == [value for value in before if value.startswith(b"p")]
    assert stream.to_arrow(end=cut).num_rows == 30 and sum(item.to_arrow().num_rows for item in stream.ranges(end=cut)) == 30
    with pytest.raises(hw.TruncatedError):
        values(stream, start=cut)  # what lies behind the tag was not kept
    store.run_upkeep()
    assert values(stream, end=cut) == before
    store.untag("release-1")
    assert store.tags() == {}
    with pytest.raises(hw.TruncatedError):
        values(stream, start=beginning, end=cut)
    store.run_upkeep()
    assert extents(store) == 0


def test_two_tags_keep_each_its_own(store: hw.Store, stream: hw.Stream) -> None:
    write(stream, "p", 10)
    first = stream.tail()
    store.tag("first", first)
    write(stream, "q", 10)
    store.tag("second", stream.tail())
    second = stream.tail()
    stream.truncate(second)
    store.untag("second")
    assert len(values(stream, end=first)) == 10
    with pytest.raises(hw.TruncatedError):
        values(stream, start=first, end=second)


def test_a_tag_over_several_streams_is_one_cut(store: hw.Store, stream: hw.Stream) -> None:
    other = store.create_stream("b/other")
    write(stream, "p", 5)
    write(other, "o", 7)
    store.tag("both", store.cut("a/parent", other))
    for each in (stream, other):
        each.truncate(each.tail())
        each.seal()
    cut = store.tags()["both"]
    assert len(values(stream, end=cut)) == 5 and len(values(other, end=cut)) == 7
    with pytest.raises(hw.ConflictError, match="both"):
        store.delete_stream("b/other")
    store.untag("both")
    store.delete_stream("b/other")


def test_what_can_not_be_tagged_is_refused(store: hw.Store, stream: hw.Stream) -> None:
    write(stream, "p", 5)
    beginning = stream.head()
    store.tag("taken", stream.tail())
    with pytest.raises(hw.AlreadyExistsError):
        store.tag("taken", stream.tail())
    for name in ("a/b", "", "x" * 129):
        with pytest.raises(hw.InvalidRequestError):
            store.tag(name, stream.tail())
    with pytest.raises(hw.InvalidRequestError):
        store.tag("text", "tail")  # type: ignore[arg-type]
    with pytest.raises(hw.NotFoundError):
        store.untag("missing")
    store.untag("taken")
    stream.truncate(stream.tail())
    with pytest.raises(hw.TruncatedError):
        store.tag("late", beginning)
    assert store.tags() == {}


def test_a_hold_of_a_tags_name_does_not_touch_the_tag(store: hw.Store, stream: hw.Stream) -> None:
    write(stream, "p", 20)
    head, cut = stream.head(), stream.tail()
    store.tag("t", cut)
    engine = store._engine
    kept = engine.database.query("SELECT * FROM pin ORDER BY segment")
    for _ in range(2):
        assert not engine.run(tags.end_hold, "t")
        engine.end_hold("t")
        engine.release_ended()
        store.release("t")
        assert store.tags() == {"t": cut}
        assert engine.database.query("SELECT * FROM pin ORDER BY segment") == kept
        # For the second time there are a tag and a hold of the name, one after the other.
        engine.run(reading.hold_ranges, stream._ref.id, "t", [(0, 0, 10)])
        store.hold("t", head, cut, 3600)
        assert len(engine.database.query("SELECT * FROM pin ORDER BY segment")) == 2 * len(kept)
        assert engine.run(tags.end_hold, "t")
    stream.truncate(cut)
    store.run_upkeep()
    assert len(values(stream, end=cut)) == 20


def test_a_tag_and_a_hold_of_one_name_end_apart(store: hw.Store, stream: hw.Stream) -> None:
    write(stream, "p", 20)
    head, cut = stream.head(), stream.tail()
    store.hold("t", head, cut, 3600)
    store.tag("t", cut)
    store.untag("t")
    stream.truncate(cut)
    store.run_upkeep()
    assert len(values(stream, start=head, end=cut)) == 20
    store.hold("t", cut, cut, -1.0)
    store.run_upkeep()
    with pytest.raises(hw.TruncatedError):
        values(stream, start=head, end=cut)


def test_untagging_a_holds_name_leaves_the_hold(store: hw.Store, stream: hw.Stream) -> None:
    write(stream, "p", 20)
    head, tail = stream.head(), stream.tail()
    store.hold("h", head, tail, 3600)
    assert not store._engine.run(tags.delete_tag, "hold h")
    stream.truncate(tail)
    store.run_upkeep()
    assert len(values(stream, start=head, end=tail)) == 20
    store.release("h")
    with pytest.raises(hw.TruncatedError):
        values(stream, start=head, end=tail)
