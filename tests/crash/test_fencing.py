"""A process that looked dead and was not: fenced, it cannot commit; what it may store again it stores once, under a new session."""

from __future__ import annotations

import pytest

import headwater as hw
from headwater.storage import layout
from tests.crash.processes import Crew, Place
from tests.crash.workers import obey
from tests.operations import fence_all

pytestmark = pytest.mark.slow

STREAM = "fence/events"
LARGE = b"." * 100_000
#: A kind of flush: one that goes into the catalog itself, one that is in the session's journal when its process is stopped.
FLUSHES = [pytest.param(b"", "append.encoded", id="inline"), pytest.param(LARGE, "append.stored", id="journal")]


def _fence_all(store: hw.Store) -> int:
    """As upkeep does, but with a lease so short that every session is over it."""
    return len(fence_all(store._engine.database))


def _values(store: hw.Store) -> list[bytes]:
    return [event.value.partition(b"|")[0] for event in store.stream(STREAM).read()]


@pytest.fixture
def store(place: Place) -> hw.Store:
    store = place.open()
    store.create_stream(STREAM)
    return store


@pytest.mark.parametrize(("padding", "failpoint"), FLUSHES)
def test_a_process_stopped_past_its_lease_stores_its_anonymous_events_once_under_a_new_session(
    place: Place, store: hw.Store, crew: Crew, padding: bytes, failpoint: str
) -> None:
    with store:
        zombie = crew.start(obey, place)
        zombie.ask("open", STREAM)
        assert zombie.ask("write", STREAM, None, [b"0|" + LARGE])[0]
        zombie.ask("arm", f"{failpoint}=stop")
        zombie.tell(("give", STREAM, None, [b"1|" + padding, b"2|" + padding]))
        zombie.wait_until_stopped()

        assert _fence_all(store) == 1
        with store.stream(STREAM).writer() as writer:
            writer.write(b"between")
        zombie.go_on()

        zombie.hear()
        done, positions = zombie.ask("acks")
        assert done and positions == [(0, 2), (0, 3)]
        assert _values(store) == [b"0", b"between", b"1", b"2"]
        assert zombie.ask("write", STREAM, None, [b"3|" + LARGE]) == (True, [(0, 4)])
        live = {row[0] for row in store._engine.database.query("SELECT id FROM session WHERE live = 1")}
        rows = store._engine.database.query("SELECT object FROM extent WHERE object IS NOT NULL AND first > 0")
        assert {layout.parse_object_id(row[0])[0] for row in rows} <= live, "bytes of a fenced session were named after the fence"


@pytest.mark.parametrize(("padding", "failpoint"), FLUSHES)
def test_a_stopped_named_writer_that_was_opened_elsewhere_meanwhile_stores_nothing(
    place: Place, store: hw.Store, crew: Crew, padding: bytes, failpoint: str
) -> None:
    with store:
        zombie = crew.start(obey, place)
        zombie.ask("open", STREAM, "source")
        zombie.ask("open", STREAM)
        assert zombie.ask("write", STREAM, "source", [b"0"])[0]
        zombie.ask("arm", f"{failpoint}=stop")
        zombie.tell(("give", STREAM, "source", [b"1|" + padding, b"2|" + padding]))
        zombie.wait_until_stopped()

        _fence_all(store)
        heir = store.stream(STREAM).writer("source")
        assert heir.last_number == 1
        heir.write(b"1").result()
        zombie.go_on()

        zombie.hear()
        assert zombie.ask("acks")[:2] == (False, "FencedError")
        assert zombie.ask("give", STREAM, "source", [b"3"])[:2] == (False, "FencedError")
        heir.write(b"2").result()
        assert zombie.ask("write", STREAM, None, [b"anonymous"])[0], "its neighbours in the process go on"
        assert _values(store) == [b"0", b"1", b"2", b"anonymous"]


def test_a_named_writer_opened_elsewhere_is_fenced_also_when_its_session_is_alive(place: Place, store: hw.Store, crew: Crew) -> None:
    with store:
        older = crew.start(obey, place)
        older.ask("open", STREAM, "source")
        assert older.ask("write", STREAM, "source", [b"0"])[0]
        with store.stream(STREAM).writer("source") as heir:
            assert older.ask("write", STREAM, "source", [b"1"])[:2] == (False, "FencedError")
            heir.write(b"1").result()
        assert _values(store) == [b"0", b"1"]


def test_a_named_writer_goes_on_after_its_session_was_fenced_if_nobody_else_opened_it(place: Place, store: hw.Store, crew: Crew) -> None:
    with store:
        worker = crew.start(obey, place)
        worker.ask("open", STREAM, "source")
        assert worker.ask("write", STREAM, "source", [b"0"])[0]
        assert _fence_all(store) == 1
        assert worker.ask("write", STREAM, "source", [b"1", b"2"])[0]
        assert _values(store) == [b"0", b"1", b"2"]
        with store.stream(STREAM).writer("source") as heir:
            assert heir.last_number == 3


def test_large_flushes_in_flight_when_the_session_is_fenced_are_stored_once_and_in_order(place: Place, store: hw.Store, crew: Crew) -> None:
    with store:
        worker = crew.start(obey, place, "append.stored=stop@2")
        worker.ask("open", STREAM)
        values = [b"%03d|" % number + b"." * 1_000_000 for number in range(40)]
        worker.tell(("give", STREAM, None, values))
        worker.wait_until_stopped()
        _fence_all(store)
        worker.go_on()
        worker.hear()
        done, positions = worker.ask("acks")
        assert done and [position.number for position in positions] == list(range(40))
        assert _values(store) == [b"%03d" % number for number in range(40)]
