"""Events of a journal as they are handed out: which of those that were read are wanted, and what is made of them."""

from __future__ import annotations

import json
import struct
import uuid
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from headwater.journals.hidden import HiddenEvents
from headwater.model.positions import Position
from headwater.model.records import Recorded
from headwater.runtime.clock import to_datetime
from headwater.segments.batches import indices
from headwater.segments.fetching import Fetched

#: Of so few events it's faster to look at each.
_FEW_ROWS = 8


class Wanted(NamedTuple):
    """Which events a query gives, as far as it says."""

    id: str | None = None
    tag: str | None = None
    type: str | None = None

    def places(self, columns: pa.RecordBatch) -> list[int]:
        """The places of these events among some."""
        if columns.num_rows <= _FEW_ROWS:
            return [place for place in range(columns.num_rows) if self._takes(columns, place)]
        found: list[set[int]] = []
        for name, word in (("id", self.id), ("type", self.type)):
            if word is not None:
                found.append(set(pc.indices_nonzero(pc.equal(columns.column(name), _scalar(word))).to_pylist()))
        if self.tag is not None:
            tags = columns.column("tags")
            found.append(set(pc.list_parent_indices(tags).filter(pc.equal(tags.flatten(), _scalar(self.tag))).to_pylist()))
        return sorted(set.intersection(*found)) if found else list(range(columns.num_rows))

    def _takes(self, columns: pa.RecordBatch, place: int) -> bool:
        return (
            (self.id is None or columns.column("id")[place].as_py() == self.id)
            and (self.type is None or columns.column("type")[place].as_py() == self.type)
            and (self.tag is None or self.tag in columns.column("tags")[place].as_py())
        )


@lru_cache(maxsize=256)
def _scalar(word: str) -> pa.Scalar:
    # Out of a column: to make one of a Python value, Arrow imports pandas, which takes longer than a query.
    data = word.encode()
    return pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(struct.pack("<2i", 0, len(data))), pa.py_buffer(data)])[0]


def without_hidden(columns: pa.RecordBatch, hidden: HiddenEvents) -> pa.RecordBatch:
    """Events without those that are deleted."""
    if not hidden:
        return columns
    rows = zip(columns.column("id").to_pylist(), columns.column("sequence").to_pylist(), strict=True)
    return columns.filter(pa.array([sequence >= hidden.low(id) for id, sequence in rows], pa.bool_()))


def recorded(found: Fetched, hidden: HiddenEvents | None = None, wanted: Wanted | None = None) -> Iterator[Recorded]:
    """The events that were fetched, without those that are deleted, or that are not wanted."""
    columns, numbers, appended = found.columns, found.numbers, found.appended
    if wanted is not None and any(wanted):
        places = wanted.places(columns)
        if not places:
            return
        if len(places) < columns.num_rows:
            columns = columns.take(indices(places))
            numbers, appended = [numbers[place] for place in places], [appended[place] for place in places]
    rows = zip(*(columns.column(index).to_pylist() for index in range(8)), numbers, appended, strict=True)
    for id, sequence, type, version, data, tags, meta, event_id, number, at in rows:
        if hidden and sequence < hidden.low(id):
            continue
        yield Recorded(
            id,
            sequence,
            type,
            version,
            json.loads(data),
            tuple(tags),
            json.loads(meta) if meta is not None else None,
            uuid.UUID(event_id),
            to_datetime(at),
            Position(found.segment, number),
        )
