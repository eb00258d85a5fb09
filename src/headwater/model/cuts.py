"""A cut: a place in one or more streams, between their past and their future.

In each stream a cut names segments that tile the key space, with an event number in each. `model/segmentmap.py` tells what lies before it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from headwater.errors import InvalidRequestError
from headwater.model.arguments import MOST, check_whole, shown


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
