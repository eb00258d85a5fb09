"""Processes that want the same name, the last seat, or what excludes each other, while the journal is split and merged: one wins."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

import headwater as hw
from headwater.check import check_store
from tests.crash.journal_workers import FAULTS, NAME, RACES, SEATS, compete, scale_all_the_time
from tests.crash.processes import Crew, Place
from tests.journals import Broken, Stored, check_journal, require

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROCESSES, THREADS = 8, 4


class Race:
    """Processes that wait for a turn to begin, a scaler, and what all threads said, by kind and turn."""

    def __init__(self, place: Place, crew: Crew, fault: str | None = None) -> None:
        with place.open() as store:
            store.journal(NAME, scaling=hw.Scaling.fixed(4))
        self._workers = [crew.start(compete, place, process, THREADS, fault) for process in range(PROCESSES)]
        self._scaler = crew.start(scale_all_the_time, place, 1)
        for worker in (*self._workers, self._scaler):
            assert worker.hear() == "ready"
        self.said: dict[tuple[str, int], list[Any]] = {}

    def play(self, turn: int) -> None:
        for kind in RACES:
            for worker in self._workers:
                worker.tell((kind, turn))
            self.said[kind, turn] = [answer for worker in self._workers for answer in worker.hear()]

    def end(self) -> int:
        """Returns how often the journal was scaled."""
        self._scaler.tell("end")
        scaled = int(self._scaler.hear())
        for worker in self._workers:
            worker.tell(None)
            worker.wait()
        return scaled

    def check(self, store: hw.Store) -> None:
        tagged: dict[str, list[Stored]] = defaultdict(list)
        ids = set()
        for event in check_journal(store, NAME):
            ids.add(event.id)
            for tag in event.tags:
                tagged[tag].append(event)
        for (kind, turn), answers in self.said.items():
            if kind == "name":
                winners = [id for id, position in answers if position is None]
                found = [event.id for event in tagged[f"name:{turn}"]]
                require(winners == found and len(found) == 1, f"name {turn} was given to {winners}, and {found} have it")
                [winner] = tagged[f"name:{turn}"]
                places = {position for _, position in answers if position is not None}
                require(places == {winner.position}, f"the losers of name {turn} were told {places}, not {winner.position}")
            elif kind == "seat":
                found = [event.id for event in tagged[f"course:{turn}"]]
                winners = [id for id, has_won in answers if has_won]
                require(
                    sorted(winners) == sorted(found) and len(found) == SEATS, f"{winners} were given seats of {turn}, and {found} have one"
                )
            else:
                pairs: dict[str, list[tuple[int, bool]]] = defaultdict(list)
                for pair, side, has_won in answers:
                    pairs[pair].append((side, has_won))
                    require((f"{pair}-{side}" in ids) == has_won, f"{pair}-{side} was told {has_won}, which is not so")
                for pair, sides in pairs.items():
                    require(sum(has_won for _, has_won in sides) == 1, f"exactly one of {pair} must win: {sides}")


def test_exactly_one_wins_while_the_journal_splits_and_merges(place: Place, crew: Crew, pytestconfig: pytest.Config) -> None:
    race = Race(place, crew)
    for turn in range(25 if pytestconfig.getoption("--long") else 3):
        race.play(turn)
    assert race.end() > 0
    with place.open() as store:
        race.check(store)
        assert check_store(store).ok


@pytest.mark.parametrize("fault", [pytest.param(fault, marks=() if "forbidden" in fault else pytest.mark.long) for fault in FAULTS])
def test_a_fault_lets_two_win(fault: str, postgres_url: str, tmp_path: Path, crew: Crew) -> None:
    """On PostgreSQL, since on SQLite one process at a time commits, whatever it locks."""
    place = Place(str(tmp_path / "store"), postgres_url)
    place.open(create=True).close()
    race = Race(place, crew, fault)
    # On a busy machine a turn may find nothing.
    for turn in range(40):
        race.play(turn)
        with place.open() as store:
            try:
                race.check(store)
            except Broken as found:
                print(found)
                return
    pytest.fail("no turn was won twice")
