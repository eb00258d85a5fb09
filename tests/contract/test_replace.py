"""Replacing a stream by another under its name: what holds of the old one's places in the new one is decided, for all who come by name."""

from __future__ import annotations

import random
from datetime import UTC, datetime
from typing import Any

import pytest

import headwater as hw
from headwater.streams import reading
from tests.contract.writing import values
from tests.contract.writing import write_some as write

OLD = "a/x.old"


@pytest.fixture
def stream(store: hw.Store) -> hw.Stream:
    return store.create_stream("a/x", scaling=hw.Scaling.fixed(2))


def test_a_fork_takes_the_name_and_places_up_to_the_fork_hold(store: hw.Store, stream: hw.Stream) -> None:
    write(stream, 10)
    before = stream.tail()
    write(stream, 10)
    at = stream.tail()
    green = stream.fork("a/y")
    write(stream, 10)
    past = stream.tail()
    stream.split(0)
    write(stream, 5)
    far = stream.tail()
    write(green, 7)
    old, new = values(stream), values(green)
    old_id, sealed = stream.id, stream.writer()
    store.replace_stream("a/x", by="a/y", keep_as=OLD)
    named = store.stream("a/x")
    assert named.id == green.id and values(named) == new and store.streams() == ["a/x", OLD]
    kept = store.stream(OLD)
    assert kept.id == old_id and kept.is_sealed and values(kept) == old
    assert len(values(named, before)) == 17 and len(values(named, at)) == 7 and len(values(named, before, at)) == 10
    for place in (past, far):
        for _ in range(2):
            with pytest.raises(hw.RolledBackError) as caught:
                named.ranges(place)
            assert caught.value.cut is not None
            assert caught.value.cut.streams["a/x"].id == green.id and len(values(named, caught.value.cut)) == 7
            write(named, 0)
        # It is still a place of the stream that it was made for.
        assert len(values(kept, place)) == (5 if place == past else 0)
    assert store.advance(at) != at
    with pytest.raises(hw.RolledBackError):
        store.advance(past)
    write(named, 3)
    assert len(values(named)) == 30
    with pytest.raises(hw.SealedError), sealed:
        sealed.write(b"x")
    with store.transaction() as tx:
        tx.write("a/x", b"to the new one")
    assert b"to the new one" in values(named)


def test_a_handle_that_was_opened_before_is_of_the_new_stream(store: hw.Store, stream: hw.Stream) -> None:
    write(stream, 10)
    now = datetime.now(UTC)
    handles = [store.stream("a/x") for _ in range(10)]
    green = stream.fork("a/y")
    other = store.stream("a/y")
    write(stream, 10)
    past = stream.tail()
    write(green, 3)
    new, tail, head, at = values(green), green.tail(), green.head(), green.cut_at(now)
    store.replace_stream("a/x", by="a/y", keep_as=OLD)
    assert values(handles[0]) == new and handles[0].id == green.id
    assert handles[1].tail().streams["a/x"] == tail.streams["a/y"] and handles[2].head().streams["a/x"] == head.streams["a/y"]
    assert handles[3].cut_at(now).streams["a/x"] == at.streams["a/y"]
    assert not handles[4].is_sealed and sum(item.count for item in handles[5].ranges()) == 13
    with pytest.raises(hw.RolledBackError):
        handles[6].ranges(past)
    with handles[7].writer() as writer:
        writer.write(b"x")
    with handles[8].writer("w") as named:
        named.write(b"y", number=1).result(60)
        assert named.last_number == 1
    assert len(values(store.stream("a/x"))) == 15
    store.delete_stream(OLD)
    assert len(values(handles[9])) == 15
    # The other stream's own handle knows the new name.
    assert len(values(other)) == 15 and other.tail() == handles[9].tail() and other.name == "a/x"


