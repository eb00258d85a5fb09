"""Shared state: revisioned streams, whose appends may be conditional, and synchronizers, which many processes keep alike."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import pytest

import headwater as hw
from headwater.catalog.flushes import Flush
from headwater.catalog.parts import PartResult
from tests.crash.processes import Crew, Place

# Many processes, time-outs and threads: not for a quick run.
pytestmark = pytest.mark.slow

LOG, STATE = "app/log", "app/state"


def counter(store: hw.Store) -> hw.Synchronizer[int, int]:
    return store.synchronizer(STATE, initial=0, apply=lambda state, update: state + update)


def mapping(store: hw.Store) -> hw.Synchronizer[dict[str, Any], list[Any]]:
    def apply(state: dict[str, Any], update: list[Any]) -> dict[str, Any]:
        state[update[0]] = update[1]  # in place, as many will write it
        return state

    return store.synchronizer("app/map", initial={}, apply=apply)


# Revisioned streams.


def test_an_append_at_the_expected_revision(store: hw.Store) -> None:
    log = store.revisioned(LOG)
    assert log.latest == hw.Revision.START and list(log.read()) == []
    first = log.append("a", expected=hw.Revision.START)
    second = log.append(b"b", expected=first)
    assert isinstance(second, hw.Revision) and log.latest == second
    for wrong in (hw.Revision.START, first, second + 1):
        with pytest.raises(hw.ConditionFailedError):
            log.append(b"c", expected=wrong)
    third = log.append(b"c")
    assert list(log.read()) == [(first, b"a"), (second, b"b"), (third, b"c")]
    assert list(log.read(after=second)) == [(third, b"c")] and list(log.read(after=third)) == []


def test_values_truncated_under_one_who_reads_them_are_told_with_the_head(store: hw.Store) -> None:
    log = store.revisioned(LOG)
    for _ in range(600):
        log.append(bytes(1000))
    values = log.read()
    assert next(values)[0] == 1
    log.truncate(590)
    with pytest.raises(hw.TruncatedError) as found:
        list(values)
    assert found.value.head == store.stream(LOG).head()


def test_of_many_conditional_appends_at_a_revision_one_wins(store: hw.Store, place: Place) -> None:
    with place.open() as other:
        logs = [store.revisioned(LOG), other.revisioned(LOG)]
        start = threading.Barrier(6)

        def append(index: int) -> list[int]:
            won = []
            for turn in range(10):
                start.wait(60)
                try:
                    logs[index % 2].append(f"{turn}", expected=turn)
                except hw.ConditionFailedError:
                    continue
                won.append(turn)
            return won

        with ThreadPoolExecutor(6) as pool:
            won = [turn for turns in pool.map(append, range(6)) for turn in turns]
    assert sorted(won) == list(range(10))
    assert [value for _, value in logs[0].read()] == [b"%d" % turn for turn in range(10)]


def test_conditional_and_plain_appends_at_once_lose_nothing(store: hw.Store) -> None:
    log = store.revisioned(LOG)

    def plain(index: int) -> None:
        for number in range(10):
            log.append(f"{index}.{number}")

    def conditional(index: int) -> None:
        for number in range(10):
            while True:
                try:
                    log.append(f"{index}.{number}", expected=log.latest)
                    break
                except hw.ConditionFailedError:
                    continue

    with ThreadPoolExecutor() as pool:
        for future in [pool.submit(work, index) for index, work in enumerate([plain, plain, conditional, conditional])]:
            future.result(60)
    found = [value.decode().split(".") for _, value in log.read()]
    assert len(found) == 40 and log.latest == 40
    for index in range(4):
        assert [int(number) for who, number in found if who == f"{index}"] == list(range(10))


class TakesNoCommits:
    """A catalog that can be read, but does not answer to commits of events until it is told to."""

    def __init__(self, store: hw.Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_away = False
        real = store._engine.commit_flush

        def commit_flush(flush: Flush) -> list[PartResult]:
            if self.is_away:
                raise hw.UnavailableError("no answer")
            return real(flush)

        monkeypatch.setattr(store._engine, "commit_flush", commit_flush)


def test_whoever_looks_after_an_append_of_unknown_outcome_sees_what_came_of_it(store: hw.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    catalog, log = TakesNoCommits(store, monkeypatch), store.revisioned(LOG)
    log.append(b"one")
    catalog.is_away = True
    with pytest.raises(hw.OutcomeUnknownError):
        log.append(b"two", expected=1)
    again = store.revisioned(LOG)
    looks: list[Callable[[], object]] = [lambda: again.latest, lambda: list(again.read()), lambda: again.append(b"three")]
    for look in looks:
        with pytest.raises(hw.UnavailableError):
            look()
    catalog.is_away = False
    assert again.latest == 2
    assert [value for _, value in again.read()] == [b"one", b"two"]


def test_an_update_of_unknown_outcome_is_seen_by_the_next_one(store: hw.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    catalog, count = TakesNoCommits(store, monkeypatch), counter(store)
    catalog.is_away = True
    with pytest.raises(hw.OutcomeUnknownError):
        count.update(lambda state: [1])
    catalog.is_away = False
    assert count.update(lambda state: [10] if state == 0 else []) == 1


def test_an_append_that_waits_in_vain_may_be_repeated(store: hw.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits behind another one, so it can be taken back."""
    catalog, log = TakesNoCommits(store, monkeypatch), store.revisioned(LOG)
    with store.create_stream("a/other").writer() as writer:
        catalog.is_away = True
        other = writer.write(b"before")
        with pytest.raises(hw.UnavailableError):
            other.result()
        with pytest.raises(hw.UnavailableError):
            log.append(b"one")
        assert log.latest == 0
        catalog.is_away = False
        assert log.append(b"one") == 1
    assert [value for _, value in log.read()] == [b"one"]


