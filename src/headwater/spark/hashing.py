"""A number for a set of rows that does not depend on their order, for checkpoints that can't be read where the driver is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pt
import xxhash

_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_NULL = np.uint64(0x5851F42D4C957F2D)
Hashes = np.ndarray[Any, np.dtype[np.uint64]]


def hash_rows(batch: pa.RecordBatch) -> int:
    """The sum of a number for each row, modulo 2**64."""
    found = np.zeros(batch.num_rows, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for column in batch.columns:
            found = _mixed(found * _FACTOR + _hash_column(column))
        return int(found.sum(dtype=np.uint64))


def _mixed(values: Hashes) -> Hashes:
    values = values ^ (values >> np.uint64(32))
    return (values * _FACTOR) ^ (values >> np.uint64(29))


def _hash_column(column: pa.Array) -> Hashes:
    kind = column.type
    if pt.is_primitive(kind) and not pt.is_boolean(kind) and kind.bit_width == 64:
        found = np.asarray(column.view(pa.int64()).fill_null(0)).view(np.uint64)
    elif pt.is_integer(kind) or pt.is_boolean(kind) or pt.is_date32(kind) or pt.is_float32(kind):
        number = pa.int32() if pt.is_date32(kind) or pt.is_float32(kind) else kind
        found = np.asarray(column.view(number).cast(pa.int64()).fill_null(0)).view(np.uint64)
    else:
        plain = pt.is_string(kind) or pt.is_binary(kind)
        texts = (column if plain else pa.array(map(repr, column.to_pylist()))).dictionary_encode()
        unique = [value if isinstance(value, bytes) else str(value).encode() for value in texts.dictionary.to_pylist()]
        hashes = np.fromiter(map(xxhash.xxh3_64_intdigest, unique), dtype=np.uint64, count=len(unique))
        indices = np.asarray(texts.indices.fill_null(0))
        found = hashes[indices] if len(hashes) else np.zeros(len(column), dtype=np.uint64)
    if column.null_count:
        found = np.where(np.asarray(column.is_null()), _NULL, found)
    return found
