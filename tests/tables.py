"""The tables of a catalog as the database itself describes them, to compare two catalogs that were made in different ways."""

from __future__ import annotations

from headwater.catalog.database import Database, Row
from headwater.catalog.sqlite import SqliteDatabase

_POSTGRES_LOOKS = (
    "SELECT table_name::text, column_name::text, ordinal_position::int, data_type::text, collation_name::text, is_nullable::text, "
    "column_default::text FROM information_schema.columns WHERE table_schema = current_schema()",
    "SELECT tablename::text, indexname::text, replace(indexdef, schemaname || '.', '') FROM pg_indexes WHERE schemaname = current_schema()",
    "SELECT conrelid::regclass::text, conname::text, pg_get_constraintdef(c.oid) FROM pg_constraint c "
    "JOIN pg_namespace n ON n.oid = connamespace WHERE nspname = current_schema()",
)


def tables_of(database: Database) -> dict[str, list[Row]]:
    """Columns, indexes, constraints and options of all tables."""
    if not isinstance(database, SqliteDatabase):
        return {look: sorted(database.query(look), key=repr) for look in _POSTGRES_LOOKS}
    found = {"options": sorted(database.query("SELECT name, type, wr, strict FROM pragma_table_list WHERE schema = 'main'"))}
    for kind, name in database.query("SELECT type, name FROM sqlite_master WHERE type IN ('table', 'index')"):
        for pragma in ("table_xinfo", "foreign_key_list", "index_list") if kind == "table" else ("index_xinfo",):
            found[f"{pragma} of {name}"] = sorted(database.query(f"PRAGMA {pragma}({name})"), key=repr)
    return found
