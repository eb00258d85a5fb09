"""Commits that wait for each other's locks on PostgreSQL: what they compare is what is there when they have the locks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

import headwater as hw
from tests.contract.writing import values
from tests.crash.processes import wait_until

TABLE, STREAM = "a/table", "a/x"
on_postgresql = pytest.mark.parametrize("catalog_url", ["postgresql"], indirect=True)
pytestmark = [on_postgresql, pytest.mark.timeout(120)]


class Holder:
    """A session of PostgreSQL's own that holds the rows of segments, as another commit would, until it is told to end."""

    def __init__(self, url: str, store: hw.Store) -> None:
        self._holding = psycopg.connect(url)
        self._looking = psycopg.connect(url, autocommit=True)
        self._store = store

    def take(self, name: str) -> None:
        self._holding.execute("SELECT 1 FROM segment WHERE stream = %s FOR UPDATE", (self._store.stream(name).id,))

    def run(self, sql: str, *values: Any) -> None:
        self._holding.execute(sql, values)

    def wait_for(self, waiting: int) -> None:
        """Return when so many wait for a lock."""
        wait_until(lambda: self._looking.execute("SELECT count(*) FROM pg_locks WHERE NOT granted").fetchall() == [(waiting,)])

    def end(self) -> None:
        self._holding.commit()

    def close(self) -> None:
        self._holding.close()
        self._looking.close()


@pytest.fixture
def holder(store: hw.Store, catalog_url: str) -> Iterator[Holder]:
    store.create_stream(STREAM)
    store.table(TABLE).put("key", b"1")
    holder = Holder(catalog_url, store)
    yield holder
    holder.close()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def transact(store: hw.Store, *changes: Callable[[hw.Transaction], Any], staged: bool = False) -> hw.Commit:
    tx = store.transaction()
    for change in changes:
        change(tx)
    if staged:
        tx.flush()
    return tx.commit()


@pytest.mark.parametrize("how", ["put", "transaction", "staged transaction", "requirement"])
def test_a_version_is_compared_when_the_lock_is_held(store: hw.Store, holder: Holder, threads: ThreadPoolExecutor, how: str) -> None:
    """A condition that was looked up before the wait for the lock would still hold, and overwrite what came meanwhile."""
    holder.take(TABLE)
    table = store.table(TABLE)
    found: Future[Any]
    if how == "put":
        found = threads.submit(table.put, "key", b"late", version=1)
    elif how == "requirement":
        found = threads.submit(transact, store, lambda tx: tx.require(TABLE, "key", 1), lambda tx: tx.write(STREAM, b"late"))
    else:
        put = lambda tx: tx.put(TABLE, "key", b"late", version=1)  # noqa: E731
        found = threads.submit(transact, store, put, staged=how == "staged transaction")
    holder.wait_for(1)
    holder.run("UPDATE entry SET version = 7 WHERE key = 'key'")
    holder.end()
    with pytest.raises(hw.ConditionFailedError, match="has version 7, not 1") as caught:
        found.result(60)
    assert caught.value.facts["found"] == 7
    entry = table.get("key")
    assert entry is not None and (entry.value, entry.version) == (b"1", 7)
    assert values(store.stream(STREAM)) == []
    holder.run("UPDATE entry SET version = 1 WHERE key = 'key'")
    holder.end()


def test_two_that_each_require_what_the_other_one_changes_do_not_deadlock(
    store: hw.Store, holder: Holder, threads: ThreadPoolExecutor
) -> None:
    """Both wait for the lower segment first, in the mode that they need: one commits, then the other one is refused."""
    names = sorted([TABLE, "a/other"], key=lambda name: store.table(name)._ref.id)
    for name in names:
        store.table(name).put("k", b"1")
    versions = {name: entry.version for name in names if (entry := store.table(name).get("k")) is not None}
    holder.take(names[0])

    def change(own: str, other: str) -> hw.Commit:
        return transact(store, lambda tx: tx.put(own, "k", b"2"), lambda tx: tx.require(other, "k", versions[other]))

    both = [threads.submit(change, own, other) for own, other in (names, names[::-1])]
    holder.wait_for(2)
    holder.end()
    outcomes = sorted(type(error).__name__ if (error := each.exception(60)) is not None else "committed" for each in both)
    assert outcomes == ["ConditionFailedError", "committed"]
    deadlocks = store._engine.database.query("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")
    assert deadlocks == [(0,)]


def test_a_flush_and_a_transaction_of_the_same_segments_take_turns(store: hw.Store, holder: Holder, threads: ThreadPoolExecutor) -> None:
    streams = [store.create_stream(f"b/{number}", scaling=hw.Scaling.fixed(4)) for number in range(3)]
    ready = threading.Barrier(2)

    def write() -> None:
        writers = [stream.writer() for stream in streams]
        ready.wait()
        for number in range(30):
            acks = [writer.write(b"flush", key=key + number) for writer in writers for key in range(8)]
            acks[-1].result()
        for writer in writers:
            writer.close()

    def commit() -> None:
        ready.wait()
        for number in range(30):
            with store.transaction() as tx:
                for stream in streams[::-1]:
                    for key in range(8):
                        tx.write(stream.name, b"tx", key=key + number)

    for each in [threads.submit(write), threads.submit(commit)]:
        each.result(100)
    assert all(sorted(values(stream)) == [b"flush"] * 240 + [b"tx"] * 240 for stream in streams)
    assert store._engine.database.query("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()") == [(0,)]
