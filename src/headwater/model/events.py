"""An event as it is read: a view on the Arrow batch it came in, whose time and position are made when asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple, Protocol

from headwater.model.positions import Position


class EventSource(Protocol):
    """What lazily knows the time and position of each event of a batch."""

    def time_at(self, index: int) -> datetime: ...
    def position_at(self, index: int) -> Position: ...


class _Given:
    """The source of one event made by hand."""

    __slots__ = ("position", "time")

    def __init__(self, time: datetime | None, position: Position | None) -> None:
        self.time = time
        self.position = position

    def time_at(self, index: int) -> datetime | None:
        return self.time

    def position_at(self, index: int) -> Position | None:
        return self.position


class _Stored(NamedTuple):
    """What an event holds."""

    value: Any
    key: bytes | None
    source: EventSource
    place: int


class Event(tuple[Any, ...]):
    """One event: `value` (bytes, or a dict on a typed stream), `key` (bytes or None), `time` and `position`."""

    # A tuple, since 2 to 3 million of them are made each second: its constructor runs in C, a class with slots costs three times as much.
    __slots__ = ()

    def __new__(cls, value: Any, key: bytes | None = None, time: datetime | None = None, position: Position | None = None) -> Event:
        return _make((value, key, _Given(time, position), 0))

    # These run in C, and don't ask `__getitem__`.
    value: Any = _Stored.value
    key: Any = _Stored.key

    @property
    def time(self) -> datetime:
        """Event time: what the writer gave, else when it was appended."""
        return tuple.__getitem__(self, 2).time_at(tuple.__getitem__(self, 3))  # type: ignore[no-any-return]

    @property
    def position(self) -> Position:
        """Its segment, and its number there."""
        return tuple.__getitem__(self, 2).position_at(tuple.__getitem__(self, 3))  # type: ignore[no-any-return]

    def _fields(self) -> tuple[Any, ...]:
        return self.value, self.key, self.time, self.position

    def __getitem__(self, index: Any) -> Any:
        return self._fields()[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._fields())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Event) and self._fields() == other._fields()

    def __ne__(self, other: object) -> bool:
        return not self == other  # a tuple's own would compare the sources

    def __hash__(self) -> int:
        return hash((self.key, self.position))

    def __repr__(self) -> str:
        return f"Event(value={self.value!r}, key={self.key!r}, time={self.time!r}, position={self.position!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Event, self._fields()


_make = partial(tuple.__new__, Event)


def events_of(
    values: list[Any], keys: Iterable[bytes | None] | None, source: EventSource, places: Sequence[int] | None = None
) -> Iterator[Event]:
    """The events of a batch, or those at some `places` of it, made as they are asked for."""
    at = range(len(values)) if places is None else places
    return map(_make, zip(values, keys if keys is not None else repeat(None), repeat(source), at))
