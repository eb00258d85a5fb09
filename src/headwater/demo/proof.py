"""The proof: every line of every file is in each stage, once, with its value, and each sensor's readings are in their order.

It reads the files and the streams, and knows nothing of how the one became the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import headwater as hw
from headwater.demo.files import BEGINNING, WINDOW_SECONDS, enriched, parse_line

Row = dict[str, Any]


@dataclass(frozen=True)
class Proof:
    """What became of the lines of the files in a stream of events."""

    expected: int
    stored: int
    lost: int
    repeated: int
    altered: int
    disordered: int
    sensors: int

    @property
    def holds(self) -> bool:
        return self.stored == self.expected and not (self.lost or self.repeated or self.altered or self.disordered)


@dataclass(frozen=True)
class WindowProof:
    """What became of them in a stream of counts by site and minute: `late` readings came behind later ones, `open` windows are not over."""

    windows: int
    counted: int
    open: int
    late: int
    wrong: int
    repeated: int
    expected: int

    @property
    def holds(self) -> bool:
        return not self.wrong and not self.repeated and self.counted + self.open == self.expected


def _rows(paths: Sequence[Path]) -> Iterator[Row]:
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            yield parse_line(line)


def prove(stream: hw.Stream, paths: Sequence[Path], become: Callable[[Row], Row] = dict) -> Proof:
    """Compare all files with a stream that has a row for each line, as `become` makes it."""
    expected = {(row["sensor"], row["reading"]): become(row) for row in _rows(paths)}
    found: Counter[tuple[str, int]] = Counter()
    last: dict[str, int] = {}
    altered = disordered = 0
    for event in stream.read():
        row = event.value
        place = row["sensor"], row["reading"]
        altered += expected.get(place) != row
        found[place] += 1
        disordered += row["reading"] < last.get(row["sensor"], 0)
        last[row["sensor"]] = row["reading"]
    return Proof(
        expected=len(expected),
        stored=found.total(),
        lost=sum(place not in found for place in expected),
        repeated=sum(count - 1 for count in found.values()),
        altered=altered,
        disordered=disordered,
        sensors=len({sensor for sensor, _ in expected}),
    )


def prove_enriched(stream: hw.Stream, paths: Sequence[Path]) -> Proof:
    """Compare all files with the pipeline's first step."""
    return prove(stream, paths, enriched)


class WindowCounts:
    """What the pipeline's second step must count, from files that are given as they arrive."""

    def __init__(self) -> None:
        #: By site and minute: (readings, hot ones).
        self.counts: dict[tuple[str, datetime], tuple[int, int]] = {}
        self.newest = BEGINNING
        self.readings = self.late = 0
        self._files = 0

    def add(self, paths: Sequence[Path]) -> None:
        """Count the files after those that were counted before."""
        new = paths[self._files :]
        self._files += len(new)
        for row in map(enriched, _rows(new)):
            self.readings += 1
            self.late += row["at"] < self.newest
            self.newest = max(self.newest, row["at"])
            key = row["site"], _minute(row["at"])
            readings, hot = self.counts.get(key, (0, 0))
            self.counts[key] = readings + 1, hot + row["hot"]

    def agree(self, window: Row) -> bool:
        return self.counts.get((window["site"], window["minute"])) == (window["readings"], window["hot"])


def prove_windows(stream: hw.Stream, paths: Sequence[Path]) -> WindowProof:
    """Compare all files with the pipeline's second step: only the last minute of each site may be missing, since it may not be over."""
    expected = WindowCounts()
    expected.add(paths)
    found: Counter[tuple[str, datetime]] = Counter()
    wrong = counted = 0
    for event in stream.read():
        row = event.value
        window_key = row["site"], row["minute"]
        found[window_key] += 1
        counted += row["readings"]
        wrong += not expected.agree(row)
    missing = {key: count for key, (count, _) in expected.counts.items() if key not in found}
    wrong += sum(minute != _minute(expected.newest) for _, minute in missing)
    return WindowProof(
        windows=len(found),
        counted=counted,
        open=sum(missing.values()),
        late=expected.late,
        wrong=wrong,
        repeated=found.total() - len(found),
        expected=expected.readings,
    )


def _minute(at: datetime) -> datetime:
    return at - timedelta(seconds=(at - BEGINNING).total_seconds() % WINDOW_SECONDS)
