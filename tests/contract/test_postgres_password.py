"""The password in a catalog's address is used, though no message shows it."""

from __future__ import annotations

import pytest

from headwater.catalog.postgres import PostgresDatabase

# It takes a server: not for a quick run.
pytestmark = pytest.mark.slow


def test_the_password_of_the_address_reaches_the_server(postgres_url: str) -> None:
    user, at, rest = postgres_url.partition("@")
    database = PostgresDatabase(f"{user}:secret{at}{rest}")
    try:
        pipeline = database.connect()
        assert pipeline.connection.info.password == "secret"
        pipeline.close()
        assert "secret" not in database.url
    finally:
        database.close()
