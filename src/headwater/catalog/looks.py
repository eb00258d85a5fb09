"""Looks: streams and markers as of one moment."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from headwater.catalog import segments
from headwater.catalog.commits import NO_SEQUENCE
from headwater.catalog.database import Tx
from headwater.catalog.operations import operation
from headwater.catalog.segments import SegmentRow
from headwater.catalog.transactions import full_names, load_tails


class MarkerRow(NamedTuple):
    """The last commit under a marker; `tails` are those of each stream's open segments right after it."""

    owner: str
    sequence: int
    fingerprint: str | None
    tails: dict[int, dict[int, int]]


class Found(NamedTuple):
    """What a look found. `names` has the full names of the streams that markers tell of, without those that were deleted."""

    segments: dict[int, list[SegmentRow]]
    markers: list[MarkerRow]
    names: dict[int, str]


@operation("read")
def look(tx: Tx, streams: Sequence[int], owners: Sequence[str]) -> Found:
    """The segments of streams and the last markers of owners, as of one moment."""
    found = segments.list_segments_of(tx, streams) if streams else {}
    markers: list[MarkerRow] = []
    if owners:
        marks = ", ".join("?" * len(owners))
        sql = f"SELECT owner, sequence, fingerprint, result FROM marker WHERE owner IN ({marks}) AND sequence > ?"
        for owner, sequence, fingerprint, result in tx.run(sql, (*owners, NO_SEQUENCE)):
            markers.append(MarkerRow(owner, sequence, fingerprint, load_tails(json.loads(result))))
    names = full_names(tx, sorted({stream for marker in markers for stream in marker.tails}))
    return Found(found, markers, names)
