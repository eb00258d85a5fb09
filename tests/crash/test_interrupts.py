"""Ctrl-C in a program that goes on, as in a notebook: at every moment of a write, a transaction and a read, one after the other."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial

import pyarrow as pa
import pytest

import headwater as hw
from tests.crash.processes import Place
from tests.interrupts import count_moments, ends, interrupt

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    # A Ctrl-C leaves writers and connections behind that nobody closed.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]

Call = Callable[[hw.Store, int], None]
STREAM = "interrupted/events"
TIME = datetime(2026, 1, 1, tzinfo=UTC)
#: Of those moments, without `--long`.
FEW = 20


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


CALLS = (_write, _write_large, _write_named, _transact, _transact_in_parts, _read, _read_batches, _read_as_group)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__[1:])
def test_a_program_goes_on_after_a_ctrl_c_at_any_moment(call: Call, place: Place, pytestconfig: pytest.Config) -> None:
    number, given = 1, []
    with place.open() as store:
        _prepare(store)
        call(store, number)
        # How many there are differs a little: threads meet in other places, connections are made anew.
        moments = count_moments(partial(call, store, number + 1))
        for at in _choose(moments, call.__name__, pytestconfig.getoption("--long")):
            number += 10
            if not interrupt(partial(call, store, number), at):
                given.append(number)
            assert ends(partial(_goes_on, store, number + 1), 20.0), f"stuck after a Ctrl-C at moment {at} of {moments}"
            _goes_on(store, number + 3)
            given += range(number + 1, number + 5)
    with place.open() as store:
        found = Counter(int(event.value.partition(b"|")[0]) for event in store.stream(STREAM).read())
        assert set(found.values()) == {1}, "stored twice"
        if "read" not in call.__name__:
            assert not set(given) - found.keys(), "given, and lost"


def _choose(moments: int, seed: str, is_long: bool) -> list[int]:
    return list(range(moments)) if is_long else sorted(random.Random(seed).sample(range(moments), FEW))


def _give(writer: hw.Writer, number: int) -> None:
    writer.write(b"%d" % number, key=b"k", number=number).result()


def _give_with_time(writer: hw.Writer, number: int) -> None:
    writer.write(b"%d" % number, key=b"k", time=TIME, number=number).result()


def _give_batch(writer: hw.Writer, number: int) -> None:
    writer.write_batch(pa.record_batch({"value": pa.array([b"%d" % number], pa.binary())}), number=number).result()


@pytest.mark.parametrize("give", [_give, _give_with_time, _give_batch], ids=lambda give: give.__name__[1:])
def test_what_is_repeated_after_a_ctrl_c_with_its_number_is_stored_once(
    give: Callable[[hw.Writer, int], None], place: Place, pytestconfig: pytest.Config
) -> None:
    number = 1
    with place.open() as store:
        stream = store.create_stream(STREAM)
        with stream.writer("source") as writer:
            give(writer, number)
            number += 1
            moments = count_moments(partial(give, writer, number))
            for at in _choose(moments, give.__name__, pytestconfig.getoption("--long")):
                number += 1
                interrupt(partial(give, writer, number), at)
                give(writer, number)
        found = list(stream.read())
        assert [int(event.value) for event in found] == list(range(1, number + 1))
        assert give is not _give_with_time or {event.time for event in found} == {TIME}
