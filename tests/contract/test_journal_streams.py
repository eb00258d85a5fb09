"""A journal as a stream: what reads events reads a journal, and what changes a stream's segments changes a journal's."""

from __future__ import annotations

import json
import pickle
import threading
from collections import defaultdict
from collections.abc import Iterable
from itertools import islice
from typing import Any

import duckdb
import pyarrow as pa
import pytest

import headwater as hw
from headwater.model.records import JOURNAL_SCHEMA
from tests.crash.processes import Place

NAME = "shop/orders"
ENTITIES = 12


@pytest.fixture
def j(store: hw.Store) -> hw.Journal:
    return store.journal(NAME, scaling=hw.Scaling.fixed(4))


def fill(j: hw.Journal, rounds: int, first: int = 0) -> None:
    """An event for each of a dozen entities in each round."""
    for number in range(first, first + rounds):
        record: dict[str, Any] = {"data": {"round": number}, "tags": [f"round:{number}"]}
        for ack in [j.persist_async(f"order-{entity}", hw.Record("counted", **record)) for entity in range(ENTITIES)]:
            ack.result()


def check_rounds(rows: Iterable[tuple[str, int, str]], rounds: int, first: int = 0) -> None:
    """Each entity has each round once, and in order."""
    found: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for id, sequence, data in rows:
        found[id].append((sequence, json.loads(data)["round"]))
    assert sorted(found) == sorted(f"order-{entity}" for entity in range(ENTITIES))
    assert {tuple(rows) for rows in found.values()} == {tuple((number + 1, number) for number in range(first, first + rounds))}


def rows_of(events: Iterable[hw.Event]) -> list[tuple[str, int, str]]:
    return [(event.value["id"], event.value["sequence"], event.value["data"]) for event in events]


def test_an_event_of_a_stream_has_the_columns_of_a_journal_and_the_id_as_its_key(store: hw.Store, j: hw.Journal) -> None:
    record = hw.Record("placed", {"item": "mug"}, tags=["eu", "mug"], version=3, meta=["x"])
    persisted = j.persist("order-1", record)
    [event] = store.stream(NAME).read()
    [recorded] = j.replay("order-1")
    assert (event.key, event.position, event.time) == (b"order-1", recorded.position, recorded.time)
    assert event.value == {
        "id": "order-1",
        "sequence": persisted.first,
        "type": "placed",
        "version": 3,
        "data": '{"item":"mug"}',
        "tags": ["eu", "mug"],
        "meta": '["x"]',
        "event_id": str(record.event_id),
    }
    assert store.stream(NAME).schema == JOURNAL_SCHEMA and store.stream(NAME).kind == "journal" == j.stream.kind


def test_a_journal_is_read_between_places_across_splits_merges_and_tiering(store: hw.Store, j: hw.Journal) -> None:
    stream = store.stream(NAME)
    fill(j, 5)
    cut = store.cut(NAME)
    for _ in range(2):
        check_rounds(rows_of(stream.read()), 5)
        check_rounds(rows_of(stream.read(None, cut)), 5)
        assert list(stream.read(cut)) == []
        store.run_upkeep()
    made = stream.split(0, 3)
    fill(j, 5, 5)
    stream.merge([made[0].number, made[1].number])
    fill(j, 5, 10)
    for _ in range(2):
        check_rounds(rows_of(stream.read()), 15)
        check_rounds(rows_of(stream.read(None, cut)), 5)
        check_rounds(rows_of(stream.read(cut)), 10, 5)
        store.run_upkeep()


def test_persists_that_nobody_waits_for_keep_their_order_across_splits_and_merges(store: hw.Store, j: hw.Journal) -> None:
    stream = store.stream(NAME)

    def give(first: int) -> None:
        rounds = range(first, first + 5)
        acks = [
            j.persist_async(f"order-{entity}", hw.Record("counted", {"round": number})) for number in rounds for entity in range(ENTITIES)
        ]
        for ack in acks:
            ack.result()

    give(0)
    made = stream.split(0, 3)
    give(5)
    stream.merge([made[0].number, made[1].number])
    give(10)
    check_rounds(rows_of(stream.read()), 15)


