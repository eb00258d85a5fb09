"""Writing: keys, times, acks, and closing."""

from __future__ import annotations

import gc
import subprocess
import sys
import warnings
from datetime import UTC, date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headwater as hw
from headwater.model.limits import KEY_BYTES
from tests.contract.writing import WAIT_SECONDS, batch, blocked, values

# Values, keys, times.


def test_values_are_bytes_or_text(store: hw.Store) -> None:
    stream = store.create_stream("a/x")
    given: list[Any] = [b"bytes", "täxt", b"", "", bytearray(b"array"), memoryview(b"view"), bytes(range(256))]
    with stream.writer() as writer:
        for value in given:
            writer.write(value)
    assert values(stream) == [b"bytes", "täxt".encode(), b"", b"", b"array", b"view", bytes(range(256))]


def test_one_key_by_every_way_of_giving_it_lands_in_one_segment(wide: hw.Stream) -> None:
    texts = [str(number) for number in range(-5, 30)]
    with wide.writer() as writer:
        places = {text: writer.write("w", key=text).result(WAIT_SECONDS).segment for text in texts}
        for text in texts:
            for key in (text.encode(), int(text)):
                assert writer.write("w", key=key).result(WAIT_SECONDS).segment == places[text]
        numbers = [int(text) for text in texts]
        columns = [
            pa.array(texts), pa.array(texts, pa.large_string()), pa.array(texts, pa.string_view()), pa.array(texts).dictionary_encode(),
            pa.array(numbers), pa.array(numbers, pa.int8()),
            pa.array([text.encode() for text in texts]), pa.array([text.encode() for text in texts], pa.large_binary()),
        ]  # fmt: skip
        for column in columns:
            table = pa.table({"value": pa.array([b"b"] * len(texts)), "id": column})
            found = writer.write_batch(table, key="id").result(WAIT_SECONDS)
            assert sum(item.count for item in found) == len(texts)
    assert len(set(places.values())) == 4
    read = list(wide.read())
    assert {event.key for event in read} == {text.encode() for text in texts}
    assert all(event.position.segment == places[event.key.decode()] for event in read)
    assert len(read) == len(texts) * (3 + len(columns))


def test_events_without_a_key_go_anywhere_and_say_so(wide: hw.Stream) -> None:
    with wide.writer() as writer:
        writer.write("none")
        writer.write("empty", key="")
        writer.write_batch(pa.table({"value": [b"null", b"key"], "id": [None, "k"]}), key="id")
        writer.write_batch(batch(b"keyless"))
    assert {event.value: event.key for event in wide.read()} == {
        b"none": None,
        b"empty": b"",
        b"null": None,
        b"key": b"k",
        b"keyless": None,
    }


@pytest.mark.parametrize(
    "key", [True, 1.5, [], object(), "\ud800", b"k" * (KEY_BYTES + 1)], ids=["bool", "float", "list", "object", "half", "long"]
)
def test_other_keys_are_refused_and_nothing_is_stored(local_store: hw.Store, key: Any) -> None:
    stream = local_store.create_stream("a/x")
    with stream.writer() as writer:
        with pytest.raises(hw.InvalidRequestError):
            writer.write("x", key=key)
        writer.write("y", key="k" * KEY_BYTES)
    assert values(stream) == [b"y"]


def test_event_time_is_what_was_given_else_when_it_was_appended(store: hw.Store) -> None:
    stream = store.create_stream("a/x")
    before = datetime.now(UTC)
    berlin = timezone(timedelta(hours=2))
    with stream.writer() as writer:
        writer.write("given", time=datetime(2020, 1, 1, 12, 0, 0, 123456, tzinfo=berlin))
        writer.write("not given")
        times = pa.array([datetime(1960, 1, 1, tzinfo=UTC), None], pa.timestamp("ms", "Europe/Berlin"))
        writer.write_batch(pa.table({"value": [b"batch", b"null"], "_time": times}))
        writer.write_batch(batch(b"no column"))
    found = {event.value.decode(): event.time for event in stream.read()}
    assert found["given"] == datetime(2020, 1, 1, 10, 0, 0, 123456, tzinfo=UTC)
    assert found["batch"] == datetime(1960, 1, 1, tzinfo=UTC)
    now = datetime.now(UTC)
    slack = timedelta(seconds=1)  # the catalog's clock is not ours
    for name in ("not given", "null", "no column"):
        assert before - slack <= found[name] <= now + slack
    assert all(value.tzinfo is not None for value in found.values())
    assert stream.to_arrow()["_time"].to_pylist() == list(found.values())


