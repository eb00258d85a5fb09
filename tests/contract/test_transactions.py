"""Transactions: all or nothing over streams, tables, shared state, readers and markers; leases; and streams that scale meanwhile."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pytest

import headwater as hw
from headwater.catalog.targets import RouteStale
from headwater.check import check_store
from headwater.runtime import failpoints
from tests.crash.processes import Crew, Place, wait_until
from tests.operations import intercept

# Many processes, time-outs and threads: not for a quick run.
pytestmark = pytest.mark.slow

T = TypeVar("T")
ONE, TWO, TABLE, STATE = "t/one", "t/two", "t/table", "t/state"
OPEN, COMMITTED, ABORTED = hw.TransactionStatus.OPEN, hw.TransactionStatus.COMMITTED, hw.TransactionStatus.ABORTED
#: Short, and never renewed: it runs out while the test waits for it.
LEASE_SECONDS = 0.2


@pytest.fixture
def store(place: Place) -> Iterator[hw.Store]:
    with place.open(create=True) as store:
        store.create_stream(ONE, scaling=hw.Scaling.fixed(2))
        store.create_stream(TWO)
        yield store
        report = check_store(store)
        assert report.ok, report.problems


def values(store: hw.Store, name: str) -> list[str]:
    return [event.value.decode() for event in store.stream(name).read()]


def counter(store: hw.Store) -> hw.Synchronizer[int, int]:
    return store.synchronizer(STATE, 0, lambda state, update: state + update)


def write(store: hw.Store, name: str, *events: str, key: str | None = None) -> None:
    with store.stream(name).writer() as writer:
        for value in events:
            writer.write(value, key=key)


def run_out(store: hw.Store, tx: hw.Transaction) -> None:
    """Wait until the lease is over, without looking at the transaction."""
    deadline = time.monotonic() + 2 * LEASE_SECONDS
    wait_until(lambda: time.monotonic() > deadline)


class LosesAnswers:
    """A catalog whose answers to some calls are lost after they were done."""

    def __init__(self, store: hw.Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lost: list[str] = []
        self.lose: set[str] = set()
        intercept(monkeypatch, store, self._losing)

    def _losing(self, operation: str, run: Callable[[], Any]) -> Any:
        result = run()
        if operation == "commits.commit_one" and result is None:
            return None
        name = operation.rpartition(".")[2].removesuffix("_one")
        if name in self.lose:
            self.lose.remove(name)
            self.lost.append(name)
            raise hw.UnavailableError("the answer was lost")
        return result


# Visibility.


def test_nothing_is_visible_before_the_commit_and_all_of_it_together_after(store: hw.Store) -> None:
    follower = store.stream(ONE).read(follow=True)
    with store.transaction() as tx:
        for number in range(10):
            tx.write(ONE, f"{number}", key=f"{number}")
            tx.write(TWO, f"{number}")
            if number == 5:
                tx.flush()
        write(store, ONE, "plain")
        assert next(follower).value == b"plain"
        assert values(store, ONE) == ["plain"] and values(store, TWO) == []
        assert store.stream(TWO).tail() == store.stream(TWO).head()
        assert tx.status is OPEN
    assert tx.status is COMMITTED
    assert {next(follower).value.decode() for _ in range(10)} == {f"{number}" for number in range(10)}
    assert sorted(values(store, ONE)) == sorted([*(f"{number}" for number in range(10)), "plain"])
    assert values(store, TWO) == [f"{number}" for number in range(10)]


def test_a_transaction_is_contiguous_in_each_segment_between_plain_writes(store: hw.Store) -> None:
    stop = threading.Event()

    def write_plainly() -> None:
        with store.stream(ONE).writer() as writer:
            number = 0
            while not stop.is_set():
                writer.write("plain", key=f"{number}").result()
                number += 1

    thread = threading.Thread(target=write_plainly)
    thread.start()
    try:
        for turn in range(10):
            with store.transaction() as tx:
                for number in range(20):
                    tx.write(ONE, f"{turn}", key=f"{number}")
                    if number == 10:
                        tx.flush()
    finally:
        stop.set()
        thread.join()
    segments = defaultdict(list)
    for event in store.stream(ONE).read():
        segments[event.position.segment].append(event.value.decode())
    assert sum(value != "plain" for found in segments.values() for value in found) == 200
    for found in segments.values():
        places = defaultdict(list)
        for place, value in enumerate(found):
            places[value].append(place)
        for turn in range(10):
            mine = places[f"{turn}"]
            assert mine == list(range(mine[0], mine[0] + len(mine)))


def test_the_order_of_commits_is_the_order_of_reading(store: hw.Store) -> None:
    transactions = [store.transaction() for _ in range(6)]
    for number, tx in enumerate(transactions):
        tx.write(TWO, f"{number}")
        if number % 2:
            tx.flush()
    for number in (3, 0, 5, 1, 4, 2):
        transactions[number].commit()
    assert values(store, TWO) == ["3", "0", "5", "1", "4", "2"]


def test_the_cut_of_a_commit_lies_right_behind_it(store: hw.Store) -> None:
    write(store, TWO, "before")
    tx = store.transaction()
    tx.write(ONE, "a", key="a")
    tx.write(TWO, "b")
    commit = tx.commit()
    write(store, TWO, "after")
    assert commit.id == tx.id and not commit.repeated
    assert set(commit.cut.streams) == {ONE, TWO}
    assert [event.value for event in store.stream(TWO).read(end=commit.cut)] == [b"before", b"b"]
    assert [event.value for event in store.stream(TWO).read(start=commit.cut)] == [b"after"]
    assert [event.value for event in store.stream(ONE).read(end=commit.cut)] == [b"a"]


def test_an_empty_transaction_commits(store: hw.Store) -> None:
    with store.transaction() as tx:
        pass
    assert tx.status is COMMITTED and not tx.commit().cut.streams
    assert store.transaction_status(tx.id) is COMMITTED


# Everything at once.


def everything(store: hw.Store, tx: hw.Transaction, reader: hw.Reader, sync: hw.Synchronizer[int, int]) -> None:
    event = reader.read(timeout=30)
    assert event is not None
    tx.write(ONE, "out", key="k")
    tx.write(TWO, "out")
    tx.put(TABLE, "kept", b"new")
    tx.remove(TABLE, "gone")
    tx.update(sync, [5])
    tx.commit_reader(reader)


@pytest.fixture
def scene(store: hw.Store) -> Iterator[tuple[hw.Store, hw.ReaderGroup, hw.Reader, hw.Synchronizer[int, int]]]:
    store.create_stream("t/in")
    write(store, "t/in", "1", "2", "3")
    table = store.table(TABLE)
    table.put("kept", b"old")
    table.put("gone", b"old")
    group = store.reader_group("group", ["t/in"])
    with group.reader("r", commit="manual") as reader:
        yield store, group, reader, counter(store)


def snapshot(store: hw.Store, group: hw.ReaderGroup) -> tuple[Any, ...]:
    table = store.table(TABLE)
    return values(store, ONE), values(store, TWO), dict(table.items()), len(list(table.changes())), counter(store).state, group.positions()


@pytest.mark.parametrize("staged", [False, True])
def test_streams_tables_state_positions_and_marker_are_one_commit(scene: Any, staged: bool) -> None:
    store, group, reader, sync = scene
    with store.transaction(marker=hw.Marker("me", 1)) as tx:
        everything(store, tx, reader, sync)
        if staged:
            tx.flush()
        before = snapshot(store, group)
        assert before[:2] == ([], []) and before[4] == 0
    assert values(store, ONE) == values(store, TWO) == ["out"]
    assert store.table(TABLE).get("kept") == (b"new", 3) and store.table(TABLE).get("gone") is None
    assert [(change.key, change.value) for change in store.table(TABLE).changes(after=2)] == [("kept", b"new"), ("gone", None)]
    assert sync.fetch() == 5
    assert group.positions().streams["t/in"].segments == {0: 1}
    assert set(tx.commit().cut.streams) >= {ONE, TWO}


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("what", ["a version", "the state", "the reader", "the marker", "a sealed stream"])
def test_if_one_condition_fails_nothing_is_stored(scene: Any, what: str, staged: bool) -> None:
    store, group, reader, sync = scene
    store.create_stream("t/sealed")
    with store.transaction(marker=hw.Marker("me", 7, "first")):
        pass
    tx = store.transaction(marker=hw.Marker("me", 7 if what == "the marker" else 8, "second"))
    everything(store, tx, reader, sync)
    if what == "a version":
        tx.put(TABLE, "other", b"", version=99)
    elif what == "the state":
        counter(store).update(lambda state: [100])
    elif what == "the reader":
        group.remove_reader("r")
    elif what == "a sealed stream":
        tx.write("t/sealed", "x")
    if staged:
        tx.flush()
    store.stream("t/sealed").seal()
    before = snapshot(store, group)
    kinds = {
        "a version": hw.ConditionFailedError,
        "the state": hw.ConditionFailedError,
        "the reader": hw.FencedError,
        "the marker": hw.ConflictError,
        "a sealed stream": hw.TransactionEndedError if staged else hw.SealedError,
    }
    with pytest.raises(kinds[what]):
        tx.commit()
    assert tx.status is ABORTED and store.transaction_status(tx.id) is ABORTED
    assert snapshot(store, group) == before
    with pytest.raises(hw.TransactionEndedError):
        tx.commit()
    with pytest.raises(hw.TransactionEndedError):
        tx.write(ONE, "more")
    if what != "the reader":
        event = reader.read(timeout=30)
        assert event is not None and event.value == b"1", "the abort took the reader back"
        reader.commit()
    with store.transaction(marker=hw.Marker("me", 8, "second")) as other:
        other.write(TWO, "the marker was not used up")


def test_an_exception_in_the_block_aborts_and_is_raised(scene: Any) -> None:
    store, group, reader, sync = scene
    before = snapshot(store, group)
    with pytest.raises(ZeroDivisionError), store.transaction() as tx:
        everything(store, tx, reader, sync)
        raise ZeroDivisionError
    assert tx.status is ABORTED and snapshot(store, group) == before
    assert reader.read(timeout=30).value == b"1"
    tx.abort()  # again: nothing


def test_several_changes_of_a_key_see_each_other(store: hw.Store) -> None:
    table = store.table(TABLE)
    with store.transaction() as tx:
        tx.put(TABLE, "k", b"1", version=hw.ABSENT)
        tx.flush()
        tx.put(TABLE, "k", b"2")
        tx.remove(TABLE, "k")
        tx.put(TABLE, "k", b"3", version=hw.ABSENT)
    entry = table.get("k")
    assert entry == (b"3", 4)
    assert [change.version for change in table.changes()] == [1, 2, 3, 4]
    with store.transaction() as tx:
        tx.put(TABLE, "k", b"5", version=4)
    assert table.put("k", b"6", version=5) == 6


def test_a_transaction_updates_a_state_once(store: hw.Store, place: Place) -> None:
    sync = counter(store)
    with store.transaction() as tx:
        tx.update(sync, [1, 2])
        with pytest.raises(hw.InvalidRequestError):
            tx.update(sync, [3])
        tx.flush()
        with pytest.raises(hw.InvalidRequestError):
            tx.update(sync, [3])
    assert sync.fetch() == 3
    # From another process nobody can see that before the commit.
    tx = store.transaction()
    tx.update(sync, [1])
    tx.flush()
    with place.open() as other:
        again = other.resume_transaction(tx.id)
        again.update(counter(other), [1])
        again.flush()
    with pytest.raises(hw.ConditionFailedError):
        tx.commit()
    assert sync.fetch() == 3


# Many processes and handles.


def stage_elsewhere(channel: Connection, place: Place, id: str, name: str) -> None:
    with place.open() as store:
        tx = store.resume_transaction(id)
        for number in range(10):
            tx.write(ONE, f"{name}{number}", key=name)
        tx.put(TABLE, name, b"x")
        tx.flush()
        channel.send(store.transaction_status(id).value)


def test_several_processes_stage_one_transaction(store: hw.Store, place: Place, crew: Crew) -> None:
    store.table(TABLE)
    tx = store.transaction()
    tx.write(ONE, "mine", key="mine")
    workers = [crew.start(stage_elsewhere, place, tx.id, name) for name in "abc"]
    assert [worker.hear() for worker in workers] == ["open"] * 3
    assert [worker.wait() for worker in workers] == [0] * 3
    assert values(store, ONE) == []
    tx.commit()
    found = values(store, ONE)
    assert len(found) == 31 and "mine" in found
    for name in "abc":
        assert [value for value in found if value[0] == name] == [f"{name}{number}" for number in range(10)]
    assert [key for key, _ in store.table(TABLE).items()] == ["a", "b", "c"]


def test_a_key_keeps_its_order_through_the_handles_that_staged_it(store: hw.Store, place: Place) -> None:
    with place.open() as other:
        first = store.transaction()
        second = other.resume_transaction(first.id)
        for number in range(6):
            tx = (first, second)[number % 2]
            tx.write(ONE, f"{number}", key="k")
            tx.flush()
        first.commit()
        assert values(store, ONE) == [f"{number}" for number in range(6)]


def test_any_process_commits_or_aborts_and_the_other_handles_say_so(store: hw.Store, place: Place) -> None:
    with place.open() as other:
        tx = store.transaction(marker=hw.Marker("me", 1))
        tx.write(TWO, "1")
        tx.flush()
        commit = other.resume_transaction(tx.id).commit()
        assert tx.status is COMMITTED
        assert tx.commit() == commit, "nothing of this handle is missing"
        with pytest.raises(hw.TransactionEndedError):
            tx.abort()
        with store.transaction(marker=hw.Marker("me", 1)) as again:
            again.write(TWO, "2")
        assert again.commit().repeated and again.commit().id == tx.id, "the marker came with the transaction"

        tx = store.transaction()
        tx.write(TWO, "3")
        other.resume_transaction(tx.id).abort()
        assert tx.status is ABORTED
        with pytest.raises(hw.TransactionEndedError):
            tx.commit()
    assert values(store, TWO) == ["1"]


@pytest.mark.parametrize("call", ["commit", "flush", "renew"])
def test_what_a_handle_did_not_stage_before_another_committed_is_not_dropped_silently(store: hw.Store, place: Place, call: str) -> None:
    with place.open() as other:
        tx = store.transaction()
        tx.write(TWO, "1")
        tx.flush()
        tx.write(TWO, "2")
        other.resume_transaction(tx.id).commit()
        with pytest.raises(hw.TransactionEndedError):
            getattr(tx, call)()
        assert tx.status is COMMITTED
    assert values(store, TWO) == ["1"]


def test_positions_staged_by_another_process_are_committed_too(store: hw.Store, place: Place) -> None:
    write(store, TWO, "1", "2", "3")
    group = store.reader_group("group", [TWO])
    with place.open() as other, other.reader_group("group").reader("r", commit="manual") as reader:
        tx = store.transaction()
        assert reader.read(timeout=30) is not None
        part = other.resume_transaction(tx.id)
        part.commit_reader(reader)
        part.flush()
        assert reader.read(timeout=30) is not None
        tx.commit()
        assert group.positions().streams[TWO].segments == {0: 1}
        with other.transaction() as later:
            later.commit_reader(reader)
        assert group.positions().streams[TWO].segments == {0: 2}


# Answers that are lost.


def test_a_batch_whose_staging_lost_its_answer_is_staged_once(store: hw.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = LosesAnswers(store, monkeypatch)
    store.table(TABLE)
    tx = store.transaction()
    for number in range(3):
        tx.write(TWO, f"{number}")
        tx.put(TABLE, "k", b"%d" % number)
        catalog.lose.add("stage")
        with pytest.raises(hw.UnavailableError):
            tx.flush()
        if number == 1:
            tx.flush()
    tx.write(TWO, "3")
    tx.commit()
    assert catalog.lost == ["stage"] * 3
    assert values(store, TWO) == ["0", "1", "2", "3"]
    assert store.table(TABLE).get("k") == (b"2", 3)


def test_what_is_added_after_a_lost_answer_is_not_dropped_silently(store: hw.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = LosesAnswers(store, monkeypatch)
    tx = store.transaction()
    tx.write(TWO, "1")
    catalog.lose.add("commit")
    with pytest.raises(hw.UnavailableError):
        tx.commit()
    tx.write(TWO, "2")
    with pytest.raises(hw.TransactionEndedError):
        tx.commit()
    assert tx.status is COMMITTED
    assert values(store, TWO) == ["1"]


@pytest.mark.parametrize("begun", [False, True])
def test_a_lost_commit_can_not_be_aborted(store: hw.Store, begun: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = LosesAnswers(store, monkeypatch)
    tx = store.transaction()
    tx.write(TWO, "1")
    if begun:
        assert tx.id
    catalog.lose.add("commit")
    with pytest.raises(hw.UnavailableError):
        tx.commit()
    assert tx.status is COMMITTED
    with pytest.raises(hw.TransactionEndedError):
        tx.abort()
    assert tx.status is COMMITTED and values(store, TWO) == ["1"]


@pytest.mark.parametrize("staged", [False, True])
def test_a_repetition_whose_answer_was_lost_is_still_one(store: hw.Store, staged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = LosesAnswers(store, monkeypatch)
    with store.transaction(marker=hw.Marker("me", 1)) as first:
        first.write(TWO, "1")
    tx = store.transaction(marker=hw.Marker("me", 1))
    tx.write(TWO, "2")
    if staged:
        tx.flush()
    catalog.lose.add("commit")
    with pytest.raises(hw.UnavailableError):
        tx.commit()
    assert tx.commit() == (first.commit().id, first.commit().cut, True)
    assert values(store, TWO) == ["1"]


# Leases.


@pytest.mark.parametrize("how", ["not begun", "begun", "staged"])
def test_a_transaction_whose_lease_ran_out_is_aborted(store: hw.Store, how: str) -> None:
    tx = store.transaction(lease=LEASE_SECONDS, auto_renew=False)
    tx.write(TWO, "1")
    if how != "not begun":
        assert tx.id
    if how == "staged":
        tx.flush()
    run_out(store, tx)
    with pytest.raises(hw.TransactionEndedError):
        tx.commit()
    assert tx.status is ABORTED
    with pytest.raises(hw.TransactionEndedError):
        tx.renew()
    assert values(store, TWO) == []
    if how != "not begun":
        assert store.transaction_status(tx.id) is ABORTED
        with pytest.raises(hw.TransactionEndedError):
            store.resume_transaction(tx.id)


def test_staging_and_renewing_come_too_late_after_the_lease(store: hw.Store) -> None:
    late = [store.transaction(lease=LEASE_SECONDS, auto_renew=False) for _ in range(3)]
    assert len({tx.id for tx in late}) == 3
    for tx in late:
        tx.write(TWO, "1")
    run_out(store, late[0])
    with pytest.raises(hw.TransactionEndedError):
        late[0].renew()
    with pytest.raises(hw.TransactionEndedError):
        late[1].flush()
    assert late[2].status is ABORTED
    late[2].abort()
    assert values(store, TWO) == []


def test_only_renew_puts_off_a_lease_that_is_not_renewed_by_itself(store: hw.Store) -> None:
    tx = store.transaction(lease=5, auto_renew=False)
    idle = store.transaction(lease=LEASE_SECONDS, auto_renew=False)
    assert idle.id and tx.id
    sql = "SELECT expires_at FROM txn WHERE id = ?"
    expires = [store._engine.database.query(sql, (tx.id,))]
    tx.write(TWO, "1")
    tx.flush()
    assert store._engine.database.query(sql, (tx.id,)) == expires[0]
    tx.renew()
    assert store._engine.database.query(sql, (tx.id,)) > expires[0]
    run_out(store, idle)
    store.run_upkeep()
    states: dict[Any, Any] = dict(store._engine.database.query("SELECT id, state FROM txn"))
    assert states == {tx.id: "open", idle.id: "aborted"}
    tx.commit()
    assert values(store, TWO) == ["1"]


@pytest.mark.slow
def test_an_open_handle_renews_its_lease_and_one_that_is_gone_does_not(store: hw.Store, place: Place) -> None:
    tx = store.transaction(lease=1.0)
    tx.write(TWO, "1")
    id = tx.id
    began = time.monotonic()
    wait_until(lambda: time.monotonic() - began > 2.5)
    assert tx.status is OPEN
    tx.flush()
    with place.open() as other:
        resumed = other.resume_transaction(id)
        del tx
        began = time.monotonic()
        wait_until(lambda: time.monotonic() - began > 1.5)
        assert resumed.status is OPEN, "a resumed handle renews it too"
        del resumed
    wait_until(lambda: store.transaction_status(id) is ABORTED)
    assert values(store, TWO) == []


@pytest.mark.parametrize("lease", [0, -1, float("nan"), float("inf"), "30", None, True, 31 * 86400])
def test_a_lease_must_be_a_time_above_zero(store: hw.Store, lease: Any) -> None:
    with pytest.raises(hw.InvalidRequestError):
        store.transaction(lease=lease)


def test_asking_for_a_status_writes_nothing(store: hw.Store) -> None:
    tx = store.transaction()
    assert tx.id
    engine = store._engine
    write = engine.database.write
    engine.database.write = lambda *args, **more: pytest.fail("a write")  # type: ignore[method-assign]
    try:
        assert store.transaction_status(tx.id) is tx.status is OPEN
    finally:
        engine.database.write = write  # type: ignore[method-assign]
    tx.abort()


@pytest.mark.parametrize("id", ["0" * 32, "nobody", "", "a b", "\0", 5, None])
def test_an_id_that_is_none(store: hw.Store, id: Any) -> None:
    kind = hw.NotFoundError if isinstance(id, str) and id.isalnum() else hw.InvalidRequestError
    for call in (store.resume_transaction, store.transaction_status):
        with pytest.raises(kind):
            call(id)


# Sizes.


def test_large_transactions_are_staged_in_storage(store: hw.Store) -> None:
    data = pa.RecordBatch.from_arrays([pa.array([b"x" * 1000] * 30_000)], names=["value"])
    with store.transaction() as tx:
        tx.write(ONE, "y" * 5_000_000, key="a")
        tx.write(ONE, "y" * 5_000_000, key="a")
        tx.write(ONE, "z", key="a")
        tx.write_batch(TWO, data)
        tx.write(TWO, "last")
        assert values(store, ONE) == values(store, TWO) == []
    assert [(value[0], len(value)) for value in values(store, ONE)] == [("y", 5_000_000), ("y", 5_000_000), ("z", 1)]
    found = values(store, TWO)
    assert len(found) == 30_001 and found[-1] == "last"
    inline = store._engine.database.query("SELECT count(*) FROM inline_block")[0][0]
    extents = store._engine.database.query("SELECT count(*), max(length) FROM extent")[0]
    assert inline < extents[0], "what is large is not in the catalog"
    assert extents[1] < 24 * 1024 * 1024, "a batch of 30 MB is several blocks"


def test_a_failure_while_a_write_stages_adds_nothing(store: hw.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    tx = store.transaction()
    for number in range(3):
        tx.write(TWO, f"{number}".ljust(4_000_000, "."))
    catalog = LosesAnswers(store, monkeypatch)
    catalog.lose.add("stage")
    with pytest.raises(hw.UnavailableError):
        tx.write(TWO, "3")
    tx.write(TWO, "3")
    tx.commit()
    assert [value[0] for value in values(store, TWO)] == ["0", "1", "2", "3"]


def test_typed_events_and_batches_with_keys(store: hw.Store) -> None:
    schema = pa.schema([("id", pa.int64()), ("name", pa.string())])
    store.create_stream("t/typed", schema=schema, scaling=hw.Scaling.fixed(3))
    row = {"id": 0, "name": "a"}
    with store.transaction() as tx:
        tx.write("t/typed", row, key=0)
        row["id"] = 99
        tx.write_batch("t/typed", pa.table({"id": [1, 2, 3], "name": ["b", "c", "d"]}), key="id")
        with pytest.raises(hw.InvalidRequestError):
            tx.write("t/typed", {"id": "no number", "name": "x"})
        with pytest.raises(hw.InvalidRequestError):
            tx.write("t/typed", "text")
    found = sorted((event.value["id"], event.key) for event in store.stream("t/typed").read())
    assert found == [(0, b"0"), (1, b"1"), (2, b"2"), (3, b"3")]


# Streams that scale meanwhile.


def per_key(store: hw.Store, name: str) -> dict[bytes, list[str]]:
    found = defaultdict(list)
    for event in store.stream(name).read():
        found[event.key].append(event.value.decode())
    return found


KEYS = [f"key{number}" for number in range(16)]


def split_all(stream: hw.Stream) -> None:
    for segment in stream.segments():
        stream.split(segment.number)


def merge_all(stream: hw.Stream) -> None:
    stream.merge([segment.number for segment in stream.segments()])


def scale_in_time(step: Callable[[hw.Stream], None], stream: hw.Stream) -> None:
    """Scale although transactions roll the segments meanwhile."""
    while True:
        try:
            return step(stream)
        except (hw.NotFoundError, hw.ConflictError):
            continue


@pytest.mark.parametrize("with_rest", [False, True])
@pytest.mark.parametrize(
    "steps",
    [(split_all,), (merge_all,), (split_all, merge_all), (merge_all, split_all), (split_all, merge_all, split_all), (split_all, split_all)],
    ids=lambda steps: "-".join(step.__name__ for step in steps),
)
def test_a_transaction_lands_behind_what_was_written_before_its_commit(
    store: hw.Store, steps: tuple[Callable[[hw.Stream], None], ...], with_rest: bool
) -> None:
    stream = store.stream(ONE)
    tx = store.transaction()
    with stream.writer() as writer:
        for key in KEYS:
            writer.write("0", key=key)
            tx.write(ONE, "tx0", key=key)
        tx.flush()
        for number, step in enumerate(steps, 1):
            step(stream)
            for key in KEYS:
                writer.write(f"{number}", key=key)
            if with_rest:
                for key in KEYS:
                    tx.write(ONE, f"tx{number}", key=key)
                if number % 2:
                    tx.flush()
        writer.flush()
        before = stream.tail()
        commit = tx.commit()
        for key in KEYS:
            writer.write("after", key=key)
    plain = [f"{number}" for number in range(len(steps) + 1)]
    mine = [f"tx{number}" for number in range(len(steps) + 1 if with_rest else 1)]
    assert per_key(store, ONE) == {key.encode(): [*plain, *mine, "after"] for key in KEYS}
    assert [event.value for event in stream.read(start=commit.cut)] == [b"after"] * len(KEYS)
    assert len(list(stream.read(start=before, end=commit.cut))) == len(KEYS) * len(mine)
    group = store.reader_group("group", [ONE], end="tail")
    with group.reader("r") as reader:
        seen = defaultdict(list)
        for event in reader:
            seen[event.key].append(event.value.decode())
    assert seen == per_key(store, ONE)


@pytest.mark.parametrize("lost", ["the file", "a part of it", "its row"])
def test_a_commit_does_not_name_what_is_gone_from_storage(store: hw.Store, place: Place, lost: str) -> None:
    tx = store.transaction()
    tx.write(TWO, bytes(600_000))
    tx.flush()
    (path,) = Path(place.url, "txn").glob("*/*")
    if lost == "its row":
        store._engine.database.write(lambda tx: tx.run("DELETE FROM object"))
    elif lost == "the file":
        path.unlink()
    else:
        with path.open("r+b") as file:
            file.truncate(599_000)
    with pytest.raises(hw.CorruptDataError, match="can't be committed: what it staged"):
        tx.commit()
    assert tx.status is ABORTED and values(store, TWO) == []


def test_a_roll_seals_only_the_ranges_with_staged_data(store: hw.Store) -> None:
    stream = store.create_stream("t/four", scaling=hw.Scaling.fixed(4))
    tx = store.transaction()
    tx.write("t/four", "1", key="k")
    tx.flush()
    mine = next(event_segment for (event_segment,) in store._engine.database.query("SELECT segment FROM txn_extent"))
    stream.split(mine)
    others = {segment.number for segment in stream.segments() if segment.number < 4}
    tx.commit()
    assert others <= {segment.number for segment in stream.segments()}
    assert stream.epoch == 2 and len(stream.segments()) == 5


def test_a_transaction_begun_before_a_split_needs_no_roll_if_nothing_was_staged(store: hw.Store) -> None:
    stream = store.stream(ONE)
    with store.transaction() as warm:
        warm.write(ONE, "0", key="k")
    tx = store.transaction()
    tx.write(ONE, "1", key="k")
    assert tx.id
    split_all(stream)
    epoch = stream.epoch
    tx.commit()
    assert stream.epoch == epoch and values(store, ONE) == ["0", "1"]
    for number in range(2, 5):
        with store.transaction() as later:
            later.write(ONE, f"{number}", key="k")
            later.flush()
    assert stream.epoch == epoch, "what is staged after the split is for its segments"


def test_a_roll_after_the_staged_segment_was_truncated_away(store: hw.Store) -> None:
    stream = store.stream(ONE)
    tx = store.transaction()
    tx.write(ONE, "tx", key="k")
    tx.flush()
    split_all(stream)
    write(store, ONE, "plain", key="k")
    stream.truncate(stream.tail())
    write(store, ONE, "more", key="k")
    tx.commit()
    assert values(store, ONE) == ["more", "tx"]


def test_a_cut_by_time_keeps_the_order_around_a_roll(store: hw.Store) -> None:
    stream = store.stream(ONE)
    tx = store.transaction()
    for key in KEYS:
        tx.write(ONE, "tx", key=key)
    tx.flush()
    split_all(stream)
    for key in KEYS[:4]:
        write(store, ONE, "before", key=key)
    tx.commit()
    for key in KEYS[:4]:
        write(store, ONE, "after", key=key)
    events = list(stream.read())
    for event in events:
        for shift in (0, 1):
            cut = stream.cut_at(event.time + timedelta(microseconds=shift))
            earlier = sum(1 for _ in stream.read(end=cut))
            assert earlier == sum(other.time < event.time + timedelta(microseconds=shift) for other in events)


@pytest.mark.parametrize("what", ["a version", "the state", "the marker", "the reader"])
def test_a_rolled_commit_fails_for_the_same_reasons_and_does_not_take_others_with_it(store: hw.Store, what: str) -> None:
    sync = counter(store)
    table = store.table(TABLE)
    store.create_stream("t/in")
    write(store, "t/in", "1", "2")
    with store.transaction(marker=hw.Marker("me", 1)) as first:
        first.write(TWO, "first")
    with store.reader_group("group", ["t/in"]).reader("r", commit="manual") as reader:
        assert reader.read(timeout=30) is not None
        good, bad = store.transaction(), store.transaction(marker=hw.Marker("me", 1) if what == "the marker" else None)
        for tx in (good, bad):
            tx.write(ONE, "good" if tx is good else "bad", key="k")
            tx.flush()
        kind: type[Exception] = hw.ConditionFailedError
        if what == "a version":
            bad.put(TABLE, "k", b"", version=7)
        elif what == "the state":
            bad.update(sync, [1])
            counter(store).update(lambda state: [10])
        elif what == "the reader":
            bad.commit_reader(reader)
            store.reader_group("group").remove_reader("r")
            kind = hw.FencedError
        split_all(store.stream(ONE))
        with ThreadPoolExecutor() as pool:
            ok, failed = pool.submit(good.commit), pool.submit(bad.commit)
            assert ok.result(30).id == good.id
            if what == "the marker":
                assert failed.result(30) == (first.commit().id, first.commit().cut, True)
            else:
                with pytest.raises(kind):
                    failed.result(30)
                assert bad.status is ABORTED
        if what != "the reader":
            reader.commit()
    assert values(store, ONE) == ["good"] and table.get("k") is None and sync.fetch() in (0, 10)


@pytest.mark.slow
def test_a_hundred_transactions_across_a_split_share_their_rolls(store: hw.Store) -> None:
    stream = store.stream(TWO)
    transactions = [store.transaction(lease=120) for _ in range(100)]
    with stream.writer() as writer:
        for key in KEYS:
            writer.write("plain", key=key)
    for number, tx in enumerate(transactions):
        for key in KEYS[:4]:
            tx.write(TWO, f"{number}", key=key)
        tx.flush()
    stream.split(0)
    epoch = stream.epoch
    with ThreadPoolExecutor(100) as pool:
        commits = list(pool.map(lambda tx: tx.commit(), transactions))
    assert len({commit.id for commit in commits}) == 100
    assert stream.epoch - epoch <= 4
    found = per_key(store, TWO)
    order = found[KEYS[0].encode()][1:]
    assert sorted(order, key=int) == [f"{number}" for number in range(100)]
    for key in KEYS[:4]:
        assert found[key.encode()] == ["plain", *order], "all keys see the same order of commits"


@pytest.mark.slow
def test_rolls_keep_the_order_of_keys_while_others_write(store: hw.Store, seed: int) -> None:
    stream = store.stream(ONE)
    stop = threading.Event()

    def write_plainly(name: str) -> int:
        number = 0
        with stream.writer() as writer:
            while not stop.is_set() or number < 50:
                writer.write(f"{name}:{number}", key=f"{name}{number % 4}")
                number += 1
                if number % 20 == 0:
                    writer.flush()
        return number

    def transact(name: str) -> int:
        number = 0
        while not stop.is_set() or number < 5:
            with store.transaction() as tx:
                for key in range(4):
                    tx.write(ONE, f"{name}:{number}", key=f"{name}{key}")
                    if (number + seed) % 2:
                        tx.flush()
            number += 1
        return number

    with ThreadPoolExecutor() as pool:
        plain = {name: pool.submit(write_plainly, name) for name in ("p", "q")}
        mine = {name: pool.submit(transact, name) for name in ("x", "y", "z")}
        try:
            for _ in range(3):
                scale_in_time(split_all, stream)
                scale_in_time(merge_all, stream)
        finally:
            stop.set()
        counts = {name: future.result(60) for name, future in (plain | mine).items()}
    found = per_key(store, ONE)
    for name in plain:
        for key in range(4):
            assert found[f"{name}{key}".encode()] == [f"{name}:{number}" for number in range(key, counts[name], 4)]
    for name in mine:
        for key in range(4):
            assert found[f"{name}{key}".encode()] == [f"{name}:{number}" for number in range(counts[name])]


def test_sealing_a_stream_aborts_its_open_transactions(store: hw.Store) -> None:
    staged, other, unstaged = store.transaction(), store.transaction(), store.transaction()
    staged.write(TWO, "1")
    staged.write(ONE, "1")
    staged.flush()
    unstaged.write(TWO, "2")
    unstaged.write(ONE, "2")
    other.write(ONE, "3", key="k")
    other.flush()
    store.stream(TWO).seal()
    assert staged.status is ABORTED
    with pytest.raises(hw.TransactionEndedError, match="sealed"):
        staged.commit()
    with pytest.raises(hw.SealedError):
        unstaged.commit()
    other.commit()
    assert values(store, ONE) == ["3"] and values(store, TWO) == []
    store.delete_stream(TWO)
    with pytest.raises(hw.NotFoundError):
        store.transaction().write(TWO, "x")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("deleted", [False, True])
@pytest.mark.parametrize("name", [TABLE, STATE, ONE])
def test_what_was_sealed_or_deleted_before_anything_was_staged_for_it_is_told_by_the_commit(
    store: hw.Store, place: Place, name: str, deleted: bool
) -> None:
    store.table(TABLE)
    state = counter(store)
    tx = store.transaction()
    tx.write(TWO, "1")
    if name == TABLE:
        tx.put(TABLE, "k", b"v")
    elif name == STATE:
        tx.update(state, [1])
    else:
        tx.write(ONE, "1")
    with place.open() as other:
        other.stream(name).seal()
        if deleted:
            other.delete_stream(name)
    with pytest.raises(hw.NotFoundError if deleted else hw.SealedError):
        tx.commit()
    assert tx.status is ABORTED and values(store, TWO) == []


@pytest.mark.timeout(60)
def test_a_commit_ends_also_if_a_segment_is_called_closed_that_is_open(store: hw.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def stale(operation: str, run: Callable[[], Any]) -> Any:
        if operation == "commits.commit":
            raise RouteStale
        return run()

    intercept(monkeypatch, store, stale)
    tx = store.transaction()
    tx.write(ONE, "1")
    tx.write(TWO, "1")
    with pytest.raises(hw.CorruptDataError):
        tx.commit()
    assert tx.status is ABORTED


# Markers.


def test_the_last_sequence_again_stores_nothing_and_answers_as_before(store: hw.Store) -> None:
    first = store.transaction(marker=hw.Marker("me", 5, "abc"))
    first.write(TWO, "1")
    commit = first.commit()
    for _ in range(2):
        tx = store.transaction(marker=hw.Marker("me", 5, "abc"))
        tx.write(TWO, "again")
        tx.put(store.table(TABLE).name, "k", b"x")
        assert tx.commit() == (commit.id, commit.cut, True) == tx.commit()
    assert values(store, TWO) == ["1"] and store.table(TABLE).get("k") is None


@pytest.mark.parametrize(
    ("sequence", "fingerprint"), [(5, "other"), (5, None), (4, "abc"), (0, None), (-3, "abc")], ids=lambda value: f"{value}"
)
def test_another_fingerprint_or_an_older_sequence_is_a_conflict_that_names_both(
    store: hw.Store, sequence: int, fingerprint: str | None
) -> None:
    with store.transaction(marker=hw.Marker("me", 5, "abc")):
        pass
    tx = store.transaction(marker=hw.Marker("me", sequence, fingerprint))
    tx.write(TWO, "x")
    with pytest.raises(hw.ConflictError) as found:
        tx.commit()
    assert not isinstance(found.value, hw.ConditionFailedError)
    for part in ("'me'", "5", "'abc'", f"{sequence}", f"{fingerprint!r}"):
        assert part in str(found.value)
    assert values(store, TWO) == [] and tx.status is ABORTED
    for owner, next_sequence in (("me", 6), ("me", 100), ("other", 5)):
        with store.transaction(marker=hw.Marker(owner, next_sequence)) as later:
            later.write(TWO, owner)
    assert values(store, TWO) == ["me", "me", "other"]


def test_an_aborted_transaction_does_not_use_its_marker_up(store: hw.Store) -> None:
    tx = store.transaction(marker=hw.Marker("me", 1))
    tx.write(TWO, "1")
    tx.flush()
    tx.abort()
    with store.transaction(marker=hw.Marker("me", 1)) as again:
        again.write(TWO, "2")
    assert not again.commit().repeated and values(store, TWO) == ["2"]


def test_of_many_commits_with_one_marker_one_is_stored(store: hw.Store, place: Place) -> None:
    stores = [place.open() for _ in range(4)]
    # Each to a stream of its own: nothing but the marker is common to them.
    names = [store.create_stream(f"t/of{index}").name for index in range(8)]
    # The first one to come stays in its transaction while the others look at the marker.
    start = threading.Barrier(8, action=lambda: failpoints.arm("txn.applied=sleep:0.2"))

    def commit(index: int) -> list[hw.Commit]:
        found = []
        for sequence in range(3):
            tx = stores[index % 4].transaction(marker=hw.Marker(f"owner{sequence}", 1))
            tx.write(names[index], f"{sequence}")
            start.wait(60)
            found.append(tx.commit())
        return found

    try:
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(commit, range(8)))
    finally:
        failpoints.arm("")
        for other in stores:
            other.close()
    assert sorted(value for name in names for value in values(store, name)) == [f"{sequence}" for sequence in range(3)]
    for same in zip(*answers, strict=True):
        assert len({commit.id for commit in same}) == 1 and sum(not commit.repeated for commit in same) == 1


def test_a_repeated_commit_takes_the_reader_back_to_what_is_durable(store: hw.Store) -> None:
    store.create_stream("t/in")
    write(store, "t/in", "1", "2")
    group = store.reader_group("group", ["t/in"])
    with store.transaction(marker=hw.Marker("me", 1)):
        pass
    with group.reader("r", commit="manual") as reader:
        with store.transaction(marker=hw.Marker("me", 1)) as tx:
            assert reader.read(timeout=30) is not None
            tx.commit_reader(reader)
        assert tx.commit().repeated
        assert group.positions().streams["t/in"].segments == {0: 0}, "nothing was stored"
        event = reader.read(timeout=30)
        assert event is not None and event.value == b"1"


def test_a_marker_is_told_also_when_its_stream_was_deleted_since(store: hw.Store) -> None:
    store.create_stream("t/short")
    with store.transaction(marker=hw.Marker("me", 1)) as tx:
        tx.write("t/short", "x")
    store.stream("t/short").seal()
    store.delete_stream("t/short")
    with store.transaction(marker=hw.Marker("me", 1)) as again:
        pass
    assert again.commit().repeated and not again.commit().cut.streams


@pytest.mark.parametrize(
    "marker",
    ["me", ("me", 1), hw.Marker("", 1), hw.Marker("a\0b", 1), hw.Marker(5, 1), hw.Marker("me", "1"), hw.Marker("me", True),  # type: ignore[arg-type]
     hw.Marker("me", 1 << 70), hw.Marker("me", 1, 5), hw.Marker("me", 1, 0), hw.Marker("me", 1, ""),  # type: ignore[arg-type]
     hw.Marker("\ud800", 1), hw.Marker("a" * 2049, 1)],
    ids=lambda marker: repr(marker)[:40],
)  # fmt: skip
def test_a_marker_that_is_none_is_refused(store: hw.Store, marker: Any) -> None:
    with pytest.raises(hw.InvalidRequestError):
        store.transaction(marker=marker)


# Bad input.


def test_a_wrong_call_is_refused_and_leaves_the_transaction_as_it_was(store: hw.Store, tmp_path: Path) -> None:
    sync = counter(store)
    with hw.open(tmp_path / "other") as elsewhere:
        elsewhere.create_stream(TWO)
        foreign = counter(elsewhere)
        foreign_reader = elsewhere.reader_group("g", [TWO]).reader("r", commit="manual")
        auto_reader = store.reader_group("g", [TWO]).reader("r")
        store.create_stream("t/bytes", kind="bytes")
        store.table(TABLE)
        with store.transaction() as tx:
            refused: list[tuple[type[Exception], Callable[[], Any]]] = [
                (hw.NotFoundError, lambda: tx.write("t/none", "x")),
                (hw.NotFoundError, lambda: tx.put("t/none", "k", b"x")),
                (hw.InvalidRequestError, lambda: tx.write("no scope", "x")),
                (hw.InvalidRequestError, lambda: tx.write("t/bytes", b"x")),
                (hw.InvalidRequestError, lambda: tx.write(TABLE, b"x")),
                (hw.InvalidRequestError, lambda: tx.put(TWO, "k", b"x")),
                (hw.InvalidRequestError, lambda: tx.put(TABLE, "k", b"x" * (1024 * 1024 + 1))),
                (hw.InvalidRequestError, lambda: tx.put(TABLE, "", b"x")),
                (hw.InvalidRequestError, lambda: tx.remove(TABLE, "k", version=-1)),
                (hw.InvalidRequestError, lambda: tx.write(TWO, 5)),  # type: ignore[arg-type]
                (hw.InvalidRequestError, lambda: tx.write(TWO, "x", key=1.5)),  # type: ignore[arg-type]
                (hw.InvalidRequestError, lambda: tx.update(sync, [object()])),
                (hw.InvalidRequestError, lambda: tx.update(sync, 5)),  # type: ignore[arg-type]
                (hw.InvalidRequestError, lambda: tx.update(foreign, [1])),
                (hw.InvalidRequestError, lambda: tx.update("t/state", [1])),  # type: ignore[arg-type]
                (hw.InvalidRequestError, lambda: tx.commit_reader("r")),  # type: ignore[arg-type]
                (hw.InvalidRequestError, lambda: tx.commit_reader(foreign_reader)),
                (hw.InvalidRequestError, lambda: tx.commit_reader(auto_reader)),
            ]
            for kind, call in refused:
                with pytest.raises(kind):
                    call()
            with pytest.raises(hw.NotFoundError, match="there is no table t/none"):
                tx.remove("t/none", "k")
            tx.write(TWO, "good")
        auto_reader.close()
        foreign_reader.close()
    assert values(store, TWO) == ["good"] and sync.fetch() == 0


def test_a_store_that_is_closed_begins_and_commits_nothing(place: Place) -> None:
    store = place.open(create=True)
    store.create_stream(TWO)
    tx = store.transaction()
    tx.write(TWO, "x")
    store.close()
    for call in (store.transaction, tx.flush, tx.commit):
        with pytest.raises(hw.InvalidRequestError):
            call()


def create_anew(store: hw.Store, **options: Any) -> None:
    store.stream(ONE).seal()
    store.delete_stream(ONE)
    store.create_stream(ONE, **options)


@pytest.mark.parametrize("is_staged", [False, True])
def test_a_stream_that_was_created_anew_is_written_to_under_its_name(store: hw.Store, place: Place, is_staged: bool) -> None:
    # The second transaction remembers the first one's stream; another process deletes it and creates another one meanwhile.
    with store.transaction() as tx:
        tx.write(ONE, b"old")
    with place.open() as other:
        create_anew(other, scaling=hw.Scaling.fixed(3))
    with store.transaction() as tx:
        tx.write(ONE, b"new")
        if is_staged:
            tx.flush()
    assert values(store, ONE) == ["new"]


@pytest.mark.parametrize("how", ["put", "put and staged", "put and required", "required and put"])
def test_a_table_that_was_created_anew_takes_what_is_put_under_its_name(store: hw.Store, place: Place, how: str) -> None:
    # The second transaction remembers the first one's table; another process deletes it and creates another one meanwhile.
    store.table(TABLE)
    with store.transaction() as tx:
        tx.put(TABLE, "old", b"old")
    with place.open() as other:
        other.stream(TABLE).seal()
        other.delete_stream(TABLE)
        other.table(TABLE).put("present", b"1")
    with store.transaction() as tx:
        tx.write(ONE, b"new")
        if how == "required and put":
            tx.require(TABLE, "present", 1)
        tx.put(TABLE, "a", b"1", version=hw.ABSENT)
        tx.put(TABLE, "b", b"2")
        if how == "put and required":
            tx.require(TABLE, "present", 1)
        if how == "put and staged":
            tx.flush()
    assert {key: entry.value for key, entry in store.table(TABLE).items()} == {"a": b"1", "b": b"2", "present": b"1"}
    assert values(store, ONE) == ["new"]


def test_what_is_put_into_a_table_that_is_gone_is_refused_by_the_commit(store: hw.Store, place: Place) -> None:
    store.table(TABLE)
    for _ in range(2):
        with store.transaction() as tx:
            tx.put(TABLE, "k", b"v")
    with place.open() as other:
        other.stream(TABLE).seal()
        with pytest.raises(hw.SealedError), store.transaction() as tx:
            tx.write(ONE, b"x")
            tx.put(TABLE, "k", b"w")
        other.delete_stream(TABLE)
        with pytest.raises(hw.NotFoundError, match="there is no table"), store.transaction() as tx:
            tx.write(ONE, b"x")
            tx.put(TABLE, "k", b"w")
        other.create_stream(TABLE)
        with pytest.raises(hw.InvalidRequestError, match="is of kind 'events'"), store.transaction() as tx:
            tx.put(TABLE, "k", b"w")
    assert values(store, ONE) == [] and values(store, TABLE) == []


def test_a_stream_that_has_a_schema_since_is_written_to_under_its_name(store: hw.Store, place: Place) -> None:
    schema = pa.schema([("n", pa.int64())])
    with store.transaction() as tx:
        tx.write(ONE, b"old")
    with place.open() as other:
        create_anew(other, schema=schema)
    with store.transaction() as tx:
        tx.write(ONE, {"n": 1})
        tx.write_batch(ONE, pa.record_batch({"n": [2]}, schema=schema))
    assert [event.value for event in store.stream(ONE).read()] == [{"n": 1}, {"n": 2}]


def test_what_fits_a_stream_that_is_gone_is_refused_by_the_one_of_its_name(store: hw.Store, place: Place) -> None:
    for value in (b"old", b"late"):
        with store.transaction() as tx:
            tx.write(ONE, value)
    with place.open() as other:
        other.stream(ONE).seal()
        with pytest.raises(hw.SealedError), store.transaction() as tx:
            tx.write(ONE, b"later")
        other.delete_stream(ONE)
        with pytest.raises(hw.NotFoundError), store.transaction() as tx:
            tx.write(ONE, b"later")
        other.create_stream(ONE)
        with store.transaction() as tx:
            tx.write(ONE, b"new")
        create_anew(other, schema=pa.schema([("n", pa.int64())]))
    with pytest.raises(hw.InvalidRequestError, match="another kind of stream"), store.transaction() as tx:
        tx.write(ONE, b"later")
    assert values(store, TWO) == [] and [event.value for event in store.stream(ONE).read()] == []


def test_an_event_for_a_stream_created_anew_is_there_also_if_much_was_staged_for_it(store: hw.Store, place: Place) -> None:
    with store.transaction() as tx:
        tx.write(ONE, b"old")
        tx.write(TWO, b"old")
    with place.open() as other:
        create_anew(other)
    with store.transaction() as tx:
        for _ in range(10):
            tx.write(TWO, bytes(1_000_000))
        tx.write(ONE, b"new")
        tx.write(ONE, b"newer")
    assert values(store, ONE) == ["new", "newer"]


def test_of_two_handles_that_wait_for_a_roll_the_one_that_is_left_out_is_told(store: hw.Store) -> None:
    stream = store.create_stream("two/handles")
    first = store.transaction()
    first.write("two/handles", b"staged", key="k")
    first.flush()
    stream.split(0)
    second = store.resume_transaction(first.id)
    first.write("two/handles", b"from the first", key="k")
    second.write("two/handles", b"from the second", key="k")
    with pytest.MonkeyPatch.context() as patch:

        def after_the_other(operation: str, run: Callable[[], Any]) -> Any:
            if operation == "commits.prepare":
                patch.undo()
                first.commit()
            return run()

        intercept(patch, store, after_the_other)
        with pytest.raises(hw.TransactionEndedError, match="was not stored"):
            second.commit()
    assert [event.value for event in stream.read()] == [b"staged", b"from the first"]
    assert second.status is hw.TransactionStatus.COMMITTED


def test_a_transaction_that_waits_for_a_roll_is_not_called_aborted_by_its_handle(store: hw.Store) -> None:
    source, target = store.create_stream("roll/in"), store.create_stream("roll/out")
    with source.writer() as writer:
        writer.write(b"0")
        writer.write(b"1")
    group = store.reader_group("roll", ["roll/in"])
    with group.reader("r", commit="manual") as reader:
        tx = store.transaction()
        assert reader.read(timeout=10) is not None
        tx.write("roll/out", b"of 0", key="k")
        tx.flush()
        tx.commit_reader(reader)
        target.split(0)
        with pytest.MonkeyPatch.context() as patch:

            def fail(operation: str, run: Callable[[], Any]) -> Any:
                if operation == "commits.commit_prepared":
                    raise hw.UnavailableError("an outage")
                return run()

            intercept(patch, store, fail)
            with pytest.raises(hw.UnavailableError):
                tx.commit()
        with pytest.raises(hw.TransactionEndedError, match="committing"):
            tx.flush()
        assert tx.status is hw.TransactionStatus.OPEN
        tx.commit()
        event = reader.read(timeout=10)
        assert event is not None and event.value == b"1"
    assert [event.value for event in target.read()] == [b"of 0"] and group.lag().events == 1


def read_into(reader: hw.Reader, tx: hw.Transaction, name: str = "") -> None:
    event = reader.read(timeout=10)
    assert event is not None
    tx.write("reader/out", name.encode() + event.value)
    tx.commit_reader(reader)


@pytest.fixture
def piped(store: hw.Store) -> Iterator[tuple[hw.Store, hw.Reader]]:
    """A manual reader of three events."""
    with store.create_stream("reader/in").writer() as writer:
        for number in range(3):
            writer.write(b"%d" % number)
    store.create_stream("reader/out")
    with store.reader_group("piped", ["reader/in"]).reader("r", commit="manual") as reader:
        yield store, reader


def out(store: hw.Store) -> list[bytes]:
    return [event.value for event in store.stream("reader/out").read()]


def test_transactions_that_follow_each_other_are_committed_in_their_order_only(piped: tuple[hw.Store, hw.Reader]) -> None:
    store, reader = piped
    first, second, third = (store.transaction() for _ in range(3))
    for tx in (first, second, third):
        read_into(reader, tx)
    first.commit()
    with pytest.raises(hw.ConflictError, match="goes on from 2"):
        third.commit()
    # The third took the reader back to where it is, and the second begins there.
    second.commit()
    with store.transaction() as tx:
        read_into(reader, tx)
    assert out(store) == [b"0", b"1", b"2"]


def test_an_aborted_transaction_takes_those_behind_it_along_so_that_no_event_is_skipped(piped: tuple[hw.Store, hw.Reader]) -> None:
    store, reader = piped
    first, second = store.transaction(), store.transaction()
    read_into(reader, first)
    read_into(reader, second)
    first.abort()
    with pytest.raises(hw.ConflictError, match="goes on from 1"):
        second.commit()
    for _ in range(3):
        with store.transaction() as tx:
            read_into(reader, tx)
    assert out(store) == [b"0", b"1", b"2"]


def test_of_two_transactions_for_the_same_events_one_is_committed(piped: tuple[hw.Store, hw.Reader]) -> None:
    store, reader = piped
    first, second = store.transaction(), store.transaction()
    read_into(reader, first)
    second.write("reader/out", b"0 again")
    second.commit_reader(reader)
    first.commit()
    with pytest.raises(hw.ConflictError, match="goes on from 0"):
        second.commit()
    assert out(store) == [b"0"]


def test_a_transaction_may_be_given_a_reader_after_each_event_also_when_it_was_staged_in_between(piped: tuple[hw.Store, hw.Reader]) -> None:
    store, reader = piped
    with store.transaction() as tx:
        read_into(reader, tx)
        tx.flush()
        read_into(reader, tx)
        read_into(reader, tx)
    assert out(store) == [b"0", b"1", b"2"] and store.reader_group("piped").lag().events == 0
