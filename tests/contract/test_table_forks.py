"""Forking a table: a table of its own with the entries as of a version, whatever happens to its parent meanwhile."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

import headwater as hw
from headwater.catalog import fills
from headwater.check import check_store
from headwater.model.names import parse_stream_name
from headwater.runtime import failpoints

NAME = "a/t"
States = dict[int, dict[str, bytes]]


def entries(table: hw.Table) -> dict[str, bytes]:
    return {key: entry.value for key, entry in table.items()}


def _work(store: hw.Store, table: hw.Table, seed: int, turns: int = 60) -> States:
    """Changes at random, and the entries after each of them."""
    chance = random.Random(seed)
    states = {0: entries(table)}
    for turn in range(turns):
        key = f"k{chance.randrange(8)}"
        version = table.put(key, b"%d" % turn) if chance.random() < 0.7 else table.remove(key)
        states[version] = entries(table)
        if turn == turns // 2:
            store.run_upkeep()
    return states


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of two entries."""
    monkeypatch.setattr(fills, "FILL_ROWS", 2)
    monkeypatch.setattr("headwater.streams.tableforks.FILL_ROWS", 2)


@contextmanager
def _before(store: hw.Store, name: str, act: Callable[[], None], passes: int = 1) -> Iterator[None]:
    """Do something before one of the passes of an operation."""
    engine, left = store._engine, [passes]
    run = engine.run

    def acting(operation: Any, *args: Any, **kwargs: Any) -> Any:
        if operation.name == name:
            left[0] -= 1
            if not left[0]:
                act()
        return run(operation, *args, **kwargs)

    engine.run = acting  # type: ignore[method-assign]
    try:
        yield
    finally:
        del engine.run
    assert left[0] <= 0, "the operation never ran"


def _fills(store: hw.Store) -> int:
    return int(store._engine.database.query("SELECT count(*) FROM filling")[0][0])


@pytest.mark.usefixtures("small")
def test_the_entries_and_changes_are_as_of_the_version(store: hw.Store, seed: int) -> None:
    table = store.table(NAME)
    states = _work(store, table, seed)
    changes = list(table.changes())
    for place, version in enumerate([0, *random.Random(seed).sample(sorted(states), 6), len(changes)]):
        fork = table.fork(f"b/t{place}", version)
        assert entries(fork) == states[version] and list(fork.changes()) == changes[:version] and len(fork) == len(states[version])
        assert all(entry.version <= version for _, entry in fork.items())
        assert fork.put("new", b"x") == version + 1 and fork.put("k1", b"y") == version + 2
        assert entries(fork) == {**states[version], "new": b"x", "k1": b"y"}
    fork = table.fork("b/now")
    assert list(fork.items()) == list(table.items()) and fork.name == "b/now"
    # Each is independent of the other, and of what becomes of it.
    table.put("k0", b"parent")
    again = fork.fork("b/again", 7)
    assert entries(again) == states[7]
    last = states[len(changes)]
    assert entries(fork) == last and entries(table) == {**last, "k0": b"parent"}
    store.delete_stream(NAME, seal=True)
    store.run_upkeep()
    assert entries(fork) == last and list(fork.changes()) == changes
    fork.roll_back(10)
    assert entries(fork) == states[10] and set(store.tables()) >= {"b/now", "b/again"} and not _fills(store)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("version", [None, 40])
@pytest.mark.parametrize("turn", [1, 2, 3])
def test_the_parent_changes_during_the_copy(store: hw.Store, seed: int, version: int | None, turn: int) -> None:
    table = store.table(NAME)
    for key in range(8):
        table.put(f"k{key}", b"first")
    for key in range(32):
        table.put(f"k{key % 8}", b"%d" % key)
    expected, changes = list(table.items()), list(table.changes())
    if version is not None:
        table.put("later", b"")

    def disturb() -> None:
        for key in range(8):
            table.put(f"k{key}", b"meanwhile")
        table.remove("k0")
        table.remove("k7")
        table.put("k00", b"")
        assert store.tables() == [NAME] and store.stream(NAME).forks() == []

    with _before(store, "fills.copy_entries", disturb, turn):
        fork = table.fork("b/t", version)
    assert list(fork.items()) == expected and list(fork.changes()) == changes
    assert store.tables() == [NAME, "b/t"] and store.stream(NAME).forks() == ["b/t"]


