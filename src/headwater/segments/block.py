"""L0 blocks: the events of one append to one segment, as Arrow's own buffers behind a small header.

Encoding gives buffers to write one after the other, without joining them; decoding gives arrays that are views on what was read.
docs/formats.md describes the bytes; golden files in the tests keep them as they are.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import google_crc32c
import numpy as np
import pyarrow as pa

from headwater.errors import CorruptDataError
from headwater.model.schemas import OPAQUE, TIME

MAGIC = b"HWB1"
OPAQUE_KIND = 1
ARROW_KIND = 2
# magic, kind, flags, reserved, count, schema version, crc32c (with this field as 0), then the lengths of seven sections.
HEADER = struct.Struct("<4sBBHIII7I")
_CRC_OFFSET = 16
_ALIGNMENT = 8
_HAS_KEYS = 1
_HAS_TIMES = 2
_PADDING = pa.py_buffer(bytes(_ALIGNMENT))
#: By how many bytes there are beyond a multiple of the alignment.
_PADDINGS = [bytes(-more % _ALIGNMENT) for more in range(_ALIGNMENT)]
#: A block of this size is joined: many buffers of it would cost more, each on its way to the disk.
_SMALL_BYTES = 64 * 1024


@dataclass(slots=True)
class Chunk:
    """Events in order: the columns of the stream's schema, with keys and event times where any were given."""

    columns: pa.RecordBatch
    keys: pa.Array | None
    times: pa.Array | None

    @property
    def count(self) -> int:
        return int(self.columns.num_rows)

    def take(self, indices: Any) -> Chunk:
        chosen = pa.array(indices)
        return Chunk(
            self.columns.take(chosen),
            self.keys.take(chosen) if self.keys is not None else None,
            self.times.take(chosen) if self.times is not None else None,
        )

    def slice(self, start: int, end: int) -> Chunk:
        return Chunk(
            self.columns.slice(start, end - start),
            self.keys.slice(start, end - start) if self.keys is not None else None,
            self.times.slice(start, end - start) if self.times is not None else None,
        )


def join(chunks: Sequence[Chunk]) -> Chunk:
    """One chunk of all their events."""
    if len(chunks) == 1:
        return chunks[0]
    counts = [chunk.count for chunk in chunks]
    keys = [chunk.keys for chunk in chunks]
    times = [chunk.times for chunk in chunks]
    return Chunk(
        pa.concat_batches([chunk.columns for chunk in chunks]),
        whole_column(keys, counts, pa.binary()) if any(array is not None for array in keys) else None,
        whole_column(times, counts, TIME) if any(array is not None for array in times) else None,
    )


def whole_column(arrays: Sequence[pa.Array | None], counts: Sequence[int], kind: pa.DataType) -> pa.Array:
    """The arrays as one, with nulls for those that are missing."""
    return pa.concat_arrays([array if array is not None else pa.nulls(count, kind) for array, count in zip(arrays, counts, strict=True)])


@dataclass(slots=True)
class EncodedBlock:
    """A block ready to be stored: `buffers` one after the other are its `length` bytes. None are left once they are stored."""

    buffers: list[Any]
    count: int
    length: int
    crc: int

    def to_bytes(self) -> bytes:
        assert self.buffers, "they were let go of when they were stored"
        return b"".join(self.buffers)


class DecodedBlock(NamedTuple):
    """A block's events, and the version of the schema they were written with."""

    chunk: Chunk
    schema_version: int


