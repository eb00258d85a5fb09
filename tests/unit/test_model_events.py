"""Events: each way of taking one apart gives the same."""

from __future__ import annotations

import pickle
from datetime import UTC, datetime

import headwater as hw

TIME = datetime(2020, 1, 1, tzinfo=UTC)
POSITION = hw.Position(3, 7)
EVENT = hw.Event(b"v", b"k", TIME, POSITION)


def test_an_event_is_taken_apart_by_name_by_place_and_as_a_whole() -> None:
    fields = (EVENT.value, EVENT.key, EVENT.time, EVENT.position)
    assert fields == (b"v", b"k", TIME, POSITION)
    assert tuple(EVENT) == fields and len(EVENT) == len(fields)
    assert [EVENT[index] for index in range(-4, 4)] == [*fields, *fields]
    assert (EVENT[1:3], EVENT[::-1], EVENT[:]) == (fields[1:3], fields[::-1], fields)
    assert list(reversed(EVENT)) == [*fields[::-1]]


def test_an_event_that_was_read_is_taken_apart_in_the_same_way() -> None:
    with hw.open("memory://events-apart") as store:
        stream = store.create_stream("a/x")
        with stream.writer() as writer:
            for number in range(3):
                writer.write(b"%d" % number, key="k", time=TIME)
        for number, event in enumerate(stream.read()):
            assert (event[0], event[1], event[2], event[3]) == (b"%d" % number, b"k", TIME, hw.Position(0, number)) == tuple(event)
            assert event == pickle.loads(pickle.dumps(event))
