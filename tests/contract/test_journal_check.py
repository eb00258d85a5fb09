"""The check compares a journal's index with its events, and repairs it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

import headwater as hw
from headwater.check import CheckReport, check_store
from tests.crash.processes import Place

NAME = "shop/orders"


@pytest.fixture
def store(place: Place) -> Iterator[hw.Store]:
    with place.open(create=True) as store:
        yield store


@pytest.fixture
def j(store: hw.Store) -> hw.Journal:
    j = store.journal(NAME, scaling=hw.Scaling.fixed(1))
    for number in range(500):
        # Interleaved, so that their numbers take more than a page.
        for id in ("a", "b", "c"):
            j.persist_async(id, hw.Record("placed" if number % 3 else "paid", number, tags=("t",) if (number + ord(id)) % 2 else ()))
    j.persist("d", hw.Record("placed", 1))
    j.delete("d")
    j.delete_to("a", 7)
    return j


def change(store: hw.Store, sql: str, *values: Any) -> None:
    changed = store._engine.database.write(lambda tx: tx.run(f"{sql} RETURNING stream", values))
    assert changed, f"the fault changes nothing: {sql}"


def messages(report: CheckReport) -> str:
    assert {problem.kind for problem in report.problems} <= {"index"}, report.problems
    return "\n".join(problem.message for problem in report.problems)


def test_a_journal_is_as_it_should_be(store: hw.Store, j: hw.Journal) -> None:
    assert check_store(store).ok
    store.run_upkeep()
    j.persist("a", hw.Record("placed", 1))
    j.stream.split(0)
    j.persist("a", hw.Record("placed", 1))
    j.stream.fork("shop/fork")
    assert check_store(store).ok, "a fork's index is still to be built"
    store.run_upkeep()
    j.stream.truncate(j.stream.tail(), force=True)
    store.run_upkeep()
    report = check_store(store)
    assert report.ok, report.problems


FAULTS = [
    ("UPDATE entity SET recent = recent || ',0:0' WHERE id = 'b'", "has event 501 of 'b'"),
    ("UPDATE entity SET recent = '0:0', number = 0, segment = 0 WHERE id = 'd'", "lacks event 1 of 'd'"),
    ("DELETE FROM entity WHERE id = 'c'", "lacks event"),
    ("DELETE FROM entity_page WHERE id = 'b' AND first = 1", "lacks event 1 of 'b'"),
    ("UPDATE entity_page SET first = 2 WHERE id = 'b' AND first = 1", "has event 2 of 'b'"),
    ("UPDATE entity SET sequence = 600 WHERE id = 'b'", "'b' is at sequence 600"),
    ("UPDATE entity SET low = 600 WHERE id = 'b'", "its first event is 600"),
    (
        "UPDATE word SET recent = recent || ',0:1' WHERE kind = 0 AND segment = (SELECT min(segment) FROM word)",
        "has an event with the tag 't'",
    ),
    ("DELETE FROM word_page WHERE first = (SELECT min(first) FROM word_page)", "lacks an event with the tag 't'"),
    ("UPDATE word SET count = count + 1 WHERE kind = 0", "the tag 't' has"),
    ("UPDATE word SET count = count - 1 WHERE kind = 1 AND word = 'paid'", "events of the type 'paid'"),
    ("UPDATE word SET number = number - 1 WHERE kind = 1 AND word = 'paid'", "events of the type 'paid'"),
    ("DELETE FROM word WHERE kind = 1 AND word = 'placed'", "events of the type 'placed'"),
]


@pytest.mark.parametrize("tiered", [False, True])
def test_each_fault_of_an_index_is_found_and_repaired(store: hw.Store, j: hw.Journal, tiered: bool) -> None:
    if tiered:
        store.run_upkeep()
    wanted = {id: [event.data for event in j.replay(id)] for id in "abcd"}
    tagged = sorted(event.position for event in j.events(tag="t"))
    for sql, message in FAULTS[:: 4 if tiered else 1]:
        change(store, sql)
        found = messages(check_store(store))
        assert message in found, (sql, found)
        report = check_store(store, repair=True)
        assert report.ok and message in "\n".join(problem.message for problem in report.repaired)
        assert {id: [event.data for event in j.replay(id)] for id in "abcd"} == wanted, sql
        assert sorted(event.position for event in j.events(tag="t")) == tagged
        assert check_store(store).ok
    assert j.persist("b", hw.Record("placed", 1)).first == 501


def test_rows_without_a_journal_are_found(store: hw.Store, j: hw.Journal) -> None:
    change(store, "UPDATE journal SET stream = stream + 1 WHERE stream = ?", j._ref.id)
    found = check_store(store)
    assert {problem.kind for problem in found.problems} == {"index", "dangling"}
    assert "it has no index" in found.problems[0].message
    assert any("rows of entity_page" in problem.message for problem in found.problems)
    change(store, "UPDATE journal SET stream = stream - 1 WHERE stream = ?", j._ref.id + 1)
    assert check_store(store).ok


def test_a_check_beside_persists_rebuilds_and_deletions_finds_nothing(store: hw.Store, j: hw.Journal) -> None:
    stop = threading.Event()
    acks: list[Any] = []

    def work() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            acks.append(j.persist_async(f"{'abc'[number % 3]}", hw.Record("placed", number, tags=("t", f"n:{number % 50}"))))
            if number % 50 == 0:
                acks.pop().result()
                j.delete_to("c", number // 10)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(6):
            report = check_store(store)
            assert report.ok, report.problems
    finally:
        stop.set()
        thread.join()
    assert acks