@pytest.mark.usefixtures("small")
def test_it_is_not_seen_until_it_is_whole_and_a_failure_leaves_nothing(store: hw.Store) -> None:
    table = store.table(NAME)
    for key in range(9):
        table.put(f"k{key}", b"x")
    streams = store._engine.database.query("SELECT count(*) FROM stream")[0][0]
    for name, passes in (("fill.applied", 3), ("fill.named", 1)):
        failpoints.arm(f"{name}=error@{passes}")
        try:
            with pytest.raises((OSError, hw.UnavailableError), match=name):
                table.fork("b/t")
        finally:
            failpoints.arm("")
        assert store.tables() == [NAME] and _fills(store) == 0
        assert store._engine.database.query("SELECT count(*) FROM stream")[0][0] == streams
    assert entries(table.fork("b/t")) == entries(table)


@pytest.mark.usefixtures("small")
def test_upkeep_drops_what_nobody_renews_and_its_process_is_refused(store: hw.Store) -> None:
    table = store.table(NAME)
    for key in range(9):
        table.put(f"k{key}", b"x")
    database: Any = store._engine.database

    def expire() -> None:
        # Upkeep leaves alone what is renewed, and drops what is not.
        store.run_upkeep()
        assert _fills(store) == 1
        report = check_store(store)
        assert report.ok, report.problems
        database.write(lambda tx: tx.run("UPDATE filling SET renewed_at = 1"))
        store.run_upkeep()
        assert _fills(store) == 0

    for name in ("fills.copy_entries", "fills.end_fill"):
        with _before(store, name, expire), pytest.raises(hw.ConflictError, match="fork the table again"):
            table.fork("b/t")
    assert store.tables() == [NAME]
    assert database.query("SELECT count(*) FROM entry")[0][0] == 9
    assert len(table.fork("b/t")) == 9


def test_a_parent_that_is_deleted_meanwhile(store: hw.Store, monkeypatch: pytest.MonkeyPatch, small: None) -> None:
    for name in ("fills.begin_fill", "fills.copy_entries", "fills.find_slice"):
        table = store.table(NAME)
        for key in range(5):
            table.put(f"k{key}", b"x")
        with _before(store, name, lambda: store.delete_stream(NAME, seal=True)), pytest.raises(hw.NotFoundError, match=NAME):
            table.fork("b/t")
        assert store.tables() == [] and _fills(store) == 0
    with pytest.raises(hw.NotFoundError, match=NAME):
        table.fork("b/t")


def test_a_lost_answer_is_asked_for_again(store: hw.Store) -> None:
    table = store.table(NAME)
    version = table.put("k", b"1")
    name = parse_stream_name("b/t")
    engine = store._engine
    fill = engine.run(fills.begin_fill, store.stream(NAME).id, name, None).id
    for _ in range(2):
        engine.run(fills.copy_entries, fill, store.stream(NAME).id, version, None, "k")
    first, second = (engine.run(fills.end_fill, fill, name) for _ in range(2))
    assert first == second and entries(store.table("b/t")) == {"k": b"1"}


def test_what_can_not_be_forked(store: hw.Store) -> None:
    table, other = store.table(NAME), store.create_stream("a/x")
    for number in range(4):
        table.put("k", b"%d" % number)
    table.put("once", b"")
    wrong: Any
    for wrong in (-1, 6, "1", 1.0, True):
        with pytest.raises(hw.InvalidRequestError):
            table.fork("b/t", wrong)
    for wrong in (None, "", "t", 7, "a/~t"):
        with pytest.raises(hw.InvalidRequestError):
            table.fork(wrong)
    for taken in (NAME, other.name):
        with pytest.raises(hw.AlreadyExistsError, match=taken):
            table.fork(taken)

    def take() -> None:
        store.table("b/t")

    with _before(store, "fills.end_fill", take), pytest.raises(hw.AlreadyExistsError, match="b/t"):
        table.fork("b/t")
    stream = store.stream(NAME)
    part = stream.tail().streams[NAME]
    stream.truncate(hw.Cut(store.id, {NAME: part._replace(segments={0: 3})}))
    for gone in (0, 1, 2):
        with pytest.raises(hw.TruncatedError) as caught:
            table.fork("b/u", gone)
        assert caught.value.head == stream.head()
    # What the value of a key was then, no change says any more.
    with pytest.raises(hw.TruncatedError, match="'k'"):
        table.fork("b/u", 3)
    with pytest.raises(hw.TruncatedError, match="'once'"):
        table.roll_back(4)
    stream.seal()
    assert store.tables() == [NAME, "b/t"] and not _fills(store)
    # A sealed table has entries, too.
    fork = table.fork("b/now")
    assert entries(fork) == {"k": b"3", "once": b""} and fork.put("k", b"4") == 6


