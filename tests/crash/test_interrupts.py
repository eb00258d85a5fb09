"""Ctrl-C in a program that goes on, as in a notebook: at every moment of a write, a transaction and a read, one after the other."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

import headwater as hw
from tests.crash.processes import Place
from tests.interrupts import ends, interrupt

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    # A Ctrl-C leaves writers and connections behind that nobody closed.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]

STREAM = "interrupted/events"
#: Of those moments, without `--long`.
FEW = 60


def _write(store: hw.Store, number: int) -> None:
    with store.stream(STREAM).writer() as writer:
        writer.write(b"%d" % number, key=b"%d" % number).result()


def _write_large(store: hw.Store, number: int) -> None:
    with store.stream(STREAM).writer() as writer:
        writer.write(b"%d|" % number + b"." * 100_000, key=b"%d" % number).result()


def _write_named(store: hw.Store, number: int) -> None:
    with store.stream(STREAM).writer("source") as writer:
        writer.write(b"%d" % number, key=b"%d" % number, number=number).result()


def _transact(store: hw.Store, number: int) -> None:
    with store.transaction() as tx:
        tx.write(STREAM, b"%d" % number)
        tx.put("interrupted/table", str(number), b"")


def _transact_in_parts(store: hw.Store, number: int) -> None:
    with store.transaction() as tx:
        tx.write(STREAM, b"%d" % number)
        tx.flush()
        tx.write("interrupted/others", b"%d" % number)


def _read(store: hw.Store, number: int) -> None:
    assert sum(1 for _ in store.stream("interrupted/old").read()) == 60


def _read_batches(store: hw.Store, number: int) -> None:
    assert sum(batch.num_rows for part in store.stream("interrupted/old").ranges() for batch in part.to_batches()) == 60


def _read_as_group(store: hw.Store, number: int) -> None:
    with store.reader_group("all", ["interrupted/old"]).reader("one") as reader:
        reader.read(timeout=0.1)


def _prepare(store: hw.Store) -> None:
    """A stream with a chunk, blocks in a journal, and blocks in the catalog."""
    for name in (STREAM, "interrupted/others"):
        store.create_stream(name)
    store.table("interrupted/table")
    old = store.create_stream("interrupted/old")
    for size in (10, 100_000, 10):
        with old.writer() as writer:
            for _ in range(20):
                writer.write(b"." * size)
        if size == 10:
            store.run_upkeep()


def _goes_on(store: hw.Store, number: int) -> None:
    """What any other thread can do afterwards."""
    _write(store, number)
    assert sum(batch.num_rows for part in store.stream("interrupted/old").ranges() for batch in part.to_batches()) == 60
    _transact(store, number + 1)


@pytest.mark.parametrize(
    "call", [_write, _write_large, _write_named, _transact, _transact_in_parts, _read, _read_batches, _read_as_group], ids=lambda call: call.__name__[1:]
)
def test_a_program_goes_on_after_a_ctrl_c_at_any_moment(
    call: Callable[[hw.Store, int], Any], place: Place, pytestconfig: pytest.Config
) -> None:
    rng = random.Random(call.__name__)
    number, given = 1, []
    with place.open() as store:
        _prepare(store)
        call(store, number)
        # How many there are differs a little: threads meet in other places, connections are made anew.
        moments = _count_moments(store, call, number + 1)
        chosen = range(moments) if pytestconfig.getoption("--long") else sorted(rng.sample(range(moments), min(FEW, moments)))
        for at in chosen:
            number += 10
            if not interrupt(lambda number=number: call(store, number), at):
                given.append(number)
            after = number + 1
            assert ends(lambda after=after: _goes_on(store, after), 20.0), f"stuck after a Ctrl-C at moment {at} of {moments}"
            given += [after, after + 1]
            _goes_on(store, number + 3)
            given += [number + 3, number + 4]
    with place.open() as store:
        found = Counter(int(event.value.partition(b"|")[0]) for event in store.stream(STREAM).read())
        assert set(found.values()) == {1}, "stored twice"
        if "read" not in call.__name__:
            assert not set(given) - found.keys(), "given, and lost"


def _count_moments(store: hw.Store, call: Callable[[hw.Store, int], Any], number: int) -> int:
    import sys

    count = 0

    def look(frame: Any, event: str, _: object) -> None:
        nonlocal count
        count += event in ("call", "return", "c_return")

    sys.setprofile(look)
    try:
        call(store, number)
    finally:
        sys.setprofile(None)
    return count
