"""Upkeep: by one process at a time, in the background or by hand, in short transactions, and never in anybody's way."""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import headwater as hw
from headwater.catalog import leases, objects, sessions, tiers
from headwater.catalog.operations import Operation
from headwater.catalog.sqlite import SqliteDatabase
from headwater.check import check_store
from headwater.runtime import failpoints
from headwater.streams import garbage, retention, upkeep
from tests.crash.processes import Place, wait_until
from tests.operations import fence_all, intercept

# Threads, leases and time-outs: not for a quick run.
pytestmark = pytest.mark.slow

#: What upkeep's own transactions may take, with room for a busy machine; the goal is 20 ms, the benchmark of a quiet one.
LONGEST_SECONDS = 0.1


#: Where the catalog makes no difference: it is the same client.
on_sqlite = pytest.mark.parametrize("catalog_url", ["sqlite"], indirect=True)


def write(stream: hw.Stream, count: int, start: int = 0, padding: bytes = b"") -> None:
    with stream.writer() as writer:
        for number in range(start, start + count):
            writer.write(b"%d|" % number + padding).result()


def values(stream: hw.Stream) -> list[bytes]:
    return [event.value.partition(b"|")[0] for event in stream.read()]


def numbered(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


def holder(store: hw.Store) -> str | None:
    return store._engine.run(leases.find_holder)


def chunks(store: hw.Store) -> int:
    return int(store._engine.database.query("SELECT count(*) FROM extent WHERE form > 0")[0][0])


def upkeep_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "headwater-upkeep"]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The background begins at once and goes round all the time; five blocks are many."""
    monkeypatch.setattr(upkeep, "UPKEEP_DELAY_SECONDS", 0.01)
    monkeypatch.setattr(upkeep, "_ROUND_SECONDS", 0.01)
    monkeypatch.setattr(upkeep, "_GARBAGE_SECONDS", 0.05)
    monkeypatch.setattr(upkeep, "TIER_EXTENTS", 5)
    monkeypatch.setattr(upkeep, "LEASE_SECONDS", 0.6)
    monkeypatch.setattr(leases, "_LEASE_US", 600_000)
    yield
    failpoints.arm("")


def background(place: Place) -> hw.Store:
    return hw.open(place.url, catalog=place.catalog)


# In the background.


def test_the_background_tiers_when_there_are_enough_blocks_and_not_before(place: Place, quick: None) -> None:
    with background(place) as store:
        stream = store.create_stream("u/x")
        write(stream, 4)
        wait_until(lambda: holder(store) is not None)
        time.sleep(0.1)
        assert chunks(store) == 0, "too few"
        write(stream, 4, start=4)
        wait_until(lambda: chunks(store) == 1)
        assert values(stream) == numbered(8)
        wait_until(lambda: store.upkeep_totals.chunks_written == 1)
        assert store.upkeep_totals.events_tiered in (5, 6, 7, 8)
    with place.open() as store:
        assert holder(store) is None, "a closed store leaves the upkeep to others"
        assert store._engine.database.query("SELECT id FROM session") == []


@on_sqlite
@pytest.mark.parametrize("reason", ["bytes", "age", "seal"])
def test_the_background_tiers_by_bytes_age_and_seal(place: Place, quick: None, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason == "bytes":
        monkeypatch.setattr(upkeep, "TIER_BYTES", 10_000)
    if reason == "age":
        monkeypatch.setattr(upkeep, "TIER_SECONDS", 0.2)
    with background(place) as store:
        stream = store.create_stream("u/x")
        write(stream, 1)
        wait_until(lambda: holder(store) is not None)
        if reason == "bytes":
            assert chunks(store) == 0
            write(stream, 1, start=1, padding=b"." * 20_000)
        if reason == "seal":
            assert chunks(store) == 0
            stream.seal()
        wait_until(lambda: chunks(store) == 1)


@on_sqlite
def test_a_long_backlog_is_tiered_without_waiting_for_more_events(place: Place, quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "CHUNK_EXTENTS", 6)
    with place.open(create=True) as store:
        write(store.create_stream("u/x"), 40)
    with background(place) as store:
        wait_until(lambda: store.upkeep_totals.events_tiered >= 36)
        assert values(store.stream("u/x")) == numbered(40)


@on_sqlite
def test_a_program_that_ends_soon_never_takes_the_lease(place: Place) -> None:
    with background(place) as store:
        write(store.create_stream("u/x"), 3)
        assert upkeep_threads()
        assert store._engine.database.query("SELECT * FROM lease") == []
        assert [row[0] for row in store._engine.database.query("SELECT process FROM session") if "upkeep" in row[0]] == []
    assert not upkeep_threads()


@on_sqlite
def test_a_closed_store_leaves_no_thread(place: Place, quick: None) -> None:
    before = set(threading.enumerate())
    for _ in range(3):
        with background(place) as store:
            wait_until(lambda store=store: holder(store) is not None)  # type: ignore[misc]
    wait_until(lambda: not [thread for thread in set(threading.enumerate()) - before if "headwater" in thread.name])


@on_sqlite
def test_with_upkeep_off_there_is_no_thread_and_unpickled_stores_have_none(place: Place) -> None:
    with place.open(create=True) as store:
        store.run_upkeep()
        with pickle.loads(pickle.dumps(store)) as other:
            assert other.streams() == []
            assert not upkeep_threads()


def test_two_backgrounds_take_turns_by_one_lease(place: Place, quick: None) -> None:
    with background(place) as one, background(place) as other:
        stream = one.create_stream("u/x")
        for start in range(0, 40, 8):
            write(stream, 8, start=start)
        wait_until(lambda: chunks(one) > 0)
        assert len(one._engine.database.query("SELECT session FROM lease")) == 1
        first = one if one._upkeep._is_held else other
        assert [store._upkeep._is_held for store in (one, other)].count(True) == 1
        first.close()
        left = other if first is one else one
        wait_until(lambda: left._upkeep._is_held)
        write(left.stream("u/x"), 8, start=40)
        assert values(left.stream("u/x")) == numbered(48)


def test_a_forked_child_has_a_background_of_its_own(place: Place, quick: None) -> None:
    with background(place) as store:
        stream = store.create_stream("u/x")
        wait_until(lambda: store._upkeep._is_held)
        pid = os.fork()
        if not pid:
            code = 1
            try:
                is_fresh = not store._upkeep._is_held and store._upkeep._session is None
                write(stream, 10)
                store.close()
                code = 0 if is_fresh else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        write(stream, 10, start=10)
        wait_until(lambda: chunks(store) > 0)
        assert values(stream) == numbered(20)
        assert store._upkeep._is_held


EXIT = """
import sys, time, headwater as hw
from headwater.catalog import leases
from headwater.streams import upkeep
upkeep.UPKEEP_DELAY_SECONDS = 0.01
store = hw.open(sys.argv[1])
while store._engine.run(leases.find_holder) is None:
    time.sleep(0.01)
