"""What a call costs in the catalog: its statements and rows do not grow with what else the store holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import pytest

import headwater as hw
from headwater.catalog import sessions, transactions
from headwater.catalog.database import Row, Statement, Tx
from headwater.storage import layout
from headwater.streams import cuts, garbage
from tests.crash.processes import Place

T = TypeVar("T")
on_sqlite = pytest.mark.parametrize("catalog_url", ["sqlite"], indirect=True)


class Cost(NamedTuple):
    statements: int
    rows: int


class CountingTx:
    """A catalog transaction that counts what is read through it."""

    def __init__(self, tx: Tx) -> None:
        self._tx = tx
        self.statements: list[Statement] = []
        self.rows = 0

    def run(self, sql: str, values: Sequence[Any] = ()) -> list[Row]:
        return self.run_all([(sql, values)])[0]

    def run_all(self, statements: Sequence[Statement]) -> list[list[Row]]:
        found = self._tx.run_all(statements)
        self.statements += statements
        self.rows += sum(map(len, found))
        return found

    def defer(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        raise AssertionError("these calls only read")


def measure(store: hw.Store, look: Callable[..., T], *values: Any) -> tuple[T, Cost]:
    """What a function over a catalog transaction returns, and what it read."""
    tx, found = run(store, look, *values)
    return found, Cost(len(tx.statements), tx.rows)


def run(store: hw.Store, look: Callable[..., T], *values: Any) -> tuple[CountingTx, T]:
    def work(tx: Tx) -> tuple[CountingTx, T]:
        counting = CountingTx(tx)
        return counting, look(counting, *values)

    return store._engine.database.read(work)


def scans(store: hw.Store, statements: Sequence[Statement], *tables: str) -> list[str]:
    """The steps of SQLite's plans that go through all rows of one of these tables."""
    steps = [row[3] for sql, values in statements for row in store._engine.database.query(f"EXPLAIN QUERY PLAN {sql}", values)]
    return [step for step in steps if step.split()[0] == "SCAN" and step.split()[1] in tables]


# Stored objects.


def end_session(store: hw.Store) -> int:
    session = store._engine.database.write(lambda tx: sessions.begin_session(tx, "a process that ended"))
    store._engine.database.write(lambda tx: sessions.end_session(tx, session))
    return session


def name_objects(session: int, first: int, count: int) -> list[tuple[int, str]]:
    """(id, key) of objects of each kind, as their makers would name them."""
    numbers = range(first, first + count)
    journals = [(layout.object_id(session, number), layout.journal_key(session, number)) for number in numbers]
    flushes = [(layout.object_id(session, 10_000 + number), layout.object_key(session, 10_000 + number)) for number in numbers]
    chunks = [(layout.object_id(session, 20_000 + n), layout.chunk_key("a/x", 5, 0, n, session, 20_000 + n, ".parquet")) for n in numbers]
    staged = [(-1 - number, layout.transaction_key(f"ended{number}", "staged")) for number in numbers]
    return journals + flushes + chunks + staged


def insert_objects(store: hw.Store, objects: Sequence[tuple[int, str]]) -> None:
    sql = "INSERT INTO object (id, key, session) VALUES (?, ?, 0)"
    store._engine.database.write(lambda tx: tx.defer(sql, objects))


def abort_transactions(store: hw.Store, objects: Sequence[tuple[int, str]]) -> None:
    """Let the catalog know of the transactions that staged these objects."""
    ids = sorted({id for _, key in objects if (id := layout.parse_transaction_key(key)) is not None})

    def work(tx: Tx) -> None:
        for id in ids:
            transactions.abort(tx, id, 0)

    store._engine.database.write(work)


def test_a_page_of_stored_objects_is_looked_up_without_the_rows_of_other_objects(place: Place) -> None:
    with place.open(create=True) as store:
        session = end_session(store)
        named, orphans = name_objects(session, 0, 5), name_objects(session, 5, 5)
        insert_objects(store, named)
        abort_transactions(store, named + orphans)
        page = [key for _, key in named + orphans]
        found, few = measure(store, garbage.find_orphans, page)
        assert found == [key for _, key in orphans]
        others = name_objects(session, 100, 300)
        insert_objects(store, others)
        abort_transactions(store, others)
        found, many = measure(store, garbage.find_orphans, page)
        assert found == [key for _, key in orphans]
        assert many == few
        assert many.statements <= 5, "it does not grow with the page either"


@on_sqlite
def test_a_page_of_stored_objects_is_looked_up_by_indexes(place: Place) -> None:
    with place.open(create=True) as store:
        page = [key for _, key in name_objects(end_session(store), 0, 250)]
        tx, _ = run(store, garbage.find_orphans, page)
        assert any("FROM object" in sql for sql, _ in tx.statements) and scans(store, tx.statements, "object", "txn") == []


