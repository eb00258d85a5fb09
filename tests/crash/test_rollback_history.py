"""A stream is rolled back again and again while processes write, read, scale, fork, tag and tier it, and are killed."""

from __future__ import annotations

import os
import random
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.crash.checker import Broken
from tests.crash.processes import Crew, Place
from tests.crash.rollback_checker import RollBackChecker, has_all
from tests.crash.rollback_workers import FAULTS, MORTAL, STREAM, WATCHER, create_rolled_stream, live
from tests.crash.test_history import has_ended, kill

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

#: Found by what also finds one of the others.
LONG = ("the stream ends before the cut", "groups stay past the cut")


def _run(crew: Crew, place: Place, folder: Path, seed: int, seconds: float, fault: str | None = None) -> dict[str, int]:
    """Let all processes live for some time, killing one of them now and then and all at the end; then check."""
    print(f"history of roll-backs with seed {seed}: HEADWATER_HISTORY_SEED={seed} repeats it, as far as processes can be repeated")
    rng = random.Random(seed)
    folder.mkdir()
    with place.open() as store:
        create_rolled_stream(store)
        lives = dict.fromkeys(MORTAL, 0)
        watcher = crew.start(live, place, str(folder), WATCHER, 0, seed, fault)
        workers = {role: crew.start(live, place, str(folder), role, 0, seed, fault) for role in MORTAL}
        for worker in (watcher, *workers.values()):
            assert worker.hear() == "ready"
        end = time.monotonic() + seconds
        # On a busy machine too little happens in the usual time.
        latest = end if fault else end + 60
        while (now := time.monotonic()) < end or (now < latest and not has_all(folder)):
            threading.Event().wait(rng.uniform(0.05, 0.4))
            unlucky = rng.choice(MORTAL)
            for role, worker in workers.items():
                if role == unlucky or has_ended(worker):
                    kill(worker)
                    lives[role] += 1
                    workers[role] = crew.start(live, place, str(folder), role, lives[role], seed, fault)
        for worker in workers.values():
            kill(worker)
        store.run_upkeep()
        store.stream(STREAM).seal()
        # If it failed, its log says why.
        with suppress(EOFError, ConnectionResetError):
            assert watcher.hear() == "watched"
        found = RollBackChecker(store, folder).check()
    print(found)
    return found


def test_every_promise_holds_after_a_history_of_roll_backs(place: Place, crew: Crew, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    seed = int(os.environ.get("HEADWATER_HISTORY_SEED") or random.randrange(1_000_000))
    found = _run(crew, place, tmp_path / "logs", seed, 60.0 if pytestconfig.getoption("--long") else 8.0)
    assert min(count for what, count in found.items() if what != "stale") > 0, f"something did not happen at all: {found}"


@pytest.mark.parametrize("fault", [pytest.param(fault, marks=pytest.mark.long if fault in LONG else ()) for fault in FAULTS])
def test_the_checker_finds_a_planted_fault(fault: str, sqlite_place: Place, crew: Crew, tmp_path: Path) -> None:
    # On a busy machine too little may happen in one.
    for seed in range(1, 25):
        place = Place(f"{sqlite_place.url}-{seed}", None)
        place.open(create=True).close()
        try:
            _run(crew, place, tmp_path / f"logs-{seed}", seed, 3.0, fault)
        except Broken as found:
            print(found)
            return
    pytest.fail("the checker found nothing")
