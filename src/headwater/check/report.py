"""What a check found: problems, which are damage, and what is unused, which is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

#: Only so many of each are kept with their names; all are counted.
NAMED_PROBLEMS = 1000
NAMED_UNUSED = 1000
#: The kind of a problem that a rebuild of a journal's index mends.
INDEX = "index"


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong. `message` says it whole; the other fields say where, as far as that is known.

    Kinds: damaged, missing, unreadable (bytes); gap, overlap, counter (numbers); lineage, dangling, catalog (rows); index (a journal's).
    """

    kind: str
    message: str
    stream: str | None = None
    segment: int | None = None
    object: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "stream": self.stream, "segment": self.segment, "object": self.object, "message": self.message}


@dataclass(frozen=True, slots=True)
class Unused:
    """Bytes in storage that are no data: no row names them, or no extent does any more."""

    key: str
    bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a check is: bytes of blocks read, of those that there were when it began."""

    stream: str
    done_bytes: int
    total_bytes: int


OnProgress = Callable[[Progress], None]


@dataclass
class CheckReport:
    """What was looked at, and what was found. Damage is in `problems`; the rest is information."""

    streams: int = 0
    segments: int = 0
    blocks: int = 0
    events: int = 0
    bytes: int = 0
    objects: int = 0
    problem_count: int = 0
    problems: list[Problem] = field(default_factory=list)
    #: What was wrong and is no more.
    repaired: list[Problem] = field(default_factory=list)
    unused_count: int = 0
    unused_bytes: int = 0
    unused: list[Unused] = field(default_factory=list)
    #: Rows of truncated or deleted data that upkeep has yet to delete.
    leftover_rows: int = 0

    @property
    def ok(self) -> bool:
        return not self.problem_count

    def add(self, problem: Problem) -> None:
        self.problem_count += 1
        if len(self.problems) < NAMED_PROBLEMS:
            self.problems.append(problem)

    def repair(self, stream: str) -> None:
        """The index of this journal was rebuilt: what was wrong with it is no problem any more."""
        self.repaired += [problem for problem in self.problems if problem.kind == INDEX and problem.stream == stream]
        self.problem_count -= sum(problem in self.repaired for problem in self.problems)
        self.problems = [problem for problem in self.problems if problem not in self.repaired]

    def add_unused(self, unused: Unused) -> None:
        self.unused_count += 1
        self.unused_bytes += unused.bytes
        if len(self.unused) < NAMED_UNUSED:
            self.unused.append(unused)

    def to_json(self) -> dict[str, Any]:
        """A stable shape for machines."""
        return {
            "ok": self.ok,
            "streams": self.streams,
            "segments": self.segments,
            "blocks": self.blocks,
            "events": self.events,
            "bytes": self.bytes,
            "objects": self.objects,
            "problem_count": self.problem_count,
            "problems": [problem.to_json() for problem in self.problems],
            "repaired": [problem.to_json() for problem in self.repaired],
            "unused_count": self.unused_count,
            "unused_bytes": self.unused_bytes,
            "unused": [{"key": u.key, "bytes": u.bytes, "reason": u.reason} for u in self.unused],
            "leftover_rows": self.leftover_rows,
        }
