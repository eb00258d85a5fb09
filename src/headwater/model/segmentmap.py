"""The segments of a stream as a map: which lie before which, where cuts pass, and how a reader moves on through them.

Segment numbers grow along every key, so of two segments over one key the one with the higher number is later. Every answer about order
follows from that comparison, and no history of epochs is needed. Costs grow with the number of segments, not with its square.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Generic, NamedTuple, Protocol, TypeVar

from headwater.model.keys import WHOLE, KeyRange


class Mapped(Protocol):
    """A segment as the map needs it: its keys, its readable numbers [head, tail), and whether the tail may still move."""

    @property
    def number(self) -> int: ...
    @property
    def keys(self) -> KeyRange: ...
    @property
    def head(self) -> int: ...
    @property
    def tail(self) -> int: ...
    @property
    def is_open(self) -> bool: ...


S = TypeVar("S", bound=Mapped)
#: A place in a stream: a number in each of some segments, which cover every key once.
Numbers = Mapping[int, int]


class Progress(NamedTuple):
    """How far a reader is in one segment, and whether all of the segment is read that the reader wants."""

    number: int
    is_done: bool


class Part(NamedTuple, Generic[S]):
    """Numbers [start, end) of one segment."""

    segment: S
    start: int
    end: int


class Front:
    """The segments that a place names, ordered by their keys. Those that overlap others are allowed."""

    def __init__(self, segments: Iterable[Mapped] = ()) -> None:
        self._found = sorted((segment.keys, segment.number) for segment in segments)
        self._starts = [keys.start for keys, _ in self._found]
        #: The largest end of a segment up to each place in the order.
        self._ends: list[int] = []
        for keys, _ in self._found:
            self._ends.append(max(keys.end, self._ends[-1]) if self._ends else keys.end)

    def add(self, segment: Mapped) -> None:
        insort(self._found, (segment.keys, segment.number))
        place = bisect_left(self._found, (segment.keys, segment.number))
        self._starts.insert(place, segment.keys.start)
        self._ends.insert(place, 0)
        for at in range(place, len(self._ends)):
            self._ends[at] = max(self._found[at][0].end, self._ends[at - 1] if at else 0)

    def over(self, keys: KeyRange) -> Iterator[int]:
        """The numbers of the segments that overlap a range of keys."""
        for place in range(bisect_left(self._starts, keys.end) - 1, -1, -1):
            if self._ends[place] <= keys.start:
                return
            if self._found[place][0].end > keys.start:
                yield self._found[place][1]

    def is_past(self, segment: Mapped) -> bool:
        """Whether all of a segment, which the place does not name, lies before the place."""
        return any(number > segment.number for number in self.over(segment.keys))

    def covers(self, keys: KeyRange) -> bool:
        return any(True for _ in self.over(keys))


class SegmentMap(Generic[S]):
    """The segments of one stream that are there."""

    def __init__(self, segments: Iterable[S]) -> None:
        self.segments = {segment.number: segment for segment in sorted(segments, key=lambda segment: segment.number)}

    def oldest(self) -> list[S]:
        """The oldest segment over each key: where reading from the head begins."""
        return _first_over_each_key(self.segments.values())

    def newest(self) -> list[S]:
        """The newest segment over each key: where the tail is."""
        return sorted(_first_over_each_key(reversed(self.segments.values())), key=lambda segment: segment.number)

    def head(self) -> dict[int, int]:
        return {segment.number: segment.head for segment in self.oldest()}

    def tail(self) -> dict[int, int]:
        return {segment.number: segment.tail for segment in self.newest()}

    def front(self, numbers: Iterable[int], gone: Iterable[Mapped] = ()) -> Front:
        """Where a place passes, of the segments that are there, and of some that are gone."""
        return Front([*(self.segments[number] for number in numbers if number in self.segments), *gone])

    def tiles(self, numbers: Collection[int]) -> bool:
        """Whether segments cover every key once, as those of a place must. Segments that are gone may have covered the rest."""
        ranges = sorted(self.segments[number].keys for number in numbers if number in self.segments)
        at = 0
        for keys in ranges:
            if keys.start < at:
                return False
            at = keys.end
        return len(ranges) < len(numbers) or sum(keys.end - keys.start for keys in ranges) == WHOLE.end

    def before(self, numbers: Iterable[int]) -> list[S]:
        """The segments that lie wholly before a place, without those that it names."""
        named = set(numbers)
        front = self.front(named)
        return [segment for segment in self.segments.values() if segment.number not in named and front.is_past(segment)]

    def reached(self, numbers: Numbers, gone: Iterable[Mapped] = ()) -> dict[int, int]:
        """How far each segment lies before a place: up to a number, its tail or its head. The place may name segments that are gone."""
        front = self.front(numbers, gone)
        return {
            number: numbers[number] if number in numbers else segment.tail if front.is_past(segment) else segment.head
            for number, segment in self.segments.items()
        }

    def between(self, lower: Numbers, upper: Numbers | None) -> list[Part[S]]:
        """What lies from one place up to another, or without one up to the tails; empty parts too."""
        begun, ended = self.front(lower), self.front(upper or ())
        found = []
        for number, segment in self.segments.items():
            if number not in lower and begun.is_past(segment):
                continue
            end = segment.tail
            if upper is not None and number in upper:
                end = upper[number]
            elif upper is not None and not ended.is_past(segment):
                continue
            found.append(Part(segment, lower.get(number, segment.head), end))
        return found

    def advance(self, places: Mapping[int, Progress], ends: Numbers | None = None) -> dict[int, Progress]:
        """Where readers get to without reading: what is read to its end is done, and successors join whose every predecessor is done.

        A segment is done at its tail if it is sealed. With `ends`, a segment that they name is done there, and so is a segment past them.
        Nothing joins while a segment is gone that was not done: its keys, and so its successors, are unknown.
        """
        limit = self.front(ends) if ends is not None else None

        def is_wanted(segment: S) -> bool:
            # An end that is gone was truncated away: it is older than all that is left.
            return limit is None or segment.number in (ends or ()) or limit.is_past(segment)

        def look(segment: S, number: int) -> Progress:
            if ends is not None and segment.number in ends:
                return Progress(number, number >= ends[segment.number])
            return Progress(number, (not segment.is_open and number >= segment.tail) or not is_wanted(segment))

        found = {
            number: place if place.is_done or number not in self.segments else look(self.segments[number], place.number)
            for number, place in places.items()
        }
        if any(number not in self.segments and not place.is_done for number, place in found.items()):
            return found
        joined, blocked = self.front(found), Front()
        for number, segment in self.segments.items():
            if number in found or not is_wanted(segment):
                continue
            near = list(joined.over(segment.keys))
            if any(other > number for other in near):
                continue  # All of the segment lies before the places: it is read.
            if blocked.covers(segment.keys) or not all(found[other].is_done for other in near):
                blocked.add(segment)
                continue
            found[number] = look(segment, 0)
            joined.add(segment)
        return {number: place for number, place in found.items() if not (place.is_done and self._is_replaced(number, joined))}

    def _is_replaced(self, number: int, front: Front) -> bool:
        """Whether newer segments of a front cover all keys of a segment; all keys there are, if the segment is gone."""
        segment = self.segments.get(number)
        keys = WHOLE if segment is None else segment.keys
        at = keys.start
        for start, end in sorted(self.segments[other].keys for other in front.over(keys) if segment is None or other > number):
            if start <= at:
                at = max(at, end)
        return at >= keys.end

    def passes(self, numbers: Numbers, floor: Numbers) -> bool:
        """Whether something from the place `floor` on lies before the place `numbers`."""
        allowed = self.reached(floor)
        return any(reached > allowed[number] for number, reached in self.reached(numbers).items())

    def readable(self, numbers: Numbers) -> dict[int, int]:
        """A place, or the head where that lies past the place."""
        reached = self.reached(numbers)
        return self.frontier({number: max(reached[number], segment.head) for number, segment in self.segments.items()}, numbers.keys())

    def earlier(self, numbers: Numbers, other: Numbers) -> dict[int, int]:
        """The last place before which nothing lies but what is before both of these."""
        reached, limits = self.reached(numbers), self.reached(other)
        return self.frontier({number: min(at, limits[number]) for number, at in reached.items()}, (*numbers, *other))

    def frontier(self, heads: Numbers, kept: Collection[int] = ()) -> dict[int, int]:
        """The place with these heads: where a sealed segment is all gone, and none of `kept`, its successors' heads count.

        Nothing that lies behind something that stays is before it: a merged segment stays whole while one of those it was made of does,
        and the others of those, all gone, are where the place is.
        """
        newest = {segment.number for segment in self.newest()}
        starts, gone = [], []
        staying, begun = Front(), Front()
        for number, segment in self.segments.items():
            if staying.covers(segment.keys):
                staying.add(segment)
            elif heads[number] < segment.tail or number in newest or number in kept:
                staying.add(segment)
                begun.add(segment)
                starts.append(number)
            else:
                gone.append(segment)
        ends = _first_over_each_key(segment for segment in reversed(gone) if not begun.covers(segment.keys))
        return {number: heads[number] for number in (*starts, *sorted(segment.number for segment in ends))}


def _first_over_each_key(segments: Iterable[S]) -> list[S]:
    """The segments that overlap none of those chosen before them."""
    chosen: list[S] = []
    starts: list[int] = []
    ends: list[int] = []
    for segment in segments:
        start, end = segment.keys
        place = bisect_right(starts, start)
        if (place and ends[place - 1] > start) or (place < len(starts) and starts[place] < end):
            continue
        chosen.append(segment)
        starts.insert(place, start)
        ends.insert(place, end)
    return chosen
