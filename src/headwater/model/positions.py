"""Where an event is: its segment and its number there. And the public picture of a segment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Position(NamedTuple):
    """An event's place in its stream: gapless numbers from 0 in each segment (in a byte stream, the byte offset)."""

    segment: int
    number: int


@dataclass(frozen=True, slots=True)
class Segment:
    """An open segment: `start` and `end` are fractions of the key space, `events` and `bytes` what is readable in it."""

    number: int
    start: float
    end: float
    events: int
    bytes: int
    epoch: int