def encode(chunks: Sequence[Chunk], schema_version: int, opaque: bool) -> EncodedBlock:
    """One block of all the chunks' events."""
    count = sum(chunk.count for chunk in chunks)
    has_keys = any(chunk.keys is not None for chunk in chunks)
    has_times = any(chunk.times is not None for chunk in chunks)
    flags = (_HAS_KEYS if has_keys else 0) | (_HAS_TIMES if has_times else 0)
    if opaque:
        sections = _opaque_sections(chunks, has_keys, has_times)
    else:
        sections = [[_arrow_message(chunks, has_keys, has_times)], [], [], [], [], [], []]
    lengths = [sum(buffer.size for buffer in section) for section in sections]
    kind = OPAQUE_KIND if opaque else ARROW_KIND
    body: list[pa.Buffer] = []
    for section, length in zip(sections, lengths, strict=True):
        body += section
        if length % _ALIGNMENT:
            body.append(_PADDING.slice(0, -length % _ALIGNMENT))
    if sum(lengths) <= _SMALL_BYTES:
        body = [pa.py_buffer(b"".join(body))]
    crc = google_crc32c.value(HEADER.pack(MAGIC, kind, flags, 0, count, schema_version, 0, *lengths))
    for buffer in body:
        crc = google_crc32c.extend(crc, buffer)
    header = HEADER.pack(MAGIC, kind, flags, 0, count, schema_version, crc, *lengths)
    return EncodedBlock([header, *body], count, HEADER.size + sum(buffer.size for buffer in body), crc)


