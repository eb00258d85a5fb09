"""Keeps: floors under which a stream's past may go and above which nothing does; and looks at tails and markers at once."""

from __future__ import annotations

import random
from datetime import timedelta
from typing import Any

import pytest

import headwater as hw
from tests.contract.writing import values
from tests.contract.writing import write_some as write


def test_nothing_from_a_keep_on_is_truncated_or_deleted(store: hw.Store) -> None:
    stream = store.create_stream("a/x")
    write(stream, 10)
    cut = stream.tail()
    store.keep_from("job", cut)
    write(stream, 10)
    assert store.kept() == {"job": cut}
    with pytest.raises(hw.ConflictError, match="keep 'job'"):
        stream.truncate(stream.tail())
    assert len(values(stream)) == 20
    stream.truncate(cut)
    assert len(values(stream)) == 10
    with pytest.raises(hw.ConflictError, match="keeps job"):
        store.delete_stream("a/x", seal=True)
    assert not stream.is_sealed
    store.keep_from("job", stream.tail())
    stream.truncate(stream.tail())
    store.unkeep("job")
    assert store.kept() == {}
    store.delete_stream("a/x", seal=True)


def test_a_keep_keeps_what_segments_made_later_will_hold(store: hw.Store) -> None:
    stream = store.create_stream("a/x", scaling=hw.Scaling.fixed(2))
    write(stream, 20)
    store.keep_from("job", stream.tail())
    merged = stream.merge([0, 1])
    write(stream, 10)
    parts = stream.split(merged[0].number)
    write(stream, 10)
    for cut in (stream.tail(), hw.Cut(store.id, {"a/x": hw.Cut.parse(str(stream.tail())).streams["a/x"]})):
        with pytest.raises(hw.ConflictError):
            stream.truncate(cut)
    assert len(parts) == 2 and len(values(stream, start=store.kept()["job"])) == 20


@pytest.mark.parametrize("retention", [hw.Retention.by_time(timedelta(microseconds=1)), hw.Retention.by_size(1)])
def test_retention_stops_at_a_keep(store: hw.Store, retention: hw.Retention) -> None:
    stream = store.create_stream("a/x", scaling=hw.Scaling.fixed(2), retention=retention)
    write(stream, 20)
    cut = stream.tail()
    store.keep_from("job", cut)
    stream.merge([0, 1])
    write(stream, 20)
    store.run_upkeep()
    assert len(values(stream, start=cut)) == 20 and len(values(stream)) == 20, "what is before it went"
    store.unkeep("job")
    store.run_upkeep()
    assert len(values(stream)) < 20


def test_retention_by_consumption_stops_at_a_keep(store: hw.Store) -> None:
    stream = store.create_stream("a/x", retention=hw.Retention.by_consumption(["g"]))
    group = store.reader_group("g", ["a/x"])
    write(stream, 10)
    cut = stream.tail()
    store.keep_from("job", cut)
    write(stream, 10)
    group.reset("tail")
    store.run_upkeep()
    assert stream.head() == cut


def test_keeps_of_several_streams_and_several_keeps(store: hw.Store, seed: int) -> None:
    chance = random.Random(seed)
    made = [store.create_stream(f"a/{name}", scaling=hw.Scaling.fixed(2)) for name in "xy"]
    floors: dict[str, hw.Cut] = {}
    for turn in range(30):
        stream = chance.choice(made)
        write(stream, chance.randrange(5))
        if chance.random() < 0.3:
            name = chance.choice(["one", "two"])
            floors[name] = store.cut(*chance.sample(made, chance.choice([1, 2])))
            store.keep_from(name, floors[name])
        if chance.random() < 0.2 and floors:
            name = chance.choice(sorted(floors))
            store.unkeep(name)
            del floors[name]
        if chance.random() < 0.3:
            open_ones = sorted(stream.segments(), key=lambda segment: segment.start)
            if len(open_ones) > 1 and turn % 2:
                stream.merge([open_ones[0].number, open_ones[1].number])
            else:
                stream.split(open_ones[0].number)
        kept = {(name, part): values(store.stream(part), start=cut) for name, cut in floors.items() for part in cut.streams}
        try:
            stream.truncate(stream.tail())
        except hw.ConflictError:
            assert any(kept.get((name, stream.name)) for name in floors)
        else:
            assert not any(kept.get((name, stream.name)) for name in floors)
        assert store.kept() == floors
        for (name, part), found in kept.items():
            assert values(store.stream(part), start=floors[name]) == found


def test_what_can_not_be_kept(store: hw.Store) -> None:
    stream = store.create_stream("a/x")
    write(stream, 10)
    head, middle = stream.head(), stream.tail()
    write(stream, 10)
    stream.truncate(middle)
    with pytest.raises(hw.TruncatedError):
        store.keep_from("job", head)
    other: Any
    for other in (None, "tail", hw.Cut(store.id), hw.Cut("other", middle.streams)):
        with pytest.raises(hw.InvalidRequestError):
            store.keep_from("job", other)
    for name in ("", "a/b", None, " "):
        with pytest.raises(hw.InvalidRequestError):
            store.keep_from(name, middle)  # type: ignore[arg-type]
    with pytest.raises(hw.NotFoundError, match="no keep 'job'"):
        store.unkeep("job")
    assert store.kept() == {}
    stream.seal()
    store.keep_from("job", middle)
    store.unkeep("job")
    store.delete_stream("a/x")
    with pytest.raises(hw.NotFoundError):
        store.keep_from("job", middle)


def test_a_look_has_tails_and_markers_of_one_moment(store: hw.Store) -> None:
    x, y = store.create_stream("a/x", scaling=hw.Scaling.fixed(2)), store.create_stream("a/y")
    look = store.look(["a/x", y], ["job", "other"])
    assert look.cut == store.cut(x, y) and look.markers == {"job": None, "other": None}
    with store.transaction(marker=hw.Marker("job", 7, "print")) as tx:
        tx.write("a/x", b"1", key="k")
        tx.write("a/y", b"1")
    after = store.cut(x, y)
    write(x, 3)
    look = store.look([x, y], ["job"])
    assert look.cut == store.cut(x, y) != after
    marker = look.markers["job"]
    assert marker is not None and (marker.owner, marker.sequence, marker.fingerprint, marker.cut) == ("job", 7, "print", after)
    assert store.look(markers=["job"]).markers["job"] == marker
    assert store.look([x]).markers == {} and store.look() == hw.Look(hw.Cut(store.id), {})
    store.delete_stream("a/y", seal=True)
    found = store.look(markers=["job"]).markers["job"]
    assert found is not None and set(found.cut.streams) == {"a/x"}


def test_what_can_not_be_looked_at(store: hw.Store) -> None:
    store.create_stream("a/x")
    wrong: Any
    for wrong in ("job", [""], [None], ["x" * 10_000]):
        with pytest.raises(hw.InvalidRequestError):
            store.look(["a/x"], wrong)
    for wrong in ("a/x", [None], [7], ["x"]):
        with pytest.raises(hw.InvalidRequestError):
            store.look(wrong)
    with pytest.raises(hw.NotFoundError):
        store.look(["a/none"])
