"""A few typed events as the message that Arrow makes of them, without Arrow, which takes several times as long for so few.

The metadata of a record batch has one layout whatever its values are. Arrow makes it once for a schema; of each batch only the counts, and
the places and lengths of its buffers, are written into a copy.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.types as pt

from headwater.segments.block import ALIGNMENT

_PADDINGS = [bytes(-more % ALIGNMENT) for more in range(ALIGNMENT)]
_PREFIX_BYTES = 8
_LONG = struct.Struct("<q")
#: Of one value, as most of these messages have.
_TWO_OFFSETS = struct.Struct("<2i")
_FORMATS = {"int8": "b", "int16": "h", "int32": "i", "int64": "q", "uint8": "B", "uint16": "H", "uint32": "I", "uint64": "Q"}
_FORMATS |= {"float": "f", "double": "d"}

#: What a column adds to a message: the count and the nulls of each of its nodes, one after the other, and its buffers.
_Column: TypeAlias = Callable[[Sequence[Any], list[int], list[bytes]], None]


def few_rows(schema: pa.Schema) -> FewRows | None:
    """What encodes a few rows of a schema; None if Arrow must do it."""
    found = _kept.get(id(schema))
    if found is None:
        if len(_kept) >= _KEPT:
            _kept.clear()
        # With the schema, so that its id stays its own.
        found = _kept[id(schema)] = schema, _make(schema)
    return found[1]


def _make(schema: pa.Schema) -> FewRows | None:
    columns = [_column(field.type) for field in schema]
    if not columns or any(column is None for column in columns):
        return None
    return FewRows(schema, [column for column in columns if column is not None])


class FewRows:
    """Encodes rows that a `RowCheck` of the schema took."""

    def __init__(self, schema: pa.Schema, columns: Sequence[_Column]) -> None:
        self._schema = schema
        self._columns = list(zip(schema.names, columns, strict=True))
        self._layouts: dict[bool, _Layout] = {}

    def encode(self, rows: Sequence[dict[str, Any]], keys: Sequence[bytes | None]) -> tuple[bool, bytes]:
        """Whether any row has a key, and the message, which has the keys as a column then."""
        has_keys = any(key is not None for key in keys)
        nodes: list[int] = []
        buffers: list[bytes] = []
        for name, column in self._columns:
            column([row.get(name) for row in rows], nodes, buffers)
        if has_keys:
            _bytes(keys, nodes, buffers)
        layout = self._layouts.get(has_keys)
        if layout is None:
            layout = self._layouts[has_keys] = _layout(self._schema, has_keys)
        return has_keys, layout.message(len(rows), nodes, buffers)


_KEPT = 256
_kept: dict[int, tuple[pa.Schema, FewRows | None]] = {}


class _Layout(NamedTuple):
    """Metadata, with the places in it of the number of rows, of the nodes, of the buffers, and of the length of the body."""

    metadata: bytes
    rows: int
    nodes: int
    buffers: int
    body: int

    def message(self, rows: int, nodes: list[int], buffers: list[bytes]) -> bytes:
        found = bytearray(self.metadata)
        parts: list[bytes] = []
        places: list[int] = []
        at = 0
        for buffer in buffers:
            size = len(buffer)
            places += (at, size)
            if size:
                padding = _PADDINGS[size % ALIGNMENT]
                parts += (buffer, padding)
                at += size + len(padding)
        _LONG.pack_into(found, self.rows, rows)
        struct.pack_into(f"<{len(nodes)}q", found, self.nodes, *nodes)
        struct.pack_into(f"<{len(places)}q", found, self.buffers, *places)
        _LONG.pack_into(found, self.body, at)
        return b"".join((found, *parts))


def _layout(schema: pa.Schema, has_keys: bool) -> _Layout:
    """The layout of the messages of a schema, found in a message of Arrow's."""
    if has_keys:
        schema = schema.append(pa.field("_key", pa.binary()))
    sample = pa.RecordBatch.from_arrays([pa.nulls(1, field.type) for field in schema], schema=schema).serialize().to_pybytes()
    metadata = sample[: _PREFIX_BYTES + struct.unpack_from("<i", sample, 4)[0]]

    def follow(place: int) -> int:
        return place + int(struct.unpack_from("<I", metadata, place)[0])

    def place_of(table: int, field: int) -> int:
        entries = table - int(struct.unpack_from("<i", metadata, table)[0])
        return table + int(struct.unpack_from("<H", metadata, entries + 4 + 2 * field)[0])

    message = follow(_PREFIX_BYTES)
    batch = follow(place_of(message, 2))
    # A vector begins with its length.
    return _Layout(metadata, place_of(batch, 0), follow(place_of(batch, 1)) + 4, follow(place_of(batch, 2)) + 4, place_of(message, 3))


# Columns.


def _column(kind: pa.DataType) -> _Column | None:
    if pt.is_string(kind):
        return _texts
    if pt.is_binary(kind):
        return _bytes
    if pt.is_boolean(kind):
        return _flags
    if str(kind) in _FORMATS:
        return _numbers(_FORMATS[str(kind)])
    item = _column(kind.value_type) if pt.is_list(kind) else None
    return _lists(item) if item is not None else None


def _nulls(values: Sequence[Any], nodes: list[int], buffers: list[bytes]) -> int:
    """Add a node, and the buffer that says which values are there, empty if all are; returns how many are not."""
    nulls = values.count(None)
    nodes += (len(values), nulls)
    buffers.append(_bits([value is not None for value in values]) if nulls else b"")
    return nulls


def _bits(flags: Sequence[Any]) -> bytes:
    return sum([1 << place for place, flag in enumerate(flags) if flag]).to_bytes((len(flags) + 7) // 8, "little")


def _bytes(values: Sequence[bytes | None], nodes: list[int], buffers: list[bytes]) -> None:
    there = [value or b"" for value in values] if _nulls(values, nodes, buffers) else values
    buffers += (_offsets(there), b"".join(there))  # type: ignore[arg-type]


def _texts(values: Sequence[str | None], nodes: list[int], buffers: list[bytes]) -> None:
    _bytes([None if value is None else value.encode() for value in values], nodes, buffers)


def _offsets(values: Sequence[Any]) -> bytes:
    if len(values) == 1:
        return _TWO_OFFSETS.pack(0, len(values[0]))
    return struct.pack(f"<{len(values) + 1}i", 0, *accumulate(map(len, values)))


def _flags(values: Sequence[bool | None], nodes: list[int], buffers: list[bytes]) -> None:
    _nulls(values, nodes, buffers)
    buffers.append(_bits(values))


def _numbers(form: str) -> _Column:
    one = struct.Struct(f"<{form}")

    def column(values: Sequence[Any], nodes: list[int], buffers: list[bytes]) -> None:
        there = [value or 0 for value in values] if _nulls(values, nodes, buffers) else values
        buffers.append(one.pack(*there) if len(there) == 1 else struct.pack(f"<{len(values)}{form}", *there))

    return column


def _lists(item: _Column) -> _Column:
    def column(values: Sequence[Sequence[Any] | None], nodes: list[int], buffers: list[bytes]) -> None:
        there = [value or () for value in values] if _nulls(values, nodes, buffers) else values
        buffers.append(_offsets(there))
        item(list(chain.from_iterable(there)), nodes, buffers)  # type: ignore[arg-type]

    return column
