"""Threads that each wait for the ack of their own event, and persists to a journal, beside UmaDB, which syncs each commit too."""

from __future__ import annotations

import statistics
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import headwater as hw
from benchmarks.bench import Place
from benchmarks.eventstores import Headwater, Persist, UmaDB, running_umadb
from benchmarks.peers.figures import OWN, Figure
from benchmarks.peers.work import Sizes
from benchmarks.results import in_turns
from benchmarks.writing import sample_values

_SEGMENTS = 4
_EVENTS = 10  # of one entity


def acks(sizes: Sizes, folder: Path) -> Iterator[Figure]:
    """Rates of 1, 16 and 64 threads. Upkeep is off; all systems take turns."""
    folder.mkdir(parents=True)
    with ExitStack() as stack:
        peer: Any = stack.enter_context(running_umadb(folder))
        kinds: dict[str, Callable[[int], Any]] = {
            "100 B": partial(_opaque, folder),
            "persist, expected": partial(_journal, folder, "expected"),
            "persist, fail_if": partial(_journal, folder, "fail_if"),
        }
        for threads in sizes.ack_threads:
            with ExitStack() as opened:
                persists = [opened.enter_context(make(threads)) for make in kinds.values()]
                persists.append(opened.enter_context(UmaDB(peer).opened()).persist)
                measures = [partial(_rate, persist, threads, sizes.write_seconds) for persist in persists]
                found = [statistics.median(rates) for rates in in_turns(sizes.rounds + 1, *measures)]
            for kind, rate in zip(kinds, found, strict=False):
                variant = f"{kind}, {threads} thread{'s' if threads > 1 else ''}"
                yield Figure("acks", variant, OWN, rate, "acks/s")
                yield Figure("acks", variant, "UmaDB", found[-1], "acks/s")


@contextmanager
def _opaque(folder: Path, threads: int) -> Iterator[Callable[[], Persist]]:
    values = sample_values(100)
    with hw.open(str(folder / f"opaque-{threads}"), upkeep=False) as store:
        stream = store.create_stream("bench/acks", scaling=hw.Scaling.fixed(_SEGMENTS))
        with stream.writer() as writer:

            def write(id: str, sequence: int) -> None:
                writer.write(values[sequence], id).result()

            yield lambda: write


@contextmanager
def _journal(folder: Path, condition: str, threads: int) -> Iterator[Callable[[], Persist]]:
    place = Place(str(folder / f"{condition}-{threads}"), None)
    with Headwater(place, condition, _SEGMENTS, upkeep=False).opened() as opened:
        yield opened.persist


def _rate(persist: Callable[[], Persist], threads: int, seconds: float) -> float:
    """Acks a second of threads that each wait for one after the other."""
    counts = [0] * threads
    over = threading.Event()

    def work(index: int) -> None:
        store = persist()
        while not over.is_set():
            id = uuid.uuid4().hex
            for sequence in range(1, _EVENTS + 1):
                store(id, sequence)
            counts[index] += _EVENTS

    started = [threading.Thread(target=work, args=(index,)) for index in range(threads)]
    begun = time.monotonic()
    for thread in started:
        thread.start()
    over.wait(seconds)
    over.set()
    for thread in started:
        thread.join()
    return sum(counts) / (time.monotonic() - begun)
