"""Writing up to the limits: large events and batches, memory, the size of flushes."""

from __future__ import annotations

import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import headwater as hw
from headwater.catalog.flushes import Flush
from headwater.model.limits import BATCH_BYTES, BUFFERED_BYTES, EVENT_BYTES
from headwater.segments import pending
from headwater.segments.engine import Engine
from tests.contract.writing import WAIT_SECONDS, batch, blocked, values
from tests.crash.processes import wait_until

MIB = 1024 * 1024


@pytest.mark.slow
@pytest.mark.slow
def test_a_batch_of_many_small_rows_up_to_64_mib_is_stored_whole(local_store: hw.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = local_store.create_stream("w/small", schema=pa.schema([("flag", pa.int8()), ("name", pa.string())]))
    rows = 9_000_000
    batch = pa.table({"flag": pa.array(np.zeros(rows, dtype=np.int8)), "name": pa.nulls(rows, pa.string())})
    commits: list[Flush] = []
    real = Engine.commit_flush

    def commit(engine: Engine, flush: Flush) -> Any:
        commits.append(flush)
        return real(engine, flush)

    monkeypatch.setattr(Engine, "commit_flush", commit)
    with stream.writer() as writer, stream.writer("named") as named:
        for one in (writer, named):
            assert sum(part.end - part.start for part in one.write_batch(batch).result()) == rows
    assert len(commits) == 2, "one each"


def test_keys_count_as_what_waits(local_store: hw.Store) -> None:
    stream = local_store.create_stream("w/keys", schema=pa.schema([("x", pa.int64())]))
    plain = local_store.create_stream("w/plain")
    key = b"k" * 60_000
    with stream.writer() as writer, plain.writer() as opaque:
        runs = {id(writer.write({"x": number}, key)._run): None for number in range(40)}
        assert len(runs) > 1, "a run ends at a megabyte, with its keys"
        runs = {id(opaque.write(b"", key)._run): None for number in range(40)}
        assert len(runs) > 1
    with local_store.transaction() as tx:
        before = tx._contents.room
        tx.write("w/plain", b"", key)
        tx.write("w/keys", {"x": 1}, key)
        tx.write_batch("w/plain", pa.table({"value": [b""], "_key": [key]}))
        assert before - tx._contents.room > 3 * len(key)


def test_a_fenced_writer_that_noted_a_time_can_be_closed(local_store: hw.Store) -> None:
    stream = local_store.create_stream("w/noted")
    first = stream.writer("w")
    first.write(b"1").result()
    first.note_time(datetime.now(UTC))
    second = stream.writer("w")
    first.write(b"2")
    with pytest.raises(hw.FencedError):
        first.close()
    first.close()
    second.close()


def test_an_event_may_have_64_mib_and_not_a_byte_more(local_store: hw.Store) -> None:
    stream = local_store.create_stream("a/x")
    whole = bytes(EVENT_BYTES)
    with stream.writer() as writer:
        with pytest.raises(hw.InvalidRequestError, match=r"67,108,865 bytes; an event may have 67,108,864"):
            writer.write(whole + b"x")
        with pytest.raises(hw.InvalidRequestError, match=r"67,108,865 bytes"):
            writer.write_batch(batch(b"small", whole + b"x"))
        writer.write(whole)
        writer.write_batch(batch(whole))
    assert [len(value) for value in values(stream)] == [EVENT_BYTES] * 2


def test_a_nested_event_that_is_too_large_is_refused_at_once(local_store: hw.Store) -> None:
    stream = local_store.create_stream("a/t", schema=pa.schema([("parts", pa.list_(pa.binary()))]))
    part = bytes(MIB)
    with stream.writer() as writer:
        with pytest.raises(hw.InvalidRequestError, match="an event may have"):
            writer.write({"parts": [part] * 65})
        writer.write({"parts": [b"small"]})
    assert len(values(stream)) == 1


@pytest.mark.slow
def test_a_row_of_a_batch_counts_as_a_whole(local_store: hw.Store) -> None:
    schema = pa.schema([("a", pa.binary()), ("b", pa.binary()), ("l", pa.list_(pa.binary())), ("m", pa.map_(pa.string(), pa.binary()))])
    stream = local_store.create_stream("a/t", schema=schema)
    half, less = bytes(EVENT_BYTES // 2 + 1), bytes(EVENT_BYTES // 4)
    with stream.writer() as writer, local_store.transaction() as tx:
        for row in ({"a": half, "b": half}, {"l": [half, half]}, {"a": half, "m": {"k": half}}):
            table = pa.Table.from_pylist([{}, row], schema=schema)
            for give in (writer.write_batch, lambda table: tx.write_batch("a/t", table)):
                with pytest.raises(hw.InvalidRequestError, match=r"67,108,86\d bytes; an event may have 67,108,864"):
                    give(table)
        writer.write_batch(
            pa.Table.from_pylist([{"a": less, "b": less}, {"l": [less, less]}, {"a": less, "m": {"k": less}}], schema=schema)
        )
    assert len(values(stream)) == 3


@pytest.mark.slow
def test_a_batch_over_the_limit_is_stored_in_pieces_or_refused_by_a_named_writer(local_store: hw.Store) -> None:
    stream = local_store.create_stream("a/x", scaling=hw.Scaling.fixed(2))
    large = pa.table({"value": [b"%07d" % n + bytes(MIB) for n in range(80)], "id": range(80)})
    with stream.writer() as writer:
        ranges = writer.write_batch(large, key="id").result(WAIT_SECONDS)
    assert sum(item.count for item in ranges) == 80
    with stream.writer("w") as named:
        with pytest.raises(hw.InvalidRequestError, match="smaller ones"):
            named.write_batch(large, key="id", number=1)
        assert named.last_number == 0
    numbers: dict[int, list[int]] = {}
    for event in stream.read():
        numbers.setdefault(event.position.segment, []).append(int(event.value[:7]))
    assert sorted(n for found in numbers.values() for n in found) == list(range(80))
    assert all(found == sorted(found) for found in numbers.values()), "the pieces are in order"


def test_a_store_that_was_moved_while_it_was_open_stores_nothing_in_the_old_place(tmp_path: Path) -> None:
    place, other = tmp_path / "store", tmp_path / "moved"
    with hw.open(place, upkeep=False) as store:
        stream = store.create_stream("a/x")
        with stream.writer() as writer:
            writer.write(b"small").result(WAIT_SECONDS)
            place.rename(other)
            writer.write(bytes(MIB))
            with pytest.raises(hw.UnavailableError, match="is gone: put it back"):
                writer.flush()
            assert not place.exists()
            other.rename(place)
        assert [len(value) for value in values(stream)] == [5, MIB]


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 64, 8 * MIB])
def test_a_batch_of_64_mib_is_stored_whole_whatever_arrow_keeps_beside_its_values(local_store: hw.Store, count: int) -> None:
    stream = local_store.create_stream("a/x")
    size = BATCH_BYTES // count
    offsets = pa.py_buffer(np.arange(0, BATCH_BYTES + 1, size, dtype=np.int32))
    values = pa.Array.from_buffers(pa.binary(), count, [None, offsets, pa.py_buffer(bytes(BATCH_BYTES))])
    with stream.writer("w") as named:
        [whole] = named.write_batch(pa.table({"value": values}), number=1).result(WAIT_SECONDS)
        assert (whole.start, whole.end, named.last_number) == (0, count, 1)
        with pytest.raises(hw.InvalidRequestError, match=r"this batch has 67,108,865 bytes; .* smaller ones"):
            named.write_batch(pa.table({"value": pa.concat_arrays([values, pa.array([b"x"])])}))
    assert stream.to_arrow(columns=["_number"]).num_rows == count


