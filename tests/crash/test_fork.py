"""A process that forks while it writes: each event is stored once, and one's death is not the other's."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections import Counter

import psutil
import pytest

import headwater as hw
from tests.crash.processes import PATIENCE_SECONDS, Crew, Place, _context, wait_until
from tests.crash.workers import fork_and_write, obey, write_and_fork

pytestmark = pytest.mark.slow

STREAM = "fork/events"


@pytest.mark.parametrize("attempt", range(2))
def test_parent_and_child_go_on_after_a_fork_and_the_child_outlives_its_killed_parent(place: Place, crew: Crew, attempt: int) -> None:
    with place.open() as store:
        store.create_stream(STREAM)
    child, theirs = _context.Pipe()
    parent = crew.start(write_and_fork, place, STREAM, theirs)
    theirs.close()
    try:
        _, child_pid = parent.hear()
        assert child.poll(PATIENCE_SECONDS)
        errors = child.recv()
        # What was given before the fork is the parent's: the child is told so at once, and need not wait for it.
        assert set(errors) <= {"FencedError"}
        parent.kill()

        # Others come and go meanwhile: the last one to leave a SQLite file clears its log away, if it believes it is the last.
        child.send("go")
        for number in range(6):
            other = crew.start(obey, place)
            other.ask("open", STREAM)
            assert other.ask("write", STREAM, None, [b"other.%d.%d" % (number, each) for each in range(20)])[0]
            assert other.ask("close") == (True, None)
        assert child.poll(PATIENCE_SECONDS)
        seen_by_child = Counter(child.recv())
        wait_until(lambda: not psutil.pid_exists(child_pid) or psutil.Process(child_pid).status() == psutil.STATUS_ZOMBIE)
    finally:
        child.close()
        _kill_if_alive(locals().get("child_pid"))

    with place.open() as store:
        found = Counter(event.value for event in store.stream(STREAM).read())
    assert set(found.values()) == {1}, "stored twice"
    expected = [
        b"parent.before",
        *(b"parent.waiting.%d" % number for number in range(50)),
        *(b"parent.after.%d" % number for number in range(50)),
    ]
    expected += [
        *(b"child.first.%d" % number for number in range(50)),
        *(b"child.second.%d" % number for number in range(400)),
        b"child.named",
    ]
    expected += [b"other.%d.%d" % (number, each) for number in range(6) for each in range(20)]
    assert sorted(value for value in found if not value.startswith(b"parent.busy")) == sorted(expected)
    assert seen_by_child.keys() <= found.keys()


def _kill_if_alive(pid: int | None) -> None:
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_a_parent_killed_inside_the_lock_leaves_it_free_although_its_child_lives(place: Place, crew: Crew) -> None:
    with place.open() as store:
        store.create_stream(STREAM)
    child, theirs = _context.Pipe()
    parent = crew.start(fork_and_write, place, STREAM, theirs)
    theirs.close()
    with contextlib.closing(child):
        assert child.poll(PATIENCE_SECONDS) and child.recv() == "ready"
        parent.tell("go")
        parent.wait_until_stopped()
        parent.kill()
        third = crew.start(obey, place, "", 5.0)
        third.ask("open", STREAM)
        assert third.ask("write", STREAM, None, [b"third"]) == (True, [(0, 1)])
        child.send("go")
        assert child.poll(PATIENCE_SECONDS) and child.recv() == "done"
    with place.open() as store:
        assert [event.value for event in store.stream(STREAM).read()] == [b"parent", b"third", b"child"]


def test_a_named_writer_of_the_parent_is_fenced_in_the_child_and_goes_on_in_the_parent(place: Place, crew: Crew) -> None:
    with place.open() as store:
        store.create_stream(STREAM)
    worker = crew.start(_fork_with_a_named_writer, place)
    assert worker.hear() == (["FencedError", "FencedError"], "ok")
    with place.open() as store:
        assert [event.value for event in store.stream(STREAM).read()] == [b"1", b"2", b"3"]


def _fork_with_a_named_writer(channel: object, place: Place) -> None:
    store = place.open()
    writer = store.stream(STREAM).writer("source")
    writer.write(b"1").result()
    ack = writer.write(b"2")
    readable, writable = os.pipe()
    if not os.fork():
        errors = []
        for attempt in (lambda: writer.write(b"child"), ack.result if not ack.done else lambda: writer.write(b"child")):
            try:
                attempt()
                errors.append("none")
            except hw.HeadwaterError as error:
                errors.append(type(error).__name__)
        os.write(writable, ",".join(errors).encode())
        os._exit(0)
    errors = os.read(readable, 100).decode().split(",")
    writer.write(b"3")
    writer.flush()
    store.close()
    channel.send((errors, "ok"))  # type: ignore[attr-defined]


def test_a_child_that_does_nothing_with_a_named_writer_ends_without_a_word(place: Place) -> None:
    program = """
import os, sys
import headwater as hw
store = hw.open(sys.argv[1], catalog=sys.argv[2] or None)
writer = store.create_stream("fork/quiet").writer("name")
writer.write(b"1").result()
child = os.fork()
if child == 0:
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
writer.write(b"2")
writer.close()
assert [event.value for event in store.stream("fork/quiet").read()] == [b"1", b"2"]
store.close()
"""
    # From 3.12 on Python itself warns of any fork beside threads, and the store has some.
    command = [sys.executable, "-W", "ignore:This process:DeprecationWarning", "-c", program, place.url, place.catalog or ""]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
