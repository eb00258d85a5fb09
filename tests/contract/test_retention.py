"""Retention: what a policy lets go goes, oldest first and no more than that; what a tag, a fork, a hold or a reader needs stays."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

import headwater as hw
from headwater.catalog import sessions, tags
from headwater.catalog.database import Tx
from headwater.segments.read import SegmentCursor
from headwater.streams import reading, retention
from tests.crash.processes import PATIENCE_SECONDS, Place
from tests.operations import intercept

KIB = 1024
EVENT = b"." * 1000
#: Of the lower and the upper half of the key space.
LEFT, RIGHT = "k3", "k2"


#: Where the catalog makes no difference: it is the same client.
on_sqlite = pytest.mark.parametrize("catalog_url", ["sqlite"], indirect=True)


def write(stream: hw.Stream, numbers: range, key: str | None = None) -> None:
    """An event for each number, each in a block of its own."""
    with stream.writer() as writer:
        for number in numbers:
            writer.write(b"%d|" % number + EVENT, key=key).result()


def numbers(stream: hw.Stream, start: Any = None, end: Any = None) -> list[int]:
    return sorted(int(event.value.partition(b"|")[0]) for event in stream.read(start, end))


def retain(store: hw.Store, now: datetime | None = None) -> list[str]:
    """As upkeep does, at a time of the test's choice; returns what stood in the way."""
    notes: list[str] = []
    now_us = store._engine.run(sessions.get_time) if now is None else int(now.timestamp() * 1_000_000)
    with store._upkeep._alone():
        retention.retain(store._engine, store._upkeep._live_session(), now_us, notes.append)
    return notes


def read_some(store: hw.Store, group: str, count: int) -> None:
    with store.reader_group(group).reader("r", commit="manual") as reader:
        for _ in range(count):
            assert reader.read(timeout=10) is not None
        reader.commit()


# By time.


@pytest.mark.parametrize("tiered", [False, True], ids=["blocks", "chunks"])
def test_events_older_than_the_age_go_and_none_that_is_younger(store: hw.Store, tiered: bool) -> None:
    stream = store.create_stream("r/time", scaling=hw.Scaling.fixed(2), retention=hw.Retention.by_time(timedelta(hours=1)))
    for number in range(12):
        write(stream, range(number, number + 1), key=str(number))
        if number == 5:
            stream.split(stream.segments()[0].number)
    times = {int(event.value.partition(b"|")[0]): event.time for event in stream.read()}
    if tiered:
        store.run_upkeep()
    assert numbers(stream) == list(range(12))
    for number in (0, 3, 7, 11):
        retain(store, times[number] + timedelta(hours=1))
        assert numbers(stream) == list(range(number, 12))
    retain(store, times[11] + timedelta(hours=2))
    assert numbers(stream) == []
    store.run_upkeep()
    write(stream, range(12, 13))
    assert numbers(stream) == [12]


@on_sqlite
def test_what_is_kept_for_ever_stays_and_a_policy_may_be_given_later(store: hw.Store) -> None:
    stream = store.create_stream("r/forever")
    write(stream, range(3))
    retain(store, datetime.now(UTC) + timedelta(days=10_000))
    assert numbers(stream) == [0, 1, 2]
    stream.update(retention=hw.Retention.by_time(timedelta(days=1)))
    retain(store, datetime.now(UTC) + timedelta(days=2))
    assert numbers(stream) == []


@on_sqlite
def test_a_stream_of_bytes_is_retained_too(store: hw.Store) -> None:
    stream = store.create_stream("r/bytes", kind="bytes", retention=hw.Retention.by_size(3000))
    with stream.byte_writer() as writer:
        for _ in range(5):
            writer.write(EVENT)
            writer.flush()
    retain(store)
    with pytest.raises(hw.TruncatedError):
        stream.byte_reader(1999)
    assert stream.byte_reader(2000).readall() == EVENT * 3


# By size.


def test_the_oldest_go_while_there_is_too_much_and_at_least_the_limit_stays(store: hw.Store) -> None:
    stream = store.create_stream("r/size", scaling=hw.Scaling.fixed(2), retention=hw.Retention.by_size(10 * KIB))
    for number in range(20):
        write(stream, range(number, number + 1), key=str(number))
        if number == 8:
            stream.split(stream.segments()[1].number)
    retain(store)
    left = numbers(stream)
    assert left == list(range(20 - len(left), 20)) and 9 <= len(left) <= 11
    retain(store)
    assert numbers(stream) == left, "again: nothing more goes"