def test_reading_what_was_truncated_says_where_to_go_on(store: hw.Store) -> None:
    log = store.revisioned(LOG)
    revisions = [log.append(f"{number}") for number in range(5)]
    log.truncate(revisions[2])
    assert [value for _, value in log.read()] == [b"3", b"4"]
    with pytest.raises(hw.TruncatedError) as found:
        log.read(after=revisions[0])
    assert found.value.head is not None and found.value.head.streams[LOG].segments == {0: 3}
    with pytest.raises(hw.InvalidRequestError):
        log.read(after=99)


@pytest.mark.parametrize("value", [5, None, {}, "\ud800"])
def test_a_value_that_is_none_is_refused(store: hw.Store, value: Any) -> None:
    with pytest.raises(hw.InvalidRequestError):
        store.revisioned(LOG).append(value)


@pytest.mark.parametrize("wrong", ["0", "x", -1, True, 1.0])
def test_a_revision_that_is_none_is_refused(store: hw.Store, wrong: Any) -> None:
    log = store.revisioned(LOG)
    for call in (lambda: log.append(b"x", expected=wrong), lambda: log.read(after=wrong), lambda: log.truncate(wrong)):
        with pytest.raises(hw.InvalidRequestError, match=f"is a Revision, not {wrong!r}"):
            call()


def test_a_name_that_is_something_else(store: hw.Store) -> None:
    store.create_stream("app/events")
    with pytest.raises(hw.AlreadyExistsError, match="events"):
        store.revisioned("app/events")
    store.revisioned(LOG)
    with pytest.raises(hw.AlreadyExistsError):
        store.table(LOG)
    with pytest.raises(hw.AlreadyExistsError):
        store.create_stream(LOG, exist_ok=True)
    with pytest.raises((hw.InvalidRequestError, hw.ConflictError)):
        store.stream(LOG).split(0)


# Synchronizers.


def test_state_is_shared_by_updates(store: hw.Store, place: Place) -> None:
    sync = counter(store)
    assert sync.state == 0
    assert sync.update(lambda state: [1, 2]) == 3 == sync.state
    with place.open() as other:
        theirs = counter(other)
        assert theirs.state == 3, "who joins later has it all"
        theirs.update(lambda state: [state])
        assert sync.state == 3, "not before it is fetched"
        assert sync.fetch() == 6 == sync.state
    assert sync.update(lambda state: []) == 6, "nothing to do"
    assert len(list(store.revisioned(STATE).read())) == 2


def test_the_update_function_runs_again_on_what_it_did_not_see(store: hw.Store) -> None:
    ours, theirs = counter(store), counter(store)
    seen = []

    def decide(state: int) -> list[int]:
        seen.append(state)
        if len(seen) == 1:
            theirs.update(lambda state: [10])
        return [state + 1]

    assert ours.update(decide) == 21
    assert seen == [0, 10]


def test_an_update_function_that_raises_changes_nothing(store: hw.Store) -> None:
    sync = mapping(store)
    sync.update(lambda state: [["kept", 1]])

    def decide(state: dict[str, Any]) -> list[Any]:
        state["kept"] = 2
        state["more"] = 3
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        sync.update(decide)
    assert sync.state == {"kept": 1} == sync.fetch() == mapping(store).state
    assert sync.update(lambda state: [["more", 4]]) == {"kept": 1, "more": 4}


