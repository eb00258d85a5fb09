"""The threads that do I/O: which of them is called, and what those do that are not."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from headwater.runtime import workers as module
from headwater.runtime.workers import Workers


def test_of_those_that_wait_the_one_that_was_busy_last_is_called() -> None:
    workers = Workers("tests", 4)
    together = threading.Barrier(4)
    begun = [workers.submit(lambda: together.wait(10)) for _ in range(4)]
    for task in begun:
        task.result()
    names = Counter[int]()
    for _ in range(200):
        names[workers.submit(threading.get_ident).result()] += 1
        _wait_until_idle(workers, 4)
    workers.close()
    assert len(names) == 1


def test_more_is_done_by_others_while_one_is_busy_and_no_more_at_once_than_allowed() -> None:
    workers = Workers("tests", 3)
    together, go_on = threading.Barrier(4), threading.Event()

    def hold() -> int:
        together.wait(10)
        go_on.wait(10)
        return threading.get_ident()

    held = [workers.submit(hold) for _ in range(3)]
    together.wait(10)
    waits = workers.submit(threading.get_ident)
    assert not waits.done
    go_on.set()
    threads = {task.result() for task in held}
    assert len(threads) == 3 and waits.result() in threads
    workers.close()


def test_a_thread_that_has_nothing_to_do_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_IDLE_SECONDS", 0.01)
    said = threading.Semaphore(0)
    who: list[int] = []

    def when_idle() -> None:
        who.append(threading.get_ident())
        said.release()

    workers = Workers("tests", 1, when_idle)
    for _ in range(3):
        worker = workers.submit(threading.get_ident).result()
        assert said.acquire(timeout=10) and not said.acquire(timeout=0.05)
        assert who.pop() == worker
    workers.close()


def test_what_was_given_before_the_end_is_done() -> None:
    workers = Workers("tests", 1)
    go_on = threading.Event()
    workers.submit(lambda: go_on.wait(10))
    waits = workers.submit(lambda: 7)
    closing = threading.Thread(target=workers.close)
    closing.start()
    go_on.set()
    closing.join(10)
    assert waits.result() == 7
    with pytest.raises(RuntimeError, match="closed"):
        workers.submit(lambda: 8)


def _wait_until_idle(workers: Workers, count: int) -> None:
    while len(workers._idle) < count:
        pass
