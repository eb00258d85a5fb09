"""Adopting: transactions that were staged apart are committed as one, and those that nobody adopts leave nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import headwater as hw
from headwater.check import check_store
from tests.crash.processes import Place

NAME, TABLE = "s/x", "s/t"


@pytest.fixture
def store(place: Place) -> Iterator[hw.Store]:
    with place.open(create=True) as store:
        store.create_stream(NAME, scaling=hw.Scaling.fixed(2))
        store.table(TABLE)
        yield store
        report = check_store(store)
        assert report.ok, report.problems


def staged(store: hw.Store, *values: str) -> hw.Transaction:
    tx = store.transaction(auto_renew=False, lease=600.0)
    for value in values:
        tx.write(NAME, value, key="k")
    tx.flush()
    return tx


def values(store: hw.Store) -> list[str]:
    return [event.value.decode() for event in store.stream(NAME).read() if event.key == b"k"]


def test_what_was_staged_apart_is_committed_as_one_in_the_given_order(store: hw.Store) -> None:
    first, second, third = staged(store, "1", "2"), staged(store, "3"), staged(store, "4")
    with store.transaction() as tx:
        tx.write(NAME, "0", key="k")
        tx.adopt([first.id, second.id])
        tx.write(NAME, "3.5", key="k")
        tx.adopt([third.id])
    assert values(store) == ["0", "1", "2", "3", "3.5", "4"]
    assert store.transaction_status(first.id) is hw.TransactionStatus.ABORTED


def test_large_pieces_keep_their_objects(store: hw.Store) -> None:
    pieces = []
    for number in range(3):
        tx = store.transaction(auto_renew=False, lease=600.0)
        tx.write_batch(NAME, pa.table({"value": [bytes([number]) * 1000] * 2000, "k": ["a", "b"] * 1000}), key="k")
        tx.flush()
        pieces.append(tx.id)
    with store.transaction() as tx:
        tx.adopt(pieces)
    store.run_upkeep()
    assert sum(part.count for part in store.stream(NAME).ranges()) == 6000
    assert store.stream(NAME).to_arrow(columns=["value"]).num_rows == 6000


def test_a_transaction_can_t_adopt_itself(store: hw.Store) -> None:
    stream = store.create_stream("a/own")
    with store.transaction() as tx:
        tx.write("a/own", "1")
        with pytest.raises(hw.InvalidRequestError, match="can't take over itself"):
            tx.adopt([tx.id])
    assert [event.value for event in stream.read()] == [b"1"]


def test_adopting_again_adds_nothing(store: hw.Store) -> None:
    piece = staged(store, "1")
    with store.transaction() as tx:
        tx.adopt([piece.id])
        tx.adopt([piece.id])
    assert values(store) == ["1"]


def test_of_tables_the_last_put_stands(store: hw.Store) -> None:
    pieces = []
    for number in range(3):
        tx = store.transaction(auto_renew=False, lease=600.0)
        tx.put(TABLE, "key", str(number).encode())
        tx.put(TABLE, f"own{number}", b"x")
        tx.flush()
        pieces.append(tx.id)
    with store.transaction() as tx:
        tx.adopt(pieces)
    table = store.table(TABLE)
    entry = table.get("key")
    assert entry is not None and entry.value == b"2"
    assert len(table) == 4
    assert [change.value for change in table.changes() if change.key == "key"] == [b"0", b"1", b"2"]


def test_what_ended_before_is_not_adopted_and_the_adopter_stays_open(store: hw.Store) -> None:
    piece = staged(store, "1")
    piece.abort()
    tx = store.transaction()
    with pytest.raises(hw.TransactionEndedError):
        tx.adopt([piece.id])
    with pytest.raises(hw.NotFoundError):
        tx.adopt(["0" * 32])
    assert tx.status is hw.TransactionStatus.OPEN
    tx.write(NAME, "2", key="k")
    tx.commit()
    assert values(store) == ["2"]


def test_an_adopted_one_takes_no_more(store: hw.Store) -> None:
    piece = staged(store, "1")
    with store.transaction() as tx:
        tx.adopt([piece.id])
        piece.write(NAME, "late", key="k")
        with pytest.raises(hw.TransactionEndedError):
            piece.flush()
    assert values(store) == ["1"]


def test_an_abort_drops_what_was_adopted(store: hw.Store) -> None:
    piece = staged(store, "1")
    tx = store.transaction()
    tx.adopt([piece.id])
    tx.abort()
    assert values(store) == []
    with pytest.raises(hw.TransactionEndedError):
        store.resume_transaction(piece.id)


def test_a_split_and_a_merge_between_staging_and_commit_keep_the_order(store: hw.Store) -> None:
    stream = store.stream(NAME)
    first = staged(store, "1")
    stream.split(0)
    stream.split(1)
    second = staged(store, "2")
    with store.transaction() as tx:
        tx.adopt([first.id, second.id])
    assert values(store) == ["1", "2"]


def test_the_last_marker_of_an_owner_can_be_asked_for(store: hw.Store) -> None:
    assert store.marker("me") is None
    for sequence in (3, 7):
        with store.transaction(marker=hw.Marker("me", sequence, f"f{sequence}")) as tx:
            tx.write(NAME, str(sequence), key="k")
    assert store.marker("me") == hw.Marker("me", 7, "f7")


def test_open_transactions_are_listed_with_their_markers(store: hw.Store) -> None:
    tx = store.transaction(marker=hw.Marker("me", 1, "f"))
    tx.write(NAME, "1", key="k")
    tx.flush()
    assert [(info.id, info.marker) for info in store.transactions(only_open=True)] == [(tx.id, hw.Marker("me", 1, "f"))]
    tx.abort()


def test_a_store_tells_how_to_open_it_again(store: hw.Store, place: Place) -> None:
    url, catalog, options = store.address
    assert Path(url) == Path(place.url) and catalog == place.catalog and options is None
