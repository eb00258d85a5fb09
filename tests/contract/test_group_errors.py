"""What a group's reader hands out after errors, interrupts, rewinds and lost answers: nothing is skipped, nothing counts twice."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import headwater as hw
from headwater.errors import OutcomeUnknownError
from headwater.readers import reader as reader_module
from tests.interrupts import interrupt
from tests.operations import intercept

# An interrupt at each moment: not for a quick run.
pytestmark = pytest.mark.slow

IN, OUT = "g/in", "g/out"


@pytest.fixture
def group(store: hw.Store) -> hw.ReaderGroup:
    """Of a stream with the numbers 0 to 9, in blocks of two."""
    stream = store.create_stream(IN)
    store.create_stream(OUT)
    with stream.writer() as writer:
        for number in range(10):
            writer.write(str(number), key="k")
            if number % 2:
                writer.flush()
    return store.reader_group("g", [IN])


def copied(store: hw.Store, reader: hw.Reader, count: int) -> tuple[hw.Transaction, list[int]]:
    """A transaction that copies the next events, and moves the reader behind them."""
    tx = store.transaction()
    found = []
    for _ in range(count):
        event = reader.read(timeout=10)
        assert event is not None
        tx.write(OUT, event.value, key="k")
        found.append(int(event.value))
    tx.commit_reader(reader)
    return tx, found


def copy_the_rest(store: hw.Store, reader: hw.Reader) -> list[int]:
    while store.reader_group("g").lag().events:
        copied(store, reader, 1)[0].commit()
    return [int(event.value) for event in store.stream(OUT).read()]


def test_events_that_were_committed_after_they_came_again_are_not_committed_twice(store: hw.Store, group: hw.ReaderGroup) -> None:
    with group.reader("r", commit="manual") as reader:
        (first, _), (second, _) = copied(store, reader, 3), copied(store, reader, 3)
        first.abort()
        third, found = copied(store, reader, 3)
        assert found == [0, 1, 2]
        with pytest.raises(hw.ConflictError):
            second.commit()
        fourth = store.transaction()
        event = reader.read(timeout=10)
        assert event is not None and event.value == b"0", "the reader went back"
        fourth.write(OUT, event.value, key="k")
        third.commit()
        # It has an event that is committed by now: whatever comes with it can't be.
        fourth.write(OUT, reader.read(timeout=10).value, key="k")  # type: ignore[union-attr]
        fourth.commit_reader(reader)
        with pytest.raises(hw.ConflictError, match="is at 3"):
            fourth.commit()
        assert copy_the_rest(store, reader) == list(range(10))


def test_a_reader_that_went_back_and_read_nothing_goes_on_behind_what_is_committed(store: hw.Store, group: hw.ReaderGroup) -> None:
    with group.reader("r", commit="manual") as reader:
        tx, _ = copied(store, reader, 5)
        reader.rewind()
        assert reader.read(timeout=10).value == b"0"  # type: ignore[union-attr]
        reader.rewind()
        reader.read(timeout=0)  # takes the segment again, at 0
        reader.rewind()
        tx.commit()
        assert copy_the_rest(store, reader) == list(range(10))


def interrupt_inside(call: Callable[[], Any], at: int) -> bool:
    """Not in this file, and not where a function returned: there no signal is looked for, and what it returned would be lost here."""
    return interrupt(call, at, moments=("call", "c_return"), not_in=__file__)


def numbers_of(found: Any) -> list[int]:
    """Of what `read` or `read_batch` returned."""
    if found is None:
        return []
    return [int(found.value)] if isinstance(found, hw.Event) else [int(value) for value in found.column("value").to_pylist()]


@pytest.mark.parametrize("catalog_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("what", ["read", "read_batch", "rewind"])
def test_nothing_is_skipped_after_a_ctrl_c_at_any_moment(
    store: hw.Store, group: hw.ReaderGroup, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(reader_module, "_BUSY_LOOK_SECONDS", 1000.0)
    at, has_moments = 0, True
    while has_moments:
        others = store.reader_group(f"g{at}", [IN])
        with others.reader("r", commit="manual") as reader:
            found: list[Any] = []
            call = reader.read_batch if what == "read_batch" else reader.read
            found.append(call(timeout=0.0))
            if what == "rewind":
                has_moments = interrupt_inside(reader.rewind, at)
                reader.rewind()
                found.clear()
            else:
                has_moments = interrupt_inside(partial(_read_thrice, found, call), at)
            while (some := call(timeout=0.0)) is not None:
                found.append(some)
            assert [number for some in found for number in numbers_of(some)] == list(range(10)), at
        others.delete()
        at += 1
    assert at > (1 if what == "rewind" else 30)


def _read_thrice(found: list[Any], call: Any) -> None:
    for _ in range(3):
        found.append(call(timeout=0.0))


def test_an_answer_that_is_lost_to_the_heart_ends_no_reader(
    store: hw.Store, group: hw.ReaderGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    with group.reader("r") as reader, store.transaction() as tx:
        tx.write(OUT, b"x")
        tx.flush()

        def lose(operation: str, run: Callable[[], Any]) -> Any:
            raise OutcomeUnknownError("the connection was lost during a commit")

        intercept(monkeypatch, store, lose)
        assert reader.beat() and tx._renew_quietly()
        monkeypatch.undo()
        assert reader.read(timeout=10).value == b"0"  # type: ignore[union-attr]
