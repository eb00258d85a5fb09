"""The answer to a journal's commit is lost: it is stored once, and asked again it answers as the first time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import headwater as hw
from headwater.check import check_store
from tests.crash.journal_workers import NAME, record
from tests.crash.processes import Place
from tests.crash.test_unknown_outcome import LosesAnswers, Proxy
from tests.journals import check_journal

pytestmark = pytest.mark.slow


@pytest.fixture
def store(place: Place) -> Iterator[hw.Store]:
    with place.open() as store:
        store.journal(NAME, scaling=hw.Scaling.fixed(2))
        yield store


def ask(persist: Callable[[], hw.Persisted]) -> hw.Persisted:
    """The result, however often the catalog is out of reach."""
    while True:
        try:
            return persist()
        except hw.UnavailableError:
            continue


@pytest.mark.parametrize("size", [10, 100_000])
@pytest.mark.parametrize("meanwhile", ["nothing", "split", "tier", "delete", "persist"])
def test_a_persist_whose_answer_was_lost_is_stored_once(place: Place, store: hw.Store, size: int, meanwhile: str) -> None:
    catalog, journal = LosesAnswers(store), store.journal(NAME)
    stream, name = store.stream(NAME), hw.Match(tags=("name",))

    def act() -> None:
        if meanwhile == "split":
            stream.split(stream.segments()[0].number)
        elif meanwhile == "tier":
            store.run_upkeep()
        elif meanwhile == "delete":
            journal.delete("a")
        elif meanwhile == "persist":
            with place.open() as other:
                other.journal(NAME).persist("a", record("theirs"))

    given: list[tuple[hw.Record, dict[str, Any]]] = [
        (record("." * size), {"expected": 0}),
        (record("." * size), {}),
        (record("." * size, "name"), {"fail_if": name}),
        (record("." * size), {"fail_if": hw.Match(tags=("other",))}),
    ]
    lasts = []
    for event, more in given:
        catalog.lose(meanwhile=act)
        lasts.append(ask(journal.persist_async("a", event, **more).result).last)
    assert catalog.lost == len(given)
    # The last one is recognised by whoever gives it again: the others' came after it.
    if meanwhile in ("nothing", "split", "tier"):
        assert ask(lambda: journal.persist("a", given[-1][0])).repeated
        assert ask(lambda: journal.persist("a", given[2][0], fail_if=name)).repeated
    stored = check_journal(store, NAME, lows={"a": journal.head("a").low})
    mine = [event for event in stored if event.data != '"theirs"']
    assert [event.event_id for event in mine] == [str(event.event_id) for event, _ in given]
    assert [event.sequence for event in mine] == lasts
    assert check_store(store).ok


@pytest.fixture
def proxied(postgres_url: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[hw.Store, Proxy]]:
    proxy = Proxy(postgres_url, tmp_path_factory.mktemp("s"))
    try:
        with hw.open(tmp_path / "store", catalog=proxy.url, upkeep=False) as store:
            yield store, proxy
    finally:
        proxy.close()


def test_everything_that_changes_a_journal_survives_a_lost_answer(proxied: tuple[hw.Store, Proxy]) -> None:
    store, proxy = proxied

    def lose(call: Callable[..., Any], *args: Any, **more: Any) -> Any:
        before = proxy.dropped
        proxy.armed.set()
        try:
            return call(*args, **more)
        except hw.UnavailableError:
            proxy.armed.clear()
            return call(*args, **more)
        finally:
            proxy.armed.clear()
            assert proxy.dropped == before + 1, "an answer was lost"

    def transact(staged: bool, event: hw.Record) -> None:
        with store.transaction() as tx:
            tx.require_entity(NAME, "unknown", 0)
            tx.persist(NAME, "a", event, fail_if=hw.Match(tags=("never",)))
            tx.persist(NAME, "b", record())
            if staged:
                tx.flush()

    journal = lose(store.journal, NAME)
    lose(journal.persist, "a", [record(), record(None, "name")], expected=0)
    lose(journal.persist, "a", record(), fail_if=hw.Match(tags=("unused",)))
    lose(transact, False, record())
    lose(transact, True, record())
    lose(journal.snapshot, "a", 3, {"n": 3})
    lose(journal.delete_to, "a", 2)
    assert journal.head("a") == (5, 3, 3) and journal.head("b").sequence == 2
    lose(journal.delete, "b")
    lose(journal.delete_snapshots, "a")
    assert journal.head("b") == (2, 3, None) and journal.head("a") == (5, 3, None)
    assert journal.persist("b", record()).last == 3
    check_journal(store, NAME, lows={"a": 3, "b": 3})
    assert check_store(store).ok
