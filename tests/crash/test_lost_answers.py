"""The answer to a change is lost after COMMIT: what recognises that it was done, or may be done twice, is repeated unnoticed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import headwater as hw
from headwater.catalog import transactions
from headwater.readers import reader as reader_module
from tests.crash.processes import wait_until
from tests.crash.test_unknown_outcome import Proxy

pytestmark = pytest.mark.slow

STREAM, OTHER = "lost/events", "lost/other"


class Lossy:
    """A store on PostgreSQL that loses answers when it is told to."""

    def __init__(self, store: hw.Store, proxy: Proxy) -> None:
        self.store = store
        self.stream = store.stream(STREAM)
        self._proxy = proxy

    def lose(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Make a call, the answer to whose first commit is lost."""
        before = self._proxy.dropped
        self._proxy.armed.set()
        try:
            return call(*args, **kwargs)
        finally:
            self._proxy.armed.clear()
            assert self._proxy.dropped == before + 1, "an answer was lost"


@pytest.fixture
def lossy(postgres_url: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lossy]:
    proxy = Proxy(postgres_url, tmp_path_factory.mktemp("s"))
    try:
        with hw.open(tmp_path / "store", catalog=proxy.url, upkeep=False) as store:
            with store.create_stream(STREAM).writer() as writer:
                for number in range(10):
                    writer.write(b"%d" % number)
            yield Lossy(store, proxy)
    finally:
        proxy.close()