@pytest.mark.parametrize("keeper", ["tag", "fork", "hold"])
def test_what_is_kept_for_others_does_not_count_against_what_may_be_read(store: hw.Store, keeper: str) -> None:
    stream = store.create_stream("r/kept", retention=hw.Retention.by_size(10 * KIB))
    write(stream, range(20))
    cut = stream.tail()
    if keeper == "tag":
        store.tag("keep", cut)
    elif keeper == "fork":
        stream.fork("r/fork")
    else:
        store.hold("keep", stream.head(), cut, 3600)
    head = stream.head()
    for turn in range(3):
        retain(store)
        assert 9 <= len(numbers(stream)) <= 11, "what is truncated and kept is no reason for more to go"
        if turn == 1:
            store.run_upkeep()
    if keeper == "fork":
        store.stream("r/fork").update(retention=hw.Retention.forever())
        assert numbers(store.stream("r/fork")) == list(range(20))
    else:
        assert numbers(stream, head, cut) == list(range(20))


# By consumption.


def test_what_every_named_group_has_read_goes_and_no_more(store: hw.Store) -> None:
    stream = store.create_stream("r/consumed", retention=hw.Retention.by_consumption(["slow", "fast"]))
    write(stream, range(10))
    for name in ("slow", "fast", "other"):
        store.reader_group(name, ["r/consumed"])
    assert retain(store) == [] and numbers(stream) == list(range(10))
    read_some(store, "fast", 8)
    retain(store)
    assert numbers(stream) == list(range(10))
    read_some(store, "slow", 3)
    retain(store)
    assert numbers(stream) == list(range(3, 10))
    read_some(store, "slow", 6)
    retain(store)
    assert numbers(stream) == [8, 9]
    store.run_upkeep()
    assert numbers(stream) == [8, 9]


def half_read(store: hw.Store) -> tuple[hw.Stream, hw.ReaderGroup]:
    """A stream of events 0 to 5, and the group that its retention goes by, which has read 0 to 3."""
    stream = store.create_stream("r/back", retention=hw.Retention.by_consumption(["g"]))
    write(stream, range(6))
    group = store.reader_group("g", ["r/back"])
    read_some(store, "g", 4)
    return stream, group


