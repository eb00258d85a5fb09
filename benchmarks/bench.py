"""What every benchmark is given: how much to do, where, and on which catalogs."""

from __future__ import annotations

import itertools
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.results import Result

MB = 1_000_000


@dataclass(frozen=True)
class Sizes:
    """How much each benchmark does. A round is small and there are several, so that limit and figure meet the same machine."""

    rounds: int
    write_events: int
    batch_mb: int
    batch_rounds: int
    read_events: int
    acks: int
    tail_events: int
    idle_tail_events: int
    process_events: int
    puts: int
    put_mb: int
    put_seconds: float
    memory_mb: int
    extents: int
    commits: int
    staged_blocks: int
    journal_persists: int
    journal_events: int
    journal_entities: int
    journal_live: int
    backlog_mb: int
    beside_seconds: float
    segments: tuple[int, ...] = (1, 16)
    journal_threads: tuple[int, ...] = (1, 16, 64)
    journal_processes: int = 8
    journal_replays: tuple[int, ...] = (10, 1_000, 100_000)


FULL = Sizes(
    rounds=7, write_events=500_000, batch_mb=256, batch_rounds=11, read_events=4_000_000, acks=500, tail_events=300, idle_tail_events=20,
    process_events=400_000, puts=24, put_mb=12, put_seconds=0.05, memory_mb=10_000, extents=1_000_000, commits=400, staged_blocks=10000,
    journal_persists=8000, journal_events=1_000_000, journal_entities=1_000_000, journal_live=500,
    backlog_mb=1_800, beside_seconds=15.0,
)  # fmt: skip
DEFAULT = Sizes(
    rounds=5, write_events=400_000, batch_mb=256, batch_rounds=9, read_events=4_000_000, acks=300, tail_events=200, idle_tail_events=12,
    process_events=300_000, puts=24, put_mb=12, put_seconds=0.05, memory_mb=1_000, extents=1_000_000, commits=200, staged_blocks=10000,
    journal_persists=4000, journal_events=1_000_000, journal_entities=1_000_000, journal_live=300,
    backlog_mb=1_800, beside_seconds=15.0,
)  # fmt: skip
QUICK = Sizes(
    rounds=3, write_events=100_000, batch_mb=32, batch_rounds=3, read_events=300_000, acks=60, tail_events=30, idle_tail_events=4,
    process_events=100_000, puts=12, put_mb=10, put_seconds=0.05, memory_mb=200, extents=50_000, commits=40,
    staged_blocks=1000, journal_persists=800, journal_events=20_000, journal_entities=20_000, journal_live=30, segments=(16,),
    journal_replays=(10, 1_000, 5_000),
    backlog_mb=300, beside_seconds=8.0,
)  # fmt: skip
TINY = Sizes(
    rounds=1, write_events=2_000, batch_mb=1, batch_rounds=1, read_events=2_000, acks=3, tail_events=3, idle_tail_events=1,
    process_events=2_000, puts=4, put_mb=2, put_seconds=0.01, memory_mb=4, extents=500, commits=3, staged_blocks=20,
    journal_persists=20, journal_events=200, journal_entities=100, journal_live=3, segments=(2,), journal_threads=(1, 2),
    journal_processes=2, journal_replays=(10, 20, 50),
    backlog_mb=2, beside_seconds=0.3,
)  # fmt: skip


@dataclass(frozen=True)
class Place:
    """Where a store is: what `hw.open` takes. Picklable, for processes."""

    url: str
    catalog: str | None

    def beside(self) -> Path:
        """A path that nothing has been at, which goes when the store does."""
        return Path(self.url).parent / uuid.uuid4().hex


@dataclass(frozen=True)
class Catalog:
    """A kind of catalog, and how to get an empty one: the address to give `hw.open`, or None for SQLite in the store's folder."""

    name: str
    database: Callable[[], AbstractContextManager[str | None]] = field(default=nullcontext)


@dataclass
class Bench:
    """One run of the benchmarks, in `folder`, which should be on a real disk."""

    sizes: Sizes
    folder: Path
    catalogs: Sequence[Catalog]
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def path(self) -> Path:
        """A path that nothing has been at."""
        return self.folder / f"{next(self._numbers)}"

    @contextmanager
    def place(self, catalog: Catalog) -> Iterator[Place]:
        """Room for a store, gone afterwards."""
        path = self.path()
        with catalog.database() as database:
            try:
                path.mkdir()
                yield Place(str(path / "store"), database)
            finally:
                shutil.rmtree(path, ignore_errors=True)

    def places(self) -> Iterator[tuple[str, int, Place]]:
        """(a name for the variant, segments, room for a store) for each catalog and number of segments."""
        for catalog in self.catalogs:
            for segments in self.sizes.segments:
                with self.place(catalog) as place:
                    yield f"{catalog.name}, {_counted(segments)}", segments, place


def _counted(segments: int) -> str:
    return "1 segment" if segments == 1 else f"{segments} segments"


Benchmark = Callable[[Bench], Iterator[Result]]
