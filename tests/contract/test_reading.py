"""Reading: whole streams and parts of them, as events and as Arrow, here and in other processes, at the tail and while all else changes."""

from __future__ import annotations

import operator
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headwater as hw
from headwater.model.cuts import StreamCut

WAIT_SECONDS = 60.0
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


def scaled_stream(store: hw.Store) -> tuple[hw.Stream, list[hw.Cut]]:
    """A stream with 3 keys, 12 rounds of events, splits and merges between them; and its tail after each round."""
    stream = store.create_stream("a/scaled", scaling=hw.Scaling.fixed(2))
    steps: dict[int, Callable[[], Any]] = {
        2: lambda: stream.split(0),
        4: lambda: stream.split(1),
        6: lambda: stream.merge([2, 3]),
        8: lambda: stream.merge([s.number for s in stream.segments()]),
        10: lambda: stream.split(stream.segments()[0].number, 3),
    }
    cuts = [stream.tail()]
    with stream.writer() as writer:
        for round in range(12):
            steps.get(round, lambda: None)()
            for key in ("a", "b", "c"):
                writer.write(f"{round}", key=key)
            writer.flush()
            cuts.append(stream.tail())
    return stream, cuts


def by_key(events: Any) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    for event in events:
        found[event.key.decode()].append(int(event.value))
    return found


# Places.


def test_a_read_goes_from_the_head_to_the_tail_as_of_now(stream: hw.Stream) -> None:
    assert values(stream) == []
    write(stream, *"abc")
    reader = stream.read()
    write(stream, *"de")
    assert [event.value for event in reader] == [b"a", b"b", b"c"]
    assert values(stream) == values(stream, "head") == values(stream, "head", "tail") == list("abcde")
    assert values(stream, "tail") == values(stream, "tail", "head") == values(stream, "head", "head") == []


def test_between_any_two_cuts_lies_what_was_written_between_them(store: hw.Store) -> None:
    stream, cuts = scaled_stream(store)
    for first in range(0, 13, 2):
        for last in range(0, 13, 3):
            expected = list(range(first, last))
            assert by_key(stream.read(cuts[first], cuts[last])) == dict.fromkeys("abc", expected)
            assert sum(item.count for item in stream.ranges(cuts[first], cuts[last])) == 3 * len(expected)
            assert stream.to_arrow(cuts[first], cuts[last]).num_rows == 3 * len(expected)


def test_order_holds_for_each_key_across_splits_and_merges(store: hw.Store) -> None:
    stream, _ = scaled_stream(store)
    read = list(stream.read())
    assert by_key(read) == {key: list(range(12)) for key in "abc"}
    numbers: dict[int, list[int]] = {}
    for event in read:
        numbers.setdefault(event.position.segment, []).append(event.position.number)
    assert all(found == list(range(len(found))) for found in numbers.values()), "gapless in each segment"


def test_a_cut_over_many_streams_is_consistent(store: hw.Store) -> None:
    """One stream is always written before the other: no cut may show it the other way round."""
    left, right = store.create_stream("a/left"), store.create_stream("a/right")
    done = threading.Event()

    def look() -> int:
        looks = 0
        while not done.is_set():
            cut = store.cut("a/left", "a/right")
            counts = [cut.streams[name].segments[0] for name in ("a/left", "a/right")]
            assert 0 <= counts[0] - counts[1] <= 1
            looks += 1
        return looks

    with ThreadPoolExecutor(1) as pool, left.writer() as one, right.writer() as two:
        looks = pool.submit(look)
        try:
            for _ in range(100):
                one.write("x").result(WAIT_SECONDS)
                two.write("x").result(WAIT_SECONDS)
        finally:
            done.set()
        assert looks.result(WAIT_SECONDS) > 1


# Events.


def test_an_event_has_a_value_a_key_a_time_and_a_position(stream: hw.Stream) -> None:
    with stream.writer() as writer:
        writer.write("x", key="k", time=datetime(2024, 1, 1, tzinfo=UTC))
        writer.write("y")
    first, second = stream.read()
    assert (first.value, first.key, first.time, first.position) == (b"x", b"k", datetime(2024, 1, 1, tzinfo=UTC), hw.Position(0, 0))
    assert tuple(first) == (b"x", b"k", datetime(2024, 1, 1, tzinfo=UTC), (0, 0))
    assert second.key is None and second.position == hw.Position(segment=0, number=1)
    assert "value=b'x'" in repr(first)
    again = next(stream.read())
    assert first == again and not operator.ne(first, again) and hash(first) == hash(again)
    assert first != second and not operator.eq(first, second) and first != tuple(first)
    assert pickle.loads(pickle.dumps(first)) == first
    assert hw.Event(b"x", b"k", datetime(2024, 1, 1, tzinfo=UTC), hw.Position(0, 0)) == first


