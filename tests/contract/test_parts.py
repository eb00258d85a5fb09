"""Parts of a commit: a condition and a change that exist only here need no change elsewhere, in flushes and in transactions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

import headwater as hw
from headwater.catalog import commits, sessions
from headwater.catalog.database import Database, Row, Statement, Tx
from headwater.catalog.flushes import Flush, commit_flush
from headwater.catalog.operations import DatabaseRunner
from headwater.catalog.parts import Append, Ledger, Part, PartResult, Placed, Refusal, Refused, Stored, Term
from headwater.catalog.tails import Watch
from headwater.catalog.transactions import Batch
from headwater.errors import ConditionFailedError, HeadwaterError
from headwater.model.cuts import Cut, StreamCut
from headwater.model.positions import Position
from tests.contract.writing import batch, values
from tests.crash.processes import Place


class Counts(Ledger["CountIs"]):
    """Counts in a table of the catalog that is there anyway."""

    def watched(self) -> list[Watch]:
        return [Watch(term.guard, 0) for term in self.terms]

    def statements(self) -> list[Statement]:
        return [("SELECT name, last FROM sequence WHERE name = ?", (name,)) for name in sorted({term.name for term in self.terms})]

    def load(self, answers: list[list[Row]]) -> None:
        self._counts: dict[str, int] = {row[0]: row[1] for rows in answers for row in rows}

    def refusal(self, terms: Sequence[CountIs]) -> Refusal | None:
        for term in terms:
            assert (term.guard, 0) in self.tails, "it is locked"
            if self._counts.get(term.name, 0) != term.count:
                return Refusal(term, "miscounted", {"found": self._counts.get(term.name, 0)})
        return None

    def change(self, placed: Sequence[Placed]) -> None:
        for term, *_ in placed:
            self._counts[term.name] = term.count + 1

    def enter(self, tx: Tx) -> None:
        sql = "INSERT INTO sequence (name, last) VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET last = excluded.last"
        tx.defer(sql, list(self._counts.items()))


@dataclass(frozen=True, slots=True)
class CountIs(Term):
    """The part commits if a count is known, and adds one to it; a stream guards the count."""

    ledger = Counts
    guard: int
    name: str
    count: int
    block: int = -1

    def error(self, refused: Refused) -> HeadwaterError:
        return ConditionFailedError(f"the count is {refused.facts['found']}", position=Position(7, refused.facts["found"]))


def read_count(store: hw.Store) -> int:
    rows = store._engine.database.query("SELECT last FROM sequence WHERE name = 'test'")
    return int(rows[0][0]) if rows else 0


def test_a_condition_and_a_change_go_with_the_parts_of_a_flush(store: hw.Store) -> None:
    stream, guard = store.create_stream("a/x").id, store.create_stream("a/guard").id
    session = store._engine.run(sessions.begin_session, "test", 0)

    def part(*terms: CountIs) -> Part:
        return Part((Append(stream, 0, 1, 5, 0, None, 0, b"block"),), terms)

    def commit(number: int, *parts: Part) -> list[PartResult]:
        database: Database = store._engine.database
        return DatabaseRunner(database).run(commit_flush, Flush(session, number, parts))

    wrong = part(CountIs(guard, "test", 5))
    results = commit(1, part(CountIs(guard, "test", 0)), part(), wrong, part(CountIs(guard, "test", 1)))
    assert results[2] == Refused("miscounted", {"found": 1}, 0)
    assert [result.firsts for result in results if isinstance(result, Stored)] == [(0,), (1,), (2,)]
    assert read_count(store) == 2
    # Its blocks are no blocks, so the stream goes before the store is checked.
    store.stream("a/x").seal()
    store.delete_stream("a/x")


@pytest.mark.parametrize("is_staged", [False, True])
def test_a_condition_and_a_change_go_with_a_transaction(store: hw.Store, is_staged: bool) -> None:
    stream, guard = store.create_stream("a/x"), store.create_stream("a/guard").id

    def commit(count: int) -> hw.Commit:
        tx = store.transaction()
        tx.write("a/x", f"{count}")
        if is_staged:
            tx.flush()
        tx._contents.terms.append(CountIs(guard, "test", count))
        return tx.commit()

    commit(0)
    commit(1)
    with pytest.raises(ConditionFailedError, match="the count is 2"):
        commit(5)
    assert read_count(store) == 2 and values(stream) == [b"0", b"1"]


def test_a_refusal_keeps_its_attributes_where_another_process_commits(store: hw.Store) -> None:
    stream, guard = store.create_stream("a/x"), store.create_stream("a/guard").id
    tx = store.transaction()
    tx.write("a/x", b"x", key="k")
    tx._contents.terms.append(CountIs(guard, "test", 3))
    tx.flush()
    stream.split(0)
    # A split makes the commit roll: the transaction is prepared, and any process commits it.
    with pytest.raises(ConditionFailedError, match="the count is 0") as caught:
        tx.commit()
    assert caught.value.position == Position(7, 0)
    assert values(stream) == [] and read_count(store) == 0


class OnlyKnownHere(ConditionFailedError):
    """A kind of error that is no public class."""


@dataclass(frozen=True, slots=True)
class CutIs(CountIs):
    """Refused with an error that has all kinds of typed attributes."""

    ledger = Counts

    def error(self, refused: Refused) -> HeadwaterError:
        cut = Cut("store", {"a/x": StreamCut(3, {0: 5})})
        return OnlyKnownHere("wrong", expected=hw.EXISTS, position=Position(7, 8), cut=cut, number=self.count, name=self.name, nothing=None)


def test_a_refusal_keeps_its_attributes_where_another_process_prepared_and_another_committed(store: hw.Store, place: Place) -> None:
    stream, guard = store.create_stream("a/x"), store.create_stream("a/guard").id
    refused, other = store.transaction(), store.transaction()
    for tx in (refused, other):
        tx.write("a/x", b"x", key="k")
    refused._contents.terms.append(CutIs(guard, "test", 3))
    for tx in (refused, other):
        tx.flush()
    stream.split(0)
    # A process that prepared it, and was killed then; another one, whose commit rolls for both.
    store._engine.run(commits.prepare, refused.id, Batch(), "a process that was killed")
    with place.open() as another:
        another.resume_transaction(other.id).commit()
    for _ in range(2):
        with pytest.raises(ConditionFailedError, match="wrong") as caught:
            refused.commit() if refused.status is hw.TransactionStatus.OPEN else store._engine.run(
                commits.commit, refused.id, Batch(), None, 1, "anybody"
            )
        assert (caught.value.position, caught.value.expected) == (Position(7, 8), hw.EXISTS)
        assert caught.value.facts == {"cut": Cut("store", {"a/x": StreamCut(3, {0: 5})}), "number": 3, "name": "test", "nothing": None}
    assert values(stream) == [b"x"] and read_count(store) == 0


def test_a_writer_that_was_passed_stores_the_rest_and_its_neighbours_are_untouched(store: hw.Store) -> None:
    moved, innocent = store.create_stream("a/moved"), store.create_stream("a/innocent")
    with moved.writer("source") as writer, moved.writer("batches") as batches, innocent.writer("other") as other:
        for each in (writer, batches, other):
            each.write(b"1", number=1).result()
        database: Any = store._engine.database
        database.write(lambda tx: tx.run("UPDATE writer SET last_number = 3 WHERE id IN ('source', 'batches')"))
        acks = [writer.write(b"%d" % number, number=number) for number in (2, 3, 4, 5)]
        neighbours = [other.write(b"%d" % number, number=number) for number in (2, 3)]
        passed, stored = batches.write_batch(batch(b"b3"), number=3), batches.write_batch(batch(b"b4", b"b5"), number=4)
        assert [ack.result(30) is None for ack in acks] == [ack.duplicate for ack in acks] == [True, True, False, False]
        assert [ack.result(30).number for ack in neighbours] == [1, 2]
        assert passed.result(30) is None and passed.duplicate and not stored.duplicate
        assert writer.last_number == 5
    assert sorted(values(moved)) == [b"1", b"1", b"4", b"5", b"b4", b"b5"]
    assert values(innocent) == [b"1", b"2", b"3"]
