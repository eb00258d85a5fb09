"""PostgreSQL after a failover: a server that takes no changes for a while, as a standby that is not promoted yet."""

from __future__ import annotations

import threading
from pathlib import Path

import psycopg
import pytest

import headwater as hw
from headwater.catalog import postgres

pytestmark = pytest.mark.slow


def take_changes(url: str, *, really: bool) -> None:
    """Let the database refuse changes from here on, or take them again; those who are connected must connect anew."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("SET default_transaction_read_only = off")
        name = connection.info.dbname
        connection.execute(f'ALTER DATABASE "{name}" SET default_transaction_read_only = {"off" if really else "on"}')
        connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s AND pid <> pg_backend_pid()", (name,))


def test_what_is_given_while_only_a_standby_answers_is_stored_once_when_it_is_promoted(tmp_path: Path, postgres_url: str) -> None:
    with hw.open(tmp_path / "store", catalog=postgres_url, upkeep=False) as store:
        stream = store.create_stream("fail/over")
        with stream.writer() as writer:
            writer.write(b"before").result()
            take_changes(postgres_url, really=False)
            waiting = writer.write(b"meanwhile")
            promotion = threading.Timer(1.5, take_changes, (postgres_url,), {"really": True})
            promotion.start()
            try:
                waiting.result(60)
                writer.write(b"after").result(60)
            finally:
                promotion.join()
        assert [event.value for event in stream.read()] == [b"before", b"meanwhile", b"after"]


def test_without_a_server_that_takes_changes_it_is_said_and_what_was_given_stays(
    tmp_path: Path, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "RETRY_SECONDS", 1.0)
    with hw.open(tmp_path / "store", catalog=postgres_url, upkeep=False) as store:
        stream = store.create_stream("fail/over")
        with stream.writer() as writer:
            writer.write(b"before").result()
            take_changes(postgres_url, really=False)
            writer.write(b"meanwhile")
            with pytest.raises(hw.UnavailableError, match="read-only"):
                writer.flush()
            take_changes(postgres_url, really=True)
            writer.flush()
        assert [event.value for event in stream.read()] == [b"before", b"meanwhile"]