def test_an_event_s_time_and_position_are_made_when_asked_for(stream: hw.Stream) -> None:
    write(stream, *"abcdef")
    events = list(stream.read())
    sources = {id(tuple.__getitem__(event, 2)) for event in events}
    assert len(sources) == 1, "all events of a block share what knows their times and positions"
    assert [event.position.number for event in reversed(events)] == [5, 4, 3, 2, 1, 0]


# Arrow.


def test_to_arrow_gives_the_schema_s_columns_with_those_of_headwater(store: hw.Store) -> None:
    stream = store.create_stream("a/t", schema=pa.schema([("n", pa.int64()), ("s", pa.string())]), scaling=hw.Scaling.fixed(2))
    with stream.writer() as writer:
        for number in range(10):
            writer.write({"n": number, "s": "x"}, key=number)
    table = stream.to_arrow()
    assert table.schema.names == ["n", "s", "_key", "_time", "_segment", "_number"]
    assert table.schema.field("_time").type == pa.timestamp("us", "UTC") and table.schema.field("_key").type == pa.binary()
    assert {(row["_segment"], row["_number"]): row["n"] for row in table.to_pylist()} == {e.position: e.value["n"] for e in stream.read()}
    assert [row["_key"] for row in table.to_pylist()] == [b"%d" % n for n in table["n"].to_pylist()]


def test_columns_are_chosen_by_name_and_come_in_that_order(store: hw.Store, stream: hw.Stream) -> None:
    write(stream, "x", key="k")
    table = stream.to_arrow(columns=["_stream", "_appended", "_number", "value"])
    assert table.schema.names == ["_stream", "_appended", "_number", "value"]
    row = table.to_pylist()[0]
    assert (row["_stream"], row["_number"], row["value"]) == ("a/x", 0, b"x") and row["_appended"] == next(stream.read()).time
    assert next(stream.ranges()[0].to_batches(columns=["_key"])).to_pydict() == {"_key": [b"k"]}
    wrong: Any
    for wrong in (["nope"], ["value", "_nope"], "value"):
        with pytest.raises(hw.InvalidRequestError, match="column"):
            stream.to_arrow(columns=wrong)
        with pytest.raises(hw.InvalidRequestError, match="column"):
            stream.ranges()[0].to_batches(columns=wrong)


def test_an_empty_stream_is_an_empty_table(stream: hw.Stream) -> None:
    table = stream.to_arrow()
    assert table.num_rows == 0 and table.schema.names == ["value", "_key", "_time", "_segment", "_number"]
    assert stream.ranges() == []


# Ranges.


def test_ranges_cover_everything_once(store: hw.Store) -> None:
    stream, cuts = scaled_stream(store)
    for start, end in ((None, None), (cuts[3], cuts[9]), (cuts[5], None)):
        rows = [row for item in stream.ranges(start, end) for batch in item.to_batches() for row in batch.to_pylist()]
        found = sorted((row["_segment"], row["_number"], row["value"]) for row in rows)
        assert found == sorted((*event.position, event.value) for event in stream.read(start, end))
    ranges = stream.ranges()
    assert all(item.stream == "a/scaled" and item.start < item.end and item.count == item.end - item.start for item in ranges)
    assert len(ranges) == len({item.segment for item in ranges})


READ_RANGE = """
import pickle, sys
for item in pickle.loads(sys.stdin.buffer.read()):
    print(sorted(int(value) for value in item.to_arrow(["value"])["value"].to_pylist()))
"""


@pytest.mark.slow
def test_ranges_are_read_in_another_process(store: hw.Store) -> None:
    stream, cuts = scaled_stream(store)
    ranges = stream.ranges(cuts[1], cuts[11])
    done = subprocess.run(
        [sys.executable, "-c", READ_RANGE], input=pickle.dumps(ranges), capture_output=True, check=True, timeout=WAIT_SECONDS
    )
    here = [sorted(int(value) for value in item.to_arrow(["value"])["value"].to_pylist()) for item in ranges]
    assert done.stdout.decode().splitlines() == [str(found) for found in here]
    assert sorted(number for found in here for number in found) == sorted(list(range(1, 11)) * 3)


