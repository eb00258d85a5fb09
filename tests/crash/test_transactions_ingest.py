"""Files are ingested exactly once: by a process killed again and again, and by two at the same time."""

from __future__ import annotations

import contextlib
import random
import threading
from collections import Counter
from pathlib import Path

import pytest

import headwater as hw
from headwater.check import check_store
from tests.crash.processes import Crew, Place, Worker
from tests.crash.txn_workers import ingest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STREAM = "ingest/events"
#: Where an ingester is killed, half of the time; else at any moment.
FAILPOINTS = (
    "append.begun",
    "append.applied",
    "append.committed",
    "txn.begun",
    "txn.applied",
    "txn.committed",
    "txn.dropped",
    "txn.aborted",
)


def test_files_are_ingested_exactly_once(seed: int, place: Place, crew: Crew, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    rng = random.Random(seed)
    files, lines = (50, 1000) if pytestconfig.getoption("--long") else (10, 200)
    folder = tmp_path / "files"
    folder.mkdir()
    for file in range(files):
        (folder / f"{file:03d}.txt").write_text("".join(f"{file}/{line}:key{rng.randrange(20)}\n" for line in range(lines)))
    with place.open() as store:
        store.create_stream(STREAM, scaling=hw.Scaling.fixed(3))

    kills = _ingest_with_kills(crew, place, folder, rng, two_at_once=seed % 2 == 1)
    print(f"{kills} ingesters were killed")
    assert kills >= 5
    with place.open() as store:
        stored = [event.value.decode() for event in store.stream(STREAM).read()]
        assert len(stored) == files * lines
        assert max(Counter(stored).values()) == 1
        assert sorted(stored) == sorted(line for file in folder.iterdir() for line in file.read_text().splitlines())
        order = Counter[tuple[str, str]]()
        for line in stored:
            place_of, _, key = line.partition(":")
            file, _, number = place_of.partition("/")
            assert order[file, key] <= int(number), "order holds for each key"
            order[file, key] = int(number)
        report = check_store(store)
        assert report.ok, report.problems


def _ingest_with_kills(crew: Crew, place: Place, folder: Path, rng: random.Random, *, two_at_once: bool) -> int:
    """Run ingesters until one is done; how many were killed. Each of two at once believes that the other is dead."""
    kills, running, is_done = 0, list[Worker](), False
    while not is_done:
        while len(running) < 1 + two_at_once:
            spec = f"{rng.choice(FAILPOINTS)}=kill@{rng.randint(1, 2)}" if rng.random() < 0.3 else ""
            running.append(crew.start(ingest, place, spec, str(folder), STREAM))
        victim = rng.choice(running) if rng.random() < 0.6 else None
        for worker in running:
            worker.tell("go on")
        if victim is not None:
            # At any moment of a file's transaction, or before, while the store is opened.
            threading.Event().wait(rng.uniform(0, 0.03))
            with contextlib.suppress(ProcessLookupError):
                victim.kill()
        for worker in list(running):
            said = list(worker.hear_all()) if worker is victim else [_next(worker)]
            is_done = is_done or "done" in said
            if worker is victim or said != ["stored"]:
                running.remove(worker)
                kills += worker.wait() == -9
    return kills


def _next(worker: Worker) -> str | None:
    try:
        return str(worker.hear())
    except EOFError:
        return None