print(time.time(), flush=True)
"""


def test_an_interpreter_ends_promptly_while_upkeep_runs_and_lets_go_of_the_lease(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", EXIT, str(tmp_path / "store")], capture_output=True, timeout=100, text=True)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert time.time() - float(done.stdout) < 10
    with Place(str(tmp_path / "store")).open() as store:
        assert store._engine.database.query("SELECT * FROM lease") == []


@on_sqlite
def test_a_log_that_can_not_be_read_is_left_alone_for_a_while_and_said_once(
    place: Place, quick: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with place.open(create=True) as store:
        write(store.create_stream("u/hurt"), 10)
        write(store.create_stream("u/well"), 10)
        log = store._engine.database.query("SELECT log FROM segment ORDER BY log")[0]
        store._engine.database.write(lambda tx: tx.run("UPDATE extent SET crc = crc + 1 WHERE log = ? AND first = 3", log))
    tried: list[int] = []
    list_blocks = tiers.list_blocks.function

    def counted(tx: Any, log: int, start: int) -> Any:
        tried.append(log)
        return list_blocks(tx, log, start)

    monkeypatch.setattr(tiers.list_blocks, "function", counted)
    with caplog.at_level(logging.WARNING), background(place) as store:
        wait_until(lambda: chunks(store) >= 1)
        rounds = store._upkeep.totals.seconds
        wait_until(lambda: store._upkeep.totals.seconds > rounds and store._upkeep.totals.problems != ())
        write(store.stream("u/well"), 10, start=10)
        wait_until(lambda: chunks(store) >= 2)
        assert tried.count(log[0]) == 1
        assert values(store.stream("u/well")) == numbered(20)
    assert len([record for record in caplog.records if "u/hurt" in record.getMessage()]) == 1


@on_sqlite
def test_the_background_waits_and_goes_on_when_the_catalog_was_out_of_reach(
    place: Place, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with background(place) as store:
        stream = store.create_stream("u/x")
        wait_until(lambda: store._upkeep._is_held)
        failures: list[int] = []

        def fail(name: str, run: Callable[[], Any]) -> Any:
            if name == "tiers.list_backlogs" and len(failures) < 5:
                failures.append(1)
                raise hw.UnavailableError("out of reach") if len(failures) % 2 else RuntimeError("what nobody thought of")
            return run()

        intercept(monkeypatch, store, fail)
        write(stream, 8)
        wait_until(lambda: chunks(store) == 1)
        assert len(failures) == 5


# By hand.


def test_a_round_by_hand_says_what_it_did_and_the_next_has_nothing_to_do(store: hw.Store) -> None:
    write(store.create_stream("u/x"), 20)
    report = store.run_upkeep()
    assert (report.chunks_written, report.events_tiered, report.problems) == (1, 20, ())
    assert report.bytes_tiered > 0 and report.bytes_stored > 0 and report.seconds > 0
    again = store.run_upkeep()
    assert (again.chunks_written, again.events_tiered, again.objects_deleted, again.rows_deleted) == (0, 0, 0, 0)
    assert store.upkeep_totals.events_tiered == 20
    assert holder(store) is None


@on_sqlite
def test_of_two_by_hand_the_second_waits_and_says_for_whom(place: Place, store: hw.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "_HAND_SECONDS", 0.3)
    with place.open() as other:
        assert store._upkeep._take(by_hand=True) is None
        with pytest.raises(hw.UnavailableError, match=str(os.getpid())):
            other.run_upkeep()
        assert len(store._engine.database.query("SELECT id FROM session")) == 1, "the one that gave up leaves nothing"
        monkeypatch.setattr(upkeep, "_HAND_SECONDS", 60.0)
        timer = threading.Timer(0.1, store._upkeep._give_up)
        timer.start()
        other.run_upkeep()
        timer.join()


def test_by_hand_goes_over_the_background_which_comes_back(place: Place, quick: None) -> None:
    with background(place) as store, place.open() as other:
        stream = store.create_stream("u/x")
        wait_until(lambda: store._upkeep._is_held)
        write(stream, 3)
        assert other.run_upkeep().events_tiered == 3
        write(stream, 7, start=3)
        wait_until(lambda: chunks(store) >= 2)
        assert values(stream) == numbered(10)


@on_sqlite
def test_by_hand_and_background_of_one_store_share_it(place: Place, quick: None) -> None:
    with background(place) as store:
        stream = store.create_stream("u/x")
        for start in range(0, 40, 4):
            write(stream, 4, start=start)
            store.run_upkeep()
        assert values(stream) == numbered(40)
        wait_until(lambda: store._upkeep._is_held)


# Two at once, by force.


def test_of_two_upkeeps_at_once_the_older_is_fenced_before_its_swap_and_nothing_is_lost(place: Place, store: hw.Store) -> None:
    stream = store.create_stream("u/x")
    write(stream, 10)
    with place.open() as zombie:
        storage = zombie._engine.storage
        written = storage.write

        def take_over(key: str, produce: Any, push: Any = None) -> None:
            written(key, produce, push)
            store._engine.database.write(lambda tx: tx.run("UPDATE lease SET expires_at = 0"))
            assert store.run_upkeep().events_tiered == 10

        storage.write = take_over  # type: ignore[method-assign]
        with pytest.raises(hw.FencedError):
            zombie.run_upkeep()
        storage.write = written  # type: ignore[method-assign]
    assert values(stream) == numbered(10) and chunks(store) == 1
    store.run_upkeep()
    assert check_store(store).unused_count == 0, "the zombie's chunk is gone"


def test_an_upkeep_that_lost_its_lease_forgets_no_rows(place: Place, store: hw.Store) -> None:
    stream = store.create_stream("u/x")
    write(stream, 2, padding=b"." * 100_000)
    with place.open() as zombie:
        storage = zombie._engine.storage
        delete = storage.delete
        fence_all(store._engine.database)

        def take_over(keys: Any, rest: Any = None) -> None:
            storage.delete = delete  # type: ignore[method-assign]
            store._engine.database.write(lambda tx: tx.run("UPDATE lease SET expires_at = 0"))
            assert store._upkeep._take(by_hand=True) is None
            delete(keys)

        storage.delete = take_over  # type: ignore[method-assign]
        with pytest.raises(hw.FencedError):
            zombie.run_upkeep()
        assert holder(store) is not None
        store._upkeep._give_up()
    assert values(stream) == numbered(2)
    store.run_upkeep()
    assert values(stream) == numbered(2) and check_store(store).unused_count == 0


def test_a_fenced_background_goes_on_with_a_new_session(place: Place, quick: None) -> None:
    with background(place) as store:
        stream = store.create_stream("u/x")
        wait_until(lambda: store._upkeep._is_held)
        first = store._upkeep._session
        store._engine.database.write(lambda tx: tx.run("DELETE FROM lease"))
        write(stream, 8)
        wait_until(lambda: chunks(store) == 1)
        assert store._upkeep._session not in (None, first)
        assert values(stream) == numbered(8)


def test_a_background_that_was_fenced_leaves_the_lease_to_one_who_waits_to_do_it_by_hand(
    place: Place, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with background(place) as store:
        own = store._upkeep
        wait_until(lambda: own._is_held)
        fenced, give_up = threading.Event(), own._give_up

        def slowly() -> None:
            if threading.current_thread() in upkeep_threads():
                fenced.set()
                time.sleep(0.3)
            give_up()

        monkeypatch.setattr(own, "_give_up", slowly)
        store._engine.database.write(lambda tx: tx.run("DELETE FROM lease"))
        assert fenced.wait(10)
        with store.pause_upkeep():
            time.sleep(0.4)
            assert own._is_held and own._session is not None


# Lost answers.


@pytest.mark.parametrize(
    "operation",
    [tiers.swap, leases.take, sessions.begin_session, objects.forget, objects.prune, leases.give_up],
    ids=lambda operation: operation.name,
)
def test_an_operation_whose_answer_is_lost_runs_again_and_changes_nothing(
    store: hw.Store, operation: Operation[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert operation.repeatable
    stream = store.create_stream("u/x")
    write(stream, 20, padding=b"." * 7000)
    write(stream, 3, start=20, padding=b"." * 100_000)
    lost: list[str] = []

    def losing(name: str, run: Callable[[], Any]) -> Any:
        if name == operation.name and not lost:
            lost.append(name)
            run()
        return run()

    intercept(monkeypatch, store, losing)
    fence_all(store._engine.database)
    for _ in range(3):
        assert store.run_upkeep().problems == ()
    assert lost == [operation.name]
    assert values(stream) == numbered(23)
    assert chunks(store) >= 1
    report = check_store(store)
    assert report.ok and report.unused_count == 0
    assert store._engine.database.query("SELECT count(*) FROM inline_block") == [(0,)]


# How long the lock is held.


class Held:
    """How long each transaction held SQLite's lock, by what it did."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds: list[tuple[float, str]] = []
        write = SqliteDatabase.write

        def timed(database: SqliteDatabase, work: Callable[..., Any], **options: Any) -> Any:
            began: list[float] = []

            def begun(tx: Any) -> Any:
                began.append(time.perf_counter())
                return work(tx)

            try:
                return write(database, begun, **options)
            finally:
                name = next((cell.cell_contents.__name__ for cell in work.__closure__ or () if callable(cell.cell_contents)), "?")
                self.seconds.append((time.perf_counter() - began[0], name))

        monkeypatch.setattr(SqliteDatabase, "write", timed)

    def longest(self) -> tuple[float, str]:
        found, self.seconds = max(self.seconds), []
        return found


