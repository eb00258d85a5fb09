"""The catalog's schema: what the migrations make together is what schema.sql says, on both databases."""

from __future__ import annotations

from importlib import resources
from typing import Any

import apsw
import psycopg

from headwater.catalog.schema import FORMAT, statements

MIGRATIONS = [f"migrations/{version:04d}.sql" for version in range(1, FORMAT + 1)]


def test_there_is_one_migration_for_each_format() -> None:
    found = {item.name for item in resources.files("headwater.catalog").joinpath("migrations").iterdir() if item.name.endswith(".sql")}
    assert found == {f"{version:04d}.sql" for version in range(1, FORMAT + 1)}


def test_schema_sql_is_the_sum_of_the_migrations_on_sqlite() -> None:
    assert _sqlite_tables(["schema.sql"]) == _sqlite_tables(MIGRATIONS)


def _sqlite_tables(files: list[str]) -> dict[str, Any]:
    connection = apsw.Connection(":memory:")
    for file in files:
        for statement in statements(file, "sqlite"):
            connection.execute(statement)
    found: dict[str, Any] = {}
    for kind, name, table in connection.execute("SELECT type, name, tbl_name FROM sqlite_master ORDER BY name").fetchall():
        pragmas = ("table_xinfo", "foreign_key_list", "index_list") if kind == "table" else ("index_xinfo",)
        details = {pragma: sorted(map(repr, connection.execute(f"PRAGMA {pragma}({name})").fetchall())) for pragma in pragmas}
        found[str(name)] = (kind, table, details)
    for name, options in connection.execute("SELECT name, wr || strict FROM pragma_table_list WHERE schema = 'main'").fetchall():
        found[f"options of {name}"] = options
    assert "extent" in found
    return found


def test_schema_sql_is_the_sum_of_the_migrations_on_postgresql(postgres_url: str) -> None:
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("CREATE SCHEMA whole; CREATE SCHEMA steps")
        for schema, files in (("whole", ["schema.sql"]), ("steps", MIGRATIONS)):
            connection.execute(f"SET search_path = {schema}")
            for file in files:
                for statement in statements(file, "postgresql"):
                    connection.execute(statement)
        assert _postgres_tables(connection, "whole") == _postgres_tables(connection, "steps")


def _postgres_tables(connection: psycopg.Connection[Any], schema: str) -> list[Any]:
    looks = (
        "SELECT table_name, column_name, data_type, is_nullable, column_default FROM information_schema.columns WHERE table_schema = %s",
        "SELECT tablename, indexname, replace(indexdef, schemaname || '.', '') FROM pg_indexes WHERE schemaname = %s",
        "SELECT conrelid::regclass::text, conname, pg_get_constraintdef(c.oid) FROM pg_constraint c "
        "JOIN pg_namespace n ON n.oid = connamespace WHERE nspname = %s",
    )
    connection.execute(f"SET search_path = {schema}")
    found = [sorted(map(repr, connection.execute(look, [schema]).fetchall())) for look in looks]
    assert all(found)
    return found
