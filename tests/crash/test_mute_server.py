"""A PostgreSQL that says nothing any more, and does not hang up: each wait for it has a limit, and another connection takes its place."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import headwater as hw
from headwater.catalog import postgres
from headwater.catalog.postgres import PostgresDatabase
from tests.crash.processes import wait_until
from tests.crash.test_unknown_outcome import Proxy

pytestmark = pytest.mark.slow


@pytest.fixture
def proxy(postgres_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    proxy = Proxy(postgres_url, tmp_path_factory.mktemp("s"))
    yield proxy
    proxy.close()


@pytest.fixture(autouse=True)
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres, "CONNECT_SECONDS", 1.0)
    monkeypatch.setattr(postgres, "RETRY_SECONDS", 0.5)


def test_a_server_that_lets_us_in_and_goes_mute_is_given_up(proxy: Proxy) -> None:
    proxy.mutes_new.set()
    with ThreadPoolExecutor() as pool:
        opening = pool.submit(PostgresDatabase, proxy.url)
        try:
            with pytest.raises(hw.UnavailableError, match="did not answer for 1 s"):
                opening.result(30)
        finally:
            proxy.close()


def test_mute_connections_are_replaced_and_the_caller_sees_no_error(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    # A silence is longer than calls are repeated.
    monkeypatch.setattr(postgres, "SILENT_SECONDS", 1.5)
    database = PostgresDatabase(proxy.url)
    try:
        for pipeline in [database._take() for _ in range(5)]:
            database._give_back(pipeline)
        proxy.silence()
        began = time.monotonic()
        assert database.query("SELECT 1") == [(1,)]
        assert time.monotonic() - began < 3, "the others are not waited for, one after the other"
        proxy.silence()
        assert database.write(lambda tx: tx.run("SELECT 2")) == [(2,)]
        proxy.silence()
        assert database.read(lambda tx: tx.run("SELECT 3")) == [(3,)]
    finally:
        database.close()


def test_a_server_that_stays_mute_is_said_to_be_out_of_reach(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres, "SILENT_SECONDS", 1.0)
    database = PostgresDatabase(proxy.url)
    try:
        proxy.silence()
        proxy.mutes_new.set()
        with pytest.raises(hw.UnavailableError, match="out of reach"):
            database.query("SELECT 1")
    finally:
        database.close()


@pytest.mark.parametrize("mute", ["who listens", "who tells"])
def test_who_listens_and_tells_connects_anew_after_a_connection_that_went_mute(postgres_url: str, proxy: Proxy, mute: str) -> None:
    through, direct = PostgresDatabase(proxy.url), PostgresDatabase(postgres_url)
    listening, telling = (through, direct) if mute == "who listens" else (direct, through)
    try:
        proxy.mutes_new.set()
        listening.changes.wait(listening.changes.version(), 0.1)
        telling.announce({"place": "lost"})
        wait_until(lambda: len(proxy._mute) == 1)
        proxy.mutes_new.clear()

        def is_heard() -> bool:
            telling.announce({"place": "news"})
            return listening.changes.heard("place") == "news"

        wait_until(is_heard)
    finally:
        proxy.close()
        through.close()
        direct.close()