def repeat_last_block(store: hw.Store, stream: hw.Stream, count: int) -> None:
    """As if the last event had been written `count` times more, each in a block of its own: quicker than waiting for each."""

    def work(tx: Any) -> None:
        log, tail = tx.run("SELECT log, tail FROM segment WHERE stream = ?", (stream.id,))[0]
        length, crc, at, data = tx.run(
            "SELECT e.length, e.crc, e.appended_at, b.data FROM extent e JOIN inline_block b ON b.log = e.log AND b.first = e.first "
            "WHERE e.log = ? AND e.first = ?",
            (log, tail - 1),
        )[0]
        columns = "log, first, count, length, crc, appended_at, position"
        firsts = range(tail, tail + count)
        tx.defer(f"INSERT INTO extent ({columns}) VALUES (?, ?, 1, ?, ?, ?, 0)", [(log, first, length, crc, at) for first in firsts])
        tx.defer("INSERT INTO inline_block (log, first, data) VALUES (?, ?, ?)", [(log, first, data) for first in firsts])
        tx.run("UPDATE segment SET tail = tail + ?, bytes = bytes + ? WHERE log = ?", (count, count * length, log))

    store._engine.database.write(work)


@pytest.mark.slow
def test_no_transaction_of_upkeep_holds_the_lock_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hw.open(tmp_path / "store", upkeep=False) as store:
        small, large = store.create_stream("u/small"), store.create_stream("u/large")
        write(small, 1)
        write(large, 1, padding=b"." * 60_000)
        repeat_last_block(store, small, 4500)
        repeat_last_block(store, large, 500)
        fork = small.fork("u/fork")
        assert check_store(store).ok
        held = Held(monkeypatch)
        assert store.run_upkeep().chunks_written == 4
        longest = {"tiering": held.longest()}
        write(large, 1, padding=b"." * 60_000)
        repeat_last_block(store, large, 500)
        held.longest()
        large.truncate(large.tail())
        longest["truncation"] = held.longest()
        write(small, 1)
        repeat_last_block(store, small, 4500)
        for stream in (small, fork):
            stream.seal()
            held.longest()
            store.delete_stream(stream.name)
            longest[f"deletion of {stream.name}"] = held.longest()
        store.run_upkeep()
        longest["garbage"] = held.longest()
        print({what: f"{seconds * 1000:.1f} ms in {name}" for what, (seconds, name) in longest.items()})
        assert max(longest.values())[0] < LONGEST_SECONDS, longest


