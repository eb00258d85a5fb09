"""Routing keys: bytes, made the same way by every API, and their place in the routing space [0, 2**64)."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from headwater.errors import InvalidRequestError
from headwater.model.arguments import shown
from headwater.model.columns import plain_column
from headwater.model.limits import KEY_BYTES
from headwater.model.rows import plain

KEY_SPACE = 1 << 64

#: The place of a key in the routing space.
hash_key = xxhash.xxh3_64_intdigest


class KeyRange(NamedTuple):
    """The half-open part [start, end) of the routing space."""

    start: int
    end: int

    def overlaps(self, other: KeyRange) -> bool:
        return self.start < other.end and other.start < self.end

    def covers(self, key: bytes) -> bool:
        """Whether events with this routing key belong here."""
        return self.start <= hash_key(key) < self.end

    def split(self, parts: int) -> list[KeyRange]:
        """Equal neighbours that tile this range."""
        width = self.end - self.start
        bounds = [self.start + width * i // parts for i in range(parts + 1)]
        return [KeyRange(start, end) for start, end in pairwise(bounds)]


WHOLE = KeyRange(0, KEY_SPACE)


def key_bytes(key: bytes | str | int | None) -> bytes | None:
    """A key as it is stored and routed: equal text, equal bytes."""
    if key is None or (type(key) is bytes and len(key) <= KEY_BYTES):
        return key
    if isinstance(key, bytes | str | int):
        key = plain(key)  # an enum's member is its value
    if type(key) not in (bytes, str, int):
        raise InvalidRequestError(f"a routing key is bytes, str, int or None, not {type(key).__name__}: {shown(key)}")
    try:
        data = key if type(key) is bytes else str(key).encode()
    except ValueError as error:  # half of a surrogate pair, or a number of thousands of digits
        raise InvalidRequestError(f"this can't be a routing key: {error}") from error
    if len(data) > KEY_BYTES:
        raise InvalidRequestError(f"this routing key has {len(data):,} bytes; a key may have {KEY_BYTES:,}")
    return data


def key_column(column: pa.Array, name: str) -> pa.Array:
    """A column of keys as binary, each equal to what `key_bytes` makes of the same key."""
    try:
        column = plain_column(column)
        kind = column.type
        if pa.types.is_null(kind):
            keys = column.cast(pa.binary())  # none of them has one
        elif pa.types.is_binary(kind):
            keys = column
        elif pa.types.is_string(kind):
            keys = column.view(pa.binary())
        elif pa.types.is_integer(kind):
            keys = column.cast(pa.string()).view(pa.binary())
        elif pa.types.is_large_string(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
            keys = column.cast(pa.binary())
        else:
            raise InvalidRequestError(f"column {name!r} of type {kind} can't be the routing key: keys are text, bytes or integers")
    except pa.ArrowException as error:
        raise InvalidRequestError(f"column {name!r} can't be the routing key: {error}") from error
    shortest, longest = (bound.as_py() for bound in pc.min_max(pc.binary_length(keys)).values())
    if (longest or 0) > KEY_BYTES:
        raise InvalidRequestError(f"column {name!r} has a routing key of {longest:,} bytes; a key may have {KEY_BYTES:,}")
    if (shortest or 0) < 0:
        raise InvalidRequestError(f"column {name!r} has a routing key of {shortest:,} bytes: its offsets are wrong")
    return keys