def test_a_journal_is_followed_while_it_splits_until_it_is_sealed(store: hw.Store, j: hw.Journal) -> None:
    stream = store.stream(NAME)
    fill(j, 2)
    found: list[hw.Event] = []
    follower = threading.Thread(target=lambda: found.extend(stream.read(follow=True)))
    follower.start()
    for number in range(2, 8):
        fill(j, 1, number)
        stream.split(stream.segments()[0].number)
    stream.seal()
    follower.join(60)
    assert not follower.is_alive()
    check_rounds(rows_of(found), 8)
    with pytest.raises(hw.SealedError):
        j.persist("order-1", hw.Record("late", None))
    check_rounds([(event.id, event.sequence, json.dumps(event.data)) for event in j.events()], 8)
    assert len(list(j.ids(follow=True))) == ENTITIES
    assert len(list(j.events(tag="round:3", follow=True))) == ENTITIES


def test_ranges_and_tables_hold_a_journal_hot_and_from_parquet(store: hw.Store, j: hw.Journal, place: Place) -> None:
    stream = store.stream(NAME)
    fill(j, 4)
    for _ in range(2):
        ranges = pickle.loads(pickle.dumps(stream.ranges()))
        table = pa.Table.from_batches([batch for part in ranges for batch in part.to_batches()])
        assert table.num_rows == 4 * ENTITIES == sum(part.count for part in ranges)
        whole = stream.to_arrow()
        assert whole.schema.names == [*JOURNAL_SCHEMA.names, "_key", "_time", "_segment", "_number"]
        check_rounds(zip(*(whole.column(name).to_pylist() for name in ("id", "sequence", "data")), strict=True), 4)
        assert sorted(table.column("event_id").to_pylist()) == sorted(whole.column("event_id").to_pylist())
        assert set(stream.to_arrow(columns=["type"]).column("type").to_pylist()) == {"counted"}
        store.run_upkeep()


def test_a_fork_of_a_journal_is_a_journal_that_goes_its_own_way(store: hw.Store, j: hw.Journal) -> None:
    fill(j, 3)
    cut = store.cut(NAME)
    fill(j, 1, 3)
    fork = store.stream(NAME).fork("shop/trial", cut)
    assert fork.kind == "journal" and store.journals() == [NAME, "shop/trial"]
    check_rounds(rows_of(fork.read()), 3)
    store.run_upkeep()
    trial = store.journal("shop/trial")
    assert trial.persist("order-1", hw.Record("counted", {"round": 99}), expected=3).first == 4
    assert [event.data["round"] for event in trial.replay("order-1")] == [0, 1, 2, 99]
    assert [event.data["round"] for event in j.replay("order-1")] == [0, 1, 2, 3]
    assert [value["data"] for value in (event.value for event in fork.read()) if value["id"] == "order-1"][-1] == '{"round":99}'


def test_two_readers_of_a_group_share_a_journal(store: hw.Store, j: hw.Journal) -> None:
    fill(j, 5)
    group = store.reader_group("billing", [NAME], end=store.cut(NAME))
    assert group.lag().events == 5 * ENTITIES
    found: list[hw.Event] = []
    readers = [threading.Thread(target=lambda name=name: found.extend(drain(group, name))) for name in ("r1", "r2")]
    for thread in readers:
        thread.start()
    for thread in readers:
        thread.join(60)
        assert not thread.is_alive()
    # One list gets each reader's part as a whole: each entity is in one part, or goes on in the other.
    check_rounds(sorted(rows_of(found)), 5)
    assert group.lag().events == 0
    group.reset(store.stream(NAME).head())
    assert group.lag().events == 5 * ENTITIES


def drain(group: hw.ReaderGroup, name: str) -> list[hw.Event]:
    with group.reader(name) as reader:
        return list(reader)


