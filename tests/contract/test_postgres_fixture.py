"""The PostgreSQL the other tests rest on is a real one: durable, fresh for each test, reachable from other processes, gone afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psycopg
import pytest

from tests.postgres import PostgresServer

# It takes a server of its own: not for a quick run.
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("attempt", [1, 2, 3])
def test_each_test_has_an_empty_database(postgres_url: str, attempt: int) -> None:
    with psycopg.connect(postgres_url) as connection:
        connection.execute("CREATE TABLE mine (attempt int)")
        connection.execute("CREATE FUNCTION one() RETURNS int LANGUAGE sql AS 'SELECT 1'")
        connection.execute("CREATE SCHEMA other CREATE TABLE mine (attempt int)")


def test_what_it_commits_is_durable_and_a_hundred_may_connect(postgres_url: str) -> None:
    settings = {"fsync": "on", "synchronous_commit": "on", "full_page_writes": "on", "max_connections": "100"}
    with psycopg.connect(postgres_url) as connection:
        found = {name: connection.execute("SELECT current_setting(%s)", [name]).fetchone() for name in settings}
    assert found == {name: (value,) for name, value in settings.items()}


def test_another_process_sees_the_same_database(postgres_url: str) -> None:
    with psycopg.connect(postgres_url) as connection:
        connection.execute("CREATE TABLE shared AS SELECT 42 AS answer")
    program = "import psycopg, sys; print(psycopg.connect(sys.argv[1]).execute('SELECT answer FROM shared').fetchone()[0])"
    answer = subprocess.run([sys.executable, "-c", program, postgres_url], capture_output=True, text=True, check=True)
    assert answer.stdout == "42\n"


def test_what_a_test_leaves_running_does_not_reach_the_next(postgres_server: PostgresServer) -> None:
    with postgres_server.database() as first:
        left_open = psycopg.connect(first)
    with postgres_server.database() as second:
        assert second != first
        with pytest.raises(psycopg.OperationalError):
            left_open.execute("SELECT 1")
        left_open.close()
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(first)


def test_databases_in_use_at_the_same_time_are_apart(postgres_server: PostgresServer) -> None:
    with postgres_server.database() as first, postgres_server.database() as second:
        for url in (first, second):
            with psycopg.connect(url) as connection:
                connection.execute("CREATE TABLE mine (attempt int)")


def test_the_server_stops_when_the_tests_are_killed() -> None:
    program = """
        import time
        from tests.postgres import running_postgres
        with running_postgres() as server:
            print(server.url(), flush=True)
            time.sleep(600)
    """
    program = "\n".join(line[8:] for line in program.splitlines())
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True) as tests:
        assert tests.stdout is not None
        url = tests.stdout.readline().strip()
        psycopg.connect(url).close()
        os.kill(tests.pid, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while _answers(url):
        assert time.monotonic() < deadline, "PostgreSQL is still running"
        time.sleep(0.01)


def _answers(url: str) -> bool:
    try:
        psycopg.connect(url).close()
    except psycopg.OperationalError:
        return False
    return True
