"""L0 blocks: what goes in comes out, and no changed byte goes unnoticed."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import CorruptDataError
from headwater.model.schemas import OPAQUE, TIME
from headwater.segments.block import HEADER, Chunk, EncodedBlock, decode, verify
from headwater.segments.encoding import encode

TYPED = pa.schema(
    [
        pa.field("n", pa.int64(), nullable=False),
        ("text", pa.string()),
        ("price", pa.decimal128(9, 2)),
        ("tags", pa.list_(pa.struct([("k", pa.string())]))),
        ("extra", pa.map_(pa.string(), pa.int32())),
    ]
)

TIMES = st.datetimes(timezones=st.just(UTC))


@st.composite
def chunks(draw: st.DrawFn, columns: st.SearchStrategy[pa.Array | list[Any]], schema: pa.Schema) -> Chunk:
    """Some events, perhaps as a slice out of a larger batch, with or without keys and times."""
    rows = draw(columns)
    before, after = draw(st.integers(0, min(2, len(rows)))), draw(st.integers(0, 2))
    whole = (
        pa.RecordBatch.from_pylist(rows, schema=schema)
        if schema is not OPAQUE
        else pa.RecordBatch.from_arrays([pa.array(rows, pa.binary())], schema=schema)
    )
    count = len(rows)
    keys = draw(st.none() | st.lists(st.none() | st.binary(max_size=9), min_size=count, max_size=count))
    times = draw(st.none() | st.lists(st.none() | TIMES, min_size=count, max_size=count))
    chunk = Chunk(whole, pa.array(keys, pa.binary()) if keys is not None else None, pa.array(times, TIME) if times is not None else None)
    return chunk.slice(before, max(before, count - after))


VALUES = st.lists(st.binary(max_size=40), min_size=1, max_size=8)
ROWS = st.lists(
    st.fixed_dictionaries(
        {"n": st.integers(-(2**63), 2**63 - 1)},
        optional={
            "text": st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
            "price": st.none() | st.decimals(-1000, 1000, places=2),
            "tags": st.none() | st.lists(st.fixed_dictionaries({"k": st.none() | st.text("ab")}), max_size=3),
            "extra": st.none() | st.dictionaries(st.text("ab", max_size=2), st.integers(0, 9), max_size=2),
        },
    ),
    min_size=1,
    max_size=8,
)


def stored(block: EncodedBlock) -> pa.Buffer:
    data = pa.py_buffer(block.to_bytes())
    assert data.size == block.length
    verify(data, block.crc, "here")
    return data


def listed(array: pa.Array | None, count: int) -> list[Any]:
    return array.to_pylist() if array is not None else [None] * count


@pytest.mark.parametrize(("rows", "schema"), [(VALUES, OPAQUE), (ROWS, TYPED)], ids=["opaque", "typed"])
def test_events_come_out_of_a_block_as_they_went_in(rows: Any, schema: pa.Schema) -> None:
    @given(st.lists(chunks(rows, schema), min_size=1, max_size=3), st.integers(1, 2**32 - 1))
    def check(given_chunks: list[Chunk], version: int) -> None:
        block = encode(given_chunks, version, schema is OPAQUE)
        found, stored_version = decode(stored(block), {version: schema}.__getitem__, "here")
        count = sum(chunk.count for chunk in given_chunks)
        assert (found.count, block.count, stored_version) == (count, count, version)
        assert found.columns.to_pylist() == [row for chunk in given_chunks for row in chunk.columns.to_pylist()]
        assert listed(found.keys, count) == [key for chunk in given_chunks for key in listed(chunk.keys, chunk.count)]
        assert listed(found.times, count) == [time for chunk in given_chunks for time in listed(chunk.times, chunk.count)]
        found.columns.validate(full=True)
        for array in filter(None, (found.keys, found.times)):
            array.validate(full=True)

    check()


def opaque(values: list[bytes], keys: list[bytes | None] | None = None) -> Chunk:
    return Chunk(
        pa.RecordBatch.from_arrays([pa.array(values, pa.binary())], schema=OPAQUE), pa.array(keys, pa.binary()) if keys else None, None
    )


def test_decoding_opaque_events_copies_nothing() -> None:
    data = stored(encode([opaque([b"x" * 1000] * 10)], 1, True))
    values = decode(data, None, "here").chunk.columns.column(0)
    assert data.address <= values.buffers()[2].address < data.address + data.size


def test_taking_events_takes_their_keys_and_times() -> None:
    times = pa.array([datetime(2024, 1, day, tzinfo=UTC) for day in (1, 2, 3)], TIME)
    chunk = Chunk(opaque([b"a", b"b", b"c"]).columns, pa.array([b"1", None, b"3"]), times).take([2, 0])
    assert chunk.columns.to_pylist() == [{"value": b"c"}, {"value": b"a"}]
    assert listed(chunk.keys, 2) == [b"3", b"1"]
    assert [time.day for time in listed(chunk.times, 2)] == [3, 1]


@given(st.data())
def test_no_changed_byte_goes_unnoticed(data: st.DataObject) -> None:
    block = encode([opaque([b"some", b"", b"values"], [b"k", None, b""])], 1, True)
    content = bytearray(block.to_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CorruptDataError, match="journal/7") as caught:
        verify(pa.py_buffer(bytes(content)), block.crc, "journal/7")
    assert caught.value.object == "journal/7"


@given(st.data())
def test_a_block_that_ends_early_or_late_is_noticed(data: st.DataObject) -> None:
    block = encode([opaque([b"some", b"values"])], 1, True)
    content = block.to_bytes()
    other = data.draw(st.sampled_from([content[:n] for n in range(len(content))] + [content + b"x"]))
    with pytest.raises(CorruptDataError):
        verify(pa.py_buffer(other), block.crc, "here")


def test_a_whole_block_that_is_not_the_one_named_by_the_catalog_is_noticed() -> None:
    block, other = encode([opaque([b"one"])], 1, True), encode([opaque([b"two"])], 1, True)
    with pytest.raises(CorruptDataError, match="the catalog"):
        verify(pa.py_buffer(other.to_bytes()), block.crc, "here")


@pytest.mark.parametrize(("kind", "lengths"), [(9, None), (1, 6), (2, 0)], ids=["kind", "lengths", "none"])
def test_a_header_of_an_unknown_form_is_refused_by_name(kind: int, lengths: int | None) -> None:
    content = bytearray(encode([opaque([b"one"])], 1, True).to_bytes())
    fields = list(HEADER.unpack_from(content))
    fields[1] = kind
    if lengths is not None:
        fields[7:] = [lengths] * 7
    HEADER.pack_into(content, 0, *fields)
    with pytest.raises(CorruptDataError, match="journal/7"):
        decode(pa.py_buffer(bytes(content)), lambda version: TYPED, "journal/7")