def encode_few(values: Sequence[bytes], keys: Sequence[bytes | None], schema_version: int) -> EncodedBlock:
    """The block that `encode` makes of the same opaque events, without Arrow: for one or a few events it is ten times as fast."""
    flags, key_parts = 0, (b"", b"", b"")
    missing = keys.count(None)
    if missing < len(keys):
        flags = _HAS_KEYS
        bits = sum(1 << index for index, key in enumerate(keys) if key is not None) if missing else 0
        key_parts = (bits.to_bytes((len(keys) + 7) // 8, "little") if missing else b"", *_packed([key or b"" for key in keys]))
    sections = (*_packed(values), *key_parts, b"", b"")
    lengths = [len(section) for section in sections]
    fields = (MAGIC, OPAQUE_KIND, flags, 0, len(values), schema_version)
    body = b"".join([padded for section in sections for padded in (section, _PADDINGS[len(section) % _ALIGNMENT])])
    crc = google_crc32c.value(HEADER.pack(*fields, 0, *lengths) + body)
    data = HEADER.pack(*fields, crc, *lengths) + body
    return EncodedBlock([data], len(values), len(data), crc)


def _packed(values: Sequence[bytes]) -> tuple[bytes, bytes]:
    return struct.pack(f"<{len(values) + 1}i", 0, *accumulate(map(len, values))), b"".join(values)


def _opaque_sections(chunks: Sequence[Chunk], has_keys: bool, has_times: bool) -> list[list[pa.Buffer]]:
    values = _binary_sections([chunk.columns.column(0) for chunk in chunks])
    keys: list[list[pa.Buffer]] = [[], [], []]
    if has_keys:
        arrays = [chunk.keys if chunk.keys is not None else pa.nulls(chunk.count, pa.binary()) for chunk in chunks]
        keys = [_validity(arrays), *_binary_sections(arrays)]
    times: list[list[pa.Buffer]] = [[], []]
    if has_times:
        arrays = [chunk.times if chunk.times is not None else pa.nulls(chunk.count, TIME) for chunk in chunks]
        times = [_validity(arrays), [_time_buffer(array) for array in arrays]]
    return [*values, *keys, *times]


def _binary_sections(arrays: Sequence[pa.Array]) -> list[list[pa.Buffer]]:
    """Offsets of all the arrays as one, and their bytes as they lie."""
    offsets, data, end = [np.zeros(1, dtype=np.int32)], [], 0
    for array in arrays:
        if not len(array):
            continue
        _, offset_buffer, data_buffer = array.buffers()
        own = np.frombuffer(offset_buffer, dtype=np.int32, count=len(array) + 1, offset=array.offset * 4)
        start, stop = int(own[0]), int(own[-1])
        if len(arrays) == 1:
            return [[pa.py_buffer(own - own[0])], [data_buffer.slice(start, stop - start)] if stop > start else []]
        offsets.append(own[1:] + np.int32(end - start))
        if stop > start:
            data.append(data_buffer.slice(start, stop - start))
        end += stop - start
    return [[pa.py_buffer(np.concatenate(offsets))], data]


def _validity(arrays: Sequence[pa.Array]) -> list[pa.Buffer]:
    if not any(array.null_count for array in arrays):
        return []
    valid = np.concatenate([array.is_valid().to_numpy(zero_copy_only=False) for array in arrays])
    return [pa.py_buffer(np.packbits(valid, bitorder="little"))]


def _time_buffer(array: pa.Array) -> pa.Buffer:
    return pa.py_buffer(array.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False))


def _arrow_message(chunks: Sequence[Chunk], has_keys: bool, has_times: bool) -> pa.Buffer:
    batches = []
    for chunk in chunks:
        batch = chunk.columns
        if has_keys:
            batch = batch.append_column("_key", chunk.keys if chunk.keys is not None else pa.nulls(chunk.count, pa.binary()))
        if has_times:
            batch = batch.append_column("_time", chunk.times if chunk.times is not None else pa.nulls(chunk.count, TIME))
        batches.append(batch)
    joined = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
    return joined.serialize()


def verify(data: pa.Buffer, crc: int, name: str) -> None:
    """Raise CorruptDataError unless the block's bytes are those that were written."""
    if data.size < HEADER.size:
        raise CorruptDataError(f"a block in {name} has {data.size} bytes: too few for its header", object=name)
    header = data.slice(0, HEADER.size).to_pybytes()
    if not header.startswith(MAGIC):
        raise CorruptDataError(f"there is no block at its place in {name}", object=name)
    end = _CRC_OFFSET + 4
    stated = int.from_bytes(header[_CRC_OFFSET:end], "little")
    found = google_crc32c.value(header[:_CRC_OFFSET] + bytes(4) + header[end:])
    found = google_crc32c.extend(found, data.slice(HEADER.size))
    if not stated == found == crc:
        raise CorruptDataError(
            f"a block in {name} is damaged: its checksum is {found:08x}, its header says {stated:08x}, the catalog {crc:08x}", object=name
        )


def decode(data: pa.Buffer, schemas: Any, name: str) -> DecodedBlock:
    """The events of a verified block. `schemas` gives the Arrow schema of a version."""
    _, kind, flags, _, count, version, _, *lengths = HEADER.unpack_from(data)
    starts, at = [], HEADER.size
    for length in lengths:
        starts.append(at)
        at += length + -length % _ALIGNMENT
    if at != data.size or kind not in (OPAQUE_KIND, ARROW_KIND):
        raise CorruptDataError(f"a block in {name} has a form that this headwater does not know (kind {kind})", object=name)
    places = [data.slice(start, length) if length else None for start, length in zip(starts, lengths, strict=True)]
    if kind == ARROW_KIND:
        return DecodedBlock(_decode_arrow(places[0], schemas(version), flags), version)
    empty = pa.py_buffer(b"")
    values = pa.Array.from_buffers(pa.binary(), count, [None, places[0], places[1] or empty])
    keys = times = None
    if flags & _HAS_KEYS:
        keys = pa.Array.from_buffers(pa.binary(), count, [places[2], places[3], places[4] or empty])
    if flags & _HAS_TIMES:
        times = pa.Array.from_buffers(TIME, count, [places[5], places[6]])
    return DecodedBlock(Chunk(pa.RecordBatch.from_arrays([values], schema=OPAQUE), keys, times), version)


def _decode_arrow(message: pa.Buffer, schema: pa.Schema, flags: int) -> Chunk:
    width = len(schema)
    if flags & _HAS_KEYS:
        schema = schema.append(pa.field("_key", pa.binary()))
    if flags & _HAS_TIMES:
        schema = schema.append(pa.field("_time", TIME))
    batch = pa.ipc.read_record_batch(message, schema)
    columns = batch.select(list(range(width))) if len(schema) > width else batch
    keys = batch.column(width) if flags & _HAS_KEYS else None
    times = batch.column(batch.num_columns - 1) if flags & _HAS_TIMES else None
    return Chunk(columns, keys, times)
