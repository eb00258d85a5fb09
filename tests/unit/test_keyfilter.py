"""The filters on `_key`: a row group that has a key is never denied, and most of those without it are."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.catalog.extents import PARQUET, Extent
from headwater.errors import CorruptDataError
from headwater.model.schemas import OPAQUE, TIME
from headwater.segments import chunk as chunk_module
from headwater.segments import keyfilter
from headwater.segments.chunk import ChunkFile, ChunkFiles, chunk_schema, seal_chunk, write_chunk
from headwater.segments.keyfilter import filter_options, needed_bytes
from headwater.storage.memory import MemoryStorage

KEY = "chunks/c/x-1/segment=0/0000000000000000-000000000001-000001.parquet"


class Made:
    """A chunk with a row group for each list of keys."""

    def __init__(self, groups: Sequence[Sequence[bytes | None]], size: int = 10) -> None:
        self.storage = MemoryStorage("filters")
        self.count = sum(map(len, groups))
        rng = random.Random(1)
        batches = []
        for keys in groups:
            values = pa.array([rng.randbytes(size) for _ in keys], pa.binary())
            times = pa.array([1] * len(keys), pa.int64()).cast(TIME)
            numbers = pa.array(range(len(keys)), pa.int64())
            columns = [values, pa.array(keys, pa.binary()), times, times, numbers]
            batches.append(pa.RecordBatch.from_arrays(columns, schema=chunk_schema(OPAQUE)))

        def produce(sink: pa.NativeFile) -> None:
            # Each batch is a row group of its own.
            write_chunk(sink, OPAQUE, 1, iter(batches), group_bytes=1)

        before = chunk_module.ROW_GROUP_BYTES
        chunk_module.ROW_GROUP_BYTES = 1  # or a batch would be taken apart
        try:
            self.storage.write(KEY, produce)
        finally:
            chunk_module.ROW_GROUP_BYTES = before
        info = seal_chunk(self.storage, KEY)
        self.length = info.length
        self.extent = Extent(0, self.count, info.length, info.crc, 1, 0, 1, KEY, None, PARQUET, 1, 1)

    def open(self) -> ChunkFile:
        return ChunkFiles(self.storage).open(self.extent)

    def denied(self, key: bytes) -> set[int]:
        return self.open().denied(self.storage, key)

    def places(self) -> list[tuple[Any, Any]]:
        metadata = pq.read_metadata(pa.BufferReader(self.storage.get(KEY, 0, self.length)))
        columns = [metadata.row_group(index).column(1) for index in range(metadata.num_row_groups)]
        return [(column.bloom_filter_offset, column.bloom_filter_length) for column in columns]


_KEYS = st.one_of(st.none(), st.binary(max_size=40), st.integers(0, 30).map(lambda number: b"%d" % number))


@settings(max_examples=150, deadline=None)
@given(
    groups=st.lists(st.lists(_KEYS, min_size=1, max_size=60), min_size=1, max_size=6), others=st.lists(st.binary(max_size=40), max_size=5)
)
def test_no_row_group_with_a_key_is_denied(groups: list[list[bytes | None]], others: list[bytes]) -> None:
    made = Made(groups)
    file = made.open()
    for key in {key for keys in groups for key in keys if key is not None}.union(others):
        denied = file.denied(made.storage, key)
        scanned = {index for index, keys in enumerate(groups) if key in keys}
        assert not denied & scanned
        found = file.row_groups(0, made.count, denied=denied)
        assert [number for group in found for number in range(group.first, group.end)] == list(range(made.count))
        assert {place for group in found if group.is_denied for place in group.places} == denied
        assert all(group.length == 0 for group in found if group.is_denied)


def test_a_key_that_is_nowhere_is_denied_nearly_everywhere() -> None:
    made = Made([[b"%d" % (number * 1000 + index) for index in range(1000)] for number in range(20)], 100)
    file = made.open()
    kept = sum(20 - len(file.denied(made.storage, b"other %d" % number)) for number in range(100))
    assert kept < 2000 * 0.03
    assert len(file.denied(made.storage, b"7003")) >= 18 and 7 not in file.denied(made.storage, b"7003")


def test_a_row_group_without_keys_is_denied() -> None:
    made = Made([[b"a"] * 10, [None] * 10, [b"b", None]])
    assert made.denied(b"a") == {1, 2} and made.denied(b"b") == {0, 1}
    assert Made([[None] * 10]).denied(b"a") == {0}


def test_a_chunk_without_filters_denies_nothing(without_filters: None) -> None:
    made = Made([[b"a"] * 10, [None] * 10])
    assert made.places() == [(None, None)] * 2 and made.extent.crc < 1 << 32
    assert made.denied(b"b") == set()
    made.open().check_filters(made.storage)


def test_a_filter_of_another_kind_denies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made([[b"a"] * 10])
    assert made.denied(b"b") == {0}
    monkeypatch.setattr(keyfilter, "_KIND", bytes.fromhex("1c1c00001c2c00001c1c000000"))
    assert made.denied(b"b") == set()


def test_a_filter_is_as_large_as_its_keys_need() -> None:
    groups = [[b"%d" % index for index in range(count)] for count in (1, 1000, 10_000)] + [[b"same"] * 10_000]
    few, some, many, same = [length for _, length in Made(groups).places()]
    assert few == same < 100 and some < 2100 and many < 17_000


def test_a_flipped_bit_in_a_filter_denies_nothing_and_is_told_by_a_check(seed: int) -> None:
    made = Made([[b"%d" % index for index in range(50)] for _ in range(3)])
    made.open().check_filters(made.storage)
    data = bytes(made.storage.get(KEY, 0, made.length))
    rng = random.Random(seed)
    for _ in range(50):
        offset, length = rng.choice(made.places())
        broken = bytearray(data)
        broken[offset + rng.randrange(length)] ^= 1 << rng.randrange(8)
        made.storage.delete([KEY])
        made.storage.put(KEY, [bytes(broken)])
        assert made.denied(b"7") == made.denied(b"unknown") == set()
        with pytest.raises(CorruptDataError, match="filters"):
            made.open().check_filters(made.storage)
        made.storage.delete([KEY])
        made.storage.put(KEY, [data])
    assert made.denied(b"unknown")


@pytest.fixture
def without_filters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_module, "_choose_filters", lambda table, options: None)


@pytest.mark.parametrize("size", [1, 10, 100])
@pytest.mark.parametrize("kinds", [10, 1000, 20_000, 1 << 40])
def test_filters_take_at_most_a_twentieth_of_a_chunk(kinds: int, size: int, request: pytest.FixtureRequest) -> None:
    """Of events of so many bytes; the last have a key of their own each."""
    groups = [[b"user-%d" % ((number * 30_000 + index) % kinds) for index in range(30_000)] for number in range(2)]
    made = Made(groups, size)
    if size == 100:
        assert all(length is not None for _, length in made.places())
    request.getfixturevalue("without_filters")
    assert made.length <= 1.05 * Made(groups, size).length


def test_a_filter_of_less_room_lets_more_row_groups_pass_until_it_is_left_out() -> None:
    keys = 10_000
    assert filter_options(keys, 1 << 30) == {"ndv": 1 << 18, "fpp": 0.05}
    passed: list[float | None] = []
    for shrink in (1, 2, 4, 8):
        found = filter_options(keys, needed_bytes(keys) / shrink * 26)
        passed.append(None if found is None else found["fpp"])
    assert passed[0] == 0.05 and passed[1] is not None and 0.05 < passed[1] < 0.4 and passed[-1] is None
