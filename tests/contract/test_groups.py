"""Reader groups: who reads what, in which order, from where, and what is committed when readers come, go, hang or die."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headwater as hw
from headwater.catalog import groups
from headwater.readers import group as group_module
from headwater.readers import reader as reader_module
from tests.crash.processes import Crew, Place, wait_until
from tests.operations import intercept

# Many processes, time-outs and threads: not for a quick run.
pytestmark = pytest.mark.slow

IN, OUT = "g/in", "g/out"
WAIT_SECONDS = 30.0
#: Dead after this long without a beat, in tests that wait for it.
DEAD_SECONDS = 2.0
KEYS = [f"key{number}" for number in range(12)]


def die_soon(patch: pytest.MonkeyPatch) -> None:
    for module in (reader_module, group_module):
        patch.setattr(module, "READER_SECONDS", DEAD_SECONDS)
    patch.setattr(groups, "_DEAD_AFTER_US", int(DEAD_SECONDS * 1_000_000))


@pytest.fixture
def quick_death(monkeypatch: pytest.MonkeyPatch) -> None:
    die_soon(monkeypatch)


def write(store: hw.Store, name: str, *values: str, key: str | None = None) -> None:
    with store.stream(name).writer() as writer:
        for value in values:
            writer.write(value, key=key)


def write_keys(store: hw.Store, name: str, turns: range) -> None:
    with store.stream(name).writer() as writer:
        for turn in turns:
            for key in KEYS:
                writer.write(f"{turn}", key=key)


def take(reader: hw.Reader, count: int) -> list[str]:
    """The next `count` events' values."""
    found: list[str] = []
    for _ in range(count):
        event = reader.read(timeout=WAIT_SECONDS)
        assert event is not None, f"only {found}"
        found.append(event.value.decode())
    return found


def batch(reader: hw.Reader, max_events: int = 65536) -> pa.RecordBatch:
    found = reader.read_batch(max_events, timeout=WAIT_SECONDS)
    assert found is not None
    return found


def nothing(reader: hw.Reader) -> bool:
    return reader.read(timeout=0.3) is None


def position(group: hw.ReaderGroup, name: str = IN) -> dict[int, int]:
    return dict(group.positions().streams[name].segments)


class Pumps:
    """Readers in threads of their own, which note in one list what they were given, in the order in which they were done with it."""

    def __init__(self, group: hw.ReaderGroup) -> None:
        self._group = group
        self._pool = ThreadPoolExecutor(16)
        self._stops: dict[str, threading.Event] = {}
        self._futures: dict[str, Future[None]] = {}
        self._lock = threading.Lock()
        self.seen: list[tuple[str, hw.Event]] = []

    def start(self, id: str, commit: str = "auto") -> None:
        self._stops[id] = threading.Event()
        self._futures[id] = self._pool.submit(self._run, id, commit, self._stops[id])

    def _run(self, id: str, commit: str, stop: threading.Event) -> None:
        with self._group.reader(id, commit=commit) as reader:
            while not stop.is_set():
                event = reader.read(timeout=0.2)
                if event is not None:
                    with self._lock:
                        self.seen.append((id, event))
                    if commit == "manual":
                        reader.commit()

    def stop(self, id: str) -> None:
        self._stops.pop(id).set()
        self._futures.pop(id).result(WAIT_SECONDS)

    def wait_for(self, count: int) -> None:
        def is_there() -> bool:
            for future in self._futures.values():
                if future.done():
                    future.result()
            return len(self.seen) >= count

        wait_until(is_there)

    def by_key(self) -> dict[bytes, list[str]]:
        found = defaultdict(list)
        for _, event in self.seen:
            found[event.key].append(event.value.decode())
        return found

    def close(self) -> None:
        for stop in self._stops.values():
            stop.set()
        self._pool.shutdown()


@pytest.fixture
def pumps(store: hw.Store) -> Iterator[Callable[[hw.ReaderGroup], Pumps]]:
    with ExitStack() as stack:

        def make(group: hw.ReaderGroup) -> Pumps:
            made = Pumps(group)
            stack.callback(made.close)
            return made

        yield make


def shares(group: hw.ReaderGroup) -> dict[str, int]:
    return {reader: len(segments) for reader, segments in group.assignments().items()}


# Who reads what.


@pytest.mark.slow
@pytest.mark.parametrize("commit", ["auto", "manual"])
def test_segments_are_balanced_within_one_as_readers_come_and_go(
    store: hw.Store, pumps: Callable[[hw.ReaderGroup], Pumps], commit: str
) -> None:
    store.create_stream(IN, scaling=hw.Scaling.fixed(5))
    store.create_stream(OUT, scaling=hw.Scaling.fixed(2))
    group = store.reader_group("group", [IN, OUT])
    readers = pumps(group)
    written = 0
    for joins, leaves, expected in ((["a"], [], [7]), (["b", "c"], [], [2, 2, 3]), ([], ["a"], [3, 4]), (["d", "e"], ["b"], [2, 2, 3])):
        for id in leaves:
            readers.stop(id)
        for id in joins:
            readers.start(id, commit)
        write_keys(store, IN, range(2))
        write_keys(store, OUT, range(2))
        written += 4 * len(KEYS)
        readers.wait_for(written)
        wait_until(lambda expected=expected: sorted(shares(group).values()) == expected)  # type: ignore[misc]
        assert "" not in shares(group)
    assert len(readers.seen) == written, "each once"


def test_more_readers_than_segments_and_one_leaves(store: hw.Store) -> None:
    store.create_stream(IN)
    group = store.reader_group("group", [IN])
    with group.reader("b") as second:
        write(store, IN, "1")
        assert take(second, 1) == ["1"]
        with group.reader("a") as first:
            write(store, IN, "2")
            assert nothing(first), "who has a segment keeps it, whatever the names"
            assert take(second, 1) == ["2"]
            second.close()
            write(store, IN, "3")
            assert take(first, 1) == ["3"]
    assert group.readers() == [] and shares(group) == {"": 1}


@pytest.mark.parametrize("how", ["commit", "transaction", "nothing read"])
def test_a_manual_reader_gives_up_what_it_has_committed(store: hw.Store, how: str) -> None:
    store.create_stream(IN, scaling=hw.Scaling.fixed(2))
    write_keys(store, IN, range(2))
    group = store.reader_group("group", [IN])
    with group.reader("a", commit="manual") as first:
        if how != "nothing read":
            take(first, 2 * len(KEYS))
        else:
            first.read(timeout=0)
            first.rewind()
        with group.reader("b", commit="manual") as second:
            if how != "nothing read":
                assert nothing(first) and nothing(second), "what is not committed is kept"
                assert shares(group) == {"a": 2, "b": 0}
            if how == "commit":
                first.commit()
            elif how == "transaction":
                with store.transaction() as tx:
                    tx.commit_reader(first)
            held: list[int] = []

            def is_balanced() -> bool:
                if how == "nothing read":
                    first.rewind()
                first.read(timeout=0)
                second.read(timeout=0)
                held[:] = sorted(shares(group).values())
                return held == [1, 1]

            wait_until(is_balanced)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_death")
