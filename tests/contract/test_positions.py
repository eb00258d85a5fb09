"""Positions that readers store: none lies past a tail, and a commit that runs again after a lost answer stores the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

import headwater as hw
from headwater.catalog import groups
from headwater.check import check_store

STREAM = "g/in"
FAR = 1 << 60


@pytest.fixture(params=["sqlite", "postgresql", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[hw.Store]:
    url, catalog = str(tmp_path / "store"), None
    if request.param == "memory":
        url = f"memory://{request.node.name}"
    elif request.param == "postgresql":
        catalog = str(request.getfixturevalue("postgres_url"))
    with hw.open(url, catalog=catalog) as store:
        yield store
        report = check_store(store)
        assert report.ok, report.problems


class Seat(NamedTuple):
    """A reader of a group as the catalog knows it."""

    store: hw.Store
    group: hw.ReaderGroup
    name: str
    generation: int
    group_generation: int

    def report(self) -> dict[groups.Key, int]:
        """The positions of the segments that it holds."""
        turn = self.store._engine.run(groups.report, self.group._row.id, self.name, self.generation)
        return {(item.stream, item.segment): item.position for item in turn.mine}

    def commit(self, positions: Mapping[groups.Key, int], give: list[groups.Key] | None = None) -> None:
        place = self.group._row.id, self.name, self.generation, self.group_generation
        self.store._engine.run(groups.commit_positions, *place, positions, give or [])

    def answer(self, checkpoint: int, positions: Mapping[groups.Key, int]) -> None:
        self.store._engine.run(groups.answer_checkpoint, self.group._row.id, self.name, self.generation, checkpoint, positions)


def join(store: hw.Store, name: str, segments: int = 1) -> Seat:
    """A seat in the group of a stream with ten events."""
    if STREAM not in store.streams():
        with store.create_stream(STREAM, scaling=hw.Scaling.fixed(segments)).writer() as writer:
            for number in range(10):
                writer.write(str(number), key=str(number))
    group = store.reader_group("group", [STREAM])
    generation, group_generation, _ = store._engine.run(groups.join_group, group._row.id, name)
    seat = Seat(store, group, name, generation, group_generation)
    seat.report()
    return seat


def positions(group: hw.ReaderGroup) -> dict[int, int]:
    return dict(group.positions().streams[STREAM].segments)


def tails(store: hw.Store) -> dict[int, int]:
    return dict(store.stream(STREAM).tail().streams[STREAM].segments)


@pytest.mark.parametrize("number", [11, FAR, 1 << 80, -1])
def test_a_position_where_no_event_was_is_refused_and_nothing_is_stored(store: hw.Store, number: int) -> None:
    seat = join(store, "r", segments=2)
    first, second = seat.report()
    before = positions(seat.group)
    with pytest.raises((hw.ConflictError, hw.InvalidRequestError)):
        seat.commit({first: tails(store)[first[1]], second: number}, [first])
    assert positions(seat.group) == before
    assert set(seat.report()) == {first, second}
    seat.commit({key: tails(store)[key[1]] for key in (first, second)})
    assert seat.group.lag().events == 0


def test_a_reader_past_the_tail_reads_on_from_the_durable_position(store: hw.Store) -> None:
    seat = join(store, "other")
    seat.group.remove_reader("other")
    with seat.group.reader("r", commit="manual") as reader:
        assert [reader.read(timeout=10) is not None for _ in range(10)] == [True] * 10
        (held,) = reader._held.values()
        held.handed = held.settled = FAR
        with pytest.raises(hw.ConflictError, match="past its tail 10"):
            reader.commit()
        assert positions(seat.group) == {0: 0}
        event = reader.read(timeout=10)
        assert event is not None and event.value == b"0"


def test_a_transaction_with_a_position_past_the_tail_is_refused(store: hw.Store) -> None:
    store.create_stream("g/out")
    seat = join(store, "other")
    seat.group.remove_reader("other")
    with seat.group.reader("r", commit="manual") as reader:
        assert reader.read(timeout=10) is not None
        (held,) = reader._held.values()
        tx = store.transaction()
        tx.write("g/out", b"x")
        held.handed = held.settled = FAR
        tx.commit_reader(reader)
        with pytest.raises(hw.ConflictError, match="past its tail 10"):
            tx.commit()
    assert positions(seat.group) == {0: 0}
    assert list(store.stream("g/out").read()) == []


def test_an_answer_past_the_tail_is_no_part_of_a_checkpoint(store: hw.Store) -> None:
    seat = join(store, "r")
    (key,) = seat.report()
    number = store._engine.run(groups.request_checkpoint, seat.group._row.id)
    with pytest.raises(hw.ConflictError, match="past its tail 10"):
        seat.answer(number, {key: 11})
    missing, found = store._engine.run(groups.read_checkpoint, seat.group._row.id, number)
    assert missing == ["r"] and found == {key[0]: {0: 0}}
    seat.answer(number, {key: 10})
    assert store._engine.run(groups.read_checkpoint, seat.group._row.id, number) == ([], {key[0]: {0: 10}})


def test_an_answer_to_a_checkpoint_that_nobody_asked_for_is_refused(store: hw.Store) -> None:
    seat = join(store, "r")
    (key,) = seat.report()
    number = store._engine.run(groups.request_checkpoint, seat.group._row.id)
    with pytest.raises(hw.ConflictError, match="nobody asked"):
        seat.answer(FAR * 2, {key: 1})
    assert store._engine.run(groups.read_checkpoint, seat.group._row.id, number)[0] == ["r"]


def test_a_commit_that_runs_again_stores_the_same(store: hw.Store) -> None:
    seat = join(store, "r")
    (key,) = seat.report()
    for _ in range(2):
        seat.commit({key: 4})
        assert positions(seat.group) == {0: 4}


def test_a_commit_to_the_end_of_a_segment_runs_again(store: hw.Store) -> None:
    seat = join(store, "r")
    (key,) = seat.report()
    store.stream(STREAM).split(0)
    for _ in range(2):
        seat.commit({key: 10})
        assert set(positions(seat.group)) == {1, 2}
    with pytest.raises(hw.ConflictError, match="is at 10 in segment 0, behind 9"):
        seat.commit({key: 9})
    with pytest.raises(hw.FencedError):
        seat.commit({key: 11})
    with pytest.raises(hw.FencedError):
        seat.commit({(key[0], 3): 0})
    with pytest.raises(hw.FencedError):
        seat.commit({(key[0] + 1, 0): 0})


def test_a_commit_to_the_end_of_a_sealed_stream_runs_again(store: hw.Store) -> None:
    seat = join(store, "r")
    (key,) = seat.report()
    store.stream(STREAM).seal()
    for _ in range(2):
        seat.commit({key: 10})
        assert positions(seat.group) == {0: 10}
    with pytest.raises(hw.ConflictError, match="is at 10 in segment 0, behind 9"):
        seat.commit({key: 9})


def test_a_commit_to_the_end_of_a_segment_runs_again_after_the_segment_was_truncated(store: hw.Store) -> None:
    seat = join(store, "r")
    (key,) = seat.report()
    stream = store.stream(STREAM)
    stream.split(0)
    seat.commit({key: 10})
    stream.truncate(stream.tail())
    seat.commit({key: 10})
    assert set(positions(seat.group)) == {1, 2}


def test_a_commit_that_gives_a_segment_up_runs_again_while_another_reader_is_past_it(store: hw.Store) -> None:
    seat = join(store, "r", segments=2)
    first, second = seat.report()
    heir = join(store, "heir")
    half = {first: tails(store)[first[1]] // 2}
    seat.commit(half, [first])
    assert set(heir.report()) == {first}
    for number in (half[first], tails(store)[first[1]]):
        heir.commit({first: number})
        seat.commit(half, [first])
        assert positions(seat.group)[first[1]] == number
        assert set(heir.report()) == {first}, "it is not taken from the heir"
    with pytest.raises(hw.FencedError):
        join(store, "late").commit({second: 1})


def test_a_segment_that_another_reader_took_over_is_not_committed_further(store: hw.Store) -> None:
    seat = join(store, "r", segments=2)
    first, second = seat.report()
    heir = join(store, "heir")
    seat.commit({}, [first])
    assert set(heir.report()) == {first}
    before = positions(seat.group)
    with pytest.raises(hw.FencedError, match="no longer holds"):
        seat.commit({first: 1, second: 1})
    assert positions(seat.group) == before
