"""A store's scopes and streams: names, kinds, labels, schemas, seals, deletions, splits and merges, cuts and truncation."""

from __future__ import annotations

import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headwater as hw
from headwater.model.cuts import StreamCut

LEFT, RIGHT = "k3", "k2"  # keys of the lower and the upper half of the key space


@pytest.fixture
def store(tmp_path: Path, catalog_url: str | None) -> Iterator[hw.Store]:
    with hw.open(tmp_path / "store", catalog=catalog_url) as store:
        yield store


@pytest.fixture
def stream(store: hw.Store) -> hw.Stream:
    return store.create_stream("a/x")


def write(stream: hw.Stream, *values: str, key: str | None = None) -> None:
    with stream.writer() as writer:
        for value in values:
            writer.write(value, key=key)


def values(stream: hw.Stream, start: Any = None, end: Any = None) -> list[str]:
    return [event.value.decode() for event in stream.read(start, end)]


def moment_after(stream: hw.Stream) -> datetime:
    """A time behind all that was appended and before all that will be: the catalog's clock passed it, but no more."""
    now = datetime.now(UTC)
    while datetime.now(UTC) <= now + timedelta(milliseconds=2):
        time.sleep(0.001)
    return now + timedelta(milliseconds=1)


# The store.


def test_scopes_are_made_listed_and_deleted_when_empty(store: hw.Store) -> None:
    store.create_scope("shop")
    with pytest.raises(hw.AlreadyExistsError, match="'shop'"):
        store.create_scope("shop")
    stream = store.create_stream("other/orders")
    assert store.scopes() == ["other", "shop"]
    store.delete_scope("shop")
    with pytest.raises(hw.NotFoundError, match="'shop'"):
        store.delete_scope("shop")
    with pytest.raises(hw.ConflictError, match="orders"):
        store.delete_scope("other")
    stream.seal()
    store.delete_stream("other/orders")
    store.delete_scope("other")
    assert store.scopes() == []


def test_streams_are_listed_in_order_by_scope_and_by_label(store: hw.Store) -> None:
    store.create_stream("b/y", labels=["red"])
    store.create_stream("a/z", labels=("red", "blue", "red"))
    store.create_stream("a/b")
    assert store.streams() == ["a/b", "a/z", "b/y"]
    assert store.streams(scope="a") == ["a/b", "a/z"]
    assert store.streams(label="red") == ["a/z", "b/y"]
    assert store.streams(scope="a", label="red") == ["a/z"]
    assert store.streams(scope="none") == store.streams(label="none") == []
    assert store.stream("a/z").labels == ("blue", "red")


def test_a_store_pickled_and_opened_elsewhere_is_the_same(store: hw.Store, stream: hw.Stream) -> None:
    write(stream, "one")
    program = "import pickle, sys; s = pickle.loads(sys.stdin.buffer.read()); print(s.id, [e.value for e in s.stream('a/x').read()])"
    done = subprocess.run([sys.executable, "-c", program], input=pickle.dumps(store), capture_output=True, check=True, timeout=60)
    assert done.stdout.decode() == f"{store.id} [b'one']\n"


def test_unpickled_twice_in_one_process_a_store_is_opened_once(store: hw.Store) -> None:
    first, second = pickle.loads(pickle.dumps(store)), pickle.loads(pickle.dumps(store))
    assert first is second and first is not store
    first.close()


def test_a_pickled_store_is_not_made_anew_where_it_is_missing(tmp_path: Path) -> None:
    with hw.open(tmp_path / "gone") as store:
        text = pickle.dumps(store)
    (tmp_path / "gone").rename(tmp_path / "moved")
    with pytest.raises(hw.NotFoundError, match="gone"):
        pickle.loads(text)
    assert not (tmp_path / "gone").exists()


def test_a_closed_store_says_so(store: hw.Store, stream: hw.Stream) -> None:
    write(stream, "one")
    reader = iter(stream.read())
    ranges = stream.ranges()
    store.close()
    store.close()
    calls: list[Callable[[], Any]] = [
        store.streams,
        lambda: store.stream("a/x"),
        lambda: store.create_stream("a/y"),
        lambda: store.cut("a/x"),
        stream.writer,
        stream.tail,
        lambda: stream.epoch,
        stream.seal,
        lambda: next(reader),
        lambda: list(stream.read()),
        ranges[0].to_arrow,
    ]
    for call in calls:
        with pytest.raises(hw.InvalidRequestError, match="closed"):
            call()


