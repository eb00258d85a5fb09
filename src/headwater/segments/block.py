"""L0 blocks: the events of one append to one segment, as Arrow's own buffers behind a small header.

Decoding gives arrays that are views on what was read; `encoding` makes blocks. docs/formats.md describes the bytes; golden files in the
tests keep them as they are.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import google_crc32c
import numpy as np
import pyarrow as pa

from headwater.catalog.parts import Append
from headwater.errors import CorruptDataError
from headwater.model.limits import MIB
from headwater.model.schemas import OPAQUE, TIME

MAGIC = b"HWB1"
OPAQUE_KIND = 1
ARROW_KIND = 2
# magic, kind, flags, reserved, count, schema version, crc32c (with this field as 0), then the lengths of seven sections.
HEADER = struct.Struct("<4sBBHIII7I")
_CRC_OFFSET = 16
ALIGNMENT = 8
HAS_KEYS = 1
HAS_TIMES = 2
EMPTY = pa.py_buffer(b"")


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

    def lengths(self) -> Any:
        """Of opaque events: the bytes of each value."""
        return np.diff(offsets_of(self.columns.column(0)))

    def data(self, indices: pa.Array | None) -> pa.Buffer:
        """Of opaque events: the bytes of these values one after the other; None: of all, as they lie."""
        values = self.columns.column(0)
        if indices is not None:
            values = values.take(indices)
        offsets = offsets_of(values)
        start, end = int(offsets[0]), int(offsets[-1])
        return values.buffers()[2].slice(start, end - start) if end > start else EMPTY

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


def offsets_of(array: pa.Array) -> Any:
    """Where values of bytes begin, and where the last one ends."""
    if not len(array):
        return np.zeros(1, dtype=np.int32)
    return np.frombuffer(array.buffers()[1], dtype=np.int32, count=len(array) + 1, offset=array.offset * 4)


@dataclass(slots=True)
class EncodedBlock:
    """A block to be stored. `make` gives its buffers, and its checksum, which is known from then on; there is none once it is stored."""

    count: int
    length: int
    make: Callable[[], tuple[list[Any], int]] | None
    crc: int = 0

    def buffers(self) -> list[Any]:
        """One after the other they are its `length` bytes."""
        assert self.make is not None, "they were let go of when they were stored"
        buffers, self.crc = self.make()
        return buffers

    def to_bytes(self) -> bytes:
        return b"".join(self.buffers())

    def inline(self, stream: int, segment: int) -> Append:
        """What the catalog takes of it where it goes into the commit itself."""
        data = self.to_bytes()
        return Append(stream, segment, self.count, self.length, self.crc, None, 0, data)


class DecodedBlock(NamedTuple):
    """A block's events, and the version of the schema they were written with."""

    chunk: Chunk
    schema_version: int


def verify(data: pa.Buffer, crc: int, name: str, give_way: Callable[[], None] = lambda: None) -> None:
    """Raise CorruptDataError unless the block's bytes are those that were written. `give_way` is called between two MiB."""
    if data.size < HEADER.size:
        raise CorruptDataError(f"a block in {name} has {data.size} bytes: too few for its header", object=name)
    header = data.slice(0, HEADER.size).to_pybytes()
    if not header.startswith(MAGIC):
        raise CorruptDataError(f"there is no block at its place in {name}", object=name)
    end = _CRC_OFFSET + 4
    stated = int.from_bytes(header[_CRC_OFFSET:end], "little")
    found = google_crc32c.value(header[:_CRC_OFFSET] + bytes(4) + header[end:])
    # A checksum is computed under the interpreter's lock: 5 ms for 16 MiB.
    for start in range(HEADER.size, data.size, MIB):
        found = google_crc32c.extend(found, data.slice(start, min(MIB, data.size - start)))
        if data.size > MIB:
            give_way()
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
        at += length + -length % ALIGNMENT
    if at != data.size or kind not in (OPAQUE_KIND, ARROW_KIND):
        raise CorruptDataError(f"a block in {name} has a form that this headwater does not know (kind {kind})", object=name)
    places = [data.slice(start, length) if length else None for start, length in zip(starts, lengths, strict=True)]
    if kind == ARROW_KIND:
        return DecodedBlock(_decode_arrow(places[0], schemas(version), flags), version)
    values = pa.Array.from_buffers(pa.binary(), count, [None, places[0], places[1] or EMPTY])
    keys = times = None
    if flags & HAS_KEYS:
        keys = pa.Array.from_buffers(pa.binary(), count, [places[2], places[3], places[4] or EMPTY])
    if flags & HAS_TIMES:
        times = pa.Array.from_buffers(TIME, count, [places[5], places[6]])
    return DecodedBlock(Chunk(pa.RecordBatch.from_arrays([values], schema=OPAQUE), keys, times), version)


def _decode_arrow(message: pa.Buffer, schema: pa.Schema, flags: int) -> Chunk:
    width = len(schema)
    if flags & HAS_KEYS:
        schema = schema.append(pa.field("_key", pa.binary()))
    if flags & HAS_TIMES:
        schema = schema.append(pa.field("_time", TIME))
    batch = pa.ipc.read_record_batch(message, schema)
    columns = batch.select(list(range(width))) if len(schema) > width else batch
    keys = batch.column(width) if flags & HAS_KEYS else None
    times = batch.column(batch.num_columns - 1) if flags & HAS_TIMES else None
    return Chunk(columns, keys, times)
