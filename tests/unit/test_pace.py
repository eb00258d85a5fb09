"""Background work rests while its process stores events, and does not otherwise."""

from __future__ import annotations

import time

import pytest

from headwater.runtime.pace import Pace


def work(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    monkeypatch.setattr(time, "sleep", found.append)
    return found


def test_nobody_writes_so_there_is_no_rest(slept: list[float]) -> None:
    rest = Pace().begin()
    work(0.01)
    rest()
    assert slept == []


def test_a_rest_is_half_as_long_as_the_processor_worked_since_the_last_one(slept: list[float]) -> None:
    pace = Pace()
    rest = pace.begin()
    work(0.02)
    pace.note()
    rest()
    pace.note()
    rest()
    assert 0.01 <= slept[0] < 0.1
    assert slept[1] < 0.005, "the first step counts once"


def test_a_step_that_keeps_the_disk_busy_is_measured_by_the_clock(slept: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    pace = Pace()
    rest = pace.begin_freeing()
    now = 100.4
    pace.note()
    rest()
    assert slept == [pytest.approx(0.8)]


def test_others_are_given_way_only_while_somebody_writes(slept: list[float]) -> None:
    pace = Pace()
    pace.give_way()
    assert slept == []
    pace.note()
    pace.give_way()
    assert len(slept) == 1 and slept[0] < 0.001


def test_a_writer_that_ended_is_not_waited_for(slept: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    pace = Pace()
    pace.note()
    assert pace.is_busy()
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 1.0)
    rest = pace.begin()
    work(0.01)
    rest()
    assert not pace.is_busy() and slept == []