def test_a_group_that_goes_back_while_retention_decides_keeps_what_it_goes_back_to(
    store: hw.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, group = half_read(store)
    head = stream.head()

    def go_back_first(name: str, run: Callable[[], Any]) -> Any:
        if name == "retention.truncate_consumed":
            group.reset(head)
        return run()

    with monkeypatch.context() as patch:
        intercept(patch, store, go_back_first)
        retain(store)
    assert numbers(stream) == list(range(6))
    with group.reader("r") as reader:
        found = reader.read(timeout=10)
        assert found is not None and found.value.startswith(b"0|")


def test_a_group_that_goes_back_to_what_retention_just_let_go_is_told(store: hw.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, group = half_read(store)
    head = stream.head()

    def retain_first(name: str, run: Callable[[], Any]) -> Any:
        if name == "placing.reset_group":
            retain(store)
        return run()

    with monkeypatch.context() as patch:
        intercept(patch, store, retain_first)
        with pytest.raises(hw.TruncatedError):
            group.reset(head)
    assert numbers(stream) == [4, 5] and group.lag().events == 2


def test_consumption_across_a_split_goes_by_what_was_read_of_each_segment(store: hw.Store) -> None:
    stream = store.create_stream("r/split", retention=hw.Retention.by_consumption(["g"]))
    store.reader_group("g", ["r/split"])
    write(stream, range(5), key="a")
    stream.split(0)
    write(stream, range(5, 10), key="a")
    write(stream, range(10, 15), key="b")
    read_some(store, "g", 3)
    retain(store)
    assert numbers(stream) == list(range(3, 15))
    read_some(store, "g", 2)
    retain(store)
    assert numbers(stream) == list(range(5, 15))
    with store.reader_group("g").reader("r", commit="manual") as reader:
        read: list[int] = []
        while len(read) < 6:
            event = reader.read(timeout=10)
            assert event is not None
            read.append(int(event.value.partition(b"|")[0]))
        reader.commit()
    retain(store)
    assert numbers(stream) == sorted(set(range(5, 15)) - set(read))


def merged_and_split(stream: hw.Stream) -> None:
    """100 events in each of two segments, 100 in the one they were merged to, 100 in those it was split to."""
    write(stream, range(100), key=LEFT)
    write(stream, range(100, 200), key=RIGHT)
    stream.merge([0, 1])
    write(stream, range(200, 300), key=LEFT)
    stream.split(2)
    write(stream, range(300, 400), key=LEFT)


def test_what_was_merged_stays_while_a_half_of_it_is_not_read(store: hw.Store) -> None:
    stream = store.create_stream("r/merged", scaling=hw.Scaling.fixed(2), retention=hw.Retention.by_consumption(["g"]))
    merged_and_split(stream)
    group = store.reader_group("g", ["r/merged"])
    with group.reader("left", commit="manual") as left, group.reader("right", commit="manual") as right:
        both = {"left": left, "right": right}
        for reader in both.values():
            reader.read(timeout=0)
            reader.rewind()
        for name, owned in group.assignments().items():
            for _ in range(101 if owned[0].number == 0 else 30):
                both[name].read(timeout=1 if owned[0].number else 0)
            both[name].commit()
    assert dict(group.positions().streams["r/merged"].segments) == {0: 100, 1: 30}
    assert retain(store) == [] and numbers(stream) == list(range(130, 400))
    assert group.lag().events == 270
    with group.reader("all") as reader:
        found = [int(event.value.partition(b"|")[0]) for event in iter(lambda: reader.read(timeout=0.1), None)]
    assert sorted(found) == list(range(130, 400))


def test_what_was_merged_is_not_older_than_a_half_of_it(store: hw.Store) -> None:
    stream = store.create_stream("r/sized", scaling=hw.Scaling.fixed(2))
    merged_and_split(stream)
    size = sum(row[0] for row in store._engine.database.query("SELECT bytes FROM segment"))
    stream.update(retention=hw.Retention.by_size(size * 5 // 8))
    assert retain(store) == []
    assert (left := numbers(stream)) == list(range(left[0], 400)) and 145 <= left[0] <= 151


def test_a_group_at_the_end_of_a_sealed_segment_goes_on_behind_it(store: hw.Store) -> None:
    stream = store.create_stream("r/moved", retention=hw.Retention.by_consumption(["g"]))
    write(stream, range(10))
    group = store.reader_group("g", ["r/moved"])
    read_some(store, "g", 10)
    stream.split(0)
    write(stream, range(10, 20), key=LEFT)
    assert retain(store) == [] and numbers(stream) == list(range(10, 20))
    assert group.lag().events == 10
    with group.reader("r") as reader:
        found = [int(event.value.partition(b"|")[0]) for event in iter(lambda: reader.read(timeout=0.1), None)]
    assert found == list(range(10, 20))
    retain(store)
    assert numbers(stream) == []


@on_sqlite
@pytest.mark.parametrize("missing", ["never made", "deleted", "of another stream"])
def test_while_a_named_group_is_missing_nothing_goes_and_upkeep_says_why(store: hw.Store, missing: str) -> None:
    stream = store.create_stream("r/missing", retention=hw.Retention.by_consumption(["there", "absent"]))
    write(stream, range(5))
    store.reader_group("there", ["r/missing"])
    read_some(store, "there", 5)
    if missing == "deleted":
        store.reader_group("absent", ["r/missing"]).delete()
    elif missing == "of another stream":
        store.create_stream("r/other")
        store.reader_group("absent", ["r/other"])
    report = store.run_upkeep()
    assert any("absent" in problem and "r/missing" in problem for problem in report.problems)
    assert numbers(stream) == list(range(5))


@on_sqlite
def test_past_a_hard_limit_also_what_was_not_read_goes(store: hw.Store) -> None:
    policy = hw.Retention.by_consumption(["never-made"], max_size=5 * KIB, max_age=timedelta(days=1))
    stream = store.create_stream("r/hard", retention=policy)
    write(stream, range(10))
    retain(store)
    assert numbers(stream) == [5, 6, 7, 8, 9] or numbers(stream) == [6, 7, 8, 9]
    retain(store, datetime.now(UTC) + timedelta(hours=23))
    assert numbers(stream)
    retain(store, datetime.now(UTC) + timedelta(hours=25))
    assert numbers(stream) == []


# What stands against it.


def test_a_tag_keeps_what_retention_takes_until_it_is_untagged(store: hw.Store) -> None:
    stream = store.create_stream("r/tagged", retention=hw.Retention.by_time(timedelta(hours=1)))
    write(stream, range(5))
    head, cut = stream.head(), stream.tail()
    store.tag("release-1", cut)
    stream.split(0)
    write(stream, range(5, 8))
    retain(store, datetime.now(UTC) + timedelta(hours=2))
    store.run_upkeep()
    assert numbers(stream) == []
    assert numbers(stream, end=cut) == numbers(stream, head, cut) == list(range(5))
    store.untag("release-1")
    with pytest.raises(hw.TruncatedError):
        numbers(stream, head, cut)


def test_a_hold_keeps_what_retention_takes_while_it_is_renewed(store: hw.Store) -> None:
    stream = store.create_stream("r/held", retention=hw.Retention.by_time(timedelta(hours=1)))
    write(stream, range(5))
    head, cut = stream.head(), stream.tail()
    ranges = stream.ranges(head, cut)
    store.hold("reader", head, cut, 3600)
    stream.split(0)
    retain(store, datetime.now(UTC) + timedelta(hours=2))
    for _ in range(3):
        store.hold("reader", head, cut, 3600)
        store.run_upkeep()
        assert numbers(stream, head, cut) == list(range(5))
        assert sum(item.to_arrow().num_rows for item in ranges) == 5
    store.hold("reader", head, cut, -1.0)
    store.run_upkeep()
    with pytest.raises(hw.TruncatedError):
        numbers(stream, head, cut)
    assert store._engine.database.query("SELECT count(*) FROM extent") == [(0,)]


def test_a_hold_and_a_tag_of_one_name_are_two_things(store: hw.Store) -> None:
    stream = store.create_stream("r/names")
    write(stream, range(3))
    cut = stream.tail()
    store.tag("x", cut)
    store.hold("x", stream.head(), cut, 3600)
    assert list(store.tags()) == ["x"]
    store.release("x")
    stream.truncate(cut)
    assert numbers(stream, end=cut) == [0, 1, 2] and list(store.tags()) == ["x"]
    store.hold("y", cut, cut, 3600)
    with pytest.raises(hw.NotFoundError):
        store.untag("y")
    store.release("y")
    store.release("y")


def test_a_running_reader_reads_to_its_end_whatever_retention_does(place: Place, store: hw.Store) -> None:
    stream = store.create_stream("r/running", retention=hw.Retention.by_time(timedelta(hours=1)))
    write(stream, range(10))
    stream.split(0)
    write(stream, range(10, 20), key="a")
    events = stream.read()
    follower = stream.read(follow=True)
    with place.open() as other:
        theirs = other.stream("r/running").to_arrow()
    assert theirs.num_rows == 20
    first = [next(events), next(follower)]
    retain(store, datetime.now(UTC) + timedelta(hours=2))
    store.run_upkeep()
    assert [int(event.value.partition(b"|")[0]) for event in (first[0], *events)] == list(range(20))
    assert [int(next(follower).value.partition(b"|")[0]) for _ in range(9)] == list(range(1, 10))
    follower.close()  # type: ignore[attr-defined]
    store.run_upkeep()
    assert numbers(stream) == [] and store._engine.database.query("SELECT count(*) FROM pin") == [(0,)]


@on_sqlite
def test_a_follower_holds_what_waits_for_what_it_reads(store: hw.Store) -> None:
    stream = store.create_stream("r/follower", retention=hw.Retention.by_size(1))
    write(stream, range(300))
    stream.split(0)
    write(stream, range(300, 600), key=LEFT)
    follower = stream.read(follow=True)
    found = [next(follower)]
    retain(store)
    store.run_upkeep()
    found += [next(follower) for _ in range(599)]
    assert [int(event.value.partition(b"|")[0]) for event in found] == list(range(600))
    follower.close()  # type: ignore[attr-defined]


def test_a_group_that_is_behind_is_told_that_its_events_are_gone(store: hw.Store) -> None:
    stream = store.create_stream("r/behind", retention=hw.Retention.by_time(timedelta(hours=1)))
    write(stream, range(5))
    with store.reader_group("g", ["r/behind"]).reader("r") as reader:
        assert reader.read(timeout=10) is not None
    retain(store, datetime.now(UTC) + timedelta(hours=2))
    write(stream, range(5, 6))
    with store.reader_group("g").reader("r", commit="manual") as reader, pytest.raises(hw.TruncatedError):
        for _ in range(3):
            reader.read(timeout=1)


@on_sqlite
def test_an_age_beyond_the_calendar_keeps_everything_and_stops_nobody_elses_upkeep(store: hw.Store) -> None:
    for number, policy in enumerate(
        (hw.Retention.by_time(timedelta(days=1_000_000)), hw.Retention.by_consumption(["none"], max_age=timedelta(days=999_999_999)))
    ):
        write(store.create_stream(f"r/old{number}", retention=policy), range(3))
    other = store.create_stream("r/other", retention=hw.Retention.by_time(timedelta(microseconds=1)))
    write(other, range(3))
    report = store.run_upkeep()
    assert not [problem for problem in report.problems if "reader group" not in problem]
    assert numbers(store.stream("r/old0")) == numbers(store.stream("r/old1")) == [0, 1, 2]
    assert numbers(other) == [] and store.stream("r/old0").chunks()


def test_a_fork_with_sealed_segments_of_its_parent_keeps_no_more_than_its_size(store: hw.Store) -> None:
    parent = store.create_stream("r/parent")
    write(parent, range(10))
    parent.split(0)
    fork = parent.fork("r/fork")
    fork.update(retention=hw.Retention.by_size(20 * KIB))
    for number in range(10, 110):
        write(fork, range(number, number + 1), key=str(number))
    retain(store)
    kept = numbers(fork)
    assert kept[-1] == 109 and 15 <= len(kept) <= 25 and kept[0] >= 10
    assert numbers(parent) == list(range(10))


@pytest.mark.parametrize("how", ["read", "ranges"])
def test_what_was_truncated_before_its_reader_began_is_truncated_and_not_damaged(store: hw.Store, how: str) -> None:
    stream = store.create_stream("a/x", retention=hw.Retention.by_time(timedelta(days=1)))
    write(stream, range(5))
    ranges, events = stream.ranges(), stream.read()
    write(stream, range(5, 6))
    tail = stream.tail()
    stream.truncate(tail)
    with pytest.raises(hw.TruncatedError) as caught:
        list(events if how == "read" else (batch for each in ranges for batch in each.to_batches()))
    assert caught.value.head == tail


@pytest.mark.parametrize("follow", [False, True])
def test_a_reader_that_paused_for_longer_than_its_hold_hears_of_the_truncation(
    store: hw.Store, monkeypatch: pytest.MonkeyPatch, follow: bool
) -> None:
    monkeypatch.setattr(reading, "_HOLD_SECONDS", 0.0)
    # It has not fetched all of it before it pauses.
    monkeypatch.setattr(SegmentCursor._plan_from, "__defaults__", (2,))
    monkeypatch.setattr(SegmentCursor.__init__, "__defaults__", (None, len(EVENT)))
    stream = store.create_stream("a/x", retention=hw.Retention.by_time(timedelta(days=1)))
    write(stream, range(100))
    events = stream.read(follow=follow)
    next(events)
    stream.truncate(stream.tail())
    store.run_upkeep()
    with pytest.raises(hw.TruncatedError):
        for _ in range(99):
            next(events)


@pytest.mark.parametrize("catalog_url", ["postgresql"], indirect=True)
@pytest.mark.parametrize("end", ["untag", "release", "another hold", "time"])
def test_a_hold_of_what_a_tag_keeps_outlives_the_tag(
    store: hw.Store, place: Place, catalog_url: str, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    stream = store.create_stream("a/x")
    store.create_stream("a/y")
    write(stream, range(5))
    head, tail = stream.head(), stream.tail()
    if end == "untag":
        store.tag("t", tail)
    else:
        store.hold("t", head, tail, 3600)
    write(stream, range(5, 6))
    stream.truncate(tail)
    ends = {
        "untag": lambda other: other.untag("t"),
        "release": lambda other: other.release("t"),
        "another hold": lambda other: other.hold("t", other.cut("a/y"), other.cut("a/y"), 3600),
        "time": lambda other: other.run_upkeep(),
    }
    if end == "time":
        store._engine.database.write(lambda tx: tx.run("UPDATE tag SET expires_at = 0"))
    with place.open() as other, psycopg.connect(catalog_url, autocommit=True) as connection:
        ending = threading.Thread(target=ends[end], args=(other,))
        real = tags.hold

        def hold_after_the_end(tx: Tx, *args: Any) -> None:
            """By now it is decided what is kept."""
            monkeypatch.setattr(tags, "hold", real)
            ending.start()
            deadline = time.monotonic() + PATIENCE_SECONDS
            while ending.is_alive() and not connection.execute("SELECT 1 FROM pg_locks WHERE NOT granted").fetchall():
                assert time.monotonic() < deadline
            real(tx, *args)

        monkeypatch.setattr(tags, "hold", hold_after_the_end)
        store.hold("h", head, tail, 3600)
        ending.join()
    store.run_upkeep()
    assert numbers(stream, head, tail) == list(range(5))
