"""Persisting to a journal: expected sequences, repeats, conditions on other events, and what is refused."""

from __future__ import annotations

import pickle
import random
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest

import headwater as hw
from tests.crash.processes import wait_until
from tests.journals import check_journal

NAME = "shop/orders"
MIB = 1024 * 1024


@pytest.fixture
def j(store: hw.Store) -> hw.Journal:
    return store.journal(NAME, scaling=hw.Scaling.fixed(4))


def record(type: Any = "placed", data: Any = 1, **more: Any) -> hw.Record:
    return hw.Record(type, data, **more)


def sequences(j: hw.Journal, id: str) -> list[int]:
    return [event.sequence for event in j.replay(id)]


# One entity.


def test_a_persist_answers_with_its_sequences_and_replay_gives_the_events(j: hw.Journal) -> None:
    first = hw.Record("placed", {"lines": 3, "who": "Zoë"}, tags=("eu", "mail:a@b", "eu"), meta={"by": "web"}, version=2)
    found = j.persist("order-17", [first, hw.Record("paid", None)], expected=0)
    assert (found.id, found.first, found.last, found.repeated) == ("order-17", 1, 2, False)
    one, two = j.replay("order-17")
    assert (one.id, one.sequence, one.type, one.version) == ("order-17", 1, "placed", 2)
    assert (one.data, one.tags, one.meta, one.event_id) == ({"lines": 3, "who": "Zoë"}, ("eu", "mail:a@b"), {"by": "web"}, first.event_id)
    assert (two.sequence, two.type, two.version, two.data, two.tags, two.meta) == (2, "paid", 1, None, (), None)
    assert one.time == two.time and one.time.utcoffset() is not None
    assert two.position == hw.Position(one.position.segment, one.position.number + 1)
    assert j.head("order-17") == (2, 1, None) and j.head("unknown") == (0, 0, None)


@pytest.mark.parametrize("data", [None, True, 0, -1.5, "", "x", [], {}, [1, [2, {"a": None}]], {"": {"ü": [1.5, "\u2028"]}}, 10**30])
def test_data_and_meta_are_any_json_values(j: hw.Journal, data: Any) -> None:
    j.persist("a", hw.Record("t", data, meta=[data]))
    [event] = j.replay("a")
    assert event.data == data and event.meta == [data] and type(event.data) is type(data)


def test_expected_is_compared_with_the_sequence(j: hw.Journal) -> None:
    j.persist("a", record(), expected=0)
    j.persist("a", [record(), record()], expected=1)
    for expected in (0, 1, 2, 4, 1 << 60):
        with pytest.raises(hw.ConditionFailedError, match="is at sequence 3") as caught:
            j.persist("a", record(), expected=expected)
        assert (caught.value.id, caught.value.expected, caught.value.actual, caught.value.position) == ("a", expected, 3, None)
    with pytest.raises(hw.ConditionFailedError) as caught:
        j.persist("b", record(), expected=1)
    assert (caught.value.id, caught.value.expected, caught.value.actual) == ("b", 1, 0)
    j.persist("a", record())
    assert j.persist("a", record(), expected=hw.EXISTS).last == 5
    assert sequences(j, "a") == [1, 2, 3, 4, 5] and sequences(j, "b") == []


def test_an_entity_that_does_not_exist_is_not_persisted_with_exists(j: hw.Journal) -> None:
    with pytest.raises(hw.ConditionFailedError) as caught:
        j.persist("a", record(), expected=hw.EXISTS)
    assert (caught.value.id, caught.value.expected, caught.value.actual) == ("a", hw.EXISTS, 0)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert copy.expected is hw.EXISTS and copy.actual == 0 and copy.id == "a" and copy.message == caught.value.message
    assert list(j.ids()) == []


def test_many_threads_share_commits_and_no_sequence_is_left_out(j: hw.Journal) -> None:
    def work(number: int) -> None:
        for _ in range(20):
            j.persist("same", record(data=number))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    events = list(j.replay("same"))
    assert [event.sequence for event in events] == list(range(1, 161))
    assert all([event.data for event in events].count(number) == 20 for number in range(8))