@pytest.mark.parametrize(("schema", "value"), [(None, bytes(100_000)), (pa.schema({"text": pa.string()}), {"text": "x" * 100_000})])
def test_events_given_one_by_one_count_twice(local_store: hw.Store, schema: pa.Schema | None, value: Any) -> None:
    with local_store.create_stream("a/x", schema=schema).writer() as writer, blocked(local_store) as let_go:
        for _ in range(4):
            writer.write(value)
        wait_until(lambda: local_store._flusher._intake.buffered_bytes >= 400_000)
        with writer._lane.lock:
            writer._lane.close_run()
        assert 800_000 < local_store._flusher._intake.buffered_bytes < 810_000
        let_go()


@pytest.mark.parametrize(("segments", "least", "most"), [(1, 12, 17), (16, 24, 34)])
def test_a_flush_to_many_segments_is_larger(
    local_store: hw.Store, monkeypatch: pytest.MonkeyPatch, segments: int, least: int, most: int
) -> None:
    stream = local_store.create_stream("a/x", scaling=hw.Scaling.fixed(segments))
    batch = pa.table({"value": [bytes(1000)] * 4000, "key": range(4000)})
    may_go_on, lengths = threading.Event(), list[int]()
    store_blocks = pending.Session.store

    def store(session: pending.Session, index: int, blocks: Any) -> tuple[int, str, int]:
        assert lengths or may_go_on.wait(WAIT_SECONDS)
        lengths.append(blocks.length)
        return store_blocks(session, index, blocks)

    with stream.writer() as writer:
        writer.write(b"so that the segments are known").result()
        monkeypatch.setattr(pending.Session, "store", store)
        acks = [writer.write_batch(batch, key="key") for _ in range(16)]
        may_go_on.set()
        assert sum(item.end - item.start for ack in acks for item in ack.result(WAIT_SECONDS)) == 64_000
    assert least << 20 < max(lengths) < most << 20


@pytest.mark.slow
def test_a_full_buffer_blocks_and_memory_stays_bounded(local_store: hw.Store) -> None:
    stream = local_store.create_stream("a/x")
    value, given = bytes(256 * 1024), [0]
    limit = BUFFERED_BYTES // 2 // len(value)  # the bytes of an event given alone count twice
    total = limit + 100

    def write() -> None:
        for _ in range(total):
            # A copy: otherwise the buffer would hold one value many times over, and cost nothing.
            writer.write(bytes(bytearray(value)))
            given[0] += 1

    tracemalloc.start()
    try:
        with stream.writer() as writer, blocked(local_store) as let_go, ThreadPoolExecutor(1) as pool:
            writing = pool.submit(write)
            wait_until(lambda: given[0] >= limit - 8)
            seen = -1
            while seen != given[0]:  # until it stands still
                seen = given[0]
                time.sleep(0.3)
            assert limit - 8 <= seen <= limit + 8, "it stops at the limit"
            assert tracemalloc.get_traced_memory()[1] < 3 * BUFFERED_BYTES
            let_go()
            writing.result(WAIT_SECONDS)
    finally:
        tracemalloc.stop()
    assert sum(item.count for item in stream.ranges()) == total


def test_bytes_given_in_small_pieces_take_no_more_memory_than_they_are_counted_as(local_store: hw.Store) -> None:
    stream = local_store.create_stream("a/bytes", kind="bytes")
    tracemalloc.start()
    try:
        with stream.byte_writer() as writer, blocked(local_store) as let_go:
            for number in range(200_000):
                writer.write(b"%08d" % number)
            assert tracemalloc.get_traced_memory()[0] < 8 * MIB
            let_go()
    finally:
        tracemalloc.stop()
    assert stream.byte_reader(0).readall() == b"".join(b"%08d" % number for number in range(200_000))
