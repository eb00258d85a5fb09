"""Cursors: what the engine gives to whoever reads, for a stream, a segment's number and two bounds."""

from __future__ import annotations

import threading

import pytest

import headwater as hw
from headwater.segments.read import SegmentCursor, SegmentState
from tests.contract.writing import WAIT_SECONDS


def write(stream: hw.Stream, values: range) -> None:
    """Each value in a block of its own."""
    with stream.writer() as writer:
        for value in values:
            writer.write(b"%d" % value).result()


def cursor_of(stream: hw.Stream, start: int, end: int | None, segment: int = 0) -> SegmentCursor:
    return stream._store._engine.cursor(stream._ref, segment, start, end)


def rest(cursor: SegmentCursor) -> list[bytes]:
    found = []
    while (batch := cursor.next_batch()) is not None:
        found += [event.value for event in batch.events()]
    return found


def test_a_cursor_reads_what_lies_between_two_numbers(store: hw.Store) -> None:
    stream = store.create_stream("a/x")
    write(stream, range(6))
    for start in range(6):
        for end in range(start, 7):
            assert rest(cursor_of(stream, start, end)) == [b"%d" % number for number in range(start, end)]


def test_a_cursor_at_the_tail_says_so_and_goes_on_with_what_is_appended(store: hw.Store) -> None:
    stream = store.create_stream("a/x")
    cursor = cursor_of(stream, 0, None)
    assert cursor.next_batch() is None and cursor.look() == SegmentState(at_tail=True, ended=False, epoch=0)
    write(stream, range(3))
    assert cursor.look() == SegmentState(at_tail=False, ended=False, epoch=0)
    assert rest(cursor) == [b"0", b"1", b"2"]
    stream.split(0)
    assert cursor.next_batch() is None and cursor.look() == SegmentState(at_tail=True, ended=True, epoch=1)


def test_a_cursor_of_a_sealed_segment_has_not_ended_before_it_is_read(store: hw.Store) -> None:
    stream = store.create_stream("a/x")
    write(stream, range(3))
    stream.split(0)
    cursor = cursor_of(stream, 0, None)
    assert cursor.look() == SegmentState(at_tail=False, ended=False, epoch=1)
    rest(cursor)
    assert cursor.look().ended


def test_a_cursor_names_what_was_truncated_and_what_was_deleted(store: hw.Store) -> None:
    stream = store.create_stream("a/x")
    write(stream, range(3))
    cursor = cursor_of(stream, 0, None)
    stream.truncate(stream.tail())
    with pytest.raises(hw.TruncatedError, match="event 0 of segment 0"):
        cursor.look()
    store.delete_stream("a/x", seal=True)
    for call in (cursor.look, lambda: rest(cursor_of(stream, 0, 3))):
        with pytest.raises(hw.NotFoundError, match="a/x was deleted"):
            call()


def test_a_forks_cursor_passes_through_the_logs_of_all_its_parents(store: hw.Store) -> None:
    stream = store.create_stream("a/0")
    expected = []
    for generation in range(3):
        values = range(generation * 10, generation * 10 + 4)
        write(stream, values)
        expected += [b"%d" % value for value in values]
        # The parent goes on, in a block that no fork may see.
        child = stream.fork(f"a/{generation + 1}")
        write(stream, range(900, 903))
        stream = child
    assert [event.value for event in stream.read()] == expected
    for start in range(len(expected)):
        assert rest(cursor_of(stream, start, None)) == expected[start:]
        assert rest(cursor_of(stream, start, start + 1)) == expected[start : start + 1]
    store.run_upkeep()
    for start in range(len(expected)):
        assert rest(cursor_of(stream, start, None)) == expected[start:]


def test_a_wait_for_more_ends_when_something_is_appended(store: hw.Store) -> None:
    stream = store.create_stream("a/x")
    cursor, engine = cursor_of(stream, 0, None), store._engine
    seen = engine.changes.version()
    assert cursor.next_batch() is None
    thread = threading.Thread(target=write, args=(stream, range(1)))
    thread.start()
    while (batch := cursor.next_batch()) is None:
        engine.wait_for_more([cursor], seen, WAIT_SECONDS)
        seen = engine.changes.version()
    thread.join()
    assert [event.value for event in batch.events()] == [b"0"]
