"""The answer to a commit is lost after COMMIT: it can be asked for, or the commit repeated; nothing is stored twice."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest

import headwater as hw
from headwater.catalog import commits
from headwater.catalog.commits import Outcome
from headwater.catalog.database import NO_NEWS, News, Row, Statement, Tx
from headwater.gathering import gather
from tests.crash.processes import Crew, Place, wait_until
from tests.crash.test_unknown_outcome import Proxy
from tests.crash.txn_workers import obey_transactions
from tests.operations import intercept

T = TypeVar("T")

ONE, TWO, TABLE = "lost/one", "lost/two", "lost/table"


class LosesAnswers:
    """A catalog that loses the answers to the next commits of transactions, as a broken network does."""

    def __init__(self, store: hw.Store) -> None:
        self._database = store._engine.database
        self._write = self._database.write
        self.left = 0
        self._write_whole = self._database.write_whole
        self._database.write = self._losing  # type: ignore[method-assign]
        self._database.write_whole = self._losing_whole  # type: ignore[method-assign]

    def _losing(self, work: Callable[..., T], *, repeatable: bool = False, news: News = NO_NEWS) -> T:
        result: Any = self._write(work, repeatable=repeatable, news=news)
        if isinstance(result, Outcome) and self.left:
            self.left -= 1
            raise hw.UnavailableError("the answer was lost")
        return result  # type: ignore[no-any-return]

    def _losing_whole(self, statements: Sequence[Statement], *failpoints: str, news: News = NO_NEWS) -> list[list[Row]] | None:
        result = self._write_whole(statements, *failpoints, news=news)
        if result is not None and self.left:
            self.left -= 1
            raise hw.UnavailableError("the answer was lost")
        return result


@pytest.fixture
def store(place: Place) -> Iterator[hw.Store]:
    with place.open() as store:
        store.create_stream(ONE, scaling=hw.Scaling.fixed(2))
        store.create_stream(TWO)
        store.table(TABLE)
        yield store


def _values(store: hw.Store, stream: str) -> list[bytes]:
    return [event.value[:8].rstrip(b".") for event in store.stream(stream).read()]


def _fill(tx: hw.Transaction, padding: str = "") -> None:
    tx.write(ONE, "1" + padding, key="a")
    tx.write(TWO, "1" + padding)
    tx.put(TABLE, "key", b"1")


@pytest.mark.parametrize("padding", [pytest.param("", id="inline"), pytest.param("." * 100_000, id="object")])
@pytest.mark.parametrize("staged", [False, True])
def test_a_commit_whose_answer_was_lost_may_be_repeated(store: hw.Store, staged: bool, padding: str) -> None:
    catalog = LosesAnswers(store)
    tx = store.transaction()
    _fill(tx, padding)
    if staged:
        tx.flush()
    catalog.left = 2
    for _ in range(2):
        with pytest.raises(hw.UnavailableError):
            tx.commit()
        assert store.transaction_status(tx.id) is hw.TransactionStatus.COMMITTED, "it can be asked for, too"
    first = tx.commit()
    assert not first.repeated and tx.commit() == first
    assert _values(store, ONE) == _values(store, TWO) == [b"1"]
    assert [change.key for change in store.table(TABLE).changes()] == ["key"]
    with pytest.raises(hw.TransactionEndedError):
        tx.abort()


def test_a_commit_of_one_event_whose_answer_was_lost_may_be_repeated(store: hw.Store) -> None:
    # In one round trip: see `commits.commit_one`.
    catalog = LosesAnswers(store)
    for number in range(3):
        tx = store.transaction()
        tx.write(TWO, str(number))
        catalog.left = 1
        with pytest.raises(hw.UnavailableError):
            tx.commit()
        assert not catalog.left
        assert tx.status is hw.TransactionStatus.COMMITTED
        commit = tx.commit()
        assert not commit.repeated and commit.cut == store.cut(TWO)
    assert _values(store, TWO) == [b"0", b"1", b"2"]


@pytest.mark.parametrize("scale", ["roll", "roll and merge"])
def test_a_rolled_commit_whose_answer_was_lost_may_be_repeated(store: hw.Store, scale: str) -> None:
    catalog = LosesAnswers(store)
    stream = store.stream(ONE)
    tx = store.transaction()
    tx.write(ONE, "1", key="a")
    tx.flush()
    tx.write(ONE, "2", key="a")
    for segment in stream.segments():
        stream.split(segment.number)
    catalog.left = 1
    with pytest.raises(hw.UnavailableError):
        tx.commit()
    if scale == "roll and merge":
        stream.merge([segment.number for segment in stream.segments()])
    tx.commit()
    assert _values(store, ONE) == [b"1", b"2"]


def test_a_prepared_commit_that_failed_may_be_repeated_after_a_merge(store: hw.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    # Everything was staged for the roll; what made the roll necessary is gone when it is tried again.
    stream = store.stream(ONE)
    tx = store.transaction()
    tx.write(ONE, "1", key="a")
    tx.flush()
    tx.write(ONE, "2", key="a")
    for segment in stream.segments():
        stream.split(segment.number)

    def fails(operation: str, run: Callable[[], Any]) -> Any:
        if operation == "commits.commit_prepared":
            raise hw.UnavailableError("out of reach")
        return run()

    with monkeypatch.context() as patched:
        intercept(patched, store, fails)
        with pytest.raises(hw.UnavailableError):
            tx.commit()
    stream.merge([segment.number for segment in stream.segments()])
    tx.commit()
    assert _values(store, ONE) == [b"1", b"2"]
    assert store.transaction_status(tx.id) is hw.TransactionStatus.COMMITTED


def test_a_commit_whose_answer_was_lost_is_found_by_its_marker(store: hw.Store) -> None:
    catalog = LosesAnswers(store)
    marker = hw.Marker("source", 1, "abc")
    tx = store.transaction(marker=marker)
    _fill(tx)
    catalog.left = 1
    with pytest.raises(hw.UnavailableError):
        tx.commit()
    with store.transaction(marker=marker) as again:
        _fill(again)
    assert again.commit().repeated and again.commit().id == tx.id
    assert _values(store, ONE) == _values(store, TWO) == [b"1"]
    assert again.commit().cut == tx.commit().cut


def test_positions_whose_commit_lost_its_answer_are_durable(store: hw.Store) -> None:
    catalog = LosesAnswers(store)
    with store.stream(TWO).writer() as writer:
        for number in range(4):
            writer.write(b"%d" % number)
    group = store.reader_group("group", [TWO])
    with group.reader("r", commit="manual") as reader:
        tx = store.transaction()
        for _ in range(2):
            event = reader.read()
            assert event is not None
            tx.write(ONE, event.value, key="a")
        tx.commit_reader(reader)
        catalog.left = 1
        with pytest.raises(hw.UnavailableError):
            tx.commit()
        tx.commit()
        reader.rewind()
        event = reader.read()
        assert event is not None and event.value == b"2", "the position was committed, once"
    assert _values(store, ONE) == [b"0", b"1"]


@pytest.mark.slow
def test_a_process_killed_after_commit_leaves_a_commit_that_can_be_asked_for(place: Place, store: hw.Store, crew: Crew) -> None:
    worker = crew.start(obey_transactions, place)
    _, id = worker.ask("begin", 30.0)
    worker.ask("write", TWO, ["1"])
    worker.ask("arm", "txn.committed=kill")
    worker.tell(("commit",))
    assert worker.wait() == -9
    assert store.transaction_status(id) is hw.TransactionStatus.COMMITTED
    with pytest.raises(hw.TransactionEndedError):
        store.resume_transaction(id)
    assert _values(store, TWO) == [b"1"]


@pytest.mark.slow
@pytest.mark.parametrize("staged", [False, True])
def test_a_connection_that_breaks_after_commit_changes_nothing(
    postgres_url: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, staged: bool
) -> None:
    Place(str(tmp_path / "store"), postgres_url).open(create=True).close()
    proxy = Proxy(postgres_url, tmp_path_factory.mktemp("s"))
    try:
        with Place(str(tmp_path / "store"), proxy.url).open() as store:
            store.create_stream(ONE)
            store.create_stream(TWO)
            store.table(TABLE)
            for number in range(1, 4):
                tx = store.transaction(marker=hw.Marker("source", number))
                _fill(tx)
                if staged:
                    tx.flush()
                before = proxy.dropped
                proxy.armed.set()
                assert not tx.commit().repeated
                wait_until(lambda before=before: proxy.dropped == before + 1)  # type: ignore[misc]
                assert len(_values(store, ONE)) == len(_values(store, TWO)) == number
    finally:
        proxy.close()


@pytest.mark.slow
def test_a_connection_that_breaks_after_the_commit_of_one_event_changes_nothing(
    postgres_url: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    Place(str(tmp_path / "store"), postgres_url).open(create=True).close()
    proxy = Proxy(postgres_url, tmp_path_factory.mktemp("s"))
    try:
        with Place(str(tmp_path / "store"), proxy.url).open() as store:
            store.create_stream(TWO)
            for number in range(1, 4):
                tx = store.transaction()
                tx.write(TWO, "1")
                before = proxy.dropped
                proxy.armed.set()
                commit = tx.commit()
                wait_until(lambda before=before: proxy.dropped == before + 1)  # type: ignore[misc]
                assert not commit.repeated and commit.cut == store.cut(TWO)
                assert len(_values(store, TWO)) == number
    finally:
        proxy.close()


def _second_attempt(store: hw.Store, arguments: Any, second: Callable[[], T]) -> T:
    """What a second attempt of a commit finds, that comes while the server is still at work for the first: its connection was given up."""
    is_done, may_end = threading.Event(), threading.Event()

    def first(catalog: Tx) -> Outcome:
        outcome = commits.commit(catalog, *arguments)
        is_done.set()
        may_end.wait(5)
        return outcome

    with ThreadPoolExecutor(2) as threads:
        one = threads.submit(store._engine.database.write, first, repeatable=True)
        assert is_done.wait(10)
        two = threads.submit(second)
        time.sleep(0.3)
        may_end.set()
        assert one.result(20).id == arguments[0]
        return two.result(20)


def test_of_two_attempts_to_commit_one_event_at_the_same_time_the_later_finds_the_first(store: hw.Store) -> None:
    tx = store.transaction()
    tx.write(TWO, "1")
    batch = gather(store._engine, store._router, tx._contents, tx._id)
    again = (tx._id, batch, 30_000_000, "me")
    assert _second_attempt(store, (tx._id, batch, None, *again[2:]), lambda: store._engine.run(commits.commit_one, *again)) is None
    assert _values(store, TWO) == [b"1"]


@pytest.mark.parametrize("marker", [None, hw.Marker("source", 1)])
@pytest.mark.parametrize("has_events", [False, True])
def test_of_two_attempts_of_one_commit_at_the_same_time_the_later_finds_the_first(
    store: hw.Store, has_events: bool, marker: hw.Marker | None
) -> None:
    tx = store.transaction(marker=marker)
    if has_events:
        tx.write(ONE, "1", key="a")
    arguments = (tx._id, gather(store._engine, store._router, tx._contents, tx._id), tx._marker, 30_000_000, "me")
    found = _second_attempt(store, arguments, lambda: store._engine.run(commits.commit, *arguments))
    assert found.id == tx._id
    assert _values(store, ONE) == ([b"1"] if has_events else [])
    assert store.transaction_status(tx._id) is hw.TransactionStatus.COMMITTED
