"""Persists in transactions: with other entities, streams, tables and reader positions, and conditions on entities that are not written."""

from __future__ import annotations

from typing import Any

import pytest

import headwater as hw

NAME = "shop/orders"


@pytest.fixture
def j(store: hw.Store) -> hw.Journal:
    return store.journal(NAME, scaling=hw.Scaling.fixed(4))


def record(type: str = "placed", data: Any = 1, **more: Any) -> hw.Record:
    return hw.Record(type, data, **more)


def test_entities_streams_tables_and_readers_commit_together(store: hw.Store, j: hw.Journal) -> None:
    stream, table = store.create_stream("shop/out"), store.table("shop/view")
    source = store.create_stream("shop/in")
    with source.writer() as writer:
        writer.write(b"command")
    reader = store.reader_group("g", ["shop/in"]).reader("r", commit="manual")
    assert reader.read(timeout=30) is not None
    j.persist("b", record())
    with store.transaction() as tx:
        tx.persist(NAME, "a", [record(data=1), record(data=2)], expected=0)
        tx.persist(NAME, "b", record(data=3), expected=1)
        tx.persist(NAME, "a", record(data=4))
        tx.write("shop/out", b"x")
        tx.put("shop/view", "k", b"v")
        tx.commit_reader(reader)
        assert j.head("a").sequence == 0
    assert [event.data for event in j.replay("a")] == [1, 2, 4] and [event.data for event in j.replay("b")] == [1, 3]
    assert [event.value for event in stream.read()] == [b"x"] and table.get("k") is not None
    assert store.reader_group("g").positions().streams["shop/in"].segments == {0: 1}
    reader.close()


def test_one_conflict_undoes_all_of_a_transaction(store: hw.Store, j: hw.Journal) -> None:
    table = store.table("shop/view")
    j.persist("b", record())
    with pytest.raises(hw.ConditionFailedError) as caught, store.transaction() as tx:
        tx.persist(NAME, "a", record(), expected=0)
        tx.persist(NAME, "b", record(), expected=0)
        tx.put("shop/view", "k", b"v")
    assert (caught.value.id, caught.value.expected, caught.value.actual) == ("b", 0, 1)
    assert tx.status is hw.TransactionStatus.ABORTED
    assert list(j.ids()) == ["b"] and j.head("b").sequence == 1 and table.get("k") is None


def test_without_an_expected_sequence_it_is_the_one_at_the_call(store: hw.Store, j: hw.Journal) -> None:
    j.persist("a", record())
    tx = store.transaction()
    tx.persist(NAME, "a", record())
    j.persist("a", record())
    with pytest.raises(hw.ConditionFailedError) as caught:
        tx.commit()
    assert (caught.value.expected, caught.value.actual) == (1, 2)
    with pytest.raises(hw.ConditionFailedError), store.transaction() as tx:
        tx.persist(NAME, "nobody", record(), expected=hw.EXISTS)


@pytest.mark.parametrize("staged", [False, True])
def test_a_condition_of_a_transaction_is_checked_by_whoever_commits(store: hw.Store, j: hw.Journal, staged: bool) -> None:
    j.persist("a", record(tags=("name",)))
    cut = store.cut(NAME)

    def begin(id: str, **more: Any) -> hw.Transaction:
        tx = store.transaction()
        tx.persist(NAME, id, record(tags=("name",)), fail_if=hw.Match(tags=("name",)), **more)
        if staged:
            tx.flush()
            return store.resume_transaction(tx.id)
        return tx

    with pytest.raises(hw.ConditionFailedError) as caught:
        begin("b").commit()
    assert caught.value.id == "b" and caught.value.position == next(iter(j.replay("a"))).position
    waiting = begin("b", after=cut)
    j.persist("c", record(tags=("name",)))
    with pytest.raises(hw.ConditionFailedError) as caught:
        waiting.commit()
    assert caught.value.position == next(iter(j.replay("c"))).position
    # What is deleted does not count, though the index has it.
    waiting = begin("b")
    j.delete("a")
    j.delete("c")
    waiting.commit()
    assert list(j.ids()) == ["b"]


