"""What PostgreSQL refuses, as our errors: at once where repeating can't help, and connections that are given back."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest

import headwater as hw
from headwater.catalog import streams
from headwater.catalog.database import Tx
from headwater.catalog.postgres import PostgresDatabase
from headwater.errors import ConflictError, InvalidRequestError, UnavailableError


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def database(postgres_url: str) -> Iterator[PostgresDatabase]:
    database = PostgresDatabase(postgres_url)
    database.write(lambda tx: tx.run("CREATE TABLE word (text TEXT PRIMARY KEY, other TEXT REFERENCES word (text), number BIGINT)"))
    yield database
    database.close()


def test_a_statement_timeout_of_the_database_does_not_end_our_statements(postgres_url: str) -> None:
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(f"ALTER DATABASE {connection.info.dbname} SET statement_timeout = 50")
    database = PostgresDatabase(postgres_url)
    try:
        assert database.query("SELECT 1 FROM pg_sleep(0.2)") == [(1,)]
        assert database.query("SELECT current_setting('statement_timeout')") == [("30s",)]
    finally:
        database.close()


class Insert:
    """Inserts a row, and counts how often that was tried."""

    def __init__(self, *values: str | int | None) -> None:
        self.tries = 0
        self._values = values

    def __call__(self, tx: Tx) -> None:
        self.tries += 1
        tx.run("INSERT INTO word (text, other, number) VALUES (?, ?, ?)", self._values)


def test_what_is_too_long_for_an_index_is_refused_at_once(database: PostgresDatabase) -> None:
    insert = Insert(random.Random(1).randbytes(4000).hex(), None, None)
    with pytest.raises(InvalidRequestError, match="index row size"):
        database.write(insert)
    assert insert.tries == 1


def test_text_that_the_database_can_not_hold_is_an_invalid_request(database: PostgresDatabase) -> None:
    with pytest.raises(InvalidRequestError, match="can't hold what it was given"):
        database.write(Insert("a\0", None, None))


def test_a_row_that_does_not_fit_the_others_is_a_conflict(database: PostgresDatabase) -> None:
    insert = Insert("a", "missing", None)
    with pytest.raises(ConflictError, match="look again"):
        database.write(insert)
    assert insert.tries == 1


def test_a_fault_of_the_server_is_unavailable(database: PostgresDatabase) -> None:
    with pytest.raises(UnavailableError, match="repeat"):
        database.write(lambda tx: tx.run("DO $$ BEGIN RAISE EXCEPTION 'odd' USING ERRCODE = 'XX000'; END $$"))


def test_a_stream_is_made_also_while_its_empty_scope_is_deleted(postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hw.open(tmp_path, catalog=postgres_url, upkeep=False) as store, hw.open(tmp_path, catalog=postgres_url, upkeep=False) as other:
        store.create_scope("a")
        real = streams.create_scope

        def create_then_lose(tx: Tx, name: str) -> bool:
            monkeypatch.setattr(streams, "create_scope", real)
            was_made = real(tx, name)
            other.delete_scope("a")
            return was_made

        monkeypatch.setattr(streams, "create_scope", create_then_lose)
        store.create_stream("a/x")
        assert other.streams("a") == ["a/x"]


def test_after_a_burst_a_few_connections_are_kept_and_the_others_given_back(database: PostgresDatabase) -> None:
    threads = 20
    everyone = threading.Barrier(threads)

    def look(tx: Tx) -> None:
        everyone.wait(60)
        tx.run("SELECT 1")
        everyone.wait(60)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda _: database.read(look), range(threads)))
    mine = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'headwater' AND datname = current_database()"
    wait_until(lambda: database.query(mine) == [(8,)])


def test_a_connection_in_use_while_the_catalog_is_closed_is_closed_when_it_is_given_back(database: PostgresDatabase) -> None:
    in_use, closed = threading.Event(), threading.Event()

    def work(tx: Tx) -> None:
        tx.run("SELECT 1")
        in_use.set()
        assert closed.wait(60)

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(database.read, work)
        assert in_use.wait(60)
        database.close()
        closed.set()
        done.result(60)
    assert [connection for connection in database._connections if not connection.closed] == []


def test_who_tells_and_hears_of_changes_ends_quietly_when_the_catalog_was_let_go_of(postgres_url: str) -> None:
    database = PostgresDatabase(postgres_url)
    changes = database._changes
    database._close_idle()
    del database
    gc.collect()
    changes._listen()
    changes._tell()
