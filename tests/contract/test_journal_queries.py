"""Replaying entities, listing ids, and queries by entity, tag and type: finite and live, hot and from Parquet, across splits and merges."""

from __future__ import annotations

import random
import threading
from itertools import islice, pairwise
from typing import Any

import pytest

import headwater as hw

NAME = "shop/orders"


@pytest.fixture
def j(store: hw.Store) -> hw.Journal:
    return store.journal(NAME, scaling=hw.Scaling.fixed(4))


def record(type: str = "placed", data: Any = 1, **more: Any) -> hw.Record:
    return hw.Record(type, data, **more)


def fill(store: hw.Store, j: hw.Journal, seed: int, rounds: int = 60) -> dict[str, list[Any]]:
    """Persist at random, with splits, merges and tiering in between; returns the data of each entity."""
    rng, stream = random.Random(seed), store.stream(j.name)
    wanted: dict[str, list[Any]] = {}
    for number in range(rounds):
        id = f"e{rng.randrange(12)}"
        data = [f"{number}.{place}" for place in range(rng.choice((1, 1, 1, 2, 5)))]
        tags = [tag for tag in ("rare", "eu", "odd") if rng.random() < {"rare": 0.04, "eu": 0.5, "odd": 0.1}[tag]]
        j.persist(id, [record(rng.choice(("x", "y")), one, tags=(*tags, f"by:{id}")) for one in data], expected=len(wanted.get(id, ())))
        wanted.setdefault(id, []).extend(data)
        if rng.random() < 0.08:
            numbers = [segment.number for segment in stream.segments()]
            if len(numbers) > 5:
                stream.merge(numbers[: rng.choice((2, 3))]) if are_neighbours(stream, numbers[:3]) else stream.split(numbers[0])
            else:
                stream.split(rng.choice(numbers), rng.choice((2, 3)))
        if rng.random() < 0.05:
            store.run_upkeep()
    return wanted


def are_neighbours(stream: hw.Stream, numbers: list[int]) -> bool:
    rows = sorted((segment.start, segment.end) for segment in stream.segments() if segment.number in numbers)
    return all(left[1] == right[0] for left, right in pairwise(rows))


def test_replay_by_range_limit_and_from_the_end(j: hw.Journal) -> None:
    for number in range(1, 30):
        j.persist("a", record(data=number))
        j.persist("other", record(data=-number))
    j.persist("a", [record(data=number) for number in range(30, 201)])

    def found(**more: Any) -> list[int]:
        return [event.data for event in j.replay("a", **more)]

    everything = list(range(1, 201))
    assert found() == everything and found(reverse=True) == everything[::-1]
    assert found(after=10) == everything[10:] and found(until=10) == everything[:10] and found(after=10, until=20) == everything[10:20]
    assert found(limit=3) == [1, 2, 3] and found(after=28, limit=3) == [29, 30, 31] and found(limit=0) == []
    assert found(limit=3, reverse=True) == [200, 199, 198] and found(until=31, limit=3, reverse=True) == [31, 30, 29]
    assert found(after=5, until=7, reverse=True) == [7, 6] and found(after=200) == [] and found(after=300) == [] and found(until=0) == []
    assert list(j.replay("unknown")) == []
    bad: list[dict[str, Any]] = [{"after": -1}, {"until": -1}, {"limit": -1}, {"reverse": "yes"}, {"after": None}, {"limit": 1.5}]
    for more in bad:
        with pytest.raises(hw.InvalidRequestError):
            j.replay("a", **more)


def test_replay_and_queries_agree_with_what_was_persisted(store: hw.Store, j: hw.Journal, seed: int) -> None:
    wanted = fill(store, j, seed)
    for _ in range(2):
        assert list(j.ids()) == sorted(wanted)
        events = list(j.events())
        for id, data in wanted.items():
            assert [event.data for event in j.replay(id)] == data
            assert [event.data for event in j.replay(id, reverse=True)] == data[::-1]
            assert [event.sequence for event in j.events(id=id)] == list(range(1, len(data) + 1))
            assert [event.data for event in events if event.id == id] == data
            assert [event.data for event in j.events(tag=f"by:{id}")] == data
        assert len(events) == sum(map(len, wanted.values()))
        for word in ("rare", "eu", "odd", "nothing"):
            assert [event.position for event in j.events(tag=word)] == [event.position for event in events if word in event.tags]
        for word in ("x", "y", "z"):
            assert [event.position for event in j.events(type=word)] == [event.position for event in events if event.type == word]
        both = [event.position for event in j.events(tag="odd", type="x")]
        assert both == [event.position for event in events if "odd" in event.tags and event.type == "x"]
        store.run_upkeep()


