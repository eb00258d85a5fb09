"""The index of a journal is made anew from its events: in a fork, after a truncation, as a repair. Until then scans work."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

import headwater as hw
from headwater.catalog import rebuilds
from headwater.model.limits import REBUILD_ROWS
from headwater.model.numbers import parse
from headwater.runtime import failpoints

NAME = "shop/orders"


@pytest.fixture
def j(store: hw.Store) -> hw.Journal:
    return store.journal(NAME, scaling=hw.Scaling.fixed(4))


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    failpoints.arm("")


def record(type: str = "placed", data: Any = 1, **more: Any) -> hw.Record:
    return hw.Record(type, data, **more)


def fill(store: hw.Store, j: hw.Journal, seed: int) -> None:
    """Persist, delete and split at random."""
    rng, stream = random.Random(seed), store.stream(j.name)
    for number in range(80):
        id = f"e{rng.randrange(12)}"
        events = [
            record(rng.choice("xy"), number, tags=rng.sample(["a", "b", f"by:{id}"], rng.randrange(3)))
            for _ in range(rng.choice((1, 1, 40)))
        ]
        j.persist(id, events)
        if rng.random() < 0.1:
            j.delete_to(f"e{rng.randrange(6)}", 1) if j.head("e0").sequence and rng.random() < 0.5 else j.delete(f"e{rng.randrange(6)}")
        if rng.random() < 0.05:
            stream.split(rng.choice([segment.number for segment in stream.segments()]))
        if rng.random() < 0.05:
            store.run_upkeep()


def answers(j: hw.Journal) -> dict[str, Any]:
    """All that a journal says of its entities and words."""
    found: dict[str, Any] = {"ids": list(j.ids()), "all": list(j.events()), "length": len(j.stream.to_arrow())}
    for number in range(12):
        id = f"e{number}"
        found[id] = j.head(id), list(j.replay(id)), list(j.replay(id, reverse=True)), list(j.events(id=id))
        found[f"by:{id}"] = list(j.events(tag=f"by:{id}"))
    return found | {word: (list(j.events(tag=word)), list(j.events(type=word))) for word in ("a", "b", "x", "y")}


def rows(store: hw.Store, j: hw.Journal) -> dict[Any, Any]:
    """The index itself, without the way in which its numbers are divided into pages."""
    query, stream = store._engine.database.query, j._ref.id
    found: dict[Any, Any] = {}
    columns = "id, sequence, low, segment, number, last_count, last_ids, deleted, deletion, paged, recent"
    for id, *row, paged, recent in query(f"SELECT {columns} FROM entity WHERE stream = ? ORDER BY id", (stream,)):
        pages = query("SELECT first, numbers FROM entity_page WHERE stream = ? AND id = ? ORDER BY first", (stream, id))
        found["entity", id] = row, [place for page in (*pages, (paged + 1, recent)) for place in places(*page)]
    columns = "kind, word, segment, number, count, recent"
    for kind, word, segment, *row, recent in query(f"SELECT {columns} FROM word WHERE stream = ?", (stream,)):
        pages = query("SELECT numbers FROM word_page WHERE stream = ? AND word = ? AND segment = ? ORDER BY first", (stream, word, segment))
        texts = [text for (text,) in pages if kind == 0]
        found[kind, word, segment] = row, [number for text in (*texts, recent) for _, _, number in places(0, text)]
    return found


def places(first: int, text: str) -> list[tuple[int, int, int]]:
    numbers = [(run.segment, number) for run in parse(text) for number in range(run.first, run.end)]
    return [(first + place, *number) for place, number in enumerate(numbers)]


def test_a_rebuilt_index_is_as_it_was(store: hw.Store, j: hw.Journal, seed: int) -> None:
    fill(store, j, seed)
    last = record()
    j.persist("e1", last)
    before, index = answers(j), rows(store, j)
    store._engine.run(rebuilds.begin_repair, j._ref.id)
    with pytest.raises(hw.UnavailableError, match="rebuilt by upkeep"):
        j.persist("e1", record())
    assert store.run_upkeep().indexes_rebuilt == 1
    assert rows(store, j) == index
    assert answers(j) == before
    assert j.persist("e1", last).repeated
    assert j.persist("e1", record(), expected=before["e1"][0].sequence).first == before["e1"][0].sequence + 1


def test_while_an_index_is_rebuilt_scans_work_and_the_rest_is_unavailable(store: hw.Store, j: hw.Journal) -> None:
    j.persist("a", [record(data=number, tags=("t",)) for number in range(5)])
    j.persist("b", record("other"))
    j.delete_to("a", 2)
    cut = store.cut(NAME)
    store._engine.run(rebuilds.begin_repair, j._ref.id)
    for _ in range(2):
        assert [event.data for event in j.events(tag="t")] == [2, 3, 4] == [event.data for event in j.events(id="a")]
        assert len(list(j.events())) == 4 and len(list(j.events(type="other"))) == 1 and len(list(store.stream(NAME).read())) == 6
        calls: list[Any] = [
            lambda: j.persist("a", record()),
            lambda: j.persist("new", record(), expected=0),
            lambda: j.persist("new", record(), fail_if=hw.Match(tags=("t",)), after=cut),
            lambda: list(j.replay("a")),
            lambda: j.head("a"),
            lambda: list(j.ids()),
            lambda: j.delete("a"),
            lambda: j.delete_to("a", 3),
            lambda: j.snapshot("a", 1, 1),
        ]
        for call in calls:
            with pytest.raises(hw.UnavailableError):
                call()
        with pytest.raises(hw.UnavailableError), store.transaction() as tx:
            tx.persist(NAME, "c", record(), expected=0)
        # Broken off in each of its steps.
        failpoints.arm("rebuild.sliced=error@1")
        assert any("rebuild.sliced" in problem for problem in store.run_upkeep().problems)
        failpoints.arm("")
    store.run_upkeep()
    assert [event.data for event in j.replay("a")] == [2, 3, 4] and j.head("a") == (5, 3, None)
    j.persist("a", record())
    assert list(j.ids()) == ["a", "b"]


def test_a_rebuild_goes_on_where_it_was_broken_off_and_starts_over_when_begun_again(store: hw.Store, j: hw.Journal) -> None:
    for number in range(4):
        j.persist(f"many-{number}", [record(data=place, tags=("t", f"p:{place}")) for place in range(REBUILD_ROWS - 1)])
    for ack in [j.persist_async(f"one-{number:04}", record()) for number in range(REBUILD_ROWS + 20)]:
        ack.result()
    j.delete("one-0007")
    j.delete_to("many-1", 300)
    wanted = {"heads": [j.head(id) for id in j.ids()], "events": sorted(event.position for event in j.events(tag="p:3"))}
    index = rows(store, j)
    steps = set()
    for slices in range(1, 18, 2):
        store._engine.run(rebuilds.begin_repair, j._ref.id)
        failpoints.arm(f"rebuild.sliced=error@{slices}")
        store.run_upkeep()
        steps |= {build.step for build in store._engine.run(rebuilds.list_builds)}
    assert steps == {"aside", "scan", "merge"}
    store._engine.run(rebuilds.begin_repair, j._ref.id)
    for slices in (2, 1, 3, 1, 4):
        failpoints.arm(f"rebuild.sliced=error@{slices}")
        store.run_upkeep()
    failpoints.arm("")
    store.run_upkeep()
    assert rows(store, j) == index
    assert {"heads": [j.head(id) for id in j.ids()], "events": sorted(event.position for event in j.events(tag="p:3"))} == wanted
    assert not list(j.replay("one-0007")) and len(list(j.replay("many-1"))) == REBUILD_ROWS - 301


# Forks.


def test_a_fork_of_a_journal_is_a_journal(store: hw.Store, j: hw.Journal, seed: int) -> None:
    fill(store, j, seed)
    before, cut = answers(j), store.cut(NAME)
    store.stream(NAME).fork("shop/fork")
    fork = store.journal("shop/fork")
    assert [event.data for event in fork.events()] == [event.data for event in before["all"]]
    with pytest.raises(hw.UnavailableError):
        fork.persist("e1", record())
    with pytest.raises(hw.UnavailableError):
        list(fork.replay("e1"))
    j.persist("e1", record("of the parent".replace(" ", "-")))
    assert store.run_upkeep().indexes_rebuilt == 1
    assert answers(fork) == before
    with pytest.raises(hw.InvalidRequestError, match="not of shop/fork"):
        fork.persist("e1", record(), fail_if=hw.Match(tags=("a",)), after=cut)
    found = fork.persist("e1", record(tags=("new",)), expected=before["e1"][0].sequence, fail_if=hw.Match(tags=("new",)))
    assert found.first == before["e1"][0].sequence + 1 and not list(j.events(tag="new"))
    assert store.journals() == ["shop/fork", NAME]
    store.stream(NAME).seal()
    store.delete_stream(NAME)
    store.run_upkeep()
    assert [event.sequence for event in fork.replay("e1")] == [*(event.sequence for event in before["e1"][1]), found.first]


def test_a_fork_has_its_entities_as_they_were_at_its_cut(store: hw.Store, j: hw.Journal) -> None:
    last = record(data=2)
    j.persist("a", record(data=1))
    j.persist("a", last)
    j.persist("gone", [record(), record()])
    cut = store.cut(NAME)
    j.persist("a", record(data=3))
    j.persist("gone", record())
    j.persist("new", record())
    j.delete("gone")
    j.delete("new")
    store.stream(NAME).fork("shop/fork", cut)
    store.run_upkeep()
    fork = store.journal("shop/fork")
    assert list(fork.ids()) == ["a"] and fork.head("a") == (2, 1, None) and fork.head("new") == (0, 0, None)
    # What was deleted stays so, whatever the fork begins with.
    assert fork.head("gone") == (2, 3, None) and not list(fork.events(id="gone"))
    assert fork.persist("gone", record(), expected=2).first == 3 and fork.persist("new", record(), expected=0).first == 1
    assert fork.persist("a", record(data=4)).first == 3
    store.stream("shop/fork").fork("shop/second")
    store.run_upkeep()
    assert [event.data for event in store.journal("shop/second").replay("a")] == [1, 2, 4]


# Truncation and retention.


def test_a_journal_is_truncated_by_force_only_and_its_sequences_go_on(store: hw.Store, j: hw.Journal) -> None:
    for number in range(1, 4):
        j.persist("a", record(data=number, tags=("t",)))
    last = record(data="last")
    j.persist("old", record())
    j.persist("old", last)
    j.persist("gone", record())
    j.delete("gone")
    cut = store.cut(NAME)
    j.persist("a", record(data=4, tags=("t",)))
    stream = store.stream(NAME)
    with pytest.raises(hw.InvalidRequestError, match="force"):
        stream.truncate(cut)
    assert len(list(j.replay("a"))) == 4
    stream.truncate(cut, force=True)
    assert [event.value["data"] for event in stream.read()] == ["4"] and [event.data for event in j.events()] == [4]
    with pytest.raises(hw.UnavailableError):
        j.persist("a", record())
    store.run_upkeep()
    assert j.head("a") == (4, 4, None) and [event.data for event in j.replay("a")] == [4] == [event.data for event in j.events(tag="t")]
    assert j.head("old") == (2, 3, None) and list(j.replay("old")) == [] and list(j.ids()) == ["a", "old"]
    assert j.head("gone") == (1, 2, None)
    again = j.persist("old", last, expected=1)
    assert again.repeated and (again.first, again.last) == (2, 2)
    for id, expected in (("old", 0), ("gone", 0), ("gone", hw.EXISTS)):
        with pytest.raises(hw.ConditionFailedError):
            j.persist(id, record(), expected=expected)
    with pytest.raises(hw.TruncatedError):
        j.persist("new", record(), fail_if=hw.Match(tags=("t",)), after=hw.Cut(cut.store, {NAME: stream_cut(cut)}))
    assert j.persist("old", record(data="new"), expected=2).first == 3 and j.persist("a", record(data=5)).first == 5
    stream.truncate(stream.head(), force=True)
    assert [event.data for event in j.replay("a")] == [4, 5] and [event.data for event in j.replay("old")] == ["new"]
    # Another rebuild finds the sequences of those that have no events left.
    store._engine.run(rebuilds.begin_repair, j._ref.id)
    store.run_upkeep()
    assert j.head("gone") == (1, 2, None) and [event.sequence for event in j.replay("old")] == [3] and j.head("a") == (5, 4, None)


def stream_cut(cut: hw.Cut) -> Any:
    part = cut.streams[NAME]
    return type(part)(part.id, dict.fromkeys(part.segments, 0))


def test_a_journal_keeps_its_events_and_its_columns(store: hw.Store, j: hw.Journal) -> None:
    stream = store.stream(NAME)
    with pytest.raises(hw.InvalidRequestError, match="keeps all"):
        stream.update(retention=hw.Retention.by_time(timedelta(hours=1)))
    with pytest.raises(hw.InvalidRequestError):
        stream.update(schema=stream.schema)
    stream.update(scaling=hw.Scaling.fixed(2), retention=hw.Retention.forever(), labels=["x"])
    assert j.persist("a", record()).last == 1
