"""What a statement that failed leaves behind on its connection."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

import headwater as hw
from headwater.catalog.postgres import PostgresDatabase


@pytest.fixture
def database(postgres_url: str) -> Iterator[PostgresDatabase]:
    database = PostgresDatabase(postgres_url)
    yield database
    database.close()


def test_statements_behind_one_that_failed_can_be_run_again(database: PostgresDatabase) -> None:
    # The server skips them, also the part that prepares them; psycopg takes them for prepared. Seen after a deadlock: "prepared statement
    # does not exist", and the writer was finished.
    for times in range(10):
        later = f"SELECT CAST(? AS BIGINT) + {times}"
        for _ in range(times):
            database.write(lambda tx, later=later: tx.run(later, (1,)))  # type: ignore[misc]
        with pytest.raises((psycopg.Error, hw.HeadwaterError), match="division by zero"):
            database.write(lambda tx, later=later: tx.run_all([("SELECT 1 / 0", ()), (later, (1,))]))  # type: ignore[misc]
        for _ in range(10):
            assert database.write(lambda tx, later=later: tx.run(later, (1,))) == [(times + 1,)]  # type: ignore[misc]
