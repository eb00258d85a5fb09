"""A few typed events are encoded as Arrow does it."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.model.records import JOURNAL_SCHEMA
from headwater.segments.block import Chunk, decode, verify
from headwater.segments.encoding import encode, encode_few_rows
from headwater.segments.fewrows import few_rows

KINDS: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.string(), st.text(max_size=9)),
    (pa.binary(), st.binary(max_size=9)),
    (pa.bool_(), st.booleans()),
    (pa.int8(), st.integers(-128, 127)),
    (pa.uint16(), st.integers(0, 65535)),
    (pa.int32(), st.integers(-(1 << 31), (1 << 31) - 1)),
    (pa.int64(), st.integers(-(1 << 63), (1 << 63) - 1)),
    (pa.uint64(), st.integers(0, (1 << 64) - 1)),
    (pa.float32(), st.floats(width=32, allow_nan=False) | st.integers(-1000, 1000)),
    (pa.float64(), st.floats(allow_nan=False) | st.integers(-(1 << 53), 1 << 53)),
    (pa.list_(pa.string()), st.lists(st.none() | st.text(max_size=5), max_size=4)),
    (pa.list_(pa.list_(pa.int16())), st.lists(st.none() | st.lists(st.none() | st.integers(-9, 9), max_size=3), max_size=3)),
]


@st.composite
def tables(draw: st.DrawFn) -> tuple[pa.Schema, list[dict[str, Any]], list[bytes | None]]:
    chosen = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=6))
    fields, columns = [], []
    count = draw(st.integers(1, 20))
    for place, (kind, values) in enumerate(chosen):
        nullable = draw(st.booleans())
        fields.append(pa.field(f"c{place}", kind, nullable=nullable))
        columns.append(draw(st.lists(st.none() | values if nullable else values, min_size=count, max_size=count)))
    rows = [{f"c{place}": value for place, value in enumerate(row) if value is not None} for row in zip(*columns, strict=True)]
    return pa.schema(fields), rows, draw(st.lists(st.none() | st.binary(max_size=5), min_size=count, max_size=count))


@given(tables())
def test_a_block_of_a_few_rows_is_read_as_what_arrow_makes_of_them(
    given: tuple[pa.Schema, list[dict[str, Any]], list[bytes | None]],
) -> None:
    schema, rows, keys = given
    few = few_rows(schema)
    assert few is not None
    block = encode_few_rows(rows, keys, few, 7)
    data = pa.py_buffer(block.to_bytes())
    assert data.size == block.length and block.count == len(rows)
    verify(data, block.crc, "a test")
    found = decode(data, lambda version: schema, "a test")
    assert found.schema_version == 7
    found.chunk.columns.validate(full=True)
    expected = pa.RecordBatch.from_pylist(rows, schema=schema)
    assert found.chunk.columns.equals(expected)
    if any(key is not None for key in keys):
        assert found.chunk.keys is not None and found.chunk.keys.to_pylist() == keys
    else:
        assert found.chunk.keys is None


def test_without_nulls_the_bytes_are_those_of_arrow() -> None:
    row = {"id": "a", "sequence": 1, "type": "x", "version": 1, "data": "{}", "tags": ["ä", "b"], "meta": "1", "event_id": "u"}
    few = few_rows(JOURNAL_SCHEMA)
    assert few is not None and few is few_rows(JOURNAL_SCHEMA)
    for rows in ([row], [row, row | {"id": "longer than eight bytes"}, row | {"tags": []}]):
        keys: list[bytes | None] = [b"k"] * len(rows)
        chunk = Chunk(pa.RecordBatch.from_pylist(rows, schema=JOURNAL_SCHEMA), pa.array(keys, pa.binary()), None)
        assert encode_few_rows(rows, keys, few, 1).to_bytes() == encode([chunk], 1, False).to_bytes()


@pytest.mark.parametrize(
    "kind", [pa.timestamp("us", "UTC"), pa.decimal128(9, 2), pa.struct([("a", pa.int64())]), pa.large_string(), pa.float16()]
)
def test_what_takes_arrow_is_left_to_it(kind: pa.DataType) -> None:
    assert few_rows(pa.schema([("a", pa.int64()), ("b", kind)])) is None
    assert few_rows(pa.schema([("b", pa.list_(kind))])) is None
    assert few_rows(pa.schema([])) is None
