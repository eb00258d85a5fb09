"""Writing: keys, times, types, acks, named writers, limits, and failures that touch nobody else."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import headwater as hw
from headwater.catalog.flushes import Flush
from headwater.model.limits import BATCH_BYTES, BUFFERED_BYTES, EVENT_BYTES, KEY_BYTES
from headwater.runtime import failpoints
from headwater.segments import pending
from headwater.segments.engine import Engine
from headwater.segments.lanes import Run

MIB = 1024 * 1024
WAIT_SECONDS = 60.0


@pytest.fixture
def store(tmp_path: Path, catalog_url: str | None) -> Iterator[hw.Store]:
    with hw.open(tmp_path / "store", catalog=catalog_url) as store:
        yield store


@pytest.fixture
def local_store(tmp_path: Path) -> Iterator[hw.Store]:
    """For what does not depend on the catalog."""
    with hw.open(tmp_path / "store") as store:
        yield store


@pytest.fixture
def wide(store: hw.Store) -> hw.Stream:
    return store.create_stream("a/wide", scaling=hw.Scaling.fixed(4))


def values(stream: hw.Stream) -> list[Any]:
    return [event.value for event in stream.read()]


def batch(*rows: bytes) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(rows, pa.binary())], names=["value"])


@contextmanager
def blocked(store: hw.Store) -> Iterator[Callable[[], None]]:
    """Hold the catalog's lock, as another process may: nothing can be committed. The block's value lets go of it."""
    held, let_go = threading.Event(), threading.Event()

    def hold(tx: Any) -> None:
        if store._catalog is not None:
            tx.run("LOCK TABLE session IN EXCLUSIVE MODE")  # on SQLite to be in a transaction is to hold the lock
        held.set()
        assert let_go.wait(WAIT_SECONDS)

    database = store._engine.database
    with ThreadPoolExecutor(1) as pool:
        holder = pool.submit(database.write, hold)
        assert held.wait(WAIT_SECONDS)
        try:
            yield let_go.set
        finally:
            let_go.set()
            holder.result(WAIT_SECONDS)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.002)


# Values, keys, times.


def test_values_are_bytes_or_text(store: hw.Store) -> None:
    stream = store.create_stream("a/x")
    given: list[Any] = [b"bytes", "täxt", b"", "", bytearray(b"array"), memoryview(b"view"), bytes(range(256))]
    with stream.writer() as writer:
        for value in given:
            writer.write(value)
    assert values(stream) == [b"bytes", "täxt".encode(), b"", b"", b"array", b"view", bytes(range(256))]


def test_one_key_by_every_way_of_giving_it_lands_in_one_segment(wide: hw.Stream) -> None:
    texts = [str(number) for number in range(-5, 30)]
    with wide.writer() as writer:
        places = {text: writer.write("w", key=text).result(WAIT_SECONDS).segment for text in texts}
        for text in texts:
            for key in (text.encode(), int(text)):
                assert writer.write("w", key=key).result(WAIT_SECONDS).segment == places[text]
        numbers = [int(text) for text in texts]
        columns = [
            pa.array(texts), pa.array(texts, pa.large_string()), pa.array(texts, pa.string_view()), pa.array(texts).dictionary_encode(),
            pa.array(numbers), pa.array(numbers, pa.int8()),
            pa.array([text.encode() for text in texts]), pa.array([text.encode() for text in texts], pa.large_binary()),
        ]  # fmt: skip
        for column in columns:
            table = pa.table({"value": pa.array([b"b"] * len(texts)), "id": column})
            found = writer.write_batch(table, key="id").result(WAIT_SECONDS)
            assert sum(item.count for item in found) == len(texts)
    assert len(set(places.values())) == 4
    read = list(wide.read())
    assert {event.key for event in read} == {text.encode() for text in texts}
    assert all(event.position.segment == places[event.key.decode()] for event in read)
    assert len(read) == len(texts) * (3 + len(columns))


def test_events_without_a_key_go_anywhere_and_say_so(wide: hw.Stream) -> None:
    with wide.writer() as writer:
        writer.write("none")
        writer.write("empty", key="")
        writer.write_batch(pa.table({"value": [b"null", b"key"], "id": [None, "k"]}), key="id")
        writer.write_batch(batch(b"keyless"))
    assert {event.value: event.key for event in wide.read()} == {
        b"none": None,
        b"empty": b"",
        b"null": None,
        b"key": b"k",
        b"keyless": None,
    }


@pytest.mark.parametrize(
    "key", [True, 1.5, [], object(), "\ud800", b"k" * (KEY_BYTES + 1)], ids=["bool", "float", "list", "object", "half", "long"]
)
def test_other_keys_are_refused_and_nothing_is_stored(local_store: hw.Store, key: Any) -> None:
    stream = local_store.create_stream("a/x")
    with stream.writer() as writer:
        with pytest.raises(hw.InvalidRequestError):
            writer.write("x", key=key)
        writer.write("y", key="k" * KEY_BYTES)
    assert values(stream) == [b"y"]


def test_event_time_is_what_was_given_else_when_it_was_appended(store: hw.Store) -> None:
    stream = store.create_stream("a/x")
    before = datetime.now(UTC)
    berlin = timezone(timedelta(hours=2))
    with stream.writer() as writer:
        writer.write("given", time=datetime(2020, 1, 1, 12, 0, 0, 123456, tzinfo=berlin))
        writer.write("not given")
        times = pa.array([datetime(1960, 1, 1, tzinfo=UTC), None], pa.timestamp("ms", "Europe/Berlin"))
        writer.write_batch(pa.table({"value": [b"batch", b"null"], "_time": times}))
        writer.write_batch(batch(b"no column"))
    found = {event.value.decode(): event.time for event in stream.read()}
    assert found["given"] == datetime(2020, 1, 1, 10, 0, 0, 123456, tzinfo=UTC)
    assert found["batch"] == datetime(1960, 1, 1, tzinfo=UTC)
    now = datetime.now(UTC)
    slack = timedelta(seconds=1)  # the catalog's clock is not ours
    for name in ("not given", "null", "no column"):
        assert before - slack <= found[name] <= now + slack
    assert all(value.tzinfo is not None for value in found.values())
    assert stream.to_arrow()["_time"].to_pylist() == list(found.values())


@pytest.mark.parametrize(
    "when", [datetime(2020, 1, 1), "2020-01-01", 0, date(2020, 1, 1), datetime(2020, 1, 1, tzinfo=UTC).timetz()], ids=repr
)
def test_a_time_that_is_no_moment_is_refused_and_does_no_harm(local_store: hw.Store, when: Any) -> None:
    stream = local_store.create_stream("a/x")
    with stream.writer() as writer, stream.writer() as neighbour:
        neighbour.write("before")
        with pytest.raises(hw.InvalidRequestError, match="datetime with a zone"):
            writer.write("x", time=when)
        neighbour.write("after")
    assert values(stream) == [b"before", b"after"]


@pytest.mark.parametrize(("when", "hours"), [(datetime.min, 5), (datetime.max, -5)], ids=["first", "last"])
def test_a_time_that_no_reader_could_get_is_refused(local_store: hw.Store, when: datetime, hours: int) -> None:
    stream = local_store.create_stream("a/x")
    beyond, within = (when.replace(tzinfo=timezone(timedelta(hours=offset))) for offset in (hours, -hours))
    with stream.writer() as writer, local_store.transaction() as tx:
        for give in (writer.write, lambda value, time: tx.write("a/x", value, time=time)):
            with pytest.raises(hw.InvalidRequestError, match="years 1 to 9999"):
                give(b"x", time=beyond)
            give(b"x", time=within)
        with pytest.raises(hw.InvalidRequestError, match="years 1 to 9999"):
            writer.note_time(beyond)
    assert [event.time for event in stream.read()] == [within] * 2


@pytest.mark.parametrize("kind", [pa.timestamp("us"), pa.int64(), pa.string(), pa.timestamp("ns", "UTC")], ids=str)
def test_a_column_of_times_that_can_not_be_kept_is_refused(local_store: hw.Store, kind: pa.DataType) -> None:
    stream = local_store.create_stream("a/x")
    times = pa.array([1_234_567]).cast(pa.int64()).cast(kind) if kind != pa.string() else pa.array(["now"])
    with stream.writer() as writer, pytest.raises(hw.InvalidRequestError, match="_time"):
        writer.write_batch(pa.table({"value": [b"x"], "_time": times}))
    assert values(stream) == []


# Typed streams.


class Colour(StrEnum):
    RED = "red"


TYPED = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        ("name", pa.string()),
        ("price", pa.decimal128(12, 3)),
        ("at", pa.timestamp("us", "UTC")),
        ("day", pa.date32()),
        ("ok", pa.bool_()),
        ("ratio", pa.float64()),
        ("raw", pa.binary()),
        ("tags", pa.list_(pa.string())),
        ("place", pa.struct([("lat", pa.float64()), ("names", pa.list_(pa.struct([("lang", pa.string())])))])),
        ("extra", pa.map_(pa.string(), pa.int64())),
    ]
)
FULL = {
    "id": 1,
    "name": "ü",
    "price": Decimal("12345.678"),
    "at": datetime(2024, 2, 29, 1, 2, 3, 4, tzinfo=UTC),
    "day": date(2024, 2, 29),
    "ok": True,
    "ratio": -0.5,
    "raw": b"\0\xff",
    "tags": ["a", None, ""],
    "place": {"lat": 1.5, "names": [{"lang": "de"}, {"lang": None}]},
    "extra": [("a", 1), ("b", None)],
}
EMPTY = dict.fromkeys(FULL) | {"id": 2}


def test_typed_events_are_written_as_mappings_and_as_batches_and_read_as_both(store: hw.Store) -> None:
    stream = store.create_stream("a/t", schema=TYPED, scaling=hw.Scaling.fixed(2))
    with stream.writer() as writer:
        writer.write(FULL, key="k")
        writer.write({"id": 2}, key="k")
        writer.write({**EMPTY, "extra": {"c": 3}}, key="k")
        writer.write_batch(pa.Table.from_pylist([FULL, EMPTY], schema=TYPED), key="id")
        writer.write_batch(pa.RecordBatch.from_pylist([{"id": 2}], schema=pa.schema([("id", pa.int64())])))
    by_key: dict[Any, list[Any]] = {}
    for event in stream.read():
        by_key.setdefault(event.key, []).append(event.value)
    assert by_key == {b"k": [FULL, EMPTY, {**EMPTY, "extra": [("c", 3)]}], b"1": [FULL], b"2": [EMPTY], None: [EMPTY]}
    table = stream.to_arrow()
    assert table.schema.names == [*TYPED.names, "_key", "_time", "_segment", "_number"]
    assert sorted(table.select(TYPED.names).to_pylist(), key=repr) == sorted(
        (value for found in by_key.values() for value in found), key=repr
    )


def test_a_mapping_may_be_changed_once_it_was_given(store: hw.Store) -> None:
    stream = store.create_stream("a/t", schema=pa.schema([("n", pa.int64()), ("list", pa.list_(pa.int64()))]))
    flat = store.create_stream("a/f", schema=pa.schema([("n", pa.int64())]))
    row: dict[str, Any] = {"list": []}
    with stream.writer() as writer, flat.writer() as flat_writer:
        for number in range(500):
            row["n"] = number
            row["list"][:] = [number]
            writer.write(row)
            flat_writer.write({"n": number})
        reused: dict[str, Any] = {}
        for number in range(500, 1000):
            reused["n"] = number
            flat_writer.write(reused)
    assert values(stream) == [{"n": n, "list": [n]} for n in range(500)]
    assert values(flat) == [{"n": n} for n in range(1000)]


def test_a_row_that_does_not_fit_is_refused_at_once_and_alone(local_store: hw.Store) -> None:
    stream = local_store.create_stream("a/t", schema=TYPED)
    wrong: list[Any] = [b"x", "x", None, 7, [("id", 1)], {}, {"id": None}, {"id": "1"}, {"id": 1, "what": 2}, {"id": 1, "price": 1.5}]
    wrong += [{"id": 1, "tags": "abc"}, {"id": 1, "place": {"lat": "x"}}, {"id": 1, "place": [("lat", 1.0)]}, {"id": 1, "extra": [None]}]
    with stream.writer() as writer:
        writer.write({"id": 1, "place": {"lat": 1.0}})
        for row in wrong:
            with pytest.raises(hw.InvalidRequestError):
                writer.write(row)
        writer.write({"id": 2})
    assert [value["id"] for value in values(stream)] == [1, 2]


def test_what_is_nested_is_checked_by_the_call_that_gives_it(local_store: hw.Store) -> None:
    item = pa.field("item", pa.int32(), nullable=False)
    schema = pa.schema([("st", pa.struct([item.with_name("a")])), ("l", pa.list_(item)), ("f", pa.list_(item, 1))])
    stream = local_store.create_stream("a/t", schema=schema)
    good: dict[str, Any] = {"st": {"a": 1}, "l": [1], "f": [1]}
    wrong: list[tuple[dict[str, Any], str]]
    wrong = [({"st": {}}, r"'st\.a'"), ({"st": {"a": None}}, r"'st\.a'"), ({"l": [1, None]}, r"'l\.item'"), ({"f": [None]}, r"'f\.item'")]
    with stream.writer() as writer, local_store.transaction() as tx:
        for row, said in wrong:
            table = pa.Table.from_pylist([good, {"l": None}, row], schema=schema)
            for give in (writer.write, lambda row: tx.write("a/t", row)):
                with pytest.raises(hw.InvalidRequestError, match=f"{said}.*not nullable"):
                    give(row)
            for give_batch in (writer.write_batch, lambda table: tx.write_batch("a/t", table)):
                with pytest.raises(hw.InvalidRequestError, match=f"{said}.*not nullable"):
                    give_batch(table)
                give_batch(table.slice(0, 2))
        with pytest.raises(hw.InvalidRequestError, match=r"no column is called 'st\.zz'"):
            writer.write({"st": {"a": 1, "zz": "lost"}})
        # Lists that are nullable all through, of which one has a null.
        with pytest.raises(hw.InvalidRequestError, match=r"'l\.item' has 1 nulls"):
            writer.write_batch(pa.table({"l": pa.array([[1], [None, 2]], pa.list_(pa.int8()))}))
        writer.write_batch(pa.table({"l": pa.array([[1], None], pa.list_(pa.int8()))}))
    local_store.run_upkeep()
    assert {repr(value) for value in values(stream)} == {repr(dict.fromkeys(good) | row) for row in (good, {}, {"l": [1]})}


def test_a_row_is_any_mapping_and_its_values_may_be_of_enums_and_numpy(local_store: hw.Store) -> None:
    schema = pa.schema([("id", pa.int64()), ("s", pa.string()), ("st", pa.struct([("f", pa.float64())])), ("l", pa.list_(pa.int64()))])
    stream = local_store.create_stream("a/t", schema=schema)
    row = MappingProxyType({"id": np.int64(5), "s": Colour.RED, "st": MappingProxyType({"f": np.float64(1.5)}), "l": np.array([1, 2])})
    with stream.writer() as writer, local_store.transaction() as tx:
        writer.write(row, key=Colour.RED)
        tx.write("a/t", row, key=np.str_("red"))
    assert [(event.key, event.value) for event in stream.read()] == [(b"red", {"id": 5, "s": "red", "st": {"f": 1.5}, "l": [1, 2]})] * 2


def test_a_batch_in_other_units_is_stored_if_no_digit_is_lost(local_store: hw.Store) -> None:
    schema = pa.schema([("at", pa.timestamp("us", "UTC")), ("took", pa.list_(pa.duration("ms"))), ("sum", pa.decimal128(10, 2))])
    stream = local_store.create_stream("a/t", schema=schema)
    with stream.writer() as writer:
        # As pandas has it.
        nanoseconds = pa.timestamp("ns", "Etc/UTC"), pa.list_(pa.duration("ns")), pa.decimal128(2, 1)
        values = [[1_000, None], [[2_000_000], []], [Decimal("1.5"), None]]
        writer.write_batch(pa.table([pa.array(*item) for item in zip(values, nanoseconds, strict=True)], names=schema.names))
        for name, column in (("at", pa.array([1_001], nanoseconds[0])), ("took", pa.array([[2_000_001]], nanoseconds[1]))):
            with pytest.raises(hw.InvalidRequestError, match=f"column '{name}' can't be stored as .* would lose data"):
                writer.write_batch(pa.table({name: column}))
    expected = pa.table([pa.array(*item) for item in zip([[1, None], [[2], []], values[2]], schema.types, strict=True)], schema=schema)
    assert stream.to_arrow(columns=schema.names).equals(expected)


def test_a_batch_that_does_not_fit_is_refused_at_once_and_alone(local_store: hw.Store) -> None:
    stream = local_store.create_stream("a/t", schema=pa.schema([pa.field("id", pa.int64(), nullable=False), ("name", pa.string())]))
    opaque = local_store.create_stream("a/o")
    wrong: list[tuple[Any, str]] = [
        (pa.table({"name": ["x"]}), "'id' is missing"),
        (pa.table({"id": [1], "other": [2]}), "'other' is not in the stream's schema"),
        (pa.table({"id": ["1"]}), "'id' is string, not int64"),
        (pa.table({"id": [1.5]}), "'id' is double"),
        (pa.table({"id": [1, None]}), "1 nulls, and is not nullable"),
        (pa.RecordBatch.from_arrays([pa.array([1]), pa.array([2])], names=["id", "id"]), "a column twice"),
        ([{"id": 1}], "RecordBatch or Table, not list"),
        (None, "RecordBatch or Table"),
    ]
    with stream.writer() as writer, opaque.writer() as opaque_writer:
        for given, said in wrong:
            with pytest.raises(hw.InvalidRequestError, match=said):
                writer.write_batch(given)
        with pytest.raises(hw.InvalidRequestError, match="no column 'key'"):
            writer.write_batch(pa.table({"id": [1]}), key="key")
        with pytest.raises(hw.InvalidRequestError, match="can't be the routing key"):
            writer.write_batch(pa.table({"id": [1], "key": [1.5]}), key="key")
        with pytest.raises(hw.InvalidRequestError, match="'value' is missing"):
            opaque_writer.write_batch(pa.table({"id": [1]}))
        with pytest.raises(hw.InvalidRequestError, match="nulls"):
            opaque_writer.write_batch(pa.table({"value": pa.array([b"x", None])}))
        no_events: tuple[Any, ...] = (7, None, {"value": b"x"}, [b"x"], "\ud800")
        for row in no_events:
            with pytest.raises(hw.InvalidRequestError):
                opaque_writer.write(row)
        writer.write_batch(pa.table({"id": pa.array([7], pa.int8()), "name": pa.array([None], pa.null())}))
    assert values(stream) == [{"id": 7, "name": None}] and values(opaque) == []


def test_sliced_and_chunked_tables_are_stored_as_they_read(wide: hw.Stream) -> None:
    rows = [b"%d" % n for n in range(100)]
    table = pa.concat_tables([pa.table({"value": rows[:33], "id": range(33)}), pa.table({"value": rows[33:], "id": range(33, 100)})])
    with wide.writer() as writer:
        ack = writer.write_batch(table.slice(10, 50), key="id")
        assert sum(item.count for item in ack.result(WAIT_SECONDS)) == 50
        assert writer.write_batch(table.slice(0, 0), key="id").result(WAIT_SECONDS) == []
    assert sorted(values(wide)) == sorted(rows[10:60])
    assert all(event.key == event.value for event in wide.read())


# Acks.


def test_an_ack_gives_the_position_of_its_event(wide: hw.Stream) -> None:
    with wide.writer() as writer:
        acks = [writer.write(f"{n}", key=n) for n in range(100)]
        found = {acks[n].result(WAIT_SECONDS): b"%d" % n for n in range(100)}
    assert all(isinstance(position, hw.Position) for position in found)
    assert {event.position: event.value for event in wide.read()} == found
    assert all(ack.done and not ack.duplicate for ack in acks)


def test_an_ack_of_a_batch_gives_the_ranges_that_hold_it(wide: hw.Stream) -> None:
    with wide.writer() as writer:
        writer.write("before", key=1)
        ack = writer.write_batch(pa.table({"value": [b"%d" % n for n in range(50)], "id": range(50)}), key="id")
        writer.write("after", key=1)
        ranges = ack.result(WAIT_SECONDS)
    assert all(isinstance(item, hw.SegmentRange) for item in ranges)
    assert sorted(value for item in ranges for value in item.to_arrow()["value"].to_pylist()) == sorted(b"%d" % n for n in range(50))


def test_an_event_is_readable_when_its_ack_is_there(store: hw.Store) -> None:
    stream = store.create_stream("a/x")
    with stream.writer() as writer:
        for number in range(5):
            position = writer.write(f"{number}").result(WAIT_SECONDS)
            assert position == (0, number)
            assert len(values(stream)) == number + 1


def test_an_ack_that_is_not_there_in_time_can_be_asked_again(local_store: hw.Store) -> None:
    stream = local_store.create_stream("a/x")
    with stream.writer() as writer:
        with blocked(local_store):
            ack = writer.write("x")
            assert not ack.done
            with pytest.raises(TimeoutError, match="stay buffered"):
                ack.result(timeout=0.05)
        assert ack.result(WAIT_SECONDS) == (0, 0)
    assert values(stream) == [b"x"]


def test_flush_returns_when_all_is_durable(store: hw.Store, tmp_path: Path, catalog_url: str | None) -> None:
    stream = store.create_stream("a/x")
    with stream.writer() as writer:
        writer.flush()
        for number in range(1000):
            writer.write(b"%d" % number)
        writer.flush()
        with hw.open(tmp_path / "store", catalog=catalog_url, create=False) as other:
            assert values(other.stream("a/x")) == [b"%d" % n for n in range(1000)]


# Closing.


def test_closing_a_writer_or_its_store_flushes(tmp_path: Path) -> None:
    with hw.open(tmp_path / "store") as store:
        stream = store.create_stream("a/x")
        writer = stream.writer()
        writer.write("one")
        writer.close()
        writer.close()
        other = stream.writer()
        other.write("two")
        third = stream.writer("named")
        third.write("three")
    with hw.open(tmp_path / "store") as store:
        assert sorted(values(store.stream("a/x"))) == [b"one", b"three", b"two"]


def test_a_writer_left_by_an_exception_still_stores_what_it_was_given(local_store: hw.Store) -> None:
    stream = local_store.create_stream("a/x")
    with pytest.raises(RuntimeError, match="user code"), stream.writer() as writer:
        writer.write("one")
        raise RuntimeError("user code")
    assert values(stream) == [b"one"]


def test_a_closed_writer_says_so_whatever_other_writers_do(local_store: hw.Store) -> None:
    stream = local_store.create_stream("a/x")
    closed = stream.writer()
    closed.close()
    with stream.writer() as writer:
        for number in range(200):
            writer.write(b"%d" % number)  # there is nearly always a run open, which both would share
            with pytest.raises(hw.InvalidRequestError, match="writer is closed"):
                closed.write("too late")
    with pytest.raises(hw.InvalidRequestError, match="writer is closed"):
        closed.write_batch(batch(b"too late"))
    assert len(values(stream)) == 200


def test_an_abandoned_writer_warns_and_loses_nothing(tmp_path: Path) -> None:
    with hw.open(tmp_path / "store") as store:
        writer = store.create_stream("a/x").writer()
        writer.write("one")
        with pytest.warns(ResourceWarning, match="a/x was abandoned"):
            del writer
    with hw.open(tmp_path / "store") as store:
        assert values(store.stream("a/x")) == [b"one"]


def test_a_closed_writer_does_not_warn(local_store: hw.Store) -> None:
    writer = local_store.create_stream("a/x").writer()
    writer.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del writer
        gc.collect()


EXIT = """
import sys, headwater as hw
good, bad = hw.open(sys.argv[1]), [hw.open(f"{sys.argv[1]}-{n}") for n in range(3)]
writers = [store.create_stream("a/x").writer() for store in bad]
keep = good.create_stream("a/x").writer()
for store in bad:
    store.stream("a/x").seal()
