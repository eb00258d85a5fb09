"""A process stopped in the middle of a commit, holding its lock: readers go on, writers are told who it is, and all resumes."""

from __future__ import annotations

import time

import pytest

from tests.crash.processes import Crew, Place
from tests.crash.workers import obey

pytestmark = pytest.mark.slow

STREAM = "stopped/events"
LOCK_SECONDS = 2.0


@pytest.mark.parametrize("failpoint", ["append.begun", "append.applied"])
def test_while_a_process_is_stopped_inside_the_sqlite_lock_readers_go_on_and_writers_hear_who_holds_it(
    sqlite_place: Place, crew: Crew, failpoint: str
) -> None:
    place = sqlite_place
    with place.open() as store:
        store.create_stream(STREAM)
    stopped, reader, writer = (crew.start(obey, place, "", LOCK_SECONDS) for _ in range(3))
    for worker in (stopped, writer):
        worker.ask("open", STREAM)
    assert stopped.ask("write", STREAM, None, [b"0"])[0]
    assert writer.ask("write", STREAM, None, [b"1"])[0]
    stopped.ask("arm", f"{failpoint}=stop")
    stopped.tell(("give", STREAM, None, [b"stopped"]))
    stopped.wait_until_stopped()

    begun = time.monotonic()
    done, error, text = writer.ask("write", STREAM, None, [b"2"])
    waited = time.monotonic() - begun
    assert (done, error) == (False, "UnavailableError")
    assert f"process {stopped.pid} " in text
    assert LOCK_SECONDS * 0.9 <= waited < LOCK_SECONDS + 5
    assert reader.ask("read", STREAM, timeout=1.0) == (True, [b"0", b"1"])
    begun = time.monotonic()
    late = crew.start(obey, place, "", LOCK_SECONDS)
    assert late.ask("read", STREAM) == (True, [b"0", b"1"]), "a process that opens the store now can read, too"
    assert time.monotonic() - begun < LOCK_SECONDS

    stopped.go_on()
    stopped.hear()
    assert stopped.ask("acks") == (True, [(0, 2)])
    assert writer.ask("write", STREAM, None, [b"3"]) == (True, [(0, 4)])
    assert reader.ask("read", STREAM) == (True, [b"0", b"1", b"stopped", b"2", b"3"])


def test_postgresql_ends_the_transaction_of_a_stopped_process_and_its_events_are_stored_once_when_it_goes_on(
    postgres_url: str, sqlite_place: Place, crew: Crew
) -> None:
    place = Place(f"{sqlite_place.url}-pg", postgres_url)
    with place.open(create=True) as store:
        store.create_stream(STREAM)
    stopped, reader, writer = (crew.start(obey, place, "", 1.0) for _ in range(3))
    for worker in (stopped, writer):
        worker.ask("open", STREAM)
    assert stopped.ask("write", STREAM, None, [b"0"])[0]
    stopped.ask("arm", "append.applied=stop")
    stopped.tell(("give", STREAM, None, [b"stopped"]))
    stopped.wait_until_stopped()

    begun = time.monotonic()
    assert reader.ask("read", STREAM) == (True, [b"0"])
    while not (answer := writer.ask("write", STREAM, None, [b"1"]))[0]:
        assert answer[1] == "UnavailableError"
        assert time.monotonic() - begun < 30
    stopped.go_on()
    stopped.hear()
    assert stopped.ask("acks")[0]
    values = reader.ask("read", STREAM)[1]
    assert values[-1] == b"stopped" and values.count(b"stopped") == 1 and set(values) == {b"0", b"1", b"stopped"}


def test_a_killed_holder_of_the_lock_leaves_it_free(sqlite_place: Place, crew: Crew) -> None:
    with sqlite_place.open() as store:
        store.create_stream(STREAM)
    killed, writer = crew.start(obey, sqlite_place, "append.applied=stop"), crew.start(obey, sqlite_place, "", LOCK_SECONDS)
    for worker in (killed, writer):
        worker.ask("open", STREAM)
    killed.tell(("give", STREAM, None, [b"never acked"]))
    killed.wait_until_stopped()
    killed.kill()
    assert writer.ask("write", STREAM, None, [b"1"]) == (True, [(0, 0)])
    assert writer.ask("read", STREAM) == (True, [b"1"])