def test_a_memory_store_lives_as_long_as_its_process(request: pytest.FixtureRequest) -> None:
    name = f"memory://{request.node.name}"
    with pytest.raises(hw.NotFoundError):
        hw.open(name, create=False)
    with hw.open(name) as store:
        write(store.create_stream("a/x"), "one")
    with hw.open(name, create=False) as store:
        assert values(store.stream("a/x")) == ["one"]
        assert store.stream("a/x").split(0)[0].number == 1
        write(store.stream("a/x"), "two", key="k")
        assert values(store.stream("a/x")) == ["one", "two"]


def test_upkeep_in_this_thread_reports_what_it_did(store: hw.Store) -> None:
    report = store.run_upkeep()
    assert isinstance(report, hw.UpkeepReport)


# Creating.


def test_a_new_stream_is_what_was_asked_for(store: hw.Store) -> None:
    stream = store.create_stream("shop/orders", scaling=hw.Scaling.fixed(3), labels=["l"])
    assert (stream.name, stream.scope, stream.kind, stream.epoch, stream.is_sealed) == ("shop/orders", "shop", "events", 0, False)
    assert stream.schema == pa.schema([pa.field("value", pa.binary(), nullable=False)])
    assert stream.scaling == hw.Scaling.fixed(3) and stream.retention == hw.Retention.forever()
    assert [(s.number, s.events, s.bytes, s.epoch) for s in stream.segments()] == [(0, 0, 0, 0), (1, 0, 0, 0), (2, 0, 0, 0)]
    assert [s.start for s in stream.segments()] == pytest.approx([0, 1 / 3, 2 / 3])
    assert [s.end for s in stream.segments()] == pytest.approx([1 / 3, 2 / 3, 1])
    assert store.stream("shop/orders").name == stream.name


def test_a_stream_that_exists_is_not_made_again(store: hw.Store) -> None:
    schema = pa.schema([("n", pa.int64())])
    store.create_stream("a/opaque")
    store.create_stream("a/typed", schema=schema)
    store.create_stream("a/bytes", kind="bytes")
    with pytest.raises(hw.AlreadyExistsError, match="a/opaque exists"):
        store.create_stream("a/opaque")
    assert store.create_stream("a/opaque", exist_ok=True, scaling=hw.Scaling.fixed(4)).segments()[0].end == 1.0
    assert store.create_stream("a/typed", exist_ok=True, schema=schema).schema == schema
    assert store.create_stream("a/bytes", exist_ok=True, kind="bytes").kind == "bytes"
    with pytest.raises(hw.AlreadyExistsError, match=r"stream of bytes, not of events"):
        store.create_stream("a/bytes", exist_ok=True)
    with pytest.raises(hw.AlreadyExistsError, match=r"stream of events, not of bytes"):
        store.create_stream("a/opaque", exist_ok=True, kind="bytes")
    with pytest.raises(hw.AlreadyExistsError) as caught:
        store.create_stream("a/typed", exist_ok=True, schema=pa.schema([("n", pa.string())]))
    assert "n: int64" in str(caught.value) and "n: string" in str(caught.value)
    with pytest.raises(hw.AlreadyExistsError, match="value: binary"):
        store.create_stream("a/opaque", exist_ok=True, schema=schema)


def test_a_stream_that_is_not_there_is_not_found(store: hw.Store) -> None:
    for call in (lambda: store.stream("a/none"), lambda: store.delete_stream("a/none"), lambda: store.cut("a/none")):
        with pytest.raises(hw.NotFoundError, match="a/none"):
            call()


# Changing.


def test_labels_and_policies_can_be_changed(stream: hw.Stream, store: hw.Store) -> None:
    stream.update(labels=["b", "a"], scaling=hw.Scaling.fixed(7), retention=hw.Retention.forever())
    assert stream.labels == ("a", "b") and stream.scaling == hw.Scaling.fixed(7)
    stream.update(labels=())
    assert store.stream("a/x").labels == ()
    assert stream.scaling == hw.Scaling.fixed(7), "what is not given stays"


