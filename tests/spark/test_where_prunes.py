"""Without a session: `where` passes over row groups by their statistics, and never over one that has a row it chooses."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headwater as hw
from headwater.runtime.pace import Pace
from headwater.segments import chunk as chunk_module
from headwater.segments.chunk import ChunkFile
from headwater.spark.options import read_source_options
from headwater.spark.source import RangeReader, RangesPartition, source_schema
from headwater.spark.where import make_expression, parse_where

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
SCHEMA = pa.schema(
    [
        ("n", pa.int32()),
        ("u", pa.uint64()),
        ("x", pa.float64()),
        ("f", pa.float32()),
        ("price", pa.decimal128(10, 2)),
        ("name", pa.string()),
        ("raw", pa.binary()),
        ("at", pa.timestamp("ns", "UTC")),
        ("second", pa.timestamp("s")),
        ("day", pa.date32()),
        ("flag", pa.bool_()),
    ]
)
NAN, INF = float("nan"), float("inf")


def make_rows(rng: random.Random, count: int) -> pa.Table:
    """Rows near each other, so that statistics tell row groups apart; some columns are null or NaN alone, some now and then."""
    middle = rng.randrange(-50, 50)
    odd = {name: rng.choice([0.0, 0.0, 0.2, 1.0]) for name in SCHEMA.names}
    rows = []
    for _ in range(count):
        number = middle + rng.randrange(4)
        row: dict[str, Any] = {
            "n": number,
            "u": 2**64 - 50 + number % 50 if middle % 2 else abs(number),
            "x": rng.choice([number / 4, number / 4, -0.0, INF]) if middle % 3 else number / 4,
            "f": number / 10,
            "price": Decimal(number).scaleb(-1),
            "name": rng.choice(["", "a", "ä", "z"]) + str(number),
            "raw": bytes([number % 256, 255]),
            "at": pa.scalar(1767225600_000000_000 + number * 700, pa.timestamp("ns", "UTC")).value,
            "second": number - 10,
            "day": number,
            "flag": number % 2 == 0,
        }
        for name in row:
            if rng.random() < odd[name]:
                row[name] = NAN if name in ("x", "f") and rng.random() < 0.7 else None
        rows.append(row)
    return pa.table([pa.array([row[field.name] for row in rows], field.type) for field in SCHEMA], schema=SCHEMA)


def random_leaf(rng: random.Random) -> str:
    number = rng.randrange(-52, 54)
    moment = EPOCH + timedelta(microseconds=number * 7 // 10)
    name, value = rng.choice(
        [
            ("n", str(number)),
            ("n", f"{number}.5"),
            ("n", f"{number}.0e0"),
            ("u", str(rng.choice([abs(number), 2**64 - 50 + number % 50]))),
            ("x", f"{number / 4}"),
            ("x", rng.choice(["'NaN'", f"{number}"])),
            ("f", f"{number / 10}"),
            ("f", f"{number / 10}e0"),
            ("price", f"{number / 10}"),
            ("price", f"{number}"),
            ("name", rng.choice(["''", f"'a{number}'", f"'ä{number}'", "'z'"])),
            ("raw", "'k'"),
            ("at", f"'{moment.isoformat()}'"),
            ("second", f"TIMESTAMP '{(datetime(1970, 1, 1) + timedelta(seconds=number - 10)).isoformat()}'"),
            ("day", f"DATE '{(datetime(1970, 1, 1) + timedelta(days=number)).date().isoformat()}'"),
            ("flag", "true"),
            ("_number", str(rng.randrange(400))),
            ("_time", f"'{EPOCH.isoformat()}'"),
            ("_key", str(rng.randrange(10))),
        ]
    )
    return rng.choice(
        [
            f"{name} {rng.choice(['=', '!=', '<', '<=', '>', '>='])} {value}",
            f"{name} {rng.choice(['=', '!=', '<', '<=', '>', '>='])} {value}",
            f"{name} is null",
            f"{name} is not null",
            f"{name} in ({value}, {value})",
            f"{name} not between {value} and {value}",
            f"name {rng.choice(['', 'not '])}like 'a%'",
        ]
    )


def random_condition(rng: random.Random, depth: int = 2) -> str:
    if depth == 0 or rng.random() < 0.3:
        return random_leaf(rng)
    if rng.random() < 0.3:
        return f"not ({random_condition(rng, depth - 1)})"
    return f"({random_condition(rng, depth - 1)} {rng.choice(['and', 'or'])} {random_condition(rng, depth - 1)})"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[hw.Store]:
    monkeypatch.setattr(chunk_module, "ROW_GROUP_BYTES", 1000)
    with hw.open(tmp_path / "store", upkeep=False) as store:
        yield store


class Read:
    """Reads as a task does, and counts the row groups that it fetches."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.groups = 0
        read = ChunkFile.read

        def counted(file: ChunkFile, storage: Any, places: range, names: Any) -> Any:
            self.groups += len(places)
            return read(file, storage, places, names)

        monkeypatch.setattr(ChunkFile, "read", counted)

    def __call__(self, stream: hw.Stream, where: str | None) -> pa.Table:
        options = read_source_options({"store": stream._store.url, "stream": str(stream.name), **({"where": where} if where else {})})
        reader = RangeReader(options, source_schema(options))
        self.groups = 0
        found = list(reader.read(RangesPartition(stream.ranges())))
        return pa.Table.from_batches(found) if found else pa.table({"_number": pa.array([], pa.int64())})


