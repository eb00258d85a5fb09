"""Code that runs in the midst of a commit of the same thread: finalisers, signal handlers, logging handlers. The commit stays whole."""

from __future__ import annotations

import gc
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any

import pytest

import headwater as hw
from headwater.catalog.sqlite import SqliteTx
from headwater.segments.engine import Engine
from tests.contract.writing import values

Interruptions = Callable[[Callable[[], object]], Any]


@pytest.fixture
def interrupting(monkeypatch: pytest.MonkeyPatch) -> Interruptions:
    """Calls something before each statement of a transaction on SQLite, in its thread."""

    @contextmanager
    def begin(interrupt: Callable[[], object]) -> Iterator[None]:
        busy = threading.local()

        def instead(name: str) -> Callable[..., Any]:
            real = getattr(SqliteTx, name)

            def interrupted(self: SqliteTx, *args: Any) -> Any:
                if not getattr(busy, "is_so", False):
                    busy.is_so = True
                    try:
                        interrupt()
                    finally:
                        busy.is_so = False
                return real(self, *args)

            return interrupted

        with monkeypatch.context() as patch:
            for name in ("run", "defer"):
                patch.setattr(SqliteTx, name, instead(name))
            yield

    return begin


def begin_and_let_go(stream: hw.Stream) -> None:
    """Begin to read, and leave the reader to Python's garbage collector."""
    events = stream.read()
    next(events)

    def cycle() -> Any:
        return events, cycle


def test_a_reader_that_is_collected_as_garbage_in_the_midst_of_a_commit_does_it_no_harm(
    local_store: hw.Store, interrupting: Interruptions
) -> None:
    kept = local_store.create_stream("a/kept", retention=hw.Retention.by_time(timedelta(days=1)))
    stream = local_store.create_stream("a/x")
    with kept.writer() as writer:
        writer.write("one")
    acked = []
    gc.disable()
    try:
        with stream.writer() as writer:
            for number in range(5):
                begin_and_let_go(kept)
                with interrupting(gc.collect):
                    acked.append(writer.write(str(number)).result())
    finally:
        gc.enable()
    assert values(stream) == [str(number).encode() for number in range(5)]
    assert [position.number for position in acked] == list(range(5))
    local_store.create_stream("a/y")  # With the next change they are let go of.
    assert local_store._engine.database.query("SELECT count(*) FROM pin") == [(0,)]


def test_a_reader_that_was_let_go_of_holds_nothing_after_the_store_was_closed(local_store: hw.Store, tmp_path: Any) -> None:
    kept = local_store.create_stream("a/kept", retention=hw.Retention.by_time(timedelta(days=1)))
    with kept.writer() as writer:
        writer.write("one")
    begin_and_let_go(kept)
    gc.collect()
    local_store.close()
    with hw.open(tmp_path / "store") as again:
        assert again._engine.database.query("SELECT count(*) FROM pin") == [(0,)]


@pytest.mark.parametrize("url", ["directory", "memory://reentrance"])
def test_a_change_in_the_midst_of_another_one_of_the_same_thread_is_refused_and_the_other_goes_on(
    url: str, interrupting: Interruptions, tmp_path: Any
) -> None:
    refused = []
    with hw.open(url if "://" in url else tmp_path / "store") as store:
        stream, table = store.create_stream("a/x"), store.table("a/t")

        def put() -> None:
            try:
                table.put("k", b"v")
            except hw.UnavailableError as error:
                refused.append(str(error))

        with stream.writer() as writer, interrupting(put):
            acked = [writer.write(str(number)).result() for number in range(3)]
        with interrupting(put):
            stream.split(0)
        put()
        assert len(refused) > 3 and all("in the middle of another" in text for text in refused)
        assert values(stream) == [b"0", b"1", b"2"] and len(stream.segments()) == 2
        assert [position.number for position in acked] == [0, 1, 2] and table.get("k") is not None


def test_closing_the_store_in_a_signal_handler_in_the_midst_of_an_ack_is_refused_at_once(
    local_store: hw.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = local_store.create_stream("a/x")
    commit_flush = Engine.commit_flush
    caught: list[hw.HeadwaterError] = []

    def handle(number: int, frame: FrameType | None) -> None:
        try:
            local_store.close()
        except hw.HeadwaterError as error:
            caught.append(error)

    def interrupted(self: Engine, flush: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            signal.raise_signal(signal.SIGUSR1)
        return commit_flush(self, flush)

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with stream.writer() as writer:
            writer.write("first").result()
            monkeypatch.setattr(Engine, "commit_flush", interrupted)
            while not caught:
                writer.write("more").result()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert isinstance(caught[0], hw.UnavailableError) and "signal handler" in str(caught[0])
    assert len(values(stream)) == len(caught) + sum(value == b"first" for value in values(stream))


def test_what_upkeep_logs_is_logged_outside_of_its_transactions(store: hw.Store) -> None:
    stream = store.create_stream("a/x", retention=hw.Retention.by_consumption(["nobody"]))
    heard: list[bool] = []

    class Listening(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            store.table("a/log").put("last", record.getMessage().encode())
            heard.append("nobody" in record.getMessage())

    with stream.writer() as writer:
        writer.write("one")
    logger = logging.getLogger("headwater")
    handler = Listening()
    logger.addHandler(handler)
    try:
        report = next(store.upkeep_rounds(every=0.0))
    finally:
        logger.removeHandler(handler)
    assert any(heard) and report is not None and all("nobody" in problem for problem in report.problems)
