"""How a stream scales, and how long its data is kept."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from headwater.errors import InvalidRequestError
from headwater.model.limits import OPEN_SEGMENTS
from headwater.model.names import parse_word

#: More than any segment can take.
_MOST_PER_SECOND = 10**15


def _at_least(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidRequestError(f"{name} is a whole number of at least {least}, not {value!r}")


@dataclass(frozen=True)
class Scaling:
    """How the number of a stream's segments follows its load. Make one with `fixed`, `by_event_rate` or `by_data_rate`."""

    kind: str
    target: int = 0
    factor: int = 2
    min_segments: int = 1
    max_segments: int | None = None

    @classmethod
    def fixed(cls, segments: int) -> Scaling:
        """A number of segments that changes only by hand."""
        _at_least("a fixed number of segments", segments, 1)
        if segments > OPEN_SEGMENTS:
            raise InvalidRequestError(f"a stream may have {OPEN_SEGMENTS:,} open segments, not {segments:,}")
        return cls("fixed", min_segments=segments)

    @classmethod
    def by_event_rate(cls, per_second: int, factor: int = 2, min_segments: int = 1, max_segments: int | None = None) -> Scaling:
        """Split segments that get more events per second than this, merge those that get far fewer."""
        return cls._by_rate("event_rate", per_second, factor, min_segments, max_segments)

    @classmethod
    def by_data_rate(cls, bytes_per_second: int, factor: int = 2, min_segments: int = 1, max_segments: int | None = None) -> Scaling:
        """Split segments that get more bytes per second than this, merge those that get far fewer."""
        return cls._by_rate("data_rate", bytes_per_second, factor, min_segments, max_segments)

    @classmethod
    def _by_rate(cls, kind: str, target: int, factor: int, min_segments: int, max_segments: int | None) -> Scaling:
        _at_least("a target rate", target, 1)
        if target > _MOST_PER_SECOND:
            raise InvalidRequestError(f"a target rate is at most {_MOST_PER_SECOND:,} a second, not {target:,}")
        _at_least("factor", factor, 2)
        _at_least("min_segments", min_segments, 1)
        if min_segments > OPEN_SEGMENTS:
            raise InvalidRequestError(f"a stream may have {OPEN_SEGMENTS:,} open segments, not {min_segments:,}")
        if max_segments is not None:
            _at_least("max_segments", max_segments, min_segments)
        return cls(kind, target, factor, min_segments, max_segments)

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

    @classmethod
    def forever(cls) -> Retention:
        """Nothing goes but by `truncate`."""
        return cls("forever")

    @classmethod
    def by_time(cls, age: timedelta) -> Retention:
        """Events appended longer ago than `age` may go."""
        if not isinstance(age, timedelta) or age <= timedelta(0):
            raise InvalidRequestError(f"retention by time takes a timedelta above zero, not {age!r}")
        return cls("time", seconds=age.total_seconds())

    @classmethod
    def by_size(cls, bytes: int) -> Retention:
        """The oldest events may go while the stream holds more than this many bytes."""
        _at_least("retention by size", bytes, 1)
        return cls("size", bytes=bytes)

    @classmethod
    def by_consumption(cls, groups: Iterable[str], max_size: int | None = None, max_age: timedelta | None = None) -> Retention:
        """What all these reader groups have read may go; past the hard limits also what they have not."""
        if isinstance(groups, str) or not isinstance(groups, Iterable):
            raise InvalidRequestError(f"retention by consumption takes a list of one or more reader groups, not {groups!r}")
        names = tuple(parse_word(name, "reader group") for name in groups)
        if not names:
            raise InvalidRequestError("retention by consumption takes a list of one or more reader groups")
        if max_size is not None:
            _at_least("max_size", max_size, 1)
        return cls("consumption", cls.by_time(max_age).seconds if max_age is not None else None, max_size, names)

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Retention:
        fields = json.loads(text)
        return cls(**{**fields, "groups": tuple(fields["groups"])})