def test_an_object_under_the_id_of_another_key_is_an_orphan(place: Place) -> None:
    with place.open(create=True) as store:
        session = end_session(store)
        insert_objects(store, [(layout.object_id(session, 3), layout.object_key(session, 3))])
        page = [layout.object_key(session, 3), layout.journal_key(session, 3), "l0/ffffffffffff/000003.hwb"]
        found, _ = measure(store, garbage.find_orphans, page)
        assert found == [layout.journal_key(session, 3)], "a session of that number can't be: its object is not ours"


# Transactions.


def test_many_transactions_are_listed_with_three_statements(store: hw.Store) -> None:
    names = [store.create_stream(f"t/{number}").name for number in range(8)]
    expected = {}
    for number in range(24):
        tx = store.transaction(lease=600)
        written = {names[number % 8], names[number % 3]}
        for name in written:
            tx.write(name, b"x")
        tx.flush()
        if number % 3 == 0:
            tx.commit()
        elif number % 3 == 1:
            tx.abort()
        expected[tx.id] = written if number % 3 != 1 else set()
    newest_first = [*reversed(expected)]
    all_of_them, cost = measure(store, transactions.list_transactions, 100, False)
    assert cost.statements <= 3
    assert [row.id for row in all_of_them] == newest_first
    assert {row.id: set(row.streams) for row in all_of_them} == expected
    open_ones, cost = measure(store, transactions.list_transactions, 100, True)
    assert cost.statements <= 3
    assert open_ones == [row for row in all_of_them if row.state == transactions.OPEN] and len(open_ones) == 8
    for limit in (1, 2, 5):
        assert measure(store, transactions.list_transactions, limit, False)[0] == all_of_them[:limit]
        assert measure(store, transactions.list_transactions, limit, True)[0] == open_ones[:limit]
    for row in open_ones:
        store.resume_transaction(row.id).abort()


def test_a_transaction_is_listed_without_its_deleted_streams(store: hw.Store) -> None:
    gone, kept = store.create_stream("t/gone"), store.create_stream("t/kept")
    with store.transaction() as tx:
        tx.write(gone.name, b"x")
        tx.write(kept.name, b"x")
    gone.seal()
    store.delete_stream(gone.name)
    assert [info.streams for info in store.transactions()] == [("t/kept",)]


# Tags.


def test_a_read_up_to_a_tagged_cut_reads_no_other_tag(store: hw.Store) -> None:
    stream = store.create_stream("a/x", scaling=hw.Scaling.fixed(2))

    def tag(name: str) -> hw.Cut:
        with stream.writer() as writer:
            writer.write(name, key="always the same segment").result()
        cut = stream.tail()
        store.tag(name, cut)
        return cut

    tagged = tag("first")
    with stream.writer() as writer:
        writer.write(b"x", key="always the same segment").result()
    untagged = stream.tail()

    def cost(cut: hw.Cut) -> Cost:
        return measure(store, cuts.kept_between, store.id, stream._ref, None, cut)[1]

    few = [cost(tagged), cost(untagged)]
    for number in range(20):
        tag(f"later{number}")
    assert [cost(tagged), cost(untagged)] == few


@on_sqlite
def test_the_tag_of_a_cut_is_found_by_indexes(store: hw.Store) -> None:
    stream = store.create_stream("a/x")
    store.tag("one", stream.tail())
    tx, _ = run(store, cuts.kept_between, store.id, stream._ref, None, stream.tail())
    assert any("FROM pin" in sql for sql, _ in tx.statements) and scans(store, tx.statements, "p", "t") == []


def test_of_many_tags_each_is_read_from_the_head_at_its_time(store: hw.Store) -> None:
    """Streams whose cuts look much alike: tags of two streams, names that begin alike, segments that nobody writes to."""
    streams = [store.create_stream(name, scaling=hw.Scaling.fixed(2)) for name in ("a/x", "a/x1", "aa/x")]
    expected: dict[str, list[list[bytes]]] = {}
    for number in range(9):
        for stream in streams[number % 3 :]:
            with stream.writer() as writer:
                writer.write(b"%d" % number, key=number % 2).result()
        if number == 4:
            streams[0].split(0)
        store.tag(f"tag{number}", store.cut(*streams))
        expected[f"tag{number}"] = [[event.value for event in stream.read(end=stream.tail())] for stream in streams]
        if number % 2:
            streams[number % 3].truncate(streams[number % 3].tail())
    found = {name: [[event.value for event in stream.read(end=cut)] for stream in streams] for name, cut in store.tags().items()}
    # Of several tags of one place the first counts.
    for position, stream in enumerate(streams):
        first: dict[str, list[bytes]] = {}
        for name, cut in store.tags().items():
            values = first.setdefault(str(hw.Cut(store.id, {stream.name: cut.streams[stream.name]})), expected[name][position])
            assert found[name][position] == values
