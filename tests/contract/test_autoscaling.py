"""Streams that scale themselves, on real stores and by a clock that the tests turn."""

from __future__ import annotations

import threading
from collections import Counter
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import headwater as hw
from headwater.catalog import loads, streams
from headwater.catalog.database import Tx
from headwater.catalog.loads import Saved
from headwater.model.keys import WHOLE, hash_key
from headwater.model.names import parse_stream_name
from headwater.model.scaling_decision import Change
from headwater.streams.load_samples import LoadState, take_sample
from tests.city import City
from tests.crash.processes import Place

START = datetime(2031, 5, 1, tzinfo=UTC)
MINUTE = timedelta(minutes=1)


def state_of(store: hw.Store, stream: hw.Stream) -> LoadState:
    """What the catalog keeps of a stream's load."""
    sample = store._engine.run(loads.find_sample, stream.id)
    assert sample is not None
    return LoadState.from_json(sample.state)


def write(stream: hw.Stream, count: int, value: bytes = b"x") -> None:
    """So many events, with keys that spread over all segments."""
    with stream.writer() as writer:
        for number in range(count):
            writer.write(value, key=number)


def run(store: hw.Store, stream: hw.Stream, minutes: int, per_minute: int, start: datetime = START, value: bytes = b"x") -> datetime:
    """Write at a constant rate while upkeep samples each minute; returns the time."""
    for _ in range(minutes):
        write(stream, per_minute, value)
        start += MINUTE
        store.scale_streams(start)
    return start


# Policies.


def test_a_stream_begins_with_the_least_segments_of_its_policy(store: hw.Store) -> None:
    policy = hw.Scaling.by_event_rate(10, min_segments=3)
    stream = store.create_stream("a/x", scaling=policy)
    assert len(stream.segments()) == 3 and stream.scaling == policy
    assert len(store.create_stream("a/y", scaling=hw.Scaling.by_data_rate(10)).segments()) == 1


def test_a_floor_that_is_raised_later_is_reached_with_the_next_sample(store: hw.Store) -> None:
    stream = store.create_stream("a/x")
    stream.update(scaling=hw.Scaling.by_event_rate(10, min_segments=5))
    assert store.scale_streams(START).splits == 1
    assert len(stream.segments()) == 5
    stream.update(scaling=hw.Scaling.by_event_rate(10, min_segments=1, max_segments=2))
    assert store.scale_streams(START + MINUTE).merges == 2
    assert store.scale_streams(START + 2 * MINUTE).merges == 1
    assert len(stream.segments()) == 2
    assert [event.reason for event in stream.scaling_history().events] == ["at least 5 segments", *["at most 2 segments"] * 3]


def test_streams_with_one_segment_by_nature_are_not_scaled_by_rate(store: hw.Store) -> None:
    for policy in (hw.Scaling.by_event_rate(10), hw.Scaling.by_data_rate(10)):
        with pytest.raises(hw.InvalidRequestError, match="one segment"):
            store.create_stream("a/bytes", kind="bytes", scaling=policy)
        with pytest.raises(hw.InvalidRequestError, match="one segment"):
            store.create_stream("a/b", kind="bytes", exist_ok=True).update(scaling=policy)


def test_fixed_and_sealed_streams_are_left_alone(store: hw.Store) -> None:
    fixed = store.create_stream("a/fixed")
    sealed = store.create_stream("a/sealed", scaling=hw.Scaling.by_event_rate(1))
    sealed.seal()
    run(store, fixed, 5, 500)
    assert store.scale_streams(START + timedelta(hours=1)) == hw.ScalingReport(0, 0, 0, 0)
    assert len(fixed.segments()) == 1


def test_a_time_without_a_zone_is_refused(store: hw.Store) -> None:
    with pytest.raises(hw.InvalidRequestError, match="zone"):
        store.scale_streams(datetime(2031, 1, 1))


# Sampling.