def _run(sql: str, values: tuple[Any, ...], tx: Any) -> None:
    tx.run(sql, values)


def test_check_names_a_fill_that_nobody_would_drop(store: hw.Store) -> None:
    table = store.table(NAME)
    table.put("k", b"")
    fork = table.fork("b/t")
    database: Any = store._engine.database
    where = (store.stream("b/t").id,)
    for kind, fault in (("filling", True), ("table", False)):
        sql = f"UPDATE stream SET kind = '{kind}' WHERE id = ?"
        database.write(partial(_run, sql, where))
        assert any("are being filled" in problem.message for problem in check_store(store).problems) == fault
    assert entries(fork) == {"k": b""}


def test_a_store_in_memory() -> None:
    with hw.open("memory://table-forks", create=True) as store:
        table = store.table(NAME)
        version = table.put("k", b"1")
        table.put("k", b"2")
        fork = table.fork("b/t", version)
        assert entries(fork) == {"k": b"1"} and entries(table.fork("b/u")) == {"k": b"2"}
        assert check_store(store).ok


@contextmanager
def _timed(store: hw.Store) -> Iterator[list[float]]:
    """The seconds of each transaction that writes."""
    database: Any = store._engine.database
    write, found = database.write, []

    def timed(work: Any, **options: Any) -> Any:
        def measured(tx: Any) -> Any:
            began = time.perf_counter()
            try:
                return work(tx)
            finally:
                found.append(time.perf_counter() - began)

        return write(measured, **options)

    database.write = timed
    try:
        yield found
    finally:
        database.write = write


@pytest.mark.long
def test_a_fork_of_a_million_entries(tmp_path: Any) -> None:
    with hw.open(tmp_path / "store", upkeep=False) as store:
        table = store.table(NAME)
        table.put("last", b"")
        database: Any = store._engine.database
        rows = [(store.stream(NAME).id, f"key {number * 7919 % 1_000_000:07}", 1, b"x" * 100) for number in range(1_000_000)]
        database.write(lambda tx: tx.defer("INSERT INTO entry (stream, key, version, value) VALUES (?, ?, ?, ?)", rows))
        with _timed(store) as held:
            began = time.perf_counter()
            fork = table.fork("b/t")
            seconds = time.perf_counter() - began
        held.sort()
        print(f"fork: {seconds:.1f} s, the lock for {held[len(held) // 2]:.3f} s, at most {held[-1]:.3f} s, {len(held)} commits")
        # Loosely: a busy machine is not a bug.
        assert len(fork) == 1_000_001 and held[len(held) // 2] < 0.05 and held[-1] < 1


def test_the_way_out_of_a_roll_back_that_is_too_large(store: hw.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    table = store.table(NAME)
    for number in range(20):
        version = table.put(f"k{number}", b"before" * 10)
    expected = entries(table)
    group = store.reader_group("g", [NAME])
    for number in range(20):
        table.put(f"k{number}", b"after")
    table.remove("k3")
    monkeypatch.setattr("headwater.tables.ROLLED_BACK_BYTES", 100)
    with pytest.raises(hw.InvalidRequestError, match=r"table\.fork\(name, version\) and store\.replace_stream"):
        table.roll_back(version)
    past = store.stream(NAME).tail()
    table.fork("a/t.back", version)
    store.replace_stream(NAME, by="a/t.back", keep_as="a/t.old")
    back = store.table(NAME)
    assert entries(back) == expected and store.tables() == [NAME, "a/t.old"]
    assert back.put("k0", b"new") == version + 1
    assert len(list(store.table("a/t.old").changes())) == 41 and len(store.table("a/t.old")) == 19
    with pytest.raises(hw.SealedError):
        table.put("k", b"")
    with pytest.raises(hw.RolledBackError) as caught:
        store.stream(NAME).ranges(past)
    assert caught.value.cut is not None and caught.value.cut.streams[NAME].segments == {0: version}
    assert group.streams == [NAME]