def test_a_store_is_made(postgres_url: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    proxy = Proxy(postgres_url, tmp_path_factory.mktemp("s"))
    proxy.armed.set()
    try:
        with hw.open(tmp_path / "store", catalog=proxy.url, upkeep=False) as store:
            assert store.scopes() == []
        assert proxy.dropped == 1
    finally:
        proxy.close()


def test_a_named_writer_is_opened_and_goes_on_behind_its_last_number(lossy: Lossy) -> None:
    with lossy.stream.writer("source") as first:
        first.write(b"10", number=7).result()
    with lossy.lose(lossy.stream.writer, "source") as writer:
        assert writer.last_number == 7
        assert writer.write(b"11", number=8).result() == (0, 11)


def test_a_stream_that_may_be_there_is_made(lossy: Lossy) -> None:
    stream = lossy.lose(lossy.store.create_stream, OTHER, labels=["x"], exist_ok=True)
    assert stream.name == OTHER and lossy.store.streams(label="x") == [OTHER]
    assert list(lossy.lose(lossy.store.table, "lost/table").items()) == []


def test_a_stream_is_changed_sealed_and_truncated(lossy: Lossy) -> None:
    lossy.lose(lossy.stream.update, labels=["x"], retention=hw.Retention.by_size(10**9))
    assert lossy.store.streams(label="x") == [STREAM]
    lossy.lose(lossy.stream.truncate, lossy.stream.tail())
    assert list(lossy.stream.read()) == []
    lossy.lose(lossy.stream.seal)
    with pytest.raises(hw.SealedError):
        lossy.stream.split(0)


def test_a_group_and_its_readers_are_made_asked_and_removed(lossy: Lossy) -> None:
    group = lossy.lose(lossy.store.reader_group, "group", [STREAM])
    reader = lossy.lose(group.reader, "r")
    assert reader.read(timeout=10).value == b"0"
    lossy.lose(group.remove_reader, "r")
    with pytest.raises(hw.FencedError):
        reader.commit()
    assert lossy.lose(group.checkpoint) == lossy.stream.head()


def test_positions_are_committed_within_a_read_and_by_hand(lossy: Lossy, monkeypatch: pytest.MonkeyPatch) -> None:
    group = lossy.store.reader_group("group", [STREAM])
    with group.reader("r") as reader:
        assert [reader.read(timeout=10).value for _ in range(3)] == [b"0", b"1", b"2"]  # type: ignore[union-attr]
        monkeypatch.setattr(reader_module, "_AUTO_COMMIT_SECONDS", 0.0)
        assert lossy.lose(reader.read, timeout=10).value == b"3"
        monkeypatch.undo()
        assert group.lag().events == 7
        lossy.lose(reader.commit)
        assert group.lag().events == 6
        assert reader.read(timeout=10).value == b"4"  # type: ignore[union-attr]


def test_positions_at_the_end_of_a_segment_are_committed_and_its_successors_read(lossy: Lossy) -> None:
    # With the commit that was done the segment is nobody's any more.
    group = lossy.store.reader_group("group", [STREAM])
    lossy.stream.split(0)
    with lossy.stream.writer() as writer:
        writer.write(b"behind", key="k")
    with group.reader("r", commit="manual") as reader:
        assert [reader.read(timeout=10).value for _ in range(10)] == [b"%d" % number for number in range(10)]  # type: ignore[union-attr]
        lossy.lose(reader.commit)
        assert group.lag().events == 1
        assert reader.read(timeout=10).value == b"behind"  # type: ignore[union-attr]
        lossy.lose(reader.commit)
        assert group.lag().events == 0


def test_positions_that_may_be_committed_can_be_committed_again_when_the_catalog_is_back(
    lossy: Lossy, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = lossy.store.reader_group("group", [STREAM])
    lossy.stream.seal()
    database = lossy.store._engine.database
    write = database.write

    def out_of_reach_afterwards(work: Callable[..., Any], **options: Any) -> Any:
        write(work, **options)
        raise hw.UnavailableError("out of reach")

    with group.reader("r", commit="manual") as reader:
        assert reader.read_batch(timeout=10).num_rows == 10  # type: ignore[union-attr]
        monkeypatch.setattr(database, "write", out_of_reach_afterwards)
        with pytest.raises(hw.UnavailableError):
            reader.commit()
        monkeypatch.undo()
        reader.commit()
        assert group.lag().events == 0


def test_segments_that_are_given_up_with_a_commit_are_read_by_others(lossy: Lossy) -> None:
    stream = lossy.store.create_stream(OTHER, scaling=hw.Scaling.fixed(2))
    with stream.writer() as writer:
        for key in range(20):
            writer.write(b"x", key=key)
    group = lossy.store.reader_group("group", [OTHER])
    with group.reader("a", commit="manual") as reader:
        assert sum(reader.read(timeout=10) is not None for _ in range(20)) == 20
        with group.reader("b", commit="manual") as other:
            assert other.read(timeout=0) is None
            assert reader.read(timeout=1) is None  # By now it knows that one of its segments is too many.
            lossy.lose(reader.commit)
            assert group.lag().events == 0
            assert other.read(timeout=0) is None
            assert sorted(map(len, group.assignments().values())) == [1, 1]


def test_a_transaction_is_renewed_and_asked_for(lossy: Lossy) -> None:
    with lossy.store.transaction() as tx:
        tx.write(STREAM, b"10")
        tx.flush()
        lossy.lose(tx.renew)
        assert tx.status is hw.TransactionStatus.OPEN
    late = lossy.store.transaction(lease=0.2, auto_renew=False)
    late.write(STREAM, b"late")
    late.flush()
    wait_until(lambda: lossy.store._engine.run(transactions.find_state, late.id) is None)
    assert lossy.lose(lossy.store.transaction_status, late.id) is hw.TransactionStatus.ABORTED


def test_a_noted_time_is_stored(lossy: Lossy) -> None:
    with lossy.stream.writer() as writer:
        lossy.lose(writer.note_time, datetime(2024, 1, 1, tzinfo=UTC))


def test_an_entry_is_put_once(lossy: Lossy) -> None:
    table = lossy.store.table("lost/table")
    lossy.lose(table.put, "key", b"value")
    assert table.get("key").value == b"value"  # type: ignore[union-attr]
    assert len(list(table.changes())) == 1


def test_a_change_of_an_entry_on_a_condition_is_made_once_and_answered(lossy: Lossy) -> None:
    """It does not find its own change and take it for another's."""
    table = lossy.store.table("lost/table")
    version = lossy.lose(table.put, "key", b"value", version=hw.ABSENT)
    assert table.get("key") == (b"value", version)
    assert lossy.lose(table.put, "key", b"more", version=version) == version + 1
    assert lossy.lose(table.remove, "key", version=version + 1) == version + 2
    assert lossy.lose(table.remove, "key") == version + 3
    assert [change.value for change in table.changes()] == [b"value", b"more", None, None]


UNKNOWN: dict[str, Callable[[Lossy], Any]] = {
    "making a scope": lambda lossy: lossy.store.create_scope("other"),
    "making a stream that must not be there": lambda lossy: lossy.store.create_stream(OTHER),
    "forking": lambda lossy: lossy.stream.fork(OTHER),
    "splitting": lambda lossy: lossy.stream.split(0),
    "tagging": lambda lossy: lossy.store.tag("tag", lossy.stream.tail()),
}


@pytest.mark.parametrize("call", [pytest.param(call, id=name) for name, call in UNKNOWN.items()])
def test_what_could_not_tell_its_own_work_from_another_s_says_that_it_is_unknown(lossy: Lossy, call: Callable[[Lossy], Any]) -> None:
    with pytest.raises(hw.OutcomeUnknownError, match="ask for the state"):
        lossy.lose(call, lossy)
