"""Tables: versions and conditions, keys in the order of their bytes, and the stream of all changes."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import pytest

import headwater as hw
from tests.crash.processes import Crew, Place

# Many processes, time-outs and threads: not for a quick run.
pytestmark = pytest.mark.slow

MIB = 1024 * 1024
NAME = "shop/latest"


@pytest.fixture
def table(store: hw.Store) -> hw.Table:
    return store.table(NAME)


# Entries and versions.


def test_put_get_and_remove(table: hw.Table) -> None:
    assert table.get("k") is None and len(table) == 0
    assert table.put("k", b"1") == 1
    assert table.get("k") == hw.Entry(b"1", 1)
    assert table.put("k", b"2") == 2
    assert table.put("other", b"") == 3
    assert table.get("k") == (b"2", 2) and table.get("other") == (b"", 3) and len(table) == 2
    table.remove("k")
    assert table.get("k") is None and len(table) == 1
    table.remove("k")
    table.remove("never there")


def test_a_version_is_never_used_again_also_not_after_a_removal(table: hw.Table) -> None:
    seen = []
    for _ in range(3):
        seen.append(table.put("k", b"same"))
        table.remove("k")
    assert seen == sorted(set(seen))
    first = table.put("k", b"same")
    table.remove("k")
    table.put("k", b"same")
    with pytest.raises(hw.ConditionFailedError):
        table.put("k", b"x", version=first)


def test_conditions_on_the_version(table: hw.Table) -> None:
    version = table.put("k", b"1", version=hw.ABSENT)
    with pytest.raises(hw.ConditionFailedError, match="'k'"):
        table.put("k", b"2", version=hw.ABSENT)
    for wrong in (version + 1, 99):
        with pytest.raises(hw.ConditionFailedError):
            table.put("k", b"2", version=wrong)
        with pytest.raises(hw.ConditionFailedError):
            table.remove("k", version=wrong)
    with pytest.raises(hw.ConditionFailedError):
        table.put("missing", b"2", version=version)
    assert table.get("k") == (b"1", version) and len(list(table.changes())) == 1, "a failed condition changes nothing"
    second = table.put("k", b"2", version=version)
    table.remove("k", version=second)
    assert table.get("k") is None
    table.put("k", b"3", version=hw.ABSENT)


def test_the_same_table_from_everywhere(store: hw.Store, table: hw.Table, place: Place) -> None:
    table.put("k", b"1")
    with place.open() as other:
        again = other.table(NAME)
        assert again.get("k") == (b"1", 1)
        again.put("k", b"2", version=1)
    assert table.get("k") == (b"2", 2)
    assert store.tables() == [NAME] == store.tables("shop") and store.streams() == []


def test_a_name_that_is_a_stream_is_no_table(store: hw.Store, table: hw.Table) -> None:
    store.create_stream("shop/orders")
    with pytest.raises(hw.AlreadyExistsError, match="events"):
        store.table("shop/orders")
    with pytest.raises(hw.AlreadyExistsError, match="table"):
        store.revisioned(NAME)
    with pytest.raises(hw.InvalidRequestError):
        store.table("no scope")
    with pytest.raises((hw.InvalidRequestError, hw.ConflictError)):
        store.stream(NAME).split(0)
    with pytest.raises(hw.InvalidRequestError):
        store.stream(NAME).writer()
    table.put("k", b"still works")


@pytest.mark.parametrize(
    ("key", "value", "version"),
    [("", b"", None), (b"k", b"", None), (5, b"", None), (None, b"", None), ("a\0b", b"", None), ("\ud800", b"", None),
     ("k" * 5000, b"", None), ("k", "text", None), ("k", None, None), ("k", bytearray(b"x"), None),
     ("k", b"x" * (MIB + 1), None), ("k", b"", -1), ("k", b"", "1"),
     ("k", b"", True), ("k", b"", 1.0), ("k", b"", 1 << 70)],
    ids=lambda value: repr(value)[:12],
)  # fmt: skip
def test_what_no_table_can_hold_is_refused(store: hw.Store, table: hw.Table, key: Any, value: Any, version: Any) -> None:
    with pytest.raises(hw.InvalidRequestError):
        table.put(key, value, version)
    with store.transaction() as tx, pytest.raises(hw.InvalidRequestError):
        tx.put(NAME, key, value, version)
    assert list(table.items()) == []


def test_a_value_of_one_mebibyte_fits(table: hw.Table) -> None:
    table.put("k", b"x" * MIB)
    entry = table.get("k")
    assert entry is not None and len(entry.value) == MIB


def test_a_key_of_two_kibibytes_fits_whatever_it_is_and_a_longer_one_is_refused(store: hw.Store, table: hw.Table) -> None:
    longest = random.Random(1).randbytes(1024).hex()  # PostgreSQL can't make it shorter.
    table.put(longest, b"x")
    assert [key for key, _ in table.items(longest)] == [longest]
    with pytest.raises(hw.InvalidRequestError, match="up to 2,048 bytes"):
        table.put(longest + "x", b"x")
    with store.transaction() as tx, pytest.raises(hw.InvalidRequestError, match="up to 2,048 bytes"):
        tx.put(NAME, longest + "x", b"x")


@pytest.mark.parametrize("prefix", [5, None, b"k", "a\0b", "\ud800"])
def test_a_prefix_that_is_none_is_refused_at_once(table: hw.Table, prefix: Any) -> None:
    with pytest.raises(hw.InvalidRequestError):
        table.items(prefix)


# Iteration.

TEXTS = ["a", "aa", "ab", "b", "A", "Z", "_", "~", "é", "e\u0301", "z", "ß", "я", "中", "\ud7ff", "\ue000", "\uffff", "\U0001f600",
         "\U0010ffff",
         "\U0010ffffx", "a\U0010ffff", "a\U0010ffff\U0010ffff", " ", "a ", "a%", "a_", "1", "10", "2", "\x01", "\x7f", "\x80"]  # fmt: skip


def test_keys_come_in_the_order_of_their_bytes(table: hw.Table) -> None:
    for text in TEXTS:
        table.put(text, text.encode())
    assert [key for key, _ in table.items()] == sorted(TEXTS, key=str.encode)
    for prefix in TEXTS:
        found = [(key, entry.value) for key, entry in table.items(prefix)]
        expected = sorted((text for text in TEXTS if text.startswith(prefix)), key=str.encode)
        assert found == [(text, text.encode()) for text in expected]


def test_many_keys_are_walked_page_by_page_beside_changes(store: hw.Store, table: hw.Table) -> None:
    keys = [f"{number:05d}" for number in range(1201)]
    with store.transaction() as tx:
        for key in keys:
            tx.put(NAME, key, b"1")
    walk = table.items()
    assert next(walk)[0] == "00000"
    table.remove("00001")
    table.remove("01200")
    table.put("01199x", b"new")
    table.put("00000a", b"too late")
    found = [key for key, _ in walk]
    assert found[-2:] == ["01199", "01199x"], "each page is a look of its own"
    assert len(found) in (1199, 1200, 1201) and found == sorted(set(found))
    assert len(list(table.items("0100"))) == 10
    assert len(table) == 1201


# Changes.


def test_changes_are_all_puts_and_removals_in_order_with_their_versions(table: hw.Table) -> None:
    table.put("a", b"1")
    table.put("b", b"2")
    version = table.remove("a")
    table.put("a", b"3")
    assert list(table.changes()) == [("a", b"1", 1), ("b", b"2", 2), ("a", None, 3), ("a", b"3", 4)]
    assert version == 3 and isinstance(next(table.changes()), hw.TableChange)
    assert list(table.changes(after=2)) == [("a", None, 3), ("a", b"3", 4)]
    assert list(table.changes(after=0)) == list(table.changes()) and list(table.changes(after=4)) == []
    for wrong in (-1, "1", True, 1.5):
        with pytest.raises(hw.InvalidRequestError):
            table.changes(after=wrong)  # type: ignore[arg-type]


def test_a_table_is_rebuilt_from_its_changes(store: hw.Store, table: hw.Table) -> None:
    for number in range(30):
        table.put(f"{number % 7}", b"%d" % number)
        if number % 3 == 0:
            table.remove(f"{number % 5}")
    with store.transaction() as tx:
        for number in range(5):
            tx.put(NAME, f"{number}", b"tx")
        tx.remove(NAME, "2")
    rebuilt: dict[str, hw.Entry] = {}
    for key, value, version in table.changes():
        if value is None:
            rebuilt.pop(key, None)
        else:
            rebuilt[key] = hw.Entry(value, version)
    assert rebuilt == dict(table.items())


def test_a_follower_sees_changes_of_other_processes_as_they_come(table: hw.Table, place: Place) -> None:
    table.put("old", b"")
    follower = table.changes(after=1, follow=True)
    with ThreadPoolExecutor() as pool, place.open() as other:
        for number in range(5):
            coming = pool.submit(next, follower)
            other.table(NAME).put("k", b"%d" % number)
            assert coming.result(30) == ("k", b"%d" % number, number + 2)
        coming = pool.submit(next, follower)
        with other.transaction() as tx:
            tx.remove(NAME, "k")
        assert coming.result(30) == ("k", None, 7)


# Many at once.


def increment(table: hw.Table, key: str, times: int) -> None:
    for _ in range(times):
        while True:
            entry = table.get(key)
            try:
                if entry is None:
                    table.put(key, b"1", version=hw.ABSENT)
                else:
                    table.put(key, b"%d" % (int(entry.value) + 1), version=entry.version)
                break
            except hw.ConditionFailedError:
                continue


def increment_elsewhere(channel: Connection, place: Place, times: int) -> None:
    with place.open() as store:
        increment(store.table(NAME), "k", times)
    channel.send("done")


@pytest.mark.slow
def test_no_update_with_a_version_is_lost_between_threads_and_processes(table: hw.Table, place: Place, crew: Crew) -> None:
    workers = [crew.start(increment_elsewhere, place, 15) for _ in range(3)]
    with ThreadPoolExecutor() as pool:
        for future in [pool.submit(increment, table, "k", 15) for _ in range(3)]:
            future.result(60)
    assert [worker.hear() for worker in workers] == ["done"] * 3
    entry = table.get("k")
    assert entry is not None and entry.value == b"90" and entry.version == 90


def test_puts_and_transactions_of_many_threads_number_their_versions_alike(store: hw.Store, table: hw.Table) -> None:
    def put(index: int) -> None:
        for number in range(10):
            if index % 2:
                table.put(f"{index}", b"%d" % number)
            else:
                with store.transaction() as tx:
                    tx.put(NAME, f"{index}", b"%d" % number)
                    if number % 2:
                        tx.flush()

    with ThreadPoolExecutor() as pool:
        list(pool.map(put, range(6)))
    changes = list(table.changes())
    assert [change.version for change in changes] == list(range(1, 61))
    for index in range(6):
        assert [change.value for change in changes if change.key == f"{index}"] == [b"%d" % number for number in range(10)]
    assert {key: entry.version for key, entry in table.items()} == {change.key: change.version for change in changes}


def test_of_many_that_insert_one_key_one_wins(table: hw.Table) -> None:
    start = threading.Barrier(6)

    def insert(number: int) -> bool:
        start.wait(60)
        try:
            table.put("leader", b"%d" % number, version=hw.ABSENT)
        except hw.ConditionFailedError:
            return False
        return True

    with ThreadPoolExecutor(6) as pool:
        won = list(pool.map(insert, range(6)))
    entry = table.get("leader")
    assert sum(won) == 1 and entry is not None and entry.value == b"%d" % won.index(True)


def test_a_sealed_or_deleted_table_says_so(store: hw.Store, table: hw.Table) -> None:
    table.put("k", b"1")
    store.stream(NAME).seal()
    with pytest.raises(hw.SealedError):
        table.put("k", b"2")
    assert table.get("k") == (b"1", 1) and len(list(table.changes())) == 1
    store.delete_stream(NAME)
    with pytest.raises(hw.NotFoundError):
        table.put("k", b"2")
    fresh = store.table(NAME)
    assert list(fresh.items()) == [] and fresh.put("k", b"new") == 1


def test_changes_that_were_truncated_are_told_to_one_who_asks_for_them(store: hw.Store, table: hw.Table) -> None:
    for number in range(4):
        table.put("k", b"%d" % number)
    stream = store.stream(NAME)
    stream.truncate(hw.Cut(store.id, {NAME: stream.head().streams[NAME]._replace(segments={0: 2})}))
    for after in (0, 1):
        with pytest.raises(hw.TruncatedError) as found:
            list(table.changes(after=after))
        assert found.value.head == stream.head()
    assert [change.version for change in table.changes()] == [change.version for change in table.changes(after=2)] == [3, 4]
    assert list(table.changes(after=4)) == []
    with pytest.raises(hw.InvalidRequestError, match="there is no version 5"):
        list(table.changes(after=5))
    assert table.get("k") == hw.Entry(b"3", 4)


def test_a_deleted_table_says_so_whatever_it_is_asked(store: hw.Store, table: hw.Table) -> None:
    table.put("k", b"1")
    store.stream(NAME).seal()
    store.delete_stream(NAME)
    for ask in (lambda: table.get("k"), lambda: list(table.items()), lambda: len(table), lambda: list(table.changes())):
        with pytest.raises(hw.NotFoundError):
            ask()


def truncate(store: hw.Store, version: int) -> hw.Cut:
    stream = store.stream(NAME)
    stream.truncate(hw.Cut(store.id, {NAME: stream.head().streams[NAME]._replace(segments={0: version})}))
    return stream.head()


@pytest.mark.parametrize("deleted", [False, True])
def test_a_follower_that_waits_is_told_that_its_table_was_deleted_or_truncated(store: hw.Store, place: Place, deleted: bool) -> None:
    # A handle of its own: it is closed also if the follower waits for ever.
    following = place.open()
    table = following.table(NAME)
    table.put("k", b"1")
    follower = table.changes(follow=True)
    assert next(follower).version == 1
    pool = ThreadPoolExecutor()
    if deleted:
        coming = pool.submit(next, follower)
        store.delete_stream(NAME, seal=True)
        with pytest.raises(hw.NotFoundError):
            coming.result(10)
    else:
        table.put("k", b"2")
        head = truncate(store, 2)
        coming = pool.submit(next, follower)
        with pytest.raises(hw.TruncatedError) as found:
            coming.result(10)
        assert found.value.head == head
    pool.shutdown(wait=False)
    following.close()


def test_changes_truncated_under_one_who_reads_them_are_told_with_the_head(store: hw.Store, table: hw.Table) -> None:
    for _ in range(600):
        table.put("k", bytes(1000))
    changes = table.changes()
    assert next(changes).version == 1
    head = truncate(store, 590)
    with pytest.raises(hw.TruncatedError) as found:
        list(changes)
    assert found.value.head == head


def test_a_table_is_not_forked_or_scaled(store: hw.Store, table: hw.Table) -> None:
    with pytest.raises(hw.InvalidRequestError, match="can't be forked"):
        store.stream(NAME).fork("shop/copy")
    with pytest.raises(hw.InvalidRequestError, match="one segment"):
        store.stream(NAME).update(scaling=hw.Scaling.fixed(2))
    store.stream(NAME).update(scaling=hw.Scaling.fixed(1))
