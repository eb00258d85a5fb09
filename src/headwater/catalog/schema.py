"""The catalog's tables: making them, bringing an older store up to date, refusing a newer one."""

from __future__ import annotations

import re
import uuid
from importlib import resources

from headwater.catalog.database import Database, Tx
from headwater.errors import InvalidRequestError, NotFoundError

FORMAT = 4

_WORDS = {
    "sqlite": {"CLUSTERED": "WITHOUT ROWID", "BLOB": "BLOB", "BYTEWISE": ""},
    "postgresql": {"CLUSTERED": "", "BLOB": "BYTEA", "BYTEWISE": 'COLLATE "C"'},
}
_NOW_US = """CREATE OR REPLACE FUNCTION now_us() RETURNS BIGINT LANGUAGE sql VOLATILE AS
$$ SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::BIGINT $$"""
_ADVISORY_LOCK = 7_234_519_022
#: Sessions have 39 bits: hundredths of a second, until the year 2100 or for a clock that is wrong; above that they are counted.
_SESSION_CLOCK = f"1 + now_us() / 10000 % {3 << 37}"


def statements(name: str, dialect: str) -> list[str]:
    """The statements of one SQL file of this package, in the words of a dialect."""
    text = resources.files("headwater.catalog").joinpath(name).read_text()
    text = re.sub(r"--[^\n]*", "", text)
    for word, meaning in _WORDS[dialect].items():
        text = re.sub(rf"\b{word}\b", meaning, text)
    return [statement.strip() for statement in text.split(";") if statement.strip()]


def open_catalog(database: Database, dialect: str, *, create: bool) -> str:
    """The store's id, once its tables are there and up to date. Of several processes that create at once, one does."""
    exists = _has_store(database, dialect)
    if exists and database.query("SELECT format FROM store")[0][0] == FORMAT:
        return str(database.query("SELECT id FROM store")[0][0])
    if not exists and not create:
        raise NotFoundError(f"there is no headwater store at {database.url}")

    def work(tx: Tx) -> str:
        if dialect == "postgresql":
            tx.run("SELECT pg_advisory_xact_lock(?)", (_ADVISORY_LOCK,))
            tx.run(_NOW_US)
        found = 0
        if _has_store(tx, dialect):
            found = tx.run("SELECT format FROM store")[0][0]
        if found > FORMAT:
            raise InvalidRequestError(
                f"the store at {database.url} has format {found}, made by a newer headwater; "
                f"this one knows formats up to {FORMAT}: upgrade headwater"
            )
        for version in range(found + 1, FORMAT + 1):
            for statement in statements(f"migrations/{version:04d}.sql", dialect):
                tx.run(statement)
        if not found:
            tx.run("INSERT INTO store (one, id, format, created_at) VALUES (1, ?, ?, now_us())", (uuid.uuid4().hex, FORMAT))
        else:
            tx.run("UPDATE store SET format = ?", (FORMAT,))
        return str(tx.run("SELECT id FROM store")[0][0])

    return database.write(work, repeatable=True)


def is_catalog_used(database: Database) -> bool:
    """Whether anything was ever begun in it, a session or a stream: ids are kept for good, so this never becomes False again."""
    return bool(database.query("SELECT 1 FROM sequence LIMIT 1"))


def _has_store(looker: Database | Tx, dialect: str) -> bool:
    tables = "sqlite_master WHERE type = 'table' AND name = 'store'"
    if dialect == "postgresql":
        tables = "pg_tables WHERE schemaname = current_schema() AND tablename = 'store'"
    look = looker.query if hasattr(looker, "query") else looker.run
    return bool(look(f"SELECT 1 FROM {tables}"))


def next_id(tx: Tx, name: str) -> int:
    """A number that was never given before under this name, and never will be again.

    It follows the clock where that is ahead: a catalog that forgot its last commits, restored from a backup or after a fail-over to a
    standby that lagged, would give a number again that a living process, or a stored object, still goes by.
    """
    clock = _SESSION_CLOCK if name == "session" else "now_us()"
    sql = f"INSERT INTO sequence (name, last) VALUES (?, {clock}) ON CONFLICT (name) DO UPDATE SET last = {later('sequence', 'last')}"
    return int(tx.run(f"{sql} RETURNING last", (name,))[0][0])


def later(table: str, column: str) -> str:
    """For ON CONFLICT DO UPDATE: the given value, or, if the row's is not below it, the next one after that."""
    return f"CASE WHEN excluded.{column} > {table}.{column} THEN excluded.{column} ELSE {table}.{column} + 1 END"
