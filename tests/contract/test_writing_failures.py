"""Failures that touch nobody else, many threads, and who stores: the flusher, or one who waits."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headwater as hw
from headwater.catalog.flushes import Flush
from headwater.catalog.parts import Refused
from headwater.runtime import failpoints
from headwater.segments import pending
from headwater.segments.engine import Engine
from headwater.segments.lanes import Run
from headwater.segments.routing import Router
from tests.contract.writing import WAIT_SECONDS, batch, blocked, values
from tests.crash.processes import wait_until

# Failures.


@pytest.mark.parametrize(
    ("size", "begun"), [(10, False), (200_000, False), (200_000, True)], ids=["inline", "in the journal", "while they are written"]
)
def test_events_that_cannot_be_encoded_fail_alone(local_store: hw.Store, monkeypatch: pytest.MonkeyPatch, size: int, begun: bool) -> None:
    bad, good = local_store.create_stream("a/bad"), local_store.create_stream("a/good")
    encode = pending._encode

    def fail() -> Any:
        raise pa.ArrowInvalid("no such bytes")

    def refuse(stream: Any, *rest: Any) -> Any:
        if stream.name == "a/bad":
            if not begun:
                fail()
            for _, block in (found := encode(stream, *rest))[0]:
                block.make = fail
            return found
        return encode(stream, *rest)

    monkeypatch.setattr(pending, "_encode", refuse)
    failing, neighbour = bad.writer(), good.writer()
    with blocked(local_store):
        lost = [failing.write(bytes(size)) for _ in range(3)]
        kept = [neighbour.write(bytes(size)) for _ in range(3)]
    for ack in lost:
        with pytest.raises(hw.HeadwaterError, match="no such bytes"):
            ack.result(WAIT_SECONDS)
    assert [ack.result(WAIT_SECONDS) for ack in kept] == [(0, 0), (0, 1), (0, 2)]
    with pytest.raises(hw.HeadwaterError, match="no such bytes"):
        failing.write(b"more")
    failing.abandon()
    neighbour.close()
    monkeypatch.undo()
    with bad.writer() as writer:
        assert writer.write(b"again").result(WAIT_SECONDS) == (0, 0)


def test_one_writer_s_failure_does_not_touch_its_neighbours_in_the_same_flush(store: hw.Store) -> None:
    good, doomed, deleted = (store.create_stream(f"a/{name}") for name in ("good", "doomed", "deleted"))
    fenced = good.writer("w")
    with good.writer() as neighbour, good.writer("w") as newer:
        failing: list[tuple[hw.Writer, type[hw.HeadwaterError]]]
        failing = [(doomed.writer(), hw.SealedError), (deleted.writer(), hw.NotFoundError), (fenced, hw.FencedError)]
        for writer in (*(writer for writer, _ in failing[:2]), neighbour, newer):
            writer.write("before")
            writer.flush()
        doomed.seal()
        deleted.seal()
        store.delete_stream("a/deleted")
        with blocked(store):
            # All of this is gathered while the catalog is held, and goes into one flush.
            lost = [writer.write("lost", key="k") for writer, _ in failing]
            kept = [writer.write("together", key="k") for writer in (neighbour, newer)]
        assert sorted(ack.result(WAIT_SECONDS) for ack in kept) == [(0, 2), (0, 3)]
        for ack, (writer, error) in zip(lost, failing, strict=True):
            with pytest.raises(error):
                ack.result(WAIT_SECONDS)
            # Every writer is closed here: one that is left open tells its error to the store's `close`, unless it is collected before.
            with pytest.raises(error):
                writer.close()
        neighbour.write("after")
    assert sorted(values(good)) == [b"after", b"before", b"before", b"together", b"together"]
    assert values(doomed) == [b"before"]


def test_a_stream_sealed_while_many_write_loses_only_its_own_later_events(store: hw.Store) -> None:
    streams = [store.create_stream(f"a/{n}") for n in range(4)]
    acked: dict[str, list[bytes]] = {stream.name: [] for stream in streams}
    sealed = threading.Event()

    def write(stream: hw.Stream) -> None:
        writer = stream.writer()
        try:
            for number in range(300):
                value = b"%d" % number
                writer.write(value).result(WAIT_SECONDS)
                acked[stream.name].append(value)
                if number == 20 and stream is streams[0]:
                    stream.seal()
                    sealed.set()
        except hw.SealedError:
            writer.abandon()
        else:
            writer.close()

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(write, stream) for stream in streams]:
            future.result(WAIT_SECONDS)
    assert sealed.is_set()
    assert {stream.name: values(stream) for stream in streams} == acked
    assert [len(found) for found in acked.values()] == [21, 300, 300, 300]


def test_after_unavailable_events_stay_buffered_and_go_first_in_order(local_store: hw.Store) -> None:
    stream = local_store.create_stream("a/x")
    payload = bytes(100_000)  # too large for the catalog: it goes to the journal, which fails
    with stream.writer("w") as writer:
        failpoints.arm("journal.written=error@1")
        try:
            ack = writer.write(b"first" + payload)
            with pytest.raises(hw.UnavailableError):
                writer.flush()
        finally:
            failpoints.arm("")
        writer.write("second")
        writer.flush()
        assert ack.result(WAIT_SECONDS) == (0, 0)
        assert writer.last_number == 2
    assert [value[:6] for value in values(stream)] == [b"first\0", b"second"]


def test_after_any_other_error_the_writer_is_finished_and_another_goes_on(store: hw.Store) -> None:
    stream = store.create_stream("a/x")
    writer = stream.writer("w")
    stream.seal()
    ack = writer.write("x")
    with pytest.raises(hw.SealedError):
        writer.flush()
    for call in (lambda: writer.write("y"), lambda: writer.write_batch(batch(b"y")), lambda: ack.result(WAIT_SECONDS), writer.flush):
        with pytest.raises(hw.SealedError):
            call()
    writer.abandon()


def test_events_of_one_key_keep_their_order_across_splits_and_merges(store: hw.Store) -> None:
    stream = store.create_stream("a/x")
    with stream.writer() as writer:
        for round in range(12):
            for number in range(40):
                writer.write(b"%d" % (round * 40 + number), key=number % 7)
            opened = sorted(stream.segments(), key=lambda segment: segment.start)
            if round % 3 == 2:
                stream.merge([opened[0].number, opened[1].number])
            else:
                stream.split(opened[round % len(opened)].number)
            writer.write_batch(pa.table({"value": [b"%d" % (round * 40 + 39)], "k": [round % 7]}), key="k")
    by_key: dict[bytes, list[int]] = {}
    for event in stream.read():
        by_key.setdefault(event.key, []).append(int(event.value))
    assert sum(map(len, by_key.values())) == 12 * 41
    assert all(found == sorted(found) for found in by_key.values())


def test_threads_that_change_at_every_turn_lose_nothing_and_get_the_right_acks(local_store: hw.Store) -> None:
    """Events are put into an open run without a lock, while flushes close it: each ack points at its own event."""
    stream = local_store.create_stream("a/x", scaling=hw.Scaling.fixed(4))
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with stream.writer() as writer, ThreadPoolExecutor(5) as pool:
            ended = threading.Event()

            def write(thread: int) -> list[tuple[hw.Ack, bytes]]:
                given = [b"%d-%d" % (thread, number) for number in range(3000)]
                return [(writer.write(value, key=value), value) for value in given]

            def flush() -> None:
                while not ended.is_set():
                    writer.flush()

            flushing = pool.submit(flush)
            try:
                acks = [found for future in [pool.submit(write, thread) for thread in range(4)] for found in future.result()]
            finally:
                ended.set()
            flushing.result()
            expected = {ack.result(WAIT_SECONDS): value for ack, value in acks}
    finally:
        sys.setswitchinterval(before)
    assert len(expected) == 12_000
    assert {event.position: event.value for event in stream.read()} == expected


def test_a_flush_waits_for_a_thread_that_has_a_place_and_has_not_filled_it(local_store: hw.Store) -> None:
    """As a debugger can stop one there: the event is neither lost nor stored as nothing."""
    stream = local_store.create_stream("a/x")
    with stream.writer() as writer:
        writer.write(b"0").result(WAIT_SECONDS)
        with blocked(local_store):
            acks = [writer.write(b"%d" % number) for number in range(1, 4)]
            run = writer._lane.run
            assert run is not None
            place = next(run.places)
        with pytest.raises(TimeoutError):
            acks[0].result(0.2)
        run.values[place] = b"4"
        acks[0].result(WAIT_SECONDS)
    assert values(stream) == [b"0", b"1", b"2", b"3", b"4"]


def test_many_threads_share_one_writer(store: hw.Store) -> None:
    stream = store.create_stream("a/x", scaling=hw.Scaling.fixed(2))
    with stream.writer() as writer, ThreadPoolExecutor(4) as pool:

        def write(thread: int) -> None:
            for number in range(500):
                writer.write(b"%d" % number, key=thread)

        for future in [pool.submit(write, thread) for thread in range(4)]:
            future.result(WAIT_SECONDS)
    by_key: dict[bytes, list[int]] = {}
    for event in stream.read():
        by_key.setdefault(event.key, []).append(int(event.value))
    assert by_key == {b"%d" % thread: list(range(500)) for thread in range(4)}


def test_a_finished_writer_keeps_nothing_of_what_it_refuses(local_store: hw.Store) -> None:
    stream = local_store.create_stream("a/x")
    writer = stream.writer("id")
    other = stream.writer("id")
    refused = 0
    with pytest.raises(hw.FencedError):
        writer.write("late").result()
    for _ in range(50):
        with pytest.raises(hw.FencedError) as caught:
            writer.write(bytes(1000))
        refused += 1
    depth = len(list(traceback.walk_tb(caught.value.__traceback__)))
    assert depth < 10, f"{depth} calls are kept after {refused} refusals"
    for each in (writer, other):
        each.close()


def test_a_deleted_stream_leaves_nothing_behind_in_the_process_that_wrote_to_it(store: hw.Store) -> None:
    for number in range(3):
        stream = store.create_stream(f"a/x{number}")
        with stream.writer() as writer:
            writer.write("one")
        with store.transaction() as tx:
            tx.write(stream.name, "two")
        store.delete_stream(stream.name, seal=True)
    assert not store._flusher._lanes and not store._flusher._storer.router._routes and not store._router._routes


def test_an_error_of_the_caller_s_signal_handler_reaches_the_caller_as_it_is(
    local_store: hw.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = local_store.create_stream("a/x")
    writer = stream.writer()
    writer.write("first").result()
    wait_until_idle(local_store)
    commit_flush = Engine.commit_flush

    def alarm(tx: Any) -> None:
        raise TimeoutError("my own limit")

    def interrupted(self: Engine, flush: Flush) -> Any:
        found = commit_flush(self, flush)
        if threading.current_thread() is threading.main_thread():
            monkeypatch.undo()
            self.database.write(alarm)
        return found

    monkeypatch.setattr(Engine, "commit_flush", interrupted)
    with pytest.raises(TimeoutError, match="my own limit"):
        writer.write("second").result()
    writer.close()
    assert values(stream) == [b"first", b"second"]


def test_a_refusal_for_an_unknown_reason_ends_its_lane(local_store: hw.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = local_store.create_stream("a/x")
    writer, other = stream.writer("source"), local_store.create_stream("a/y").writer()
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "commit_flush", lambda engine, flush: [Refused("a new reason", {}) for _ in flush.parts])
        ack = writer.write(b"1")
        with pytest.raises(hw.HeadwaterError, match="events for a/x were refused: a new reason"):
            ack.result(WAIT_SECONDS)
    with pytest.raises(hw.HeadwaterError, match="a new reason"):
        writer.write(b"2")
    writer.abandon()
    other.write(b"1").result(WAIT_SECONDS)
    other.close()
    assert values(stream) == []


def test_events_whose_segments_cannot_be_looked_up_now_stay_in_order(local_store: hw.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = [local_store.create_stream(f"a/{number}") for number in range(3)]
    route, failures = Router.route, iter(range(4))

    def fail_first(router: Router, *args: Any) -> Any:
        if next(failures, None) is not None:
            raise hw.UnavailableError("the catalog is away")
        return route(router, *args)

    monkeypatch.setattr(Router, "route", fail_first)
    with ExitStack() as stack:
        writers = [stack.enter_context(stream.writer()) for stream in streams]
        acks = [writer.write(b"%d" % number) for number in range(100) for writer in writers]
        for ack in acks:
            while not ack.done:
                with suppress(hw.UnavailableError):
                    ack.result(WAIT_SECONDS)
    assert next(failures, None) is None, "no look-up failed"
    assert [values(stream) for stream in streams] == 3 * [[b"%d" % number for number in range(100)]]


# Who stores: the flusher's thread, or one who waits.


@pytest.fixture
def committed_by(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """The threads that committed a flush, one after the other."""
    threads: list[threading.Thread] = []
    commit_flush = Engine.commit_flush

    def noting(self: Engine, flush: Any) -> Any:
        threads.append(threading.current_thread())
        return commit_flush(self, flush)

    monkeypatch.setattr(Engine, "commit_flush", noting)
    return threads


def wait_until_idle(store: hw.Store) -> None:
    wait_until(lambda: store._flusher._is_idle)


def test_who_waits_for_a_few_events_commits_them_while_the_flusher_is_idle(store: hw.Store, committed_by: list[threading.Thread]) -> None:
    stream = store.create_stream("a/x", scaling=hw.Scaling.fixed(2))
    for id in (None, "named"):
        with stream.writer(id) as writer:
            writer.write("first", key="k").result(WAIT_SECONDS)
            committed_by.clear()
            # Whoever is first; the flusher's thread, woken by `write`, may be.
            for number in range(50):
                wait_until_idle(store)
                assert writer.write(str(number), key="k").result().number == number + 1 + (51 if id else 0)
            assert committed_by.count(threading.current_thread()) > 10
            committed_by.clear()
            wait_until_idle(store)
            writer.write("with a deadline", key="other").result(WAIT_SECONDS)
            wait_until_idle(store)
            writer.write("x" * 100_000, key="other").result()
            assert threading.current_thread() not in committed_by
    assert [event.value for event in stream.read() if event.key == b"k"] == 2 * [b"first", *(b"%d" % number for number in range(50))]


def test_what_failed_is_told_to_all_who_wait_with_its_facts(local_store: hw.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with local_store.create_stream("a/x").writer() as writer:
        with monkeypatch.context() as patch:

            def fail(engine: Engine, flush: Flush) -> Any:
                raise hw.UnavailableError("no space left", path="/full")

            patch.setattr(Engine, "commit_flush", fail)
            ack = writer.write(b"1")
            for wait in (ack.result, writer.flush):
                with pytest.raises(hw.UnavailableError, match="no space left") as caught:
                    wait()
                assert caught.value.facts == {"path": "/full"}
        assert ack.result() == hw.Position(0, 0)


def test_what_came_while_another_thread_stored_is_stored_soon_also_if_that_one_could_not_tell(
    local_store: hw.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    flusher = local_store._flusher
    with local_store.create_stream("a/x").writer() as writer, local_store.create_stream("a/y").writer() as other:
        writer.write(b"begins the session").result()
        time.sleep(0.3)
        committing, go_on = threading.Event(), threading.Event()
        commit = Engine.commit_flush

        def slowly(engine: Engine, flush: Flush) -> Any:
            committing.set()
            assert go_on.wait(WAIT_SECONDS)
            return commit(engine, flush)

        monkeypatch.setattr(Engine, "commit_flush", slowly)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(lambda: writer.write(b"waited for").result())
            assert committing.wait(WAIT_SECONDS)
            ack = other.write(b"came meanwhile")
            time.sleep(0.1)
            monkeypatch.setattr(flusher._intake.work, "notify", lambda n=1: None)  # As after a Ctrl-C in the one that waits.
            go_on.set()
            waiting.result(WAIT_SECONDS)
        deadline = time.monotonic() + 5
        while not ack.done and time.monotonic() < deadline:
            time.sleep(0.01)
        monkeypatch.undo()
        assert ack.done


def test_an_event_for_which_nobody_waits_is_stored_soon_also_right_after_acks(store: hw.Store) -> None:
    with store.create_stream("a/b").writer() as writer:
        for acks in (0, 1, 2, 50):
            for _ in range(acks):
                writer.write(b"waited for").result()
            ack = writer.write(b"not waited for")
            deadline = time.monotonic() + 1
            while not ack.done and time.monotonic() < deadline:
                time.sleep(0.001)
            assert ack.done, f"after {acks} acks"


@pytest.mark.parametrize("name", ["append.begun", "append.applied"])
def test_an_error_in_the_thread_that_waits_leaves_its_event_to_be_stored_once(local_store: hw.Store, name: str) -> None:
    stream = local_store.create_stream("a/x")
    with stream.writer() as writer:
        writer.write("first").result()
        for number in range(10):
            wait_until_idle(local_store)
            failpoints.arm(f"{name}=error@1")
            try:
                ack = writer.write(str(number))
                with suppress(hw.UnavailableError):
                    ack.result()
            finally:
                failpoints.arm("")
            assert ack.result(WAIT_SECONDS) == (0, number + 1)
    assert values(stream) == [b"first", *(b"%d" % number for number in range(10))]


def test_who_waits_finds_its_segment_sealed_and_its_event_goes_to_the_next_one(store: hw.Store) -> None:
    stream = store.create_stream("a/x")
    with stream.writer() as writer:
        writer.write("0", key="k").result()
        for number in range(1, 6):
            [segment] = [segment for segment in stream.segments() if segment.start == 0.0]
            stream.split(segment.number)
            wait_until_idle(store)
            place = writer.write(str(number), key="k").result()
            assert place.segment in {segment.number for segment in stream.segments()}
    assert values(stream) == [b"%d" % number for number in range(6)]


def test_a_ctrl_c_before_the_first_event_of_a_run_is_no_event(local_store: hw.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = local_store.create_stream("a/x")

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with stream.writer() as writer:
        for number in range(3):
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(Run, "put", interrupted)
                writer.write("lost")
            if number:
                writer.flush()
            writer.write(str(number)).result(WAIT_SECONDS)
    assert values(stream) == [b"0", b"1", b"2"]


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(3))
def test_what_threads_gave_before_a_close_is_stored_when_it_returns_and_the_rest_is_refused(local_store: hw.Store, attempt: int) -> None:
    stream = local_store.create_stream("a/closing")
    writer = stream.writer()
    given, refused = [0] * 6, []

    def write(index: int) -> None:
        try:
            while True:
                # Every other thread with text, which is not put into an open run as it is.
                writer.write(b"%d.%d" % (index, given[index]) if index % 2 else f"{index}.{given[index]}")
                given[index] += 1
        except hw.InvalidRequestError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=write, args=(index,)) for index in range(len(given))]
    for thread in threads:
        thread.start()
    while sum(given) < 5000:
        time.sleep(0.001)
    writer.close()
    stored = sum(segment.events for segment in stream.segments())
    for thread in threads:
        thread.join(WAIT_SECONDS)
    assert refused == ["this writer is closed"] * len(given)
    # One event of each thread may be on its way into a run that was open when the close began.
    assert stored <= sum(given) <= stored + len(given)
    local_store._flusher.close()
    assert sorted(values(stream)) == sorted(b"%d.%d" % (index, number) for index in range(len(given)) for number in range(given[index]))


def test_an_error_that_ended_a_writer_is_told_by_its_close_and_not_again_by_the_stores(tmp_path: Path) -> None:
    with hw.open(tmp_path / "store") as store:
        stream = store.create_stream("a/sealed")
        writer = stream.writer()
        writer.write(b"1").result()
        stream.seal()
        with pytest.raises(hw.SealedError):
            writer.write(b"2").result()
        with pytest.raises(hw.SealedError):
            writer.close()
        writer.close()
