"""L1 chunks: the long-term form of events, plain Parquet files in the order of their numbers.

A chunk holds consecutive numbers of one log: the columns of the stream's schema, and `_key`, `_time`, `_appended`, `_number`. Row groups
are cut by bytes. Pages carry checksums, and those of the footer and of the filters on `_key` are in the catalog, so that what is read is
what was written.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from headwater.catalog.extents import Extent
from headwater.errors import CorruptDataError
from headwater.model.fieldids import Path, assign, with_ids
from headwater.model.limits import KIB, MIB
from headwater.model.schemas import METADATA, is_opaque
from headwater.segments.block import Chunk
from headwater.segments.bounds import Choice, read_bounds
from headwater.segments.keyfilter import KeyFilters, checksum, filter_options, needed_bytes
from headwater.storage import Storage

#: A row group is closed when it holds this much, uncompressed. While it is decoded it takes about four times that.
ROW_GROUP_BYTES = 4 * MIB
ROW_GROUP_ROWS = 1 << 20
#: The same for journals, of whose events one here and one there is read.
JOURNAL_GROUP_BYTES = 256 * KIB
#: Columns that follow the schema's own, in this order.
EXTRA = ("_key", "_time", "_appended", "_number")
_FOOTER_GUESS = 64 * KIB
_TAIL = 8  # The footer's length and the magic word.
_VERSION_KEY = b"headwater.schema_version"
_KEPT_FOOTERS = 256
#: The rows by which the size of a row group is estimated, and the share of its bytes below which no estimate is needed.
_SAMPLE_ROWS = 16384
_TINY_SHARE = 0.004


class ChunkInfo(NamedTuple):
    """What the catalog keeps of a chunk that was written."""

    length: int
    #: The footer's checksum, and above its 32 bits that of the filters.
    crc: int


def chunk_schema(schema: pa.Schema) -> pa.Schema:
    """The columns of a stream's chunks."""
    extra = [pa.field(name, METADATA[name], nullable=name == "_key") for name in EXTRA]
    return pa.schema([*schema, *extra])


