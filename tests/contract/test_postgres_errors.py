"""What PostgreSQL refuses, as our errors: at once where repeating can't help, and connections that are given back."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from headwater.catalog.database import Tx
from headwater.catalog.postgres import PostgresDatabase
from headwater.errors import InvalidRequestError


@pytest.fixture
def database(postgres_url: str) -> Iterator[PostgresDatabase]:
    database = PostgresDatabase(postgres_url)
    database.write(lambda tx: tx.run("CREATE TABLE word (text TEXT PRIMARY KEY, other TEXT REFERENCES word (text), number BIGINT)"))
    yield database
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
