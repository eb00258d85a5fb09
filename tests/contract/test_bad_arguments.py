"""Wrong arguments to public calls: each is refused at once with a sentence, nothing is stored, and the store goes on."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import headwater as hw
from headwater.check import check_store
from headwater.model.cuts import StreamCut
from tests.crash.processes import Place

pd: Any = pytest.importorskip("pandas")  # which has no types
HUGE = 10**5000


@pytest.fixture
def store(place: Place) -> Iterator[hw.Store]:
    with place.open(create=True) as store:
        with store.create_stream("a/x").writer() as writer:
            writer.write("1", "k")
            writer.write("2", "k")
        with store.create_stream("a/bytes", kind="bytes").byte_writer() as bytes_writer:
            bytes_writer.write(b"hello")
        yield store


def reading(store: hw.Store, **arguments: Any) -> object:
    with store.reader_group("g", ["a/x"]).reader("r", commit="manual") as reader:
        return reader.read(**arguments)


def reading_batch(store: hw.Store, **arguments: Any) -> object:
    with store.reader_group("g", ["a/x"]).reader("r", commit="manual") as reader:
        return reader.read_batch(**arguments)


def writing(store: hw.Store, *values: Any, **arguments: Any) -> object:
    with store.stream("a/x").writer() as writer:
        return writer.write(*values, **arguments)


def waiting(store: hw.Store, timeout: Any) -> object:
    """For an ack that is done, too."""
    stream = store.create_stream("b/acks")
    try:
        with stream.writer() as writer:
            ack = writer.write(b"x")
            writer.flush()
            return ack.result(timeout)
    finally:
        store.delete_stream("b/acks", seal=True)


def in_transaction(store: hw.Store, call: str, *values: Any, **arguments: Any) -> object:
    tx = store.transaction()
    try:
        return getattr(tx, call)(*values, **arguments)
    finally:
        tx.abort()


def updating(store: hw.Store, decide: Any) -> object:
    try:
        return store.synchronizer("b/state", 0, lambda state, update: update).update(decide)
    finally:
        assert store.revisioned("b/state").latest == 0
        store.delete_stream("b/state", seal=True)


def staging(store: hw.Store, updates: Any) -> object:
    try:
        return in_transaction(store, "update", store.synchronizer("b/state", 0, lambda state, update: 0), updates)
    finally:
        store.delete_stream("b/state", seal=True)


def cut(store: hw.Store, number: Any) -> hw.Cut:
    return hw.Cut(store.id, {"a/x": StreamCut(store.stream("a/x").id, {0: number})})


SECONDS = "is a number of seconds"
WHOLE = "is a whole number of at least"
LISTED = "is a list of"
FLAG = "is True or False, not"
ZONED = "a datetime with a zone"

#: What is called, what is given, and what is said of it.
CALLS: dict[str, tuple[Callable[[hw.Store, Any], object], list[Any], str]] = {
    # Times to wait.
    "reader.read": (lambda s, x: reading(s, timeout=x), [None, "1", math.nan, [], True, pd.NaT, HUGE], f"timeout {SECONDS}"),
    "reader.read_batch": (lambda s, x: reading_batch(s, timeout=x), [None, b"1", math.nan, timedelta(1)], f"timeout {SECONDS}"),
    "group.checkpoint": (lambda s, x: s.reader_group("g", ["a/x"]).checkpoint(x), [None, "1", math.nan, True], f"timeout {SECONDS}"),
    "ack.result": (waiting, ["1", math.nan, {}, np.array([1, 2])], f"timeout {SECONDS}"),
    "advance(wait)": (lambda s, x: s.advance(s.stream("a/x").head(), wait=x), [None, math.nan, "1"], f"wait {SECONDS}"),
    "upkeep_rounds": (lambda s, x: s.upkeep_rounds(x), [None, math.nan, "1", -1], f"every {SECONDS}"),
    # Numbers.
    "range(segment)": (
        lambda s, x: s.stream("a/x").range(x, 0, 1),
        [None, "0", -1, 1.0, True, np.int64(0)],
        f"a segment's number {WHOLE} 0",
    ),
    "range(start)": (lambda s, x: s.stream("a/x").range(0, x, 1), [None, "0", -1, 0.5, pd.NaT], f"the start of a range {WHOLE} 0"),
    "range(end)": (lambda s, x: s.stream("a/x").range(0, 0, x), [None, "0", -1, 0.5, {}], f"the end of a range {WHOLE} 0"),
    "range(huge)": (lambda s, x: s.stream("a/x").range(0, 0, x), [1 << 62, 1 << 70, HUGE], "the end of a range is at most"),
    "range(backwards)": (lambda s, x: s.stream("a/x").range(0, 2, x), [0, 1], "the start 2 lies behind the end"),
    "SegmentRange": (lambda s, x: hw.SegmentRange(x, "a/x", 0, 0, 1, 1).to_batches(), [None, "store"], "is read from its open store"),
    "prefetch_bytes": (lambda s, x: s.stream("a/x").range(0, 0, 1).to_batches(prefetch_bytes=x), [0, 1.5], f"prefetch_bytes {WHOLE} 1"),
    "max_events": (lambda s, x: reading_batch(s, max_events=x), [None, 0, 1.5, "5", math.inf], f"max_events {WHOLE} 1"),
    "piece_bytes": (lambda s, x: s.advance(s.stream("a/x").head(), piece_bytes=x), [None, -1, 1.5, "5"], f"piece_bytes {WHOLE} 0"),
    "byte_reader": (lambda s, x: s.stream("a/bytes").byte_reader(x), [1.5, 1 << 62, HUGE, [], -1], "offset"),
    "seek(whence)": (lambda s, x: s.stream("a/bytes").byte_reader().seek(0, x), [None, [], 3, "0"], "seek goes from the start"),
    "bytes.read": (lambda s, x: s.stream("a/bytes").byte_reader().read(x), [1.5, "1", []], "a whole number of bytes"),
    "bytes.readinto": (lambda s, x: s.stream("a/bytes").byte_reader().readinto(x), [None, "x", b"abc"], "into a bytearray or the like"),
    "split": (lambda s, x: s.stream("a/x").split(0, x), [None, 1, 1.5, HUGE], "the parts that a segment is split into"),
    "merge": (lambda s, x: s.stream("a/x").merge(x), [None, 5, "01"], f"{LISTED} the numbers of two or more"),
    # Lists.
    "create_stream(labels)": (lambda s, x: s.create_stream("b/x", labels=x), [None, 5, "red", b"red", object()], f"labels {LISTED} words"),
    "update(labels)": (lambda s, x: s.stream("a/x").update(labels=x), [5, "red", 1.5], f"labels {LISTED} words"),
    "columns": (lambda s, x: s.stream("a/x").to_arrow(columns=x), [5, "value", b"value", True], f"columns {LISTED} names"),
    "a column": (lambda s, x: s.stream("a/x").to_arrow(columns=[x]), ["\ud800", "x" * 100_000, "\0"], "has no column"),
    "range(columns)": (lambda s, x: s.stream("a/x").range(0, 0, 1).to_arrow(x), [5, object()], f"columns {LISTED} names"),
    "reader_group": (lambda s, x: s.reader_group("g", x), [5, "a/x", b"a/x", np.array(3)], f"{LISTED} streams"),
    "reader_group(none)": (lambda s, x: s.reader_group("g", x), [[], {}, ()], "one or more streams"),
    "adopt": (lambda s, x: in_transaction(s, "adopt", x), [None, 5, "abc"], f"{LISTED} transactions' receipts"),
    # Flags.
    "open(create)": (lambda s, x: hw.open("memory://flags", create=x), ["no", None, 1], f"create {FLAG}"),
    "open(upkeep)": (lambda s, x: hw.open("memory://flags", upkeep=x), ["no", np.array([1, 2])], f"upkeep {FLAG}"),
    "create_stream(exist_ok)": (lambda s, x: s.create_stream("b/x", exist_ok=x), ["no", None], f"exist_ok {FLAG}"),
    "delete_stream(seal)": (lambda s, x: s.delete_stream("a/x", seal=x), ["no", np.array([1, 2])], f"seal {FLAG}"),
    "read(follow)": (lambda s, x: s.stream("a/x").read(follow=x), ["no", 5, None], f"follow {FLAG}"),
    "ranges(skip_truncated)": (lambda s, x: s.stream("a/x").ranges(skip_truncated=x), ["no"], f"skip_truncated {FLAG}"),
    "transaction(auto_renew)": (lambda s, x: s.transaction(auto_renew=x), ["no", None], f"auto_renew {FLAG}"),
    "transactions(only_open)": (lambda s, x: s.transactions(only_open=x), ["no"], f"only_open {FLAG}"),
    # Times and places.
    "cut_at": (lambda s, x: s.stream("a/x").cut_at(x), [pd.NaT, None, datetime(2024, 1, 1)], ZONED),
    "write(time)": (lambda s, x: writing(s, b"x", time=x), [pd.NaT, 5, np.datetime64("2024-01-01")], ZONED),
    "tx.write(time)": (lambda s, x: in_transaction(s, "write", "a/x", b"x", time=x), [pd.NaT, "now"], ZONED),
    "read(start)": (lambda s, x: s.stream("a/x").read(x), [pd.NaT], ZONED),
    "a place": (
        lambda s, x: s.stream("a/x").read(end=x),
        [5, np.array([1, 2]), "middle", HUGE],
        "a place in a stream is a Cut",
    ),
    "fork(at)": (lambda s, x: s.stream("a/x").fork("b/x", x), [5, np.array([1, 2]), [[]]], "a place in a stream is"),
    "scale_streams": (lambda s, x: s.scale_streams(x), [pd.NaT, 5], ZONED),
    # Cuts.
    "advance(cut)": (lambda s, x: s.advance(x), [None, "head", datetime.now(UTC), {}], "a cut is needed here"),
    "advance(end)": (lambda s, x: s.advance(s.stream("a/x").head(), end=x), ["tail", 5], "a cut is needed here"),
    "hold(start)": (lambda s, x: s.hold("h", x, s.stream("a/x").tail()), ["head", 5], "a cut is needed here"),
    "hold(end)": (lambda s, x: s.hold("h", None, x), [None, "tail", 5], "a cut is needed here"),
    "truncate": (lambda s, x: s.stream("a/x").truncate(x), [None, "tail", []], "a cut is needed here"),
    "Cut(streams)": (lambda s, x: hw.Cut(s.id, x), [None, 5, {5: (1, {})}, {"a/x": None}, {"a/x": (1, None)}], "this can't be a cut"),
    "Cut(store)": (lambda s, x: hw.Cut(x, {}), [None, 5, b"x"], "a store's id and streams' names are text"),
    "Cut(number)": (cut, [None, -1, 1.5, "0", True, math.nan, HUGE], "this can't be a cut"),
    "Cut.parse": (lambda s, x: hw.Cut.parse(x), [None, 5, "", "[]", "{}", b"\xff", HUGE], "not the text of a cut"),
    # Names.
    "tx.write": (lambda s, x: in_transaction(s, "write", x, b"x"), [["a/x"], {}, None, 5, set()], "the name of a stream is a str"),
    "tx.write_batch": (
        lambda s, x: in_transaction(s, "write_batch", x, pa.table({"value": [b"x"]})),
        [["a/x"], {}],
        "the name of a stream",
    ),
    "tx.put": (lambda s, x: in_transaction(s, "put", x, "k", b"v"), [["a/x"], {}, None], "the name of a stream"),
    "tx.remove": (lambda s, x: in_transaction(s, "remove", x, "k"), [["a/x"], {}, None], "the name of a stream"),
    "create_scope": (lambda s, x: s.create_scope(x), [None, "", "\0", "\ud800", HUGE], "scope"),
    "create_stream(kind)": (lambda s, x: s.create_stream("b/x", kind=x), ["table", "revisioned", np.array([1, 2]), []], "kind 'events' or"),
    "reader(commit)": (lambda s, x: s.reader_group("g", ["a/x"]).reader("r", x), [None, np.array([1, 2]), "never"], "'auto' or 'manual'"),
    # Shared state.
    "synchronizer(apply)": (lambda s, x: s.synchronizer("b/x", 0, x), [None, 5, "x"], "apply is a function"),
    "synchronizer(initial)": (
        lambda s, x: s.synchronizer("b/x", x, max),
        [math.nan, math.inf, b"x", {1, 2}],
        "the initial state is a JSON value",
    ),
    "sync.update": (updating, [None, 5, [1]], "is a function"),
    "sync.update(value)": (lambda s, x: updating(s, lambda state: [x]), [math.nan, math.inf, b"x", object()], "are JSON values"),
    "sync.update(list)": (lambda s, x: updating(s, lambda state: x), [None, 5, "x", {}], "are given as a list"),
    "tx.update": (staging, [[math.nan], [-math.inf], [{1, 2}]], "are JSON values"),
    "tx.update(list)": (staging, [None, 5, "x"], "are given as a list"),
    # Policies.
    "Scaling.fixed": (lambda s, x: hw.Scaling.fixed(x), [None, 0, 1.5, True], f"a fixed number of segments {WHOLE} 1"),
    "Scaling.fixed(many)": (lambda s, x: hw.Scaling.fixed(x), [10_001, HUGE], "a fixed number of segments is at most 10,000"),
    "Scaling": (lambda s, x: hw.Scaling(x), [None, 5, "some", np.array([1, 2])], "scaling is made with hw.Scaling.fixed"),
    "Scaling(min_segments)": (lambda s, x: hw.Scaling("fixed", min_segments=x), [None, 0, "1", -1], f"segments {WHOLE} 1"),
    "by_event_rate": (lambda s, x: hw.Scaling.by_event_rate(x), [None, 0, 1.5, "1"], f"a target rate {WHOLE} 1"),
    "by_data_rate": (lambda s, x: hw.Scaling.by_data_rate(5, max_segments=x), [0, 1.5, "1"], f"max_segments {WHOLE} 1"),
    "Retention": (lambda s, x: hw.Retention(x), [None, 5, "never"], "retention is made with hw.Retention.forever"),
    "Retention(seconds)": (lambda s, x: hw.Retention("time", x), [None, 0, -1, "1", math.inf, math.nan], "seconds above 0"),
    "Retention.by_time": (lambda s, x: hw.Retention.by_time(x), [None, 5, pd.NaT, timedelta(0)], "a timedelta above zero"),
    "Retention.by_size": (lambda s, x: hw.Retention.by_size(x), [None, 0, 1.5, "1"], f"the size in a retention {WHOLE} 1"),
    "by_consumption": (lambda s, x: hw.Retention.by_consumption(x), [None, 5, "group", b"group"], f"{LISTED} reader groups"),
    # Opening.
    "open(storage_options)": (
        lambda s, x: hw.open("memory://flags", storage_options=x),
        [5, "", [], "region", [("region", "x")], {"region": 5}, {5: "x"}],
        "storage_options is a dict of texts or flags",
    ),
    "open(storage_options) in memory": (
        lambda s, x: hw.open("memory://flags", storage_options=x),
        [{"region": "x"}],
        "takes no storage options, and got: region",
    ),
}


def test_a_wrong_argument_is_refused_with_a_sentence_and_nothing_is_stored(store: hw.Store) -> None:
    problems = []
    for name, (call, values, said) in CALLS.items():
        for place, value in enumerate(values):
            try:
                call(store, value)
                problems.append(f"{name}, value {place}: nothing was raised")
            except hw.InvalidRequestError as error:
                if said not in error.message or len(error.message) > 500:
                    problems.append(f"{name}, value {place}: {error.message[:500]}")
            except Exception as error:
                problems.append(f"{name}, value {place}: {error!r:.500}")
        with suppress(hw.NotFoundError):
            store.reader_group("g").delete()
        if store.streams() != ["a/bytes", "a/x"] or store.stream("a/x").to_arrow().num_rows != 2:
            problems.append(f"{name}: something was stored")
    assert not problems, "\n".join(problems)
    with store.stream("a/x").writer() as writer:
        writer.write("3", "k")
    assert [event.value for event in store.stream("a/x").read()] == [b"1", b"2", b"3"]
    assert check_store(store).ok


def test_a_wait_may_be_any_number_and_without_end(store: hw.Store) -> None:
    with store.reader_group("g", ["a/x"]).reader("r") as reader:
        without_end: list[Any] = [math.inf, 1 << 70]
        assert [event.value for event in map(reader.read, without_end) if event is not None] == [b"1", b"2"]
        no_time: list[Any] = [0, -1, np.int64(0), np.float32(0)]
        assert [reader.read(timeout) for timeout in no_time] == [None] * 4
    with store.stream("a/x").writer() as writer:
        for wait in (math.inf, 1 << 70, sys.maxsize, None):
            assert isinstance(writer.write(b"x").result(wait), hw.Position)
    assert store.reader_group("g").checkpoint(math.inf) == store.reader_group("g").positions()


def test_limits_without_a_bound_may_be_as_large_as_any_number(store: hw.Store) -> None:
    with store.reader_group("g", ["a/x"]).reader("r") as reader:
        batch = reader.read_batch(max_events=sys.maxsize)
        assert batch is not None and batch.num_rows == 2
    stream = store.stream("a/x")
    assert store.advance(stream.head(), max_events=1 << 70, max_bytes=1 << 70, piece_bytes=sys.maxsize) == stream.tail()
    assert stream.range(0, 0, 2).to_arrow().num_rows == 2
    for size in (1 << 40, 1 << 70, -1, None):
        assert store.stream("a/bytes").byte_reader().read(size) == b"hello"


def test_a_generator_will_do_for_a_list(store: hw.Store) -> None:
    def give(*names: str) -> Any:
        return (name for name in names)

    assert sorted(store.create_stream("b/x", labels=give("red", "blue")).labels) == ["blue", "red"]
    assert store.stream("a/x").to_arrow(columns=give("value", "_key")).column_names == ["value", "_key"]
    assert store.reader_group("g", give("a/x", "b/x")).streams == ["a/x", "b/x"]


@pytest.mark.parametrize("kind", [pa.null(), pa.string(), pa.binary(3), pa.dictionary(pa.int32(), pa.null())], ids=str)
def test_a_key_column_of_nulls_means_no_key(store: hw.Store, kind: pa.DataType) -> None:
    stream = store.create_stream("b/x", scaling=hw.Scaling.fixed(3))
    table = pa.table({"value": [b"1", b"2"], "_key": pa.nulls(2, kind), "k": pa.nulls(2, kind)})
    with stream.writer() as writer, store.transaction() as tx:
        writer.write_batch(table.drop_columns("k"))
        writer.write_batch(table, key="k")
        tx.write_batch("b/x", table, key="k")
    assert sorted((event.value, event.key) for event in stream.read()) == [(value, None) for value in (b"1", b"1", b"1", b"2", b"2", b"2")]


def test_updates_in_a_transaction_are_as_large_as_others(store: hw.Store) -> None:
    sync: hw.Synchronizer[int, str] = store.synchronizer("b/x", 0, lambda state, update: len(update))
    large = "x" * (65 << 20)
    tx = store.transaction()
    for give in (lambda: sync.update(lambda state: [large]), lambda: tx.update(sync, [large])):
        with pytest.raises(hw.InvalidRequestError, match="it may have 67,108,864"):
            give()
    tx.update(sync, ["four"])
    tx.commit()
    assert sync.fetch() == 4


def test_a_writer_goes_on_after_what_it_refused(store: hw.Store) -> None:
    times: list[Any] = [pd.NaT, "now"]
    keys: list[Any] = [np.array([1, 2]), 5, "\ud800"]
    numbers: list[Any] = [0, 1.5, "1", 1 << 62, HUGE, True]
    with store.stream("a/x").writer("named") as writer:
        for time in times:
            with pytest.raises(hw.InvalidRequestError, match=ZONED):
                writer.write("x", time=time)
            with pytest.raises(hw.InvalidRequestError, match=ZONED):
                writer.note_time(time)
        for key in keys:
            with pytest.raises(hw.InvalidRequestError, match="the batch has no column"):
                writer.write_batch(pa.table({"value": [b"x"]}), key)
        for number in numbers:
            with pytest.raises(hw.InvalidRequestError, match="a source number is"):
                writer.write("x", number=number)
        writer.write("3")
    assert writer.last_number == 1
    assert [event.value for event in store.stream("a/x").read()] == [b"1", b"2", b"3"]


def test_a_table_goes_on_after_what_it_refused(store: hw.Store) -> None:
    table = store.table("b/x")
    calls: list[tuple[Callable[[Any], object], list[Any], str]] = [
        (table.items, [None, 5, np.array([1, 2]), "\ud800"], "key"),
        (table.get, [None, "", "\0", HUGE], "key"),
        (table.changes, [-1, 1.5, 1 << 62, True], "the version in `after`"),
        (lambda x: table.changes(follow=x), ["no", 1], f"follow {FLAG}"),
        (lambda x: table.put("k", b"v", x), [1.5, "1", HUGE], "a version is"),
    ]
    for call, values, said in calls:
        for value in values:
            with pytest.raises(hw.InvalidRequestError, match=said):
                call(value)
    assert table.put("k", b"v") == 1 and list(table.items()) == [("k", hw.Entry(b"v", 1))]


def test_a_value_without_a_text_is_refused_all_the_same(store: hw.Store) -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    stream = store.create_stream("b/x", schema=pa.schema([("n", pa.int64())]))
    values: list[Any] = [HUGE, deep]
    with stream.writer() as writer:
        for value in values:
            with pytest.raises(hw.InvalidRequestError, match="column 'n' takes int64"):
                writer.write({"n": value})
            with pytest.raises(hw.InvalidRequestError, match="the name of a stream is a str"):
                store.stream(value)
    with pytest.raises(hw.InvalidRequestError, match="are JSON values"):
        updating(store, lambda state: [deep])
