"""How a stream scales, and how long its data is kept."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from headwater.errors import InvalidRequestError
from headwater.model.arguments import check_whole, items_of, shown
from headwater.model.limits import OPEN_SEGMENTS
from headwater.model.names import parse_word

#: More than any segment can take.
_MOST_PER_SECOND = 10**15


def _check_age(seconds: Any) -> None:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= timedelta.max.total_seconds():
        raise InvalidRequestError(f"the age in a retention is a number of seconds above 0, as a timedelta has, not {shown(seconds)}")


@dataclass(frozen=True)
class Scaling:
    """How the number of a stream's segments follows its load. Make one with `fixed`, `by_event_rate` or `by_data_rate`."""

    kind: str
    target: int = 0
    factor: int = 2
    min_segments: int = 1
    max_segments: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in ("fixed", "event_rate", "data_rate"):
            raise InvalidRequestError(
                f"scaling is made with hw.Scaling.fixed, by_event_rate or by_data_rate: there is no {shown(self.kind)}"
            )
        is_fixed = self.kind == "fixed"
        check_whole(self.target, "a target rate", 0 if is_fixed else 1, _MOST_PER_SECOND)
        check_whole(self.factor, "factor", 2)
        check_whole(self.min_segments, "a fixed number of segments" if is_fixed else "min_segments", 1, OPEN_SEGMENTS)
        if self.max_segments is not None:
            check_whole(self.max_segments, "max_segments", self.min_segments)

    @classmethod
    def fixed(cls, segments: int) -> Scaling:
        """A number of segments that changes only by hand."""
        return cls("fixed", min_segments=segments)

    @classmethod
    def by_event_rate(cls, per_second: int, factor: int = 2, min_segments: int = 1, max_segments: int | None = None) -> Scaling:
        """Split segments that get more events per second than this, merge those that get far fewer."""
        return cls("event_rate", per_second, factor, min_segments, max_segments)

    @classmethod
    def by_data_rate(cls, bytes_per_second: int, factor: int = 2, min_segments: int = 1, max_segments: int | None = None) -> Scaling:
        """Split segments that get more bytes per second than this, merge those that get far fewer."""
        return cls("data_rate", bytes_per_second, factor, min_segments, max_segments)

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Scaling:
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Retention:
    """What of a stream is kept. Make one with `forever`, `by_time`, `by_size` or `by_consumption`."""

    kind: str
    seconds: float | None = None
    bytes: int | None = None
    groups: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in ("forever", "time", "size", "consumption"):
            raise InvalidRequestError(
                f"retention is made with hw.Retention.forever, by_time, by_size or by_consumption: there is no {shown(self.kind)}"
            )
        if self.seconds is not None or self.kind == "time":
            _check_age(self.seconds)
        if self.bytes is not None or self.kind == "size":
            check_whole(self.bytes, "the size in a retention", 1)
        names = items_of(self.groups, "what a retention waits for", "reader groups")
        object.__setattr__(self, "groups", tuple(parse_word(name, "reader group") for name in names))
        if not self.groups and self.kind == "consumption":
            raise InvalidRequestError("retention by consumption takes a list of one or more reader groups")

    @classmethod
    def forever(cls) -> Retention:
        """Nothing goes but by `truncate`."""
        return cls("forever")

    @classmethod
    def by_time(cls, age: timedelta) -> Retention:
        """Events appended longer ago than `age` may go."""
        if not isinstance(age, timedelta) or age <= timedelta(0):
            raise InvalidRequestError(f"retention by time takes a timedelta above zero, not {shown(age)}")
        return cls("time", seconds=age.total_seconds())

    @classmethod
    def by_size(cls, bytes: int) -> Retention:
        """The oldest events may go while the stream holds more than this many bytes."""
        return cls("size", bytes=bytes)

    @classmethod
    def by_consumption(cls, groups: Iterable[str], max_size: int | None = None, max_age: timedelta | None = None) -> Retention:
        """What all these reader groups have read may go; past the hard limits also what they have not."""
        if max_size is not None:
            check_whole(max_size, "max_size", 1)
        age = cls.by_time(max_age).seconds if max_age is not None else None
        return cls("consumption", age, max_size, tuple(items_of(groups, "what a retention waits for", "reader groups")))

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Retention:
        return cls(**json.loads(text))
