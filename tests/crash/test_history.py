"""Eight processes write, commit, read, split and merge, and are killed and begun again; afterwards every promise holds."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from pathlib import Path

import pytest

import headwater as hw
from tests.crash.checker import Broken, Checker
from tests.crash.history_workers import FAULTS, IN, ROLES, SIDE, create_history_streams, live
from tests.crash.processes import Crew, Place, Worker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

#: Found by what also finds one of the others.
LONG = ("a transaction leaves out its reader's position", "an abort does not rewind its reader")


def _run(crew: Crew, place: Place, folder: Path, seed: int, seconds: float, fault: str | None = None) -> dict[str, int]:
    """Let all processes live for some time, killing one of them now and then and all at the end; then check."""
    print(f"history with seed {seed}: HEADWATER_HISTORY_SEED={seed} repeats it, as far as processes can be repeated")
    rng = random.Random(seed)
    folder.mkdir()
    cuts: list[hw.Cut] = []
    with place.open() as store:
        create_history_streams(store)
        lives = dict.fromkeys(ROLES, 0)
        workers = {role: crew.start(live, place, str(folder), role, 0, seed, fault) for role in ROLES}
        for worker in workers.values():
            assert worker.hear() == "ready"
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            threading.Event().wait(rng.uniform(0.05, 0.4))
            cuts.append(store.cut(IN, SIDE))
            unlucky = rng.choice(ROLES)
            for role, worker in workers.items():
                if role == unlucky or has_ended(worker):
                    kill(worker)
                    lives[role] += 1
                    workers[role] = crew.start(live, place, str(folder), role, lives[role], seed, fault)
        for worker in workers.values():
            kill(worker)
        # Open transactions of the dead are over when somebody says so.
        store.run_upkeep()
        found = Checker(store, folder, cuts[-20:]).check()
    print(found)
    return found


def has_ended(worker: Worker) -> bool:
    try:
        while True:
            worker.hear(0.0)
    except TimeoutError:
        return False
    except (EOFError, ConnectionResetError):
        return True


def kill(worker: Worker) -> None:
    # One that ended by itself has left the reason in its log.
    with contextlib.suppress(ProcessLookupError):
        worker.kill()


def test_every_promise_holds_after_a_history(place: Place, crew: Crew, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    seed = int(os.environ.get("HEADWATER_HISTORY_SEED") or random.randrange(1_000_000))
    found = _run(crew, place, tmp_path / "logs", seed, 60.0 if pytestconfig.getoption("--long") else 8.0)
    assert min(found.values()) > 0, f"something did not happen at all: {found}"


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