def test_a_range_is_read_with_as_little_ahead_as_asked_for(stream: hw.Stream) -> None:
    write(stream, *"abc")
    (item,) = stream.ranges()
    for prefetch_bytes in (1, 1 << 30):
        found = [
            value.decode() for batch in item.to_batches(["value"], prefetch_bytes=prefetch_bytes) for value in batch.column(0).to_pylist()
        ]
        assert found == list("abc")
    for wrong in (0, -1, True, 1.5, None):
        with pytest.raises(hw.InvalidRequestError, match="prefetch_bytes"):
            item.to_batches(prefetch_bytes=wrong)  # type: ignore[arg-type]


def test_a_time_is_no_tagged_cut_though_it_means_the_same_place(store: hw.Store, stream: hw.Stream) -> None:
    write(stream, "0", "1")
    store.tag("backup", stream.tail())
    stream.truncate(stream.tail())
    assert values(stream, end=store.tags()["backup"]) == ["0", "1"]
    assert values(stream, end=datetime.now(UTC)) == values(stream) == []


@pytest.mark.parametrize("columns", [[], [1], [None], "value", ["missing"]])
def test_columns_that_are_none_are_refused(stream: hw.Stream, columns: Any) -> None:
    write(stream, "0")
    for read in (stream.to_arrow, stream.ranges()[0].to_arrow, stream.ranges()[0].to_batches):
        with pytest.raises(hw.InvalidRequestError, match="column"):
            read(columns=columns)


def test_a_range_that_was_truncated_says_where_to_go_on(store: hw.Store, stream: hw.Stream) -> None:
    write(stream, *"abcdef")
    item = stream.ranges()[0]
    stream.truncate(hw.Cut(store.id, {"a/x": StreamCut(stream.id, {0: 3})}))
    with pytest.raises(hw.TruncatedError) as caught:
        item.to_arrow()
    assert values(stream, caught.value.head) == list("def")
    stream.split(0)
    stream.truncate(stream.tail())
    with pytest.raises(hw.TruncatedError) as caught:
        item.to_arrow()
    assert caught.value.head == stream.head()


def test_a_read_that_is_overtaken_by_truncation_says_where_to_go_on(store: hw.Store) -> None:
    for count in (1, 3):
        stream = store.create_stream(f"a/{count}", scaling=hw.Scaling.fixed(count))
        with stream.writer() as writer:
            for number in range(20):
                writer.write(f"{number}", key=number)
        reader = stream.read()
        stream.truncate(stream.tail())
        with stream.writer() as writer:
            writer.write("later", key="k")
        with pytest.raises(hw.TruncatedError) as caught:
            list(reader)
        assert caught.value.head is not None and values(stream, caught.value.head) == ["later"]


# Following.


class Follower:
    """Follows a stream in a thread. `take` waits for the next events."""

    def __init__(self, stream: hw.Stream, start: Any = None) -> None:
        self.seen: list[hw.Event] = []
        self.error: BaseException | None = None
        self._more = threading.Condition()
        self._taken = 0
        self._ended = False
        self._thread = threading.Thread(target=self._run, args=(stream, start), daemon=True)
        self._thread.start()

    def _run(self, stream: hw.Stream, start: Any) -> None:
        try:
            for event in stream.read(start, follow=True):
                with self._more:
                    self.seen.append(event)
                    self._more.notify_all()
        except BaseException as error:
            self.error = error
        with self._more:
            self._ended = True
            self._more.notify_all()

    def take(self, count: int) -> list[str]:
        with self._more:
            assert self._more.wait_for(lambda: self._ended or len(self.seen) >= self._taken + count, WAIT_SECONDS)
            found = [event.value.decode() for event in self.seen[self._taken : self._taken + count]]
            self._taken += count
        return found

    def join(self) -> None:
        self._thread.join(WAIT_SECONDS)
        assert not self._thread.is_alive()


