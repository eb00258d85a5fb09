"""kill -9 in the midst of a fork of a table: nothing has its name, upkeep leaves nothing of it, and the fork can be repeated."""

from __future__ import annotations

from multiprocessing.connection import Connection

import pytest

import headwater as hw
from headwater.catalog import fills
from headwater.check import check_store
from headwater.runtime import failpoints
from tests.crash.processes import Crew, Place

pytestmark = pytest.mark.slow

#: Passes of a fork of 50 entries, of which 40 are copied in slices of 7, and 10 are found in the changes.
KILLS = [("fill.applied", 1), ("fill.applied", 4), ("fill.applied", 7), ("fill.named", 1), ("fill.sliced", 3)]


def fork(channel: Connection, place: Place, spec: str) -> None:
    fills.FILL_ROWS = 7  # type: ignore[attr-defined]
    failpoints.arm(spec)
    with place.open() as store:
        store.table("a/t").fork("b/t", 60)
    channel.send("done")


def drop(channel: Connection, place: Place, spec: str) -> None:
    fills.FILL_ROWS = 7  # type: ignore[attr-defined]
    failpoints.arm(spec)
    with place.open() as store:
        store.run_upkeep()
    channel.send("done")


def _count(store: hw.Store, table: str) -> int:
    return int(store._engine.database.query(f"SELECT count(*) FROM {table}")[0][0])


def _check(store: hw.Store) -> None:
    report = check_store(store)
    assert report.ok, report.problems


def test_every_failpoint_of_fills_is_tried() -> None:
    assert {name for name in failpoints.NAMES if name.startswith("fill.")} <= {name for name, _ in KILLS}


@pytest.mark.parametrize(("name", "at"), KILLS)
def test_a_fork_that_is_killed_leaves_nothing_and_can_be_repeated(place: Place, crew: Crew, name: str, at: int) -> None:
    with place.open(create=True) as store:
        table = store.table("a/t")
        for number in range(70):
            table.put(f"k{number % 50:02}", b"%d" % number)
        streams = _count(store, "stream")
    killed = crew.start(fork, place, f"{name if name != 'fill.sliced' else 'fill.applied'}=kill@{at}")
    assert list(killed.hear_all()) == [] and killed.wait() == -9
    with place.open() as store:
        assert store.tables() == ["a/t"] and _count(store, "filling") == 1
        _check(store)
        # Whoever runs it again does not wait for upkeep.
        done = crew.start(fork, place, "")
        assert list(done.hear_all()) == ["done"] and done.wait() == 0
        expected = {f"k{number:02}": b"%d" % (number + 50 if number < 10 else number) for number in range(50)}
        assert {key: entry.value for key, entry in store.table("b/t").items()} == expected
        store._engine.database.write(lambda tx: tx.run("UPDATE filling SET renewed_at = 1"))
    if name == "fill.sliced":
        dropping = crew.start(drop, place, "fill.sliced=kill@1")
        assert list(dropping.hear_all()) == [] and dropping.wait() == -9
    with place.open() as store:
        store.run_upkeep()
        assert _count(store, "filling") == 0 and _count(store, "stream") == streams + 1 and _count(store, "entry") == 100
        _check(store)
        assert store.table("b/t").put("k", b"") == 61
