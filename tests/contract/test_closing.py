"""Closing a store, forking and reconnecting while others work: each gets an answer, none waits for ever."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

import headwater as hw
from headwater.catalog.postgres import PostgresDatabase
from headwater.segments import routing
from headwater.segments.flush import Flusher
from tests.crash.processes import Place

# Threads and processes that wait for each other: not for a quick run.
pytestmark = pytest.mark.slow

WAIT_SECONDS = 30.0


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[BaseException]]:
    """Run it in a thread of its own, for ever; what ended it."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            while True:
                work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, errors


@pytest.mark.parametrize("what", ["append", "writer", "write", "read"])
def test_a_thread_that_works_while_the_store_is_closed_is_told(place: Place, what: str) -> None:
    for _ in range(3):
        stored = [0]
        with place.open(create=True) as store:
            stream = store.create_stream("a/stream", exist_ok=True)
            before = len(list(stream.read()))
            log = store.revisioned("a/log")
            before += len(list(log.read()))
            writer = stream.writer()
            reader = store.reader_group("g", ["a/stream"]).reader(f"r-{time.monotonic_ns()}") if what == "read" else None

            def work() -> None:
                if what == "append":
                    log.append(b"x")  # noqa: B023
                elif what == "writer":
                    with stream.writer() as own:  # noqa: B023
                        own.write(b"x").result()
                elif what == "write":
                    writer.write(b"x").result()  # noqa: B023
                else:
                    assert reader is not None  # noqa: B023
                    reader.read(timeout=WAIT_SECONDS)  # noqa: B023
                    return
                stored[0] += 1  # noqa: B023

            thread, errors = in_thread(work)
            time.sleep(0.05)
            began = time.monotonic()
        assert time.monotonic() - began < WAIT_SECONDS / 2
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive(), "it waits for ever"
        assert isinstance(errors[0], hw.HeadwaterError), errors
        with place.open() as store:
            assert len(list(store.stream("a/stream").read())) + len(list(store.revisioned("a/log").read())) >= before + stored[0]


@pytest.mark.parametrize("catalog_url", ["sqlite"], indirect=True)
def test_an_ack_of_events_that_were_in_nobody_s_hands_at_a_fork_ends_in_the_child(store: hw.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = store.create_stream("a/stream")
    inside, forked, may_gather = threading.Event(), threading.Event(), threading.Event()
    real_route, real_gather = routing.Router.route, Flusher._gather

    def route_after_the_fork(router: routing.Router, ref: Any) -> Any:
        inside.set()
        assert forked.wait(WAIT_SECONDS)
        return real_route(router, ref)

    def gather_when_all_is_given(flusher: Flusher) -> Any:
        assert may_gather.wait(WAIT_SECONDS)
        return real_gather(flusher)

    monkeypatch.setattr(routing.Router, "route", route_after_the_fork)
    monkeypatch.setattr(Flusher, "_gather", gather_when_all_is_given)
    with stream.writer() as writer:
        acks = [writer.write(b"%d" % number) for number in range(300)]
        may_gather.set()
        assert inside.wait(WAIT_SECONDS)
        child = os.fork()
        if child == 0:
            signal.alarm(10)
            told = 0
            for ack in (acks[0], acks[100], acks[299]):
                try:
                    ack.result()
                except hw.FencedError:
                    told += 1
            os._exit(0 if told == 3 else 1)
        forked.set()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert acks[299].result() == hw.Position(0, 299)


@pytest.mark.parametrize("catalog_url", ["sqlite"], indirect=True)
def test_an_ack_that_is_kept_keeps_nothing_else(store: hw.Store) -> None:
    stream = store.create_stream("a/stream")
    with stream.writer() as writer:
        for _ in range(9000):
            writer.write(bytes(10))  # so that runs have many places
        writer.flush()
        tracemalloc.start()
        try:
            acks = []
            for _ in range(20):
                for _ in range(100):
                    ack = writer.write(bytes(10))
                ack.result()
                acks.append(ack)
            gc.collect()
            assert tracemalloc.get_traced_memory()[0] < 20 * 20_000
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("catalog_url", ["postgresql"], indirect=True)
def test_all_connections_that_a_restart_ended_are_given_up_at_once(store: hw.Store) -> None:
    store.create_stream("a/stream")
    database = store._engine.database
    assert isinstance(database, PostgresDatabase)
    many = [database._take() for _ in range(40)]
    for pipeline in many:
        database._give_back(pipeline)
    other = database.connect()
    everyone_else = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND datname = current_database()"
    other.run([(everyone_else, ())])
    other.close()
    began = time.monotonic()
    with store.stream("a/stream").writer() as writer:
        writer.write(b"x").result()
    assert time.monotonic() - began < 5