def test_a_query_by_tag_gives_no_event_before_an_older_one(store: hw.Store, j: hw.Journal) -> None:
    # With this seed a segment has no such event, and one of its successors has an older one than a segment beside it.
    fill(store, j, 4)
    times = [event.time for event in j.events(tag="odd")]
    assert times == sorted(times) and len(set(times)) > 1


def test_a_query_goes_on_from_its_cut_without_a_miss_or_a_repeat(store: hw.Store, j: hw.Journal, seed: int) -> None:
    wanted = fill(store, j, seed, 30)
    rng = random.Random(seed)
    for more in ({}, {"tag": "eu"}, {"tag": "odd"}, {"type": "x"}, {"id": "e1"}):
        before = [event.position for event in j.events(**more)]  # type: ignore[arg-type]
        found, cut = [], None
        while True:
            query = j.query(start=cut, **more)  # type: ignore[arg-type]
            some = [event.position for event in islice(query, rng.randrange(1, 6))]
            if not some:
                break
            found += some
            cut = hw.Cut.parse(str(query.cut))
        assert sorted(found) == sorted(before) and len(set(found)) == len(found)
    paused = j.query(end=store.cut(NAME))
    first = [event.position for event in islice(paused, 5)]
    cut = paused.cut
    more_wanted = fill(store, store.journal("shop/more"), seed, 5)
    for id, data in more_wanted.items():
        j.persist(id, [record(data=one) for one in data])
    stream = store.stream(NAME)
    stream.split(stream.segments()[0].number)
    store.run_upkeep()
    rest = [event.position for event in j.events(start=cut)]
    assert len(first) + len(rest) == sum(map(len, wanted.values())) + sum(map(len, more_wanted.values()))
    assert not set(first) & set(rest)


def test_ids_by_prefix_and_page_in_the_order_of_their_bytes(j: hw.Journal) -> None:
    wanted = ["A", "a", "a/1", "a/2", "b", "z", "ß", "\U0001f600"]
    for id in reversed(wanted):
        j.persist(id, record())
    assert list(j.ids()) == wanted == sorted(wanted, key=str.encode)
    assert list(j.ids("a")) == ["a", "a/1", "a/2"] and list(j.ids("a/")) == ["a/1", "a/2"] and list(j.ids("x")) == []
    assert list(j.ids(after="a/1", limit=2)) == ["a/2", "b"] and list(j.ids("a", after="a", limit=1)) == ["a/1"]
    assert list(j.ids(after="\U0001f600")) == [] and list(j.ids(limit=0)) == []
    bad: list[dict[str, Any]] = [{"prefix": 1}, {"prefix": "x" * 513}, {"after": ""}, {"after": 1}, {"limit": -1}, {"follow": 1}]
    for more in bad:
        with pytest.raises(hw.InvalidRequestError):
            j.ids(**more)


def test_ids_are_followed_each_one_once(j: hw.Journal) -> None:
    for id in ("b", "a", "gone"):
        j.persist(id, record())
    j.delete("gone")
    ids = j.ids(follow=True)
    assert [next(ids), next(ids)] == ["a", "b"]
    for id in ("a", "c", "b", "c", "gone", "d"):
        j.persist(id, record())
    assert sorted([next(ids), next(ids), next(ids)]) == ["c", "d", "gone"]
    # Without its events, an entity is still there; a deleted one is new when it is persisted again.
    j.delete_to("a", 2)
    j.persist("a", record())
    j.delete("c")
    j.persist("c", record())
    j.persist("brief", record())
    j.delete("brief")
    j.stream.seal()
    assert list(ids) == ["c"]


def test_live_queries_see_what_was_there_and_what_comes(store: hw.Store, j: hw.Journal) -> None:
    for number in range(10):
        j.persist(f"e{number}", record("x" if number % 2 else "y", number, tags=("eu",) if number % 3 == 0 else ()))
    queries: dict[str, Any] = {
        "tag": j.events(tag="eu", follow=True),
        "type": j.events(type="x", follow=True),
        "id": j.events(id="e3", follow=True),
    }
    assert sorted(event.data for event in islice(queries["tag"], 4)) == [0, 3, 6, 9]
    assert sorted(event.data for event in islice(queries["type"], 5)) == [1, 3, 5, 7, 9]
    assert [event.data for event in islice(queries["id"], 1)] == [3]
    stream = store.stream(NAME)
    stream.split(0)
    j.persist("e3", record("x", 100, tags=("eu",)))
    store.run_upkeep()
    assert [next(query).data for query in queries.values()] == [100, 100, 100]
    stream.seal()
    assert [list(query) for query in queries.values()] == [[], [], []]


def test_an_event_reaches_a_live_query_while_it_waits(j: hw.Journal) -> None:
    query = j.query(tag="eu", start="tail", follow=True)
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.extend(event.data for event in islice(query, 3)))
    thread.start()
    for number in range(6):
        j.persist("a", record(data=number, tags=("eu",) if number % 2 else ()))
    thread.join(timeout=30)
    assert found == [1, 3, 5]