def write(stream: hw.Stream, rng: random.Random, blocks: int) -> None:
    with stream.writer() as writer:
        for _ in range(blocks):
            writer.write_batch(make_rows(rng, rng.randrange(1, 12)), key="n" if rng.random() < 0.5 else None)
            writer.flush()


def test_what_is_read_is_what_a_scan_of_all_rows_chooses(seed: int, store: hw.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    stream = store.create_stream("a/many", schema=SCHEMA)
    write(stream, rng, 30)
    store.run_upkeep()
    write(stream, rng, 3)
    stream.update(schema=pa.schema([*SCHEMA, ("later", pa.int64())]))
    read = Read(monkeypatch)
    everything = read(stream, None)
    total, passed = read.groups, 0
    assert total > 10
    for _ in range(250):
        where = random_condition(rng)
        expected = everything.filter(make_expression(parse_where(where), everything.schema))
        found = read(stream, where)
        assert found.column("_number").to_pylist() == expected.column("_number").to_pylist(), where
        passed += total - read.groups
    assert passed > 250 * total / 10, "statistics rule out some"
    assert read(stream, "later is null").num_rows == everything.num_rows


@pytest.mark.parametrize(
    ("where", "groups"),
    [
        ("n = 505", 1),
        ("n >= 980", 2),
        ("not (n < 980)", 2),
        ("n between 15 and 25 or n = 999", 3),
        ("n is null", 0),
        ("n is not null", 100),
        ("name = 'x' and n = 505", 0),
        ("at < '2026-01-01T00:00:15'", 2),
        ("_number < 10", 1),
        ("_segment = 7", 100),
        ("x <= 15.5", 2),
        ("price > 985.5", 2),
        ("gone is not null", 0),
        ("n != 7", 100),
    ],
)
def test_only_row_groups_that_may_have_such_rows_are_fetched(
    store: hw.Store, monkeypatch: pytest.MonkeyPatch, where: str, groups: int
) -> None:
    fields = [("n", pa.int64()), ("name", pa.string()), ("at", pa.timestamp("us", "UTC")), ("x", pa.float64())]
    stream = store.create_stream("a/rising", schema=pa.schema([*fields, ("price", pa.decimal128(10, 2)), ("gone", pa.int8())]))
    monkeypatch.setattr(chunk_module, "ROW_GROUP_BYTES", 700)
    # Just after a write, large batches would be taken apart.
    monkeypatch.setattr(Pace, "is_busy", lambda _: False)
    with stream.writer() as writer:
        for start in range(0, 1000, 10):
            numbers = range(start, start + 10)
            times = [EPOCH + timedelta(seconds=number) for number in numbers]
            columns = [
                numbers,
                ["a"] * 10,
                times,
                [float(number) for number in numbers],
                [Decimal(number) for number in numbers],
                [None] * 10,
            ]
            writer.write_batch(
                pa.table([pa.array(list(c), f.type) for c, f in zip(columns, stream.schema, strict=True)], schema=stream.schema)
            )
            writer.flush()
    store.run_upkeep()
    read = Read(monkeypatch)
    assert read(stream, None).num_rows == 1000 and read.groups == 100
    read(stream, where)
    assert read.groups == groups


def test_a_fork_s_rows_are_not_judged_by_columns_that_its_parent_added(store: hw.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """One chunk has the fork's rows and later ones of its parent, in row groups of both."""
    parent = store.create_stream("a/parent", schema=pa.schema([("n", pa.int64())]))
    with parent.writer() as writer:
        writer.write_batch(pa.table({"n": range(101)}))
    forks = [parent.fork(f"a/fork-{kind}") for kind in (pa.int64(), pa.string())]
    for fork, kind in zip(forks, (pa.int64(), pa.string()), strict=True):
        fork.update(schema=pa.schema([("n", pa.int64()), ("extra", kind)]))
    parent.update(schema=pa.schema([("n", pa.int64()), ("extra", pa.int64())]))
    with parent.writer() as writer:
        writer.write_batch(pa.table({"n": range(101, 200), "extra": range(99)}))
    store.run_upkeep()
    (chunk,) = parent.chunks()
    assert chunk.count == 200
    read = Read(monkeypatch)
    for fork in forks:
        assert read(fork, None).num_rows == 101
        assert read(fork, "n < 7").num_rows == 7 and read(fork, "n >= 100").num_rows == 1
        assert read(fork, "extra is null").num_rows == read(fork, "not (extra is not null)").num_rows == 101
        assert read(fork, "extra is not null").num_rows == 0
        with fork.writer() as writer:
            writer.write({"n": 1000, "extra": "12" if fork.schema.field("extra").type == pa.string() else 12})
    assert read(forks[0], "extra = 12").num_rows == 1 and read(forks[1], "extra = '12'").num_rows == 1
    store.run_upkeep()
    assert read(forks[0], "extra = 12").num_rows == 1 and read(forks[1], "extra = '12' and n > 100").num_rows == 1
    assert read(parent, "extra = 12").num_rows == 1
