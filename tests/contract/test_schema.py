"""Which stores can be opened: new, up to date and migrated ones. Any other store is refused, and stays as it was."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest

import headwater as hw
from headwater.catalog.database import Database, Tx
from headwater.catalog.postgres import PostgresDatabase
from headwater.catalog.schema import SCHEMA, Schema, open_catalog
from headwater.catalog.sqlite import SqliteDatabase
from headwater.errors import CorruptDataError, HeadwaterError, InvalidRequestError, NotFoundError
from tests.tables import tables_of

DIFFERENT_TABLES = r"was made by a development version of headwater whose tables differ: make it anew"
TABLES = """
    CREATE TABLE planted (name TEXT BYTEWISE NOT NULL, data BLOB, PRIMARY KEY (name)) CLUSTERED;
    CREATE INDEX planted_by_data ON planted (data);
"""
COPY_SCOPES = "INSERT INTO planted (name) SELECT name FROM scope;"


class Catalogs:
    """Catalogs of one kind, by name. Each can be opened several times, as by several processes; one in memory is always the same."""

    def __init__(self, kind: str, folder: Path, postgres_url: str | None) -> None:
        self.kind, self._folder, self._postgres_url = kind, folder, postgres_url
        self._opened: list[Database] = []
        self._in_memory: dict[str, Database] = {}

    def connect(self, name: str = "public") -> Database:
        database: Database
        if self._postgres_url is not None:
            with psycopg.connect(self._postgres_url, autocommit=True) as connection:
                connection.execute(f"CREATE SCHEMA IF NOT EXISTS {name}".encode())
            database = PostgresDatabase(f"{self._postgres_url}&options=-csearch_path%3D{name}")
        elif self.kind == "sqlite":
            database = SqliteDatabase(str(self._folder / f"{name}.sqlite"))
        else:
            database = self._in_memory.setdefault(name, SqliteDatabase(":memory:"))
        self._opened.append(database)
        return database

    def open(self, database: Database, schema: Schema = SCHEMA, *, create: bool = False) -> str:
        return open_catalog(database, "postgresql" if self.kind == "postgresql" else "sqlite", create=create, schema=schema)

    def close(self) -> None:
        for database in self._opened:
            database.close()


@pytest.fixture(params=["memory", "sqlite", "postgresql"])
def catalogs(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Catalogs]:
    url = request.getfixturevalue("postgres_url") if request.param == "postgresql" else None
    found = Catalogs(request.param, tmp_path, url)
    yield found
    found.close()


@pytest.fixture
def database(catalogs: Catalogs) -> Database:
    """A new store with one row in the table `scope`."""
    database = catalogs.connect()
    catalogs.open(database, create=True)
    run(database, "INSERT INTO scope (name, created_at) VALUES ('kept', 0)")
    return database


def run(database: Database, *statements: str) -> None:
    def work(tx: Tx) -> None:
        for statement in statements:
            tx.run(statement)

    database.write(work)


def plant(folder: Path, before: Schema, tables: str, migration: str) -> Schema:
    """The schema of the next format, in a folder of its own: `tables` are new, and one more file migrates to it."""
    (folder / "migrations").mkdir(parents=True)
    (folder / "schema.sql").write_text(before.folder.joinpath("schema.sql").read_text() + tables)
    if before.folder.joinpath("migrations").is_dir():
        for file in before.folder.joinpath("migrations").iterdir():
            (folder / "migrations" / file.name).write_text(file.read_text())
    (folder / "migrations" / f"{before.format + 1:04d}.sql").write_text(migration)
    return Schema(folder, (*before.earlier_hashes, before.hash))


@pytest.fixture
def planted(tmp_path: Path) -> Schema:
    """The schema of the format after this one."""
    return plant(tmp_path / "planted", SCHEMA, TABLES, TABLES + COPY_SCOPES)


# New stores.


def test_a_new_store_keeps_its_format_and_the_hash_of_its_schema(database: Database) -> None:
    assert database.query("SELECT format, schema_hash FROM store") == [(SCHEMA.format, SCHEMA.hash)]


def test_a_store_that_is_not_there_is_made_only_if_asked_for(catalogs: Catalogs) -> None:
    database = catalogs.connect()
    with pytest.raises(NotFoundError, match="no headwater store"):
        catalogs.open(database)
    made = catalogs.open(database, create=True)
    assert catalogs.open(catalogs.connect()) == made


# The hash.


def test_comments_and_white_space_do_not_change_the_hash(tmp_path: Path) -> None:
    text = SCHEMA.folder.joinpath("schema.sql").read_text()
    (tmp_path / "schema.sql").write_text("-- A comment; with more of it.\n" + text.replace("    ", "\t").replace(",\n", " ,  -- why\n\n"))
    assert Schema(tmp_path).hash == SCHEMA.hash


@pytest.mark.parametrize(("old", "new"), [("format BIGINT", "format INTEGER"), ("CREATE INDEX pin_by", "CREATE UNIQUE INDEX pin_by")])
def test_any_other_change_changes_the_hash(tmp_path: Path, old: str, new: str) -> None:
    text = SCHEMA.folder.joinpath("schema.sql").read_text()
    assert old in text
    (tmp_path / "schema.sql").write_text(text.replace(old, new))
    assert Schema(tmp_path).hash != SCHEMA.hash


# Migrations.


def test_a_store_of_an_earlier_format_is_migrated_when_it_is_opened(catalogs: Catalogs, database: Database, planted: Schema) -> None:
    id = catalogs.open(database)
    assert catalogs.open(catalogs.connect(), planted) == id
    assert database.query("SELECT name FROM planted") == [("kept",)]
    assert database.query("SELECT format, schema_hash FROM store") == [(planted.format, planted.hash)]
    assert catalogs.open(catalogs.connect(), planted) == id


def test_two_migrations_make_the_tables_that_a_new_store_has(
    catalogs: Catalogs, database: Database, planted: Schema, tmp_path: Path
) -> None:
    column = "ALTER TABLE planted ADD COLUMN more BIGINT NOT NULL DEFAULT 7;"
    last = plant(tmp_path / "last", planted, column, column)
    new = catalogs.connect("new")
    catalogs.open(database, last)
    catalogs.open(new, last, create=True)
    assert database.query("SELECT name, more FROM planted") == [("kept", 7)]
    assert database.query("SELECT format, schema_hash FROM store") == new.query("SELECT format, schema_hash FROM store")
    assert tables_of(database) == tables_of(new)


def test_of_several_processes_that_open_at_once_one_migrates(
    tmp_path: Path, catalog_url: str | None, planted: Schema, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalogs = Catalogs("sqlite" if catalog_url is None else "postgresql", tmp_path, catalog_url)
    first = catalogs.connect()
    made = catalogs.open(first, create=True)
    databases = [catalogs.connect() for _ in range(3)]
    all_saw_the_old_format = threading.Barrier(len(databases))

    def open_at_once(database: Database) -> str:
        write = database.write

        def wait_and_write(*args: object, **options: object) -> object:
            all_saw_the_old_format.wait(30)
            return write(*args, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(database, "write", wait_and_write)
        return catalogs.open(database, planted)

    with ThreadPoolExecutor(len(databases)) as pool:
        # A second migration would fail: the planted table is there.
        assert list(pool.map(open_at_once, databases)) == [made] * len(databases)
    assert first.query("SELECT format, schema_hash FROM store") == [(planted.format, planted.hash)]
    catalogs.close()


def test_a_migration_that_fails_leaves_the_store_as_it_was(catalogs: Catalogs, database: Database, planted: Schema, tmp_path: Path) -> None:
    failing = plant(tmp_path / "failing", SCHEMA, TABLES, TABLES + COPY_SCOPES + "DELETE FROM scope; DELETE FROM missing;")
    before = tables_of(database)
    with pytest.raises(HeadwaterError, match="missing"):
        catalogs.open(catalogs.connect(), failing)
    assert tables_of(database) == before
    assert database.query("SELECT name FROM scope") == [("kept",)]
    catalogs.open(catalogs.connect())
    catalogs.open(catalogs.connect(), planted)
    assert database.query("SELECT name FROM planted") == [("kept",)]


# Stores that are refused.


def check_refused(catalogs: Catalogs, database: Database, schema: Schema, match: str) -> None:
    tables, rows = tables_of(database), database.query("SELECT * FROM store")
    for create in (False, True):
        with pytest.raises(InvalidRequestError, match=match):
            catalogs.open(catalogs.connect(), schema, create=create)
    assert (tables_of(database), database.query("SELECT * FROM store")) == (tables, rows)


def test_a_store_of_a_newer_format_is_refused(catalogs: Catalogs, database: Database, planted: Schema) -> None:
    catalogs.open(database, planted)
    check_refused(
        catalogs, database, SCHEMA, rf"has format {planted.format}, made by a newer headwater.*{SCHEMA.format}: upgrade headwater"
    )


def test_a_store_of_this_format_with_other_tables_is_refused(catalogs: Catalogs, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "schema.sql").write_text(SCHEMA.folder.joinpath("schema.sql").read_text() + TABLES)
    database = catalogs.connect()
    catalogs.open(database, Schema(other, SCHEMA.earlier_hashes), create=True)
    check_refused(catalogs, database, SCHEMA, DIFFERENT_TABLES)


def test_a_store_of_an_earlier_format_with_other_tables_is_not_migrated(catalogs: Catalogs, database: Database, planted: Schema) -> None:
    run(database, "UPDATE store SET schema_hash = 'that of a development version'")
    check_refused(catalogs, database, planted, DIFFERENT_TABLES)


@pytest.mark.parametrize("format", [1, 4])
def test_a_store_from_before_there_were_hashes_is_refused(catalogs: Catalogs, database: Database, format: int) -> None:
    run(database, "ALTER TABLE store DROP COLUMN schema_hash", f"UPDATE store SET format = {format}")
    check_refused(catalogs, database, SCHEMA, DIFFERENT_TABLES)


def test_the_table_named_store_of_another_program_is_left_alone(catalogs: Catalogs) -> None:
    database = catalogs.connect()
    run(database, "CREATE TABLE store (id BIGINT, city TEXT)")
    check_refused(catalogs, database, SCHEMA, "has a table named store that headwater did not make: make the store elsewhere")


def test_an_empty_table_named_store_is_damage(catalogs: Catalogs, database: Database) -> None:
    run(database, "DELETE FROM store")
    with pytest.raises(CorruptDataError, match="its table store is empty"):
        catalogs.open(database)


def test_a_refused_store_is_named_and_keeps_its_files(tmp_path: Path) -> None:
    with hw.open(tmp_path / "store", upkeep=False) as store, store.create_stream("a/x").writer() as writer:
        writer.write("x")
    database = SqliteDatabase(str(tmp_path / "store" / "catalog.sqlite"))
    run(database, "UPDATE store SET schema_hash = 'that of a development version'")
    database.close()
    with pytest.raises(hw.InvalidRequestError, match=f"the store at {tmp_path}/store/catalog.sqlite {DIFFERENT_TABLES}"):
        hw.open(tmp_path / "store")
    database = SqliteDatabase(str(tmp_path / "store" / "catalog.sqlite"))
    run(database, f"UPDATE store SET schema_hash = '{SCHEMA.hash}'")
    database.close()
    with hw.open(tmp_path / "store", create=False, upkeep=False) as store:
        assert [event.value for event in store.stream("a/x").read()] == [b"x"]