for writer in writers:
    writer.write("can't be stored")
keep.write("at the end")
"""


@pytest.mark.slow
def test_the_end_of_the_interpreter_flushes_every_store_also_when_others_fail(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", EXIT, str(tmp_path / "store")], capture_output=True, text=True, timeout=WAIT_SECONDS)
    assert "SealedError" in done.stderr
    with hw.open(tmp_path / "store", create=False) as store:
        assert values(store.stream("a/x")) == [b"at the end"]


# Named writers.


def test_a_named_writer_takes_the_source_s_own_numbers_with_gaps(store: hw.Store) -> None:
    stream = store.create_stream("a/x", scaling=hw.Scaling.fixed(2))
    with stream.writer("source-1") as writer:
        assert (writer.id, writer.last_number) == ("source-1", 0)
        first = writer.write("10", number=10, key="a")
        writer.write("20", number=20, key="b")
        writer.write("21", key="c")
        again = [writer.write("no", number=number) for number in (1, 10, 15, 21)]
        writer.write_batch(batch(b"30a", b"30b"), number=30)
        batch_again = writer.write_batch(batch(b"no"), number=30)
        assert not first.duplicate and all(ack.duplicate for ack in [*again, batch_again])
        assert [ack.result(WAIT_SECONDS) for ack in [*again, batch_again]] == [None] * 5
        writer.flush()
        assert writer.last_number == 30
    with stream.writer("source-1") as writer:
        assert writer.last_number == 30
        assert writer.write("no", number=30).duplicate
        assert not writer.write("31").duplicate
    with stream.writer("source-2") as other:
        assert other.last_number == 0
    assert sorted(values(stream)) == [b"10", b"20", b"21", b"30a", b"30b", b"31"]


@pytest.mark.parametrize("number", [0, -1, True, 1.0, "1", 2**62])
def test_what_is_no_source_number_is_refused(local_store: hw.Store, number: Any) -> None:
    stream = local_store.create_stream("a/x")
    with stream.writer("w") as writer:
        with pytest.raises(hw.InvalidRequestError, match="source number"):
            writer.write("x", number=number)
        with pytest.raises(hw.InvalidRequestError, match="source number"):
            writer.write_batch(batch(b"x"), number=number)
        writer.write("y", number=2**62 - 1)
    assert values(stream) == [b"y"]


def test_only_a_named_writer_has_numbers(local_store: hw.Store) -> None:
    stream = local_store.create_stream("a/x")
    with stream.writer() as writer:
        for number in range(1, 50):
            writer.write("there is a run open now")
            with pytest.raises(hw.InvalidRequestError, match="only a named writer"):
                writer.write("x", number=number)
        with pytest.raises(hw.InvalidRequestError, match="only a named writer"):
            writer.write_batch(batch(b"x"), number=1)
        with pytest.raises(hw.InvalidRequestError, match="only a named writer"):
            _ = writer.last_number
        assert writer.id is None
    with stream.writer("w") as writer, pytest.raises(hw.InvalidRequestError, match="no rows"):
        writer.write_batch(batch(), number=1)
    id: Any
    for id in ("", "a/b", "a b", 7):
        with pytest.raises(hw.InvalidRequestError, match="writer"):
            stream.writer(id)


def test_opening_a_writer_again_in_this_process_fences_the_older_one(store: hw.Store) -> None:
    stream = store.create_stream("a/x")
    older = stream.writer("w")
    older.write("one", number=1)
    older.flush()
    newer = stream.writer("w")
    assert newer.last_number == 1
    ack = older.write("stale", number=2)
    with pytest.raises(hw.FencedError, match="'w'"):
        older.flush()
    for call in (
        lambda: ack.result(WAIT_SECONDS),
        lambda: older.write("stale", number=3),
        lambda: older.write_batch(batch(b"stale")),
    ):
        with pytest.raises(hw.FencedError):
            call()
    older.close()  # That it was fenced was told.
    newer.write("two", number=2)
    newer.close()
    assert values(stream) == [b"one", b"two"]


@pytest.mark.parametrize("tell", ["flush", "write", None])
def test_what_ended_a_writer_is_told_once(local_store: hw.Store, tell: str | None) -> None:
    stream = local_store.create_stream("a/x")
    older = stream.writer("w")
    stream.writer("w").close()
    ack = older.write("stale")
    until(lambda: ack.done)
    if tell is not None:
        with pytest.raises(hw.FencedError):
            older.flush() if tell == "flush" else older.write("more")
        older.close()
    else:
        with pytest.raises(hw.FencedError):
            older.close()
    older.close()
    local_store.close()


TAKE_OVER = """
import sys, headwater as hw
with hw.open(sys.argv[1], catalog=sys.argv[2] or None) as store, store.stream("a/x").writer("w") as writer:
    print(writer.last_number)
    writer.write("theirs", number=5)
