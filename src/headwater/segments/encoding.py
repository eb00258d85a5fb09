"""Making blocks: the events of an append, in the order of their segments, as buffers to write one after the other.

What is small is worked out for all blocks of an append at once. The values, which are most of it, are copied only when their block's turn
to be written has come: they are in the processor's cache then, for its checksum and for the kernel, and never all in memory twice.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, Protocol, TypeAlias

import google_crc32c
import numpy as np
import pyarrow as pa

from headwater.model.limits import KIB, MIB
from headwater.model.schemas import TIME
from headwater.segments.block import (
    ALIGNMENT,
    ARROW_KIND,
    EMPTY,
    HAS_KEYS,
    HAS_TIMES,
    HEADER,
    MAGIC,
    OPAQUE_KIND,
    Chunk,
    EncodedBlock,
    offsets_of,
    whole_column,
)
from headwater.segments.fewrows import FewRows

#: By how many bytes there are beyond a multiple of the alignment.
_PADDINGS = [bytes(-more % ALIGNMENT) for more in range(ALIGNMENT)]
#: A block of this size is made at once, and joined: many buffers of it would cost more, each on its way to the disk.
_SMALL_BYTES = 64 * KIB
#: Values of neighbouring segments are copied in one go up to this size: each call gives the interpreter's lock to another thread.
_COPIED_BYTES = 4 * MIB

#: Gives sections of a block that has the events [start, end) of those in order.
_Part: TypeAlias = Callable[[int, int], list[pa.Buffer]]


class Source(Protocol):
    """Opaque events in the order in which they were given."""

    @property
    def count(self) -> int: ...
    @property
    def keys(self) -> pa.Array | None: ...
    @property
    def times(self) -> pa.Array | None: ...

    def lengths(self) -> Any:
        """The bytes of each value."""

    def data(self, indices: pa.Array | None) -> pa.Buffer:
        """The bytes of these values one after the other; None: of all."""


def encode(chunks: Sequence[Chunk], schema_version: int, opaque: bool) -> EncodedBlock:
    """One block of all the chunks' events."""
    if opaque:
        [block] = encode_each(chunks, None, schema_version)
        return block
    has_keys = any(chunk.keys is not None for chunk in chunks)
    has_times = any(chunk.times is not None for chunk in chunks)
    fields = (MAGIC, ARROW_KIND, _flags(has_keys, has_times), 0, sum(chunk.count for chunk in chunks), schema_version)
    return _block(fields, [_arrow_message(chunks, has_keys, has_times), *[EMPTY] * 6], 0, list)


def encode_each(sources: Sequence[Source], which: Any, schema_version: int) -> list[EncodedBlock]:
    """One block for each segment, of opaque events. `which` says of each event to which of the segments it goes; None: there is one.

    Each segment gets some. The blocks are to be made one after the other.
    """
    counts = [source.count for source in sources]
    lengths = [source.lengths() for source in sources]
    order, ends = (None, [sum(counts)]) if which is None else _order(which)
    keys = _ordered([source.keys for source in sources], counts, order, pa.binary())
    times = _ordered([source.times for source in sources], counts, order, TIME)
    key_part = _key_part(keys) if keys is not None else lambda start, end: [EMPTY] * 3
    time_part = _time_part(times) if times is not None else lambda start, end: [EMPTY] * 2
    offsets = np.zeros(sum(counts) + 1, dtype=np.int32)
    joined = lengths[0] if len(lengths) == 1 else np.concatenate(lengths)
    np.cumsum(joined if order is None else joined[order], out=offsets[1:])
    if which is None:
        values: list[Callable[[], list[pa.Buffer]]] = [lambda: [source.data(None) for source in sources]]
    else:
        values = _values(sources, counts, lengths, which, offsets[ends].tolist())
    fields = MAGIC, OPAQUE_KIND, _flags(keys is not None, times is not None), 0
    blocks, start = [], 0
    for make_values, end in zip(values, ends, strict=True):
        own = offsets[start : end + 1] - offsets[start] if start else offsets[: end + 1]
        sections = [pa.py_buffer(own), EMPTY, *key_part(start, end), *time_part(start, end)]
        blocks.append(_block((*fields, end - start, schema_version), sections, int(own[-1]), make_values))
        start = end
    return blocks


def _order(which: Any, segments: int = 0) -> tuple[Any, list[int]]:
    """The places of events by segment, and where each segment's end."""
    # A stable sort of 16-bit numbers is a radix sort.
    return np.argsort(which, kind="stable"), np.cumsum(np.bincount(which, minlength=segments)).tolist()


def _ordered(arrays: Sequence[pa.Array | None], counts: Sequence[int], order: Any, kind: pa.DataType) -> pa.Array | None:
    if all(array is None for array in arrays):
        return None
    whole = whole_column(arrays, counts, kind)
    return whole if order is None else whole.take(pa.array(order))


class _Share(NamedTuple):
    """What the segments have of a source: its events in their order, and where those of each segment begin, in events and in bytes."""

    source: Source
    indices: pa.Array
    starts: list[int]
    offsets: list[int]


def _values(
    sources: Sequence[Source], counts: Sequence[int], lengths: Sequence[Any], which: Any, ends: Sequence[int]
) -> list[Callable[[], list[pa.Buffer]]]:
    """For each segment, whose values end at these bytes of all, how to get them."""
    shares, start = [], 0
    for source, count, some in zip(sources, counts, lengths, strict=True):
        order, last = _order(which[start : start + count], len(ends))
        bytes_before = np.append(np.int32(0), np.cumsum(some[order], dtype=np.int32))
        shares.append(_Share(source, pa.array(order), [0, *last], bytes_before[[0, *last]].tolist()))
        start += count
    found: list[Callable[[], list[pa.Buffer]]] = []
    first = begun = 0
    for segment, end in enumerate(ends, 1):
        if end - begun >= _COPIED_BYTES or segment == len(ends):
            copy = _Copy(shares, first, segment)
            found += [partial(copy.values, one) for one in range(first, segment)]
            first, begun = segment, end
    return found