@pytest.mark.parametrize("key", [None, "k3"])
def test_a_follower_goes_on_in_the_fork_or_is_told_that_it_is_past_it(
    store: hw.Store, stream: hw.Stream, key: str | None, looks_always: None
) -> None:
    before = _some(stream, 0, 20, key)
    early, late = (stream.read(follow=True, key=key) for _ in range(2))
    for follower in (early, late):
        assert sorted(next(follower).value for _ in before) == sorted(before)
    stream.merge([0, 1])
    green = stream.fork("a/y")
    at = green.tail()
    past = _some(stream, 20, 40, key)
    assert [next(late).value for _ in past] == past
    store.replace_stream("a/x", by="a/y", keep_as=OLD)
    after = _some(green, 40, 60, key)
    with pytest.raises(hw.RolledBackError) as caught:
        next(late)
    assert caught.value.cut is not None and caught.value.cut.streams["a/x"].id == green.id
    assert [event.value for event in store.stream("a/x").read(caught.value.cut, key=key)] == after
    # It was not asked for an event since before the merge.
    assert [next(early).value for _ in after] == after
    assert [event.value for event in store.stream("a/x").read(at_new(at, green), key=key)] == after
    green.seal()
    assert list(early) == []


def test_a_busy_follower_hears_of_it_once_a_second(store: hw.Store, stream: hw.Stream) -> None:
    write(stream, 10)
    follower = stream.read(follow=True)
    for _ in range(10):
        next(follower)
    stream.fork("a/y")
    write(stream, 30)
    store.replace_stream("a/x", by="a/y", keep_as=OLD)
    # It reads what is there before it looks. Then it is past the fork, and told so.
    found = 0
    with pytest.raises(hw.RolledBackError) as caught:
        for _ in follower:
            found += 1
    assert found <= 30 and caught.value.cut == store.stream("a/x").tail()


