"""Parquet field ids: a column of a stream has one id in all its files, whatever was added since, and no other column ever has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import headwater as hw
from headwater.model.fieldids import METADATA_IDS, assign, with_ids

PLACE = pa.struct([("lat", pa.float64()), ("names", pa.list_(pa.string()))])
FIRST = pa.schema([pa.field("id", pa.int32(), nullable=False), ("place", PLACE), ("extra", pa.map_(pa.string(), pa.int64()))])
#: Columns are added before the others too.
SECOND = pa.schema([("new", pa.list_(pa.int8(), 2)), *FIRST.set(0, pa.field("id", pa.int64(), nullable=False)), ("last", pa.string())])


def ids_of(fields: Any, path: str = "") -> dict[str, int]:
    found: dict[str, int] = {}
    for field in fields:
        name = f"{path}{field.name}"
        if field.metadata and b"PARQUET:field_id" in field.metadata:
            found[name] = int(field.metadata[b"PARQUET:field_id"])
        kind = field.type
        nested = [kind.key_field, kind.item_field] if pa.types.is_map(kind) else [kind.field(at) for at in range(kind.num_fields)]
        found |= ids_of(nested, f"{name}.")
    return found


def chunk_ids(stream: hw.Stream) -> list[dict[str, int]]:
    return [ids_of(pq.read_schema(Path(item.url.removeprefix("file://")))) for item in stream.chunks()]


def test_ids_follow_from_the_versions_in_order() -> None:
    ids = assign([FIRST, SECOND])
    paths = ("id",), ("place",), ("place", "lat"), ("place", "names"), ("place", "names", "item"), ("extra",)
    assert [ids[path] for path in paths] == [1, 2, 3, 4, 5, 6]
    assert {path: ids[path] for path in assign([FIRST])} == assign([FIRST])
    assert len(set(ids.values())) == len(ids) == 11
    marked = with_ids(SECOND, ids)
    assert marked.equals(SECOND) and sorted(ids_of(marked).values()) == sorted(ids.values())
    assert min(METADATA_IDS.values()) > 1_000_000_000


def test_every_chunk_has_the_ids_of_the_streams_history(store: hw.Store) -> None:
    stream = store.create_stream("a/s", schema=FIRST)
    row = {"id": 1, "place": {"lat": 1.5, "names": ["a"]}, "extra": [("k", 1)]}
    with stream.writer() as writer:
        writer.write(row)
    store.run_upkeep()
    stream.update(schema=SECOND)
    fork = stream.fork("a/fork")
    with stream.writer() as writer:
        writer.write(row | {"new": [1, 2]})
    store.run_upkeep()
    fork.update(schema=SECOND.append(pa.field("forked", pa.string())))
    with fork.writer() as writer:
        writer.write(row | {"forked": "x"})
    store.run_upkeep()
    first, second = chunk_ids(stream)
    assert {name: second[name] for name in first} == first
    assert second["new"] > max(id for id in first.values() if id < 1_000_000_000)
    assert {name: second[name] for name in METADATA_IDS} == METADATA_IDS
    assert len(set(second.values())) == len(second)
    forked = chunk_ids(fork)[-1]
    assert {name: forked[name] for name in second} == second and forked["forked"] not in second.values()
    # What is read has no trace of them.
    assert ids_of(stream.to_arrow().schema) == {}
    assert [event.value["id"] for event in stream.read()] == [1, 1]
    assert [event.value["forked"] for event in fork.read()] == [None, "x"]