class _Copy:
    """The values of neighbouring segments. All are copied when the first one's are asked for, and let go of with the last one's."""

    def __init__(self, shares: Sequence[_Share], first: int, end: int) -> None:
        self._shares = shares
        self._first = first
        self._end = end
        self._copied: list[pa.Buffer] | None = None

    def values(self, segment: int) -> list[pa.Buffer]:
        first, found = self._first, []
        if self._copied is None:
            self._copied = [
                source.data(indices.slice(starts[first], starts[self._end] - starts[first])) for source, indices, starts, _ in self._shares
            ]
        for share, data in zip(self._shares, self._copied, strict=True):
            start, end = share.offsets[segment], share.offsets[segment + 1]
            if end > start:
                found.append(data.slice(start - share.offsets[first], end - start))
        if segment == self._end - 1:
            self._copied = None
        return found


def _flags(has_keys: bool, has_times: bool) -> int:
    return (HAS_KEYS if has_keys else 0) | (HAS_TIMES if has_times else 0)


def _block(fields: tuple[Any, ...], sections: list[pa.Buffer], size: int, make_values: Callable[[], list[pa.Buffer]]) -> EncodedBlock:
    """A block of seven sections, of which the second, of this size, is made when the block is."""
    lengths = [section.size for section in sections]
    lengths[1] = size
    whole = HEADER.size + sum([length + -length % ALIGNMENT for length in lengths])
    is_small = whole <= _SMALL_BYTES

    def make() -> tuple[list[Any], int]:
        body: list[Any] = []
        for place, (section, length) in enumerate(zip(sections, lengths, strict=True)):
            body += [section] if place != 1 else make_values()
            if length % ALIGNMENT:
                body.append(_PADDINGS[length % ALIGNMENT])
        if is_small:
            body = [b"".join(body)]
        crc = google_crc32c.value(HEADER.pack(*fields, 0, *lengths))
        for buffer in body:
            crc = google_crc32c.extend(crc, buffer)
        return [HEADER.pack(*fields, crc, *lengths), *body], crc

    if is_small:
        made = make()
        return EncodedBlock(fields[4], whole, lambda: made)
    return EncodedBlock(fields[4], whole, make)


def _key_part(keys: pa.Array) -> _Part:
    bits, offsets, data = _bits(keys), offsets_of(keys), keys.buffers()[2]

    def part(start: int, end: int) -> list[pa.Buffer]:
        first, last = int(offsets[start]), int(offsets[end])
        own = offsets[start : end + 1] - offsets[start]
        return [bits(start, end), pa.py_buffer(own), data.slice(first, last - first) if last > first else EMPTY]

    return part


def _time_part(times: pa.Array) -> _Part:
    bits, numbers = _bits(times), times.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)
    return lambda start, end: [bits(start, end), pa.py_buffer(numbers[start:end])]


def _bits(array: pa.Array) -> Callable[[int, int], pa.Buffer]:
    """Gives which of the values [start, end) are not null, as Arrow has it; nothing if all are."""
    if not array.null_count:
        return lambda start, end: EMPTY
    valid = array.is_valid().to_numpy(zero_copy_only=False)

    def bits(start: int, end: int) -> pa.Buffer:
        own = valid[start:end]
        return EMPTY if own.all() else pa.py_buffer(np.packbits(own, bitorder="little"))

    return bits


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


def encode_few(values: Sequence[bytes], keys: Sequence[bytes | None], schema_version: int) -> EncodedBlock:
    """The block that `encode` makes of the same opaque events, without Arrow: for one or a few events it is ten times as fast."""
    flags, key_parts = 0, (b"", b"", b"")
    missing = keys.count(None)
    if missing < len(keys):
        flags = HAS_KEYS
        bits = sum(1 << index for index, key in enumerate(keys) if key is not None) if missing else 0
        key_parts = (bits.to_bytes((len(keys) + 7) // 8, "little") if missing else b"", *_packed([key or b"" for key in keys]))
    sections = (*_packed(values), *key_parts, b"", b"")
    lengths = [len(section) for section in sections]
    fields = (MAGIC, OPAQUE_KIND, flags, 0, len(values), schema_version)
    body = b"".join([padded for section in sections for padded in (section, _PADDINGS[len(section) % ALIGNMENT])])
    crc = google_crc32c.value(HEADER.pack(*fields, 0, *lengths) + body)
    data = HEADER.pack(*fields, crc, *lengths) + body
    return EncodedBlock(len(values), len(data), lambda: ([data], crc))


def encode_few_rows(rows: Sequence[dict[str, Any]], keys: Sequence[bytes | None], few: FewRows, schema_version: int) -> EncodedBlock:
    """The block that `encode` makes of the same typed events, without Arrow."""
    has_keys, message = few.encode(rows, keys)
    fields = (MAGIC, ARROW_KIND, _flags(has_keys, False), 0, len(rows), schema_version)
    lengths = (len(message), 0, 0, 0, 0, 0, 0)
    body = message + _PADDINGS[len(message) % ALIGNMENT]
    crc = google_crc32c.value(HEADER.pack(*fields, 0, *lengths) + body)
    data = HEADER.pack(*fields, crc, *lengths) + body
    return EncodedBlock(len(rows), len(data), lambda: ([data], crc))


def _packed(values: Sequence[bytes]) -> tuple[bytes, bytes]:
    return struct.pack(f"<{len(values) + 1}i", 0, *accumulate(map(len, values))), b"".join(values)
