"""Tiering: what is read after blocks became chunks is what was read before, by every way of reading, while it happens and for ever."""

from __future__ import annotations

import decimal
import pickle
import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pt
import pytest

import headwater as hw
from headwater.catalog import tiers
from headwater.catalog.extents import BLOCK, PARQUET
from headwater.check import check_store
from headwater.model.schemas import check_schema
from headwater.runtime import failpoints
from headwater.segments import chunk as chunk_module
from headwater.segments import read as read_module
from headwater.segments import tiering
from headwater.segments.read import SegmentCursor
from headwater.storage import local
from tests.crash.processes import Place
from tests.s3server import BUCKET, S3Server, running_s3

COLUMNS = ["_key", "_time", "_segment", "_number", "_appended"]
EPOCH = datetime(2024, 5, 1, tzinfo=UTC)
D = decimal.Decimal

#: Every kind of type that a stream may have, with values.
TYPES: list[tuple[pa.DataType, list[Any]]] = [
    (pa.bool_(), [True, None, False]),
    (pa.int8(), [1, None, -3]),
    (pa.uint64(), [2**64 - 1, 0, None]),
    (pa.float16(), [1.5, None, 2.0]),
    (pa.float64(), [1.5, None, float("inf")]),
    (pa.decimal128(10, 2), [D("1.23"), None]),
    (pa.decimal256(50, 3), [D("1.234"), None]),
    (pa.string(), ["ä", None, ""]),
    (pa.large_string(), ["a", None]),
    (pa.binary(), [b"\0", None]),
    (pa.large_binary(), [b"a", None]),
    (pa.binary(3), [b"abc", None]),
    (pa.date32(), [date(1969, 1, 1), None]),
    (pa.date64(), [date(1969, 1, 1), None]),
    (pa.time32("s"), [5, None]),
    (pa.time32("ms"), [5, None]),
    (pa.time64("us"), [5, None]),
    (pa.time64("ns"), [5000, None]),
    (pa.timestamp("s"), [5, None]),
    (pa.timestamp("ms"), [-5, None]),
    (pa.timestamp("us", "Europe/Berlin"), [5, None]),
    (pa.timestamp("ns"), [5000, None]),
    (pa.duration("s"), [5, None]),
    (pa.duration("ns"), [5000, None]),
    (pa.list_(pa.int32()), [[1, None], None, []]),
    (pa.list_(pa.int32(), 2), [[1, 2], None]),
    (pa.large_list(pa.timestamp("s", "UTC")), [[1], None]),
    (pa.list_(pa.date64(), 2), [[date(1970, 1, 2), date(1970, 1, 3)], None]),
    (
        pa.struct([("x", pa.timestamp("s")), ("d", pa.list_(pa.date64()))]),
        [{"x": 1, "d": [date(1970, 1, 2)]}, None, {"x": None, "d": None}],
    ),
    (pa.map_(pa.string(), pa.time32("s")), [[("a", 1)], None, []]),
    (pa.list_(pa.struct([("t", pa.time32("s")), ("n", pa.int8())])), [[{"t": 1, "n": None}], None]),
    (pa.list_(pa.field("thing", pa.int32(), nullable=False)), [[1], [2]]),
]


class Degrees(pa.ExtensionType):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(pa.int32(), "tests.degrees")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""


