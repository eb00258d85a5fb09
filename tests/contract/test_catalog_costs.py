"""What a call costs in the catalog: its statements and rows do not grow with what else the store holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import pytest

import headwater as hw
from headwater.catalog import transactions
from headwater.catalog.database import Row, Statement, Tx

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