def test_an_update_that_can_not_be_applied_reaches_nobody(store: hw.Store) -> None:
    sync = counter(store)
    sync.update(lambda state: [1])
    with pytest.raises(TypeError):
        sync.update(lambda state: [1, "text"])  # type: ignore[list-item]
    with pytest.raises(TypeError), store.transaction() as tx:
        tx.update(sync, ["text"])
    assert sync.fetch() == 1 == counter(store).state


@pytest.mark.parametrize("updates", [None, 5, "text", {"a": 1}, [object], [b"x"], [{1, 2}]], ids=repr)
def test_updates_are_a_list_of_json_values(store: hw.Store, updates: Any) -> None:
    sync = counter(store)
    with pytest.raises(hw.InvalidRequestError):
        sync.update(lambda state: updates)
    assert sync.fetch() == 0


@pytest.mark.parametrize("made", [(1, 2), {1: 2}, {"a": (1,)}, {1, 2}, b"x", float("nan")], ids=repr)
def test_a_state_that_would_come_back_as_something_else_is_refused(store: hw.Store, made: Any) -> None:
    # A tuple comes back as a list, a number as a key as text: those who join after a compaction would have another state.
    sync: hw.Synchronizer[Any, Any] = store.synchronizer("app/odd", initial=[], apply=lambda state, update: made)
    with pytest.raises(hw.InvalidRequestError):
        sync.update(lambda state: [1])
    assert sync.fetch() == []


def test_a_state_that_was_given_out_is_not_changed_by_a_later_fetch(store: hw.Store) -> None:
    ours, theirs = mapping(store), mapping(store)
    ours.update(lambda state: [["a", 1]])
    before = ours.state
    theirs.update(lambda state: [["b", 2]])
    assert ours.fetch() == {"a": 1, "b": 2} and before == {"a": 1}


def test_compaction_keeps_the_state_for_those_who_join_and_those_who_are_behind(store: hw.Store, place: Place) -> None:
    ours, slow = mapping(store), mapping(store)
    for number in range(10):
        ours.update(lambda state, number=number: [[f"{number % 3}", number]])  # type: ignore[misc]
    expected = {"0": 9, "1": 7, "2": 8}
    ours.compact()
    assert ours.state == expected and len(list(store.revisioned("app/map").read())) == 1
    assert slow.state == {} and slow.fetch() == expected
    with place.open() as other:
        late = mapping(other)
        assert late.state == expected
        late.update(lambda state: [["3", 10]])
    ours.compact()
    ours.compact()
    assert slow.update(lambda state: [["4", len(state)]]) == {**expected, "3": 10, "4": 4}
    assert ours.fetch() == slow.state


