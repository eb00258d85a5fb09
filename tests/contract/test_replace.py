"""Replacing a stream by another under its name: what holds of the old one's places in the new one is decided, for all who come by name."""

from __future__ import annotations

from typing import Any

import pytest

import headwater as hw
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
    store.replace_stream("a/x", by="a/y", keep_as=OLD)
    named = store.stream("a/x")
    assert named.id == green.id and values(named) == new and store.streams() == ["a/x", OLD]
    kept = store.stream(OLD)
    assert kept.id == stream.id and kept.is_sealed and values(kept) == old
    assert len(values(named, before)) == 17 and len(values(named, at)) == 7 and len(values(named, before, at)) == 10
    for place in (past, far):
        for _ in range(2):
            with pytest.raises(hw.RolledBackError) as caught:
                named.ranges(place)
            assert caught.value.cut is not None
            assert caught.value.cut.streams["a/x"].id == green.id and len(values(named, caught.value.cut)) == 7
            write(named, 0)
        # It is still a place of the stream that it was made for.
        assert len(values(kept, place)) == len(values(stream, place))
    assert store.advance(at) != at
    with pytest.raises(hw.RolledBackError):
        store.advance(past)
    # Ranges that were made before are of the old stream.
    write(named, 3)
    assert len(values(named)) == 30
    with pytest.raises(hw.SealedError), stream.writer() as writer:
        writer.write(b"x")
    with store.transaction() as tx:
        tx.write("a/x", b"to the new one")
    assert b"to the new one" in values(named)


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
    for place in (late, second.tail()):
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
    for place in (stream.head(), cut):
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
