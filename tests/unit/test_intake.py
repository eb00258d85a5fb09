"""The intake: which threads a flush wakes, and for whom the next one waits."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from headwater.errors import UnavailableError
from headwater.model.schemas import OPAQUE
from headwater.segments import intake as intakes
from headwater.segments.intake import Intake
from headwater.segments.lanes import Lane, Placement, Run, StreamRef
from tests.crash.processes import wait_until

STREAM = StreamRef(1, "a/b", "events", OPAQUE, 1, True)


@pytest.fixture
def intake() -> Intake:
    return Intake(lambda: None, lambda: False)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def make_run(intake: Intake) -> Run:
    return Run(Lane(intake, intake.wait_for_end, STREAM, None, 0, 0), 1)


def begin_to_wait(pool: ThreadPoolExecutor, intake: Intake, runs: list[Run]) -> list[Future[None]]:
    found = [pool.submit(intake.wait_for_end, run, None) for run in runs]
    wait_until(lambda: len(intake._gates) == len(runs))
    return found


def end(intake: Intake, runs: list[Run]) -> None:
    for run in runs:
        run.end(Placement((0,), (0,), None), None)
    intake.release(runs)


def test_a_flush_wakes_the_threads_that_it_served_and_no_other(intake: Intake, pool: ThreadPoolExecutor) -> None:
    runs = [make_run(intake) for _ in range(4)]
    waits = begin_to_wait(pool, intake, runs)
    end(intake, runs[:2])
    for wait in waits[:2]:
        wait.result(10)
    assert not waits[2].done() and not waits[3].done()
    end(intake, runs[2:])
    for wait in waits[2:]:
        wait.result(10)
    assert not intake.has_waiters


def test_a_run_that_ended_before_its_thread_waits_is_not_waited_for(intake: Intake) -> None:
    run = make_run(intake)
    end(intake, [run])
    intake.wait_for_end(run, None)
    assert not intake.has_waiters


def test_a_failed_attempt_is_raised_in_every_thread_that_waits(intake: Intake, pool: ThreadPoolExecutor) -> None:
    waits = begin_to_wait(pool, intake, [make_run(intake) for _ in range(3)])
    intake.note_failure(UnavailableError("the disk is full"))
    for wait in waits:
        with pytest.raises(UnavailableError, match="the disk is full"):
            wait.result(10)


def test_a_thread_stops_waiting_when_its_time_is_over(intake: Intake) -> None:
    with pytest.raises(TimeoutError):
        intake.wait_for_end(make_run(intake), 0.01)
    assert not intake.has_waiters


def test_the_next_flush_waits_for_all_threads_that_waited_for_the_last_one(
    intake: Intake, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intakes, "_CROWD_SECONDS", 30.0)
    runs = [make_run(intake) for _ in range(3)]
    begin_to_wait(pool, intake, runs)
    end(intake, runs[:2])
    again = [make_run(intake) for _ in range(2)]
    first = pool.submit(intake.wait_for_end, again[0], None)
    wait_until(lambda: len(intake._gates) == 2)
    gathering = pool.submit(intake.wait_for_crowd)
    with pytest.raises(TimeoutError):
        gathering.result(0.05)
    second = pool.submit(intake.wait_for_end, again[1], None)
    gathering.result(10)
    end(intake, [runs[2], *again])
    first.result(10), second.result(10)


def test_the_next_flush_does_not_wait_for_threads_that_do_not_come_back(intake: Intake, pool: ThreadPoolExecutor) -> None:
    runs = [make_run(intake) for _ in range(3)]
    begin_to_wait(pool, intake, runs)
    end(intake, runs)
    last = make_run(intake)
    begin_to_wait(pool, intake, [last])
    pool.submit(intake.wait_for_crowd).result(10)
    end(intake, [last])
    assert not intake.is_crowded


def test_a_thread_that_waits_alone_is_no_crowd(intake: Intake, pool: ThreadPoolExecutor) -> None:
    run = make_run(intake)
    [wait] = begin_to_wait(pool, intake, [run])
    end(intake, [run])
    wait.result(10)
    assert not intake.is_crowded