def test_a_state_stays_what_it_was_when_the_one_that_others_compacted_can_t_be_read(
    store: hw.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = counter(store), counter(store)
    theirs.update(lambda _: [2, 3])
    assert ours.fetch() == 5
    theirs.update(lambda _: [4])
    theirs.compact()
    real, looks = hw.Revisioned._begin_reading, list[int]()

    def begin_reading(log: Any, after: Any = None) -> Any:
        if after is None and not looks:
            looks.append(1)
            raise hw.UnavailableError("out of reach")
        return real(log, after)

    monkeypatch.setattr(hw.Revisioned, "_begin_reading", begin_reading)
    revision = ours.revision
    with pytest.raises(hw.UnavailableError):
        ours.fetch()
    assert (ours.state, ours.revision) == (5, revision)
    assert ours.fetch() == 9


def test_compaction_of_nothing(store: hw.Store) -> None:
    sync = counter(store)
    sync.compact()
    assert sync.state == 0 and sync.update(lambda state: [1]) == 1 == counter(store).state


def test_reading_a_state_while_others_compact_it(store: hw.Store) -> None:
    stop = threading.Event()

    def churn() -> None:
        sync = counter(store)
        while not stop.is_set():
            sync.update(lambda state: [1])
            sync.compact()

    def watch() -> list[int]:
        sync, seen = counter(store), [0]
        while not stop.is_set():
            seen.append(sync.fetch())
        return seen

    with ThreadPoolExecutor() as pool:
        futures = [pool.submit(churn), pool.submit(churn)]
        watcher = pool.submit(watch)
        sync = counter(store)
        try:
            for _ in range(30):
                sync.update(lambda state: [1])
        finally:
            stop.set()
        for future in futures:
            future.result(60)
        seen = watcher.result(60)
    assert seen == sorted(seen), "a state never goes back"
    assert sync.fetch() == counter(store).state >= 30


def count_elsewhere(channel: Connection, place: Place, times: int) -> None:
    with place.open() as store:
        sync = counter(store)
        for number in range(times):
            sync.update(lambda state: [1])
            if number % 10 == 5:
                sync.compact()
        channel.send(sync.state)


@pytest.mark.slow
def test_a_counter_of_threads_and_processes_is_exact(store: hw.Store, place: Place, crew: Crew) -> None:
    workers = [crew.start(count_elsewhere, place, 20) for _ in range(4)]
    sync = counter(store)
    with ThreadPoolExecutor() as pool:
        for future in [pool.submit(lambda: [sync.update(lambda state: [1]) for _ in range(20)]) for _ in range(2)]:
            future.result(60)
    assert all(20 <= worker.hear() <= 120 for worker in workers)
    assert sync.fetch() == 120 == counter(store).state


# In transactions.


def test_an_update_in_a_transaction_holds_only_on_the_state_it_was_decided_on(store: hw.Store) -> None:
    store.create_stream("app/events")
    ours, theirs = counter(store), counter(store)
    with store.transaction() as tx:
        tx.update(ours, [1])
        tx.write("app/events", "1")
        assert counter(store).state == 0
    assert ours.state == 0 and ours.fetch() == 1 == theirs.fetch()
    tx = store.transaction()
    tx.update(ours, [1])
    tx.write("app/events", "2")
    theirs.update(lambda state: [10])
    with pytest.raises(hw.ConditionFailedError):
        tx.commit()
    assert ours.fetch() == 11 and [event.value for event in store.stream("app/events").read()] == [b"1"]
    with store.transaction() as tx:
        tx.update(ours, [ours.state])
    assert ours.fetch() == 22


def test_two_states_in_one_transaction(store: hw.Store) -> None:
    one = counter(store)
    two = mapping(store)
    with store.transaction() as tx:
        tx.update(one, [5])
        tx.update(two, [["a", 1]])
    assert one.fetch() == 5 and two.fetch() == {"a": 1}


def test_of_two_ingesters_only_one_takes_the_next_step(store: hw.Store, place: Place) -> None:
    """The protocol: record {offset, transaction} by a conditional update, then write, then commit."""
    store.create_stream("app/events")
    start = threading.Barrier(4)

    def ingest(index: int) -> int:
        with place.open() as mine:
            sync = counter(mine)
            taken = 0
            start.wait(60)
            while sync.fetch() < 20:
                tx = mine.transaction()
                tx.update(sync, [1])
                tx.write("app/events", f"{sync.state}")
                try:
                    tx.commit()
                    taken += 1
                except hw.ConditionFailedError:
                    continue
            return taken

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(ingest, range(4))) == 20
    assert [event.value for event in store.stream("app/events").read()] == [b"%d" % number for number in range(20)]


def test_what_a_caller_does_with_a_state_it_was_given_stays_its_own(store: hw.Store, place: Place) -> None:
    state = mapping(store)
    state.update(lambda _: [["a", {"deep": 1}]])
    for given in (state.state, state.fetch(), state.update(lambda _: []), state.update(lambda _: [["b", 2]])):
        given["mine"] = True
        given["a"]["deep"] = 3
    wanted = {"a": {"deep": 1}, "b": 2}
    assert state.state == wanted
    state.compact()
    with place.open() as other:
        assert mapping(other).fetch() == state.fetch() == wanted


def test_a_history_truncated_by_other_means_is_told_and_not_taken_for_a_new_beginning(store: hw.Store, place: Place) -> None:
    known = counter(store)
    known.update(lambda _: [1])
    known.update(lambda _: [2])
    stream = store.stream(STATE)
    for number in (1, 2):
        stream.truncate(hw.Cut(store.id, {STATE: stream.head().streams[STATE]._replace(segments={0: number})}))
        with place.open() as other, pytest.raises(hw.TruncatedError, match="not by compact"):
            counter(other)
    # One who knows the state as of the truncation can make it known again.
    known.compact()
    assert counter(store).fetch() == 3


def test_a_value_that_no_synchronizer_wrote_is_told(store: hw.Store) -> None:
    for value in (b"no JSON", b"[1]", b'{"updates": 3}'):
        log = store.revisioned(f"app/foreign{len(value)}")
        log.append(value)
        with pytest.raises(hw.InvalidRequestError, match="no synchronizer wrote"):
            store.synchronizer(log.name, initial=0, apply=lambda state, update: state + update).fetch()
