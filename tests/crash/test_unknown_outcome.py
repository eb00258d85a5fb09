"""The answer is lost after COMMIT: the same flush again changes nothing, and its acks say where the events are."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qs, quote, unquote, urlsplit

import pytest

import headwater as hw
from headwater.catalog.database import NO_NEWS, News, Row, Statement
from headwater.segments import storing
from tests.crash.processes import Place, wait_until
from tests.operations import fence_all

T = TypeVar("T")

STREAM = "lost/events"
SIZES = [pytest.param(10, id="inline"), pytest.param(100_000, id="journal")]


class LosesAnswers:
    """A catalog whose answer to the next flush is lost after it was committed, as on a broken network."""

    def __init__(self, store: hw.Store) -> None:
        self._database = store._engine.database
        self._write = self._database.write
        self._write_whole = self._database.write_whole
        self._meanwhile: Callable[[], object] | None = None
        self._error: Exception | None = None
        self.lost = 0
        self._database.write = self._losing  # type: ignore[method-assign]
        self._database.write_whole = self._losing_whole  # type: ignore[method-assign]

    def lose(self, error: Exception | None = None, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Lose the next answer. The caller sees `error`, after `meanwhile` has happened."""
        self._error = error or hw.UnavailableError("the answer was lost")
        self._meanwhile = meanwhile

    def _losing(self, work: Callable[..., T], *, repeatable: bool = False, news: News = NO_NEWS) -> T:
        result = self._write(work, repeatable=repeatable, news=news)
        # A flush is the one repeatable change with a list for an answer.
        return self._lose(result) if isinstance(result, list) and repeatable else result

    def _losing_whole(self, statements: Sequence[Statement], *failpoints: str, news: News = NO_NEWS) -> list[list[Row]] | None:
        result = self._write_whole(statements, *failpoints, news=news)
        return self._lose(result) if result is not None else None

    def _lose(self, result: T) -> T:
        if self._meanwhile is not None:
            meanwhile, self._meanwhile = self._meanwhile, None
            meanwhile()
            self.lost += 1
            assert self._error is not None
            raise self._error
        return result


@pytest.fixture
def store(place: Place) -> Iterator[hw.Store]:
    with place.open() as store:
        store.create_stream(STREAM)
        yield store


def _result(ack: hw.Ack) -> Any:
    """The ack's result, however often the catalog is out of reach."""
    while True:
        try:
            return ack.result(timeout=30)
        except hw.UnavailableError:
            continue


def _values(store: hw.Store) -> list[bytes]:
    return [event.value.rstrip(b".") for event in store.stream(STREAM).read()]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("id", [None, "source"])
def test_a_flush_whose_answer_was_lost_is_stored_once(store: hw.Store, size: int, id: str | None) -> None:
    catalog = LosesAnswers(store)
    with store.stream(STREAM).writer(id) as writer:
        writer.write(b"0").result()
        for number in range(1, 4):
            catalog.lose()
            assert _result(writer.write((b"%d" % number).ljust(size, b"."))) == (0, number)
    assert catalog.lost == 3
    assert _values(store) == [b"0", b"1", b"2", b"3"]


@pytest.mark.parametrize("size", SIZES)
def test_a_lost_answer_is_found_also_when_the_events_were_truncated_meanwhile(store: hw.Store, size: int) -> None:
    catalog = LosesAnswers(store)
    stream = store.stream(STREAM)
    with stream.writer() as writer:
        catalog.lose(meanwhile=lambda: stream.truncate(stream.tail()))
        assert _result(writer.write(b"0".ljust(size, b"."))) == (0, 0)
        assert not store._engine.database.query("SELECT first FROM extent"), "the extents are gone"
        assert _result(writer.write(b"1")) == (0, 1)
    assert catalog.lost == 1
    assert _values(store) == [b"1"]


@pytest.mark.parametrize("size", SIZES)
def test_a_lost_answer_is_found_also_when_the_events_were_tiered_meanwhile(store: hw.Store, size: int) -> None:
    catalog = LosesAnswers(store)
    stream = store.stream(STREAM)
    with stream.writer() as writer:
        catalog.lose(meanwhile=lambda: store.run_upkeep())
        assert _result(writer.write(b"0".ljust(size, b"."))) == (0, 0)
        assert len(stream.chunks()) == 1, "the block is a chunk by now"
        assert _result(writer.write(b"1")) == (0, 1)
    assert catalog.lost == 1
    assert _values(store) == [b"0", b"1"]


def test_a_lost_answer_is_found_also_when_the_segment_was_sealed_meanwhile(store: hw.Store) -> None:
    catalog = LosesAnswers(store)
    stream = store.stream(STREAM)
    with stream.writer() as writer:
        catalog.lose(meanwhile=lambda: stream.split(0))
        assert _result(writer.write(b"0", key="k")) == (0, 0)
        writer.write(b"1", key="k").result()
    assert _values(store) == [b"0", b"1"]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("id", [None, "source"])
def test_a_lost_answer_is_found_also_when_the_session_was_fenced_after_the_commit(store: hw.Store, size: int, id: str | None) -> None:
    catalog = LosesAnswers(store)

    def fence() -> None:
        assert fence_all(store._engine.database)

    with store.stream(STREAM).writer(id) as writer:
        catalog.lose(meanwhile=fence)
        assert _result(writer.write(b"0".ljust(size, b"."))) == (0, 0)
        assert _result(writer.write(b"1".ljust(size, b"."))) == (0, 1)
    assert catalog.lost == 1
    assert _values(store) == [b"0", b"1"]


