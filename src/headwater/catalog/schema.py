"""The catalog's tables: made for a new store, migrated for a store of an earlier format; a store with any other tables is refused.

A store keeps its format and the hash of the schema it has, so that no statement ever meets tables that it was not written for.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from importlib.resources.abc import Traversable
from typing import NamedTuple

from headwater.catalog.database import Database, Row, Tx
from headwater.errors import CorruptDataError, InvalidRequestError, NotFoundError

_WORDS = {
    "sqlite": {"CLUSTERED": "WITHOUT ROWID", "BLOB": "BLOB", "BYTEWISE": ""},
    "postgresql": {"CLUSTERED": "", "BLOB": "BYTEA", "BYTEWISE": 'COLLATE "C"'},
}
_NOW_US = """CREATE OR REPLACE FUNCTION now_us() RETURNS BIGINT LANGUAGE sql VOLATILE AS
$$ SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::BIGINT $$"""
_ADVISORY_LOCK = 7_234_519_022
#: Sessions have 39 bits: hundredths of a second, until the year 2100 or for a clock that is wrong; above that they are counted.
_SESSION_CLOCK = f"1 + now_us() / 10000 % {3 << 37}"
#: The columns that the table `store` had in every version. The first development versions had no `schema_hash`.
_STORE_COLUMNS = frozenset({"one", "id", "format", "created_at"})


@dataclass(frozen=True)
class Schema:
    """The tables of one format, as a folder: `schema.sql` makes a new store, `migrations/NNNN.sql` turns format NNNN - 1 into NNNN."""

    folder: Traversable
    #: The hashes of the schemas of all earlier formats, format 1 first: the tables that the migrations were written for.
    earlier_hashes: tuple[str, ...] = ()

    @property
    def format(self) -> int:
        return len(self.earlier_hashes) + 1

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the statements of `schema.sql`, the same for every dialect; comments and white space don't count."""
        return hashlib.sha256(re.sub(r"\s", "", self._read("schema.sql")).encode()).hexdigest()

    def hash_of(self, format: int) -> str | None:
        """The hash of this format's schema, None for a format that is not known."""
        return dict(enumerate((*self.earlier_hashes, self.hash), start=1)).get(format)

    def statements(self, name: str, dialect: str) -> list[str]:
        """The statements of one of the SQL files, in the words of a dialect."""
        text = self._read(name)
        for word, meaning in _WORDS[dialect].items():
            text = re.sub(rf"\b{word}\b", meaning, text)
        return [statement.strip() for statement in text.split(";") if statement.strip()]

    def _read(self, name: str) -> str:
        """The text of a file without its comments."""
        return re.sub(r"--[^\n]*", "", self.folder.joinpath(name).read_text(encoding="utf-8"))


SCHEMA = Schema(resources.files("headwater.catalog"))


class _StoreRow(NamedTuple):
    id: str
    format: int
    #: None in a store of the first development versions, which kept no hash.
    schema_hash: str | None


def open_catalog(database: Database, dialect: str, *, create: bool, schema: Schema = SCHEMA) -> str:
    """The store's id, once its tables are there and up to date. Of several processes that make or migrate a store at once, one does.

    InvalidRequestError, and nothing changes, if the store is of a newer format or has tables of another schema.
    """
    store = _find_store(database.query, dialect, database.url)
    if store is not None:
        _check(store, schema, database.url)
        if store.format == schema.format:
            return store.id
    elif not create:
        raise NotFoundError(f"there is no headwater store at {database.url}")

    def make_or_migrate(tx: Tx) -> str:
        if dialect == "postgresql":
            tx.run("SELECT pg_advisory_xact_lock(?)", (_ADVISORY_LOCK,))
            tx.run(_NOW_US)
        # Look again: another process may have made or migrated the store before this one got the lock.
        store = _find_store(tx.run, dialect, database.url)
        if store is None:
            return _make(tx, schema, dialect)
        _check(store, schema, database.url)
        if store.format < schema.format:
            _migrate(tx, store.format, schema, dialect)
        return store.id

    return database.write(make_or_migrate, repeatable=True)