def test_a_dead_readers_segments_are_read_on_from_its_committed_position(store: hw.Store, place: Place, crew: Crew) -> None:
    store.create_stream(IN)
    write(store, IN, *"1234")
    group = store.reader_group("group", [IN])
    worker = crew.start(obey_reader, place, "r1")
    assert worker.ask("take", 2) == ["1", "2"]
    assert worker.ask("commit") == "done"
    assert worker.ask("take", 1) == ["3"]
    worker.stop()
    with group.reader("r2", commit="manual") as reader:
        assert take(reader, 2) == ["3", "4"]
        worker.go_on()
        assert worker.ask("commit") == "FencedError"
        assert worker.ask("take", 1) == "FencedError"
        reader.commit()
    assert position(group) == {0: 4}
    worker.tell(("end",))
    assert worker.wait() == 0


def obey_reader(channel: Connection, place: Place, id: str) -> None:
    die_soon(pytest.MonkeyPatch())
    with place.open() as store:
        reader = store.reader_group("group").reader(id, commit="manual")
        while True:
            what, *rest = channel.recv()
            try:
                if what == "take":
                    channel.send(take(reader, *rest))
                elif what == "commit":
                    reader.commit()
                    channel.send("done")
                else:
                    return
            except hw.HeadwaterError as error:
                channel.send(type(error).__name__)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_death")
def test_a_reader_that_works_long_on_an_event_stays_alive(store: hw.Store) -> None:
    store.create_stream(IN)
    write(store, IN, "1", "2")
    group = store.reader_group("group", [IN])
    with group.reader("a", commit="manual") as busy, group.reader("b") as other:
        assert take(busy, 1) == ["1"]
        began = time.monotonic()
        while time.monotonic() - began < 1.5 * DEAD_SECONDS:
            assert nothing(other)
        busy.commit()
        assert take(busy, 1) == ["2"]
    assert position(group) == {0: 1}


def test_the_newer_of_two_readers_with_one_name_fences_the_older(store: hw.Store, place: Place) -> None:
    store.create_stream(IN)
    write(store, IN, "1", "2")
    group = store.reader_group("group", [IN])
    older = group.reader("r", commit="manual")
    assert take(older, 1) == ["1"]
    with place.open() as elsewhere, elsewhere.reader_group("group").reader("r", commit="manual") as newer:
        assert take(newer, 1) == ["1"]
        with pytest.raises(hw.FencedError, match="'r'"):
            older.commit()
        with pytest.raises(hw.FencedError):
            older.read()
        tx = store.transaction()
        with pytest.raises(hw.FencedError):
            tx.commit_reader(older)
        older.close()
        assert position(group) == {0: 0}
        assert take(newer, 1) == ["2"]
        newer.commit()
    assert position(group) == {0: 2}


def test_a_removed_reader_is_fenced_and_its_segments_go_on(store: hw.Store) -> None:
    store.create_stream(IN)
    write(store, IN, "1", "2")
    group = store.reader_group("group", [IN])
    with group.reader("a", commit="manual") as removed, group.reader("b", commit="manual") as other:
        assert take(removed, 2) == ["1", "2"]
        group.remove_reader("a")
        assert group.readers() == ["b"]
        with pytest.raises(hw.FencedError):
            removed.commit()
        assert take(other, 2) == ["1", "2"]
        other.commit()
    group.remove_reader("a")  # again: nothing
    with pytest.raises(hw.NotFoundError):
        group.remove_reader("nobody")


# Order.


def scale(store: hw.Store, name: str, step: str) -> None:
    stream = store.stream(name)
    if step == "split":
        stream.split(stream.segments()[0].number)
    elif step == "merge":
        stream.merge([segment.number for segment in stream.segments()])
    else:
        tx = store.transaction()
        for key in KEYS:
            tx.write(name, step, key=key)
        tx.flush()
        stream.split(stream.segments()[0].number)
        tx.commit()


def test_a_segment_with_much_to_read_does_not_keep_others_waiting(store: hw.Store) -> None:
    stream = store.create_stream(IN, scaling=hw.Scaling.fixed(4))
    with stream.writer() as writer:
        for key in KEYS:
            writer.write("few", key=key)
        writer.flush()
        for _ in range(24):
            writer.write(bytes(1024 * 1024), key="much")
            writer.flush()
    with store.reader_group("g", [IN]).reader("r") as reader:
        sizes: dict[int, int] = dict.fromkeys((segment.number for segment in stream.segments()), 0)
        while not all(sizes.values()):
            found = batch(reader)
            sizes[found["_segment"][0].as_py()] += found.nbytes
    assert sum(sizes.values()) < 8 * 1024 * 1024, "the others come before all of the large one"


@pytest.mark.slow
@pytest.mark.parametrize("commit", ["auto", "manual"])
def test_keys_keep_their_order_across_splits_merges_and_rolls(
    store: hw.Store, pumps: Callable[[hw.ReaderGroup], Pumps], commit: str
) -> None:
    store.create_stream(IN, scaling=hw.Scaling.fixed(2))
    readers = pumps(store.reader_group("group", [IN]))
    for id in "abc":
        readers.start(id, commit)
    expected: list[str] = []
    for turn, step in enumerate(["split", "merge", "roll1", "merge", "split", "split", "roll2"]):
        write_keys(store, IN, range(10 * turn, 10 * turn + 3))
        expected += [f"{10 * turn + number}" for number in range(3)]
        scale(store, IN, step)
        if step.startswith("roll"):
            expected.append(step)
    readers.wait_for(len(expected) * len(KEYS))
    assert readers.by_key() == {key.encode(): expected for key in KEYS}


