"""A Ctrl-C in what one thread does leaves nothing locked for the others."""

from __future__ import annotations

import threading
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest

import headwater as hw
from headwater.runtime.flag import Flag
from headwater.runtime.heart import Heart
from headwater.runtime.workers import Task, Workers
from tests.interrupts import ends, interrupt, interrupt_everywhere


def test_such_an_interrupt_leaves_an_event_of_the_standard_library_locked() -> None:
    def is_broken(at: int) -> bool:
        event = threading.Event()
        interrupt(event.set, at)
        return not ends(event.set, 0.1)

    assert any(map(is_broken, range(8))), "then there is no need for a Flag"


@pytest.mark.parametrize("name", ["set", "wait"])
def test_a_flag_can_be_set_after_any_interrupt(name: str) -> None:
    flag = Flag()

    def call() -> None:
        getattr(flag, name)(*([0.001] if name == "wait" else []))

    assert interrupt_everywhere(call) > 2
    assert ends(flag.set) and flag.is_set
    assert flag.wait(0.0)


def test_a_worker_ends_its_task_after_any_interrupt_of_who_waits_for_it() -> None:
    def waits(at: int) -> bool:
        begin = threading.Lock()
        begin.acquire()
        task = Task(lambda: bool(begin.acquire(timeout=0.002)), None)
        thread = threading.Thread(target=task.run, daemon=True)
        thread.start()
        found = interrupt(task.result, at)
        assert ends(task.wait) and ends(thread.join) and task.done
        return found

    at = 0
    while waits(at):
        at += 1
    assert at > 2


def test_a_heart_beats_after_any_interrupt_of_who_adds_to_it() -> None:
    class Beaten:
        count = 0

        def beat(self) -> bool:
            self.count += 1
            done.set()
            return False

    heart, other = Heart(), Beaten()
    done = Flag()
    assert interrupt_everywhere(lambda: heart.add(other.beat, 100.0)) > 2
    done.clear()
    heart.add(other.beat, 0.001)
    assert done.wait(5.0)
    assert ends(heart.close)


def test_workers_work_after_any_interrupt_of_who_gives_them_something() -> None:
    workers = Workers("tests", 2)
    assert interrupt_everywhere(lambda: workers.submit(lambda: 1).result()) > 2
    assert [workers.submit(lambda: 7).result() for _ in range(5)] == [7] * 5
    assert ends(workers.close)


@pytest.mark.slow
@pytest.mark.timeout(120)
# A Ctrl-C leaves connections behind that nobody closed.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_a_transaction_was_given_is_committed_after_any_interrupt_of_its_flush(tmp_path: Path) -> None:
    with hw.open(tmp_path / "store", upkeep=False) as store:
        stream, table = store.create_stream("a/events"), store.table("a/table")
        state: hw.Synchronizer[int, int] = store.synchronizer("a/state", 0, lambda count, more: count + more)

        def is_interrupted(at: int) -> bool:
            tx = store.transaction()
            tx.write("a/events", f"{at}a", key="k")
            tx.write_batch("a/events", pa.record_batch({"value": pa.array([b"%db" % at], pa.binary())}))
            tx.write("a/events", f"{at}c", key="k")
            tx.put("a/table", str(at), b"")
            tx.update(state, [1])
            found = interrupt(tx.flush, at)
            tx.write("a/events", f"{at}d", key="k")
            tx.commit()
            assert state.fetch() == at + 1
            return found

        at = 0
        while is_interrupted(at):
            at += 1
        assert at > 20
        assert [event.value.decode() for event in stream.read()] == [f"{number}{part}" for number in range(at + 1) for part in "abcd"]
        assert len(table) == at + 1


def test_each_event_of_a_transaction_has_its_own_key_and_time_after_any_interrupt_of_its_write(tmp_path: Path) -> None:
    with hw.open(tmp_path / "store", upkeep=False) as store:
        stream = store.create_stream("a/events")
        for time in (None, datetime(2026, 1, 1, tzinfo=UTC)):
            at = 0
            interrupted = True
            while interrupted:
                with store.transaction() as tx:
                    tx.write("a/events", "before", key="before")
                    interrupted = interrupt(partial(tx.write, "a/events", "k", key="k", time=time), at)
                    tx.write("a/events", "after", key="after")
                at += 1
            assert at > 2
        for event in stream.read():
            assert event.key == event.value and (event.time != time or event.value == b"k")