@pytest.mark.parametrize("staged", [False, True])
def test_conditions_hold_across_a_split(store: hw.Store, j: hw.Journal, staged: bool) -> None:
    stream = store.stream(NAME)
    for number in range(3):
        tx = store.transaction()
        tx.persist(NAME, f"new-{number}", record(tags=(f"name-{number}",)), fail_if=hw.Match(tags=(f"name-{number}",)))
        tx.require_entity(NAME, "x", 0)
        if staged:
            tx.flush()
        stream.split(stream.segments()[0].number)
        if number == 2:
            j.persist("y", record(tags=("name-2",)))
            with pytest.raises(hw.ConditionFailedError):
                tx.commit()
        else:
            tx.commit()
    assert list(j.ids()) == ["new-0", "new-1", "y"]


def test_an_entity_that_is_required_must_be_as_it_was(store: hw.Store, j: hw.Journal) -> None:
    j.persist("customer", [record(), record()])
    with store.transaction() as tx:
        tx.require_entity(NAME, "customer", 2)
        tx.require_entity(NAME, "customer", hw.EXISTS)
        tx.require_entity(NAME, "nobody", 0)
        tx.persist(NAME, "order", record())
    cases: list[tuple[str, Any, int]] = [("customer", 1, 2), ("customer", 0, 2), ("nobody", hw.EXISTS, 0), ("nobody", 1, 0)]
    for id, expected, actual in cases:
        with pytest.raises(hw.ConditionFailedError) as caught, store.transaction() as tx:
            tx.persist(NAME, "order", record())
            tx.require_entity(NAME, id, expected)
        assert (caught.value.id, caught.value.expected, caught.value.actual) == (id, expected, actual)
    tx = store.transaction()
    tx.require_entity(NAME, "customer", hw.EXISTS)
    tx.persist(NAME, "order", record())
    j.delete("customer")
    with pytest.raises(hw.ConditionFailedError):
        tx.commit()
    assert j.head("order").sequence == 1


def test_two_that_require_what_the_other_persists_do_not_both_commit(store: hw.Store, j: hw.Journal) -> None:
    one, two = store.transaction(), store.transaction()
    one.require_entity(NAME, "b", 0)
    one.persist(NAME, "a", record())
    two.require_entity(NAME, "a", 0)
    two.persist(NAME, "b", record())
    one.commit()
    with pytest.raises(hw.ConditionFailedError):
        two.commit()
    assert list(j.ids()) == ["a"]


def test_what_a_transaction_can_not_persist_is_refused_at_once(store: hw.Store, j: hw.Journal) -> None:
    store.create_stream("shop/stream")
    with store.transaction() as tx:
        bad: list[tuple[Any, ...]] = [(NAME, "", record()), (NAME, "a", []), (NAME, "a", record("")), ("shop/stream", "a", record())]
        for args in bad:
            with pytest.raises(hw.InvalidRequestError):
                tx.persist(*args)
        with pytest.raises(hw.NotFoundError):
            tx.persist("shop/nothing", "a", record())
        for expected in (None, -1, "x"):
            with pytest.raises(hw.InvalidRequestError):
                tx.require_entity(NAME, "a", expected)  # type: ignore[arg-type]
        with pytest.raises(hw.InvalidRequestError):
            tx.persist(NAME, "a", record(), after=store.cut(NAME))
        tx.persist(NAME, "a", record())
    assert j.head("a").sequence == 1


def test_a_large_persist_of_a_transaction_goes_through_storage(store: hw.Store, j: hw.Journal) -> None:
    with store.transaction() as tx:
        for number in range(4):
            tx.persist(NAME, f"e{number}", [record(data="x" * 1_000_000) for _ in range(5)])
    assert {id: len(list(j.replay(id))) for id in j.ids()} == {f"e{number}": 5 for number in range(4)}
