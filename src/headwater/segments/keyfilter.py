"""The Bloom filters on `_key` in a chunk: which of its row groups can't have a routing key.

Parquet's split-block filters, which pyarrow writes and never reads. They lie together before the footer and have no checksum of their own,
so the catalog has one: a flipped bit would hide events. A filter only saves time: one that is unknown or damaged denies nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from struct import unpack_from
from typing import Final

import google_crc32c
import pyarrow.parquet as pq
import xxhash

from headwater.storage import Storage

#: The most distinct keys that a filter is for. pyarrow halves a filter while it still fits the keys of its row group.
_KEYS: Final = 1 << 18
#: The share of the row groups without a key that its filters may let pass.
_PASSED: Final = 0.05
#: A filter that would let more pass than this is not written.
_MOST_PASSED: Final = 0.4
#: The share of a row group's bytes that its filter may take, less than the twentieth that is promised: the bytes are estimated.
_SHARE: Final = 0.045
#: The size of a filter that is always worth its bytes.
_SMALL_BYTES: Final = 256
_SALTS: Final = (0x47B6137B, 0x44974D91, 0x8824AD5B, 0xA2B7289D, 0x705495C7, 0x2DF1424B, 0x9EFC4947, 0x5C6BFB31)
_BLOCK: Final = 32
#: What follows the number of bytes in a filter's header: blocks, xxHash, uncompressed. There is no other kind.
_KIND: Final = bytes.fromhex("1c1c00001c1c00001c1c000000")
_CRC_MASK: Final = (1 << 31) - 1


class KeyFilters:
    """Where the filters of a chunk are, by its footer."""

    def __init__(self, metadata: pq.FileMetaData, column: int) -> None:
        self._places: list[tuple[int, int] | None] = []
        for index in range(metadata.num_row_groups):
            found = metadata.row_group(index).column(column)
            offset, length = found.bloom_filter_offset, found.bloom_filter_length
            self._places.append((offset, length) if offset is not None and length is not None else None)
        places = [place for place in self._places if place is not None]
        self._start = min((offset for offset, _ in places), default=0)
        self._end = max((offset + length for offset, length in places), default=0)

    def fetch(self, storage: Storage, object: str) -> memoryview:
        """The bytes of all filters."""
        return memoryview(storage.get(object, self._start, self._end - self._start) if self._end else b"").cast("B")

    def denied(self, filters: memoryview, key: bytes, groups: Iterable[int]) -> set[int]:
        """Those of the row groups that have no event with a routing key, by the bytes of all filters."""
        hashed = xxhash.xxh64_intdigest(key)
        found = set()
        for group in groups:
            place = self._places[group]
            if place is not None and _denies(filters[place[0] - self._start :][: place[1]], hashed):
                found.add(group)
        return found


def needed_bytes(keys: int) -> int:
    """The size in bytes of a filter for a number of distinct keys: a power of two."""
    size = _BLOCK
    while _passed(keys, size) > _PASSED:
        size *= 2
    return size


def filter_options(keys: int, group_bytes: float) -> dict[str, float] | None:
    """The options with which pyarrow writes the filters of row groups of this size and number of distinct keys; None for no filters.

    A filter that would take too large a part of its row group is halved, and lets more row groups pass.
    """
    size = needed_bytes(min(keys, _KEYS))
    while size > max(group_bytes * _SHARE, _SMALL_BYTES):
        size //= 2
    passed = _passed(keys, size)
    return {"ndv": _KEYS, "fpp": max(1.1 * passed, _PASSED)} if passed <= _MOST_PASSED else None


def _passed(keys: int, size: int) -> float:
    """The share of other keys that a filter of this size lets pass: each key sets one bit in each of the eight words of a block."""
    return float((1 - (1 - 1 / 32) ** (keys * _BLOCK / size)) ** len(_SALTS))


def checksum(filters: memoryview) -> int:
    """31 bits, which fit into the catalog's number beside the footer's checksum; 0 if there are no filters."""
    return int(google_crc32c.value(bytes(filters))) & _CRC_MASK


def _denies(stored: memoryview, hashed: int) -> bool:
    size = _read_header(stored)
    if size is None:
        return False
    block = ((hashed >> 32) * (size // _BLOCK)) >> 32
    words = unpack_from("<8I", stored, len(stored) - size + block * _BLOCK)
    return any(not word >> ((hashed * salt & 0xFFFFFFFF) >> 27) & 1 for word, salt in zip(words, _SALTS, strict=True))


def _read_header(stored: memoryview) -> int | None:
    """How many bytes of blocks end a filter; None if this isn't one as it is known here.

    The header is a struct in Thrift's compact protocol: field 1, a zigzag varint, is the size.
    """
    size = shift = 0
    for at, byte in enumerate(stored[1:6], 2):
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            size >>= 1
            is_known = stored[0] == 0x15 and bytes(stored[at : at + len(_KIND)]) == _KIND
            is_whole = size > 0 and size % _BLOCK == 0 and len(stored) == at + len(_KIND) + size
            return size if is_known and is_whole else None
    return None