@pytest.fixture
def looks_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Followers look for a replacement before each batch."""
    monkeypatch.setattr(reading, "_LOOK_SECONDS", 0.0)


def at_new(cut: hw.Cut, stream: hw.Stream) -> hw.Cut:
    """A cut of a stream under the name that the stream has now."""
    [part] = cut.streams.values()
    return hw.Cut(cut.store, {"a/x": part})


def _some(stream: hw.Stream, first: int, until: int, key: str | None) -> list[bytes]:
    """Write events of five keys; returns those of one key, or all."""
    with stream.writer() as writer:
        given = [(f"k{number % 5}", str(number).encode()) for number in range(first, until)]
        for own, value in given:
            writer.write(value, key=own).result()
    return [value for own, value in given if key in (None, own)]


def test_a_follower_goes_on_wherever_it_is_while_streams_scale(store: hw.Store, stream: hw.Stream, seed: int, looks_always: None) -> None:
    chance = random.Random(seed)
    count = 0

    def grow(target: hw.Stream) -> None:
        nonlocal count
        for _ in range(chance.randrange(1, 4)):
            opened = sorted(target.segments(), key=lambda segment: segment.start)
            if chance.random() < 0.5 or len(opened) < 2:
                target.split(chance.choice(opened).number)
            else:
                place = chance.randrange(len(opened) - 1)
                target.merge([segment.number for segment in opened[place : place + 2]])
            with target.writer() as writer:
                for _ in range(chance.randrange(8)):
                    writer.write(str(count).encode(), key=f"k{count % 5}").result()
                    count += 1

    grow(stream)
    early, late = stream.read(follow=True), stream.read(follow=True)
    taken = [next(early).value for _ in range(chance.randrange(len(values(stream)) + 1))]
    forked = values(stream)
    green = stream.fork("a/y")
    grow(stream)
    grow(green)
    write(stream, 1)
    for _ in values(stream):
        next(late)
    store.replace_stream("a/x", by="a/y", keep_as=OLD)
    grow(green)
    expected = values(green)
    green.seal()
    assert sorted(taken + [event.value for event in early]) == sorted(expected)
    with pytest.raises(hw.RolledBackError) as caught:
        next(late)
    assert caught.value.cut is not None and sorted(values(green, None, caught.value.cut)) == sorted(forked)


def test_a_follower_of_what_is_replaced_by_no_fork_is_told_where_the_new_stream_begins(store: hw.Store, stream: hw.Stream) -> None:
    write(stream, 10)
    follower = stream.read(follow=True)
    for _ in range(10):
        next(follower)
    new = store.create_stream("a/y")
    write(new, 5)
    store.replace_stream("a/x", by="a/y", keep_as=OLD)
    with pytest.raises(hw.RolledBackError) as caught:
        next(follower)
    assert caught.value.cut == store.stream("a/x").head()
    # The kept stream ends as ever, and a follower of the new one by its old name hears nothing.
    assert len(list(store.stream(OLD).read(follow=True))) == 10


def test_what_was_rolled_back_before_is_refused_in_the_new_stream_too(store: hw.Store, stream: hw.Stream) -> None:
    write(stream, 10)
    cut = stream.tail()
    stream.split(0)
    write(stream, 10)
    late = stream.tail()
    follower = stream.read(follow=True)
    for _ in range(20):
        next(follower)
    stream.roll_back(cut, keep_as="a/undone", force=True)
    write(stream, 5)
    stream.fork("a/y")
    store.replace_stream("a/x", by="a/y", keep_as=OLD)
    named = store.stream("a/x")
    for skip in (False, True):
        with pytest.raises(hw.RolledBackError) as caught:
            named.ranges(late, skip_truncated=skip)
        assert caught.value.cut is not None and len(values(named, caught.value.cut)) == 5
    with pytest.raises(hw.RolledBackError) as caught:
        next(follower)
    assert caught.value.cut is not None and len(values(named, caught.value.cut)) == 5


def test_a_reader_that_handed_out_what_the_new_stream_lacks_is_told(store: hw.Store, stream: hw.Stream) -> None:
    write(stream, 10)
    group = store.reader_group("g", ["a/x"])
    with group.reader("r", commit="manual") as reader:
        for _ in range(10):
            assert reader.read(timeout=5) is not None
        reader.commit()
        green = stream.fork("a/y")
        write(stream, 5)
        write(green, 3)
        for _ in range(5):
            assert reader.read(timeout=5) is not None
        store.replace_stream("a/x", by="a/y", keep_as=OLD)
        with pytest.raises(hw.RolledBackError) as caught:
            _read_all(reader)
        assert caught.value.cut is not None and len(values(store.stream("a/x"), caught.value.cut)) == 3
        assert len(_read_all(reader)) == 3


def test_what_was_replaced_is_not_used_again(store: hw.Store, stream: hw.Stream) -> None:
    write(stream, 10)
    store.create_stream("a/y")
    store.create_stream("a/z")
    store.replace_stream("a/x", by="a/y", keep_as=OLD)
    for name, by in (("a/x", OLD), (OLD, "a/z")):
        with pytest.raises(hw.ConflictError, match="was replaced before"):
            store.replace_stream(name, by=by, keep_as="a/older")
    store.stream(OLD).fork("a/back")
    store.replace_stream("a/x", by="a/back", keep_as="a/newer")
    assert len(values(store.stream("a/x"))) == 10


def test_again_and_again_and_rolled_back_and_deleted(store: hw.Store, stream: hw.Stream) -> None:
    write(stream, 10)
    first = stream.tail()
    stream.fork("a/y")
    write(stream, 5)
    late = stream.tail()
    store.replace_stream("a/x", by="a/y", keep_as="a/old-1")
    second = store.stream("a/x")
    write(second, 5)
    middle = second.tail()
    second.fork("a/z")
    write(second, 5)
    store.replace_stream("a/x", by="a/z", keep_as="a/old-2")
    third = store.stream("a/x")
    assert len(values(third, first)) == 5 and len(values(third, middle)) == 0
    for place in (late, store.stream("a/old-2").tail()):
        with pytest.raises(hw.RolledBackError):
            third.ranges(hw.Cut(store.id, {"a/x": next(iter(place.streams.values()))}))
    third.roll_back(first, keep_as="a/old-3", force=True)
    with pytest.raises(hw.RolledBackError) as caught:
        third.ranges(middle)
    assert caught.value.cut is not None and values(third, caught.value.cut) == []
    assert values(third, first) == []
    for name in ("a/old-1", "a/old-2", "a/old-3"):
        store.delete_stream(name)
    store.run_upkeep()
    with pytest.raises((hw.RolledBackError, hw.InvalidRequestError)):
        third.ranges(late)
    assert len(values(third)) == 10


def test_by_a_stream_that_is_no_fork_no_place_holds(store: hw.Store, stream: hw.Stream) -> None:
    write(stream, 10)
    cut = stream.tail()
    other = store.create_stream("b/y")
    write(other, 4)
    store.replace_stream("a/x", by="b/y", keep_as="c/x")
    named = store.stream("a/x")
    for place in (store.stream("c/x").head(), cut):
        part = next(iter(place.streams.values()))
        with pytest.raises(hw.RolledBackError) as caught:
            named.ranges(hw.Cut(store.id, {"a/x": part}))
        assert caught.value.cut == named.head()
    assert len(values(named)) == 4 and len(values(store.stream("c/x"))) == 10


def test_groups_go_along(store: hw.Store, stream: hw.Stream) -> None:
    write(stream, 10)
    early, past = store.reader_group("early", ["a/x"]), store.reader_group("past", ["a/x"])
    with early.reader("r", commit="manual") as reader, past.reader("r", commit="manual") as other:
        assert len(_read_all(reader)) == 10
        green = stream.fork("a/y")
        own = store.reader_group("own", ["a/y"])
        write(stream, 5)
        write(green, 3)
        assert len(_read_all(other)) == 15
        store.replace_stream("a/x", by="a/y", keep_as=OLD)
        assert early.positions().streams["a/x"].id == green.id
        assert len(_read_all(reader)) == 3
        with pytest.raises(hw.RolledBackError) as caught:
            _read_all(other)
        assert caught.value.cut is not None and len(values(store.stream("a/x"), caught.value.cut)) == 3
        assert len(_read_all(other)) == 3
    for name in ("early", "past", "own"):
        assert store.reader_group(name).streams == ["a/x"]
    assert own.lag().events == 13 and store.reader_group("early").lag().events == 0


def _read_all(reader: hw.Reader) -> list[Any]:
    found: list[Any] = []
    while True:
        before = len(found)
        while (event := reader.read(timeout=0.3)) is not None:
            found.append(event.value)
        reader.commit()
        if before == len(found):
            return found


def test_consumers_that_continue_must_have_read_all(store: hw.Store, stream: hw.Stream) -> None:
    write(stream, 10)
    group = store.reader_group("g", ["a/x"])
    green = store.create_stream("a/y")
    write(green, 20)
    with pytest.raises(hw.ConflictError, match="'g' has not read all"):
        store.replace_stream("a/x", by="a/y", keep_as=OLD, consumers="continue")
    assert store.streams() == ["a/x", "a/y"] and not stream.is_sealed
    group.reset("tail")
    store.replace_stream("a/x", by="a/y", keep_as=OLD, consumers="continue")
    group = store.reader_group("g")
    assert group.lag().events == 0
    write(store.stream("a/x"), 2)
    with group.reader("r", commit="manual") as reader:
        assert len(_read_all(reader)) == 2


def test_a_table_takes_the_name_in_a_commit_with_others(store: hw.Store) -> None:
    table, other = store.table("a/t"), store.table("a/u")
    version = table.put("k", b"old")
    other.put("k", b"new")
    lease = store.table("a/lease").put("k", b"")
    with pytest.raises(hw.ConditionFailedError), store.transaction() as tx:
        tx.require("a/lease", "k", lease + 1)
        tx.replace_stream("a/t", by="a/u", keep_as="a/t.old")
    stale = store.transaction()
    stale.require("a/t", "k", version)
    with store.transaction() as tx:
        tx.require("a/lease", "k", lease)
        tx.replace_stream("a/t", by="a/u", keep_as="a/t.old")
        tx.put("a/lease", "k", b"promoted")
    entry = store.table("a/t").get("k")
    assert entry is not None and entry.value == b"new" and store.tables() == ["a/lease", "a/t", "a/t.old"]
    with pytest.raises(hw.SealedError):
        table.put("k", b"x")
    with pytest.raises(hw.SealedError):
        stale.commit()


def test_tags_and_keeps_stay_with_the_old_stream(store: hw.Store, stream: hw.Stream) -> None:
    write(stream, 10)
    cut = stream.tail()
    found = values(stream)
    store.tag("t", cut)
    store.keep_from("k", cut)
    stream.truncate(cut)
    write(stream, 5)
    store.create_stream("a/y")
    store.replace_stream("a/x", by="a/y", keep_as=OLD)
    kept = store.stream(OLD)
    assert values(kept, "head", cut) == found and len(values(kept)) == 5
    assert set(store.kept()["k"].streams) == {OLD}
    with pytest.raises(hw.ConflictError, match="kept by"):
        store.delete_stream(OLD)


def test_what_can_not_be_replaced(store: hw.Store, stream: hw.Stream) -> None:
    other = store.create_stream("a/y")
    store.table("a/t")
    store.create_stream("a/raw", kind="bytes")
    for by in ("a/t", "a/raw"):
        with pytest.raises(hw.InvalidRequestError, match="kind"):
            store.replace_stream("a/x", by=by, keep_as=OLD)
    with pytest.raises(hw.InvalidRequestError, match="itself"):
        store.replace_stream("a/x", by="a/x", keep_as=OLD)
    for name in ("a/x", "a/y"):
        with pytest.raises(hw.AlreadyExistsError):
            store.replace_stream("a/x", by="a/y", keep_as=name)
    for name, by in (("a/none", "a/y"), ("a/x", "a/none")):
        with pytest.raises(hw.NotFoundError):
            store.replace_stream(name, by=by, keep_as=OLD)
    wrong: Any
    for wrong in (None, "x", "", 7):
        with pytest.raises(hw.InvalidRequestError):
            store.replace_stream("a/x", by="a/y", keep_as=wrong)
        with pytest.raises(hw.InvalidRequestError):
            store.replace_stream("a/x", by="a/y", keep_as=OLD, consumers=wrong)
    bounded = store.reader_group("g", ["a/x"], end=stream.tail())
    with pytest.raises(hw.ConflictError, match="'g' ends"):
        store.replace_stream("a/x", by="a/y", keep_as=OLD)
    bounded.delete()
    both = store.reader_group("g", ["a/x", "a/y"])
    with pytest.raises(hw.ConflictError, match="reads both"):
        store.replace_stream("a/x", by="a/y", keep_as=OLD)
    both.delete()
    for name in ("a/x", "a/y"):
        with pytest.raises(hw.InvalidRequestError, match="in two"), store.transaction() as tx:
            tx.replace_stream("a/x", by="a/y", keep_as=OLD)
            tx.write(name, b"x")
    stream.writer("w").close()
    with pytest.raises(hw.ConflictError, match=r"named writers \(w\)"):
        store.replace_stream("a/x", by="a/y", keep_as=OLD)
    assert store.streams() == ["a/raw", "a/x", "a/y"] and not stream.is_sealed and other.id != stream.id


def test_in_memory(seed: int, looks_always: None) -> None:
    for test in (
        test_a_handle_that_was_opened_before_is_of_the_new_stream,
        test_a_reader_that_handed_out_what_the_new_stream_lacks_is_told,
    ):
        with hw.open(f"memory://replace-{test.__name__}-{seed}") as store:
            test(store, store.create_stream("a/x", scaling=hw.Scaling.fixed(2)))
    for key in (None, "k3"):
        with hw.open(f"memory://replace-{key}-{seed}") as store:
            stream = store.create_stream("a/x", scaling=hw.Scaling.fixed(2))
            test_a_follower_goes_on_in_the_fork_or_is_told_that_it_is_past_it(store, stream, key, looks_always)