@pytest.mark.slow
def test_a_successor_is_given_only_when_every_predecessor_is_committed_to_its_end(store: hw.Store) -> None:
    stream = store.create_stream(IN, scaling=hw.Scaling.fixed(2))
    write_keys(store, IN, range(1))
    stream.merge([0, 1])
    write_keys(store, IN, range(1, 2))
    stream.split(2)
    write_keys(store, IN, range(2, 3))
    group = store.reader_group("group", [IN])
    with group.reader("a", commit="manual") as first, group.reader("b", commit="manual") as second:
        counts = {}
        for reader in (first, second):
            event = reader.read(timeout=WAIT_SECONDS)
            assert event is not None
            counts[reader] = 1
        for reader in (first, second):
            while (event := reader.read(timeout=0.3)) is not None:
                assert event.value == b"0"
                counts[reader] += 1
        assert sum(counts.values()) == len(KEYS)
        first.commit()
        assert nothing(first) and nothing(second), "the other predecessor is not committed"
        assert sorted(position(group)) == [0, 1]
        second.commit()
        holders = [reader for reader in (first, second) if reader.read(timeout=0.5) is not None]
        assert len(holders) == 1, "one of them has the merged segment"
        assert take(holders[0], len(KEYS) - 1) == ["1"] * (len(KEYS) - 1) and nothing(holders[0])
        assert sorted(position(group)) == [2]
        holders[0].commit()
        rest: list[bytes] = []
        while len(rest) < len(KEYS):
            for reader in (first, second):
                event = reader.read(timeout=0.1)
                if event is not None:
                    rest.append(event.value)
        assert rest == [b"2"] * len(KEYS)
        assert sorted(position(group)) == [3, 4]


def test_commits_may_be_repeated_at_the_end_of_a_sealed_segment(store: hw.Store) -> None:
    stream = store.create_stream(IN)
    write(store, IN, "1", key="k")
    group = store.reader_group("group", [IN])
    with group.reader("a", commit="manual") as first, group.reader("b") as second:
        assert take(first, 1) == ["1"]
        first.commit()
        stream.split(0)
        assert nothing(second)
        first.commit()
        first.commit()
        for _ in range(2):
            with store.transaction() as tx:
                tx.commit_reader(first)
        write(store, IN, "2", key="k")
        wait_until(lambda: any(event is not None and event.value == b"2" for event in [first.read(timeout=0.1), second.read(timeout=0.1)]))


# What is committed when.