"""


@pytest.mark.slow
def test_opening_a_writer_in_another_process_fences_the_older_one(store: hw.Store, tmp_path: Path, catalog_url: str | None) -> None:
    stream = store.create_stream("a/x")
    older = stream.writer("w")
    older.write("ours", number=3)
    older.flush()
    command = [sys.executable, "-c", TAKE_OVER, str(tmp_path / "store"), catalog_url or ""]
    assert subprocess.run(command, capture_output=True, text=True, check=True, timeout=WAIT_SECONDS).stdout == "3\n"
    older.write("stale", number=4)
    with pytest.raises(hw.FencedError):
        older.flush()
    older.abandon()
    assert values(stream) == [b"ours", b"theirs"]


def test_what_is_stored_of_a_named_writer_is_always_a_prefix(store: hw.Store) -> None:
    """Looked at again and again while it writes and its segments are split and merged under it."""
    stream = store.create_stream("a/x", scaling=hw.Scaling.fixed(2))
    total, done = 3000, threading.Event()

    def scale() -> int:
        times = 0
        while not done.is_set():
            opened = sorted(stream.segments(), key=lambda segment: segment.start)
            if len(opened) > 3:
                stream.merge([opened[0].number, opened[1].number])
            else:
                stream.split(opened[times % len(opened)].number)
            times += 1
        return times

    def look() -> int:
        looks = 0
        while not done.is_set():
            found = sorted(int(value) for value in values(stream))
            assert found == list(range(1, len(found) + 1))
            looks += 1
        return looks

    with ThreadPoolExecutor(2) as pool, stream.writer("w") as writer:
        scaled, looked = pool.submit(scale), pool.submit(look)
        try:
            for number in range(1, total + 1):
                writer.write(b"%d" % number, key=number % 17, number=number)
                if number % 100 == 0:
                    writer.flush()
        finally:
            done.set()
        assert scaled.result(WAIT_SECONDS) > 1 and looked.result(WAIT_SECONDS) > 1
    by_key: dict[bytes, list[int]] = {}
    for event in stream.read():
        by_key.setdefault(event.key, []).append(int(event.value))
    assert all(found == sorted(found) for found in by_key.values())
    assert sorted(number for found in by_key.values() for number in found) == list(range(1, total + 1))


# Limits.


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
        until(lambda: local_store._flusher._buffered_bytes >= 400_000)
        with writer._lane.lock:
            writer._lane.close_run()
        assert 800_000 < local_store._flusher._buffered_bytes < 810_000
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
            until(lambda: given[0] >= limit - 8)
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


# Failures.


@pytest.mark.parametrize(
    ("size", "begun"), [(10, False), (200_000, False), (200_000, True)], ids=["inline", "in the journal", "while they are written"]
)
def test_events_that_cannot_be_encoded_fail_alone(local_store: hw.Store, monkeypatch: pytest.MonkeyPatch, size: int, begun: bool) -> None:
    bad, good = local_store.create_stream("a/bad"), local_store.create_stream("a/good")
    encode = pending._encode

    def fail() -> Any:
        raise pa.ArrowInvalid("no such bytes")

    def refuse(lane: Any, *rest: Any) -> Any:
        if lane.stream.name == "a/bad":
            if not begun:
                fail()
            for _, block in (found := encode(lane, *rest))[0]:
                block.make = fail
            return found
        return encode(lane, *rest)

    monkeypatch.setattr(pending, "_encode", refuse)
    failing, neighbour = bad.writer(), good.writer()
    with blocked(local_store):
        lost = [failing.write(bytes(size)) for _ in range(3)]
        kept = [neighbour.write(bytes(size)) for _ in range(3)]
    for ack in lost:
        with pytest.raises(hw.HeadwaterError, match="no such bytes"):
            ack.result(WAIT_SECONDS)
    assert [ack.result(WAIT_SECONDS) for ack in kept] == [(0, 0), (0, 1), (0, 2)]
    with pytest.raises(hw.HeadwaterError, match="no such bytes"):
        failing.write(b"more")
    failing.abandon()
    neighbour.close()
    monkeypatch.undo()
    with bad.writer() as writer:
        assert writer.write(b"again").result(WAIT_SECONDS) == (0, 0)


def test_one_writer_s_failure_does_not_touch_its_neighbours_in_the_same_flush(store: hw.Store) -> None:
    good, doomed, deleted = (store.create_stream(f"a/{name}") for name in ("good", "doomed", "deleted"))
    writers = {stream.name: stream.writer() for stream in (doomed, good, deleted)}
    fenced, newer = good.writer("w"), good.writer("w")
    for writer in (*writers.values(), newer):
        writer.write("before")
        writer.flush()
    doomed.seal()
    deleted.seal()
    store.delete_stream("a/deleted")
    with blocked(store):
        # All of this is gathered while the catalog is held, and goes into one flush.
        acks = {name: writer.write("together", key="k") for name, writer in writers.items()}
        stale, fresh = fenced.write("stale"), newer.write("fresh")
    assert acks["a/good"].result(WAIT_SECONDS).number >= 2
    assert fresh.result(WAIT_SECONDS).segment == 0
    for ack, error in ((acks["a/doomed"], hw.SealedError), (acks["a/deleted"], hw.NotFoundError), (stale, hw.FencedError)):
        with pytest.raises(error):
            ack.result(WAIT_SECONDS)
    writers["a/good"].write("after")
    writers["a/good"].flush()
    for failed in (writers["a/doomed"], writers["a/deleted"], fenced):
        failed.abandon()
    assert sorted(values(good)) == [b"after", b"before", b"before", b"fresh", b"together"]
    assert values(doomed) == [b"before"]


def test_a_stream_sealed_while_many_write_loses_only_its_own_later_events(store: hw.Store) -> None:
    streams = [store.create_stream(f"a/{n}") for n in range(4)]
    acked: dict[str, list[bytes]] = {stream.name: [] for stream in streams}
    sealed = threading.Event()

    def write(stream: hw.Stream) -> None:
        writer = stream.writer()
        try:
            for number in range(300):
                value = b"%d" % number
                writer.write(value).result(WAIT_SECONDS)
                acked[stream.name].append(value)
                if number == 20 and stream is streams[0]:
                    stream.seal()
                    sealed.set()
        except hw.SealedError:
            writer.abandon()
        else:
            writer.close()

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(write, stream) for stream in streams]:
            future.result(WAIT_SECONDS)
    assert sealed.is_set()
    assert {stream.name: values(stream) for stream in streams} == acked
    assert [len(found) for found in acked.values()] == [21, 300, 300, 300]


def test_after_unavailable_events_stay_buffered_and_go_first_in_order(local_store: hw.Store) -> None:
    stream = local_store.create_stream("a/x")
    payload = bytes(100_000)  # too large for the catalog: it goes to the journal, which fails
    with stream.writer("w") as writer:
        failpoints.arm("journal.written=error@1")
        try:
            ack = writer.write(b"first" + payload)
            with pytest.raises(hw.UnavailableError):
                writer.flush()
        finally:
            failpoints.arm("")
        writer.write("second")
        writer.flush()
        assert ack.result(WAIT_SECONDS) == (0, 0)
        assert writer.last_number == 2
    assert [value[:6] for value in values(stream)] == [b"first\0", b"second"]


def test_after_any_other_error_the_writer_is_finished_and_another_goes_on(store: hw.Store) -> None:
    stream = store.create_stream("a/x")
    writer = stream.writer("w")
    stream.seal()
    ack = writer.write("x")
    with pytest.raises(hw.SealedError):
        writer.flush()
    for call in (lambda: writer.write("y"), lambda: writer.write_batch(batch(b"y")), lambda: ack.result(WAIT_SECONDS), writer.flush):
        with pytest.raises(hw.SealedError):
            call()
    writer.abandon()


def test_events_of_one_key_keep_their_order_across_splits_and_merges(store: hw.Store) -> None:
    stream = store.create_stream("a/x")
    with stream.writer() as writer:
        for round in range(12):
            for number in range(40):
                writer.write(b"%d" % (round * 40 + number), key=number % 7)
            opened = sorted(stream.segments(), key=lambda segment: segment.start)
            if round % 3 == 2:
                stream.merge([opened[0].number, opened[1].number])
            else:
                stream.split(opened[round % len(opened)].number)
            writer.write_batch(pa.table({"value": [b"%d" % (round * 40 + 39)], "k": [round % 7]}), key="k")
    by_key: dict[bytes, list[int]] = {}
    for event in stream.read():
        by_key.setdefault(event.key, []).append(int(event.value))
    assert sum(map(len, by_key.values())) == 12 * 41
    assert all(found == sorted(found) for found in by_key.values())


def test_threads_that_change_at_every_turn_lose_nothing_and_get_the_right_acks(local_store: hw.Store) -> None:
    """Events are put into an open run without a lock, while flushes close it: each ack points at its own event."""
    stream = local_store.create_stream("a/x", scaling=hw.Scaling.fixed(4))
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with stream.writer() as writer, ThreadPoolExecutor(5) as pool:
            ended = threading.Event()

            def write(thread: int) -> list[tuple[hw.Ack, bytes]]:
                given = [b"%d-%d" % (thread, number) for number in range(3000)]
                return [(writer.write(value, key=value), value) for value in given]

            def flush() -> None:
                while not ended.is_set():
                    writer.flush()

            flushing = pool.submit(flush)
            try:
                acks = [found for future in [pool.submit(write, thread) for thread in range(4)] for found in future.result()]
            finally:
                ended.set()
            flushing.result()
            expected = {ack.result(WAIT_SECONDS): value for ack, value in acks}
    finally:
        sys.setswitchinterval(before)
    assert len(expected) == 12_000
    assert {event.position: event.value for event in stream.read()} == expected


def test_a_flush_waits_for_a_thread_that_has_a_place_and_has_not_filled_it(local_store: hw.Store) -> None:
    """As a debugger can stop one there: the event is neither lost nor stored as nothing."""
    stream = local_store.create_stream("a/x")
    with stream.writer() as writer:
        writer.write(b"0").result(WAIT_SECONDS)
        with blocked(local_store):
            acks = [writer.write(b"%d" % number) for number in range(1, 4)]
            run = writer._lane.run
            assert run is not None
            place = next(run.places)
        with pytest.raises(TimeoutError):
            acks[0].result(0.2)
        run.values[place] = b"4"
        acks[0].result(WAIT_SECONDS)
    assert values(stream) == [b"0", b"1", b"2", b"3", b"4"]


def test_many_threads_share_one_writer(store: hw.Store) -> None:
    stream = store.create_stream("a/x", scaling=hw.Scaling.fixed(2))
    with stream.writer() as writer, ThreadPoolExecutor(4) as pool:

        def write(thread: int) -> None:
            for number in range(500):
                writer.write(b"%d" % number, key=thread)

        for future in [pool.submit(write, thread) for thread in range(4)]:
            future.result(WAIT_SECONDS)
    by_key: dict[bytes, list[int]] = {}
    for event in stream.read():
        by_key.setdefault(event.key, []).append(int(event.value))
    assert by_key == {b"%d" % thread: list(range(500)) for thread in range(4)}


# Who stores: the flusher's thread, or one who waits.


@pytest.fixture
def committed_by(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """The threads that committed a flush, one after the other."""
    threads: list[threading.Thread] = []
    commit_flush = Engine.commit_flush

    def noting(self: Engine, flush: Any) -> Any:
        threads.append(threading.current_thread())
        return commit_flush(self, flush)

    monkeypatch.setattr(Engine, "commit_flush", noting)
    return threads


def wait_until_idle(store: hw.Store) -> None:
    until(lambda: store._flusher._is_idle)


def test_who_waits_for_a_few_events_commits_them_while_the_flusher_is_idle(store: hw.Store, committed_by: list[threading.Thread]) -> None:
    stream = store.create_stream("a/x", scaling=hw.Scaling.fixed(2))
    for id in (None, "named"):
        with stream.writer(id) as writer:
            writer.write("first", key="k").result(WAIT_SECONDS)
            committed_by.clear()
            # Whoever is first; the flusher's thread, woken by `write`, may be.
            for number in range(50):
                wait_until_idle(store)
                assert writer.write(str(number), key="k").result().number == number + 1 + (51 if id else 0)
            assert committed_by.count(threading.current_thread()) > 10
            committed_by.clear()
            wait_until_idle(store)
            writer.write("with a deadline", key="other").result(WAIT_SECONDS)
            wait_until_idle(store)
            writer.write("x" * 100_000, key="other").result()
            assert threading.current_thread() not in committed_by
    assert [event.value for event in stream.read() if event.key == b"k"] == 2 * [b"first", *(b"%d" % number for number in range(50))]


def test_what_failed_is_told_to_all_who_wait_with_its_facts(local_store: hw.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with local_store.create_stream("a/x").writer() as writer:
        with monkeypatch.context() as patch:

            def fail(engine: Engine, flush: Flush) -> Any:
                raise hw.UnavailableError("no space left", path="/full")

            patch.setattr(Engine, "commit_flush", fail)
            ack = writer.write(b"1")
            for wait in (ack.result, writer.flush):
                with pytest.raises(hw.UnavailableError, match="no space left") as caught:
                    wait()
                assert caught.value.facts == {"path": "/full"}
        assert ack.result() == hw.Position(0, 0)


def test_what_came_while_another_thread_stored_is_stored_soon_also_if_that_one_could_not_tell(
    local_store: hw.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    flusher = local_store._flusher
    with local_store.create_stream("a/x").writer() as writer, local_store.create_stream("a/y").writer() as other:
        writer.write(b"begins the session").result()
        time.sleep(0.3)
        committing, go_on = threading.Event(), threading.Event()
        commit = Engine.commit_flush

        def slowly(engine: Engine, flush: Flush) -> Any:
            committing.set()
            assert go_on.wait(WAIT_SECONDS)
            return commit(engine, flush)

        monkeypatch.setattr(Engine, "commit_flush", slowly)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(lambda: writer.write(b"waited for").result())
            assert committing.wait(WAIT_SECONDS)
            ack = other.write(b"came meanwhile")
            time.sleep(0.1)
            monkeypatch.setattr(flusher._work, "notify", lambda n=1: None)  # As after a Ctrl-C in the one that waits.
            go_on.set()
            waiting.result(WAIT_SECONDS)
        deadline = time.monotonic() + 5
        while not ack.done and time.monotonic() < deadline:
            time.sleep(0.01)
        monkeypatch.undo()
        assert ack.done


def test_an_event_for_which_nobody_waits_is_stored_soon_also_right_after_acks(store: hw.Store) -> None:
    with store.create_stream("a/b").writer() as writer:
        for acks in (0, 1, 2, 50):
            for _ in range(acks):
                writer.write(b"waited for").result()
            ack = writer.write(b"not waited for")
            deadline = time.monotonic() + 1
            while not ack.done and time.monotonic() < deadline:
                time.sleep(0.001)
            assert ack.done, f"after {acks} acks"


@pytest.mark.parametrize("name", ["append.begun", "append.applied"])
def test_an_error_in_the_thread_that_waits_leaves_its_event_to_be_stored_once(local_store: hw.Store, name: str) -> None:
    stream = local_store.create_stream("a/x")
    with stream.writer() as writer:
        writer.write("first").result()
        for number in range(10):
            wait_until_idle(local_store)
            failpoints.arm(f"{name}=error@1")
            try:
                ack = writer.write(str(number))
                with suppress(hw.UnavailableError):
                    ack.result()
            finally:
                failpoints.arm("")
            assert ack.result(WAIT_SECONDS) == (0, number + 1)
    assert values(stream) == [b"first", *(b"%d" % number for number in range(10))]


def test_who_waits_finds_its_segment_sealed_and_its_event_goes_to_the_next_one(store: hw.Store) -> None:
    stream = store.create_stream("a/x")
    with stream.writer() as writer:
        writer.write("0", key="k").result()
        for number in range(1, 6):
            [segment] = [segment for segment in stream.segments() if segment.start == 0.0]
            stream.split(segment.number)
            wait_until_idle(store)
            place = writer.write(str(number), key="k").result()
            assert place.segment in {segment.number for segment in stream.segments()}
    assert values(stream) == [b"%d" % number for number in range(6)]


def test_a_ctrl_c_before_the_first_event_of_a_run_is_no_event(local_store: hw.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = local_store.create_stream("a/x")

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with stream.writer() as writer:
        for number in range(3):
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(Run, "put", interrupted)
                writer.write("lost")
            if number:
                writer.flush()
            writer.write(str(number)).result(WAIT_SECONDS)
    assert values(stream) == [b"0", b"1", b"2"]


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(3))
def test_what_threads_gave_before_a_close_is_stored_when_it_returns_and_the_rest_is_refused(local_store: hw.Store, attempt: int) -> None:
    stream = local_store.create_stream("a/closing")
    writer = stream.writer()
    given, refused = [0] * 6, []

    def write(index: int) -> None:
        try:
            while True:
                # Every other thread with text, which is not put into an open run as it is.
                writer.write(b"%d.%d" % (index, given[index]) if index % 2 else f"{index}.{given[index]}")
                given[index] += 1
        except hw.InvalidRequestError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=write, args=(index,)) for index in range(len(given))]
    for thread in threads:
        thread.start()
    while sum(given) < 5000:
        time.sleep(0.001)
    writer.close()
    stored = sum(segment.events for segment in stream.segments())
    for thread in threads:
        thread.join(WAIT_SECONDS)
    assert refused == ["this writer is closed"] * len(given)
    # One event of each thread may be on its way into a run that was open when the close began.
    assert stored <= sum(given) <= stored + len(given)
    local_store._flusher.close()
    assert sorted(values(stream)) == sorted(b"%d.%d" % (index, number) for index in range(len(given)) for number in range(given[index]))


def test_an_error_that_ended_a_writer_is_told_by_its_close_and_not_again_by_the_stores(tmp_path: Path) -> None:
    with hw.open(tmp_path / "store") as store:
        stream = store.create_stream("a/sealed")
        writer = stream.writer()
        writer.write(b"1").result()
        stream.seal()
        with pytest.raises(hw.SealedError):
            writer.write(b"2").result()
        with pytest.raises(hw.SealedError):
            writer.close()
        writer.close()