def test_a_schema_may_grow_and_old_events_are_read_with_it(store: hw.Store) -> None:
    stream = store.create_stream("a/t", schema=pa.schema([pa.field("n", pa.int32(), nullable=False), ("s", pa.string())]))
    early = stream.writer()
    early.write({"n": 1, "s": "a"})
    early.flush()
    other_handle = store.stream("a/t")
    wider = pa.schema([pa.field("n", pa.int64(), nullable=False), ("s", pa.string()), ("more", pa.list_(pa.int64()))])
    stream.update(schema=wider)
    assert stream.schema == other_handle.schema == wider
    early.write({"n": 2, "s": "b"})  # a writer opened before the change goes on with what it knew
    row = {"n": 2, "s": "b", "more": [1]}
    for write in (early.write, lambda row: early.write_batch(pa.Table.from_pylist([row], wider))):
        with pytest.raises(hw.InvalidRequestError, match=r"more.* was changed since this writer was opened: open another one"):
            write(row)
    with pytest.raises(hw.InvalidRequestError) as caught:
        stream.writer().write({"none": 1})
    assert "changed" not in str(caught.value)
    early.close()
    with stream.writer() as late:
        late.write({"n": 1 << 40, "s": None, "more": [1, 2]})
        late.write_batch(pa.RecordBatch.from_pylist([{"n": 4}], schema=pa.schema([("n", pa.int32())])), missing="null")
    expected = [
        {"n": 1, "s": "a", "more": None},
        {"n": 2, "s": "b", "more": None},
        {"n": 1 << 40, "s": None, "more": [1, 2]},
        {"n": 4, "s": None, "more": None},
    ]
    for handle in (stream, other_handle, store.stream("a/t")):
        assert [event.value for event in handle.read()] == expected
        table = handle.to_arrow(columns=["n", "s", "more"])
        assert table.schema == wider and table.to_pylist() == expected
        assert [row for item in handle.ranges() for row in item.to_arrow(["n", "s", "more"]).to_pylist()] == expected


def test_a_schema_that_old_events_do_not_fit_is_refused_with_both(store: hw.Store) -> None:
    stream = store.create_stream("a/t", schema=pa.schema([("n", pa.int64())]))
    with pytest.raises(hw.InvalidRequestError) as caught:
        stream.update(schema=pa.schema([("n", pa.int32())]))
    assert "in use:" in str(caught.value) and "n: int64" in str(caught.value) and "n: int32" in str(caught.value)
    assert stream.schema == pa.schema([("n", pa.int64())])
    with pytest.raises(hw.InvalidRequestError, match="no schema"):
        store.create_stream("a/bytes", kind="bytes").update(schema=pa.schema([("n", pa.int64())]))


# Sealing, deleting, making again.


def test_a_sealed_stream_is_read_for_ever_and_never_written(store: hw.Store, stream: hw.Stream) -> None:
    write(stream, "one")
    writer = stream.writer()
    stream.seal()
    stream.seal()
    assert stream.is_sealed and stream.segments() == []
    assert values(stream) == ["one"] and list(stream.read(follow=True))
    writer.write("two")
    with pytest.raises(hw.SealedError, match="a/x is sealed"):
        writer.flush()
    with pytest.raises(hw.SealedError):
        writer.write("three")
    writer.abandon()
    for call in (stream.writer, lambda: stream.split(0), lambda: stream.merge([0, 1]), lambda: stream.update(scaling=hw.Scaling.fixed(2))):
        with pytest.raises(hw.SealedError):
            call()
    stream.truncate(stream.tail())
    assert values(stream) == []


def test_only_a_sealed_stream_can_be_deleted(store: hw.Store, stream: hw.Stream) -> None:
    write(stream, "one")
    with pytest.raises(hw.ConflictError, match="seal it before"):
        store.delete_stream("a/x")
    assert values(stream) == ["one"]
    stream.seal()
    store.delete_stream("a/x")
    assert store.streams() == []


def test_a_stream_is_sealed_and_deleted_in_one_step_or_left_as_it_was(store: hw.Store, stream: hw.Stream) -> None:
    write(stream, "one")
    store.tag("keep", stream.tail())
    with pytest.raises(hw.ConflictError, match="kept by the tags keep"):
        store.delete_stream("a/x", seal=True)
    write(stream, "two")
    assert values(stream) == ["one", "two"] and not stream.is_sealed
    store.untag("keep")
    store.delete_stream("a/x", seal=True)
    assert store.streams() == []