def test_a_follower_sees_what_is_written_until_the_stream_is_sealed(stream: hw.Stream) -> None:
    write(stream, "old")
    follower, late = Follower(stream), Follower(stream, stream.tail())
    assert follower.take(1) == ["old"]
    write(stream, "one", "two")
    assert follower.take(2) == ["one", "two"]
    stream.split(0)
    write(stream, "left", key=LEFT)
    write(stream, "right", key=RIGHT)
    assert sorted(follower.take(2)) == ["left", "right"]
    stream.merge([1, 2])
    write(stream, "merged", key=LEFT)
    assert follower.take(1) == ["merged"]
    assert sorted(late.take(5)) == ["left", "merged", "one", "right", "two"]
    stream.truncate(stream.tail())
    write(stream, "after", key=RIGHT)
    assert follower.take(1) == late.take(1) == ["after"]
    stream.seal()
    follower.join()
    late.join()
    assert follower.error is None and late.error is None
    assert len(follower.seen) == 7 and len(late.seen) == 6


def test_a_follower_keeps_the_order_of_each_key_while_the_stream_scales(store: hw.Store) -> None:
    stream = store.create_stream("a/x")
    follower = Follower(stream)
    with stream.writer() as writer:
        for round in range(30):
            for key in ("a", "b", "c"):
                writer.write(f"{round}", key=key)
            opened = sorted(stream.segments(), key=lambda segment: segment.start)
            if round % 4 == 3:
                stream.merge([opened[0].number, opened[1].number])
            elif round % 2:
                stream.split(opened[round % len(opened)].number)
    stream.seal()
    follower.join()
    assert follower.error is None
    assert by_key(follower.seen) == {key: list(range(30)) for key in "abc"}


def test_a_follower_with_many_segments_misses_nothing(store: hw.Store) -> None:
    stream = store.create_stream("a/x", scaling=hw.Scaling.fixed(9))
    follower = Follower(stream)
    with stream.writer() as writer:
        for number in range(100):
            writer.write(f"{number}", key=number)
            if number % 10 == 0:
                writer.flush()
    assert sorted(map(int, follower.take(100))) == list(range(100))
    stream.seal()
    follower.join()


def test_a_follower_that_was_overtaken_by_truncation_is_told_where_to_go_on(store: hw.Store) -> None:
    """In the segment it reads, in one that is gone, and in one that came and went before it looked: never a silent gap."""

    def overtake(name: str, *steps: Callable[[hw.Stream], Any]) -> None:
        stream = store.create_stream(f"a/{name}")
        write(stream, "seen")
        reader = stream.read(follow=True)
        assert next(reader).value == b"seen"
        for step in steps:
            step(stream)
        write(stream, "rest", key=LEFT)
        with pytest.raises(hw.TruncatedError) as caught:
            next(reader)
        assert caught.value.head is not None and values(stream, caught.value.head) == ["rest"]

    def lose(stream: hw.Stream) -> None:
        write(stream, "lost", key=LEFT)

    def split(stream: hw.Stream) -> None:
        stream.split(stream.segments()[0].number)

    def merge(stream: hw.Stream) -> None:
        stream.merge([segment.number for segment in stream.segments()])

    def truncate(stream: hw.Stream) -> None:
        stream.truncate(stream.tail())

    overtake("same", lose, truncate)
    overtake("dropped", lose, split, truncate)
    overtake("unseen", split, lose, merge, truncate)


def test_a_follower_goes_on_when_just_what_it_has_read_is_truncated(stream: hw.Stream) -> None:
    write(stream, "0", "1", "2")
    stream.split(0)
    cut = stream.tail()
    write(stream, "3", "4", key=LEFT)
    follower = stream.read(follow=True)
    assert [next(follower).value for _ in range(3)] == [b"0", b"1", b"2"]
    stream.truncate(cut)
    assert [next(follower).value for _ in range(2)] == [b"3", b"4"]


def test_a_follower_at_a_sealed_segment_that_was_truncated_to_its_end_does_not_wait_for_ever(stream: hw.Stream) -> None:
    write(stream, "seen")
    reader = stream.read(follow=True)
    next(reader)
    write(stream, "lost")
    cut = stream.tail()
    stream.split(0)
    stream.truncate(cut)
    with pytest.raises(hw.TruncatedError):
        next(reader)


def test_a_follower_sees_the_new_columns_once_the_schema_was_changed(store: hw.Store) -> None:
    stream = store.create_stream("a/t", schema=pa.schema([("n", pa.int32())]))
    with stream.writer() as writer:
        writer.write({"n": 1})
    reader = stream.read(follow=True)
    assert next(reader).value == {"n": 1}
    stream.update(schema=pa.schema([("n", pa.int64()), ("s", pa.string())]))
    with stream.writer() as writer:
        writer.write({"n": 1 << 40, "s": "new"})
    assert next(reader).value == {"n": 1 << 40, "s": "new"}


