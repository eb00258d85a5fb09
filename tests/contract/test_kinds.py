"""Streams of every kind that holds events are read by every API that reads events, and written by their own API alone."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

import headwater as hw
from headwater.model.records import Record


@pytest.fixture
def table(store: hw.Store) -> hw.Table:
    table = store.table("a/table")
    table.put("k", b"1")
    table.put("l", b"2")
    table.remove("k")
    return table


CHANGES: list[tuple[bytes, dict[str, Any]]] = [
    (b"k", {"key": "k", "value": b"1"}),
    (b"l", {"key": "l", "value": b"2"}),
    (b"k", {"key": "k", "value": None}),
]


def test_streams_are_listed_by_their_kinds(store: hw.Store) -> None:
    for name, kind in (("b/events", "events"), ("a/bytes", "bytes")):
        store.create_stream(name, kind=kind, labels=["mine"])
    store.table("a/table")
    store.revisioned("a/log")
    store.journal("b/journal")
    assert store.streams() == ["a/bytes", "b/events"]
    assert store.streams(kinds=["table", "journal"]) == ["a/table", "b/journal"]
    assert store.streams("a", kinds=("bytes", "table", "revisioned", "journal")) == ["a/bytes", "a/log", "a/table"]
    assert store.streams(label="mine", kinds={"events"}) == ["b/events"]
    for wrong in ("events", ["event"], [], [5], 5):
        with pytest.raises(hw.InvalidRequestError):
            store.streams(kinds=wrong)  # type: ignore[arg-type]


def test_the_changes_of_a_table_are_events_with_the_entries_keys(store: hw.Store, table: hw.Table) -> None:
    with store.transaction() as tx:
        tx.put("a/table", "m", b"3")
    expected = [*CHANGES, (b"m", {"key": "m", "value": b"3"})]
    stream = store.stream("a/table")
    for _ in range(2):
        assert [(event.key, event.value) for event in stream.read()] == expected
        assert [event.position.number + 1 for event in stream.read()] == [change.version for change in table.changes()]
        assert stream.to_arrow(columns=["key", "_key"]).to_pylist() == [{"key": value["key"], "_key": key} for key, value in expected]
        assert pa.Table.from_batches(stream.ranges()[0].to_batches(["value"])).column("value").to_pylist() == [b"1", b"2", None, b"3"]
        store.run_upkeep()
    follower = stream.read(follow=True, start="tail")
    table.put("n", b"4")
    assert next(follower).value == {"key": "n", "value": b"4"}


def test_the_values_of_a_revisioned_stream_are_events(store: hw.Store) -> None:
    log = store.revisioned("a/log")
    log.append(b"1")
    log.append(b"2")
    stream = store.stream("a/log")
    for _ in range(2):
        assert [(event.key, event.value) for event in stream.read()] == [(None, b"1"), (None, b"2")]
        assert stream.to_arrow(columns=["value"]).column("value").to_pylist() == [b"1", b"2"]
        store.run_upkeep()
    follower = stream.read(follow=True)
    log.append(b"3")
    assert [next(follower).value for _ in range(3)] == [b"1", b"2", b"3"]


def test_a_group_reads_a_table_a_revisioned_stream_and_a_journal(store: hw.Store, table: hw.Table) -> None:
    store.revisioned("a/log").append(b"logged")
    store.journal("a/journal").persist("id", Record("Made", {"n": 1}))
    names = ["a/table", "a/log", "a/journal"]
    with store.reader_group("group", names, end="tail").reader("r") as reader:
        found = [event.value for event in reader]
    assert [value for _, value in CHANGES] == [value for value in found if isinstance(value, dict) and "key" in value]
    assert b"logged" in found
    assert [value["type"] for value in found if isinstance(value, dict) and "type" in value] == ["Made"]
    assert len(found) == len(CHANGES) + 2


def test_a_stream_of_another_kind_is_written_by_its_own_api_alone(store: hw.Store, table: hw.Table) -> None:
    store.revisioned("a/log")
    store.journal("a/journal")
    for name, said in (
        ("a/table", "a/table is a table: use store.table('a/table')"),
        ("a/log", "a/log is a revisioned stream: use store.revisioned('a/log')"),
        ("a/journal", "a/journal is a journal: use store.journal('a/journal')"),
    ):
        stream = store.stream(name)
        for call in (stream.writer, stream.byte_writer, stream.byte_reader):
            with pytest.raises(hw.InvalidRequestError) as caught:
                call()
            assert caught.value.message == said
        with store.transaction() as tx, pytest.raises(hw.InvalidRequestError, match="is of kind"):
            tx.write(name, b"x")


def test_a_stream_of_bytes_is_read_as_bytes_alone(store: hw.Store) -> None:
    store.create_stream("a/bytes", kind="bytes")
    stream = store.stream("a/bytes")
    for call in (stream.writer, stream.read, stream.to_arrow, stream.ranges, lambda: store.reader_group("group", ["a/bytes"])):
        with pytest.raises(hw.InvalidRequestError, match="a/bytes is a stream of bytes"):
            call()
