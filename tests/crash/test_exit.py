"""How a process ends: a plain exit stores what waits, an abandoned writer is spoken of, and Ctrl-C loses nothing that was acked."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

import headwater as hw
from tests.crash.processes import Place

STREAM = "exit/events"


@contextlib.contextmanager
def _script(text: str, *args: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A fresh interpreter that runs `text`; killed if the test leaves before it ends."""
    command = [sys.executable, "-c", text, *map(str, args)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def _run(text: str, *args: Any) -> tuple[int, str, str]:
    """Exit code, output and errors of a script."""
    with _script(text, *args) as process:
        output, errors = process.communicate(timeout=100)
        return process.returncode, output.decode(), errors.decode()


LEAVE = """
import sys, headwater as hw
url, catalog, name, size, how = sys.argv[1:]
store = hw.open(url, catalog=catalog or None)
writer, named = store.stream(name).writer(), store.stream(name).writer("source")
for number in range(100):
    writer.write(b"%d|" % number + b"." * int(size))
    named.write(b"n%d|" % number)
if how == "error":
    raise ValueError("the user's own")
if how == "exit":
    sys.exit(3)
if how == "gone":
    del writer, named, store
if how == "no threads":
    # As Python 3.12: while it exits, no thread begins.
    import atexit, threading
    def refuse(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")
    atexit.register(lambda: setattr(threading.Thread, "start", refuse))
"""


@pytest.mark.slow
# Small and large differ only in the threads that are needed: two ways to leave are enough for one of them.
@pytest.mark.parametrize(
    ("how", "code", "size"),
    [
        ("end", 0, 10),
        ("error", 1, 10),
        ("end", 0, 20_000),
        ("exit", 3, 20_000),
        ("error", 1, 20_000),
        ("gone", 0, 20_000),
        ("no threads", 0, 1000),
    ],
)
def test_an_interpreter_that_exits_without_close_stores_what_waits(place: Place, how: str, code: int, size: int) -> None:
    with place.open() as store:
        store.create_stream(STREAM)
        found, _, errors = _run(LEAVE, place.url, place.catalog or "", STREAM, size, how)
        assert found == code, errors
        assert ("Error" in errors) == (how == "error"), errors
        values = [event.value.partition(b"|")[0] for event in store.stream(STREAM).read()]
        assert sorted(values) == sorted([*(b"%d" % number for number in range(100)), *(b"n%d" % number for number in range(100))])
        assert not store._engine.database.query("SELECT id FROM session"), "it ended its session"


TWO_STORES = """
import sys, headwater as hw
first, second = hw.open(sys.argv[1]), hw.open(sys.argv[2])
stream = first.create_stream("exit/sealed")
sealed, writer = stream.writer(), second.stream("exit/events").writer()
sealed.write(b"0").result()
stream.seal()
sealed.write(b"1")
writer.write(b"kept")
"""


@pytest.mark.slow
def test_at_exit_one_stores_failure_does_not_keep_another_from_storing(sqlite_place: Place) -> None:
    with sqlite_place.open() as store:
        store.create_stream(STREAM)
        for order in ((f"{sqlite_place.url}-1", sqlite_place.url), (f"{sqlite_place.url}-2", sqlite_place.url)):
            _, _, errors = _run(TWO_STORES, *order)
            assert "SealedError" in errors
        assert [event.value for event in store.stream(STREAM).read()] == [b"kept", b"kept"]


FULL_AGAIN = """
import sys, headwater as hw
from headwater.segments.engine import Engine
commit = Engine.commit_flush
def fail(engine, flush):
    raise hw.UnavailableError("no space left")
store = hw.open(sys.argv[1], upkeep=False)
writer = store.stream(sys.argv[2]).writer()
writer.write(b"begins the session").result()
Engine.commit_flush = fail
writer.write(b"first")
try:
    store.close()
except hw.UnavailableError as error:
    print(error)
if sys.argv[3] == "more":
    Engine.commit_flush = commit
    writer.flush()
    Engine.commit_flush = fail
    writer.write(b"second")
"""


@pytest.mark.parametrize(("what", "told_at_exit"), [("nothing more", False), ("more", True)])
def test_at_exit_a_failure_is_told_unless_a_close_has_told_it(sqlite_place: Place, what: str, told_at_exit: bool) -> None:
    with sqlite_place.open() as store:
        store.create_stream(STREAM)
    code, output, errors = _run(FULL_AGAIN, sqlite_place.url, STREAM, what)
    assert (code, output) == (0, "no space left\n")
    assert ("no space left" in errors) is told_at_exit


def test_an_abandoned_writer_warns_and_its_events_are_stored(place: Place) -> None:
    with place.open() as store:
        writer = store.create_stream(STREAM).writer()
        writer.write(b"0")
        with pytest.warns(ResourceWarning, match="abandoned"):
            del writer
    with place.open() as store:
        assert [event.value for event in store.stream(STREAM).read()] == [b"0"]


INTERRUPTED = """
import os, sys, headwater as hw
url, catalog, name = sys.argv[1:]
with hw.open(url, catalog=catalog or None) as store:
    with store.stream(name).writer() as writer:
        number = 0
        while True:
            ack = writer.write(b"%d" % number, key=str(number % 7))
            if number % 10 == 9:
                ack.result()
                os.write(1, b"%d\\n" % number)
            number += 1
"""


@pytest.mark.slow
def test_ctrl_c_in_a_write_loop_loses_nothing_that_was_acked(place: Place) -> None:
    with place.open() as store:
        store.create_stream(STREAM, scaling=hw.Scaling.fixed(2))
        with _script(INTERRUPTED, place.url, place.catalog or "", STREAM) as process:
            assert process.stdout is not None
            for _ in range(30):
                last = int(process.stdout.readline())
            process.send_signal(signal.SIGINT)
            output, errors = process.communicate(timeout=60)
        assert b"KeyboardInterrupt" in errors
        last = max([last, *map(int, output.split())])
        values = sorted(int(event.value) for event in store.stream(STREAM).read())
        # All that was acked, and with it all that was given before; the one during which Ctrl-C came may be missing or there.
        assert values == list(range(len(values))) and len(values) > last


#: Ctrl-C again and again, in a program that goes on: a notebook. Its loops have no condition at either end: Python 3.13 takes the jump
#: back from one for outside of their `try`.
ALARM = """
import random, signal, sys, headwater as hw
armed = False
def interrupt(*_):
    global armed
    if armed:
        armed = False  # and not `while True`: Python drops what is raised while it deletes an object
        raise KeyboardInterrupt
signal.signal(signal.SIGALRM, interrupt)
rng = random.Random(int(sys.argv[-1]))
"""

INTERRUPTED_OFTEN = (
    ALARM
    + """
url, catalog, name, id, every, seed = sys.argv[1:]
store = hw.open(url, catalog=catalog or None)
writer = store.stream(name).writer(id or None)
number, given, ack, interrupts = 0, [], None, 0
while interrupts < 600:
    try:
        armed = True
        signal.setitimer(signal.ITIMER_REAL, 0.00005 + rng.random() * 0.002)
        while True:  # see ALARM
            if not armed:
                break
            number += 1
            ack = writer.write(b"%d" % number, key=str(number))
            given.append(number)
            if number % int(every):
                continue
            ack.result()
    except (KeyboardInterrupt, RuntimeError):  # Condition.wait may lose its own lock to an interrupt: Python's, not ours
        pass
    interrupts += 1
    if ack is not None and interrupts % 2:
        ack.result(timeout=30)  # asked again
signal.setitimer(signal.ITIMER_REAL, 0)
writer.write(b"0", key="0").result(timeout=30)
store.close()
print(*given)
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 50])
@pytest.mark.parametrize("id", ["", "source"])
def test_a_writer_goes_on_after_any_number_of_interrupts_without_loss_or_repetition(
    sqlite_place: Place, id: str, every: int, seed: int
) -> None:
    with sqlite_place.open() as store:
        store.create_stream(STREAM, scaling=hw.Scaling.fixed(2))
        code, output, errors = _run(INTERRUPTED_OFTEN, sqlite_place.url, "", STREAM, id, every, seed)
        assert code == 0, errors
        found = Counter()  # type: Counter[int]
        for event in store.stream(STREAM).read():
            assert event.key == event.value, "a key went to another event"
            found[int(event.value)] += 1
        assert set(found.values()) == {1}, "stored twice"
        assert not set(map(int, output.split())) - found.keys(), "given without an interrupt, and lost"


INTERRUPTED_TRANSACTIONS = (
    ALARM
    + """
url, catalog, name, seed = sys.argv[1:]
# On PostgreSQL each of them costs a connection.
longest, most = (0.03, 100) if catalog else (0.004, 300)
store = hw.open(url, catalog=catalog or None)
number, committed, interrupts = 0, [], 0
while interrupts < most:
    try:
        armed = True
        signal.setitimer(signal.ITIMER_REAL, 0.00005 + rng.random() * longest)
        while True:  # see ALARM
            if not armed:
                break
            number += 1
            with store.transaction() as tx:
                tx.write(name, b"%d" % number)
            committed.append(number)
            found = sum(part.count for part in store.stream(name).ranges())
            assert found >= len(committed), f"{found} events are seen and {len(committed)} transactions were committed"
            del found
    except (KeyboardInterrupt, RuntimeError):  # as above
        pass
    interrupts += 1
signal.setitimer(signal.ITIMER_REAL, 0)
store.close()
print(*committed)
"""
)


@pytest.mark.slow
def test_transactions_and_reads_go_on_after_any_number_of_interrupts(place: Place, seed: int) -> None:
    """A Ctrl-C leaves no lock, no open transaction and no old look at the catalog behind."""
    with place.open() as store:
        store.create_stream(STREAM)
        code, output, errors = _run(INTERRUPTED_TRANSACTIONS, place.url, place.catalog or "", STREAM, seed)
        assert code == 0, errors
        found = Counter(int(event.value) for event in store.stream(STREAM).read())
        assert set(found.values()) == {1}, "committed twice"
        assert not set(map(int, output.split())) - found.keys(), "committed and lost"