@pytest.mark.parametrize(
    "when", [datetime(2020, 1, 1), "2020-01-01", 0, date(2020, 1, 1), datetime(2020, 1, 1, tzinfo=UTC).timetz()], ids=repr
)
def test_a_time_that_is_no_moment_is_refused_and_does_no_harm(local_store: hw.Store, when: Any) -> None:
    stream = local_store.create_stream("a/x")
    with stream.writer() as writer, stream.writer() as neighbour:
        neighbour.write("before")
        with pytest.raises(hw.InvalidRequestError, match="datetime with a zone"):
            writer.write("x", time=when)
        neighbour.write("after")
    assert values(stream) == [b"before", b"after"]


@pytest.mark.parametrize(("when", "hours"), [(datetime.min, 5), (datetime.max, -5)], ids=["first", "last"])
def test_a_time_that_no_reader_could_get_is_refused(local_store: hw.Store, when: datetime, hours: int) -> None:
    stream = local_store.create_stream("a/x")
    beyond, within = (when.replace(tzinfo=timezone(timedelta(hours=offset))) for offset in (hours, -hours))
    with stream.writer() as writer, local_store.transaction() as tx:
        for give in (writer.write, lambda value, time: tx.write("a/x", value, time=time)):
            with pytest.raises(hw.InvalidRequestError, match="years 1 to 9999"):
                give(b"x", time=beyond)
            give(b"x", time=within)
        with pytest.raises(hw.InvalidRequestError, match="years 1 to 9999"):
            writer.note_time(beyond)
    assert [event.time for event in stream.read()] == [within] * 2


@pytest.mark.parametrize("kind", [pa.timestamp("us"), pa.int64(), pa.string(), pa.timestamp("ns", "UTC")], ids=str)
def test_a_column_of_times_that_can_not_be_kept_is_refused(local_store: hw.Store, kind: pa.DataType) -> None:
    stream = local_store.create_stream("a/x")
    times = pa.array([1_234_567]).cast(pa.int64()).cast(kind) if kind != pa.string() else pa.array(["now"])
    with stream.writer() as writer, pytest.raises(hw.InvalidRequestError, match="_time"):
        writer.write_batch(pa.table({"value": [b"x"], "_time": times}))
    assert values(stream) == []


# Acks.


def test_an_ack_gives_the_position_of_its_event(wide: hw.Stream) -> None:
    with wide.writer() as writer:
        acks = [writer.write(f"{n}", key=n) for n in range(100)]
        found = {acks[n].result(WAIT_SECONDS): b"%d" % n for n in range(100)}
    assert all(isinstance(position, hw.Position) for position in found)
    assert {event.position: event.value for event in wide.read()} == found
    assert all(ack.done and not ack.duplicate for ack in acks)


def test_an_ack_of_a_batch_gives_the_ranges_that_hold_it(wide: hw.Stream) -> None:
    with wide.writer() as writer:
        writer.write("before", key=1)
        ack = writer.write_batch(pa.table({"value": [b"%d" % n for n in range(50)], "id": range(50)}), key="id")
        writer.write("after", key=1)
        ranges = ack.result(WAIT_SECONDS)
    assert all(isinstance(item, hw.SegmentRange) for item in ranges)
    assert sorted(value for item in ranges for value in item.to_arrow()["value"].to_pylist()) == sorted(b"%d" % n for n in range(50))


