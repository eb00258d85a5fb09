"""The Parquet field ids of a stream's columns, by which a column is known whatever its place in a file.

Ids follow from the versions of the stream's schema, in order: a column gets the next ids, one for itself and one for each nested field,
in the first version that has it. So no id changes and none is used twice. The columns of headwater have fixed ids that no stream reaches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import pyarrow as pa
import pyarrow.types as pt

#: The ids of headwater's own columns.
METADATA_IDS = {"_key": 2_000_000_001, "_time": 2_000_000_002, "_appended": 2_000_000_003, "_number": 2_000_000_004}
_FIELD_ID = b"PARQUET:field_id"

Path = tuple[str, ...]


def assign(versions: Iterable[pa.Schema]) -> dict[Path, int]:
    """The id of each column, and of each field nested in one, by its path; `versions` are all of the stream, oldest first."""
    found: dict[Path, int] = {}
    for schema in versions:
        for field in schema:
            for path in _paths((field.name,), field.type):
                found.setdefault(path, len(found) + 1)
    return found


def with_ids(schema: pa.Schema, ids: Mapping[Path, int]) -> pa.Schema:
    """The schema of a file, whose columns say their ids."""
    known: dict[Path, int] = {**ids, **{(name,): id for name, id in METADATA_IDS.items()}}
    return pa.schema([_with_id((field.name,), field, known) for field in schema], schema.metadata)


def _paths(path: Path, kind: pa.DataType) -> Iterator[Path]:
    yield path
    for name, field in _children(kind):
        yield from _paths((*path, name), field.type)


def _children(kind: pa.DataType) -> list[tuple[str, pa.Field]]:
    """The fields in a type, by names that no version changes."""
    if pt.is_struct(kind):
        return [(field.name, field) for field in kind]
    if pt.is_map(kind):
        return [("key", kind.key_field), ("value", kind.item_field)]
    return [("item", kind.value_field)] if pt.is_nested(kind) else []


def _with_id(path: Path, field: pa.Field, ids: Mapping[Path, int]) -> pa.Field:
    kind = field.type
    inner = [_with_id((*path, name), child, ids) for name, child in _children(kind)]
    if pt.is_struct(kind):
        kind = pa.struct(inner)
    elif pt.is_map(kind):
        kind = pa.map_(*inner, keys_sorted=kind.keys_sorted)
    elif pt.is_fixed_size_list(kind):
        kind = pa.list_(*inner, kind.list_size)
    elif pt.is_large_list(kind):
        kind = pa.large_list(*inner)
    elif pt.is_list(kind):
        kind = pa.list_(*inner)
    return pa.field(field.name, kind, field.nullable, {_FIELD_ID: str(ids[path])})
