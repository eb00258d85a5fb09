"""A stream against a dict: whatever is written, scaled, truncated, forked, tiered, by whom ever, each event is read once and in order."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import hypothesis
import pyarrow as pa
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

import headwater as hw
from headwater.check import check_store
from tests.property.second_process import SecondProcess

KEYS = st.lists(st.sampled_from(["0", "1", "2", "3", "4", None]), min_size=1, max_size=6)
CHOICE = st.integers(0, 1000)
_names = (f"p/s{number}" for number in itertools.count())


class Machine(RuleBasedStateMachine):
    """The model: by key, the values in the order in which they were given, and how many of them were truncated."""

    def __init__(self, path: Path, catalog: str | None, other: SecondProcess) -> None:
        super().__init__()
        self.path, self.catalog, self.other = path, catalog, other
        self.written: dict[str | None, list[str]] = {key: [] for key in ("0", "1", "2", "3", "4", None)}
        self.truncated = dict.fromkeys(self.written, 0)
        self.cuts: list[tuple[hw.Cut, dict[str | None, int]]] = []
        self.numbers = itertools.count()
        self.last_number = 0
        self.is_settled = True
        self.store = hw.open(path, catalog=catalog)
        self.named: hw.Writer | None = None
        self.forks: dict[str, dict[str | None, list[str]]] = {}
        #: Places that were rolled back.
        self.stale: list[hw.Cut] = []
        self.held: tuple[hw.Cut, dict[str | None, int], hw.Cut, dict[str | None, int]] | None = None

    @initialize(segments=st.integers(1, 3))
    def create(self, segments: int) -> None:
        self.stream = self.store.create_stream(next(_names), scaling=hw.Scaling.fixed(segments))
        self.writer = self.stream.writer()
        self.settle()

    # The model.

    def new_events(self, keys: list[str | None]) -> list[tuple[str | None, str]]:
        """An event for each key, each with a value of its own, noted as written."""
        events = [(key, f"{next(self.numbers)}") for key in keys]
        for key, value in events:
            self.written[key].append(value)
        return events

    def settle(self) -> None:
        """Make the model exact, before anyone else writes or looks: what this process's writer still has is stored. Note the place."""
        self.writer.flush()
        self.is_settled = True
        self.cuts.append((hw.Cut.parse(str(self.stream.tail())), {key: len(values) for key, values in self.written.items()}))

    def check(self, events: list[hw.Event], after: dict[str | None, int], before: dict[str | None, int] | None = None) -> None:
        self.check_values(events, {key: values[after[key] : before[key] if before else None] for key, values in self.written.items()})

    def check_values(self, events: list[hw.Event], expected: dict[str | None, list[str]]) -> None:
        found: dict[str | None, list[str]] = {key: [] for key in self.written}
        numbers: dict[int, list[int]] = {}
        for event in events:
            found[event.key.decode() if event.key is not None else None].append(event.value.decode())
            numbers.setdefault(event.position.segment, []).append(event.position.number)
        for key, values in expected.items():
            if key is None:  # no order is promised without a key
                assert sorted(found[key]) == sorted(values)
            else:
                assert found[key] == values, f"key {key}"
        for segment, seen in numbers.items():
            assert seen == list(range(seen[0], seen[0] + len(seen))), f"segment {segment} has a gap or is out of order"

    # Writing.

    @rule(keys=KEYS, flush=st.booleans())
    def write(self, keys: list[str | None], flush: bool) -> None:
        acks = [self.writer.write(value, key=key) for key, value in self.new_events(keys)]
        self.is_settled = False
        if flush:
            positions = [ack.result(60) for ack in acks]
            assert len(set(positions)) == len(positions)
            self.settle()

    @rule(keys=KEYS, flush=st.booleans())
    def write_batch(self, keys: list[str | None], flush: bool) -> None:
        events = self.new_events(keys)
        columns = {"value": [value.encode() for _, value in events], "key": pa.array([key for key, _ in events], pa.string())}
        ack = self.writer.write_batch(pa.table(columns), key="key")
        self.is_settled = False
        if flush:
            assert sum(item.count for item in ack.result(60)) == len(events)
            self.settle()

    @rule(keys=KEYS, as_batch=st.booleans())
    def write_elsewhere(self, keys: list[str | None], as_batch: bool) -> None:
        self.settle()
        self.other.write(self.stream.name, self.new_events(keys), as_batch=as_batch)

    @rule(keys=KEYS, gap=st.integers(1, 5))
    def write_named(self, keys: list[str | None], gap: int) -> None:
        self.settle()
        if self.named is None:
            self.named = self.stream.writer("named")
        assert self.named.last_number == self.last_number
        if self.last_number:
            assert self.named.write("again", number=self.last_number).duplicate
        for key, value in self.new_events(keys):
            self.last_number += gap
            assert not self.named.write(value, key=key, number=self.last_number).duplicate
        self.named.flush()

    @precondition(lambda self: self.named is not None)
    @rule()
    def take_over(self) -> None:
        older, self.named = self.named, self.stream.writer("named")
        assert older is not None and self.named.last_number == self.last_number
        older.write("stale", key="0", number=self.last_number + 1)
        with pytest.raises(hw.FencedError):
            older.flush()
        older.abandon()

    # Scaling, truncating, reopening.

    @rule(grow=st.booleans(), at=CHOICE, parts=st.integers(2, 3))
    def scale(self, grow: bool, at: int, parts: int) -> None:
        self.do_scale(grow, at, parts)

    def do_scale(self, grow: bool, at: int, parts: int) -> None:
        opened = sorted(self.stream.segments(), key=lambda segment: segment.start)
        if len(opened) == 1 or (grow and len(opened) < 9):
            self.stream.split(opened[at % len(opened)].number, parts)
        else:
            first = at % (len(opened) - 1)
            self.stream.merge([opened[first].number, opened[first + 1].number])

    @rule(at=CHOICE)
    def truncate(self, at: int) -> None:
        self.do_truncate(at)

    def do_truncate(self, at: int) -> None:
        cut, counts = self.cuts[at % len(self.cuts)]
        self.stream.truncate(cut)
        self.truncated = {key: max(counts[key], gone) for key, gone in self.truncated.items()}
        self.cuts = [(cut, counts) for cut, counts in self.cuts if all(counts[key] >= gone for key, gone in self.truncated.items())]

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = hw.open(self.path, catalog=self.catalog, create=False)
        self.stream = self.store.stream(self.stream.name)
        self.writer = self.stream.writer()
        self.named = None
        self.settle()

    # Upkeep, and what may happen while it makes a chunk.

    @rule()
    def tend(self) -> None:
        assert self.store.run_upkeep().problems == ()

    @rule(what=st.sampled_from(["truncate", "scale", "fork", "delete", "write", "roll_back"]), at=CHOICE)
    def tend_meanwhile(self, what: str, at: int) -> None:
        """One thing happens between the writing of the next chunk and its swap."""
        storage: Any = self.store._engine.storage
        write = storage.write

        def meanwhile(key: str, produce: Any, push: Any = None) -> None:
            write(key, produce, push)
            if vars(storage).pop("write", None) is not None:
                self.act(what, at)

        storage.write = meanwhile
        try:
            assert self.store.run_upkeep().problems == ()
        finally:
            vars(storage).pop("write", None)

    def act(self, what: str, at: int) -> None:
        if what == "truncate":
            self.do_truncate(at)
        elif what == "scale":
            self.do_scale(at % 2 == 0, at, 2)
        elif what == "fork":
            self.do_fork(at)
        elif what == "delete" and self.forks:
            self.do_delete(at)
        elif what == "roll_back":
            self.do_roll_back(at)
        elif what == "write":
            for key, value in self.new_events(["0", None, "1"]):
                self.writer.write(value, key=key)
            self.settle()

    @rule(at=CHOICE)
    def fork(self, at: int) -> None:
        self.do_fork(at)

    def do_fork(self, at: int) -> None:
        cut, counts = self.cuts[at % len(self.cuts)]
        name = f"{self.stream.name}-{next(self.numbers)}"
        try:
            self.stream.fork(name, at=cut)
        except hw.TruncatedError:
            return  # As in `read_between`: a cut through a segment that is gone.
        self.forks[name] = {key: values[self.truncated[key] : counts[key]] for key, values in self.written.items()}
        if len(self.forks) > 3:
            self.do_delete(0)

    @rule(at=CHOICE)
    def roll_back(self, at: int) -> None:
        self.do_roll_back(at)

    def do_roll_back(self, at: int) -> None:
        """The stream ends at a place again; what it was is one more stream, and places past that place are stale for good."""
        self.settle()
        # Mostly not far: rules that follow need something to work on.
        place = max(0, len(self.cuts) - 1 - at % 8)
        cut, counts = self.cuts[place]
        name = f"{self.stream.name}-{next(self.numbers)}"
        try:
            self.stream.roll_back(cut, keep_as=name, force=True)
        except hw.TruncatedError:
            return  # As in `read_between`.
        self.forks[name] = {key: values[self.truncated[key] :] for key, values in self.written.items()}
        self.stale += [late for late, more in self.cuts[place + 1 :] if any(more[key] > counts[key] for key in counts)]
        self.written = {key: values[: counts[key]] for key, values in self.written.items()}
        self.cuts = self.cuts[: place + 1]
        # A later place is undone even if no event lies between: a scale may.
        if self.held is not None and self.held[2] not in [kept for kept, _ in self.cuts]:
            self.store.release("reader")
            self.held = None
        if len(self.forks) > 3:
            self.do_delete(0)

    @rule(at=CHOICE)
    def read_stale(self, at: int) -> None:
        if self.stale:
            with pytest.raises(hw.RolledBackError) as caught:
                self.stream.ranges(self.stale[at % len(self.stale)])
            # Where to read on is a place that is left.
            assert caught.value.cut is not None
            self.stream.ranges(caught.value.cut)

    # No preconditions from here on: whether there is a fork or a hold depends on how events came to lie in blocks, which is not the
    # same each time.
    @rule(at=CHOICE, keys=KEYS)
    def write_to_fork(self, at: int, keys: list[str | None]) -> None:
        if not self.forks:
            return
        name = list(self.forks)[at % len(self.forks)]
        if self.store.stream(name).is_sealed:
            return  # It is what the stream was before a roll-back.
        with self.store.stream(name).writer() as writer:
            for key in keys:
                value = f"{next(self.numbers)}"
                self.forks[name][key].append(value)
                writer.write(value, key=key)

    @rule(at=CHOICE)
    def delete_fork(self, at: int) -> None:
        if self.forks:
            self.do_delete(at)

    def do_delete(self, at: int) -> None:
        name = list(self.forks)[at % len(self.forks)]
        del self.forks[name]
        self.store.stream(name).seal()
        self.store.delete_stream(name)

    @rule(at=CHOICE)
    def hold(self, at: int) -> None:
        """A reader keeps what lies between the head and a place, also what is truncated."""
        cut, counts = self.cuts[at % len(self.cuts)]
        start = self.stream.head()
        try:
            self.stream.ranges(start, cut)
        except hw.TruncatedError:
            return  # As in `read_between`.
        self.store.hold("reader", start, cut, 3600)
        self.held = (start, dict(self.truncated), cut, counts)

    @rule(again=st.booleans(), release=st.booleans())
    def read_held(self, again: bool, release: bool) -> None:
        if self.held is None:
            return
        start, after, cut, before = self.held
        if again:
            self.store.hold("reader", start, cut, 3600)
        self.check(list(self.stream.read(start, cut)), after, before)
        if release:
            self.store.release("reader")
            self.held = None

    # Reading.

    @rule()
    def read_all(self) -> None:
        self.settle()
        self.check(list(self.stream.read()), self.truncated)
        for name, expected in self.forks.items():
            self.check_values(list(self.store.stream(name).read()), expected)
        rows: list[Any] = [row for item in self.stream.ranges() for batch in item.to_batches() for row in batch.to_pylist()]
        assert sorted(row["value"] for row in rows) == sorted(event.value for event in self.stream.read())

    @rule(one=CHOICE, other=CHOICE)
    def read_between(self, one: int, other: int) -> None:
        first, last = sorted((one % len(self.cuts), other % len(self.cuts)))
        (start, after), (end, before) = self.cuts[first], self.cuts[last]
        try:
            events = list(self.stream.read(start, end))
        except hw.TruncatedError as error:
            # A cut through a segment that is gone, though nothing of it was left to read: the head is given instead.
            if error.head != self.stream.head():
                raise
            self.settle()
            self.check(list(self.stream.read(error.head)), self.truncated)
        else:
            self.check(events, after, before)

    @invariant()
    def counts_are_right(self) -> None:
        if not self.is_settled:
            return
        expected = sum(len(values) - self.truncated[key] for key, values in self.written.items())
        head, tail = self.stream.head(), self.stream.tail()
        assert sum(item.count for item in self.stream.ranges(head, tail)) == expected
        assert {segment.number for segment in self.stream.segments()} == set(tail.streams[self.stream.name].segments)

    def teardown(self) -> None:
        if hasattr(self, "stream"):
            self.read_all()
            self.tend()
            self.read_all()
            self.check_whole()
        self.store.close()

    def check_whole(self) -> None:
        """The rows fit together; and when all streams are deleted, none of those is left that lead to data."""
        report = check_store(self.store)
        assert report.ok, report.problems
        for _ in range(len(self.forks)):
            self.do_delete(0)
        self.store.release("reader")
        self.stream.seal()
        self.store.delete_stream(self.stream.name)
        self.tend()
        query = self.store._engine.database.query
        for table in (
            "segment",
            "extent",
            "inline_block",
            "dead_log",
            "tier",
            "base",
            "pin",
            "tag",
            "lease",
            "undone",
            "roll_back",
            "fork_point",
        ):
            assert query(f"SELECT count(*) FROM {table}") == [(0,)], table


@pytest.mark.slow
@pytest.mark.timeout(900)  # a failure is made small before it is shown, which takes its time
def test_a_stream_behaves_like_a_dict_of_lists(tmp_path: Path, catalog_url: str | None) -> None:
    profile = hypothesis.settings.default
    assert profile is not None
    # A step costs more on PostgreSQL: fewer examples there, where the same client runs on the same contract.
    examples = profile.max_examples if catalog_url is None else profile.max_examples // 6
    settings = hypothesis.settings(profile, max_examples=examples, stateful_step_count=40)
    hw.open(tmp_path / "store", catalog=catalog_url).close()
    with SecondProcess(tmp_path / "store", catalog_url) as other:
        make: Any = lambda: Machine(tmp_path / "store", catalog_url, other)  # noqa: E731
        run_state_machine_as_test(make, settings=settings)
