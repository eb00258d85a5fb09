"""Seven processes persist, transact, delete, follow, scale and tier one journal, and are killed and begun again; then all fits together."""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path

import pytest

import headwater as hw
from tests.crash.journal_history import FAULTS, ROLES, check_history, live
from tests.crash.journal_workers import NAME
from tests.crash.processes import Crew, Place
from tests.crash.test_history import has_ended, kill
from tests.journals import Broken

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def _run(crew: Crew, place: Place, folder: Path, seed: int, seconds: float, fault: str | None = None) -> dict[str, int]:
    print(f"history with seed {seed}: HEADWATER_HISTORY_SEED={seed} repeats it, as far as processes can be repeated")
    rng = random.Random(seed)
    folder.mkdir()
    with place.open() as store:
        store.journal(NAME, scaling=hw.Scaling.fixed(2))
        lives = dict.fromkeys(ROLES, 0)
        workers = {role: crew.start(live, place, str(folder), role, 0, seed, fault) for role in ROLES}
        for worker in workers.values():
            assert worker.hear() == "ready"
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            threading.Event().wait(rng.uniform(0.05, 0.4))
            unlucky = rng.choice(ROLES)
            for role, worker in workers.items():
                if role == unlucky or has_ended(worker):
                    kill(worker)
                    lives[role] += 1
                    workers[role] = crew.start(live, place, str(folder), role, lives[role], seed, fault)
        for worker in workers.values():
            kill(worker)
        found = check_history(store, folder)
    print(found)
    return found


def test_a_journal_keeps_its_promises_through_a_history(place: Place, crew: Crew, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    seed = int(os.environ.get("HEADWATER_HISTORY_SEED") or random.randrange(1_000_000))
    is_long = pytestconfig.getoption("--long")
    found = _run(crew, place, tmp_path / "logs", seed, 45.0 if is_long else 5.0)
    # In a few seconds on a busy machine not all get their turn.
    missing = {"planned", "stored", "scaled", "seen", *(("refused", "deleted", "tended", "together") if is_long else ())} - found.keys()
    assert not missing, f"something did not happen at all: {missing}"


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_the_checker_finds_a_fault_of_a_journal(fault: str, sqlite_place: Place, crew: Crew, tmp_path: Path) -> None:
    for seed in range(1, 10):
        place = Place(f"{sqlite_place.url}-{seed}", None)
        place.open(create=True).close()
        try:
            _run(crew, place, tmp_path / f"logs-{seed}", seed, 3.0, fault)
        except Broken as found:
            print(found)
            return
    pytest.fail("the checker found nothing")