def _make(tx: Tx, schema: Schema, dialect: str) -> str:
    for statement in schema.statements("schema.sql", dialect):
        tx.run(statement)
    id = uuid.uuid4().hex
    sql = "INSERT INTO store (one, id, format, schema_hash, created_at) VALUES (1, ?, ?, ?, now_us())"
    tx.run(sql, (id, schema.format, schema.hash))
    return id


def _migrate(tx: Tx, format: int, schema: Schema, dialect: str) -> None:
    for next_format in range(format + 1, schema.format + 1):
        for statement in schema.statements(f"migrations/{next_format:04d}.sql", dialect):
            tx.run(statement)
    tx.run("UPDATE store SET format = ?, schema_hash = ?", (schema.format, schema.hash))


def _find_store(run: Callable[[str, Sequence[object]], list[Row]], dialect: str, url: str) -> _StoreRow | None:
    looks = {
        "sqlite": "SELECT name FROM pragma_table_info('store')",
        "postgresql": "SELECT attname::text FROM pg_attribute WHERE attrelid = to_regclass(quote_ident(current_schema()) || '.store') "
        "AND attnum > 0 AND NOT attisdropped",
    }
    columns = {str(row[0]) for row in run(looks[dialect], ())}
    if not columns:
        return None
    if not columns >= _STORE_COLUMNS:
        raise InvalidRequestError(f"the database at {url} has a table named store that headwater did not make: make the store elsewhere")
    schema_hash = "schema_hash" if "schema_hash" in columns else "NULL"
    rows = run(f"SELECT id, format, {schema_hash} FROM store", ())
    if not rows:
        raise CorruptDataError(f"the catalog {url} is damaged: its table store is empty", object=url)
    return _StoreRow(*rows[0])


def _check(store: _StoreRow, schema: Schema, url: str) -> None:
    """Refuse a store that this schema neither fits nor migrates."""
    if store.schema_hash is not None and store.format > schema.format:
        raise InvalidRequestError(
            f"the store at {url} has format {store.format}, made by a newer headwater; "
            f"this one knows formats up to {schema.format}: upgrade headwater"
        )
    if store.schema_hash is None or store.schema_hash != schema.hash_of(store.format):
        raise InvalidRequestError(f"the store at {url} was made by a development version of headwater whose tables differ: make it anew")


def is_catalog_used(database: Database) -> bool:
    """Whether anything was ever begun in it, a session or a stream: ids are kept for good, so this never becomes False again."""
    return bool(database.query("SELECT 1 FROM sequence LIMIT 1"))


def next_id(tx: Tx, name: str) -> int:
    """A number that was never given before under this name, and never will be again.

    It follows the clock where that is ahead: a catalog that forgot its last commits, restored from a backup or after a fail-over to a
    standby that lagged, would give a number again that a living process, or a stored object, still goes by.
    """
    clock = _SESSION_CLOCK if name == "session" else "now_us()"
    sql = f"INSERT INTO sequence (name, last) VALUES (?, {clock}) ON CONFLICT (name) DO UPDATE SET last = {later('sequence', 'last')}"
    return int(tx.run(f"{sql} RETURNING last", (name,))[0][0])


def next_ids(tx: Tx, name: str, count: int) -> range:
    """Like `next_id`, as many numbers as are needed by one statement."""
    if not count:
        return range(0)
    above = "CASE WHEN excluded.last > sequence.last + ? THEN excluded.last ELSE sequence.last + ? END"
    sql = f"INSERT INTO sequence (name, last) VALUES (?, now_us() + ?) ON CONFLICT (name) DO UPDATE SET last = {above} RETURNING last"
    last = int(tx.run(sql, (name, count - 1, count, count))[0][0])
    return range(last - count + 1, last + 1)


def later(table: str, column: str) -> str:
    """For ON CONFLICT DO UPDATE: the given value, or, if the row's is not below it, the next one after that."""
    return f"CASE WHEN excluded.{column} > {table}.{column} THEN excluded.{column} ELSE {table}.{column} + 1 END"
