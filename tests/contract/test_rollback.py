"""Rolling a stream back: it ends at a cut again, nothing is lost, and whoever is past the cut is told, for good."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

import headwater as hw
from headwater.check import check_store
from tests.contract.writing import values
from tests.contract.writing import write_some as write

OLD = "a/x.old"


@pytest.fixture
def stream(store: hw.Store) -> hw.Stream:
    return store.create_stream("a/x", scaling=hw.Scaling.fixed(2))


def sorted_values(stream: hw.Stream, *places: Any) -> list[bytes]:
    return sorted(values(stream, *places))


def test_the_stream_ends_at_the_cut_and_all_of_it_is_kept(store: hw.Store, stream: hw.Stream) -> None:
    write(stream, 20)
    before = values(stream)
    cut = stream.tail()
    write(stream, 20)
    stream.split(0)
    write(stream, 20)
    whole = values(stream)
    stream.roll_back(cut, keep_as=OLD, force=True)
    assert values(stream) == before and stream.is_sealed is False
    kept = store.stream(OLD)
    assert values(kept) == whole and kept.is_sealed
    assert len(stream.segments()) == 3, "as many as were open"
    write(stream, 10)
    assert values(stream)[: len(before)] == before and len(values(stream)) == 30 and values(kept) == whole
    # Numbers of segments are never used again, so no position means two events.
    assert sorted(segment.number for segment in stream.segments()) == [4, 5, 6]


def _uses_of(store: hw.Store, stream: hw.Stream, cut: hw.Cut, place: hw.Cut) -> list[Callable[[], Any]]:
    return [
        lambda: list(stream.read(place)),
        lambda: list(stream.read("head", place)),
        lambda: next(stream.read(place, follow=True)),
        lambda: stream.ranges(place),
        lambda: stream.to_arrow(place),
        lambda: stream.truncate(place),
        lambda: stream.fork("a/f", place),
        lambda: store.tag("t", place),
        lambda: store.keep_from("k", place),
        lambda: store.advance(place),
        lambda: store.advance(cut, end=place),
        lambda: store.reader_group("g", ["a/x"], place),
        lambda: stream.roll_back(place, keep_as="a/other", force=True),
    ]


def test_every_place_past_the_cut_says_where_to_read_on_for_good(store: hw.Store, stream: hw.Stream) -> None:
    write(stream, 20)
    cut = stream.tail()
    write(stream, 20)
    places = [stream.tail()]
    stream.merge([0, 1])
    places.append(stream.tail())
    write(stream, 20)
    places.append(stream.tail())
    stream.roll_back(cut, keep_as=OLD, force=True)
    for again in range(2):
        for place in places:
            calls = _uses_of(store, stream, cut, place)
            for call in calls:
                with pytest.raises(hw.RolledBackError, match=OLD) as caught:
                    call()
                assert caught.value.cut == cut
                assert pickle.loads(pickle.dumps(caught.value)).cut == cut
        write(stream, 5)
        store.run_upkeep()
        if not again:
            stream.split(stream.segments()[0].number)
    store.delete_stream(OLD)
    with pytest.raises(hw.RolledBackError) as caught:
        stream.ranges(places[0])
    assert caught.value.cut == cut
    assert store.stream("a/x").ranges(cut) and len(values(stream)) == 30


def test_a_place_that_is_past_the_cut_in_one_segment_reads_on_from_before_in_the_other(store: hw.Store, stream: hw.Stream) -> None:
    write(stream, 20)
    middle = stream.tail()
    write(stream, 20)
    cut = stream.tail()
    write(stream, 20)
    late = stream.tail()

    def numbers(cut: hw.Cut) -> dict[int, int]:
        return dict(cut.streams["a/x"].segments)

    mixed = hw.Cut(store.id, {"a/x": type(late.streams["a/x"])(stream.id, {0: numbers(late)[0], 1: numbers(middle)[1]})})
    stream.roll_back(cut, keep_as=OLD, force=True)
    with pytest.raises(hw.RolledBackError) as caught:
        stream.ranges(mixed)
    assert caught.value.cut is not None
    assert numbers(caught.value.cut) == {0: numbers(cut)[0], 1: numbers(middle)[1]}


def test_it_can_be_done_again_and_again(store: hw.Store, stream: hw.Stream, seed: int) -> None:
    chance = random.Random(seed)
    cuts = [(stream.tail(), values(stream))]
    stale: list[tuple[hw.Cut, int]] = []
    for turn in range(12):
        for _ in range(chance.randrange(1, 4)):
            write(stream, chance.randrange(6))
            if chance.random() < 0.5:
                opened = sorted(stream.segments(), key=lambda segment: segment.start)
                if chance.random() < 0.5 and len(opened) > 1:
                    stream.merge([opened[0].number, opened[1].number])
                else:
                    stream.split(chance.choice(opened).number)
            if chance.random() < 0.3:
                store.run_upkeep()
            cuts.append((stream.tail(), values(stream)))
        whole = values(stream)
        place = chance.randrange(len(cuts))
        cut, found = cuts[place]
        stream.roll_back(cut, keep_as=f"a/old-{turn}", force=True)
        assert sorted_values(stream) == sorted(found) and sorted_values(store.stream(f"a/old-{turn}")) == sorted(whole)
        stale += [(late, place) for late, events in cuts[place + 1 :] if len(events) > len(found)]
        cuts = cuts[: place + 1]
        if chance.random() < 0.3:
            store.delete_stream(f"a/old-{turn}")
        for known, events in cuts:
            assert sorted_values(stream, "head", known) == sorted(events)
        for late, back_to in stale:
            with pytest.raises(hw.RolledBackError) as caught:
                stream.ranges(late)
            assert caught.value.cut is not None
            # Where to read on is a place that is left, not past any that it was rolled back to.
            assert len(values(stream, "head", caught.value.cut)) <= len(cuts[min(back_to, len(cuts) - 1)][1])


def test_writers_transactions_forks_and_running_readers_don_t_stand_in_the_way(store: hw.Store, stream: hw.Stream) -> None:
    named, anonymous = stream.writer("w"), stream.writer()
    for number in range(1, 11):
        named.write(b"n%d" % number, number=number)
        anonymous.write(b"a%d" % number, key=str(number))
    named.flush()
    anonymous.flush()
    cut = stream.tail()
    tx = store.transaction()
    tx.write("a/x", b"staged", key="k")
    tx.flush()
    fork = stream.fork("a/fork")
    with pytest.raises(hw.RolledBackError):
        named.write(b"n11", number=11).result()
        anonymous.write(b"a11", key="k").result()
        reader = stream.read()
        first = next(reader)
        stream.roll_back(cut, keep_as=OLD, force=True)
        assert len([first, *reader]) == 22, "it was planned before"
        stream.ranges(_renamed(store.stream(OLD).tail(), stream))
    with pytest.raises(hw.TransactionEndedError, match="rolled back"):
        tx.commit()
    named.write(b"n11 again", number=11)
    assert named.write(b"n12", number=12).result() is not None
    assert anonymous.write(b"a12", key="k").result() is not None
    assert named.last_number == 12
    named.close()
    anonymous.close()
    assert len(values(stream)) == 22 and len(values(fork)) == 20 and len(values(store.stream(OLD))) == 22


def _renamed(cut: hw.Cut, stream: hw.Stream) -> hw.Cut:
    """A cut of what a stream was, as it was before the roll-back."""
    [part] = cut.streams.values()
    return hw.Cut(cut.store, {stream.name: part._replace(id=stream.id)})


def test_a_follower_past_the_cut_is_told_and_one_before_it_goes_on(store: hw.Store, stream: hw.Stream) -> None:
    write(stream, 10)
    cut = stream.tail()
    early, late = stream.read(follow=True), stream.read(follow=True)
    write(stream, 10)
    stream.merge([0, 1])
    write(stream, 10)
    for _ in range(30):
        next(late)
    stream.roll_back(cut, keep_as=OLD, force=True)
    write(stream, 5)
    with pytest.raises(hw.RolledBackError, match=OLD) as caught:
        next(late)
    assert caught.value.cut == cut
    assert sorted(next(early).value for _ in range(15)) == sorted_values(stream)


def test_a_follower_in_the_middle_of_a_segment_goes_on_up_to_the_cut_and_then_with_what_came_after(store: hw.Store) -> None:
    stream = store.create_stream("a/one")
    for _ in range(300):
        write(stream, 1)
    follower = stream.read(follow=True)
    seen = [next(follower).value for _ in range(3)]
    cut = stream.tail()
    for _ in range(300):
        write(stream, 1)
    stream.split(0)
    write(stream, 3)
    stream.roll_back(cut, keep_as=OLD, force=True)
    write(stream, 7)
    seen += [next(follower).value for _ in range(304)]
    assert seen[:300] == values(stream, "head", cut) and sorted(seen) == sorted_values(stream)


def test_ranges_that_were_planned_before_are_read_up_to_the_cut_and_then_raise(store: hw.Store) -> None:
    stream = store.create_stream("a/one")
    write(stream, 10)
    cut = stream.tail()
    write(stream, 10)
    first = stream.ranges(cut)
    stream.split(0)
    write(stream, 10)
    planned = stream.ranges()
    stream.roll_back(cut, keep_as=OLD, force=True)
    for part in [*pickle.loads(pickle.dumps(planned)), *first]:
        with pytest.raises(hw.RolledBackError, match=OLD) as caught:
            list(part.to_batches())
        assert caught.value.cut == cut


def test_groups_past_the_cut_go_back_to_it_and_their_readers_are_told(store: hw.Store, stream: hw.Stream) -> None:
    # Enough that three events of a segment lie before the cut, whichever keys they have.
    write(stream, 30)
    cut = stream.tail()
    write(stream, 10)
    stream.split(0)
    write(stream, 10)
    past, before, handed = (store.reader_group(name, ["a/x"]) for name in ("past", "before", "handed"))
    with (
        past.reader("r", commit="manual") as reader,
        handed.reader("r", commit="manual") as holder,
        before.reader("r", commit="manual") as early,
    ):
        assert len(_read_all(reader)) == 50
        seen = [early.read(timeout=30) for _ in range(3)]
        early.commit()
        given = 0
        while given < 35:
            given += holder.read(timeout=30) is not None
        stream.roll_back(cut, keep_as=OLD, force=True)
        assert past.positions() == cut
        write(stream, 5)
        with pytest.raises(hw.RolledBackError) as caught:
            _read_all(reader)
        assert caught.value.cut == cut
        assert len(_read_all(reader)) == 5
        with pytest.raises(hw.RolledBackError):
            holder.commit()
        assert len(_read_all(holder)) == 35
        assert len(_read_all(early)) == 32 and None not in seen
    with past.reader("new") as reader:
        assert _read_all(reader) == [], "told once, and only those that were there"


def _read_all(reader: hw.Reader) -> list[Any]:
    """All that a manual reader gets, and commits."""
    found: list[Any] = []
    while True:
        before = len(found)
        while (event := reader.read(timeout=0.3)) is not None:
            found.append(event.value)
        reader.commit()
        if before == len(found):
            return found


def test_a_roll_back_between_a_reader_s_report_and_its_look_is_no_truncation(
    store: hw.Store, stream: hw.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(stream, 10)
    cut = stream.tail()
    for segment in stream.segments():
        stream.split(segment.number)
    write(stream, 10)
    group = store.reader_group("g", ["a/x"])
    with group.reader("first", commit="manual") as first:
        while not (first.read(timeout=1) is None and first.at_tail):
            first.commit()
    reader = group.reader("second")
    take = reader._take

    def take_late(positions: Any) -> None:
        monkeypatch.undo()
        stream.roll_back(cut, keep_as=OLD, force=True)
        take(positions)

    monkeypatch.setattr(reader, "_take", take_late)
    with reader, pytest.raises(hw.RolledBackError) as caught:
        reader.read(timeout=30)
    assert caught.value.cut == cut


def test_a_reader_that_leaves_past_the_cut_is_told_and_has_left(store: hw.Store, stream: hw.Stream) -> None:
    write(stream, 10)
    cut = stream.tail()
    write(stream, 10)
    group = store.reader_group("g", ["a/x"])
    reader = group.reader("r")
    for _ in range(20):
        assert reader.read(timeout=5) is not None
    stream.roll_back(cut, keep_as=OLD, force=True)
    with pytest.raises(hw.RolledBackError) as caught:
        reader.close()
    assert caught.value.cut is not None and group.readers() == []
    reader.close()
    with group.reader("s") as other:
        assert [other.read(timeout=5) is not None for _ in range(10)] == [True] * 10


def test_what_must_be_removed_first(store: hw.Store, stream: hw.Stream) -> None:
    write(stream, 10)
    cut = stream.tail()
    store.tag("early", cut)
    store.keep_from("early", cut)
    group = store.reader_group("early", ["a/x"], end=cut)
    write(stream, 10)
    late = stream.tail()
    stream.split(0)
    store.tag("late", late)
    with pytest.raises(hw.ConflictError, match="tag 'late'"):
        stream.roll_back(cut, keep_as=OLD, force=True)
    store.untag("late")
    store.keep_from("late", stream.tail())
    with pytest.raises(hw.ConflictError, match="keep 'late'"):
        stream.roll_back(cut, keep_as=OLD, force=True)
    store.unkeep("late")
    bounded = store.reader_group("late", ["a/x"], end=late)
    with pytest.raises(hw.ConflictError, match="end of reader group 'late'"):
        stream.roll_back(cut, keep_as=OLD, force=True)
    bounded.delete()
    stream.roll_back(cut, keep_as=OLD, force=True)
    assert store.tags() == {"early": cut} == store.kept() and group.positions() == stream.head()
    stream.truncate(cut)
    assert len(values(stream, "head", cut)) == 10, "the tag keeps what it kept"
    store.untag("early")


def test_a_tag_keeps_what_was_truncated_before_the_roll_back(store: hw.Store, stream: hw.Stream) -> None:
    write(stream, 10)
    tagged = stream.tail()
    found = values(stream)
    store.tag("t", tagged)
    write(stream, 10)
    middle = stream.tail()
    stream.truncate(middle)
    write(stream, 10)
    cut = stream.tail()
    write(stream, 10)
    stream.roll_back(cut, keep_as=OLD, force=True)
    assert values(stream, "head", tagged) == found and len(values(stream)) == 10
    store.delete_stream(OLD)
    store.run_upkeep()
    assert values(stream, "head", tagged) == found and len(values(stream)) == 10


def test_old_and_new_live_and_die_alone(store: hw.Store, stream: hw.Stream) -> None:
    write(stream, 50)
    cut = stream.tail()
    write(stream, 50)
    whole = values(stream)
    store.run_upkeep()
    fork = stream.fork("a/fork", cut)
    stream.roll_back(cut, keep_as=OLD, force=True)
    assert values(store.stream(OLD)) == whole
    left = values(stream)
    store.delete_stream(OLD)
    store.run_upkeep()
    assert values(stream) == left and values(fork) == left
    write(stream, 10)
    stream.roll_back(cut, keep_as=OLD, force=True)
    write(stream, 10)
    store.delete_stream("a/x", seal=True)
    store.run_upkeep()
    assert len(values(store.stream(OLD))) == 60 and values(fork) == left


def test_a_claimed_stream_needs_no_force_and_stays_claimed(store: hw.Store, stream: hw.Stream) -> None:
    cut = stream.tail()
    with pytest.raises(hw.InvalidRequestError, match="force=True"):
        stream.roll_back(cut, keep_as=OLD)
    lease = store.table("a/lease")
    version = lease.put("owner", b"")
    stream.claim("job", ("a/lease", "owner", version))
    for number in range(2):
        with store.transaction() as tx:
            tx.require("a/lease", "owner", version)
            tx.write("a/x", b"%d" % number)
    stream.roll_back(cut, keep_as=OLD)
    assert stream.claimed_by == "job" and values(stream) == [] and len(values(store.stream(OLD))) == 2
    with pytest.raises(hw.ConflictError, match="claimed"):
        write(stream, 1)
    with pytest.raises(hw.ConditionFailedError), store.transaction() as tx:
        tx.require("a/lease", "owner", version + 1)
        tx.roll_back("a/x", cut, keep_as="a/more")
    assert store.streams() == ["a/x", OLD]


def test_several_roll_backs_puts_and_requirements_commit_together(store: hw.Store, stream: hw.Stream) -> None:
    other, table = store.create_stream("a/y"), store.table("a/t")
    log = store.create_stream("a/log")
    version = table.put("k", b"1")
    cut = store.cut(stream, other)
    write(stream, 5)
    write(other, 5)

    def attempt(required: int) -> hw.Commit:
        with store.transaction(marker=hw.Marker("job", required)) as tx:
            tx.require("a/t", "k", required)
            tx.roll_back("a/x", cut, keep_as=OLD, force=True)
            tx.roll_back("a/y", cut, keep_as="a/y.old", force=True)
            tx.put("a/t", "k", b"2")
            tx.write("a/log", b"rolled back")
        return tx.commit()

    with pytest.raises(hw.ConditionFailedError):
        attempt(version + 7)
    assert len(values(stream)) == len(values(other)) == 5 and values(log) == []
    commit = attempt(version)
    assert values(stream) == values(other) == [] and values(log) == [b"rolled back"] and table.get("k") is not None
    assert len(values(store.stream(OLD))) == len(values(store.stream("a/y.old"))) == 5
    assert commit.cut.streams["a/log"] == log.tail().streams["a/log"]
    # One of them can't be done: none is.
    with pytest.raises(hw.AlreadyExistsError), store.transaction() as tx:
        tx.roll_back("a/x", stream.tail(), keep_as="a/x.more", force=True)
        tx.roll_back("a/y", other.tail(), keep_as="a/y.old", force=True)
    assert "a/x.more" not in store.streams()


def test_a_transaction_does_not_write_to_what_it_rolls_back(store: hw.Store, stream: hw.Stream) -> None:
    cut = stream.tail()
    tx = store.transaction()
    tx.write("a/x", b"1")
    with pytest.raises(hw.InvalidRequestError, match="writes to a/x"):
        tx.roll_back("a/x", cut, keep_as=OLD, force=True)
    tx.abort()
    for is_staged in (False, True):
        tx = store.transaction()
        tx.roll_back("a/x", cut, keep_as=OLD, force=True)
        with pytest.raises(hw.InvalidRequestError, match="already"):
            tx.roll_back("a/x", cut, keep_as="a/z", force=True)
        if is_staged:
            tx.flush()
        tx.write("a/x", b"1")
        with pytest.raises(hw.InvalidRequestError, match="in two"):
            tx.commit()
    tx = store.transaction()
    tx.write("a/x", b"1")
    tx.flush()
    tx.roll_back("a/x", cut, keep_as=OLD, force=True)
    with pytest.raises(hw.InvalidRequestError, match="in two"):
        tx.commit()
    assert values(stream) == [] and store.streams() == ["a/x"]


def test_a_journal_is_rolled_back_and_its_index_rebuilt(store: hw.Store) -> None:
    journal = store.journal("a/j", scaling=hw.Scaling.fixed(2))
    for number in range(5):
        journal.persist("one", hw.Record("t", number, tags=("tag",)))
    cut = store.cut("a/j")
    journal.persist("one", hw.Record("t", 99))
    journal.persist("two", hw.Record("t", 99))
    store.stream("a/j").roll_back(cut, keep_as="a/j.old", force=True)
    for call in (lambda: journal.persist("one", hw.Record("t", 1)), lambda: list(journal.replay("one"))):
        with pytest.raises(hw.UnavailableError):
            call()
    store.run_upkeep()
    assert [event.data for event in journal.replay("one")] == list(range(5)) and journal.head("two").sequence == 0
    assert journal.persist("one", hw.Record("t", 5), expected=5).last == 6
    assert [event.data for event in store.journal("a/j.old").replay("two")] == [99]


def test_a_cut_of_the_head_empties_the_stream(store: hw.Store, stream: hw.Stream) -> None:
    write(stream, 10)
    stream.roll_back(stream.head(), keep_as=OLD, force=True)
    assert values(stream) == [] and len(values(store.stream(OLD))) == 10
    stream.roll_back(stream.tail(), keep_as="a/nothing", force=True)
    write(stream, 3)
    assert len(values(stream)) == 3 and values(store.stream("a/nothing")) == []


def test_times_and_watermarks_after_a_roll_back(store: hw.Store, stream: hw.Stream) -> None:
    group = store.reader_group("g", ["a/x"])
    with stream.writer() as writer:
        writer.write(b"1", time=datetime(2026, 1, 1, tzinfo=UTC))
        writer.note_time(datetime(2026, 1, 1, tzinfo=UTC))
    cut = stream.tail()
    with stream.writer() as writer:
        writer.write(b"2", time=datetime(2027, 1, 1, tzinfo=UTC))
        writer.note_time(datetime(2027, 1, 1, tzinfo=UTC))
    stream.roll_back(cut, keep_as=OLD, force=True)
    write(stream, 1)
    assert len(values(stream, stream.cut_at(datetime.now(UTC)))) == 0
    assert len(values(stream)) == 2 and group.lag().events == 2
    group.reset("tail")
    lower = group.time_window().lower
    assert lower is None or lower.year == 2026


def test_what_can_not_be_rolled_back(store: hw.Store, stream: hw.Stream) -> None:
    write(stream, 10)
    cut = stream.tail()
    other = store.create_stream("a/y")
    store.create_scope("b")
    with pytest.raises(hw.InvalidRequestError, match="not of a/x"):
        stream.roll_back(other.tail(), keep_as=OLD, force=True)
    with pytest.raises(hw.InvalidRequestError, match="another store"):
        stream.roll_back(hw.Cut("other", cut.streams), keep_as=OLD, force=True)
    part = cut.streams["a/x"]
    with pytest.raises(hw.InvalidRequestError, match="past the tail"):
        stream.roll_back(hw.Cut(store.id, {"a/x": part._replace(segments={0: 99, 1: 0})}), keep_as=OLD, force=True)
    with pytest.raises(hw.InvalidRequestError, match="once each"):
        stream.roll_back(hw.Cut(store.id, {"a/x": part._replace(segments={0: 0})}), keep_as=OLD, force=True)
    for name in ("a/x", "a/y"):
        with pytest.raises(hw.AlreadyExistsError, match="exists"):
            stream.roll_back(cut, keep_as=name, force=True)
    wrong: Any
    for wrong in ("", "x", None, "a/b/c"):
        with pytest.raises(hw.InvalidRequestError):
            stream.roll_back(cut, keep_as=wrong, force=True)
    for wrong in ("tail", None, datetime.now(UTC)):
        with pytest.raises(hw.InvalidRequestError):
            stream.roll_back(wrong, keep_as=OLD, force=True)
    wrong = "no"
    with pytest.raises(hw.InvalidRequestError):
        stream.roll_back(cut, keep_as=OLD, force=wrong)
    write(stream, 10)
    stream.truncate(stream.tail())
    with pytest.raises(hw.TruncatedError):
        stream.roll_back(cut, keep_as=OLD, force=True)
    raw, table = store.create_stream("a/raw", kind="bytes"), store.table("a/t")
    store.revisioned("a/r").append(b"1")
    table.put("k", b"v")
    for name, match in (("a/raw", "bytes"), ("a/t", r"roll_back\(version\)"), ("a/r", "revisioned")):
        with pytest.raises(hw.InvalidRequestError, match=match):
            store.stream(name).roll_back(store.stream(name).tail(), keep_as=OLD, force=True)
    assert raw.epoch == 0
    stream.seal()
    with pytest.raises(hw.SealedError):
        stream.roll_back(stream.tail(), keep_as=OLD, force=True)
    tail = stream.tail()
    store.delete_stream("a/x")
    with pytest.raises(hw.NotFoundError):
        stream.roll_back(tail, keep_as=OLD, force=True)
    assert OLD not in store.streams()


def test_check_finds_undone_events_and_torn_claims(local_store: hw.Store) -> None:
    stream = local_store.create_stream("a/x", scaling=hw.Scaling.fixed(2))
    write(stream, 10)
    cut = stream.tail()
    write(stream, 10)
    stream.roll_back(cut, keep_as=OLD, force=True)
    database: Any = local_store._engine.database
    for damage, message in (
        ("UPDATE undone SET first = first - 1 WHERE segment = 0", "rolled back to event"),
        ('UPDATE segment SET claim = \'["job", 1, "k", 1]\' WHERE number = 2 AND sealed_epoch IS NULL', "different claims"),
    ):
        assert check_store(local_store).ok
        database.write(lambda tx, damage=damage: tx.run(damage))
        assert any(message in problem.message for problem in check_store(local_store).problems)
        database.write(lambda tx: tx.run("UPDATE undone SET first = first + 1 WHERE segment = 0"))


def test_in_memory(seed: int) -> None:
    with hw.open(f"memory://rollback-{seed}") as store:
        stream = store.create_stream("a/x")
        write(stream, 3)
        cut = stream.tail()
        write(stream, 3)
        stream.roll_back(cut, keep_as=OLD, force=True)
        assert len(values(stream)) == 3 and len(values(store.stream(OLD))) == 6