def test_a_stream_made_again_is_another_one(store: hw.Store, stream: hw.Stream) -> None:
    write(stream, "old one", "old two")
    old_cut, old_ranges, old_writer = stream.tail(), stream.ranges(), stream.writer()
    old_reader = stream.read()
    named = stream.writer("w")
    named.write("old three", number=3)
    named.close()
    stream.seal()
    store.delete_stream("a/x")
    again = store.create_stream("a/x", exist_ok=True)
    write(again, *(f"new {n}" for n in range(10)))
    assert again.id != stream.id and values(again) == [f"new {n}" for n in range(10)]
    with again.writer("w") as named:
        assert named.last_number == 0
    old_handle: list[Callable[[], Any]] = [
        lambda: stream.schema, lambda: stream.epoch, lambda: stream.is_sealed, lambda: stream.labels, stream.segments, stream.head,
        stream.tail, stream.seal, lambda: stream.cut_at(datetime.now(UTC)), lambda: stream.update(labels=["l"]), lambda: stream.split(0),
        lambda: stream.merge([0, 1]), lambda: stream.truncate(old_cut), stream.writer, lambda: stream.writer("w"), stream.to_arrow,
        lambda: list(stream.read()), stream.ranges, lambda: next(stream.read(follow=True)), lambda: list(old_reader),
        old_ranges[0].to_arrow, lambda: store.cut(stream),
    ]  # fmt: skip
    for call in old_handle:
        with pytest.raises(hw.NotFoundError, match="deleted"):
            call()
    old_writer.write("too late")
    with pytest.raises(hw.NotFoundError, match="deleted"):
        old_writer.flush()
    old_writer.abandon()
    for call in (lambda: list(again.read(old_cut)), lambda: again.to_arrow(end=old_cut), lambda: again.truncate(old_cut)):
        with pytest.raises(hw.InvalidRequestError, match="deleted stream"):
            call()
    assert len(values(again)) == 10


# Splitting and merging.


def test_split_and_merge_replace_segments_that_cover_the_same_keys(stream: hw.Stream) -> None:
    write(stream, "before")
    left, right = stream.split(0)
    assert [(left.number, left.start, left.end, left.epoch), (right.number, right.start, right.end)] == [(1, 0, 0.5, 1), (2, 0.5, 1)]
    assert stream.epoch == 1 and stream.segments() == [left, right]
    with stream.writer() as writer:
        assert [writer.write("x", key=key).result(30).segment for key in (LEFT, RIGHT)] == [1, 2]
    thirds = stream.split(2, parts=3)
    assert [s.number for s in thirds] == [3, 4, 5] and thirds[-1].end == 1
    merged = stream.merge([4, 1, 3])
    assert [(s.number, s.start) for s in merged] == [(6, 0)] and merged[0].end == pytest.approx(5 / 6)
    assert [s.number for s in stream.segments()] == [5, 6] and stream.epoch == 3
    assert sorted(values(stream)) == ["before", "x", "x"]


def test_a_segment_that_is_not_open_is_not_found(stream: hw.Stream) -> None:
    stream.split(0)
    stream.split(1)
    for number in (1, 7, 2**40):
        with pytest.raises(hw.NotFoundError, match=f"no open segment {number}"):
            stream.split(number)
        with pytest.raises(hw.NotFoundError, match="no open segment"):
            stream.merge([number, 2])
    assert stream.epoch == 2


def test_what_is_no_segment_number_is_refused(stream: hw.Stream) -> None:
    number: Any
    for number in (-1, True, "0", 0.0, None, 2**70):
        with pytest.raises(hw.InvalidRequestError):
            stream.split(number)
        with pytest.raises(hw.InvalidRequestError):
            stream.merge([number, 0])
    assert stream.epoch == 0


def test_a_split_makes_at_least_two_parts_and_not_too_many(stream: hw.Stream) -> None:
    parts: Any
    for parts in (0, 1, -2, True, 2.0, "2", 10_001, 10**12):
        with pytest.raises(hw.InvalidRequestError, match="parts"):
            stream.split(0, parts=parts)
    assert stream.epoch == 0


def test_only_neighbours_are_merged_and_at_least_two(store: hw.Store) -> None:
    stream = store.create_stream("a/y", scaling=hw.Scaling.fixed(4))
    with pytest.raises(hw.InvalidRequestError, match="not neighbours"):
        stream.merge([0, 2])
    numbers: Any
    for numbers in ([], [1], [1, 1], 5, "01", None):
        with pytest.raises(hw.InvalidRequestError, match="two or more"):
            stream.merge(numbers)
    assert stream.epoch == 0 and len(stream.segments()) == 4
    assert [s.number for s in stream.merge([2, 1, 2])] == [4]


