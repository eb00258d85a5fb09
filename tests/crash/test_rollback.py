"""kill -9 in the midst of a roll-back, and lost answers: it happened as a whole or not at all, and repeating it settles it."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest

import headwater as hw
from headwater.catalog.commits import Outcome
from headwater.catalog.database import NO_NEWS, News
from headwater.check import check_store
from headwater.runtime import failpoints
from tests.contract.writing import values, write_some
from tests.crash.processes import Crew, Place

pytestmark = pytest.mark.slow

#: The passes of a roll-back of two streams and a put in one commit, and whether it happened then.
KILLS = [("rollback.moved", 1, False), ("rollback.moved", 2, False), ("rollback.applied", 1, False), ("rollback.applied", 2, False)]
KILLS += [("txn.applied", 1, False), ("txn.committed", 1, True)]


def roll_back_both(channel: Connection, place: Place, spec: str, cut: hw.Cut) -> None:
    failpoints.arm(spec)
    with place.open() as store:
        _roll_back(store, cut)
    channel.send("done")


def _roll_back(store: hw.Store, cut: hw.Cut) -> None:
    with store.transaction() as tx:
        tx.roll_back("a/x", cut, keep_as="a/x.old", force=True)
        tx.roll_back("a/y", cut, keep_as="a/y.old", force=True)
        tx.put("a/t", "state", b"rolled back")


def _fill(store: hw.Store) -> hw.Cut:
    for name in ("a/x", "a/y"):
        write_some(store.create_stream(name, scaling=hw.Scaling.fixed(2)), 10)
    store.table("a/t").put("state", b"before")
    cut = store.cut("a/x", "a/y")
    for name in ("a/x", "a/y"):
        stream = store.stream(name)
        write_some(stream, 10)
        stream.split(0)
        write_some(stream, 10)
    store.run_upkeep()
    return cut


def _check(store: hw.Store, happened: bool) -> None:
    counts = {name: len(values(store.stream(name))) for name in store.streams()}
    assert counts == ({"a/x": 10, "a/x.old": 30, "a/y": 10, "a/y.old": 30} if happened else {"a/x": 30, "a/y": 30})
    entry = store.table("a/t").get("state")
    assert entry is not None and entry.value == (b"rolled back" if happened else b"before")
    report = check_store(store)
    assert report.ok, report.problems


def test_every_failpoint_of_roll_backs_is_tried() -> None:
    assert {name for name in failpoints.NAMES if name.startswith("rollback.")} <= {name for name, *_ in KILLS}


@pytest.mark.parametrize(("name", "at", "happened"), KILLS)
def test_a_roll_back_that_is_killed_happened_as_a_whole_or_not_at_all(place: Place, crew: Crew, name: str, at: int, happened: bool) -> None:
    with place.open(create=True) as store:
        cut = _fill(store)
    killed = crew.start(roll_back_both, place, f"{name}=kill@{at}", cut)
    assert list(killed.hear_all()) == [] and killed.wait() == -9
    with place.open() as store:
        _check(store, happened)
        if not happened:
            _roll_back(store, cut)
        _check(store, True)
        for stream in ("a/x", "a/y"):
            write_some(store.stream(stream), 5)
            assert len(values(store.stream(stream))) == 15


@pytest.mark.parametrize("lost", [1, 3])
def test_the_lost_answer_to_a_roll_back_is_asked_for_again(place: Place, lost: int) -> None:
    with place.open(create=True) as store:
        cut = _fill(store)
        database, left = store._engine.database, [lost]
        write = database.write

        def losing(work: Callable[..., Any], *, repeatable: bool = False, news: News = NO_NEWS) -> Any:
            result = write(work, repeatable=repeatable, news=news)
            if isinstance(result, Outcome) and left[0]:
                left[0] -= 1
                raise hw.UnavailableError("the answer was lost")
            return result

        database.write = losing  # type: ignore[method-assign]
        tx = store.transaction()
        tx.roll_back("a/x", cut, keep_as="a/x.old", force=True)
        tx.roll_back("a/y", cut, keep_as="a/y.old", force=True)
        tx.put("a/t", "state", b"rolled back")
        for _ in range(lost):
            with pytest.raises(hw.UnavailableError):
                tx.commit()
        tx.commit()
        _check(store, True)


REPLACE_KILLS = [("replace.renamed", False), ("replace.applied", False), ("txn.applied", False), ("txn.committed", True)]


def test_every_failpoint_of_replacements_is_tried() -> None:
    assert {name for name in failpoints.NAMES if name.startswith("replace.")} <= {name for name, _ in REPLACE_KILLS}


def replace(channel: Connection, place: Place, spec: str) -> None:
    failpoints.arm(spec)
    with place.open() as store:
        store.replace_stream("a/x", by="a/y", keep_as="a/x.old")
    channel.send("done")


@pytest.mark.parametrize(("name", "happened"), REPLACE_KILLS)
def test_a_replacement_that_is_killed_happened_as_a_whole_or_not_at_all(place: Place, crew: Crew, name: str, happened: bool) -> None:
    with place.open(create=True) as store:
        stream = store.create_stream("a/x")
        write_some(stream, 10)
        group = store.reader_group("g", ["a/x"])
        write_some(stream.fork("a/y"), 5)
        old = stream.id
    killed = crew.start(replace, place, f"{name}=kill@1")
    assert list(killed.hear_all()) == [] and killed.wait() == -9
    with place.open() as store:
        stream = store.stream("a/x")
        assert (stream.id != old) == happened and len(values(stream)) == (15 if happened else 10)
        if not happened:
            store.replace_stream("a/x", by="a/y", keep_as="a/x.old")
        group = store.reader_group("g")
        assert group.lag().events == 15 and store.stream("a/x.old").is_sealed
        report = check_store(store)
        assert report.ok, report.problems
