"""Without a session: conditions, how ranges become partitions, and hashes of rows."""

from __future__ import annotations

import random
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import datasource as filters

import headwater as hw
from headwater.model.keys import KeyRange
from headwater.spark.hashing import hash_rows
from headwater.spark.planning import divide
from headwater.spark.where import columns_of, from_spark_filter, make_expression, parse_where

ROWS = pa.record_batch(
    {
        "n": pa.array([1, 2, None, -4], pa.int64()),
        "x": pa.array([0.5, None, 2.5, 3.5], pa.float64()),
        "name": pa.array(["a", "it's", None, "ab"], pa.string()),
        "flag": pa.array([True, False, None, True]),
        "at": pa.array([datetime(2026, 1, day, tzinfo=UTC) for day in (1, 2, 3, 4)], pa.timestamp("us", "UTC")),
        "_key": pa.array([b"7", b"k", None, b"7"], pa.binary()),
        "price": pa.array([Decimal("5.00"), Decimal("10.50"), None, Decimal("99.99")], pa.decimal128(10, 2)),
        "large": pa.array([2**60, 20_000_000, None, 1], pa.int64()),
        "unsigned": pa.array([2**64 - 1, 5, None, 0], pa.decimal128(20, 0)),
        "raw": pa.array([b"ab", b"\xff\xfe", None, b"b"], pa.binary()),
        "odd": pa.array([1.0, float("nan"), None, 20.0], pa.float64()),
    }
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("n = 1", [0]),
        ("n <> 1", [1, 3]),
        ("n >= -4 and n < 2", [0, 3]),
        ("not n = 1", [1, 3]),
        ("n = 1 or x > 3 and flag = true", [0, 3]),
        ("(n = 1 or x > 3) and name = 'ab'", [3]),
        ("name in ('a', 'it''s')", [0, 1]),
        ("name not in ('a')", [1, 3]),
        ("name like 'a%'", [0, 3]),
        ("name is null", [2]),
        ("`name` IS NOT NULL AND x IS NULL", [1]),
        ("at between '2026-01-02' and TIMESTAMP '2026-01-03 00:00:00'", [1, 2]),
        ("at > '2026-01-03T01:00:00+02:00'", [2, 3]),
        ("_key = 7", [0, 3]),
        ("_key = '7'", [0, 3]),
        ("x > 1", [2, 3]),
        ("n > 1.5", [1]),
        ("x = 2.5e0", [2]),
        ("price > 10", [1, 3]),
        ("price in (5, 10.5)", [0, 1]),
        ("price > 10.4999999999", [1, 3]),
        ("large > 1.5", [0, 1]),
        ("large > 15e-1", [0, 1]),
        ("large < 1e18", [1, 3]),
        ("unsigned = 18446744073709551615", [0]),
        ("unsigned > 4", [0, 1]),
        ("raw like 'a%'", [0]),
        # As Spark has it, NaN is equal to itself and larger than all other numbers.
        ("odd > 10", [1, 3]),
        ("odd >= 20.0", [1, 3]),
        ("not odd < 10", [1, 3]),
        ("odd <= 20", [0, 3]),
        ("odd = 'NaN'", [1]),
        ("odd < 'NaN'", [0, 3]),
        ("odd <= 'NaN'", [0, 1, 3]),
        ("odd > 'NaN'", []),
        ("odd in ('NaN', 1)", [0, 1]),
    ],
)
def test_a_condition_chooses_rows_as_sql_does(text: str, expected: list[int]) -> None:
    chosen = ROWS.append_column("row", pa.array(range(4))).filter(make_expression(parse_where(text), ROWS.schema))
    assert chosen.column("row").to_pylist() == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("n >", "a value is expected"),
        ("n", "a comparison is expected behind 'n'"),
        ("n = 1 n", "'n' is one too many"),
        ("(n = 1", "'\\)' is expected"),
        ("= 1", "a column's name is expected"),
        ("n = ?", "is not understood"),
        ("nope = 1", "there is no column 'nope'"),
        ("n = 'a'", "column 'n' is int64, and 'a' can't be compared"),
        ("flag = 1", "can't be compared"),
        ("at > 'yesterday'", "can't be compared"),
        ("at > 1.5", "can't be compared"),
        ("at like '2026%'", "LIKE is for texts and bytes"),
        ("n like '1%'", "LIKE is for texts and bytes"),
        ("price > 0.0000000000000000000000000000000000001", "can't be applied"),
    ],
)
def test_a_condition_that_is_wrong_says_why(text: str, words: str) -> None:
    with pytest.raises(hw.InvalidRequestError, match=words):
        make_expression(parse_where(text), ROWS.schema)