def test_a_query_takes_places_as_a_stream_does(store: hw.Store, j: hw.Journal) -> None:
    j.persist("a", record(data=1))
    cut = store.cut(NAME)
    j.persist("a", record(data=2))
    [_, second] = j.replay("a")
    assert [event.data for event in j.events(start=cut)] == [2] and [event.data for event in j.events(end=cut)] == [1]
    assert list(j.events(start="tail")) == [] and [event.data for event in j.events(start=second.time)] == [2]
    bad: list[dict[str, Any]] = [{"start": 1}, {"tag": "a b"}, {"type": ""}, {"id": ""}, {"follow": 1}, {"follow": True, "end": cut}]
    for more in bad:
        with pytest.raises(hw.InvalidRequestError):
            list(j.events(**more))
    store.create_stream("shop/other")
    with pytest.raises(hw.InvalidRequestError):
        j.query(start=store.cut("shop/other"))


def test_a_query_paused_at_any_place_goes_on_from_its_cut(store: hw.Store, j: hw.Journal) -> None:
    stream = store.stream(NAME)
    stream.merge([segment.number for segment in stream.segments()])
    for number in range(32):
        j.persist(f"e{number % 7}", record("xy"[number % 2], number, tags=("eu",) if number % 5 == 0 else ()))
        if number % 6 == 5:
            opened = sorted(stream.segments(), key=lambda segment: segment.start)
            if number % 4 == 3 and len(opened) > 2:
                stream.merge([segment.number for segment in opened[:2]])
            else:
                stream.split(opened[-1].number)
        if number == 15:
            store.run_upkeep()
    wanted: list[dict[str, Any]] = [{}, {"tag": "eu"}, {"type": "x"}, {"id": "e3"}]
    for more in wanted:
        everything = [event.data for event in j.events(**more)]
        for live in (False, True):
            for count in range(len(everything) + 1):
                query = j.query(**more, follow=live)
                given = [event.data for event in islice(query, count)]
                rest = [event.data for event in j.events(**more, start=query.cut)]
                assert sorted(given + rest) == sorted(everything), (more, live, count)


# Deletion and snapshots.


def test_a_deleted_prefix_is_hidden_from_replay_and_queries(store: hw.Store, j: hw.Journal) -> None:
    for number in range(1, 6):
        j.persist("a", record(data=number, tags=("t",)))
    j.persist("b", record(data=6, tags=("t",)))
    live = j.events(tag="t", follow=True)
    j.delete_to("a", 3)
    assert j.head("a") == (5, 4, None)
    for _ in range(2):
        assert [event.sequence for event in j.replay("a")] == [4, 5] == [event.sequence for event in j.replay("a", after=1)]
        assert [event.sequence for event in j.replay("a", reverse=True)] == [5, 4]
        for events in (j.events(), j.events(tag="t"), j.events(type="placed")):
            assert sorted(event.data for event in events) == [4, 5, 6]
        assert [event.data for event in j.events(id="a")] == [4, 5]
        store.run_upkeep()
    assert sorted(event.data for event in islice(live, 3)) == [4, 5, 6]
    j.delete_to("a", 2)
    assert j.head("a").low == 4
    with pytest.raises(hw.InvalidRequestError):
        j.delete_to("a", 6)
    j.delete_to("a", 5)
    assert j.head("a") == (5, 6, None) and list(j.replay("a")) == [] and list(j.ids()) == ["a", "b"]
    assert j.persist("a", record(data=7), expected=5).last == 6
    assert [event.data for event in j.replay("a")] == [7]


def test_a_deleted_entity_is_gone_and_its_next_event_has_the_next_sequence(j: hw.Journal) -> None:
    j.persist("a", [record(), record()])
    j.snapshot("a", 2, {"n": 2})
    j.delete("a")
    j.delete("a")
    j.delete("unknown")
    assert list(j.ids()) == [] and list(j.events()) == [] and list(j.replay("a")) == []
    assert j.head("a") == (2, 3, None) and j.find_snapshot("a") is None
    for expected in (0, hw.EXISTS):
        with pytest.raises(hw.ConditionFailedError) as caught:
            j.persist("a", record(), expected=expected)
        assert caught.value.actual == 2
    assert j.persist("a", record(data="new"), expected=2).first == 3
    assert [event.data for event in j.replay("a")] == ["new"] and list(j.ids()) == ["a"]
    assert j.persist("a", record(), expected=hw.EXISTS).first == 4