#: What pyarrow can make, with parameters at their limits.
FACTORIES: list[pa.DataType] = [
    *(getattr(pa, name)() for name in ("null", "bool_", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")),
    *(getattr(pa, name)() for name in ("float16", "float32", "float64", "string", "large_string", "binary", "large_binary")),
    *(getattr(pa, name)() for name in ("string_view", "binary_view", "date32", "date64", "month_day_nano_interval")),
    *(pa.binary(size) for size in (0, 1, 3)),
    *(pa.time32(unit) for unit in ("s", "ms")),
    *(pa.time64(unit) for unit in ("us", "ns")),
    *(pa.timestamp(unit, zone) for unit in ("s", "ms", "us", "ns") for zone in (None, "UTC", "Europe/Berlin", "+05:30")),
    *(pa.duration(unit) for unit in ("s", "ms", "us", "ns")),
    *(pa.decimal32(*digits) for digits in ((1, 0), (9, 9), (5, -2), (3, 5))),
    *(pa.decimal64(*digits) for digits in ((18, 18), (10, 2), (5, -2))),
    *(pa.decimal128(*digits) for digits in ((38, 0), (38, 38), (7, 2), (5, -2), (2, 4))),
    *(pa.decimal256(*digits) for digits in ((76, 0), (76, 76), (7, 2), (5, -2))),
    pa.dictionary(pa.int8(), pa.string()),
    pa.run_end_encoded(pa.int32(), pa.int64()),
    pa.dense_union([pa.field("x", pa.int64())]),
    pa.sparse_union([pa.field("x", pa.int64())]),
    pa.list_view(pa.int32()),
    pa.large_list_view(pa.int32()),
    pa.struct([]),
    pa.struct([("a", pa.int8()), ("a", pa.int8())]),
    pa.uuid(),
    pa.json_(),
    pa.bool8(),
    pa.opaque(pa.int32(), "a", "b"),
    pa.fixed_shape_tensor(pa.int32(), [2]),
    Degrees(),
]
#: How types are nested, by name.
NESTINGS: dict[str, Callable[[pa.DataType], pa.DataType]] = {
    "flat": lambda kind: kind,
    "list": pa.list_,
    "large list": pa.large_list,
    "list of 0": lambda kind: pa.list_(kind, 0),
    "list of 1": lambda kind: pa.list_(kind, 1),
    "list of 2": lambda kind: pa.list_(kind, 2),
    "struct": lambda kind: pa.struct([("x", kind), ("y", pa.int8())]),
    "map": lambda kind: pa.map_(pa.string(), kind),
    "map by it": lambda kind: pa.map_(kind, pa.int32()),
    "sorted map": lambda kind: pa.map_(pa.string(), kind, keys_sorted=True),
    "named map": lambda kind: pa.map_(pa.field("k", kind, nullable=False), pa.field("v", kind)),
    "list of lists": lambda kind: pa.list_(pa.list_(kind)),
    "list of lists of 2": lambda kind: pa.list_(pa.list_(kind, 2)),
    "list of 2 lists of 2": lambda kind: pa.list_(pa.list_(kind, 2), 2),
    "list of lists of 0": lambda kind: pa.list_(pa.list_(kind, 0)),
    "list of 2 structs": lambda kind: pa.list_(pa.struct([("x", kind)]), 2),
    "list of maps": lambda kind: pa.list_(pa.map_(pa.string(), kind)),
    "struct of structs": lambda kind: pa.struct([("x", pa.struct([("y", kind)]))]),
    "struct of maps of lists": lambda kind: pa.struct([("m", pa.map_(pa.string(), pa.list_(kind)))]),
    "map of maps": lambda kind: pa.map_(pa.string(), pa.map_(pa.string(), kind)),
    "map by structs": lambda kind: pa.map_(pa.struct([("x", kind)]), pa.int8()),
    "list view": pa.list_view,
    "large list view": pa.large_list_view,
    "dictionary": lambda kind: pa.dictionary(pa.int32(), kind),
    "runs": lambda kind: pa.run_end_encoded(pa.int32(), kind),
    "dense union": lambda kind: pa.dense_union([pa.field("x", kind)]),
    "sparse union": lambda kind: pa.sparse_union([pa.field("x", kind)]),
}
#: Those of which streams take none.
REFUSED = {"list of 0", "list of lists of 0", "list view", "large list view", "dictionary", "runs", "dense union", "sparse union"}
DAY_SECONDS = 86_400


def samples(kind: pa.DataType) -> list[Any]:
    """Values of a type that a stream takes, those at its limits too, and none that is null as a whole."""
    if pt.is_boolean(kind):
        return [True, False]
    if pt.is_integer(kind):
        bits = kind.bit_width
        return [1, -(2 ** (bits - 1)), 2 ** (bits - 1) - 1] if pt.is_signed_integer(kind) else [0, 1, 2**bits - 1]
    if pt.is_floating(kind):
        return [1.5, -0.0, float("inf")]
    if pt.is_decimal(kind):
        return [D((sign, digits, -kind.scale)) for sign, digits in ((0, (9,) * kind.precision), (1, (9,) * kind.precision), (0, (1,)))]
    if pt.is_string(kind) or pt.is_large_string(kind):
        return ["", "aä€😀", "a\0b"]
    if pt.is_fixed_size_binary(kind):
        return [bytes(range(kind.byte_width)), b"\xff" * kind.byte_width]
    if pt.is_binary(kind) or pt.is_large_binary(kind):
        return [b"", b"\xff\0"]
    if pt.is_date(kind):
        return [date.min, date(1969, 12, 31), date.max]
    if pt.is_time(kind):
        return [0, 5, DAY_SECONDS * {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[kind.unit] - 1]
    if pt.is_temporal(kind):
        return [-1, 0, 1_700_000_000]
    if pt.is_struct(kind):
        fields = [[*samples(field.type), None] for field in kind]
        return [{field.name: found[turn % len(found)] for field, found in zip(kind, fields, strict=True)} for turn in range(4)]
    if pt.is_map(kind):
        keys, items = samples(kind.key_type), [*samples(kind.item_type), None]
        return [[], [(keys[0], None)], [(key, items[turn % len(items)]) for turn, key in enumerate(keys)]]
    found = [*samples(kind.value_type), None]
    if pt.is_fixed_size_list(kind):
        return [[found[(turn + place) % len(found)] for place in range(kind.list_size)] for turn in range(len(found))]
    return [[], found, [None]]


def nested_types(nesting: str) -> Iterator[pa.DataType]:
    for kind in FACTORIES:
        with suppress(ValueError):  # pyarrow has no maps by null
            yield NESTINGS[nesting](kind)


def is_taken(kind: pa.DataType) -> bool:
    try:
        check_schema(pa.schema([("c", kind)]))
    except hw.InvalidRequestError:
        return False
    return True


#: Where the catalog makes no difference: it is the same client.
on_sqlite = pytest.mark.parametrize("catalog_url", ["sqlite"], indirect=True)


def write(stream: hw.Stream, values: list[Any], key: Callable[[Any], str | None] = lambda value: None) -> None:
    with stream.writer() as writer:
        for value in values:
            writer.write(value, key=key(value))


def values(stream: hw.Stream, start: Any = None, end: Any = None) -> list[Any]:
    return [event.value for event in stream.read(start, end)]


def numbered(count: int, start: int = 0) -> list[bytes]:
    return [b"%d" % number for number in range(start, start + count)]


def tier(store: hw.Store) -> None:
    report = store.run_upkeep()
    assert report.problems == () and report.chunks_written


def forms(store: hw.Store) -> list[int]:
    return [row[0] for row in store._engine.database.query("SELECT form FROM extent ORDER BY log, first")]


def at(stream: hw.Stream, number: int) -> hw.Cut:
    """The cut of a stream with one segment at a number."""
    part = stream.tail().streams[stream.name]
    return hw.Cut(stream._store.id, {stream.name: type(part)(part.id, {0: number})})


class Look:
    """All that can be seen of a stream of events."""

    def __init__(self, stream: hw.Stream) -> None:
        self.events = [(event.value, event.key, event.time, event.position) for event in stream.read()]
        names = [*stream.schema.names, *COLUMNS]
        self.ranges = {item.segment: item.to_arrow(names) for item in stream.ranges()}
        self.table = stream.to_arrow(columns=names).sort_by([("_segment", "ascending"), ("_number", "ascending")])
        self.cuts = (str(stream.head()), str(stream.tail()))

    def check(self, other: Look) -> None:
        assert other.cuts == self.cuts
        assert sorted(other.events, key=lambda event: event[3]) == sorted(self.events, key=lambda event: event[3])
        assert other.ranges.keys() == self.ranges.keys()
        for segment, table in self.ranges.items():
            assert other.ranges[segment].schema.equals(table.schema)
            assert other.ranges[segment].equals(table)
        assert other.table.equals(self.table)


# What is read after it equals what was read before.


def test_everything_that_can_be_read_is_the_same_after_tiering_and_after_compaction(store: hw.Store) -> None:
    schema = pa.schema(
        [("id", pa.int64()), ("name", pa.string()), ("spot", pa.struct([("x", pa.float64()), ("tags", pa.list_(pa.string()))]))]
    )
    stream = store.create_stream("t/all", scaling=hw.Scaling.fixed(2), schema=schema)
    with stream.writer() as writer:
        for round_ in range(10):
            for number in range(20):
                row = {
                    "id": number,
                    "name": None if number % 7 == 0 else f"n{number}",
                    "spot": {"x": number / 3, "tags": ["a"] * (number % 3)},
                }
                time = EPOCH + timedelta(seconds=number) if number % 2 else None
                writer.write(row, key=None if number % 5 == 0 else str(number), time=time)
            rows = [{"id": 1000 + round_, "name": "b", "spot": None}] * 3
            writer.write_batch(pa.Table.from_pylist(rows, schema=schema))
            writer.flush()
            if round_ == 4:
                stream.split(0)
            before = Look(stream)
            tier(store)
            before.check(Look(stream))
    assert store.run_upkeep().chunks_written == 0, "all is tiered"
    assert set(forms(store)) == {PARQUET}
    stream.seal()
    store.run_upkeep()
    before.check(Look(stream))
    assert len(forms(store)) == 4, "a sealed segment's chunks are made one"


@pytest.mark.parametrize("kind", [kind for kind, _ in TYPES], ids=str)
def test_values_of_every_type_come_back_as_they_were(kind: pa.DataType, tmp_path: Path) -> None:
    content = next(found for other, found in TYPES if other.equals(kind))
    schema = pa.schema([pa.field("c", kind), pa.field("other", pa.int8())])
    with hw.open(tmp_path, upkeep=False) as store:
        stream = store.create_stream("t/typed", schema=schema)
        with stream.writer() as writer:
            writer.write_batch(pa.table({"c": pa.array(content, kind), "other": pa.array(range(len(content)), pa.int8())}, schema=schema))
        before = Look(stream)
        tier(store)
        before.check(Look(stream))
        assert stream.to_arrow(columns=["c"]).schema.field("c").type.equals(kind)


@pytest.mark.parametrize("nesting", NESTINGS)
def test_every_type_is_refused_by_create_stream_or_comes_back_as_it_was(nesting: str, tmp_path: Path) -> None:
    kinds = list(nested_types(nesting))
    taken = [kind for kind in kinds if is_taken(kind)]
    assert len(taken) == (0 if nesting in REFUSED else 54)
    with hw.open(tmp_path, upkeep=False) as store:
        for kind in kinds:
            if kind not in taken:
                with pytest.raises(hw.InvalidRequestError, match="column 'c"):
                    store.create_stream("t/refused", schema=pa.schema([("c", kind)]))
        if not taken:
            return
        schema = pa.schema([(str(place), kind) for place, kind in enumerate(taken)])
        columns = [[None, *(samples(kind) * 5)[:5], None] for kind in taken]
        table = pa.table([pa.array(column, kind) for column, kind in zip(columns, taken, strict=True)], schema=schema)
        stream = store.create_stream("t/all", schema=schema)
        with stream.writer() as writer:
            writer.write_batch(table)
            for row in zip(*columns, strict=True):
                writer.write(dict(zip(schema.names, row, strict=True)))
        before = Look(stream)
        tier(store)
        before.check(Look(stream))
        found = stream.to_arrow()
        for name in schema.names:
            column = pa.chunked_array(table[name].chunks * 2)
            assert found[name].equals(column), schema.field(name)
        assert check_store(store).problems == []


@on_sqlite
def test_names_with_dots_and_other_odd_ones_are_told_apart(store: hw.Store) -> None:
    inner = pa.struct([("b", pa.int64()), ("c.d", pa.string())])
    names = ["a.b", "a", "", "a.b.c", "ä ö", "`"]
    stream = store.create_stream("t/names", schema=pa.schema([*((name, pa.int64()) for name in names), ("s", inner)]))
    write(stream, [{**{name: place * 10 + number for place, name in enumerate(names)}, "s": {"b": -1, "c.d": "x"}} for number in range(5)])
    before = Look(stream)
    tier(store)
    before.check(Look(stream))
    for place, name in enumerate(names):
        assert stream.to_arrow(columns=[name]).column(0).to_pylist() == [place * 10 + number for number in range(5)]
    assert stream.to_arrow(columns=["s"]).column(0).to_pylist()[0] == {"b": -1, "c.d": "x"}


@on_sqlite
def test_streams_with_the_longest_names_are_tiered(store: hw.Store) -> None:
    stream = store.create_stream("s" * 128 + "/" + "n" * 128)
    write(stream, numbered(3))
    tier(store)
    assert values(stream) == numbered(3)


@on_sqlite
def test_old_chunks_are_read_with_the_schema_of_today(store: hw.Store) -> None:
    stream = store.create_stream("t/evolved", schema=pa.schema([("a", pa.int32()), ("f", pa.float32())]))
    write(stream, [{"a": 1, "f": 0.5}])
    tier(store)
    stream.update(schema=pa.schema([("a", pa.int64()), ("f", pa.float64()), ("b", pa.string())]))
    expected: list[dict[str, Any]] = [{"a": 1, "f": 0.5, "b": None}]
    assert values(stream) == expected
    write(stream, [{"a": 1 << 40, "f": 1.5, "b": "x"}])
    expected.append({"a": 1 << 40, "f": 1.5, "b": "x"})
    for _ in range(2):
        assert values(stream) == expected
        assert stream.to_arrow(columns=["b", "a"]).to_pylist() == [{"b": row["b"], "a": row["a"]} for row in expected]
        tier(store) if BLOCK in forms(store) else None
    stream.seal()
    store.run_upkeep()
    assert forms(store) == [PARQUET], "both chunks are one, in the new schema"
    assert values(stream) == expected


@on_sqlite
def test_a_follower_sees_new_columns_that_came_in_a_chunk(store: hw.Store) -> None:
    stream = store.create_stream("t/followed", schema=pa.schema([("a", pa.int64())]))
    write(stream, [{"a": 0}])
    follower = stream.read(follow=True)
    assert next(follower).value == {"a": 0}
    stream.update(schema=pa.schema([("a", pa.int64()), ("b", pa.string())]))
    write(store.stream("t/followed"), [{"a": 1, "b": "x"}])
    tier(store)
    assert next(follower).value == {"a": 1, "b": "x"}


# Places.


def test_places_by_time_and_cut_are_the_same_before_and_after(store: hw.Store) -> None:
    stream = store.create_stream("t/places", scaling=hw.Scaling.fixed(2))
    times, cuts = [], []
    for number in range(20):
        if number in (7, 14):
            stream.split(stream.segments()[0].number)
        write(stream, [b"%d" % number], key=lambda value: value.decode())
        times += [event.time for event in stream.read() if event.value == b"%d" % number]
        cuts.append(stream.tail())
    times += [time - timedelta(microseconds=1) for time in times] + [times[0] - timedelta(hours=1), datetime.now(UTC) + timedelta(hours=1)]

    def look() -> list[Any]:
        found: list[Any] = [str(stream.cut_at(time)) for time in times]
        found += [sorted(values(stream, start=time)) for time in times[::7]] + [sorted(values(stream, end=time)) for time in times[::7]]
        found += [sorted(values(stream, cuts[one], cuts[other])) for one in range(0, 20, 5) for other in range(one, 20, 6)]
        return found

    before = look()
    tier(store)
    assert look() == before
    stream.seal()
    store.run_upkeep()
    assert look() == before


def test_a_time_before_the_head_of_a_chunk_that_is_partly_truncated_means_the_head(store: hw.Store) -> None:
    stream = store.create_stream("t/head")
    for number in range(5):
        write(stream, [b"%d" % number])
    moments = [event.time for event in stream.read()]
    tier(store)
    stream.truncate(at(stream, 3))
    assert [values(stream, start=moment) for moment in moments] == [[b"3", b"4"]] * 4 + [[b"4"]]
    assert [values(stream, end=moment) for moment in moments] == [[]] * 4 + [[b"3"]]


@on_sqlite
def test_a_truncation_inside_a_chunk_hides_what_lies_before(store: hw.Store) -> None:
    stream = store.create_stream("t/cut")
    write(stream, numbered(10))
    tier(store)
    for head in (3, 4, 9):
        stream.truncate(at(stream, head))
        store.run_upkeep()
        assert values(stream) == numbered(10)[head:]
        with pytest.raises(hw.TruncatedError):
            values(stream, at(stream, head - 1))
    stream.truncate(stream.tail())
    assert forms(store) == []
    write(stream, [b"next"])
    tier(store)
    assert values(stream) == [b"next"]


# Forks and tags.


def test_a_fork_in_the_middle_of_a_block_has_none_of_its_parents_later_events(store: hw.Store) -> None:
    parent = store.create_stream("t/parent")
    with parent.writer() as writer:
        writer.write_batch(pa.table({"value": numbered(100)}))
    fork = parent.fork("t/fork", at=at(parent, 50))
    write(fork, [b"own%d" % number for number in range(60)])
    expected = numbered(50) + [b"own%d" % number for number in range(60)]
    assert values(fork) == expected
    for turn in range(2):
        assert values(parent) == numbered(100)
        assert values(fork) == expected
        assert values(fork, at(fork, 45), at(fork, 55)) == expected[45:55]
        assert fork.to_arrow(columns=["value", "_number"]).column("value").to_pylist() == expected
        with store.reader_group(f"g{turn}", ["t/fork"], end="tail").reader("r") as reader:
            assert [event.value for event in reader] == expected
        store.run_upkeep()
    assert [(item.start, item.end) for item in fork.chunks()] == [(0, 50), (50, 110)]
    parent.seal()
    store.delete_stream("t/parent")
    store.run_upkeep()
    assert values(fork) == expected


@on_sqlite
def test_a_fork_of_bytes_in_the_middle_of_a_block_has_none_of_its_parents_later_bytes(store: hw.Store) -> None:
    parent = store.create_stream("t/bytes", kind="bytes")
    with parent.byte_writer() as writer:
        writer.write(b"0123456789")
    fork = parent.fork("t/fork", at=at(parent, 4))
    with fork.byte_writer() as writer:
        writer.write(b"abcdef")
    for _ in range(2):
        assert fork.byte_reader().readall() == b"0123abcdef"
        assert fork.byte_reader(3).read(2) == b"3" and parent.byte_reader(3).readall() == b"3456789"
        tier(store) if BLOCK in forms(store) else None


def test_a_time_in_a_fork_goes_by_its_own_events_behind_the_cut(store: hw.Store) -> None:
    parent = store.create_stream("t/parent")
    for number in range(6):
        write(parent, [b"%d" % number])
        if number == 2:
            fork = parent.fork("t/fork", at=at(parent, 2))
            write(fork, [b"own"])
    write(fork, [b"last"])
    moments = {event.value: event.time for stream in (parent, fork) for event in stream.read()}

    def look() -> list[Any]:
        return [values(fork, start=moments[value]) for value in (b"1", b"2", b"own", b"3", b"5", b"last")]

    before = look()
    assert before == [[b"1", b"own", b"last"], [b"own", b"last"], [b"own", b"last"], [b"last"], [b"last"], [b"last"]]
    tier(store)
    assert look() == before


@on_sqlite
def test_a_fork_is_read_with_its_own_schema_however_its_parent_goes_on(store: hw.Store) -> None:
    parent = store.create_stream("t/parent", schema=pa.schema([("a", pa.int32())]))
    write(parent, [{"a": number} for number in range(5)])
    fork = parent.fork("t/fork")
    parent.update(schema=pa.schema([("a", pa.int64()), ("b", pa.string())]))
    write(parent, [{"a": 1 << 40, "b": "x"}])
    tier(store)
    assert values(fork) == [{"a": number} for number in range(5)]
    assert fork.to_arrow().schema.field("a").type == pa.int32()
    fork.update(schema=pa.schema([("a", pa.int32()), ("b", pa.list_(pa.int32()))]))
    write(fork, [{"a": 5, "b": [1]}])
    for _ in range(2):
        assert values(fork) == [{"a": number, "b": None} for number in range(5)] + [{"a": 5, "b": [1]}]
        assert fork.to_arrow(columns=["b"]).column("b").to_pylist() == [None] * 5 + [[1]]
        store.run_upkeep()
    assert values(parent)[-1] == {"a": 1 << 40, "b": "x"}


def test_what_only_forks_keep_of_a_deleted_stream_is_tiered_without_losing_a_column(store: hw.Store) -> None:
    parent = store.create_stream("t/parent", schema=pa.schema([("a", pa.int64())]))
    write(parent, [{"a": number} for number in range(5)])
    early = parent.fork("t/early")
    parent.update(schema=pa.schema([("a", pa.int64()), ("b", pa.int64())]))
    write(parent, [{"a": number, "b": number} for number in range(5, 10)])
    late = parent.fork("t/late")
    early.update(schema=pa.schema([("a", pa.int64()), ("c", pa.int64())]))
    grandchild = early.fork("t/grandchild")
    parent.seal()
    store.delete_stream("t/parent")
    before = [values(stream) for stream in (early, late, grandchild)]
    assert before[1][-1] == {"a": 9, "b": 9}
    tier(store)
    assert set(forms(store)) == {PARQUET}
    assert [values(stream) for stream in (early, late, grandchild)] == before


def test_what_a_tag_keeps_of_truncated_segments_is_tiered_and_readable(store: hw.Store) -> None:
    stream = store.create_stream("t/tagged")
    write(stream, numbered(10))
    start, cut = stream.head(), stream.tail()
    store.tag("kept", cut)
    stream.split(0)
    write(stream, numbered(10, 10))
    stream.truncate(stream.tail())
    tier(store)
    assert set(forms(store)) == {PARQUET}
    assert values(stream, end=cut) == values(stream, start, cut) == numbered(10)
    store.untag("kept")
    store.run_upkeep()
    assert forms(store) == []


# Readers that are under way.


@pytest.fixture
def short_sighted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers fetch one block or row group at a time, and so have planned on many that are gone when they come to them."""
    init = SegmentCursor.__init__

    def short_init(cursor: SegmentCursor, *args: Any, **kwargs: Any) -> None:
        init(cursor, *args, **kwargs)
        cursor._prefetch_bytes = 1

    monkeypatch.setattr(SegmentCursor, "__init__", short_init)
    monkeypatch.setattr(read_module, "_FETCH_BYTES", 1)


@pytest.mark.slow
def test_slow_readers_of_every_kind_read_everything_once_across_tiering_compaction_and_garbage(
    place: Place, store: hw.Store, short_sighted: None
) -> None:
    stream = store.create_stream("t/slow", scaling=hw.Scaling.fixed(2))
    keys = [str(number % 17) for number in range(240)]
    for start in range(0, 240, 30):
        # Written by a store that is closed: its journal is nobody's any more.
        with place.open() as writing, writing.stream("t/slow").writer() as writer:
            for number in range(start, start + 30):
                writer.write(b"%d|" % number + b"." * 9000, key=keys[number])
        stream.split(stream.segments()[0].number) if start == 120 else None
    expected = sorted(event.value for event in stream.read())
    cut = stream.tail()

    class Slow:
        """An iterator that is asked for a little, in steps."""

        def __init__(self, source: Iterator[bytes]) -> None:
            self.source, self.found = source, list[bytes]()

        def step(self, count: int | None = None) -> None:
            while (count is None or count > 0) and (value := next(self.source, None)) is not None:
                self.found.append(value)
                count = None if count is None else count - 1

    def from_arrow(pieces: list[Any]) -> Iterator[bytes]:
        for piece in pieces:
            for batch in piece.to_batches(["value"]):
                yield from batch.column(0).to_pylist()

    group = store.reader_group("slow", ["t/slow"], end=cut)
    with group.reader("r") as reader, place.open() as other:
        readers = [
            Slow(event.value for event in stream.read()),
            Slow(event.value for event in other.stream("t/slow").read(end=cut)),
            Slow(event.value for event in stream.read(follow=True) if not event.value.startswith(b"later")),
            Slow(event.value for event in reader),
            Slow(from_arrow(stream.ranges())),
            Slow(from_arrow([pickle.loads(pickle.dumps(item)) for item in stream.ranges()])),
        ]
        deleted = []
        for step in range(6):
            for slow in readers:
                slow.step(12)
            if step < 5:
                write(stream, [b"later" + b"." * 70_000])
            else:
                stream.seal()
            report = store.run_upkeep()
            assert report.problems == () and report.chunks_written
            deleted.append(report.objects_deleted)
        assert deleted[0] and deleted[-1], "what they had planned is gone, first blocks and then chunks"
        for slow in readers:
            slow.step()
            assert sorted(slow.found) == expected, slow.source


@on_sqlite
def test_a_slow_reader_of_bytes_reads_all_across_tiering_and_garbage(place: Place, store: hw.Store, short_sighted: None) -> None:
    stream = store.create_stream("t/bytes", kind="bytes")
    content = b"".join(b"%07d|" % number for number in range(200_000))
    with place.open() as writing, writing.stream("t/bytes").byte_writer() as writer:
        for start in range(0, len(content), 100_000):
            writer.write(content[start : start + 100_000])
            writer.flush()
    reader, found = stream.byte_reader(), b""
    assert forms(store).count(BLOCK) > 10
    for _ in range(4):
        found += reader.read(150_001)
        store.run_upkeep()
        with stream.byte_writer() as writer:
            writer.write(b"+")
    assert found + reader.readall() == content + b"++++"
    assert stream.byte_reader(799_990).read(20) == content[799_990:800_010]
    stream.seal()
    store.run_upkeep()
    assert stream.byte_reader().readall() == content + b"++++"
    assert sum(row[0] for row in store._engine.database.query("SELECT count FROM extent")) == len(content) + 4


@on_sqlite
def test_reading_goes_on_in_another_process_that_had_a_footer_of_a_chunk_that_is_gone(
    place: Place, store: hw.Store, short_sighted: None
) -> None:
    stream = store.create_stream("t/stale")
    with place.open() as other:
        theirs = other.stream("t/stale")
        for number in range(9):
            write(stream, [b"%d" % number])
            tier(store)
            assert values(theirs) == numbered(number + 1)
        report = store.run_upkeep()
        assert len(forms(store)) < 8, "small chunks were made one"
        events = theirs.read()
        assert next(events).value == b"0"
        write(stream, [b"9"])
        stream.seal()
        report = store.run_upkeep()
        assert report.objects_deleted
        assert [event.value for event in events] == numbered(8, 1)
        assert values(theirs) == numbered(10)


# Only what is asked for is fetched.


class Fetched:
    """What is read of a store's files, as (key, start, length)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ranges: list[tuple[str, int, int]] = []
        read = local._OpenFile.read

        def counted(file: local._OpenFile, key: str, start: int, length: int) -> Any:
            self.ranges.append((key, start, length))
            return read(file, key, start, length)

        monkeypatch.setattr(local._OpenFile, "read", counted)

    def take(self) -> int:
        found, self.ranges = sum(item[2] for item in self.ranges), []
        return found


@pytest.fixture
def wide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[hw.Store, hw.Stream]]:
    """A stream of 20 columns and 8 row groups in one chunk."""
    monkeypatch.setattr(chunk_module, "ROW_GROUP_BYTES", 1 << 20)
    names = [f"c{place}" for place in range(20)]
    with hw.open(tmp_path, upkeep=False) as store:
        stream = store.create_stream("t/wide", schema=pa.schema([(name, pa.binary()) for name in names]))
        rng = random.Random(1)
        with stream.writer() as writer:
            for _ in range(8):
                writer.write_batch(pa.table({name: [rng.randbytes(50) for _ in range(900)] for name in names}))
                writer.flush()
        tier(store)
        assert len(forms(store)) == 1
        yield store, stream


def test_a_column_costs_its_own_bytes(wide: tuple[hw.Store, hw.Stream], monkeypatch: pytest.MonkeyPatch) -> None:
    _, stream = wide
    size = stream.chunks()[0].bytes
    fetched = Fetched(monkeypatch)
    assert stream.to_arrow(columns=["c3"]).num_rows == 7200
    footer = 70_000
    assert fetched.take() < size / 15 + footer
    stream.to_arrow(columns=["c3"])
    assert fetched.take() < size / 15, "the footer is kept"
    assert sum(batch.num_rows for item in stream.ranges() for batch in item.to_batches(["_number"])) == 7200
    assert fetched.take() < size / 100
    stream.to_arrow()
    assert fetched.take() > size * 0.9


def test_a_point_costs_one_row_group(wide: tuple[hw.Store, hw.Stream], monkeypatch: pytest.MonkeyPatch) -> None:
    _, stream = wide
    size = stream.chunks()[0].bytes
    fetched = Fetched(monkeypatch)
    moment = next(stream.read(at(stream, 4000), at(stream, 4001))).time
    fetched.take()
    for number in (0, 899, 900, 4000, 7199):
        assert stream.to_arrow(at(stream, number), at(stream, number + 1), ["c1", "_number"]).column("_number").to_pylist() == [number]
        assert fetched.take() < size / 100, number
    event = next(stream.read(at(stream, 4000), at(stream, 4001)))
    assert event.position == (0, 4000) and fetched.take() < size / 7
    stream.cut_at(moment)
    assert fetched.take() < size / 100
    found = stream.to_arrow(start=moment, columns=["_number"]).column("_number").to_pylist()
    assert found[-1] == 7199 and fetched.take() < size / 50


# The files themselves.


@on_sqlite
def test_files_that_are_listed_under_a_hold_stay_also_if_they_are_being_compacted(
    place: Place, store: hw.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = store.create_stream("t/held")
    for number in range(7):
        write(stream, numbered(10, number * 10))
        tier(store)
    write(stream, numbered(10, 70))
    real = failpoints.reach
    listed: list[hw.ChunkRange] = []
    seen: list[str] = []

    def list_when_a_compaction_is_written(name: str) -> None:
        real(name)
        if name == "tier.written":
            seen.append(name)
            if len(seen) == 2:
                with place.open() as other:
                    theirs = other.stream("t/held")
                    other.hold("listing", theirs.head(), theirs.tail(), 600.0)
                    listed.extend(theirs.chunks())

    monkeypatch.setattr(failpoints, "reach", list_when_a_compaction_is_written)
    store.run_upkeep()
    monkeypatch.undo()
    assert len(listed) == 8 and all(Path(chunk.url.removeprefix("file://")).exists() for chunk in listed)
    store.release("listing")
    assert store.run_upkeep().chunks_compacted == 8
    assert values(stream) == numbered(80)


def test_chunks_are_listed_as_plain_parquet_files_that_hold_the_events(store: hw.Store) -> None:
    stream = store.create_stream("t/files", scaling=hw.Scaling.fixed(2), schema=pa.schema([("id", pa.int64())]))
    write(stream, [{"id": number} for number in range(100)], key=lambda row: str(row["id"]))
    assert stream.chunks() == []
    tier(store)
    write(stream, [{"id": 100}], key=lambda row: "x")
    listed = stream.chunks()
    assert sum(item.count for item in listed) == 100
    for item in listed:
        file = pq.ParquetFile(item.url.removeprefix("file://"))
        assert file.schema_arrow.names == ["id", "_key", "_time", "_appended", "_number"]
        table = file.read()
        assert table.column("_number").to_pylist() == list(range(item.first, item.first + file.metadata.num_rows))
        ours = next(found for found in stream.ranges() if found.segment == item.segment).to_arrow(["id"])
        assert table.slice(item.start - item.first, item.count).column("id").equals(ours.slice(0, item.count).column("id"))
    assert {item.segment for item in stream.chunks(start=stream.tail())} == set()


def test_counters_and_check_are_as_before(store: hw.Store) -> None:
    stream = store.create_stream("t/counters")
    write(stream, numbered(50))
    before = stream.segments()
    tier(store)
    assert stream.segments() == before
    report = check_store(store)
    assert report.ok and report.events == 50 and report.unused_count == 0


# Damage.


@pytest.fixture
def damaged(tmp_path: Path) -> Iterator[tuple[hw.Store, Path]]:
    """A store with a healthy stream and one whose only chunk is at the path."""
    with hw.open(tmp_path / "store", upkeep=False) as store:
        for name in ("t/hurt", "t/well"):
            write(store.create_stream(name), numbered(100))
        tier(store)
        chunk = Path(store.stream("t/hurt").chunks()[0].url.removeprefix("file://"))
    with hw.open(tmp_path / "store", upkeep=False) as store:
        yield store, chunk


def hurt_missing(path: Path) -> None:
    path.unlink()


def hurt_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def hurt_empty(path: Path) -> None:
    path.write_bytes(b"")


def hurt_footer(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)


def hurt_page(path: Path) -> None:
    data = bytearray(path.read_bytes())
    column = pq.read_metadata(path).row_group(0).column(0)
    data[column.data_page_offset + column.total_compressed_size - 5] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("hurt", [hurt_missing, hurt_short, hurt_empty, hurt_footer, hurt_page])
def test_a_damaged_chunk_is_named_and_nothing_else_suffers(hurt: Callable[[Path], None], damaged: tuple[hw.Store, Path]) -> None:
    store, path = damaged
    hurt(path)
    stream = store.stream("t/hurt")
    with pytest.raises(hw.CorruptDataError) as caught:
        values(stream)
    assert caught.value.object is not None and path.name in caught.value.object
    with pytest.raises(hw.CorruptDataError):
        stream.to_arrow()
    assert values(store.stream("t/well")) == numbered(100)
    report = check_store(store)
    assert {problem.stream for problem in report.problems} == {"t/hurt"}
    assert [problem.kind for problem in report.problems] == ["missing" if hurt is hurt_missing else "damaged"]
    write(stream, numbered(5, 100))
    assert values(stream, at(stream, 100)) == numbered(5, 100), "what is not in it can be read"


def test_a_damaged_log_is_reported_and_the_others_are_tiered(damaged: tuple[hw.Store, Path]) -> None:
    store, path = damaged
    hurt_page(path)
    for name in ("t/hurt", "t/well"):
        write(store.stream(name), numbered(5, 100))
        store.stream(name).seal()
    report = store.run_upkeep()
    assert report.chunks_written == 3, "both tails, and the healthy stream's chunks made one"
    assert len(report.problems) == 1 and "t/hurt" in report.problems[0] and path.name in report.problems[0]
    assert values(store.stream("t/well")) == numbered(105)
    assert values(store.stream("t/hurt"), at(store.stream("t/hurt"), 100)) == numbered(5, 100)


@on_sqlite
def test_what_pyarrow_can_not_do_with_one_stream_does_not_stop_the_upkeep_of_others(
    store: hw.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("t/first", "t/second"):
        write(store.create_stream(name), numbered(3))
    write_chunk = chunk_module.write_chunk

    def fail_once(*args: Any, **kwargs: Any) -> int:
        monkeypatch.setattr(tiering, "write_chunk", write_chunk)
        raise pa.ArrowNotImplementedError("no")

    monkeypatch.setattr(tiering, "write_chunk", fail_once)
    report = store.run_upkeep()
    assert report.chunks_written == 1 and len(report.problems) == 1 and "t/first" in report.problems[0]
    assert store.run_upkeep().chunks_written == 1


# An object store.


@pytest.fixture(scope="module")
def s3_server() -> Iterator[S3Server]:
    with running_s3() as server:
        yield server


@pytest.mark.slow
def test_an_object_store_is_tiered_compacted_and_cleaned(tmp_path: Path, postgres_url: str, s3_server: S3Server) -> None:
    with Place(f"s3://{BUCKET}/{tmp_path.name}", postgres_url, s3_server.options).open(create=True) as store:
        stream = store.create_stream("t/remote", schema=pa.schema([("id", pa.int64()), ("text", pa.string())]))
        for start in range(0, 300, 30):
            with stream.writer() as writer:
                writer.write_batch(pa.table({"id": range(start, start + 30), "text": ["." * 5000] * 30}), key="id")
            if start % 60:
                tier(store)
        slow = stream.read()
        assert next(slow).value["id"] == 0
        stream.seal()
        report = store.run_upkeep()
        assert report.problems == () and report.objects_deleted
        assert [event.value["id"] for event in slow] == list(range(1, 300))
        assert stream.to_arrow(columns=["id"]).column("id").to_pylist() == list(range(300))
        assert [event.value["id"] for key in (0, 299, 300, 7) for event in stream.read(key=key)] == [0, 299, 7]
        store.run_upkeep()
        keys = [info.key for prefix in ("l0/", "chunks/", "txn/") for info in store._engine.storage.list(prefix)]
        assert len(keys) == 1 and keys[0].startswith("chunks/t/remote-")
        assert check_store(store).ok
        started = time.monotonic()
        store.delete_stream("t/remote")
        store.run_upkeep()
        assert not list(store._engine.storage.list("chunks/")) and time.monotonic() - started < 60


@pytest.mark.parametrize("case", ["a job is never finished", "the first is truncated meanwhile", "in the wrong order"])
def test_a_job_whose_predecessor_is_not_in_place_takes_nothing_away(store: hw.Store, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    monkeypatch.setattr(tiers, "CHUNK_EXTENTS", 5)
    stream = store.create_stream("t/jobs")
    with stream.writer() as writer:
        for number in range(12):
            writer.write(b"%d" % number).result()
    head = 0
    with store.tiering("t/jobs") as work:
        made = [job.run() for job in work.jobs]
        assert len(made) == 3
        if case == "a job is never finished":
            assert [work.finish(one) for one in made[1:]] == [None, None]
        elif case == "in the wrong order":
            assert [work.finish(one) is not None for one in reversed(made)] == [False, False, True]
        else:
            head = 2
            stream.truncate(hw.Cut(store.id, {"t/jobs": stream.head().streams["t/jobs"]._replace(segments={0: head})}))
            assert [work.finish(one) for one in made] == [None, None, None]
    wanted = [b"%d" % number for number in range(head, 12)]
    assert [event.value for event in stream.read()] == wanted
    store.run_upkeep()
    assert [event.value for event in stream.read()] == wanted and sum(chunk.count for chunk in stream.chunks()) == len(wanted)