def test_by_hand_never_goes_on_with_a_session_that_was_fenced(place: Place, store: hw.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = store.create_stream("u/events")
    write(stream, 20)
    rounds = store.upkeep_rounds(0.01)
    assert next(rounds) is not None
    # It stands still, and another one takes over: what the first stores from now on is an orphan to it.
    store._heart.close()
    with place.open() as other:
        fence_all(other._engine.database)
        real = failpoints.reach

        def collect_orphans_meanwhile(name: str) -> None:
            real(name)
            if name == "tier.written":
                session = other._engine.run(sessions.begin_session, "another")
                monkeypatch.setattr(leases, "hold", lambda tx, session: None)
                garbage.collect_orphans(other._engine, session, pytest.fail)
                monkeypatch.setattr(leases, "hold", real_hold)

        real_hold = leases.hold
        monkeypatch.setattr(failpoints, "reach", collect_orphans_meanwhile)
        assert store.run_upkeep().events_tiered == 20
        monkeypatch.undo()
        assert values(other.stream("u/events")) == numbered(20)


def test_a_session_that_was_fenced_changes_nothing_though_it_has_the_lease(store: hw.Store) -> None:
    write(store.create_stream("u/events"), 20)
    with store.pause_upkeep(), pytest.raises(hw.FencedError):
        fence_all(store._engine.database)
        chunks_made = store._upkeep._chunks()
        (backlog,) = store._engine.run(tiers.list_backlogs)
        chunks_made.tier(store.stream("u/events")._ref, backlog)
    assert chunks(store) == 0


def test_a_pause_that_was_lost_says_so(place: Place, store: hw.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "LEASE_SECONDS", 0.2)
    monkeypatch.setattr(leases, "_LEASE_US", 200_000)
    with place.open() as other, pytest.raises(hw.FencedError, match="the pause ended before its block"), store.pause_upkeep():
        store._heart.close()
        rounds = other.upkeep_rounds(0.05)
        wait_until(lambda: next(rounds) is not None)


def test_retention_that_was_under_way_goes_no_further_in_a_pause(place: Place, store: hw.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("u/one", "u/two")
    for name in names:
        write(store.create_stream(name, retention=hw.Retention.by_size(100)), 20, padding=bytes(100))
    arrived, may_go_on = threading.Event(), threading.Event()

    def truncate_late(name: str, run: Callable[[], Any]) -> Any:
        if name == "retention.truncate_retained":
            arrived.set()
            assert may_go_on.wait(60)
        return run()

    with place.open() as other:
        intercept(monkeypatch, other, truncate_late)
        background = threading.Thread(target=lambda: next(other.upkeep_rounds(60)))
        background.start()
        assert arrived.wait(60)
        with store.pause_upkeep():
            may_go_on.set()
            background.join()
            assert [len(values(store.stream(name))) for name in names] == [20, 20]


def test_a_beat_of_the_session_before_takes_nothing_from_the_next(store: hw.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    own = store._upkeep
    at_renewal, may_go_on = threading.Event(), threading.Event()
    real_round = own._round

    def renew_late(name: str, run: Callable[[], Any]) -> Any:
        if name == "leases.renew":
            at_renewal.set()
            assert may_go_on.wait(60)
        return run()

    def round_after_the_beat(*, eager: bool) -> Any:
        may_go_on.set()
        beat.join()
        return real_round(eager=eager)

    intercept(monkeypatch, store, renew_late)
    monkeypatch.setattr(own, "_round", round_after_the_beat)
    with store.pause_upkeep():
        beat = threading.Thread(target=own._beat)
        beat.start()
        assert at_renewal.wait(60)
    store.run_upkeep()


def test_a_segment_whose_last_hold_goes_while_it_is_truncated_is_forgotten(
    place: Place, store: hw.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = store.create_stream("u/events")
    write(stream, 5)
    store.hold("h", stream.head(), stream.tail(), 600)
    stream.split(0)
    stream.truncate(stream.tail())
    # As if the hold had been released in the midst of it.
    store._engine.database.write(lambda tx: tx.run_all([("DELETE FROM pin", ()), ("DELETE FROM tag", ())]))
    store.run_upkeep()
    assert store._engine.database.query("SELECT number FROM segment ORDER BY number") == [(1,), (2,)]


@on_sqlite
def test_a_fault_in_one_duty_does_not_keep_upkeep_from_the_others(store: hw.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = store.create_stream("u/events")
    write(stream, 5)

    def fail(*_: Any) -> int:
        raise ValueError("a fault of ours")

    monkeypatch.setattr(retention, "retain", fail)
    report = store.run_upkeep()
    assert report.problems == ("retention: ValueError('a fault of ours')",)
    assert stream.chunks() and values(stream) == numbered(5)


def test_tiering_goes_on_while_somebody_writes_all_the_time(place: Place, quick: None) -> None:
    done = threading.Event()
    with background(place) as store:
        backlog, steady = store.create_stream("up/backlog"), store.create_stream("up/steady")

        def write_steadily() -> None:
            with steady.writer() as writer:
                while not done.is_set():
                    writer.write(b"steady").result()

        writing = threading.Thread(target=write_steadily)
        writing.start()
        try:
            write(backlog, 60, padding=bytes(200_000))
            backlog.seal()
            wait_until(lambda: sum(chunk.count for chunk in backlog.chunks()) == 60)
            assert store._engine.pace.is_busy(), "it was written to all the time"
        finally:
            done.set()
            writing.join()
        assert values(backlog) == numbered(60)