def test_auto_commits_what_was_handed_out_before_the_latest_read(store: hw.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.create_stream(IN)
    write(store, IN, *"12345")
    group = store.reader_group("group", [IN])
    with group.reader("r") as reader:
        assert take(reader, 3) == ["1", "2", "3"]
        assert position(group) == {0: 0}, "not yet five seconds"
        monkeypatch.setattr(reader_module, "_AUTO_COMMIT_SECONDS", 0.0)
        assert take(reader, 1) == ["4"]
        assert position(group) == {0: 3}, "the fourth may still be worked on"
        monkeypatch.undo()
        reader.commit()
        assert position(group) == {0: 4}
        assert take(reader, 1) == ["5"]
    assert position(group) == {0: 5}, "a clean close commits"


def test_a_reader_left_by_an_exception_does_not_commit(store: hw.Store, place: Place) -> None:
    store.create_stream(IN)
    write(store, IN, "1", "2")
    group = store.reader_group("group", [IN])
    with pytest.raises(ZeroDivisionError), group.reader("r") as reader:
        assert take(reader, 1) == ["1"]
        raise ZeroDivisionError
    assert position(group) == {0: 0} and group.readers() == []
    with pytest.raises(ZeroDivisionError), place.open() as other:
        reader = other.reader_group("group").reader("r")
        assert take(reader, 2) == ["1", "2"]
        raise ZeroDivisionError
    assert position(group) == {0: 0}, "a store that is closed over it does not either"


class Outage:
    """Makes the catalog refuse some operations, or lose the answers to them."""

    def __init__(self, store: hw.Store, patch: pytest.MonkeyPatch) -> None:
        self.refused: set[str] = set()
        self.lost: set[str] = set()
        intercept(patch, store, self._run)

    def _run(self, name: str, run: Callable[[], Any]) -> Any:
        if name in self.refused:
            raise hw.UnavailableError("out of reach")
        result = run()
        if name in self.lost:
            raise hw.OutcomeUnknownError("the answer was lost")
        return result

    def end(self) -> None:
        self.refused, self.lost = set(), set()


CLOSING = ("groups.commit_positions", "groups.leave_group")


@pytest.mark.parametrize("refused", CLOSING)
def test_a_close_that_failed_is_repeated_until_it_succeeds(store: hw.Store, refused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store.create_stream(IN)
    write(store, IN, *"123")
    group = store.reader_group("group", [IN])
    outage = Outage(store, monkeypatch)
    reader = group.reader("r")
    assert take(reader, 2) == ["1", "2"]
    outage.refused = {refused}
    for _ in range(2):
        with pytest.raises(hw.UnavailableError):
            reader.close()
    with pytest.raises(hw.InvalidRequestError, match="closed"):
        reader.read()
    outage.end()
    reader.close()
    assert position(group) == {0: 2} and group.readers() == []
    outage.refused = set(CLOSING)
    reader.close()


@pytest.mark.parametrize("lost", CLOSING)
def test_a_close_whose_answer_was_lost_may_be_repeated(store: hw.Store, lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store.create_stream(IN)
    write(store, IN, *"123")
    group = store.reader_group("group", [IN])
    outage = Outage(store, monkeypatch)
    reader = group.reader("r")
    assert take(reader, 2) == ["1", "2"]
    outage.lost = {lost}
    with pytest.raises(hw.OutcomeUnknownError):
        reader.close()
    outage.end()
    reader.close()
    assert position(group) == {0: 2} and group.readers() == []


def test_a_reader_whose_block_could_not_close_it_is_closed_by_hand(store: hw.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.create_stream(IN)
    write(store, IN, *"123")
    group = store.reader_group("group", [IN])
    outage = Outage(store, monkeypatch)
    with pytest.raises(hw.UnavailableError), group.reader("r") as reader:
        assert take(reader, 2) == ["1", "2"]
        outage.refused = set(CLOSING)
    outage.end()
    reader.close()
    assert position(group) == {0: 2} and group.readers() == []
    with pytest.raises(ZeroDivisionError) as caught, group.reader("r") as reader:
        assert take(reader, 1) == ["3"]
        outage.refused = set(CLOSING)
        raise ZeroDivisionError
    assert "out of reach" in caught.value.__notes__[0]
    outage.end()
    reader.close()
    assert position(group) == {0: 2} and group.readers() == [], "what an exception left is not committed by closing again"


@pytest.mark.usefixtures("quick_death")
def test_a_reader_that_failed_to_leave_is_taken_for_dead_even_if_nobody_closes_it_again(
    store: hw.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.create_stream(IN)
    write(store, IN, *"123")
    group = store.reader_group("group", [IN])
    outage = Outage(store, monkeypatch)
    reader = group.reader("r")
    assert take(reader, 2) == ["1", "2"]
    outage.refused = {"groups.leave_group"}
    with pytest.raises(hw.UnavailableError):
        reader.close()
    outage.end()
    with group.reader("other") as other:
        assert take(other, 1) == ["3"]
        assert group.readers() == ["other"]
        reader.close()
        assert list(group.assignments()) == ["other"]


@pytest.mark.usefixtures("quick_death")
def test_a_close_that_comes_when_others_took_over_says_that_nothing_was_committed(store: hw.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.create_stream(IN)
    write(store, IN, *"123")
    group = store.reader_group("group", [IN])
    outage = Outage(store, monkeypatch)
    reader = group.reader("r")
    assert take(reader, 2) == ["1", "2"]
    outage.refused = set(CLOSING)
    with pytest.raises(hw.UnavailableError):
        reader.close()
    outage.end()
    with group.reader("other") as other:
        assert take(other, 1) == ["1"]
        with pytest.raises(hw.FencedError):
            reader.close()
        reader.close()
        assert position(group) == {0: 0}


def test_a_store_is_closed_also_if_its_readers_can_not_leave(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    with place.open(create=True) as store:
        store.create_stream(IN)
        reader = store.reader_group("group", [IN]).reader("r")
        Outage(store, monkeypatch).refused = {"groups.leave_group"}
        with pytest.raises(hw.UnavailableError):
            store.close()
        reader.close()
        del reader
        gc.collect()


def test_a_manual_reader_commits_and_rewinds_when_told(store: hw.Store) -> None:
    store.create_stream(IN)
    write(store, IN, *"12345")
    group = store.reader_group("group", [IN])
    with group.reader("r", commit="manual") as reader:
        assert take(reader, 2) == ["1", "2"]
        reader.commit()
        assert take(reader, 2) == ["3", "4"]
        reader.rewind()
        assert take(reader, 2) == ["3", "4"]
        assert position(group) == {0: 2}
        reader.commit()
        assert take(reader, 1) == ["5"]
    assert position(group) == {0: 4}, "a close does not commit for it"
    with group.reader("r") as reader:
        assert take(reader, 1) == ["5"]


def test_positions_go_with_a_transaction_as_of_the_call(store: hw.Store) -> None:
    store.create_stream(IN)
    store.create_stream(OUT)
    write(store, IN, *"1234")
    group = store.reader_group("group", [IN])
    with group.reader("r", commit="manual") as reader:
        tx = store.transaction()
        assert take(reader, 1) == ["1"]
        tx.commit_reader(reader)
        assert take(reader, 1) == ["2"]
        tx.commit_reader(reader)
        assert take(reader, 1) == ["3"]
        assert position(group) == {0: 0}
        tx.commit()
        assert position(group) == {0: 2}
        tx = store.transaction()
        tx.commit_reader(reader)
        assert take(reader, 1) == ["4"]
        tx.abort()
        assert take(reader, 2) == ["3", "4"], "an abort rewinds to the durable position"
        assert position(group) == {0: 2}
        reader.commit()


def copy_once(channel: Connection, place: Place) -> None:
    """Consume, process and produce, one transaction for a few events, until it is killed or the end is reached."""
    with place.open() as store, store.reader_group("group").reader("r", commit="manual") as reader:
        while True:
            count = 0
            with store.transaction() as tx:
                while count < 7 and (event := reader.read(timeout=0.05)) is not None:
                    tx.write(OUT, event.value, key=event.key)
                    count += 1
                    if count == 4:
                        tx.flush()
                tx.commit_reader(reader)
            channel.send(count)


@pytest.mark.slow
def test_consuming_and_producing_in_transactions_copies_each_event_once_whoever_is_killed(
    store: hw.Store, place: Place, crew: Crew, seed: int
) -> None:
    store.create_stream(IN, scaling=hw.Scaling.fixed(2))
    store.create_stream(OUT, scaling=hw.Scaling.fixed(2))
    write_keys(store, IN, range(10))
    group = store.reader_group("group", [IN])
    for turn in range(4):
        worker = crew.start(copy_once, place)
        for _ in range(1 + (seed + turn) % 3):
            worker.hear()
        if turn == 1:
            scale(store, IN, "split")
            scale(store, OUT, "split")
            write_keys(store, IN, range(10, 12))
        worker.kill()
    worker = crew.start(copy_once, place)
    wait_until(lambda: worker.hear() == 0 and group.lag().events == 0)
    worker.kill()
    found = defaultdict(list)
    for event in store.stream(OUT).read():
        found[event.key].append(event.value.decode())
    assert found == {key.encode(): [f"{number}" for number in range(12)] for key in KEYS}


# Checkpoints and resets.


@pytest.mark.slow
def test_a_checkpoint_is_where_every_reader_is(store: hw.Store, pumps: Callable[[hw.ReaderGroup], Pumps]) -> None:
    store.create_stream(IN, scaling=hw.Scaling.fixed(4))
    write_keys(store, IN, range(5))
    group = store.reader_group("group", [IN])
    readers = pumps(group)
    for id in "abc":
        readers.start(id)
    readers.wait_for(5 * len(KEYS))
    cut = group.checkpoint(timeout=WAIT_SECONDS)
    assert cut == store.stream(IN).tail(), "all was handed out, and the readers came back for more"
    write_keys(store, IN, range(5, 8))
    readers.wait_for(8 * len(KEYS))
    for id in "abc":
        readers.stop(id)
    assert group.lag().events == 0
    group.reset(cut)
    assert group.lag().events == 3 * len(KEYS) and group.positions() == cut
    with group.reader("again") as reader:
        assert sorted(take(reader, 3 * len(KEYS))) == sorted(f"{turn}" for turn in range(5, 8) for _ in KEYS)


def test_a_checkpoint_counts_what_is_handed_out_and_not_committed(store: hw.Store) -> None:
    store.create_stream(IN)
    write(store, IN, *"1234")
    group = store.reader_group("group", [IN])
    with group.reader("r", commit="manual") as reader, ThreadPoolExecutor() as pool:
        assert take(reader, 2) == ["1", "2"]
        with pytest.raises(hw.UnavailableError, match="r did not read on"):
            group.checkpoint(timeout=0.2)
        coming = pool.submit(group.checkpoint, WAIT_SECONDS)
        found = []
        while not coming.done():
            event = reader.read(timeout=0.1)
            if event is not None:
                found.append(event)
        cut = coming.result()
        assert cut.streams[IN].segments[0] in (2, 3, 4) and position(group) == {0: 0}
    assert group.checkpoint(timeout=WAIT_SECONDS) == group.positions(), "with nobody there it is the committed positions"


@pytest.mark.parametrize("heard", [False, True])
def test_what_was_answered_before_a_reset_is_no_part_of_a_checkpoint(store: hw.Store, heard: bool) -> None:
    store.create_stream(IN, scaling=hw.Scaling.fixed(2))
    write_keys(store, IN, range(3))
    group = store.reader_group("group", [IN])
    engine, id = store._engine, group._row.id
    readers = {name: engine.run(groups.join_group, id, name)[0] for name in ("a", "b")}

    def report(name: str) -> dict[tuple[int, int], int]:
        turn = engine.run(groups.report, id, name, readers[name])
        return {(item.stream, item.segment): item.position + 2 for item in turn.mine}

    def answer(name: str, positions: dict[tuple[int, int], int]) -> None:
        engine.run(groups.answer_checkpoint, id, name, readers[name], number, positions)

    for name in readers:
        assert len(report(name)) == 1
    number = engine.run(groups.request_checkpoint, id)
    before = dict.fromkeys(report("a"), 5)
    if heard:
        answer("a", before)
    group.reset("head")
    if not heard:
        answer("a", before)
    answer("b", report("b"))
    missing, positions = engine.run(groups.read_checkpoint, id, number)
    assert not missing and sorted(next(iter(positions.values())).values()) == [0, 2]


def test_a_reset_puts_readers_where_it_says(store: hw.Store) -> None:
    stream = store.create_stream(IN)
    write(store, IN, *"123")
    cut = stream.tail()
    write(store, IN, *"456")
    group = store.reader_group("group", [IN])
    with group.reader("a") as auto:
        assert take(auto, 6) == list("123456")
        group.reset(cut)
        assert position(group) == {0: 3}
        wait_until(lambda: (event := auto.read(timeout=0.1)) is not None and event.value == b"4")
        assert take(auto, 2) == ["5", "6"]
    assert position(group) == {0: 6}
    with group.reader("m", commit="manual") as manual:
        write(store, IN, "7")
        assert take(manual, 1) == ["7"]
        group.reset(stream.head())
        with pytest.raises(hw.ConflictError, match="reset"):
            manual.commit()
        assert take(manual, 7) == list("1234567")
        with store.transaction() as tx:
            tx.commit_reader(manual)
        group.reset(cut)
        tx = store.transaction()
        with pytest.raises(hw.ConflictError):
            assert take(manual, 1) is not None
            tx.commit_reader(manual)
            group.reset(stream.head())
            tx.commit()
    assert position(group) == {0: 0}


def test_a_reader_opened_after_a_reset_commits(store: hw.Store) -> None:
    stream = store.create_stream(IN)
    write(store, IN, "1")
    group = store.reader_group("group", [IN])
    group.reset(stream.tail())
    with group.reader("r", commit="manual") as reader:
        reader.commit()
        assert nothing(reader)


def test_a_reset_to_what_was_truncated_says_where_the_head_is(store: hw.Store) -> None:
    stream = store.create_stream(IN)
    write(store, IN, *"12345")
    group = store.reader_group("group", [IN])
    old = stream.head()
    with group.reader("r", commit="manual") as reader:
        assert take(reader, 1) == ["1"]
        stream.truncate(hw.Cut(store.id, {IN: old.streams[IN]._replace(segments={0: 3})}))
        with pytest.raises(hw.TruncatedError) as found:
            group.reset(old)
        assert found.value.head == stream.head() != old
        reader.rewind()
        with pytest.raises(hw.TruncatedError) as found:
            reader.read()
        assert found.value.head == stream.head()
        group.reset(found.value.head)
        assert take(reader, 2) == ["4", "5"]
    for wrong in (None, "middle", 5):
        with pytest.raises(hw.InvalidRequestError):
            group.reset(wrong)  # type: ignore[arg-type]
    for place in ("head", "tail"):
        group.reset(place)
        assert group.positions() == getattr(stream, place)()


def test_a_segment_truncated_away_under_a_reader_is_told(store: hw.Store) -> None:
    stream = store.create_stream(IN)
    write(store, IN, "1", "2", key="k")
    stream.split(0)
    write(store, IN, "3", key="k")
    group = store.reader_group("group", [IN])
    with group.reader("r", commit="manual") as reader:
        assert take(reader, 2) == ["1", "2"]
        stream.truncate(stream.tail())
        write(store, IN, "4", key="k")
        with pytest.raises(hw.TruncatedError) as found:
            for _ in range(50):
                assert reader.read(timeout=0.2) is None
        assert found.value.head == stream.head()
        group.reset(stream.head())
        assert take(reader, 1) == ["4"]
        reader.commit()
    assert group.lag().events == 0 and sorted(position(group)) == [1, 2]


def test_a_reset_to_a_cut_of_something_else_is_refused(store: hw.Store) -> None:
    store.create_stream(IN)
    store.create_stream(OUT)
    group = store.reader_group("group", [IN])
    with pytest.raises(hw.InvalidRequestError):
        group.reset(store.stream(OUT).tail())
    group.reset(store.cut(IN, OUT))


# Where groups begin and end.


def test_a_group_starts_where_it_is_told(store: hw.Store) -> None:
    stream = store.create_stream(IN)
    write(store, IN, "1")
    cut = stream.tail()
    write(store, IN, "2")
    events = list(stream.read())
    between = datetime.now(UTC)
    wait_until(lambda: datetime.now(UTC) > between)
    write(store, IN, "3")
    places: list[tuple[Any, list[str]]] = [
        ("head", ["1", "2", "3"]), (cut, ["2", "3"]), ("tail", []), (between, ["3"]), (events[1].time, ["2", "3"])
    ]  # fmt: skip
    for number, (start, expected) in enumerate(places):
        group = store.reader_group(f"group{number}", [IN], start=start)
        with group.reader("r") as reader:
            assert take(reader, len(expected)) == expected
            assert nothing(reader)
    group = store.reader_group("group0", [IN], start="tail")
    assert position(group) == {0: 3}, "one that is there is opened as it is"
    for wrong in ("middle", 5, datetime(2026, 1, 1)):
        with pytest.raises(hw.InvalidRequestError):
            store.reader_group("wrong", [IN], start=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("commit", ["auto", "manual", "manual at the end"])
def test_a_bounded_group_ends_at_its_end(store: hw.Store, commit: str) -> None:
    stream = store.create_stream(IN, scaling=hw.Scaling.fixed(2))
    write_keys(store, IN, range(2))
    end = stream.tail()
    write_keys(store, IN, range(2, 3))
    if commit != "manual at the end":
        scale(store, IN, "split")
    group = store.reader_group("group", [IN], end=end)
    assert group.lag().events == 2 * len(KEYS)
    found = []
    with group.reader("r", commit=commit.split()[0]) as reader:
        for event in reader:
            found.append(event)
            if commit == "manual":
                reader.commit()
        reader.commit()
        began = time.monotonic()
        assert reader.read(timeout=WAIT_SECONDS) is None and time.monotonic() - began < WAIT_SECONDS / 2
    assert sorted(event.value for event in found) == [b"0"] * len(KEYS) + [b"1"] * len(KEYS)
    assert group.lag().events == 0 and group.positions() == end
    with group.reader("again") as reader:
        assert list(reader) == []


@pytest.mark.parametrize("end", ["tail", None])
def test_iterating_says_that_what_follows_a_split_waits_for_the_reader_s_own_commit(store: hw.Store, end: str | None) -> None:
    stream = store.create_stream(IN)
    write_keys(store, IN, range(2))
    stream.split(0)
    write_keys(store, IN, range(2, 3))
    group = store.reader_group("group", [IN], end=end)
    found = []
    with group.reader("r", commit="manual") as reader:
        for _ in range(2):
            with pytest.raises(hw.InvalidRequestError, match="commit, then go on"):
                for event in reader:
                    found.append(event.value)
            reader.rewind()
        with pytest.raises(hw.InvalidRequestError, match="commit, then go on"):
            list(reader)
        assert found == ([b"0"] * len(KEYS) + [b"1"] * len(KEYS)) * 2
        reader.commit()
        assert [event.value for event in islice(reader, len(KEYS))] == [b"2"] * len(KEYS)


def test_iterating_a_bounded_group_waits_for_other_readers(store: hw.Store) -> None:
    store.create_stream(IN, scaling=hw.Scaling.fixed(2))
    write_keys(store, IN, range(1))
    group = store.reader_group("group", [IN], end="tail")
    with ThreadPoolExecutor() as pool, group.reader("a", commit="manual") as one, group.reader("b", commit="manual") as two:
        assert two.read(timeout=WAIT_SECONDS) is not None
        waits = pool.submit(lambda: len(list(one)))
        with pytest.raises(TimeoutError):
            waits.result(1.5)
        count = 1 + len(list(iter(lambda: two.read(timeout=0.1), None)))
        two.commit()
        assert waits.result(WAIT_SECONDS) + count == len(KEYS)


def test_several_readers_end_a_bounded_group_together_across_scaling(store: hw.Store) -> None:
    store.create_stream(IN, scaling=hw.Scaling.fixed(2))
    for turn, step in enumerate(["split", "roll1", "merge", "split"]):
        write_keys(store, IN, range(turn, turn + 1))
        scale(store, IN, step)
    group = store.reader_group("group", [IN], end="tail")
    write_keys(store, IN, range(100, 101))

    def read_all(id: str) -> list[hw.Event]:
        with group.reader(id) as reader:
            return list(reader)

    with ThreadPoolExecutor() as pool:
        found = [event.value for events in pool.map(read_all, "abc") for event in events]
    assert sorted(found) == sorted([b"0", b"1", b"roll1", b"2", b"3"] * len(KEYS))


def test_a_group_whose_end_lies_before_its_start_has_nothing_to_read(store: hw.Store) -> None:
    stream = store.create_stream(IN)
    write(store, IN, "1", key="k")
    end = stream.tail()
    write(store, IN, "2", key="k")
    stream.split(0)
    write(store, IN, "3", key="k")
    group = store.reader_group("group", [IN], start="tail", end=end)
    with group.reader("r") as reader:
        assert list(reader) == []


def test_a_bounded_group_of_nothing_ends(store: hw.Store) -> None:
    store.create_stream(IN)
    with store.reader_group("group", [IN], end="tail").reader("r", commit="manual") as reader:
        assert list(reader) == []


def test_a_sealed_stream_is_read_to_its_end(store: hw.Store) -> None:
    stream = store.create_stream(IN)
    write(store, IN, "1", "2")
    stream.seal()
    group = store.reader_group("group", [IN])
    with group.reader("r") as reader:
        assert take(reader, 2) == ["1", "2"]
        assert nothing(reader)
    assert group.lag().events == 0 and position(group) == {0: 2}


# Looking at groups.


def test_lag_is_what_is_not_committed(store: hw.Store) -> None:
    store.create_stream(IN, scaling=hw.Scaling.fixed(2))
    store.create_stream(OUT)
    group = store.reader_group("group", [IN, OUT])
    assert group.lag() == hw.Lag(0, 0, 0.0)
    write_keys(store, IN, range(2))
    write(store, OUT, "1", "2", "3")
    lag = group.lag()
    assert lag.events == 2 * len(KEYS) + 3 and lag.bytes > 0 and 0 <= lag.seconds < WAIT_SECONDS
    with group.reader("r", commit="manual") as reader:
        take(reader, 5)
        assert group.lag().events == lag.events
        reader.commit()
        assert group.lag().events == lag.events - 5 and group.lag().bytes < lag.bytes
        scale(store, IN, "split")
        write_keys(store, IN, range(2, 3))
        assert group.lag().events == lag.events - 5 + len(KEYS)
        while reader.read(timeout=0.3) is not None:
            reader.commit()
    assert group.lag() == hw.Lag(0, 0, 0.0)


def test_groups_do_not_disturb_each_other(store: hw.Store) -> None:
    store.create_stream(IN)
    write(store, IN, *"12345")
    names = [f"group{number}" for number in range(6)]
    with ExitStack() as stack:
        readers = [stack.enter_context(store.reader_group(name, [IN]).reader("r", commit="manual")) for name in names]
        for count, reader in enumerate(readers):
            assert take(reader, count) == list("12345"[:count])
            reader.commit()
        store.reader_group(names[0]).delete()
        store.reader_group(names[1]).reset(store.stream(IN).head())
        assert [position(store.reader_group(name)) for name in names[1:]] == [{0: 0}, {0: 2}, {0: 3}, {0: 4}, {0: 5}]
        assert take(readers[3], 1) == ["4"]
        with pytest.raises(hw.NotFoundError):
            for _ in range(50):
                readers[0].read(timeout=0.2)
    assert store.reader_groups() == names[1:]


def test_a_group_needs_streams_of_events_that_are_there(store: hw.Store) -> None:
    store.create_stream(IN)
    store.create_stream(OUT)
    store.create_stream("g/bytes", kind="bytes")
    for streams, kind in (
        (None, hw.NotFoundError), (["g/none"], hw.NotFoundError), ([IN, "g/none"], hw.NotFoundError), ([], hw.InvalidRequestError),
        (IN, hw.InvalidRequestError), (["g/bytes"], hw.InvalidRequestError),
        ([5], hw.InvalidRequestError),
    ):  # fmt: skip
        with pytest.raises(kind):
            store.reader_group("group", streams)  # type: ignore[arg-type]
    for name in ("", "a/b", "a b", 5):
        with pytest.raises(hw.InvalidRequestError):
            store.reader_group(name, [IN])  # type: ignore[arg-type]
    assert store.reader_groups() == []
    group = store.reader_group("group", [IN])
    assert store.reader_group("group", [IN]).positions() == group.positions() == store.reader_group("group").positions()
    with pytest.raises(hw.AlreadyExistsError, match="g/in, not g/out"):
        store.reader_group("group", [OUT])
    with pytest.raises(hw.AlreadyExistsError):
        store.reader_group("group", [IN, OUT])
    for id, commit in (("", "auto"), ("a/b", "auto"), (5, "auto"), ("r", "sometimes"), ("r", None)):
        with pytest.raises(hw.InvalidRequestError):
            group.reader(id, commit=commit)  # type: ignore[arg-type]


def test_a_deleted_group_can_be_made_anew(store: hw.Store) -> None:
    store.create_stream(IN)
    write(store, IN, "1")
    group = store.reader_group("group", [IN])
    reader = group.reader("r")
    assert take(reader, 1) == ["1"]
    group.delete()
    for call in (reader.commit, group.positions, group.delete, lambda: group.reader("x")):
        with pytest.raises(hw.NotFoundError):
            call()
    reader.close()
    with pytest.raises(hw.NotFoundError):
        store.reader_group("group")
    with store.reader_group("group", [IN]).reader("r") as fresh:
        assert take(fresh, 1) == ["1"]


def just_before_it_is_made(store: hw.Store, patch: pytest.MonkeyPatch, *calls: Callable[[], Any]) -> None:
    """Make the first call before this store makes its next group, and the others after that."""
    before, *after = calls
    runner = store._engine.runner

    def made(name: str, run: Callable[[], Any]) -> Any:
        if name != "placing.create_group":
            return run()
        patch.setattr(store._engine, "runner", runner)
        before()
        found = run()
        for call in after:
            call()
        return found

    intercept(patch, store, made)


def test_a_group_begins_at_the_head_also_if_that_is_truncated_just_before(
    store: hw.Store, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.create_stream(IN)
    write(store, IN, "1", "2")
    cut = store.stream(IN).tail()
    write(store, IN, "3")
    with place.open() as other:
        just_before_it_is_made(store, monkeypatch, lambda: other.stream(IN).truncate(cut))
        group = store.reader_group("group", [IN])
    with group.reader("r") as reader:
        assert take(reader, 1) == ["3"]


def test_no_group_is_made_of_a_stream_that_is_deleted_just_before(store: hw.Store, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    store.create_stream(IN)
    with place.open() as other:
        just_before_it_is_made(store, monkeypatch, lambda: other.delete_stream(IN, seal=True))
        with pytest.raises(hw.NotFoundError, match=IN):
            store.reader_group("group", [IN])
    assert store.reader_groups() == []


def test_a_group_is_made_also_if_another_of_its_name_comes_and_goes(store: hw.Store, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    store.create_stream(IN)
    with place.open() as other:
        just_before_it_is_made(store, monkeypatch, lambda: other.reader_group("group", [IN]), lambda: other.reader_group("group").delete())
        assert position(store.reader_group("group", [IN])) == {0: 0}


def test_a_stream_deleted_and_made_anew_is_another_one(store: hw.Store) -> None:
    stream = store.create_stream(IN)
    write(store, IN, "old")
    group = store.reader_group("group", [IN])
    with group.reader("r") as reader:
        assert take(reader, 1) == ["old"]
    stream.seal()
    store.delete_stream(IN)
    store.create_stream(IN)
    write(store, IN, "new")
    for call in (lambda: group.reader("r"), lambda: group.reset(store.stream(IN).head())):
        with pytest.raises(hw.NotFoundError, match="deleted"):
            call()
    with pytest.raises(hw.AlreadyExistsError):
        store.reader_group("group", [IN])


def test_a_closed_reader_reads_and_commits_nothing(store: hw.Store) -> None:
    store.create_stream(IN)
    write(store, IN, "1")
    reader = store.reader_group("group", [IN]).reader("r")
    reader.close()
    reader.close()
    for call in (reader.read, reader.read_batch, reader.commit):
        with pytest.raises(hw.InvalidRequestError):
            call()


# Batches and types.


def test_batches_have_the_columns_of_the_schema_and_of_the_place(store: hw.Store) -> None:
    schema = pa.schema([("id", pa.int64()), ("name", pa.string())])
    stream = store.create_stream(IN, schema=schema)
    with stream.writer() as writer:
        writer.write_batch(pa.table({"id": list(range(10)), "name": [f"n{number}" for number in range(10)]}), key="name").result()
    group = store.reader_group("group", [IN])
    with group.reader("r") as reader:
        first = batch(reader, 3)
        assert first.schema.names == ["id", "name", "_key", "_time", "_stream", "_segment", "_number"]
        assert first.column("id").to_pylist() == [0, 1, 2] == first.column("_number").to_pylist()
        assert first.column("_key").to_pylist() == [b"n0", b"n1", b"n2"]
        assert set(first.column("_stream").to_pylist()) == {IN} and set(first.column("_segment").to_pylist()) == {0}
        event = reader.read()
        assert event is not None and event.value == {"id": 3, "name": "n3"} and event.position == hw.Position(0, 3)
        assert batch(reader, 1).column("id").to_pylist() == [4]
        events = [reader.read(), reader.read()]
        assert [event.value["id"] for event in events if event is not None] == [5, 6]
        assert batch(reader).column("id").to_pylist() == [7, 8, 9]
        assert reader.read_batch(timeout=0.1) is None and reader.read(timeout=0.1) is None
        stream.update(schema=schema.append(pa.field("more", pa.string())))
        with stream.writer() as writer:
            writer.write({"id": 10, "name": "x", "more": "y"})
        event = reader.read(timeout=WAIT_SECONDS)
        assert event is not None and event.value == {"id": 10, "name": "x", "more": "y"}
        for wrong in (0, -1, True, 1.5, "1"):
            with pytest.raises(hw.InvalidRequestError):
                reader.read_batch(max_events=wrong)  # type: ignore[arg-type]
    assert position(group) == {0: 11}


def test_a_batch_is_settled_by_the_next_read_like_an_event(store: hw.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.create_stream(IN)
    with store.stream(IN).writer() as writer:
        writer.write_batch(pa.table({"value": [b"%d" % number for number in range(10)]})).result()
    group = store.reader_group("group", [IN])
    monkeypatch.setattr(reader_module, "_AUTO_COMMIT_SECONDS", 0.0)
    with pytest.raises(ZeroDivisionError), group.reader("r") as reader:
        assert batch(reader, 4).num_rows == 4
        assert position(group) == {0: 0}
        assert batch(reader, 3).num_rows == 3
        assert position(group) == {0: 4}
        raise ZeroDivisionError
    assert position(group) == {0: 4}


def test_a_group_reads_streams_of_several_types_side_by_side(store: hw.Store) -> None:
    store.create_stream("g/text")
    store.create_stream("g/rows", schema=pa.schema([("n", pa.int64())]))
    write(store, "g/text", "a", "b")
    with store.stream("g/rows").writer() as writer:
        writer.write({"n": 1})
    with store.reader_group("group", ["g/text", "g/rows"]).reader("r") as reader:
        events = [reader.read(timeout=WAIT_SECONDS) for _ in range(3)]
    assert [event.value for event in events if event is not None and isinstance(event.value, bytes)] == [b"a", b"b"]
    assert {"n": 1} in [event.value for event in events if event is not None]


# What it costs.


def test_a_waiting_reader_hears_of_an_event_at_once_and_keeps_to_its_timeout(store: hw.Store, place: Place) -> None:
    store.create_stream(IN)
    with place.open() as other, ThreadPoolExecutor() as pool, store.reader_group("group", [IN]).reader("r") as reader:
        assert reader.read(timeout=0) is None
        began = time.monotonic()
        assert reader.read(timeout=0.5) is None
        assert 0.45 < time.monotonic() - began < WAIT_SECONDS
        for number in range(3):
            coming = pool.submit(reader.read, WAIT_SECONDS)
            write(other, IN, f"{number}")
            event = coming.result(WAIT_SECONDS)
            assert event is not None and event.value == b"%d" % number


@pytest.mark.slow
def test_waiting_readers_hardly_write(store: hw.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.create_stream(IN, scaling=hw.Scaling.fixed(2))
    write_keys(store, IN, range(3))
    group = store.reader_group("group", [IN])
    database = store._engine.database
    database_write = database.write
    writes = []

    def counting(work: Any, **more: Any) -> Any:
        writes.append(time.monotonic())
        return database_write(work, **more)

    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        readers = [stack.enter_context(group.reader(id)) for id in "abc"]

        def wait_a_while(reader: hw.Reader, seconds: float) -> None:
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                reader.read(timeout=0.3)

        list(pool.map(lambda reader: wait_a_while(reader, 1.0), readers))
        monkeypatch.setattr(database, "write", counting)
        list(pool.map(lambda reader: wait_a_while(reader, 3.0), readers))
        # A beat every 2.5 s, a commit every 5 s.
        assert len(writes) <= 3 * 3
        monkeypatch.undo()


def test_reading_event_by_event_does_not_ask_the_catalog_each_time(store: hw.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.create_stream(IN, scaling=hw.Scaling.fixed(4))
    with store.stream(IN).writer() as writer:
        for number in range(4000):
            writer.write("x" * 20, key=number)
    with store.reader_group("group", [IN]).reader("r") as reader:
        take(reader, 1)
        calls = 0
        database = store._engine.database

        def counted(call: Callable[..., Any]) -> Callable[..., Any]:
            def count(*args: Any, **more: Any) -> Any:
                nonlocal calls
                calls += 1
                return call(*args, **more)

            return count

        for name in ("write", "read", "query"):
            monkeypatch.setattr(database, name, counted(getattr(database, name)))
        began = time.monotonic()
        take(reader, 3999)
        seconds = time.monotonic() - began
        monkeypatch.undo()
    assert calls < 60 + 20 * seconds


@pytest.mark.parametrize("sealed", [False, True], ids=["open", "sealed"])
def test_events_truncated_before_they_were_read_are_told_also_when_nothing_follows_them(store: hw.Store, sealed: bool) -> None:
    stream = store.create_stream(IN, scaling=hw.Scaling.fixed(2))
    write_keys(store, IN, range(2))
    if sealed:
        stream.seal()
    group = store.reader_group("group", [IN])
    with group.reader("r", commit="manual") as reader:
        first = reader.read(timeout=WAIT_SECONDS)
        assert first is not None
        stream.truncate(stream.tail())
        with pytest.raises(hw.TruncatedError) as found:
            for _ in range(len(KEYS) * 2 + 50):
                reader.read(timeout=0.2)
        assert found.value.head == stream.head()
        # Until the group is reset.
        with pytest.raises(hw.TruncatedError):
            reader.read(timeout=0)
        group.reset(stream.head())
        if not sealed:
            write(store, IN, "more", key="k")
            assert take(reader, 1) == ["more"]


def test_a_bounded_group_that_has_read_all_of_it_does_not_mind_what_is_truncated_behind_its_end(store: hw.Store) -> None:
    stream = store.create_stream(IN)
    write(store, IN, "1", "2")
    group = store.reader_group("group", [IN], end="tail")
    write(store, IN, "3")
    with group.reader("r", commit="manual") as reader:
        assert take(reader, 2) == ["1", "2"]
        stream.truncate(stream.tail())
        time.sleep(0.6)
        assert reader.read(timeout=1.5) is None
        reader.commit()
        assert list(reader) == []


def test_a_deleted_group_says_so_whatever_it_is_asked(store: hw.Store) -> None:
    store.create_stream(IN)
    group = store.reader_group("group", [IN])
    group.delete()
    for ask in (group.lag, group.assignments, group.readers, group.time_window, group.positions, group.held_segments):
        with pytest.raises(hw.NotFoundError):
            ask()


def test_a_bounded_group_that_is_done_stays_so_when_its_end_is_truncated_away(store: hw.Store) -> None:
    stream = store.create_stream(IN)
    write(store, IN, "1", "2", key="k")
    group = store.reader_group("group", [IN], end="tail")
    with group.reader("r") as reader:
        assert [event.value for event in reader] == [b"1", b"2"]
    stream.split(0)
    write_keys(store, IN, range(1))
    stream.truncate(hw.Cut(store.id, {IN: stream.tail().streams[IN]._replace(segments={1: 0, 2: 0})}))
    with group.reader("r") as reader:
        assert [event.value for event in reader] == []


FIRST_BATCH = """
import sys
import headwater as hw
with hw.open(sys.argv[1], upkeep=False) as store:
    store.create_stream("g/first")
    with store.stream("g/first").writer() as writer:
        for number in range(3):
            writer.write(b"%d" % number)
    with store.reader_group("first", ["g/first"]).reader("reader", commit="manual") as reader:
        batch = reader.read_batch()
    print(batch.column("value").to_pylist(), batch.column("_stream").to_pylist(), batch.column("_stream").type, "pandas" in sys.modules)
"""


def test_a_groups_first_batch_does_not_import_pandas(tmp_path: Path) -> None:
    """The import takes longer than reading millions of events."""
    command = [sys.executable, "-c", FIRST_BATCH, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_SECONDS * 2, check=True)
    assert done.stdout.strip() == "[b'0', b'1', b'2'] ['g/first', 'g/first', 'g/first'] string False"
