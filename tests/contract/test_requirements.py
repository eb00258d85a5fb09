"""Requirements: conditions on entries that a transaction does not change."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import headwater as hw
from tests.contract.writing import values


def test_a_commit_needs_the_required_version(store: hw.Store) -> None:
    table, stream = store.table("a/lease"), store.create_stream("a/x")
    first = table.put("owner", b"one")
    with store.transaction() as tx:
        tx.require("a/lease", "owner", first)
        tx.require("a/lease", "free", hw.ABSENT)
        tx.write("a/x", b"1")
    second = table.put("owner", b"two")
    tx = store.transaction()
    tx.require("a/lease", "owner", first)
    tx.write("a/x", b"2")
    with pytest.raises(hw.ConditionFailedError, match=rf"'owner' has version {second}, not {first}") as caught:
        tx.commit()
    assert caught.value.facts["found"] == second
    assert tx.status is hw.TransactionStatus.ABORTED
    assert values(stream) == [b"1"] and table.get("owner") == (b"two", second)


@pytest.mark.parametrize("is_staged", [False, True])
def test_a_requirement_alone_and_with_a_change_of_the_same_key(store: hw.Store, is_staged: bool) -> None:
    table = store.table("a/lease")
    version = table.put("owner", b"one")
    for given in (version, version + 1):
        tx = store.transaction()
        tx.put("a/lease", "owner", b"%d" % given)
        # It is about the entry as it was before the commit, although it was given after the put.
        tx.require("a/lease", "owner", given)
        if is_staged:
            tx.flush()
        tx.commit()
    with pytest.raises(hw.ConditionFailedError), store.transaction() as tx:
        tx.require("a/lease", "owner", version)
    assert table.get("owner") == (b"%d" % (version + 1), version + 2)


def test_a_staged_requirement_holds_at_the_commit_also_where_it_rolls(store: hw.Store) -> None:
    table, stream = store.table("a/lease"), store.create_stream("a/x")
    version = table.put("owner", b"one")
    for still_holds in (True, False):
        tx = store.transaction()
        tx.write("a/x", b"x", key="k")
        tx.require("a/lease", "owner", version)
        tx.flush()
        stream.split(stream.segments()[-1].number)
        if still_holds:
            tx.commit()
        else:
            table.put("owner", b"two")
            with pytest.raises(hw.ConditionFailedError, match="required"):
                tx.commit()
    assert values(stream) == [b"x"]


@pytest.mark.parametrize("is_staged", [False, True])
def test_a_table_that_is_gone_fulfils_nothing(store: hw.Store, is_staged: bool) -> None:
    version = store.table("a/lease").put("owner", b"one")
    store.create_stream("a/x")
    ends: list[Callable[[], None]] = [store.stream("a/lease").seal, lambda: store.delete_stream("a/lease")]
    for end in ends:
        tx = store.transaction()
        tx.write("a/x", b"x")
        tx.require("a/lease", "owner", version)
        if is_staged:
            tx.flush()
        end()
        with pytest.raises(hw.SealedError, match="sealed or deleted"):
            tx.commit()
    assert values(store.stream("a/x")) == []


def test_of_two_that_require_what_the_other_changes_one_commits(store: hw.Store) -> None:
    tables = [store.table(f"a/t{place}") for place in range(2)]
    both = threading.Barrier(2)

    def commit(place: int, versions: list[int]) -> str:
        tx = store.transaction()
        tx.require(tables[1 - place].name, "k", versions[1 - place])
        tx.put(tables[place].name, "k", b"%d" % place)
        both.wait(60)
        try:
            tx.commit()
        except hw.ConditionFailedError:
            return "refused"
        return "committed"

    with ThreadPoolExecutor(2) as threads:
        for _ in range(30):
            versions = [table.put("k", b"") for table in tables]
            assert sorted(threads.map(commit, range(2), [versions] * 2)) == ["committed", "refused"]


def test_requirements_of_one_entry_do_not_wait_for_each_other_but_changes_do(store: hw.Store, seed: int) -> None:
    """Counters in streams that only the holder of a lease may raise; the lease changes hands all the time."""
    chance = random.Random(seed)
    table, stream = store.table("a/lease"), store.create_stream("a/x")
    held = [table.put("owner", b"0")]
    committed: list[tuple[int, int]] = []

    def work(number: int) -> None:
        for turn in range(20):
            version = held[-1]
            if number == 0 and turn % 4 == 3:
                held.append(table.put("owner", b"%d" % turn))
                continue
            tx = store.transaction()
            tx.require("a/lease", "owner", version)
            tx.write("a/x", b"%d" % version)
            if chance.random() < 0.3:
                tx.flush()
            try:
                tx.commit()
                committed.append((number, version))
            except hw.ConditionFailedError:
                pass

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    seen = [int(value) for value in values(stream)]
    assert seen == sorted(seen) and sorted(seen) == sorted(version for _, version in committed), "no version comes after a later one"


@pytest.mark.parametrize(
    ("key", "version"), [("", 1), (None, 1), ("k" * 5000, 1), ("k", None), ("k", -1), ("k", "1"), ("k", True), ("k", 1.0)]
)
def test_what_can_not_be_required(local_store: hw.Store, key: Any, version: Any) -> None:
    local_store.table("a/t")
    with local_store.transaction() as tx, pytest.raises(hw.InvalidRequestError):
        tx.require("a/t", key, version)


def test_what_is_no_table_has_no_entries_to_require(local_store: hw.Store) -> None:
    local_store.create_stream("a/x")
    with local_store.transaction() as tx:
        with pytest.raises(hw.NotFoundError, match="no table a/t"):
            tx.require("a/t", "k", 1)
        with pytest.raises(hw.InvalidRequestError, match="'events'"):
            tx.require("a/x", "k", 1)