def test_a_group_hands_out_batches_with_the_columns_of_a_journal(store: hw.Store, j: hw.Journal) -> None:
    fill(j, 3)
    group = store.reader_group("billing", [NAME], end=store.cut(NAME))
    rows: list[dict[str, Any]] = []
    with group.reader("r") as reader:
        while (batch := reader.read_batch()) is not None:
            assert batch.schema.names == [*JOURNAL_SCHEMA.names, "_key", "_time", "_stream", "_segment", "_number"]
            rows += batch.to_pylist()
            if len(rows) == 3 * ENTITIES:
                break
    assert {row["_stream"] for row in rows} == {NAME}
    check_rounds(((row["id"], row["sequence"], row["data"]) for row in rows), 3)


def test_what_is_read_of_one_journal_is_persisted_in_another_once(store: hw.Store, j: hw.Journal) -> None:
    """Consume, process, produce: the position and the new events are one commit. An abort gives the same event again."""
    shipments = store.journal("shop/shipments")
    fill(j, 2)
    group = store.reader_group("shipping", [NAME], end=store.cut(NAME))
    fails = iter([True, False] * 100)
    done = 0
    with group.reader("r", commit="manual") as reader:
        while done < 2 * ENTITIES:
            event = reader.read(timeout=30.0)
            assert event is not None
            tx = store.transaction()
            tx.persist("shop/shipments", f"parcel-{event.value['id']}", hw.Record("packed", event.value["sequence"]))
            tx.commit_reader(reader)
            if next(fails):
                tx.abort()
            else:
                tx.commit()
                done += 1
    assert {id: [event.data for event in shipments.replay(id)] for id in shipments.ids()} == {
        f"parcel-order-{entity}": [1, 2] for entity in range(ENTITIES)
    }


def test_a_tagged_cut_keeps_a_journal_and_a_cut_spans_it_and_a_stream(store: hw.Store, j: hw.Journal) -> None:
    log = store.create_stream("shop/log")
    fill(j, 2)
    cut = store.cut(NAME, "shop/log")
    store.tag("audit", cut)
    fill(j, 1, 2)
    check_rounds(rows_of(store.stream(NAME).read(None, store.tags()["audit"])), 2)
    assert [event.data["round"] for event in j.events(start=cut)] == [2] * ENTITIES
    assert list(log.read(cut)) == []
    store.untag("audit")


def test_duckdb_reads_the_chunks_of_a_journal(store: hw.Store, j: hw.Journal) -> None:
    fill(j, 40)
    store.run_upkeep()
    chunks = store.stream(NAME).chunks()
    paths = [chunk.url.removeprefix("file://") for chunk in chunks]
    assert sum(chunk.count for chunk in chunks) == 40 * ENTITIES
    rows = duckdb.sql(f"SELECT id, sequence, data FROM read_parquet({paths}) ORDER BY id, sequence").fetchall()
    check_rounds(rows, 40)
    # The segment is the folder's name, data is JSON, tags are a list.
    [(count, total)] = duckdb.sql(
        f"SELECT count(*), sum(CAST(data->>'$.round' AS BIGINT)) FROM read_parquet({paths}, hive_partitioning=true) "
        "WHERE list_contains(tags, 'round:7') AND type = 'counted' AND segment >= 0"
    ).fetchall()
    assert (count, total) == (ENTITIES, 7 * ENTITIES)


def test_only_persist_writes_a_journal(store: hw.Store, j: hw.Journal) -> None:
    stream = store.stream(NAME)
    with pytest.raises(hw.InvalidRequestError, match=r"store\.journal"):
        stream.writer()
    with pytest.raises(hw.InvalidRequestError), store.transaction() as tx:
        tx.write(NAME, {"id": "x"}, key="x")
    with pytest.raises(hw.InvalidRequestError):
        stream.byte_writer()
    with pytest.raises(hw.AlreadyExistsError):
        store.table(NAME)
    assert list(stream.read()) == []
    # It is usable afterwards.
    fill(j, 1)
    assert len(list(islice(j.stream.read(follow=True), ENTITIES))) == ENTITIES
