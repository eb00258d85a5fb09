"""Following a stream in another process: soon, in order, and without holding anything up."""

from __future__ import annotations

import os
import statistics
import time

import pytest

import headwater as hw
from headwater.model.limits import MIB
from tests.crash.processes import Crew, Place
from tests.crash.workers import follow, follow_when_told

pytestmark = pytest.mark.slow

STREAM = "tail/events"


@pytest.mark.parametrize("segments", [1, 6])
def test_a_follower_in_another_process_sees_an_event_within_milliseconds(place: Place, crew: Crew, segments: int) -> None:
    with place.open() as store:
        stream = store.create_stream(STREAM, scaling=hw.Scaling.fixed(segments))
        follower = crew.start(follow, place, STREAM)
        assert follower.hear() == "ready"
        waits = []
        with stream.writer() as writer:
            for number in range(60):
                writer.write(b"%d" % number, key=f"k{number}").result()
                acked = time.monotonic()
                value, seen = follower.hear()
                assert value == b"%d" % number
                waits.append(seen - acked)
        assert statistics.median(waits) < 0.1, waits


def test_a_follower_goes_on_over_splits_and_merges_in_order_and_ends_with_the_stream(place: Place, crew: Crew) -> None:
    with place.open() as store:
        stream = store.create_stream(STREAM)
        follower = crew.start(follow, place, STREAM)
        assert follower.hear() == "ready"
        with stream.writer() as writer:
            for number in range(200):
                ack = writer.write(b"%d" % number, key="one key")
                if number % 20 == 7:
                    ack.result()
                    stream.split(max(segment.number for segment in stream.segments()))
                elif number % 20 == 17:
                    ack.result()
                    segments = sorted(stream.segments(), key=lambda segment: segment.start)
                    stream.merge([segment.number for segment in segments[:2]])
        stream.seal()
        assert [value for value, _ in follower.hear_all()] == [b"%d" % number for number in range(200)]
        assert follower.wait() == 0


def test_an_idle_follower_does_not_let_the_wal_grow(sqlite_place: Place, crew: Crew) -> None:
    wal = os.path.join(sqlite_place.url, "catalog.sqlite-wal")
    with sqlite_place.open() as store:
        stream = store.create_stream(STREAM)
        follower = crew.start(follow_when_told, sqlite_place, STREAM)
        assert follower.hear() == "ready"
        largest, count = 0, 0
        with stream.writer() as writer:
            for number in range(400):
                writer.write(b"." * 60_000).result()
                largest = max(largest, os.stat(wal).st_size)
                if number % 40 == 39:
                    # Some of what there is: it stays in the middle of the stream, and of a block's batch.
                    follower.tell(20)
                    count += len(follower.hear())
        assert count == 200
        assert largest < 16 * MIB, f"the WAL grew to {largest:,} bytes"
        follower.tell(200)
        assert len(follower.hear()) == 200
        follower.tell(0)
        assert follower.wait() == 0
