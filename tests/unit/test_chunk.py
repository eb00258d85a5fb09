"""Chunks as files: what goes in comes out, by row groups and columns, and no flipped bit gives other events."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headwater.catalog.extents import PARQUET, Extent
from headwater.errors import CorruptDataError
from headwater.model.schemas import OPAQUE, TIME
from headwater.segments import chunk as chunk_module
from headwater.segments.chunk import ChunkFile, ChunkFiles, chunk_schema, seal_chunk, write_chunk
from headwater.storage.memory import MemoryStorage

SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string()), ("nested", pa.struct([("x", pa.float64()), ("y", pa.list_(pa.int8()))]))])
KEY = "chunks/c/x-1/segment=0/0000000000000100-000000000001-000001.parquet"


def batches(count: int, size: int, first: int = 100) -> Iterator[pa.RecordBatch]:
    for start in range(first, first + count, size):
        numbers = list(range(start, min(start + size, first + count)))
        yield pa.RecordBatch.from_arrays(
            [
                pa.array(numbers, pa.int64()),
                pa.array([None if number % 5 == 0 else f"name {number}" for number in numbers]),
                pa.array([{"x": number / 7, "y": [number % 100] * (number % 3)} for number in numbers], SCHEMA.field("nested").type),
                pa.array([b"%d" % (number % 10) for number in numbers]),
                pa.array([number * 1000 for number in numbers], pa.int64()).cast(TIME),
                pa.array([number // 10 for number in numbers], pa.int64()).cast(TIME),
                pa.array(numbers, pa.int64()),
            ],
            schema=chunk_schema(SCHEMA),
        )


class Made:
    """A chunk of events 100 and on, in a storage of its own."""

    def __init__(self, count: int = 100, size: int = 10) -> None:
        self.storage = MemoryStorage("chunk")
        rows: list[int] = []
        self.storage.write(KEY, lambda sink: rows.append(write_chunk(sink, SCHEMA, 3, batches(count, size))))
        assert rows == [count]
        info = seal_chunk(self.storage, KEY)
        self.count = count
        self.extent = Extent(100, count, info.length, info.crc, 10, 0, 1, KEY, None, PARQUET, 1, 10)
        self.data = bytes(self.storage.get(KEY, 0, info.length))

    def open(self, data: bytes | None = None) -> ChunkFile:
        if data is not None:
            self.storage.delete([KEY])
            self.storage.put(KEY, [data])
        return ChunkFiles(self.storage).open(self.extent)

    def rows(self, data: bytes | None = None) -> list[object]:
        """All events, with keys, times and append times; and their numbers checked."""
        file = self.open(data)
        found: list[object] = []
        for group in file.row_groups(100, 100 + self.count):
            chunk, appended = file.read(self.storage, group.places, None)
            assert appended is not None and chunk.keys is not None and chunk.times is not None
            columns = [chunk.columns.column(name).to_pylist() for name in SCHEMA.names]
            found += zip(*columns, chunk.keys.to_pylist(), chunk.times.to_pylist(), appended.to_pylist(), strict=True)
            file.check_numbers(self.storage, group.places)
        return found


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_module, "ROW_GROUP_ROWS", 25)


def test_a_chunk_is_a_parquet_file_with_its_events_in_order() -> None:
    made = Made()
    table = pq.read_table(pa.BufferReader(made.data))
    assert table.equals(pa.Table.from_batches(batches(100, 100)))
    assert len(made.rows()) == 100
    metadata = pq.read_metadata(pa.BufferReader(made.data))
    assert {metadata.row_group(0).column(place).compression for place in range(metadata.num_columns)} == {"ZSTD"}
    assert made.open().schema_version == 3


def test_row_groups_are_found_by_number_and_end_where_they_are_asked_to(small_groups: None) -> None:
    made = Made(100, 10)
    file = made.open()
    assert [(group.first, group.end) for group in file.row_groups(0, 1000)] == [(100, 120), (120, 140), (140, 160), (160, 180), (180, 200)]
    assert [(group.first, group.end) for group in file.row_groups(119, 121)] == [(100, 120), (120, 121)]
    assert [(group.first, group.end) for group in file.row_groups(120, 140)] == [(120, 140)]
    assert file.row_groups(200, 300) == []
    for number in range(100, 200):
        (group,) = file.row_groups(number, number + 1)
        chunk, _ = file.read(made.storage, group.places, ["id"])
        assert chunk.columns.column("id")[number - group.first].as_py() == number


def test_a_block_larger_than_a_row_group_is_cut(small_groups: None) -> None:
    made = Made(100, 100)
    assert [(group.first, group.end) for group in made.open().row_groups(0, 1000)] == [(100, 125), (125, 150), (150, 175), (175, 200)]
    assert len(made.rows()) == 100


def test_a_time_is_found_in_its_row_group(small_groups: None) -> None:
    made = Made(100, 10)
    file = made.open()
    for number in range(100, 200):
        assert file.find_time(made.storage, number // 10) == number // 10 * 10
    assert file.find_time(made.storage, 0) == 100 and file.find_time(made.storage, 20) == 200


def test_columns_that_a_chunk_does_not_have_cost_and_give_nothing() -> None:
    made = Made()
    file = made.open()
    chunk, appended = file.read(made.storage, file.row_groups(100, 200)[0].places, ["added later"])
    assert chunk.count == 100 and appended is None and chunk.keys is None


def test_opaque_events_keep_their_bytes() -> None:
    storage = MemoryStorage("opaque")
    values = [random.Random(1).randbytes(100), b"", b"\0"]
    columns = [
        pa.array(values),
        pa.nulls(3, pa.binary()),
        *[pa.array([1, 2, 3], pa.int64()).cast(TIME)] * 2,
        pa.array([0, 1, 2], pa.int64()),
    ]
    batch = pa.RecordBatch.from_arrays(columns, schema=chunk_schema(OPAQUE))
    rows: list[int] = []
    storage.write(KEY, lambda sink: rows.append(write_chunk(sink, OPAQUE, 1, iter([batch]))))
    info = seal_chunk(storage, KEY)
    file = ChunkFiles(storage).open(Extent(0, 3, info.length, info.crc, 1, 0, 1, KEY, None, PARQUET, 1, 3))
    chunk, _ = file.read(storage, file.row_groups(0, 3)[0].places, None)
    assert chunk.columns.column("value").to_pylist() == values


def test_no_flipped_bit_gives_other_events(seed: int, small_groups: None) -> None:
    """Anything but the same events or an error that says so would be a lie."""
    made = Made(50, 10)
    expected = made.rows()
    rng = random.Random(seed)
    told = 0
    for _ in range(400):
        data = bytearray(made.data)
        data[rng.randrange(4, len(data))] ^= 1 << rng.randrange(8)
        try:
            assert made.rows(bytes(data)) == expected
        except CorruptDataError as error:
            told += error.object == KEY
    assert told > 300, "most bits matter"


def test_a_chunk_that_is_cut_short_is_told(small_groups: None) -> None:
    made = Made(50, 10)
    for length in (0, 1, 7, 8, 100, len(made.data) // 2, len(made.data) - 1):
        with pytest.raises(CorruptDataError) as caught:
            made.rows(made.data[:length])
        assert caught.value.object == KEY


def test_a_chunk_of_other_events_is_told() -> None:
    one, other = Made(50, 10), Made(49, 10)
    with pytest.raises(CorruptDataError, match="checksum"):
        one.rows(other.data.ljust(len(one.data), b"\0")[: len(one.data) - 8] + one.data[-8:])
    with pytest.raises(CorruptDataError, match="49 events, the catalog says 50"):
        one.extent = Extent(100, 50, len(other.data), other.extent.crc, 10, 0, 1, KEY, None, PARQUET, 1, 10)
        one.rows(other.data)


def test_footers_are_kept_for_the_last_chunks_only() -> None:
    made = Made()
    files = ChunkFiles(made.storage)
    first = files.open(made.extent)
    assert files.open(made.extent) is first
    for number in range(300):
        key = f"chunks/c/x-1/segment=0/{number:016d}-000000000001-{number:06x}.parquet"
        made.storage.put(key, [made.data])
        extent = Extent(100, 100, len(made.data), made.extent.crc, 10, 0, 1, key, None, PARQUET, 1, 10)
        files.open(extent)
    assert len(files._kept) == 256
    assert files.open(made.extent) is not first
