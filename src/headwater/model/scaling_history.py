"""How a stream's segments came and went, and with which load: what `Stream.scaling_history` returns."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple


class SegmentLife(NamedTuple):
    """A segment: its part of the key space, when it was made and sealed, and what it got in between."""

    number: int
    start: float
    end: float
    made: datetime
    sealed: datetime | None
    events: int
    bytes: int


class RangeRate(NamedTuple):
    """The rate per second of the segment that had this part of the key space."""

    start: float
    end: float
    rate: float


class LoadSample(NamedTuple):
    """The rates of all open segments in one minute; `kind` is "event_rate" or "data_rate", `target` what the policy asked for then."""

    time: datetime
    kind: str
    target: int
    rates: tuple[RangeRate, ...]


class ScaleEvent(NamedTuple):
    """A "split" or "merge" that scaling by rate made, with its reason."""

    time: datetime
    epoch: int
    kind: str
    sealed: tuple[int, ...]
    made: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class ScalingHistory:
    """All readable segments; and of a stream that scales by rate the samples of a week and the last scalings, oldest first.

    There is a sample for each minute with load of the last 6 hours, and one in ten minutes before.
    """

    segments: tuple[SegmentLife, ...]
    samples: tuple[LoadSample, ...]
    events: tuple[ScaleEvent, ...]
