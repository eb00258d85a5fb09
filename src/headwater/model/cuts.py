"""A cut: a place in one or more streams, before which lies the past and behind which the future.

In each stream a cut names segments that tile the key space, with an event number in each. Numbers of segments grow along every
key, so comparing them tells what lies before a cut; no history of epochs is needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from headwater.errors import InvalidRequestError
from headwater.model.arguments import MOST, check_whole, shown
from headwater.model.keys import KeyRange


class StreamCut(NamedTuple):
    """A cut's part for one stream: the stream's id, and event numbers by segment number."""

    id: int
    segments: Mapping[int, int]


@dataclass(frozen=True, eq=False)
class Cut:
    """A consistent place in one or more streams of one store. `str(cut)` is its text, `Cut.parse(text)` reads it back."""

    store: str
    streams: Mapping[str, StreamCut] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            frozen = {name: _frozen(*part) for name, part in self.streams.items()}
            for text in (self.store, *frozen):
                if not isinstance(text, str):
                    raise TypeError(f"a store's id and streams' names are text, not {shown(text)}")
        except (ValueError, TypeError, AttributeError) as error:
            raise InvalidRequestError(f"this can't be a cut; take one of stream.tail(), store.cut() or Cut.parse(): {error}") from error
        object.__setattr__(self, "streams", MappingProxyType(dict(sorted(frozen.items()))))

    def __str__(self) -> str:
        return _text({"store": self.store, "streams": {name: _part(cut) for name, cut in self.streams.items()}})

    @classmethod
    def parse(cls, text: str) -> Cut:
        """The cut whose `str` this is."""
        try:
            fields = json.loads(text)
            streams = {
                name: StreamCut(part["id"], {int(key): value for key, value in part["segments"].items()})
                for name, part in fields["streams"].items()
            }
            return cls(str(fields["store"]), streams)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise InvalidRequestError(f"this is not the text of a cut: {shown(text)}") from error

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Cut) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __repr__(self) -> str:
        return f"Cut({self})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Cut.parse, (str(self),)


def part_text(name: str, part: StreamCut) -> str:
    """The text of a stream's part, exactly as the text of every cut with this part contains it."""
    return _text({name: _part(part)})[1:-1]


def _part(part: StreamCut) -> dict[str, Any]:
    return {"id": part.id, "segments": {str(segment): number for segment, number in part.segments.items()}}


def _text(fields: dict[str, Any]) -> str:
    return json.dumps(fields, sort_keys=True, separators=(",", ":"))


def _frozen(id: int, segments: Mapping[int, int]) -> StreamCut:
    numbers = {_integer(segment): _integer(number) for segment, number in segments.items()}
    return StreamCut(_integer(id), MappingProxyType(dict(sorted(numbers.items()))))


def _integer(value: Any) -> int:
    # A cut may lie behind the last number that there can be.
    return check_whole(value, "an id, and each number in a cut,", most=MOST + 1)


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
