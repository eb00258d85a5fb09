"""The proof: every line of every file is in the stream, once, with its value, and each sensor's readings are in their order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import headwater as hw
from headwater.cli.demo.files import parse_line


@dataclass(frozen=True)
class Proof:
    """What became of the lines of the files."""

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


def prove(stream: hw.Stream, paths: Sequence[Path]) -> Proof:
    """Read all files and the whole stream, and compare. Knows nothing of how the one became the other."""
    expected = {}
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            row = parse_line(line)
            expected[row["sensor"], row["reading"]] = row
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