def test_acks_without_waiting_keep_the_order_in_which_they_were_given(j: hw.Journal) -> None:
    acks = [j.persist_async(f"e{number % 3}", record(data=number)) for number in range(60)]
    found = [ack.result() for ack in acks]
    assert [(one.id, one.last) for one in found] == [(f"e{number % 3}", number // 3 + 1) for number in range(60)]
    assert all(ack.done for ack in acks)
    assert [event.data for event in j.replay("e1")] == list(range(1, 60, 3))


def test_one_entitys_conflict_does_not_touch_its_neighbours_in_a_flush(j: hw.Journal) -> None:
    j.persist("taken", record())
    acks = [j.persist_async("taken" if number % 2 else f"free-{number}", record(), expected=0) for number in range(40)]
    for ack in acks[::2]:
        assert ack.result().last == 1
    for ack in acks[1::2]:
        with pytest.raises(hw.ConditionFailedError) as caught:
            ack.result()
        assert caught.value.id == "taken" and caught.value.actual == 1
    assert len(list(j.ids("free-"))) == 20 and sequences(j, "taken") == [1]


def test_an_entity_that_all_persist_at_once_takes_all_of_it(store: hw.Store, j: hw.Journal, place: Any) -> None:
    """Without an expected sequence nobody is refused, however often others are quicker."""

    def work(number: int) -> None:
        with place.open() as other:
            journal = other.journal(NAME)
            for turn in range(2):
                for ack in [journal.persist_async("hot", record(data=[number, turn, place])) for place in range(10)]:
                    ack.result()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert sequences(j, "hot") == list(range(1, 161))


def test_acks_without_waiting_keep_their_order_while_others_persist_the_same_entity(j: hw.Journal, place: Any) -> None:
    over = threading.Event()

    def disturb() -> None:
        with place.open() as other:
            while not over.is_set():
                other.journal(NAME).persist("same", record("theirs"))

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(disturb)
        try:
            for turn in range(10):
                for ack in [j.persist_async("same", record("mine", [turn, place])) for place in range(10)]:
                    ack.result()
        finally:
            over.set()
        done.result()
    mine = [event.data for event in j.replay("same") if event.type == "mine"]
    assert mine == [[turn, place] for turn in range(10) for place in range(10)]


def test_a_process_that_knows_an_old_head_persists_all_the_same(store: hw.Store, place: Any) -> None:
    j = store.journal(NAME)
    j.persist("a", record())
    with place.open() as other:
        other.journal(NAME).persist("a", [record(), record()])
    assert j.persist("a", record()).last == 4
    with place.open() as other:
        other.journal(NAME).persist("a", record())
    # Nobody asks for the result of this one until the store is closed.
    ack = j.persist_async("a", record())
    assert ack.result().last == 6
    assert sequences(j, "a") == list(range(1, 7))


def test_a_persist_that_nobody_waits_for_is_stored_even_if_its_head_was_old(place: Any) -> None:
    place.open(create=True).close()
    with place.open() as store, place.open() as other:
        j, theirs = store.journal(NAME), other.journal(NAME)
        j.persist("a", record())
        theirs.persist("a", record())
        j.persist_async("a", record(data="late"))
        j.persist_async("a", record(data="later"))
    with place.open() as store:
        assert [event.data for event in store.journal(NAME).replay("a")] == [1, 1, "late", "later"]


def test_persists_that_wait_to_be_decided_do_not_keep_a_large_flush_from_being_stored(store: hw.Store, place: Any) -> None:
    # Deciding waits for flushes, so it must not take the threads that store them.
    store.create_stream("shop/large")
    ids = [str(number) for number in range(20)]
    with place.open() as other:
        j, theirs = store.journal(NAME), other.journal(NAME)
        for id in ids:
            j.persist(id, record())
            theirs.persist(id, record())
        with j._refusals._lock:  # As a thread holds it that decides an earlier one.
            acks = [j.persist_async(id, record()) for id in ids]
            with store.stream("shop/large").writer() as writer:
                writer.write(b"x" * MIB).result(timeout=30)
        assert [ack.result().last for ack in acks] == [3] * len(ids)


def test_a_persist_that_is_refused_goes_before_one_that_is_given_after_it(
    store: hw.Store, place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the second one says which sequence it expects: that is the one which the first one leaves."""
    j = store.journal(NAME)
    j.persist("a", record())
    with place.open() as other:
        other.journal(NAME).persist("a", record())
    # The background thread does not come to it in time.
    monkeypatch.setattr(j._refusals._workers, "submit", lambda *_: None)
    first = j.persist_async("a", record())
    wait_until(lambda: first._run is not None and first._run.ended)
    second = j.persist_async("a", record(), expected=3)
    assert second.result().last == 4
    assert first.result().last == 3


def test_a_persist_that_is_committed_alone_leaves_the_rows_of_one_that_is_not(store: hw.Store) -> None:
    """In one round trip SQL makes the index rows, and otherwise Python: a condition on other events is always Python's."""
    j, other = store.journal(NAME), store.journal("shop/other")
    never, rng = hw.Match(tags=("never",)), random.Random(1)
    for turn in range(300):
        id, types = f"e{rng.randrange(3)}", rng.choices("xyz", k=rng.choice((1, 1, 2, 5)))
        events = [record(type, turn, tags=rng.sample(("a", "b", "c"), rng.randrange(3))) for type in types]
        expected = rng.choice((None, j.head(id).sequence))
        assert j.persist(id, events, expected=expected).repeated == other.persist(id, events, expected=expected, fail_if=never).repeated
        if turn % 60 == 50:
            for each in (j, other):
                each.stream.split(each.stream.segments()[0].number)
    columns = {
        "entity": "id, sequence, low, segment, number, last_count, last_ids, deleted, deletion",
        "word": "kind, word, segment, number, count",
    }
    for table, names in columns.items():
        sql = f"SELECT {names} FROM {table} WHERE stream = ? ORDER BY {names}"
        mine, theirs = (store._engine.database.query(sql, (each._ref.id,)) for each in (j, other))
        assert mine and mine == theirs
    for journal in (NAME, "shop/other"):
        assert len(check_journal(store, journal)) == sum(j.head(id).sequence for id in j.ids())


# Repeats.


def test_the_last_persist_given_again_is_answered_and_not_stored_again(j: hw.Journal) -> None:
    events = [record(), record()]
    j.persist("a", record())
    first = j.persist("a", events, expected=1)
    for expected in (None, 1, 0, 77, hw.EXISTS):
        again = j.persist("a", events, expected=expected)
        assert (again.first, again.last, again.repeated) == (2, 3, True)
    assert first.cut.streams[NAME].segments.keys() == again.cut.streams[NAME].segments.keys()
    assert sequences(j, "a") == [1, 2, 3]
    assert j.persist("a", record()).first == 4


def test_a_persist_that_shares_some_records_with_the_last_one_is_another_persist(j: hw.Journal) -> None:
    one, two, three = record(data=1), record(data=2), record(data=3)
    j.persist("a", [one, two], expected=0)
    for others in ([one, three], [three, two], [two, one], [one]):
        with pytest.raises(hw.ConditionFailedError):
            j.persist("a", others, expected=0)
    # Without an expected sequence such a persist is a new one.
    assert not j.persist("a", [one, three]).repeated
    assert [event.data for event in j.replay("a")] == [1, 2, 1, 3]


def test_an_older_persist_is_recognised_by_its_expected_sequence_alone(j: hw.Journal) -> None:
    old = record()
    j.persist("a", old, expected=0)
    j.persist("a", record(), expected=1)
    with pytest.raises(hw.ConditionFailedError):
        j.persist("a", old, expected=0)


def test_records_of_one_persist_given_to_another_entity_are_stored_there_too(j: hw.Journal) -> None:
    event = record()
    j.persist("a", event)
    assert not j.persist("b", event).repeated


# Cuts.


def test_the_cut_lies_right_after_what_was_persisted(store: hw.Store, j: hw.Journal) -> None:
    cuts = [j.persist(f"e{number % 5}", record(data=number)).cut for number in range(20)]
    for number, cut in enumerate(cuts):
        assert sorted(event.data for event in j.events(end=cut)) == list(range(number + 1))
    assert cuts[-1] == store.cut(NAME)


def test_of_the_cuts_of_many_threads_one_is_always_before_the_other(j: hw.Journal) -> None:
    cuts: list[hw.Cut] = []

    def work(number: int) -> None:
        cuts.extend([j.persist(f"e{number}", record()).cut for _ in range(15)])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    places = sorted([sorted(cut.streams[NAME].segments.items()) for cut in cuts], key=lambda place: sum(number for _, number in place))
    for before, after in pairwise(places):
        assert all(one[1] <= two[1] for one, two in zip(before, after, strict=True))


# Conditions on other events.


def test_an_event_with_the_tag_refuses_the_persist(j: hw.Journal) -> None:
    taken = j.persist("user-1", record(tags=("mail:a@b", "eu")))
    [event] = j.replay("user-1")
    with pytest.raises(hw.ConditionFailedError) as caught:
        j.persist("user-2", record(tags=("mail:a@b",)), fail_if=hw.Match(tags=("mail:a@b",)))
    error = caught.value
    assert (error.id, error.expected, error.actual, error.position) == ("user-2", None, None, event.position)
    assert j.head("user-2").sequence == 0
    j.persist("user-2", record(tags=("mail:c@d",)), fail_if=hw.Match(tags=("mail:c@d",)))
    j.persist("user-3", record(), fail_if=hw.Match(tags=("mail:a@b",)), after=taken.cut)


def test_the_fields_of_a_match_are_joined_by_and_its_types_and_ids_by_or(j: hw.Journal) -> None:
    j.persist("a", [record("x", tags=("one", "two")), record("y", tags=("one",))])
    fits = [
        hw.Match(tags=("one", "two")),
        hw.Match(tags=("one",), types=("y",)),
        hw.Match(types=("nothing", "x")),
        hw.Match(ids=("b", "a")),
        hw.Match(tags=("two",), types=("x", "z"), ids=("a",)),
    ]
    misses = [
        hw.Match(tags=("two",), types=("y",)),
        hw.Match(tags=("one", "three")),
        hw.Match(types=("z",)),
        hw.Match(ids=("c",)),
        hw.Match(tags=("one",), ids=("c",)),
    ]
    for match in fits:
        with pytest.raises(hw.ConditionFailedError):
            j.persist("c", record(), fail_if=match)
        with pytest.raises(hw.ConditionFailedError):
            j.persist("c", record(), fail_if=(*misses, match))
    for match in misses:
        j.persist("d", record("other"), fail_if=match)
    j.persist("d", record("other"), fail_if=misses)


def test_a_condition_counts_from_its_cut_on_whatever_is_split_and_merged(store: hw.Store, j: hw.Journal) -> None:
    stream = store.stream(NAME)
    match = hw.Match(tags=("t",))
    for number in range(8):
        j.persist(f"e{number}", record(tags=("t",)))
    cut = store.cut(NAME)
    stream.split(0)
    stream.split(1, 3)
    j.persist("free", record(), fail_if=match, after=cut)
    later = store.cut(NAME)
    stream.merge([segment.number for segment in stream.segments()][:2])
    j.persist("free", record(), fail_if=match, after=cut)
    j.persist("free", record(), fail_if=match, after=later)
    j.persist("e1", record(tags=("t",)))
    for place in (cut, later):
        with pytest.raises(hw.ConditionFailedError) as caught:
            j.persist("free", record(), fail_if=match, after=place)
        assert caught.value.position == list(j.replay("e1"))[-1].position
    j.persist("free", record(), fail_if=match, after=store.cut(NAME))


def test_a_condition_looks_again_at_the_segments_if_another_process_changed_them(j: hw.Journal, place: Any) -> None:
    """It locks all that are open. A persist that is committed alone is no exception."""
    match = hw.Match(tags=("unused",))
    j.persist("a", record(), fail_if=match)
    [event] = j.replay("a")
    with place.open() as other:
        stream = other.stream(NAME)
        stream.split(next(segment.number for segment in stream.segments() if segment.number != event.position.segment))
    ack = j.persist_async("a", record(), fail_if=match)
    assert ack.result().last == 2 and ack._rounds == 1


def test_a_match_finds_an_entitys_events_from_before_a_split(store: hw.Store, j: hw.Journal) -> None:
    j.persist("a", record("x", tags=("t",)))
    cut = store.cut(NAME)
    stream = store.stream(NAME)
    stream.merge([segment.number for segment in stream.segments()])
    j.persist("a", record("y"))
    for match in (
        hw.Match(types=("x",), ids=("a",)),
        hw.Match(tags=("t",), ids=("b", "a")),
        hw.Match(tags=("t",), types=("x",), ids=("a",)),
    ):
        with pytest.raises(hw.ConditionFailedError) as caught:
            j.persist("b", record("z"), fail_if=match)
        assert caught.value.position == next(j.replay("a")).position
        j.persist("c", record("z"), fail_if=match, after=cut)


def test_expected_is_checked_before_the_match_and_repeats_before_both(j: hw.Journal) -> None:
    j.persist("a", record(tags=("t",)))
    match = hw.Match(tags=("t",))
    with pytest.raises(hw.ConditionFailedError) as caught:
        j.persist("a", record(), expected=0, fail_if=match)
    assert (caught.value.expected, caught.value.actual, caught.value.position) == (0, 1, None)
    with pytest.raises(hw.ConditionFailedError) as caught:
        j.persist("a", record(), expected=1, fail_if=match)
    assert (caught.value.expected, caught.value.actual) == (None, None) and caught.value.position is not None
    mine = record(tags=("mine",))
    first = j.persist("b", mine, expected=0, fail_if=hw.Match(tags=("mine",)))
    assert not first.repeated
    again = j.persist("b", mine, expected=0, fail_if=hw.Match(tags=("mine",)))
    assert again.repeated and (again.first, again.last) == (1, 1)
    j.persist("b", record("other"))
    # An older persist whose own event is what its match finds.
    again = j.persist("b", [mine], fail_if=hw.Match(tags=("mine",)))
    assert again.repeated and (again.first, again.last) == (1, 1)
    assert sequences(j, "b") == [1, 2]


def test_a_persists_own_events_never_count_against_it(j: hw.Journal) -> None:
    found = j.persist("a", [record("x", tags=("t",)), record("x", tags=("t",))], fail_if=(hw.Match(tags=("t",)), hw.Match(ids=("a",))))
    assert found.last == 2


def test_parts_of_one_flush_see_what_the_parts_before_them_stored(j: hw.Journal) -> None:
    acks = [j.persist_async(f"user-{number}", record(tags=("one",)), fail_if=hw.Match(tags=("one",))) for number in range(30)]
    assert acks[0].result().last == 1
    for ack in acks[1:]:
        with pytest.raises(hw.ConditionFailedError) as caught:
            ack.result()
        assert caught.value.position == next(iter(j.events())).position
    assert len(list(j.events(tag="one"))) == 1


def test_deleted_events_do_not_count(j: hw.Journal) -> None:
    match = hw.Match(tags=("mail:a@b",))
    j.persist("user-1", record(tags=("mail:a@b",)))
    j.persist("user-1", record())
    with pytest.raises(hw.ConditionFailedError):
        j.persist("user-2", record(), fail_if=match)
    j.delete_to("user-1", 1)
    j.persist("user-2", record(tags=("mail:a@b",)), fail_if=match)
    with pytest.raises(hw.ConditionFailedError):
        j.persist("user-3", record(), fail_if=match)
    j.delete("user-2")
    j.persist("user-3", record(tags=("mail:a@b",)), fail_if=match)


def test_threads_that_want_one_name_get_it_once(j: hw.Journal) -> None:
    barrier = threading.Barrier(8)

    def work(number: int) -> bool:
        barrier.wait()
        try:
            j.persist(f"user-{number}", record(tags=("name",)), fail_if=hw.Match(tags=("name",)))
        except hw.ConditionFailedError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(work, range(8))) == 1


# What is refused.


def refused(j: hw.Journal, *args: Any, **more: Any) -> str:
    before = j._store.cut(NAME)
    with pytest.raises(hw.InvalidRequestError) as caught:
        j.persist(*args, **more)
    assert j._store.cut(NAME) == before
    return caught.value.message


def test_bad_events_are_refused_and_nothing_is_stored(j: hw.Journal) -> None:
    assert "at least one event" in refused(j, "a", [])
    assert "1,000" in refused(j, "a", [record() for _ in range(1001)])
    for events in (None, 1, "text", b"x", {"type": "x"}, [1], [record(), None]):
        refused(j, "a", events)
    for data in (
        float("nan"),
        float("inf"),
        b"x",
        {1: 2},
        {"a": {None: 1}},
        [{True: 1}],
        {1.5},
        object(),
        "\ud800",
        {"\ud800": 1},
        uuid.uuid4(),
    ):
        assert "JSON" in refused(j, "a", record(data=data))
        assert "JSON" in refused(j, "a", record(meta=data))
    loop: list[Any] = []
    loop.append(loop)
    refused(j, "a", record(data=loop))
    for word in ("", " ", "a b", "a\tb", "a\n", "\0", "\x7f", "a\u00a0b", "a\u2003", "\u0085", "\ud800", None, 1, b"x"):
        assert "type" in refused(j, "a", record(type=word))
        refused(j, "a", record(tags=(word,)))
    refused(j, "a", record(type="x" * 129))
    refused(j, "a", record(type="ü" * 65))
    refused(j, "a", record(tags=("x" * 257,)))
    refused(j, "a", record(tags="eu"))
    refused(j, "a", record(tags=1))
    refused(j, "a", record(tags=[f"t{number}" for number in range(17)]))
    for version in (None, -1, 1.5, "1", True, 1 << 31):
        refused(j, "a", record(version=version))
    for event_id in (1, "no uuid", b"x" * 16):
        refused(j, "a", record(event_id=event_id))
    same = record()
    assert "event_id" in refused(j, "a", [same, same])
    assert "event 1" in refused(j, "a", [record(), record(type="")])
    refused(j, "a", [record(data="x" * MIB) for _ in range(17)])
    j.persist("a", [record(type="x" * 128, tags=("x" * 256, *[f"t{number}" for number in range(15)])) for _ in range(1000)])
    assert j.head("a").sequence == 1000


def test_bad_ids_are_refused(j: hw.Journal) -> None:
    bad: list[Any] = ["", "x" * 513, "ü" * 257, "x" * 10_000_000, "a\0b", "\ud800", None, 1, b"x"]
    calls: list[Any] = [j.replay, j.head, j.delete, j.find_snapshot, j.delete_snapshots]
    for id in bad:
        refused(j, id, record())
        for call in calls:
            with pytest.raises(hw.InvalidRequestError):
                call(id)
    for id in ("x" * 512, "ü" * 256, "\U0001f600" * 128, " ", "\n", "a/b c"):
        j.persist(id, record())
        assert sequences(j, id) == [1]


def test_bad_conditions_are_refused(store: hw.Store, j: hw.Journal) -> None:
    cut = store.cut(NAME)
    for expected in (-1, 1.5, "1", True, float("nan"), 1 << 62, [1]):
        assert "expected" in refused(j, "a", record(), expected=expected)
    refused(j, "a", record(), fail_if=hw.Match())
    refused(j, "a", record(), fail_if=(hw.Match(tags=("a",)), hw.Match()))
    for match in ("t", None, 1, hw.Match(tags="eu"), hw.Match(tags=("a b",)), hw.Match(types=(None,)), hw.Match(ids=("",))):  # type: ignore[arg-type]
        refused(j, "a", record(), fail_if=match)
    refused(j, "a", record(), fail_if=hw.Match(tags=[f"t{number}" for number in range(17)]))
    refused(j, "a", record(), fail_if=[hw.Match(tags=(f"t{number}",)) for number in range(17)])
    assert "after" in refused(j, "a", record(), after=cut)
    assert "after" in refused(j, "a", record(), fail_if=(), after=cut)
    store.create_stream("shop/other")
    store.journal("shop/journal")
    match = hw.Match(tags=("t",))
    for after in (store.cut("shop/other"), store.cut("shop/journal"), store.cut(NAME, "shop/other"), "tail", 1):
        refused(j, "a", record(), fail_if=match, after=after)
    other = hw.Cut("another", dict(cut.streams))
    refused(j, "a", record(), fail_if=match, after=other)
    j.persist("a", record(), fail_if=match, after=cut)


def test_streams_and_journals_are_not_each_other(store: hw.Store, j: hw.Journal) -> None:
    store.create_stream("shop/stream")
    store.table("shop/table")
    for name in ("shop/stream", "shop/table"):
        with pytest.raises(hw.HeadwaterError):
            store.journal(name)
    with pytest.raises(hw.InvalidRequestError, match="journal"):
        store.stream(NAME).writer()
    with pytest.raises(hw.InvalidRequestError, match="journal"):
        store.stream(NAME).byte_writer()
    with pytest.raises(hw.AlreadyExistsError):
        store.create_stream(NAME, exist_ok=True)
    with pytest.raises(hw.HeadwaterError):
        store.table(NAME)
    with pytest.raises(hw.InvalidRequestError), store.transaction() as tx:
        tx.write(NAME, b"x")
    assert store.journals() == [NAME] and store.journals("shop") == [NAME] and store.journals("other") == []
    assert NAME not in store.streams()
    j.persist("a", record())
    [event] = store.stream(NAME).read()
    assert event.key == b"a" and event.value["id"] == "a" and event.value["data"] == "1"
