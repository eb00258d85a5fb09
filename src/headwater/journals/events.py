"""Events of a journal as they are handed out: which of those that were read are wanted, and what is made of them."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.journals.hidden import HiddenEvents
from headwater.model.positions import Position
from headwater.model.records import Recorded
from headwater.runtime.clock import to_datetime
from headwater.segments.fetching import Fetched, indices


class Wanted(NamedTuple):
    """Which events a query gives, as far as it says."""

    id: str | None = None
    tag: str | None = None
    type: str | None = None

    def places(self, columns: pa.RecordBatch) -> list[int]:
        """The places of these events among some."""
        found: list[list[int]] = [
            pc.indices_nonzero(pc.equal(columns.column(name), _scalar(word))).to_pylist()
            for name, word in (("id", self.id), ("type", self.type))
            if word is not None
        ]
        if self.tag is not None:
            tags = columns.column("tags")
            # An event has a tag once.
            found.append(pc.list_parent_indices(tags).filter(pc.equal(tags.flatten(), _scalar(self.tag))).to_pylist())
        if len(found) == 1:
            return found[0]
        return sorted(set.intersection(*map(set, found))) if found else list(range(columns.num_rows))


def _scalar(word: str) -> pa.Scalar:
    """A text for Arrow to compare with, without `pa.scalar`: that imports pandas, as `pa.array` does."""
    data = word.encode()
    return pa.StringArray.from_buffers(1, pa.py_buffer(np.array([0, len(data)], dtype=np.int32)), pa.py_buffer(data))[0]


def without_hidden(columns: pa.RecordBatch, hidden: HiddenEvents) -> pa.RecordBatch:
    """Events without those that are deleted."""
    if not hidden:
        return columns
    rows = zip(columns.column("id").to_pylist(), columns.column("sequence").to_pylist(), strict=True)
    return columns.take(indices([place for place, (id, sequence) in enumerate(rows) if sequence >= hidden.low(id)]))


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