def test_rates_are_those_that_were_written(store: hw.Store) -> None:
    stream = store.create_stream("a/x", scaling=hw.Scaling.by_event_rate(1000, min_segments=2))
    run(store, stream, 30, 120)
    state = state_of(store, stream)
    assert sum(load.latest for load in state.loads) == pytest.approx(2.0, rel=0.01)
    assert sum(load.rates[3] for load in state.loads) == pytest.approx(2.0, rel=0.01)
    [first, *_, last] = stream.scaling_history().samples
    assert (last.kind, last.target, len(last.rates)) == ("event_rate", 1000, 2)
    assert sum(rate.rate for rate in last.rates) == pytest.approx(2.0, rel=0.01)
    assert first.time == START + MINUTE


def test_what_is_sampled_twice_within_seconds_counts_once(place: Place, store: hw.Store) -> None:
    stream = store.create_stream("a/x", scaling=hw.Scaling.by_event_rate(1000))
    end = run(store, stream, 5, 60)
    with place.open() as other:
        assert other.scale_streams(end + timedelta(seconds=5)).streams_sampled == 0
        # Two that look at the same moment: one of them saves what it saw.
        now_us = int((end + MINUTE).timestamp() * 1e6)
        samples = [each._engine.run(take_sample, stream.id, now_us) for each in (store, other)]
        won = [each._engine.run(loads.save_samples, [s.saved]) for each, s in zip((store, other), samples, strict=True) if s is not None]
    assert won == [{stream.id}, set()]


def test_another_process_goes_on_where_the_first_one_stopped(place: Place, store: hw.Store) -> None:
    stream = store.create_stream("a/x", scaling=hw.Scaling.by_event_rate(2))
    alone = store.create_stream("a/y", scaling=hw.Scaling.by_event_rate(2))
    end = START
    for _ in range(12):
        write(stream, 180)
        write(alone, 180)
        end += MINUTE
        with place.open() as other:
            other.scale_streams(end)
    assert len(stream.segments()) == len(alone.segments()) == 2
    assert stream.scaling_history().events[0].reason.startswith("10-minute rate 3/s")


def test_a_clock_that_goes_back_stops_nothing(store: hw.Store) -> None:
    stream = store.create_stream("a/x", scaling=hw.Scaling.by_event_rate(3))
    run(store, stream, 5, 60)
    earlier = START - timedelta(days=3)
    run(store, stream, 12, 240, earlier)
    assert len(stream.segments()) == 2
    assert sum(load.latest for load in state_of(store, stream).loads) == pytest.approx(4.0, rel=0.05)


def test_splits_and_merges_by_hand_keep_the_rates(store: hw.Store) -> None:
    stream = store.create_stream("a/x", scaling=hw.Scaling.by_event_rate(1000))
    end = run(store, stream, 20, 600)
    stream.split(0, 4)
    write(stream, 600)  # between a split and the next sample
    stream.merge([segment.number for segment in stream.segments()[:2]])
    end = run(store, stream, 1, 0, end)
    state = state_of(store, stream)
    assert len(state.loads) == 3
    for window in range(4):
        assert sum(load.rates[window] for load in state.loads) == pytest.approx(10.0, rel=0.02)
    assert [load.rates[3] for load in state.loads] == pytest.approx([5.0, 2.5, 2.5], rel=0.1)


def test_bytes_are_counted_as_they_were_appended_whatever_becomes_of_them(store: hw.Store) -> None:
    stream = store.create_stream("a/x", scaling=hw.Scaling.by_data_rate(1 << 20))
    value = b"y" * 1000
    end = run(store, stream, 10, 60, value=value)
    [before] = state_of(store, stream).loads
    assert 1000.0 < before.latest < 1100.0, "60 events of 1000 bytes a minute, with what blocks cost"
    # Truncating takes bytes away, tiering compresses them.
    for step in range(6):
        write(stream, 60, value)
        if step % 2:
            stream.truncate(stream.tail())
        stream.update(scaling=hw.Scaling.fixed(1))  # upkeep would sample it, by another clock than this test's
        store.run_upkeep()
        stream.update(scaling=hw.Scaling.by_data_rate(1 << 20))
        end += MINUTE
        store.scale_streams(end)
    [after] = state_of(store, stream).loads
    assert after.latest == pytest.approx(before.latest, rel=0.1)
    assert after.rates[3] == pytest.approx(before.rates[3], rel=0.1)


