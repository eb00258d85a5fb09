"""Which segments precede which, by comparing each with each: what the map of segments is compared with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from headwater.catalog.segments import SegmentRow
from headwater.model.keys import KeyRange


class Span(NamedTuple):
    """A segment as lineage needs it: its keys and the readable numbers [head, tail)."""

    number: int
    keys: KeyRange
    head: int
    tail: int


def first_spans(spans: Iterable[Span]) -> list[Span]:
    """The oldest span over each key: where reading from the head begins."""
    chosen: list[Span] = []
    for span in sorted(spans):
        if not any(span.keys.overlaps(other.keys) for other in chosen):
            chosen.append(span)
    return chosen


def last_spans(spans: Iterable[Span]) -> list[Span]:
    """The newest span over each key: where the tail is."""
    chosen: list[Span] = []
    for span in sorted(spans, reverse=True):
        if not any(span.keys.overlaps(other.keys) for other in chosen):
            chosen.append(span)
    return sorted(chosen)


def is_before(span: Span, cut: Iterable[Span]) -> bool:
    """Whether all of `span` lies before a cut through the segments `cut`, none of which is `span`."""
    return any(span.number < other.number and span.keys.overlaps(other.keys) for other in cut)


def span_of(row: SegmentRow) -> Span:
    return Span(row.number, row.keys, row.head, row.tail)