def test_segments_count_what_is_readable_in_them(stream: hw.Stream) -> None:
    write(stream, *"abcde")
    cut = hw.Cut(stream.tail().store, {"a/x": StreamCut(stream.id, {0: 3})})
    before = stream.segments()[0]
    stream.truncate(cut)
    after = stream.segments()[0]
    assert (before.events, after.events) == (5, 2) and before.bytes > 0


# Cuts.


def test_a_cut_s_text_is_canonical_and_read_back(store: hw.Store, stream: hw.Stream) -> None:
    write(stream, "one")
    other = store.create_stream("b/y", scaling=hw.Scaling.fixed(2))
    cut = store.cut("b/y", "a/x")
    assert str(cut) == (
        f'{{"store":"{store.id}","streams":{{"a/x":{{"id":{stream.id},"segments":{{"0":1}}}},'
        f'"b/y":{{"id":{other.id},"segments":{{"0":0,"1":0}}}}}}}}'
    )
    assert hw.Cut.parse(str(cut)) == cut == pickle.loads(pickle.dumps(cut)) == store.cut(stream, other)
    write(stream, "two")
    assert values(stream, cut) == ["two"] and values(stream, None, cut) == ["one"]
    with pytest.raises(hw.InvalidRequestError, match="one or more"):
        store.cut()


def test_head_and_tail_are_the_ends(stream: hw.Stream) -> None:
    assert stream.head() == stream.tail()
    write(stream, "one", "two")
    assert dict(stream.head().streams["a/x"].segments) == {0: 0}
    assert dict(stream.tail().streams["a/x"].segments) == {0: 2}
    stream.split(0)
    assert dict(stream.head().streams["a/x"].segments) == {0: 0}
    assert dict(stream.tail().streams["a/x"].segments) == {1: 0, 2: 0}


def test_cuts_that_are_not_of_this_stream_are_refused(store: hw.Store, stream: hw.Stream, tmp_path: Path) -> None:
    write(stream, "one")
    stream.split(0)
    store.create_stream("a/y")
    with hw.open(tmp_path / "other") as other:
        foreign = other.create_stream("a/x").tail()

    def cut(numbers: dict[int, int], id: int = stream.id, name: str = "a/x") -> hw.Cut:
        return hw.Cut(store.id, {name: StreamCut(id, numbers)})

    wrong: list[tuple[Any, str]] = [
        (foreign, "another store"),
        (store.cut("a/y"), "of a/y, not of a/x"),
        (hw.Cut(store.id, {}), "no stream"),
        (cut({0: 0}, id=999), "deleted stream"),
        (cut({0: 2}), "past the tail"),
        (cut({1: 0, 2: 1}), "past the tail"),
        (cut({1: 0, 7: 0}), "no segment 7"),
        (cut({1: 0}), "does not cover the keys"),
        (cut({}), "does not cover the keys"),
        (cut({0: 0, 1: 0}), "does not cover the keys"),
    ]
    for given, said in wrong:
        for call in (stream.truncate, stream.read, stream.to_arrow, stream.ranges):
            with pytest.raises(hw.InvalidRequestError, match=said):
                list(call(given) or ())
        with pytest.raises(hw.InvalidRequestError, match=said):
            list(stream.read(end=given))
    other_things: tuple[Any, ...] = ("start", 0, b"head", datetime(2024, 1, 1), stream.tail().streams["a/x"], str(stream.tail()))
    for given in other_things:
        with pytest.raises(hw.InvalidRequestError):
            stream.ranges(given)
    assert values(stream) == ["one"]


def test_a_cut_whose_segments_overlap_is_refused_also_if_their_widths_add_up(store: hw.Store) -> None:
    stream = store.create_stream("a/y", scaling=hw.Scaling.fixed(2))
    stream.split(0)
    with pytest.raises(hw.InvalidRequestError, match="does not cover the keys"):
        stream.ranges(hw.Cut(store.id, {"a/y": StreamCut(stream.id, {0: 0, 2: 0, 3: 0})}))


