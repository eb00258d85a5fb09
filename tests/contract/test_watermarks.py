"""Event time: what writers note, and between which times a group is."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import headwater as hw
from headwater.catalog import watermarks
from headwater.catalog.database import Tx

START = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def store(tmp_path: Path, catalog_url: str | None, monkeypatch: pytest.MonkeyPatch) -> Iterator[hw.Store]:
    monkeypatch.setattr("headwater.writer.NOTE_SECONDS", 0.0)
    with hw.open(tmp_path / "store", catalog=catalog_url) as store:
        yield store


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def marks(store: hw.Store, stream: hw.Stream) -> list[int]:
    """The lower bounds of the stream's marks."""
    return [mark.low for mark in store._engine.database.read(lambda tx: watermarks.list_marks(tx, stream.id))]


def read_all(reader: hw.Reader, count: int) -> None:
    for _ in range(count):
        assert reader.read(timeout=10) is not None
    reader.commit()


def test_the_window_follows_the_slowest_writer_and_the_groups_position(store: hw.Store) -> None:
    stream = store.create_stream("a/b")
    group = store.reader_group("group", ["a/b"])
    assert group.time_window() == hw.TimeWindow(None, None)
    with stream.writer() as fast, stream.writer("slow") as slow, group.reader("reader", commit="manual") as reader:
        fast.write(b"1")
        slow.write(b"2")
        slow.flush()  # The mark that follows is behind both.
        fast.note_time(at(10))
        slow.note_time(at(5))
        assert group.time_window().lower is None, "nothing was read: the events before the mark are still to come"
        read_all(reader, 2)
        assert group.time_window() == hw.TimeWindow(at(10), at(10)), "only the fast one had noted a time when the last mark was made"
        slow.note_time(at(20))
        fast.write(b"3")
        fast.note_time(at(30))
        assert group.time_window().lower == at(10), "event 3 is not read yet"
        read_all(reader, 1)
        assert group.time_window().lower == at(20) and group.time_window().upper == at(30)


def test_a_writer_that_closes_or_falls_silent_holds_nothing_back(store: hw.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = store.create_stream("a/b")
    group = store.reader_group("group", ["a/b"])
    with stream.writer() as other, group.reader("reader", commit="manual") as reader:
        with stream.writer("first") as first:
            first.write(b"1")
            first.note_time(at(1))
        silent = stream.writer("silent")
        silent.write(b"2")
        silent.note_time(at(2))
        read_all(reader, 2)
        other.note_time(at(50))
        assert group.time_window().lower == at(2)
        monkeypatch.setattr(watermarks, "_IDLE_US", 0)
        other.note_time(at(60))
        assert group.time_window().lower == at(60)
        silent.close()


def test_several_streams_have_the_least_of_their_windows(store: hw.Store) -> None:
    writers = [store.create_stream(name).writer() for name in ("a/x", "a/y")]
    group = store.reader_group("group", ["a/x", "a/y"])
    with writers[0] as x, writers[1] as y, group.reader("reader", commit="manual") as reader:
        x.write(b"1")
        x.note_time(at(10))
        y.write(b"2")
        read_all(reader, 2)
        assert group.time_window().lower is None, "nobody noted a time for the other stream"
        y.note_time(at(4))
        assert group.time_window().lower == at(4)


def test_a_window_holds_across_a_split(store: hw.Store) -> None:
    stream = store.create_stream("a/b")
    group = store.reader_group("group", ["a/b"])
    with stream.writer() as writer, group.reader("reader", commit="manual") as reader:
        writer.write(b"1", key="k")
        writer.note_time(at(1))
        stream.split(0)
        writer.write(b"2", key="k")
        writer.note_time(at(2))
        read_all(reader, 1)
        assert group.time_window().lower == at(1)
        read_all(reader, 1)
        assert group.time_window().lower == at(2)


def test_times_without_a_zone_and_closed_writers_are_refused(store: hw.Store) -> None:
    with store.create_stream("a/b").writer() as writer, pytest.raises(hw.InvalidRequestError, match="zone"):
        writer.note_time(datetime(2026, 1, 1))
    with pytest.raises(hw.InvalidRequestError, match="closed"):
        writer.note_time(START)


def test_older_marks_go(store: hw.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watermarks, "KEPT", 3)
    stream = store.create_stream("a/b")
    with stream.writer() as writer:
        for second in range(10):
            writer.note_time(at(second))
    assert len(marks(store, stream)) == 3


def test_a_note_on_a_deleted_stream_says_so_and_its_writer_can_be_closed(store: hw.Store) -> None:
    stream = store.create_stream("a/b")
    noting, closed, given = stream.writer(), stream.writer(), stream.writer()
    for writer in (closed, given):
        writer.write(b"1")
        writer.note_time(at(1))
    store.delete_stream("a/b", seal=True)
    with pytest.raises(hw.NotFoundError, match="deleted"):
        noting.note_time(at(2))
    noting.close()
    closed.close()
    given.write(b"2")
    with pytest.raises((hw.NotFoundError, hw.SealedError)):
        given.close()
    given.close()


def test_a_store_is_closed_though_a_stream_was_deleted_for_which_a_time_was_noted(tmp_path: Path, catalog_url: str | None) -> None:
    store = hw.open(tmp_path / "store", catalog=catalog_url)
    deleted, other = store.create_stream("a/b").writer(), store.create_stream("a/c").writer()
    deleted.write(b"1")
    deleted.note_time(START)
    deleted.flush()
    other.write(b"kept")
    store.delete_stream("a/b", seal=True)
    store.close()
    with hw.open(tmp_path / "store", catalog=catalog_url) as store:
        assert [event.value for event in store.stream("a/c").read()] == [b"kept"]


def test_a_note_on_a_sealed_stream_changes_nothing(store: hw.Store) -> None:
    stream = store.create_stream("a/b")
    group = store.reader_group("group", ["a/b"])
    with stream.writer() as writer:
        writer.write(b"1", time=at(1))
        writer.flush()
        stream.seal()
        writer.note_time(at(1000))
        assert group.time_window() == hw.TimeWindow(None, None), "nothing was read"


def test_a_writer_that_notes_the_same_time_again_is_not_idle(store: hw.Store) -> None:
    stream = store.create_stream("a/b")

    def noted_before(tx: Tx) -> None:
        tx.run("UPDATE noted_time SET noted_at = noted_at - ? WHERE writer = 'slow'", (2 * watermarks._IDLE_US,))

    engine = store._engine
    for writer, second in (("slow", 10), ("fast", 20)):
        engine.run(watermarks.note_time, stream.id, writer, second)
    engine.database.write(noted_before)
    engine.run(watermarks.note_time, stream.id, "slow", 10)
    engine.run(watermarks.note_time, stream.id, "fast", 30)
    assert marks(store, stream) == [10]
    engine.database.write(noted_before)
    engine.run(watermarks.note_time, stream.id, "fast", 40)
    assert marks(store, stream) == [10, 40]