def write_chunk(
    sink: pa.NativeFile,
    schema: pa.Schema,
    version: int,
    batches: Iterator[pa.RecordBatch],
    ids: Mapping[Path, int] | None = None,
    group_bytes: int = ROW_GROUP_BYTES,
    is_busy: Callable[[], bool] = lambda: False,
    between: Callable[[int], None] = lambda end: None,
) -> int:
    """Write batches of `chunk_schema(schema)` as one Parquet file; return the number of rows. Memory: about two row groups.

    `ids` are the field ids of the stream's columns, by default those of a stream that had no other schema. While it
    `is_busy`, no row group is larger than `group_bytes`. `between` is called after a row group with the file's length.
    """
    ids = assign([schema]) if ids is None else ids
    wanted = with_ids(chunk_schema(schema), ids).with_metadata({_VERSION_KEY: str(version).encode()})
    opaque = is_opaque(schema)
    # Opaque values are mostly different: a dictionary and statistics would only cost. Numbers and times grow: deltas are tiny.
    dictionaries = ["_key", "_appended"] if opaque else [*(path for path in _leaves(schema)), "_key", "_appended"]
    options = {
        "compression": "zstd",
        "compression_level": 1,
        "use_dictionary": dictionaries,
        "column_encoding": {"_number": "DELTA_BINARY_PACKED", "_time": "DELTA_BINARY_PACKED"},
        "write_statistics": [name for name in wanted.names if not (opaque and name == "value")],
        "write_page_checksum": True,
        "store_schema": True,
        "data_page_size": MIB,
    }
    writer: pq.ParquetWriter | None = None
    waiting: list[pa.RecordBatch] = []
    size = rows = total = 0
    try:
        for batch in batches:
            # Row groups that are read together come as one batch: where they are to be small, it is taken apart again. In parts of one
            # size, or the last one would be tiny.
            is_small = group_bytes < ROW_GROUP_BYTES or is_busy()
            parts = max(1, -(-batch.nbytes // group_bytes) if is_small else 1, -(-batch.num_rows // ROW_GROUP_ROWS))
            step = max(1, -(-batch.num_rows // parts))
            for start in range(0, batch.num_rows, step):
                part = batch.slice(start, step)
                if waiting and (size + part.nbytes > group_bytes or rows + part.num_rows > ROW_GROUP_ROWS):
                    writer = _write_group(writer, waiting, sink, wanted, options)
                    between(sink.tell())
                    waiting, size, rows = [], 0, 0
                waiting.append(part)
                size, rows, total = size + part.nbytes, rows + part.num_rows, total + part.num_rows
        if waiting or writer is None:
            writer = _write_group(writer, waiting, sink, wanted, options)
    finally:
        if writer is not None:
            writer.close()
    return total


def _write_group(
    writer: pq.ParquetWriter | None, batches: list[pa.RecordBatch], sink: pa.NativeFile, schema: pa.Schema, options: Mapping[str, Any]
) -> pq.ParquetWriter:
    """Write a row group; return the writer, which the first one makes."""
    table = pa.Table.from_batches([pa.RecordBatch.from_arrays(batch.columns, schema=schema) for batch in batches], schema=schema)
    if writer is None:
        filters = _choose_filters(table, options)
        writer = pq.ParquetWriter(sink, schema, bloom_filter_options=None if filters is None else {"_key": filters}, **options)
    writer.write_table(table, row_group_size=max(table.num_rows, 1))
    return writer


def _choose_filters(table: pa.Table, options: Mapping[str, Any]) -> dict[str, float] | None:
    """How to write the filters of a chunk, by the keys of its first row group and the bytes that it will have."""
    keys = pc.count_distinct(table.column("_key")).as_py()
    if not keys or needed_bytes(keys) <= table.nbytes * _TINY_SHARE:
        return filter_options(keys, table.nbytes)
    sample, sink = table.slice(0, _SAMPLE_ROWS), pa.BufferOutputStream()
    with pq.ParquetWriter(sink, table.schema, **options) as writer:
        writer.write_table(sample)
        size = sink.tell()  # without the footer
    return filter_options(keys, size * table.num_rows / sample.num_rows)


def _leaves(schema: pa.Schema) -> list[str]:
    """The columns that a dictionary may be tried for. Parquet names those inside of nested ones by paths, which are left to its default."""
    return [field.name for field in schema if not pa.types.is_nested(field.type)]


def seal_chunk(storage: Storage, key: str) -> ChunkInfo:
    """The size and the checksums of a chunk just written."""
    length = storage.size(key) or 0
    footer = _fetch_footer(storage, key, length)
    metadata = _parse(key, footer)
    filters = KeyFilters(metadata, metadata.num_columns - len(EXTRA))
    return ChunkInfo(length, google_crc32c.value(footer) | checksum(filters.fetch(storage, key)) << 32)


def _parse(key: str, footer: bytes) -> pq.FileMetaData:
    try:
        return pq.read_metadata(pa.BufferReader(b"PAR1" + footer))
    except (pa.ArrowException, OSError) as error:
        raise CorruptDataError(f"{key} has a footer that can't be read: {error}", object=key) from error


def _fetch_footer(storage: Storage, key: str, length: int) -> bytes:
    guess = min(length, _FOOTER_GUESS)
    end = memoryview(storage.get(key, length - guess, guess)).cast("B")
    if guess < _TAIL or bytes(end[-4:]) != b"PAR1":
        raise CorruptDataError(f"{key} does not end as a Parquet file does", object=key)
    size = int.from_bytes(end[-8:-4], "little") + _TAIL
    if size > length:
        raise CorruptDataError(f"{key} has a footer that says it is longer than the file", object=key)
    return bytes(end[-size:] if size <= guess else storage.get(key, length - size, size))


def read_footer(storage: Storage, extent: Extent) -> ChunkFile:
    """The chunk that an extent names, its footer read and verified."""
    assert extent.key is not None
    footer = _fetch_footer(storage, extent.key, extent.length)
    if google_crc32c.value(footer) != extent.crc & 0xFFFFFFFF:
        raise CorruptDataError(f"the footer of {extent.key} is damaged: its checksum does not match the catalog's", object=extent.key)
    return ChunkFile(extent, footer)


class RowGroups(NamedTuple):
    """Numbers [first, end) of a chunk: row groups that are fetched and decoded together."""

    file: ChunkFile
    places: range
    first: int
    end: int
    appended_at: int
    length: int
    #: Whether none of the events is wanted: nothing is fetched.
    is_denied: bool = False

    @property
    def key(self) -> str:
        return self.file.key

    @property
    def object(self) -> int | None:
        return self.file.object


class ChunkFile:
    """A chunk's footer, taken apart: where its row groups and columns are."""

    def __init__(self, extent: Extent, footer: bytes) -> None:
        assert extent.key is not None
        self.key = extent.key
        self.object = extent.object
        self.first = extent.first
        self.length = extent.length
        self._filters_crc = extent.crc >> 32
        self.metadata = _parse(self.key, footer)
        try:
            arrow = self.metadata.schema.to_arrow_schema()
        except (pa.ArrowException, OSError) as error:
            raise CorruptDataError(f"{self.key} has a footer that can't be read: {error}", object=self.key) from error
        if self.metadata.num_rows != extent.count:
            message = f"{self.key} has {self.metadata.num_rows} events, the catalog says {extent.count}"
            raise CorruptDataError(message, object=self.key)
        self.schema_version = int((arrow.metadata or {}).get(_VERSION_KEY, b"1"))
        self.names = arrow.names
        self._arrow = arrow
        groups = [self.metadata.row_group(index) for index in range(self.metadata.num_row_groups)]
        self.firsts = [self.first]
        for group in groups:
            self.firsts.append(self.firsts[-1] + group.num_rows)
        self._groups = groups
        # By counting, since a column's name may have dots too.
        self._places: dict[str, range] = {}
        place = 0
        for field in arrow:
            self._places[field.name] = range(place, place + _count_leaves(field.type))
            place = self._places[field.name].stop

    def row_groups(
        self, start: int, end: int, names: Sequence[str] | None = None, together_bytes: int = 0, denied: Collection[int] = ()
    ) -> list[RowGroups]:
        """Those that hold some of the numbers [start, end), up to there; several together while the named columns have no more bytes.

        Each time that some are decoded costs 0.2 ms. Of those that are `denied` all neighbours come together.
        """
        found: list[RowGroups] = []
        place, last = max(bisect_right(self.firsts, start) - 1, 0), bisect_left(self.firsts, end)
        while place < min(last, len(self._groups)):
            begin, size, is_denied = place, 0, place in denied
            while place < min(last, len(self._groups)) and (place in denied) == is_denied:
                more = 0 if is_denied else self._size(place, names)
                if place > begin and size + more > together_bytes:
                    break
                size += more
                place += 1
            until = min(self.firsts[place], end)
            found.append(RowGroups(self, range(begin, place), self.firsts[begin], until, self.appended(begin)[0], size, is_denied))
        return found

    def denied(self, storage: Storage, key: bytes) -> set[int]:
        """The row groups without an event with a routing key, as far as the filters say. None of them if the filters are damaged."""
        filters = self._filters()
        stored = filters.fetch(storage, self.key)
        return filters.denied(stored, key, range(len(self._groups))) if checksum(stored) == self._filters_crc else set()

    def unwanted(self, choice: Choice) -> set[int]:
        """The row groups that can't have what a choice is after, by their statistics."""
        bounds = {}
        for name in choice.names:
            place = self._places.get(name, range(0))
            found = read_bounds(self.metadata, place.start, self._arrow.field(name).type) if len(place) == 1 else None
            if found is not None:
                bounds[name] = found
        may_have = choice.may_have(bounds)
        return set() if may_have is None else {index for index, is_wanted in enumerate(may_have) if not is_wanted}

    def check_filters(self, storage: Storage) -> None:
        """CorruptDataError unless the filters are those that were written."""
        if checksum(self._filters().fetch(storage, self.key)) != self._filters_crc:
            raise CorruptDataError(f"the filters of {self.key} are damaged: their checksum does not match the catalog's", object=self.key)

    def _filters(self) -> KeyFilters:
        return KeyFilters(self.metadata, self._places["_key"].start)

    def _size(self, index: int, names: Sequence[str] | None) -> int:
        """The bytes of a row group's columns, uncompressed."""
        group = self._groups[index]
        if names is None:
            return int(group.total_byte_size)
        return sum(int(group.column(place).total_uncompressed_size) for place in self._columns(names))

    def _columns(self, names: Iterable[str] | None) -> list[int]:
        """The places of the columns that make up those named; nested ones have several. None: all but the numbers, which are known."""
        found: list[int] = []
        for name in self.names if names is None else set(names):
            if names is not None or name != "_number":
                found += self._places.get(name, ())
        return sorted(found)

    def appended(self, index: int) -> tuple[int, int]:
        """When the first and the last event of a row group were appended."""
        column = self._groups[index].column(self.metadata.num_columns - 2)
        assert column.path_in_schema == "_appended", "the extra columns are the last"
        statistics = column.statistics
        return int(statistics.min_raw), int(statistics.max_raw)

    def find_time(self, storage: Storage, time_us: int) -> int:
        """The first number appended at `time_us` or later, else the end."""
        for index in range(len(self._groups)):
            first_at, last_at = self.appended(index)
            if first_at >= time_us:
                return self.firsts[index]
            if last_at >= time_us:
                _, appended = self.read(storage, range(index, index + 1), ["_appended"])
                assert appended is not None
                times = appended.cast(pa.int64()).to_numpy()
                return self.firsts[index] + int(np.searchsorted(times, time_us, side="left"))
        return self.firsts[-1]

    def read(self, storage: Storage, places: range, names: Sequence[str] | None) -> tuple[Chunk, pa.Array | None]:
        """The events of row groups, with these columns only; and when each was appended, if that is one of them."""
        rows = self.firsts[places.stop] - self.firsts[places.start]
        return self._take_apart(self._read(storage, places, names), rows)

    def _read(self, storage: Storage, places: range, names: Sequence[str] | None) -> pa.Table | None:
        columns = self._columns(names)
        ranges = []
        for index in places:
            group = self._groups[index]
            for place in columns:
                column = group.column(place)
                start = column.dictionary_page_offset if column.has_dictionary_page else column.data_page_offset
                ranges.append((int(start), int(column.total_compressed_size)))
        if not ranges:
            return None
        sparse = _Sparse(self.length, ranges, storage.get_ranges(self.key, ranges))
        try:
            # Without `pre_buffer` it asks for each column by itself, which is what was fetched.
            source = pa.PythonFile(sparse, mode="r")
            file = pq.ParquetFile(source, metadata=self.metadata, page_checksum_verification=True, pre_buffer=False)
            return file.reader.read_row_groups(list(places), column_indices=columns, use_threads=False)
        except (pa.ArrowException, OSError) as error:
            raise CorruptDataError(
                f"{self.key} is damaged in row groups {places.start} to {places.stop - 1}: {error}", object=self.key
            ) from error

    def check_numbers(self, storage: Storage, places: range) -> None:
        """CorruptDataError unless the numbers in row groups are those that they stand for."""
        table = self._read(storage, places, ["_number"])
        expected = np.arange(self.firsts[places.start], self.firsts[places.stop], dtype=np.int64)
        if table is None or not np.array_equal(table.column("_number").to_numpy(), expected):
            raise CorruptDataError(f"the numbers in {self.key} are not {expected[0]} and on", object=self.key)

    def _take_apart(self, table: pa.Table | None, rows: int) -> tuple[Chunk, pa.Array | None]:
        if table is None:
            return Chunk(_without_columns(rows), None, None), None
        if table.num_rows != rows:
            raise CorruptDataError(f"a row group of {self.key} has {table.num_rows} events instead of {rows}", object=self.key)
        columns = {name: _joined(table.column(name)) for name in table.column_names}
        keys, times, appended = (columns.pop(name, None) for name in ("_key", "_time", "_appended"))
        columns.pop("_number", None)
        fields = [table.schema.field(name).remove_metadata() for name in columns]
        batch = pa.RecordBatch.from_arrays(list(columns.values()), schema=pa.schema(fields)) if columns else _without_columns(rows)
        return Chunk(batch, keys, times), appended


def _count_leaves(kind: pa.DataType) -> int:
    """How many columns Parquet has for a type."""
    return sum(_count_leaves(kind.field(index).type) for index in range(kind.num_fields)) if pa.types.is_nested(kind) else 1


def _joined(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _without_columns(rows: int) -> pa.RecordBatch:
    # A batch knows its length by its columns; this one stands in where none was asked for.
    return pa.RecordBatch.from_arrays([pa.nulls(rows)], names=["_none"])


class _Sparse:
    """The few ranges of a file that were fetched, for Parquet's reader, which asks for exactly those."""

    closed = False

    def __init__(self, size: int, ranges: Sequence[tuple[int, int]], buffers: Sequence[Any]) -> None:
        self._size = size
        pieces = sorted((start, place) for place, (start, _) in enumerate(ranges))
        self._starts = [start for start, _ in pieces]
        self._buffers = [memoryview(buffers[place]) for _, place in pieces]
        self._at = 0

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset if whence == 0 else self._at + offset if whence == 1 else self._size + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, length: int = -1) -> Any:
        place = bisect_right(self._starts, self._at) - 1
        data = self._buffers[place].cast("B")[self._at - self._starts[place] :][:length]
        if len(data) < length:
            raise OSError(f"{length} bytes at {self._at} were asked for, which its footer does not name")
        self._at += length
        return data

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True


class ChunkFiles:
    """The footers that were read last, by the chunks' keys, which never mean other bytes."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, ChunkFile] = OrderedDict()

    def open(self, extent: Extent) -> ChunkFile:
        """The chunk that an extent names, its footer verified."""
        assert extent.key is not None
        with self._lock:
            found = self._kept.get(extent.key)
            if found is not None:
                self._kept.move_to_end(extent.key)
                return found
        found = read_footer(self._storage, extent)
        with self._lock:
            self._kept[extent.key] = found
            while len(self._kept) > _KEPT_FOOTERS:
                self._kept.popitem(last=False)
        return found
