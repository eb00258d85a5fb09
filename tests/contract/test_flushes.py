"""Flushes that are under way at once: those that are stored when the first one is go into its commit, and fail or are repeated with it."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

import pyarrow as pa
import pytest

import headwater as hw
from headwater.catalog.flushes import Flush
from headwater.errors import UnavailableError
from headwater.segments import flush, pending
from headwater.segments.engine import Engine

#: Above what goes into the catalog itself.
VALUE = bytes(20_000)
KEYS = [f"user-{number}" for number in range(40)]
BATCHES = 4
WAIT_SECONDS = 60.0


@pytest.fixture
def stream(store: hw.Store) -> hw.Stream:
    return store.create_stream("a/stream", scaling=hw.Scaling.fixed(4))


class Storing:
    """Holds the storing of the first flush from now on, and counts what goes on beside it."""

    def __init__(self, store: hw.Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_go_on = threading.Event()
        self.stored = 0
        self.commits: list[Flush] = []
        self.error: BaseException | None = None
        real_store, real_commit = pending.Session.store, Engine.commit_flush
        session = store._flusher._storer.session
        assert session is not None
        first = session, session.reserve() + 1

        def store_block(session: pending.Session, index: int, *args: Any) -> tuple[int, str, int]:
            if (session, index) == first and not self.may_go_on.is_set():
                assert self.may_go_on.wait(WAIT_SECONDS)
                if self.error is not None:
                    raise self.error
            place = real_store(session, index, *args)
            self.stored += 1
            return place

        def commit(engine: Engine, given: Flush) -> Any:
            self.commits.append(given)
            return real_commit(engine, given)

        monkeypatch.setattr(pending.Session, "store", store_block)
        monkeypatch.setattr(Engine, "commit_flush", commit)
        # Each run is a flush of its own.
        for name in ("FLUSH_BYTES", "LARGE_FLUSH_BYTES", "_OVERLAP_BYTES_WAITED_FOR"):
            monkeypatch.setattr(flush, name, 1)
        monkeypatch.setattr(store._flusher, "_flush_bytes", 1)


@pytest.fixture
def storing(store: hw.Store, stream: hw.Stream, monkeypatch: pytest.MonkeyPatch) -> Storing:
    with stream.writer() as writer:
        writer.write(b"so that there is a session", "first").result()
    return Storing(store, monkeypatch)


def write(writer: hw.Writer, storing: Storing, small: int | None = None, more: int = 0) -> list[hw.Ack]:
    """Give all batches, and return when the first few, but for the very first, are stored, or go into the commit itself."""
    acks = []
    for number in range(BATCHES + more):
        values = [b"%04d %s" % (number, b"" if number == small else VALUE)] * len(KEYS)
        acks.append(writer.write_batch(pa.table({"value": pa.array(values, pa.binary()), "user": KEYS}), key="user"))
    deadline = time.monotonic() + WAIT_SECONDS
    storer = writer._flusher._storer
    while len(later := list(storer.under_way)[1:]) < BATCHES - 1 or not all(one.is_stored or one.is_small for one in later):
        assert time.monotonic() < deadline, "they were not stored"
        time.sleep(0.001)
    return acks


def check(stream: hw.Stream, acks: list[hw.Ack], batches: int = BATCHES) -> None:
    """Each event is there once, those of a key are in order, and the acks say where they are."""
    found: dict[str, list[int]] = {}
    places = {}
    for event in stream.read():
        if event.value.startswith(b"0"):
            found.setdefault(event.key.decode(), []).append(int(event.value[:4]))
            places[event.position.segment, event.position.number] = int(event.value[:4])
    assert found == {key: list(range(batches)) for key in KEYS}
    for number, ack in enumerate(acks):
        given = [places[part.segment, at] for part in ack.result() for at in range(part.start, part.end)]
        assert given == [number] * len(KEYS)


@pytest.mark.parametrize("id", [None, "writer-1"])
def test_those_that_are_stored_go_into_one_commit(stream: hw.Stream, storing: Storing, id: str | None) -> None:
    with stream.writer(id) as writer:
        acks = write(writer, storing)
        storing.may_go_on.set()
        writer.flush()
    assert len(storing.commits) == 1 and [len(part.appends) for part in storing.commits[0].parts] == [4 * BATCHES]
    check(stream, acks)


@pytest.mark.parametrize("is_split", [False, True])
def test_one_that_goes_into_the_commit_itself_takes_those_behind_it_along(stream: hw.Stream, storing: Storing, is_split: bool) -> None:
    with stream.writer() as writer:
        acks = write(writer, storing, small=1)
        if is_split:
            stream.split(2)
        storing.may_go_on.set()
        writer.flush()
    if not is_split:
        first, second = ([[append.data is None for append in part.appends] for part in given.parts] for given in storing.commits)
        assert first == [[True] * 4] and second == [[False] * 4 + [True] * 8]
    check(stream, acks)


@pytest.mark.parametrize("id", [None, "writer-1"])
def test_when_a_segment_of_one_was_sealed_all_of_that_writer_s_are_routed_again_in_order(
    stream: hw.Stream, storing: Storing, id: str | None
) -> None:
    with stream.writer(id) as writer:
        acks = write(writer, storing)
        stream.split(2)
        storing.may_go_on.set()
        writer.flush()
    check(stream, acks)


def test_a_neighbour_s_events_stay_where_they_are(store: hw.Store, stream: hw.Stream, storing: Storing) -> None:
    other = store.create_stream("a/other")
    with other.writer() as neighbour, pytest.raises(hw.SealedError), stream.writer() as writer:
        acks = write(writer, storing)
        neighbour.write(VALUE * 5)
        stream.seal()
        storing.may_go_on.set()
    for ack in acks:
        with pytest.raises(hw.SealedError):
            ack.result()
    assert [event.value for event in stream.read()] == [b"so that there is a session"]
    assert Counter(event.value for event in other.read()) == {VALUE * 5: 1}


def test_after_a_fence_all_of_them_are_stored_and_committed_once(store: hw.Store, stream: hw.Stream, storing: Storing) -> None:
    with stream.writer() as writer:
        acks = write(writer, storing)
        store._engine.database.write(lambda tx: tx.run("UPDATE session SET live = 0"))
        storing.may_go_on.set()
        writer.flush()
    assert len({given.session for given in storing.commits}) == 2
    check(stream, acks)


def test_when_the_first_can_not_be_stored_they_are_all_stored_again_in_order(stream: hw.Stream, storing: Storing) -> None:
    with stream.writer() as writer:
        acks = write(writer, storing)
        storing.error = UnavailableError("no space left")
        storing.may_go_on.set()
        with pytest.raises(UnavailableError, match="no space left"):
            writer.flush()
        writer.flush()
    assert storing.stored == 2 * BATCHES - 1
    check(stream, acks)


def test_a_commit_that_failed_is_repeated_as_it_was(stream: hw.Stream, storing: Storing, monkeypatch: pytest.MonkeyPatch) -> None:
    with stream.writer() as writer:
        acks = write(writer, storing)
        real = Engine.commit_flush

        def commit_and_lose_the_answer(engine: Engine, given: Flush) -> Any:
            monkeypatch.setattr(Engine, "commit_flush", real)
            real(engine, given)
            raise UnavailableError("the answer was lost")

        monkeypatch.setattr(Engine, "commit_flush", commit_and_lose_the_answer)
        storing.may_go_on.set()
        with pytest.raises(UnavailableError, match="the answer was lost"):
            writer.flush()
        writer.flush()
    assert len(storing.commits) == 2 and storing.commits[0] == storing.commits[1]
    check(stream, acks)


@pytest.mark.parametrize("id", [None, "writer-1"])
def test_while_one_is_committed_the_next_ones_are_stored(
    store: hw.Store, stream: hw.Stream, storing: Storing, monkeypatch: pytest.MonkeyPatch, id: str | None
) -> None:
    committing, may_commit = threading.Event(), threading.Event()
    real_commit = Engine.commit_flush

    def commit(engine: Engine, given: Flush) -> Any:
        committing.set()
        assert may_commit.wait(WAIT_SECONDS)
        return real_commit(engine, given)

    monkeypatch.setattr(Engine, "commit_flush", commit)
    with stream.writer(id) as writer:
        # The first ones are stored, and in the commit; these are given while nothing may begin beside them.
        acks = write(writer, storing, more=2)
        storing.may_go_on.set()
        assert committing.wait(WAIT_SECONDS)
        deadline = time.monotonic() + WAIT_SECONDS
        while storing.stored < BATCHES + 2:
            assert time.monotonic() < deadline, "they wait for the commit"
            time.sleep(0.001)
        assert not any(ack.done for ack in acks)
        may_commit.set()
        writer.flush()
    check(stream, acks, BATCHES + 2)


class Panic(BaseException):
    """What a library's Rust code raises: no Exception."""


def test_after_a_fault_that_is_no_exception_nobody_waits_for_ever(stream: hw.Stream, storing: Storing) -> None:
    writer = stream.writer()
    acks = write(writer, storing)
    storing.error = Panic("in Rust code")
    storing.may_go_on.set()
    for ack in acks:
        with pytest.raises(hw.HeadwaterError, match="in Rust code"):
            ack.result(WAIT_SECONDS)
    with pytest.raises(hw.HeadwaterError, match="in Rust code"):
        writer.close()
    with stream.writer() as another:
        another.write(b"goes on").result(WAIT_SECONDS)
