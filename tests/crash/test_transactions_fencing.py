"""A process that looked dead and was not: its transaction timed out, its segments are another reader's; what it commits late is refused."""

from __future__ import annotations

from contextlib import suppress

import pytest

import headwater as hw
from headwater.catalog import groups
from tests.crash.processes import Crew, Place, Worker, wait_until
from tests.crash.txn_workers import obey_transactions

pytestmark = pytest.mark.slow

IN, OUT, TABLE = "fence/in", "fence/out", "fence/table"
LEASE_SECONDS = 1.0


@pytest.fixture
def store(place: Place) -> hw.Store:
    store = place.open()
    store.create_stream(IN)
    store.create_stream(OUT)
    store.table(TABLE)
    return store


def _values(store: hw.Store, stream: str = OUT) -> list[bytes]:
    return [event.value for event in store.stream(stream).read()]


def _begin(crew: Crew, place: Place, lease: float = LEASE_SECONDS) -> tuple[Worker, str]:
    zombie = crew.start(obey_transactions, place)
    _, id = zombie.ask("begin", lease)
    zombie.ask("write", OUT, ["staged"])
    zombie.ask("put", TABLE, "key", b"value")
    zombie.ask("flush")
    zombie.ask("write", OUT, ["with the commit"])
    return zombie, id


def _is_open_by_upkeep(store: hw.Store, id: str) -> bool:
    with suppress(hw.FencedError):  # On a busy machine a round may outlast its lease.
        store.run_upkeep()
    return bool(store._engine.database.query("SELECT id FROM txn WHERE id = ? AND state = 'open'", (id,)))


def _is_open_by_status(store: hw.Store, id: str) -> bool:
    return store.transaction_status(id) is hw.TransactionStatus.OPEN


@pytest.mark.parametrize("is_open", [_is_open_by_upkeep, _is_open_by_status])
def test_a_process_stopped_past_its_lease_commits_nothing(place: Place, store: hw.Store, crew: Crew, is_open: object) -> None:
    assert callable(is_open)
    with store:
        zombie, id = _begin(crew, place)
        # While it runs it renews its lease by itself.
        deadline = store._engine.database.query("SELECT expires_at FROM txn WHERE id = ?", (id,))[0][0] + 500_000
        wait_until(lambda: store._engine.database.query("SELECT expires_at FROM txn WHERE id = ?", (id,))[0][0] > deadline)
        assert is_open(store, id)

        zombie.stop()
        wait_until(lambda: not is_open(store, id))
        zombie.go_on()

        assert zombie.ask("commit")[:2] == (False, "TransactionEndedError")
        assert zombie.ask("commit")[:2] == (False, "TransactionEndedError"), "and so it stays"
        assert zombie.ask("status") == (True, "aborted")
        assert store.transaction_status(id) is hw.TransactionStatus.ABORTED
        assert _values(store) == [] and store.table(TABLE).get("key") is None
        # The process is well: its next transaction is committed.
        zombie.ask("begin", 30.0)
        zombie.ask("write", OUT, ["next"])
        assert zombie.ask("commit")[0] and _values(store) == [b"next"]


@pytest.mark.parametrize("failpoint", ["txn.stored", "txn.staged"])
def test_a_process_stopped_past_its_lease_while_it_stages_adds_nothing(place: Place, store: hw.Store, crew: Crew, failpoint: str) -> None:
    with store:
        zombie, id = _begin(crew, place, lease=5.0)
        zombie.ask("write", OUT, ["." * 100_000])
        zombie.ask("arm", f"{failpoint}=stop")
        zombie.tell(("flush",))
        zombie.wait_until_stopped()
        wait_until(lambda: not _is_open_by_upkeep(store, id))
        zombie.go_on()
        assert zombie.hear()[:2] == ((False, "TransactionEndedError") if failpoint == "txn.stored" else (True, None))
        assert zombie.ask("commit")[:2] == (False, "TransactionEndedError")
        assert _values(store) == [] and not store._engine.database.query("SELECT txn FROM txn_extent")


def test_a_process_stopped_after_it_prepared_is_aborted_or_committed_but_not_both(place: Place, store: hw.Store, crew: Crew) -> None:
    for outcome in ("aborted", "committed"):
        with_key = store.stream(IN)
        zombie = crew.start(obey_transactions, place)
        _, id = zombie.ask("begin", 60.0)
        zombie.ask("write", IN, [f"{outcome} first"], "k")
        zombie.ask("flush")
        zombie.ask("write", IN, [f"{outcome} second"], "k")
        _scale_under(with_key)
        zombie.ask("arm", "txn.prepared=stop")
        zombie.tell(("commit",))
        zombie.wait_until_stopped()
        assert store.transaction_status(id) is hw.TransactionStatus.OPEN
        handle = store.resume_transaction(id)
        if outcome == "aborted":
            handle.abort()
        else:
            handle.commit()
        zombie.go_on()
        assert zombie.hear()[:2] == ((False, "TransactionEndedError") if outcome == "aborted" else (True, False))
        assert store.transaction_status(id).value == outcome
    assert _values(store, IN) == [b"committed first", b"committed second"]
    store.close()


def _scale_under(stream: hw.Stream) -> None:
    """From n segments to n + 1: what is staged for one of them has no single place any more."""
    opened = [segment.number for segment in stream.segments()]
    whole = stream.merge(opened)[0].number if len(opened) > 1 else opened[0]
    stream.split(whole, parts=len(opened) + 1)


@pytest.mark.parametrize("how", ["commit_positions", "transaction"])
def test_a_reader_stopped_past_its_time_commits_neither_positions_nor_output(
    place: Place, store: hw.Store, crew: Crew, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store:
        with store.stream(IN).writer() as writer:
            for number in range(6):
                writer.write(b"%d" % number)
        group = store.reader_group("group", [IN])
        zombie = crew.start(obey_transactions, place)
        zombie.ask("join", "group", "zombie")
        assert zombie.ask("read", 4) == (True, [b"0", b"1", b"2", b"3"])
        if how == "transaction":
            zombie.ask("begin", 60.0)
            zombie.ask("write", OUT, ["0123"])
            zombie.ask("commit_reader")

        zombie.stop()
        # This process takes a reader for dead after a moment.
        monkeypatch.setattr(groups, "_DEAD_AFTER_US", 50_000)
        with group.reader("heir", commit="manual") as heir:
            first = heir.read(timeout=60.0)
            assert first is not None and first.value == b"0", "what was not committed comes again"
            heir.commit()
            zombie.go_on()
            refused = zombie.ask("commit" if how == "transaction" else "commit_positions")
            assert refused[:2] == (False, "FencedError")
            assert _values(store) == []
            second = heir.read()
            assert second is not None and second.value == b"1"
            heir.commit()
        assert group.positions() == hw.Cut.parse(str(group.positions())) and group.lag().events == 4
