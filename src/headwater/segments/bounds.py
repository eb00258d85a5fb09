"""Between which values a column lies in each row group of a chunk, by the statistics in its footer.

Whoever has a condition on rows says by them which row groups may have some: see `Choice`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pt

_UNITS = {"milliseconds": "ms", "microseconds": "us", "nanoseconds": "ns"}


class Bounds(NamedTuple):
    """For each row group the least and the most value of a column, null where that is not known.

    NaN is in neither. `has_nulls` and `only_nulls` are True where that is not known, and False.
    """

    least: pa.Array
    most: pa.Array
    has_nulls: list[bool]
    only_nulls: list[bool]


#: Says by the bounds of columns for each row group whether it may have rows that are wanted; None: each of them may.
MayHave = Callable[[Mapping[str, Bounds]], Sequence[bool] | None]


class Choice(NamedTuple):
    """What is wanted of a chunk, and the columns that decide it."""

    names: Sequence[str]
    may_have: MayHave


def read_bounds(metadata: pq.FileMetaData, place: int, kind: pa.DataType) -> Bounds | None:
    """The bounds of the column at a place of the file, of a type; None if its statistics are not known to be of use."""
    stored = _stored_type(metadata, place, kind)
    if stored is None:
        return None
    found: list[tuple[Any, Any, bool, bool]] = []
    for index in range(metadata.num_row_groups):
        column = metadata.row_group(index).column(place)
        of = column.statistics
        if of is None:
            found.append((None, None, True, False))
            continue
        ends = (None, None)
        if of.has_min_max:
            ends = (of.min_raw, of.max_raw) if pt.is_timestamp(stored) else (of.min, of.max)
        nulls = of.null_count if of.has_null_count else None
        found.append((*ends, nulls != 0, nulls is not None and nulls == column.num_values))
    least, most, has_nulls, only_nulls = (list(values) for values in zip(*found, strict=True)) if found else ([], [], [], [])
    try:
        return Bounds(pa.array(least, stored), pa.array(most, stored), has_nulls, only_nulls)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return None


def _stored_type(metadata: pq.FileMetaData, place: int, kind: pa.DataType) -> pa.DataType | None:
    """What the bounds of a column of this type are made of."""
    if pt.is_timestamp(kind):
        unit = json.loads(metadata.schema.column(place).logical_type.to_json()).get("timeUnit")
        return pa.timestamp(_UNITS[unit], kind.tz) if unit in _UNITS else None
    if pt.is_date(kind):
        return pa.date32()
    plain = (
        pt.is_integer,
        pt.is_float32,
        pt.is_float64,
        pt.is_decimal128,
        pt.is_string,
        pt.is_large_string,
        pt.is_binary,
        pt.is_large_binary,
    )
    return kind if any(is_kind(kind) for is_kind in plain) else None