@pytest.mark.parametrize("id", [None, "source"])
def test_a_lost_answer_is_found_also_when_the_session_is_due_for_renewal_and_fenced(
    store: hw.Store, id: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Out of reach for so long that the first thing to do afterwards is to renew the session, which then says that it was fenced.
    catalog = LosesAnswers(store)

    def fence() -> None:
        assert fence_all(store._engine.database)
        monkeypatch.setattr(storing, "SESSION_SECONDS", 0.0)

    with store.stream(STREAM).writer(id) as writer:
        catalog.lose(meanwhile=fence)
        ack = writer.write(b"0")
        assert _result(ack) == (0, 0)
        monkeypatch.undo()
        writer.write(b"1").result()
    assert _values(store) == [b"0", b"1"]


def test_after_a_failure_for_good_the_number_of_its_flush_is_not_used_again(store: hw.Store) -> None:
    # The commit was done, its answer lost, and then the server refused the connection for good. The next flush must not get that answer.
    catalog = LosesAnswers(store)
    stream = store.stream(STREAM)
    catalog.lose(hw.InvalidRequestError("the password was changed"))
    writer = stream.writer()
    with pytest.raises(hw.InvalidRequestError):
        writer.write(b"0").result()
    with pytest.raises(hw.InvalidRequestError):
        writer.close()
    writer.abandon()
    with stream.writer() as second:
        assert second.write(b"1").result() == (0, 1)
    assert _values(store) == [b"0", b"1"]


#: The end of what the server says when it has let someone in.
_READY = b"Z\x00\x00\x00\x05I"


class Proxy:
    """Between a client and PostgreSQL's socket. Armed, it lets the next commit be done, drops the answer, and hangs up.

    It can also let connections go mute: nothing that the server says arrives any more, and nobody hangs up.
    """

    def __init__(self, url: str, folder: Path) -> None:
        parts = urlsplit(url)
        query = parse_qs(parts.query)
        self._server = f"{unquote(query['host'][0])}/.s.PGSQL.5432"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / ".s.PGSQL.5432"))
        self._listener.listen()
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path}?host={quote(str(folder), safe='')}"
        self.armed = threading.Event()
        self.dropped = 0
        #: Connections that are made from now on go mute as soon as they are there.
        self.mutes_new = threading.Event()
        self._mute: set[socket.socket] = set()
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def silence(self) -> None:
        """Let all connections that are there go mute."""
        self._mute.update(self._sockets)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.socket(socket.AF_UNIX)
                server.connect(self._server)
                self._sockets += [client, server]
                threading.Thread(target=self._pass_on, args=(client, server), daemon=True).start()

    def _pass_on(self, client: socket.socket, server: socket.socket) -> None:
        # ValueError: closed under the select.
        with contextlib.suppress(OSError, ValueError), client, server:
            while True:
                for ready in select.select([client, server], [], [])[0]:
                    data = ready.recv(1 << 20)
                    if not data:
                        return
                    if ready is server and self.armed.is_set():
                        data = self._rest_of_answer(data, client, server)
                        # A COMMIT was done; or what a round trip inserted is committed, since it is outside of a transaction at its end.
                        if b"COMMIT\x00" in data or (b"INSERT 0 " in data and data.endswith(b"I")):
                            self.armed.clear()
                            self.dropped += 1
                            return
                    if ready is client or client not in self._mute:
                        (server if ready is client else client).sendall(data)
                    if ready is server and self.mutes_new.is_set() and data.endswith(_READY):
                        self._mute.add(client)

    def _rest_of_answer(self, data: bytes, client: socket.socket, server: socket.socket) -> bytes:
        """All that the server says until it is ready for more."""
        while data[-6:-1] != b"Z\x00\x00\x00\x05":
            # The Sync that makes the server answer may come apart from the statements.
            ready = select.select([client, server], [], [])[0][0]
            more = ready.recv(1 << 20)
            if not more:
                break
            if ready is client:
                server.sendall(more)
            else:
                data += more
        return data

    def close(self) -> None:
        for each in [self._listener, *self._sockets]:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_a_connection_that_breaks_after_commit_changes_nothing(
    postgres_url: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, size: int
) -> None:
    Place(str(tmp_path / "store"), postgres_url).open(create=True).close()
    proxy = Proxy(postgres_url, tmp_path_factory.mktemp("s"))
    try:
        with Place(str(tmp_path / "store"), proxy.url).open() as store:
            store.create_stream(STREAM)
            with store.stream(STREAM).writer() as writer, store.stream(STREAM).writer("source") as named:
                writer.write(b"a").result()
                for number in range(3):
                    proxy.armed.set()
                    before = proxy.dropped
                    ack = writer.write((b"%d" % number).ljust(size, b"."))
                    assert _result(ack) == (0, 2 * number + 1)
                    wait_until(lambda before=before: proxy.dropped == before + 1)  # type: ignore[misc]
                    assert _result(named.write(b"n%d" % number)) == (0, 2 * number + 2)
            assert _values(store) == [b"a", b"0", b"n0", b"1", b"n1", b"2", b"n2"]
    finally:
        proxy.close()
