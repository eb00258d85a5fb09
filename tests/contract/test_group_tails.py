"""Where a group's reading ends: at an end that names only some of its streams, and at the tail, which `at_tail` tells from a pause."""

from __future__ import annotations

from multiprocessing.connection import Connection

import pytest

import headwater as hw
from headwater.catalog import groups
from headwater.readers import group as group_module
from headwater.readers import reader as reader_module
from tests.crash.processes import Crew, Place

WAIT_SECONDS = 30.0
DEAD_SECONDS = 2.0


def write(stream: hw.Stream, *values: str, key: str | None = None) -> None:
    with stream.writer() as writer:
        for value in values:
            writer.write(value, key=key)


def die_soon(patch: pytest.MonkeyPatch) -> None:
    for module in (reader_module, group_module):
        patch.setattr(module, "READER_SECONDS", DEAD_SECONDS)
    patch.setattr(groups, "_DEAD_AFTER_US", int(DEAD_SECONDS * 1_000_000))


def read_to_tail(reader: hw.Reader, timeout: float = 0.1) -> list[str]:
    """The loop that the docs show."""
    found = []
    while (event := reader.read(timeout=timeout)) is not None or not reader.at_tail:
        if event is not None:
            found.append(event.value.decode())
    return found


def test_a_stream_that_the_end_does_not_name_has_no_end(store: hw.Store) -> None:
    bounded, endless = store.create_stream("g/bounded"), store.create_stream("g/endless")
    write(bounded, "b1", "b2")
    write(endless, "e1")
    group = store.reader_group("group", ["g/bounded", "g/endless"], end=bounded.tail())
    write(bounded, "past the end")
    write(endless, "e2")
    with group.reader("r") as reader:
        assert sorted(read_to_tail(reader)) == ["b1", "b2", "e1", "e2"]
        assert reader.read(timeout=0.0) is None
        write(endless, "e3")
        event = reader.read(timeout=WAIT_SECONDS)
        assert event is not None and event.value == b"e3"
        assert group.lag().events == 1, "e3 is not committed, and what lies past the end does not count"
        endless.split(0)
        write(endless, "e4", key="a")
        assert read_to_tail(reader) == ["e4"]
        # Both streams are at their ends once the endless one is sealed.
        endless.seal()
        assert [event.value for event in reader] == []
    assert store.reader_group("group").lag().events == 0


def test_an_end_that_names_none_of_the_streams_is_refused(store: hw.Store) -> None:
    store.create_stream("g/in")
    other = store.create_stream("g/other")
    with pytest.raises(hw.InvalidRequestError, match="the end names none of the streams that the group reads: g/in"):
        store.reader_group("group", ["g/in"], end=other.tail())
    assert store.reader_groups() == []


def test_an_end_of_all_streams_and_more_is_taken(store: hw.Store) -> None:
    stream, other = store.create_stream("g/in"), store.create_stream("g/other")
    write(stream, "1")
    with store.reader_group("group", ["g/in"], end=store.cut(stream, other)).reader("r") as reader:
        assert [event.value for event in reader] == [b"1"]


def test_at_tail_is_true_only_when_all_is_read_and_committed(store: hw.Store) -> None:
    stream = store.create_stream("g/in", scaling=hw.Scaling.fixed(3))
    group = store.reader_group("group", ["g/in"])
    with group.reader("auto") as auto:
        assert auto.at_tail
        write(stream, "1", "2")
        assert not auto.at_tail
        assert auto.read(timeout=WAIT_SECONDS) is not None
        assert auto.read(timeout=WAIT_SECONDS) is not None
        assert not auto.at_tail, "the second event may not be done with"
        assert auto.read(timeout=0.0) is None
        assert auto.at_tail
    with pytest.raises(hw.InvalidRequestError, match="closed"):
        _ = auto.at_tail
    with group.reader("manual", commit="manual") as manual:
        write(stream, "3")
        assert manual.read(timeout=WAIT_SECONDS) is not None
        assert manual.read(timeout=0.0) is None
        assert not manual.at_tail
        with store.transaction() as tx:
            tx.commit_reader(manual)
        assert manual.at_tail


def test_at_tail_looks_at_the_segments_of_other_readers_and_past_a_split(store: hw.Store) -> None:
    stream = store.create_stream("g/in", scaling=hw.Scaling.fixed(2))
    group = store.reader_group("group", ["g/in"])
    with group.reader("one", commit="manual") as one, group.reader("two") as two:
        assert one.read(timeout=0.0) is None
        assert two.read(timeout=0.0) is None
        for key in "abcdefgh":
            write(stream, key, key=key)
        mine = read_all(one)
        assert 0 < len(mine) < 8
        assert not one.at_tail and not two.at_tail
        one.commit()
        assert len(mine) + len(read_to_tail(two)) == 8
        assert one.at_tail
        stream.split(0)
        write(stream, "after the split", key="a")
        assert not one.at_tail and not two.at_tail


def read_all(reader: hw.Reader) -> list[str]:
    found = []
    while (event := reader.read(timeout=0.2)) is not None:
        found.append(event.value.decode())
    return found


@pytest.mark.slow
def test_a_loop_until_the_tail_reads_the_segments_of_a_reader_that_was_killed(
    store: hw.Store, place: Place, crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    die_soon(monkeypatch)
    stream = store.create_stream("g/in", scaling=hw.Scaling.fixed(2))
    group = store.reader_group("group", ["g/in"])
    with group.reader("here") as here:
        assert here.read(timeout=0.0) is None
        other = crew.start(hold_segments, place)
        while sorted(len(held) for held in group.assignments().values()) != [1, 1]:
            assert here.read(timeout=0.05) is None
        other.kill()
        for key in "abcdefgh":
            write(stream, key, key=key)
        assert sorted(read_to_tail(here)) == list("abcdefgh")


def hold_segments(channel: Connection, place: Place) -> None:
    die_soon(pytest.MonkeyPatch())
    with place.open() as store, store.reader_group("group").reader("other") as reader:
        while reader.read(timeout=0.05) is None:
            pass