def test_upkeep_samples_by_the_clock_of_the_catalog(store: hw.Store) -> None:
    stream = store.create_stream("a/x", scaling=hw.Scaling.by_event_rate(10, min_segments=2))
    assert store.run_upkeep().segments_split == 0
    state = state_of(store, stream)
    assert abs(state.since / 1e6 - datetime.now(UTC).timestamp()) < 60 and len(state.loads) == 2


# Transactions.


def backdate(store: hw.Store, id: str, seconds: int) -> None:
    """Let a transaction have begun so long before."""
    us = seconds * 1_000_000
    store._engine.database.write(lambda tx: tx.run("UPDATE txn SET begun_at = begun_at - ? WHERE id = ?", (us, id)))


@pytest.mark.parametrize("is_staged", [False, True])
def test_what_a_transaction_gathered_over_minutes_is_no_peak_at_its_commit(store: hw.Store, is_staged: bool) -> None:
    stream = store.create_stream("a/x", scaling=hw.Scaling.by_event_rate(100))
    now = datetime.now(UTC)
    for minutes in range(20, 0, -1):
        store.scale_streams(now - minutes * MINUTE)
    with store.transaction() as tx:
        for number in range(30_000):
            tx.write("a/x", b"", key=number)
        if is_staged:
            tx.flush()
    backdate(store, tx.id, 600)
    assert store.scale_streams(datetime.now(UTC) + timedelta(seconds=1)).splits == 0
    [load] = state_of(store, stream).loads
    assert load.highest == pytest.approx(50.0, rel=0.05), "50 a second over ten minutes"
    for seconds in (20, 30, 60, 120):
        assert store.scale_streams(datetime.now(UTC) + timedelta(seconds=seconds)).splits == 0


def test_the_same_without_a_transaction_is_a_peak(store: hw.Store) -> None:
    stream = store.create_stream("a/x", scaling=hw.Scaling.by_event_rate(10))
    now = datetime.now(UTC)
    for minutes in range(20, 0, -1):
        store.scale_streams(now - minutes * MINUTE)
    with store.transaction() as tx:
        for number in range(30_000):
            tx.write("a/x", b"", key=number)
    assert store.scale_streams(datetime.now(UTC)).splits == 1
    assert "2-minute rate" in stream.scaling_history().events[0].reason


def test_a_transaction_that_was_open_while_its_stream_scaled_is_counted_once(store: hw.Store) -> None:
    stream = store.create_stream("a/x", scaling=hw.Scaling.by_event_rate(1000))
    now = datetime.now(UTC)
    for minutes in range(20, 0, -1):
        write(stream, 60)
        store.scale_streams(now - minutes * MINUTE)
    tx = store.transaction()
    for number in range(6000):
        tx.write("a/x", b"staged", key=number)
    tx.flush()
    stream.split(0, 2)
    store.scale_streams(now - timedelta(seconds=30))
    tx.commit()
    assert stream.epoch == 2, "it rolled: the segments have other numbers now"
    backdate(store, tx.id, 600)
    store.scale_streams(datetime.now(UTC))
    state = state_of(store, stream)
    assert [load.changed_at for load in state.loads] == [int((now - timedelta(seconds=30)).timestamp() * 1e6)] * 2
    # One a second before; of the 6000 each has half, over ten minutes.
    assert [load.latest for load in state.loads] == pytest.approx([5.4, 5.4], rel=0.1)


# Scaling.


def test_a_decision_from_before_another_change_changes_nothing(store: hw.Store) -> None:
    stream = store.create_stream("a/x", scaling=hw.Scaling.by_event_rate(10))
    split = [Change("split", (0,), tuple(WHOLE.split(2)), "")]
    row = store._engine.run(streams.find_stream, parse_stream_name("a/x"))
    assert row is not None
    stream.update(scaling=hw.Scaling.by_event_rate(99))
    with pytest.raises(hw.ConflictError):
        store._engine.run(loads.apply_changes, row.id, row.epoch, row.scaling, split, 0)
    stream.update(scaling=hw.Scaling.by_event_rate(10))
    stream.split(0, 2)
    with pytest.raises(hw.ConflictError):
        store._engine.run(loads.apply_changes, row.id, row.epoch, row.scaling, split, 0)
    stream.seal()
    with pytest.raises(hw.SealedError):
        store._engine.run(loads.apply_changes, row.id, row.epoch, row.scaling, split, 0)
    assert stream.scaling_history().events == ()