def test_an_event_is_readable_when_its_ack_is_there(store: hw.Store) -> None:
    stream = store.create_stream("a/x")
    with stream.writer() as writer:
        for number in range(5):
            position = writer.write(f"{number}").result(WAIT_SECONDS)
            assert position == (0, number)
            assert len(values(stream)) == number + 1


def test_an_ack_that_is_not_there_in_time_can_be_asked_again(local_store: hw.Store) -> None:
    stream = local_store.create_stream("a/x")
    with stream.writer() as writer:
        with blocked(local_store):
            ack = writer.write("x")
            assert not ack.done
            with pytest.raises(TimeoutError, match="stay buffered"):
                ack.result(timeout=0.05)
        assert ack.result(WAIT_SECONDS) == (0, 0)
    assert values(stream) == [b"x"]


def test_flush_returns_when_all_is_durable(store: hw.Store, tmp_path: Path, catalog_url: str | None) -> None:
    stream = store.create_stream("a/x")
    with stream.writer() as writer:
        writer.flush()
        for number in range(1000):
            writer.write(b"%d" % number)
        writer.flush()
        with hw.open(tmp_path / "store", catalog=catalog_url, create=False) as other:
            assert values(other.stream("a/x")) == [b"%d" % n for n in range(1000)]


# Closing.


def test_closing_a_writer_or_its_store_flushes(tmp_path: Path) -> None:
    with hw.open(tmp_path / "store") as store:
        stream = store.create_stream("a/x")
        writer = stream.writer()
        writer.write("one")
        writer.close()
        writer.close()
        other = stream.writer()
        other.write("two")
        third = stream.writer("named")
        third.write("three")
    with hw.open(tmp_path / "store") as store:
        assert sorted(values(store.stream("a/x"))) == [b"one", b"three", b"two"]


def test_a_writer_left_by_an_exception_still_stores_what_it_was_given(local_store: hw.Store) -> None:
    stream = local_store.create_stream("a/x")
    with pytest.raises(RuntimeError, match="user code"), stream.writer() as writer:
        writer.write("one")
        raise RuntimeError("user code")
    assert values(stream) == [b"one"]


def test_a_closed_writer_says_so_whatever_other_writers_do(local_store: hw.Store) -> None:
    stream = local_store.create_stream("a/x")
    closed = stream.writer()
    closed.close()
    with stream.writer() as writer:
        for number in range(200):
            writer.write(b"%d" % number)  # there is nearly always a run open, which both would share
            with pytest.raises(hw.InvalidRequestError, match="writer is closed"):
                closed.write("too late")
    with pytest.raises(hw.InvalidRequestError, match="writer is closed"):
        closed.write_batch(batch(b"too late"))
    assert len(values(stream)) == 200


def test_an_abandoned_writer_warns_and_loses_nothing(tmp_path: Path) -> None:
    with hw.open(tmp_path / "store") as store:
        writer = store.create_stream("a/x").writer()
        writer.write("one")
        with pytest.warns(ResourceWarning, match="a/x was abandoned"):
            del writer
    with hw.open(tmp_path / "store") as store:
        assert values(store.stream("a/x")) == [b"one"]


def test_a_closed_writer_does_not_warn(local_store: hw.Store) -> None:
    writer = local_store.create_stream("a/x").writer()
    writer.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del writer
        gc.collect()


EXIT = """
import sys, headwater as hw
good, bad = hw.open(sys.argv[1]), [hw.open(f"{sys.argv[1]}-{n}") for n in range(3)]
writers = [store.create_stream("a/x").writer() for store in bad]
keep = good.create_stream("a/x").writer()
for store in bad:
    store.stream("a/x").seal()
for writer in writers:
    writer.write("can't be stored")
keep.write("at the end")
"""


@pytest.mark.slow
def test_the_end_of_the_interpreter_flushes_every_store_also_when_others_fail(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", EXIT, str(tmp_path / "store")], capture_output=True, text=True, timeout=WAIT_SECONDS)
    assert "SealedError" in done.stderr
    with hw.open(tmp_path / "store", create=False) as store:
        assert values(store.stream("a/x")) == [b"at the end"]
