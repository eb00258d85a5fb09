"""A catalog that forgot its last commits, as after a fail-over to a standby that lagged, while processes begun by them live on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import headwater as hw
from headwater.catalog import sessions
from headwater.catalog.database import Tx
from headwater.catalog.schema import next_id, statements
from headwater.errors import FencedError, NotFoundError
from headwater.model.limits import INLINE_BYTES
from tests.crash.processes import Place, wait_until

TABLES = [words[2] for words in map(str.split, statements("schema.sql", "sqlite")) if words[:2] == ["CREATE", "TABLE"]]


@pytest.fixture
def remember(store: hw.Store) -> Callable[[], Callable[[], None]]:
    """Keep the catalog as it is now; what it returns makes the catalog forget all that was committed since."""
    store.create_stream("a/x")
    database = store._engine.database
    on_postgres = hasattr(database, "connect")

    def remember() -> Callable[[], None]:
        kept: dict[str, list[Any]] = {table: database.query(f"SELECT * FROM {table}") for table in TABLES}

        def work(tx: Tx) -> None:
            tx.run("SET LOCAL session_replication_role = replica" if on_postgres else "PRAGMA defer_foreign_keys = on")
            for table, rows in kept.items():
                tx.run(f"DELETE FROM {table}")
                for row in rows:
                    tx.run(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)

        def forget() -> None:
            database.write(work)
            # A fail-over takes longer than this.
            then = database.query("SELECT now_us()")[0][0]
            wait_until(lambda: database.query("SELECT now_us()")[0][0] > then + 20_000)

        return forget

    return remember


@pytest.mark.parametrize("size", [10, 2 * INLINE_BYTES], ids=["inline", "stored"])
@pytest.mark.parametrize("is_clock_wrong", [False, True], ids=["", "same id"])
def test_of_a_forgotten_session_and_the_next_one_all_acked_events_are_stored(
    place: Place,
    store: hw.Store,
    remember: Callable[[], Callable[[], None]],
    monkeypatch: pytest.MonkeyPatch,
    is_clock_wrong: bool,
    size: int,
) -> None:
    """Both have made as many flushes by then: with one number for both, one would get the other's answers."""
    expected = []

    def write(writer: hw.Writer, name: str) -> None:
        value = name.encode().ljust(size, b".")
        writer.write(value).result()
        expected.append(value)

    forget = remember()
    old = store.stream("a/x").writer()
    for _ in range(3):
        old.write(b"forgotten".ljust(size, b".")).result()
    ((id,),) = store._engine.database.query("SELECT id FROM session")
    forget()
    if is_clock_wrong:
        ids = iter([id])
        monkeypatch.setattr(sessions, "next_id", lambda tx, name: next(ids, None) or next_id(tx, name))
    with old, place.open() as other, other.stream("a/x").writer() as new:
        for number in range(3):
            write(new, f"new {number}")
        for number in range(3):
            write(old, f"old {number}")
            write(new, f"newer {number}")
    assert [event.value for event in store.stream("a/x").read()] == expected


def test_of_forgotten_upkeep_nothing_is_missed(place: Place, store: hw.Store, remember: Callable[[], Callable[[], None]]) -> None:
    """The blocks of which it made chunks are still there, and named again."""
    expected = [b"%d" % number * INLINE_BYTES for number in range(4)]
    with place.open() as other, other.stream("a/x").writer() as writer:
        for value in expected:
            writer.write(value)
    store._engine.database.garbage_seconds = 600.0
    forget = remember()
    assert store.run_upkeep().events_tiered == len(expected)
    assert store.run_upkeep().objects_deleted == 0
    forget()
    assert [event.value for event in store.stream("a/x").read()] == expected
    assert store.run_upkeep().events_tiered == len(expected)
    assert [event.value for event in store.stream("a/x").read()] == expected


def test_a_named_writer_that_was_forgotten_is_fenced(place: Place, store: hw.Store, remember: Callable[[], Callable[[], None]]) -> None:
    with store.stream("a/x").writer() as writer:
        writer.write(b"kept")
    forget = remember()
    old = store.stream("a/x").writer("me")
    old.write(b"forgotten").result()
    forget()
    with place.open() as other, other.stream("a/x").writer("me") as new:
        new.write(b"new").result()
        with pytest.raises(FencedError):
            old.write(b"old")
            old.flush()
        new.write(b"newer").result()
    assert [event.value for event in store.stream("a/x").read()] == [b"kept", b"new", b"newer"]


def test_a_reader_that_was_forgotten_is_fenced(place: Place, store: hw.Store, remember: Callable[[], Callable[[], None]]) -> None:
    with store.stream("a/x").writer() as writer:
        writer.write(b"one")
    group = store.reader_group("group", ["a/x"])
    forget = remember()
    old = group.reader("me")
    assert next(iter(old)).value == b"one"
    forget()
    with place.open() as other, other.reader_group("group").reader("me") as new:
        assert next(iter(new)).value == b"one"
        with pytest.raises(FencedError):
            old.commit()


def test_a_stream_that_was_forgotten_is_not_found_though_another_was_made_since(
    place: Place, store: hw.Store, remember: Callable[[], Callable[[], None]]
) -> None:
    forget = remember()
    old = store.create_stream("a/forgotten").writer()
    forget()
    with place.open() as other:
        other.create_stream("a/new")
        with pytest.raises(NotFoundError):
            old.write(b"lost")
            old.flush()
        assert list(other.stream("a/new").read()) == []


def test_a_group_that_was_forgotten_is_not_found_though_another_was_made_since(
    place: Place, store: hw.Store, remember: Callable[[], Callable[[], None]]
) -> None:
    with store.stream("a/x").writer() as writer:
        writer.write(b"one")
    forget = remember()
    old = store.reader_group("old", ["a/x"]).reader("me")
    assert next(iter(old)).value == b"one"
    forget()
    with place.open() as other:
        new = other.reader_group("new", ["a/x"])
        with new.reader("me"), pytest.raises(NotFoundError):
            old.commit()
        assert new.lag().events == 1