def test_a_stream_that_lost_a_race_is_skipped_and_the_others_scale(store: hw.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    lost, other = (store.create_stream(name, scaling=hw.Scaling.by_event_rate(1)) for name in ("a/x", "a/y"))
    store.scale_streams(START)
    lost.update(scaling=hw.Scaling.by_event_rate(1, min_segments=4))
    other.update(scaling=hw.Scaling.by_event_rate(1, min_segments=4))
    apply = loads.apply_changes.function

    def apply_late(tx: Tx, stream: int, *args: Any) -> object:
        if stream == lost.id:
            tx.run("UPDATE stream SET epoch = epoch + 1 WHERE id = ?", (stream,))
        return apply(tx, stream, *args)

    monkeypatch.setattr(loads.apply_changes, "function", apply_late)
    report = store.scale_streams(START + MINUTE)
    assert (report.streams_sampled, report.splits, report.skipped) == (2, 1, 1)
    assert len(lost.segments()) == 1 and len(other.segments()) == 4


def test_writers_that_never_pause_keep_their_order_while_the_stream_splits_and_merges(store: hw.Store) -> None:
    stream = store.create_stream("a/x", scaling=hw.Scaling.by_event_rate(1, factor=4, max_segments=16))
    is_over = threading.Event()
    given = []

    def work(name: str) -> None:
        number = 0
        with stream.writer(name) as writer:
            while not is_over.is_set():
                writer.write(b"%d" % number, key=f"{name} {number % 7}")
                number += 1
                if number % 500 == 0:
                    writer.flush()
        given.append(number)

    threads = [threading.Thread(target=work, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    now = START
    try:
        while len(stream.segments()) < 13:
            now += MINUTE
            store.scale_streams(now)
        # Hours without a sample: what was written meanwhile is next to nothing in them.
        while len(stream.segments()) > 8:
            now += timedelta(hours=8)
            store.scale_streams(now)
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    last: dict[bytes | None, int] = {}
    for event in stream.read():
        value = int(event.value)
        assert value == last.get(event.key, value % 7 - 7) + 7
        last[event.key] = value
    assert len(last) == 14 and sum((value // 7) + 1 for value in last.values()) == sum(given)


@pytest.mark.slow
def test_a_day_of_taxi_rides_is_stored_in_order_while_the_stream_follows_it(store: hw.Store, catalog_url: str | None) -> None:
    # The morning suffices on the second catalog.
    first, last, step = 0 if catalog_url is None else 4, 24 if catalog_url is None else 12, 4
    city = City(3, low=0.4, zones=60, crowds=3, crowd=2.0)
    zones = sorted((b"zone %d" % number for number in range(60)), key=hash_key)
    stream = store.create_stream("taxi/rides", scaling=hw.Scaling.by_event_rate(1))
    written: Counter[bytes] = Counter()
    now = START + timedelta(hours=first)
    splits = merges = hot = samples = most = 0
    with stream.writer() as writer:
        for minute in range(first * 60, last * 60, step):
            rates = city.rates(minute / 60)
            assert np.max(rates) < 1.0
            rides = np.repeat(np.arange(60), city.chance.poisson(rates * step * 60.0))
            city.chance.shuffle(rides)
            for zone in map(zones.__getitem__, rides):
                written[zone] += 1
                writer.write(b"%d" % written[zone], key=zone)
            writer.flush()
            now += timedelta(minutes=step)
            report = store.scale_streams(now)
            splits, merges = splits + report.splits, merges + report.merges
            if minute > (first * 60) + 40:
                state = state_of(store, stream)
                assert sum(load.rates[2] for load in state.loads) == pytest.approx(city.volume(minute / 60), rel=0.25)
                samples += len(state.loads)
                hot += sum(load.rates[2] > 1.5 for load in state.loads)
                most = max(most, len(state.loads))
    assert hot <= 0.01 * samples
    assert most >= city.volume(min(last, 16)) and most <= 4 * city.volume(min(last, 16)) + 2
    assert splits >= (6 if last == 24 else 1) and merges >= (4 if last == 24 else 0) and splits + merges <= 60

    history = stream.scaling_history()
    assert len(history.events) == splits + merges
    made = {number: event for event in history.events for number in event.made}
    for event in history.events:
        for before in (made[number] for number in event.sealed if number in made and made[number].kind != event.kind):
            assert event.time - before.time >= timedelta(minutes=20 if event.kind == "merge" else 12), "nothing goes back and forth"

    table = stream.to_arrow(columns=["value", "_key"])
    seen: Counter[bytes] = Counter()
    for key, value in zip(table["_key"].to_pylist(), table["value"].to_pylist(), strict=True):
        seen[key] += 1
        assert value == b"%d" % seen[key]
    assert seen == written


# Rows.


def test_history_is_thinned_with_age_and_ends_after_a_week(store: hw.Store, catalog_url: str | None) -> None:
    stream = store.create_stream("a/x", scaling=hw.Scaling.by_event_rate(1))
    minute_us, days = 60_000_000, 8 if catalog_url is None else 1
    start_us = int(START.timestamp() * 1e6)

    def note(tx: Tx) -> None:
        before = None
        for minute in range(0, days * 1440, 3):
            at = start_us + minute * minute_us
            loads.save_samples(tx, [Saved(stream.id, before, at, "[]", '["event_rate",1,[]]')])
            before = at

    store._engine.database.write(note)
    times = [sample.time for sample in stream.scaling_history().samples]
    end = START + timedelta(days=days)
    fine = [time for time in times if time >= end - timedelta(hours=6)]
    assert len(fine) == 120
    kept = min(days, 7) * 144 - 36
    assert kept - 2 <= len(times) - len(fine) <= kept + 2 and times[0] >= end - timedelta(days=7, minutes=10)
    assert all(MINUTE * 3 <= later - earlier <= timedelta(minutes=20) for earlier, later in pairwise(times))


def test_an_idle_stream_notes_nothing_and_of_the_scalings_the_last_are_kept(store: hw.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = store.create_stream("a/x", scaling=hw.Scaling.by_event_rate(10, min_segments=2))
    run(store, stream, 30, 0)
    assert len(stream.scaling_history().samples) == 1, "how its segments were, once"
    monkeypatch.setattr(loads, "_KEPT_EVENTS", 3)
    for segments in range(3, 10):
        stream.update(scaling=hw.Scaling.by_event_rate(10, min_segments=segments))
        store.scale_streams(START + timedelta(hours=segments))
    assert [event.reason for event in stream.scaling_history().events][-1] == "at least 9 segments"
    assert len({event.epoch for event in stream.scaling_history().events}) == 3


def test_a_deleted_stream_leaves_no_rows(store: hw.Store) -> None:
    stream = store.create_stream("a/x", scaling=hw.Scaling.by_event_rate(1))
    run(store, stream, 12, 90)
    assert stream.scaling_history().events
    stream.seal()
    store.delete_stream("a/x")
    for table in ("stream_load", "load_history", "scale_event"):
        assert store._engine.database.query(f"SELECT count(*) FROM {table}")[0][0] == 0
    with pytest.raises(hw.NotFoundError):
        stream.scaling_history()


def test_a_fork_takes_the_policy_and_begins_to_count_anew(store: hw.Store) -> None:
    stream = store.create_stream("a/x", scaling=hw.Scaling.by_event_rate(1000))
    end = run(store, stream, 5, 60)
    fork = stream.fork("a/fork")
    end = run(store, fork, 3, 120, end)
    assert state_of(store, fork).loads[0].latest == pytest.approx(2.0, rel=0.01)
    assert fork.scaling_history().segments[0].events == 360
