"""Connecting to PostgreSQL: who is not let in is told so at once; a server that is busy, starting up or briefly away is waited for."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import psycopg
import pytest

import headwater as hw
from headwater.catalog import postgres
from tests.crash.processes import wait_until

# It takes a server: not for a quick run.
pytestmark = pytest.mark.slow


@pytest.fixture
def admin(postgres_url: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        yield connection


@pytest.fixture
def guest_url(postgres_url: str, admin: psycopg.Connection) -> Iterator[str]:
    """The address for a role that may make a store, and whose password, `right`, nobody asks for."""
    admin.execute("CREATE ROLE guest LOGIN PASSWORD 'right'")
    admin.execute("GRANT USAGE, CREATE ON SCHEMA public TO guest")
    yield postgres_url.replace("postgres@", "guest@")
    admin.execute("SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE usename = 'guest'")
    admin.execute("DROP OWNED BY guest CASCADE")
    admin.execute("DROP ROLE guest")


@pytest.fixture
def asks_for_passwords(guest_url: str, admin: psycopg.Connection) -> Iterator[None]:
    """The server wants the guest's password from here on."""
    found = admin.execute("SHOW hba_file").fetchone()
    assert found is not None
    rules = Path(found[0])
    before = rules.read_text()

    def use(text: str, *, really: bool) -> None:
        rules.write_text(text)
        admin.execute("SELECT pg_reload_conf()")
        wait_until(lambda: _lets_in(guest_url) is not really)

    use(f"local all guest scram-sha-256\n{before}", really=True)
    yield
    use(before, really=False)


def _lets_in(url: str) -> bool:
    try:
        psycopg.connect(url).close()
    except psycopg.OperationalError:
        return False
    return True


def assert_refused(path: Path, url: str, reason: str) -> None:
    began = time.monotonic()
    with pytest.raises(hw.InvalidRequestError, match=f"PostgreSQL refuses.*{reason}") as caught:
        hw.open(path / "store", catalog=url)
    assert time.monotonic() - began < 10, "it is not tried again"
    assert "geheim" not in str(caught.value)
    assert not (path / "store").exists(), "nothing stays of it"


def test_a_database_that_is_missing_is_an_invalid_request(tmp_path: Path, postgres_url: str) -> None:
    assert_refused(tmp_path, re.sub(r"/test_\d+", "/missing", postgres_url), 'database "missing" does not exist')


def test_a_role_that_is_missing_is_an_invalid_request(tmp_path: Path, postgres_url: str) -> None:
    assert_refused(tmp_path, postgres_url.replace("postgres@", "nobody:geheim@"), 'role "nobody" does not exist')


def test_a_role_that_may_not_log_in_is_an_invalid_request(tmp_path: Path, guest_url: str, admin: psycopg.Connection) -> None:
    admin.execute("ALTER ROLE guest NOLOGIN")
    assert_refused(tmp_path, guest_url, "not permitted to log in")


def test_a_role_that_may_not_use_the_database_is_an_invalid_request(tmp_path: Path, guest_url: str, admin: psycopg.Connection) -> None:
    admin.execute(f"REVOKE CONNECT ON DATABASE {admin.info.dbname} FROM PUBLIC")
    try:
        assert_refused(tmp_path, guest_url, "permission denied for database")
    finally:
        admin.execute(f"GRANT CONNECT ON DATABASE {admin.info.dbname} TO PUBLIC")


@pytest.mark.usefixtures("asks_for_passwords")
def test_a_password_that_is_wrong_or_missing_is_an_invalid_request(tmp_path: Path, guest_url: str) -> None:
    assert_refused(tmp_path, guest_url.replace("guest@", "guest:geheim@"), "password authentication failed")
    assert_refused(tmp_path, guest_url, "no password supplied")
    hw.open(tmp_path / "store", catalog=guest_url.replace("guest@", "guest:right@"), upkeep=False).close()


def test_while_the_role_of_an_open_store_is_not_let_in_its_writers_keep_their_events(
    tmp_path: Path, guest_url: str, admin: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "RETRY_SECONDS", 0.5)
    with hw.open(tmp_path / "store", catalog=guest_url, upkeep=False) as store, store.create_stream("a/x").writer() as writer:
        writer.write(b"before").result()
        admin.execute("ALTER ROLE guest NOLOGIN")
        admin.execute("SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE usename = 'guest'")
        writer.write(b"meanwhile")
        with pytest.raises(hw.UnavailableError, match="not permitted to log in"):
            writer.flush()
        admin.execute("ALTER ROLE guest LOGIN")
        writer.flush()
        assert [event.value for event in store.stream("a/x").read()] == [b"before", b"meanwhile"]


def test_a_store_is_opened_when_a_server_that_has_no_place_has_one_again(tmp_path: Path, guest_url: str, admin: psycopg.Connection) -> None:
    admin.execute("ALTER ROLE guest CONNECTION LIMIT 0")
    assert not _lets_in(guest_url)
    later = threading.Timer(0.5, admin.execute, ("ALTER ROLE guest CONNECTION LIMIT -1",))
    later.start()
    try:
        hw.open(tmp_path / "store", catalog=guest_url, upkeep=False).close()
    finally:
        later.join()


def test_a_store_is_opened_when_the_server_is_there_again_soon(tmp_path: Path, guest_url: str) -> None:
    # As in the moment of a restart in which nobody listens. A link to the server's folder stands for a server that comes up.
    folder, link = unquote(guest_url.partition("host=")[2]), tmp_path / "s"
    later = threading.Timer(0.5, link.symlink_to, (folder,))
    later.start()
    try:
        hw.open(tmp_path / "store", catalog=guest_url.partition("host=")[0] + f"host={link}", upkeep=False).close()
    finally:
        later.join()


@pytest.mark.parametrize("where", ["/no/folder", "127.0.0.1:1", "nowhere.invalid", "localhost:1"])
def test_an_address_where_nobody_listens_is_told_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    monkeypatch.setattr(postgres, "ABSENT_SECONDS", 0.2)
    url = f"postgresql://guest@/x?host={where}" if "/" in where else f"postgresql://guest@{where}/x"
    began = time.monotonic()
    with pytest.raises(hw.UnavailableError, match="out of reach"):
        hw.open(tmp_path / "store", catalog=url)
    assert time.monotonic() - began < 10
    assert not (tmp_path / "store").exists(), "nothing stays of it"


@pytest.mark.parametrize(
    "said",
    [
        "the database system is starting up",
        "the database system is shutting down",
        "the database system is not yet accepting connections",
        "sorry, too many clients already",
        "remaining connection slots are reserved for roles with the SUPERUSER attribute",
        'too many connections for role "guest"',
        'database "streams" is not currently accepting connections',
        "terminating connection due to administrator command",
    ],
)
def test_a_server_that_is_busy_or_starting_up_is_asked_again(said: str) -> None:
    error = psycopg.OperationalError(f'connection failed: connection to server at "::1", port 5432 failed: FATAL:  {said}')
    assert postgres._is_retryable(error)
    with pytest.raises(hw.UnavailableError, match="repeat"), postgres._translated("postgresql://"):
        raise error
