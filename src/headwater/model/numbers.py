"""Numbers of events as text: the index of an entity, or of a tag, says where its events are.

The text is made of runs, joined by commas. `2:17` begins at number 17 of segment 2. `5` leaves out five numbers after the run before it,
in the same segment. `x10` after either says that the run has 10 numbers. Text that SQL keeps can be extended without reading it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Numbers(NamedTuple):
    """Numbers [first, first + count) of a segment."""

    segment: int
    first: int
    count: int  # type: ignore[assignment]  # the tuple method of this name is of no use here

    @property
    def end(self) -> int:
        return self.first + self.count


def run_text(run: Numbers, segment: int | None, end: int) -> str:
    """A run after one that ended before `end` of `segment`; after nothing, if that is None."""
    start = f"{run.first - end}" if run.segment == segment and run.first >= end else f"{run.segment}:{run.first}"
    return start if run.count == 1 else f"{start}x{run.count}"


def to_text(runs: Iterable[Numbers]) -> str:
    """Runs as a text of their own."""
    found, segment, end = [], None, 0
    for run in runs:
        found.append(run_text(run, segment, end))
        segment, end = run.segment, run.end
    return ",".join(found)


def parse(text: str) -> Iterator[Numbers]:
    """The runs of a text, those that touch each other as one."""
    segment = end = 0
    waiting: Numbers | None = None
    for token in text.split(",") if text else ():
        start, _, count = token.partition("x")
        where, colon, number = start.partition(":")
        if colon:
            segment, end = int(where), int(number)
        else:
            end += int(start)
        run = Numbers(segment, end, int(count) if count else 1)
        end = run.end
        if waiting is not None and waiting.segment == segment and waiting.end == run.first:
            waiting = Numbers(segment, waiting.first, waiting.count + run.count)
            continue
        if waiting is not None:
            yield waiting
        waiting = run
    if waiting is not None:
        yield waiting
