"""A stream against a dict: whatever is written, split, merged, truncated, reopened, by whom ever, each event is read once and in order."""

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
        found: dict[str | None, list[str]] = {key: [] for key in self.written}
        numbers: dict[int, list[int]] = {}
        for event in events:
            found[event.key.decode() if event.key is not None else None].append(event.value.decode())
            numbers.setdefault(event.position.segment, []).append(event.position.number)
        for key, values in self.written.items():
            expected = values[after[key] : before[key] if before else None]
            if key is None:  # no order is promised without a key
                assert sorted(found[key]) == sorted(expected)
            else:
                assert found[key] == expected, f"key {key}"
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
        opened = sorted(self.stream.segments(), key=lambda segment: segment.start)
        if len(opened) == 1 or (grow and len(opened) < 9):
            self.stream.split(opened[at % len(opened)].number, parts)
        else:
            first = at % (len(opened) - 1)
            self.stream.merge([opened[first].number, opened[first + 1].number])

    @rule(at=CHOICE)
    def truncate(self, at: int) -> None:
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

    # Reading.

    @rule()
    def read_all(self) -> None:
        self.settle()
        self.check(list(self.stream.read()), self.truncated)
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
        self.store.close()


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