def test_sparks_bytes_are_bytes() -> None:
    condition = from_spark_filter(filters.EqualTo(("raw",), bytearray(b"ab")))
    assert condition is not None
    assert ROWS.filter(make_expression(condition, ROWS.schema)).num_rows == 1


def test_the_columns_of_a_condition_are_known() -> None:
    assert columns_of(parse_where("n = 1 or not (x > 3 and name is null)")) == {"n", "x", "name"}


@pytest.mark.parametrize(
    ("spark_filter", "expected"),
    [
        (filters.EqualTo(("n",), 1), ("=", "n", 1)),
        (filters.Not(filters.In(("n",), (1, 2))), ("not", ("or", ("=", "n", 1), ("=", "n", 2)))),
        (filters.IsNotNull(("n",)), ("not", ("null", "n"))),
        (filters.LessThanOrEqual(("x",), 1.5), ("<=", "x", 1.5)),
        (filters.EqualTo(("nested", "n"), 1), None),
        (filters.StringContains(("name",), "a"), None),
    ],
)
def test_sparks_filters_are_conditions_or_left_to_spark(spark_filter: filters.Filter, expected: Any) -> None:
    assert from_spark_filter(spark_filter) == expected


def part(segment: int, size: int, keys: tuple[int, int], stream: str = "a/x") -> hw.SegmentRange:
    return hw.SegmentRange(None, stream, segment, 0, 100, 1, size, KeyRange(*keys))


def test_a_segment_and_its_successors_are_one_partition_in_order() -> None:
    plan = divide([part(3, 40, (5, 10)), part(0, 10, (0, 10)), part(2, 30, (0, 5)), part(1, 90, (10, 20))], 100)
    assert [[piece.segment for piece in partition] for partition in plan] == [[0, 2, 3], [1]]


def test_what_is_too_large_is_cut_into_partitions_that_follow_each_other() -> None:
    plan = divide([part(0, 250, (0, 10)), part(1, 20, (0, 10)), part(2, 20, (10, 20))], 100)
    found = [[(piece.segment, piece.start, piece.end) for piece in partition] for partition in plan]
    assert found == [[(0, 0, 33)], [(0, 33, 66)], [(0, 66, 100)], [(1, 0, 100), (2, 0, 100)]]


def test_small_ranges_of_several_streams_are_joined() -> None:
    plan = divide([part(index, 10, (index, index + 1), f"a/{index % 2}") for index in range(30)], 100)
    assert [len(partition) for partition in plan] == [10, 10, 10]
    assert sum(len(partition) for partition in plan) == 30


def test_a_hash_of_rows_does_not_depend_on_their_order_and_tells_values_apart(seed: int) -> None:
    rng = random.Random(seed)
    rows: list[dict[str, Any]] = [
        {"n": rng.randrange(100), "name": rng.choice(["a", None, "b"]), "l": [rng.randrange(3)], "f": rng.random()} for _ in range(50)
    ]
    schema = pa.schema([("n", pa.int32()), ("name", pa.string()), ("l", pa.list_(pa.int64())), ("f", pa.float64())])

    def total(some: list[dict[str, Any]], pieces: int = 1) -> int:
        return sum(hash_rows(pa.RecordBatch.from_pylist(some[index::pieces], schema=schema)) for index in range(pieces)) % (1 << 64)

    shuffled = rng.sample(rows, len(rows))
    assert total(rows) == total(shuffled) == total(shuffled, 3)
    changed = [dict(row) for row in rows]
    changed[7]["f"] += 1e-9
    assert total(changed) != total(rows)
    assert total([*rows, rows[0]]) != total(rows)
    assert total([{**rows[0], "name": None}]) != total([{**rows[0], "name": "None"}])