def test_snapshots_by_hand_stay_until_they_are_deleted(j: hw.Journal) -> None:
    j.persist("a", [record() for _ in range(10)])
    assert j.find_snapshot("a") is None
    for sequence in (2, 4, 6, 8):
        j.snapshot("a", sequence, {"n": sequence}, version=sequence)
    assert j.find_snapshot("a") == hw.Snapshot(8, {"n": 8}, 8) and j.head("a") == (10, 1, 8)
    assert j.find_snapshot("a", until=7) == (6, {"n": 6}, 6) and j.find_snapshot("a", until=1) is None
    j.snapshot("a", 8, [1], version=9)
    assert j.find_snapshot("a") == (8, [1], 9)
    j.delete_snapshots("a", until=4)
    assert j.find_snapshot("a", until=5) is None and j.find_snapshot("a", until=6) is not None
    j.delete_to("a", 8)
    assert j.find_snapshot("a") == (8, [1], 9) and j.find_snapshot("a", until=7) is None
    j.delete_snapshots("a")
    assert j.find_snapshot("a") is None


def test_bad_snapshots_are_refused(j: hw.Journal) -> None:
    j.persist("a", record())
    bad: list[tuple[Any, ...]] = [
        ("a", 0, 1),
        ("a", 2, 1),
        ("b", 1, 1),
        ("a", 1, b"x"),
        ("a", 1, float("nan")),
        ("a", 1, 1, -1),
        ("a", "1", 1),
    ]
    for args in [*bad, ("a", 1, "x" * 1024 * 1024), ("", 1, 1)]:
        with pytest.raises(hw.InvalidRequestError):
            j.snapshot(*args)
    j.snapshot("a", 1, "x" * (1024 * 1024 - 2))


def test_an_entity_of_many_events_is_read_page_by_page(store: hw.Store, j: hw.Journal) -> None:
    wanted = []
    for number in range(300):
        j.persist("a", record(data=number))
        wanted.append(number)
        if number % 7 == 0:
            j.persist(f"b{number}", record())
    assert [event.data for event in j.replay("a")] == wanted
    assert [event.data for event in j.replay("a", reverse=True)] == wanted[::-1]
    assert [event.data for event in j.replay("a", after=250, until=260)] == wanted[250:260]
    store.run_upkeep()
    j.persist("a", record(data=300))
    assert [event.data for event in j.replay("a")] == [*wanted, 300]
    assert [event.data for event in j.replay("a", reverse=True, limit=50)] == [*wanted, 300][::-1][:50]


# The journal as a stream, and its end.


def test_what_reads_streams_reads_journals(store: hw.Store, j: hw.Journal) -> None:
    wanted = {(f"e{number % 5}", number // 5 + 1): number for number in range(60)}
    for id, sequence in wanted:
        j.persist(id, record(data=wanted[id, sequence], tags=("t",)), expected=sequence - 1)
    j.stream.split(0)
    for _ in range(2):
        columns = ["id", "sequence", "data", "tags", "_key"]
        rows = j.stream.to_arrow(columns=columns).to_pylist()
        assert {(row["id"], row["sequence"]): int(row["data"]) for row in rows} == wanted
        assert all(row["tags"] == ["t"] and row["_key"] == row["id"].encode() for row in rows)
        assert sum(batch.num_rows for part in j.stream.ranges() for batch in part.to_batches(columns=["id"])) == 60
        assert [event.value["sequence"] for event in j.stream.read() if event.key == b"e3"] == list(range(1, 13))
        store.run_upkeep()
    group = store.reader_group("g", [NAME], end=store.cut(NAME))
    with group.reader("r") as reader:
        found = [(event.value["id"], event.value["sequence"]) for event in reader]
    assert sorted(found) == sorted(wanted)
    assert [sequence for id, sequence in found if id == "e3"] == list(range(1, 13))
    assert sum(chunk.count for chunk in j.stream.chunks()) == 60


def test_a_sealed_journal_is_read_and_a_deleted_one_says_so(store: hw.Store, j: hw.Journal) -> None:
    j.persist("a", record())
    j.stream.seal()
    with pytest.raises(hw.SealedError):
        j.persist("a", record())
    assert [event.sequence for event in j.replay("a")] == [1] and list(j.ids()) == ["a"]
    store.delete_stream(NAME)
    calls: list[Any] = [
        lambda: j.persist("a", record()),
        lambda: list(j.replay("a")),
        lambda: list(j.ids()),
        lambda: list(j.ids(follow=True)),
        lambda: list(j.events()),
        lambda: list(j.events(tag="t")),
        lambda: j.head("a"),
        lambda: j.snapshot("a", 1, 1),
        lambda: j.delete("a"),
    ]
    for call in calls:
        with pytest.raises(hw.NotFoundError, match="deleted"):
            call()
    again = store.journal(NAME)
    assert again.persist("a", record(), expected=0).first == 1
