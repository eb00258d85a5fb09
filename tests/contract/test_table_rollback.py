"""Rolling a table back: its entries are again what they were at a version, by new changes."""

from __future__ import annotations

import random
from typing import Any

import pytest

import headwater as hw

NAME = "a/t"


def entries(table: hw.Table) -> dict[str, bytes]:
    return {key: entry.value for key, entry in table.items()}


def test_the_entries_are_as_of_the_version_whatever_happened_since(store: hw.Store, seed: int) -> None:
    chance = random.Random(seed)
    table = store.table(NAME)
    states = {0: entries(table)}
    for turn in range(60):
        key = f"k{chance.randrange(6)}"
        version = table.put(key, b"%d" % turn) if chance.random() < 0.7 else table.remove(key)
        states[version] = entries(table)
        if turn % 20 == 19:
            store.run_upkeep()
        if chance.random() < 0.2:
            to = chance.choice(sorted(states))
            table.roll_back(to)
            assert entries(table) == states[to]
            states[len(list(table.changes()))] = states[to]
    for to in chance.sample(sorted(states), 5):
        table.roll_back(to)
        assert entries(table) == states[to]


def test_it_commits_with_others_and_versions_grow(store: hw.Store) -> None:
    table, stream = store.table(NAME), store.create_stream("a/x")
    cut = stream.tail()
    first = table.put("k", b"1")
    table.put("k", b"2")
    last = table.put("new", b"")
    with stream.writer() as writer:
        writer.write(b"x")
    with store.transaction() as tx:
        tx.roll_back(NAME, first)
        tx.roll_back("a/x", cut, keep_as="a/x.old", force=True)
        tx.put(NAME, "also", b"v")
    assert entries(table) == {"k": b"1", "also": b"v"} and list(stream.read()) == []
    entry = table.get("k")
    assert entry is not None and entry.version > last
    with pytest.raises(hw.ConditionFailedError), store.transaction() as tx:
        tx.roll_back(NAME, first)
        table.put("k", b"meanwhile")
    assert entries(table)["k"] == b"meanwhile"
    table.roll_back(0)
    assert entries(table) == {} and len(table) == 0


def test_a_table_that_changes_meanwhile_is_tried_again(store: hw.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    table = store.table(NAME)
    version = table.put("k", b"1")
    left = [3]
    commit = hw.Transaction.commit

    def disturbed(tx: hw.Transaction) -> hw.Commit:
        if left[0]:
            left[0] -= 1
            table.put("other", b"%d" % left[0])
        return commit(tx)

    monkeypatch.setattr(hw.Transaction, "commit", disturbed)
    table.put("k", b"2")
    table.roll_back(version)
    assert entries(table) == {"k": b"1"} and left == [0]


def test_what_a_table_can_not_be_rolled_back_to(store: hw.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    table = store.table(NAME)
    for number in range(4):
        table.put("k", b"%d" % number)
    wrong: Any
    for wrong in (-1, 5, None, "1", 1.0, True):
        with pytest.raises(hw.InvalidRequestError):
            table.roll_back(wrong)
    with pytest.raises(hw.InvalidRequestError, match="keep_as"), store.transaction() as tx:
        tx.roll_back(NAME, 1, keep_as="a/old")
    with pytest.raises(hw.InvalidRequestError, match="already"), store.transaction() as tx:
        tx.put(NAME, "k", b"")
        tx.roll_back(NAME, 1)
    monkeypatch.setattr("headwater.tables.ROLLED_BACK_BYTES", 1)
    with pytest.raises(hw.InvalidRequestError, match="fork"):
        table.roll_back(1)
    monkeypatch.undo()
    stream = store.stream(NAME)
    part = stream.tail().streams[NAME]
    stream.truncate(hw.Cut(store.id, {NAME: part._replace(segments={0: 2})}))
    for gone in (0, 1, 2):
        with pytest.raises(hw.TruncatedError):
            table.roll_back(gone)
    stream.seal()
    with pytest.raises(hw.SealedError):
        table.roll_back(3)
    assert entries(table) == {"k": b"3"}