def test_a_follower_of_a_deleted_stream_ends_with_an_error(store: hw.Store, stream: hw.Stream) -> None:
    write(stream, "one")
    reader = stream.read(follow=True)
    next(reader)
    stream.seal()
    store.delete_stream("a/x")
    with pytest.raises(hw.NotFoundError, match="deleted"):
        next(reader)


def test_a_follower_has_no_end(stream: hw.Stream) -> None:
    with pytest.raises(hw.InvalidRequestError, match="a follower has no end"):
        stream.read(end="tail", follow=True)


WRITE_LATER = """
import sys, headwater as hw
with hw.open(sys.argv[1], catalog=sys.argv[2] or None) as store, store.stream("a/x").writer() as writer:
    for line in sys.stdin:
        writer.write(line.strip()).result(60)
        print("ok", flush=True)
"""


@pytest.mark.slow
def test_a_follower_sees_what_another_process_writes(stream: hw.Stream, tmp_path: Path, catalog_url: str | None) -> None:
    follower = Follower(stream)
    command = [sys.executable, "-c", WRITE_LATER, str(tmp_path / "store"), catalog_url or ""]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for number in range(5):
            process.stdin.write(f"{number}\n")
            assert process.stdout.readline() == "ok\n"
            assert follower.take(1) == [f"{number}"]
        process.stdin.close()
    stream.seal()
    follower.join()


def test_many_blocks_are_read_in_order(stream: hw.Stream) -> None:
    """More than one plan's worth of extents, inline and in the journal, mixed."""
    with stream.writer() as writer:
        for number in range(300):
            writer.write(b"%d:" % number + bytes(70_000 if number % 50 == 0 else 1))
            writer.flush()
    numbers = [int(event.value.partition(b":")[0]) for event in stream.read()]
    assert numbers == list(range(300))
    assert all(a < b for a, b in pairwise(event.position.number for event in islice(stream.read(), 290)))


def test_nanoseconds_are_kept_in_arrow_and_are_microseconds_in_python(store: hw.Store) -> None:
    ns = pa.timestamp("ns", tz="UTC")
    nested = [("all", pa.list_(ns)), ("one", pa.list_(ns, 1)), ("by", pa.map_(pa.int64(), ns))]
    schema = pa.schema([("at", ns), ("took", pa.duration("ns")), *nested])
    stream = store.create_stream("a/nanoseconds", schema=schema)
    columns = [pa.array([value], kind) for value, kind in zip((1_001, 1_001, [1_001], [1_001], [(7, 1_001)]), schema.types, strict=True)]
    with stream.writer() as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
    assert stream.to_arrow(columns=["at", "took"]).column("at").cast(pa.int64()).to_pylist() == [1_001]
    at = datetime(1970, 1, 1, 0, 0, 0, 1, tzinfo=UTC)
    read = {"at": at, "took": timedelta(microseconds=1), "all": [at], "one": [at], "by": [(7, at)]}
    # By their text, since a time of pandas would be equal.
    assert repr(next(stream.read()).value).replace("zoneinfo.ZoneInfo(key='UTC')", "datetime.timezone.utc") == repr(read)


@pytest.mark.parametrize("time_us", [-(1 << 62), 1 << 62])
def test_an_event_time_that_no_datetime_can_have_is_refused(store: hw.Store, time_us: int) -> None:
    stream = store.create_stream("a/times")
    times = pa.array([time_us], pa.timestamp("us", tz="UTC"))
    with stream.writer() as writer, pytest.raises(hw.InvalidRequestError, match="1 to 9999"):
        writer.write_batch(pa.table({"value": [b"x"], "_time": times}))
    assert list(stream.read()) == []


def test_schemas_that_differ_in_their_metadata_only_are_not_mixed_up(store: hw.Store) -> None:
    for unit in ("s", "ms"):
        field = pa.field("x", pa.int64(), metadata={"unit": unit})
        stream = store.create_stream(f"r/{unit}", schema=pa.schema([field]))
        with stream.writer() as writer:
            writer.write({"x": 1})
        (batch,) = [batch for item in stream.ranges() for batch in item.to_batches()]
        assert batch.schema.field("x").metadata == stream.to_arrow().schema.field("x").metadata == {b"unit": unit.encode()}