def test_a_cut_at_a_time_parts_what_was_appended_before_it_from_the_rest(stream: hw.Stream) -> None:
    """Across a split and a merge, and with times before the first and behind the last event."""
    steps: list[Callable[[], Any]] = [lambda: None, lambda: stream.split(0), lambda: stream.merge([1, 2]), lambda: stream.split(3, 3)]
    whole: list[str] = []
    times = [(moment_after(stream), 0)]
    for number, step in enumerate(steps):
        step()
        times.append((moment_after(stream), len(whole)))
        for key in (LEFT, RIGHT):
            write(stream, f"{number}{key}", key=key)
            whole.append(f"{number}{key}")
        times.append((moment_after(stream), len(whole)))
    for at, count in times:
        cut = stream.cut_at(at)
        assert sorted(values(stream, None, cut)) == sorted(whole[:count])
        assert sorted(values(stream, cut)) == sorted(whole[count:])
        assert sorted(values(stream, at)) == sorted(whole[count:])
        assert sorted(values(stream, None, at)) == sorted(whole[:count])
        assert sorted(stream.to_arrow(end=at)["value"].to_pylist()) == sorted(value.encode() for value in whole[:count])
    assert stream.cut_at(datetime(1980, 1, 1, tzinfo=UTC)) == stream.head()
    assert stream.cut_at(datetime(2200, 1, 1, tzinfo=UTC)) == stream.tail()


def test_a_time_without_a_zone_is_refused(stream: hw.Stream) -> None:
    wrong: Any
    for wrong in (datetime(2024, 1, 1), "2024-01-01", 0, None, datetime(2024, 1, 1, tzinfo=UTC).timetz(), datetime(2024, 1, 1).date()):
        with pytest.raises(hw.InvalidRequestError, match="datetime with a zone"):
            stream.cut_at(wrong)


# Truncation.


def test_what_lies_before_a_cut_is_gone_for_good(store: hw.Store, stream: hw.Stream) -> None:
    write(stream, *"abc")
    middle = hw.Cut(store.id, {"a/x": StreamCut(stream.id, {0: 2})})
    begin, ranges = stream.head(), stream.ranges()
    stream.truncate(middle)
    assert values(stream) == ["c"] and stream.head() == middle
    for call in (
        lambda: list(stream.read(begin)),
        lambda: stream.to_arrow(begin),
        ranges[0].to_arrow,
        lambda: next(stream.read(begin, follow=True)),
    ):
        with pytest.raises(hw.TruncatedError) as caught:
            call()
        assert caught.value.head is not None and values(stream, caught.value.head) == ["c"]
    stream.truncate(begin)
    assert values(stream) == ["c"], "a cut before the head changes nothing"
    stream.truncate(stream.tail())
    assert values(stream) == [] and stream.segments()[0].events == 0
    write(stream, "d")
    assert [event.position for event in stream.read()] == [(0, 3)], "numbers go on"


def test_truncation_drops_whole_segments_and_keeps_their_successors(store: hw.Store, stream: hw.Stream) -> None:
    write(stream, "before")
    old = stream.tail()
    stream.split(0)
    write(stream, "left", key=LEFT)
    write(stream, "right", key=RIGHT)
    stream.truncate(hw.Cut(store.id, {"a/x": StreamCut(stream.id, {1: 0, 2: 1})}))
    assert values(stream) == ["left"]
    with pytest.raises(hw.TruncatedError) as caught:
        list(stream.read(old))
    assert caught.value.head == stream.head()
    stream.truncate(old)
    assert values(stream) == ["left"]


def test_of_a_cut_that_lies_partly_before_the_head_the_rest_counts(store: hw.Store) -> None:
    stream = store.create_stream("a/y", scaling=hw.Scaling.fixed(2))
    write(stream, "left", key=LEFT)
    write(stream, "right", key=RIGHT)
    old = stream.tail()
    stream.split(0)
    stream.truncate(hw.Cut(store.id, {"a/y": StreamCut(stream.id, {1: 0, 2: 0, 3: 0})}))
    assert values(stream) == ["right"]
    stream.truncate(old)
    assert values(stream) == []


def test_a_truncated_stream_frees_its_rows(store: hw.Store, stream: hw.Stream) -> None:
    for n in range(5):
        write(stream, f"{n}")
    stream.split(0)
    write(stream, "5", key=LEFT)
    stream.truncate(stream.tail())
    for table in ("extent", "inline_block", "dead_log"):
        assert store._engine.database.query(f"SELECT count(*) FROM {table}") == [(0,)]
