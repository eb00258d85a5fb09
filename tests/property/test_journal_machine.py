"""A journal against a dict: persists on all kinds of conditions, deletions, scaling, tiering and reopening, and what is read after each."""

from __future__ import annotations

import itertools
import uuid
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

import headwater as hw
from headwater.check import check_store
from tests.journals import check_journal, check_order

IDS = ("a", "b", "c/1", "ü")
TAGS = ("x", "y", "z")
TYPES = ("p", "q")
#: A type, and tags, of each event of one persist.
EVENTS = st.lists(st.tuples(st.sampled_from(TYPES), st.lists(st.sampled_from(TAGS), max_size=2, unique=True)), min_size=1, max_size=4)
EXPECTED = st.sampled_from(["any", "any", "right", "right", "zero", "exists", "wrong"])
ID = st.sampled_from(IDS)
CHOICE = st.integers(0, 1000)
#: Matches, each with at least one field; and the place after which they count: None is ever.
MATCHES = st.lists(
    st.builds(
        lambda tags, types, ids: hw.Match(tags=tuple(tags), types=tuple(types), ids=tuple(ids)),
        st.lists(st.sampled_from(TAGS), max_size=2, unique=True),
        st.lists(st.sampled_from(TYPES), max_size=1),
        st.lists(ID, max_size=2, unique=True),
    ).filter(lambda match: bool(match.tags or match.types or match.ids)),
    min_size=1,
    max_size=2,
)
_names = (f"p/j{number}" for number in itertools.count())


class Event(NamedTuple):
    id: str
    sequence: int
    type: str
    tags: tuple[str, ...]
    data: int
    event_id: uuid.UUID


class Entity:
    """What the model knows of one entity."""

    def __init__(self) -> None:
        self.sequence = 0
        self.low = 1
        self.is_deleted = False
        self.snapshots: dict[int, int] = {}
        #: The records of its persists, and the sequence before each.
        self.persists: list[tuple[int, list[hw.Record]]] = []


class Paused(NamedTuple):
    """A query that was left: where it was, what it had given, what it asks for, and the index of the first event it may give."""

    cut: hw.Cut
    given: list[hw.Recorded]
    wanted: dict[str, Any]
    start: int


class JournalMachine(RuleBasedStateMachine):
    """The model: all events in the order of their commits, and the entities."""

    def __init__(self, url: str, catalog: str | None) -> None:
        super().__init__()
        self.url, self.catalog = url, catalog
        self.log: list[Event] = []
        self.entities: dict[str, Entity] = {id: Entity() for id in IDS}
        self.cuts: list[tuple[hw.Cut, int]] = []
        self.paused: list[Paused] = []
        self.data = itertools.count()
        self.stores = [hw.open(url, catalog=catalog, upkeep=False) for _ in range(2)]

    @initialize(segments=st.integers(1, 3))
    def create(self, segments: int) -> None:
        self.name = next(_names)
        self.stores[0].journal(self.name, scaling=hw.Scaling.fixed(segments))
        self.open_journals()

    def open_journals(self) -> None:
        self.journals = [store.journal(self.name) for store in self.stores]
        self.note_cut()

    @property
    def store(self) -> hw.Store:
        return self.stores[0]

    @property
    def stream(self) -> hw.Stream:
        return self.store.stream(self.name)

    def note_cut(self) -> None:
        self.cuts.append((hw.Cut.parse(str(self.store.cut(self.name))), len(self.log)))

    # The model.

    def records(self, events: list[tuple[str, list[str]]]) -> list[hw.Record]:
        return [hw.Record(type, next(self.data), tags=tags) for type, tags in events]

    def append(self, id: str, records: list[hw.Record]) -> int:
        """Note what was persisted; returns the first sequence."""
        entity = self.entities[id]
        entity.persists.append((entity.sequence, records))
        first = entity.sequence + 1
        for record in records:
            entity.sequence += 1
            assert isinstance(record.event_id, uuid.UUID)
            self.log.append(Event(id, entity.sequence, record.type, tuple(record.tags), record.data, record.event_id))
        entity.is_deleted = False
        return first

    def visible(self, start: int = 0, end: int | None = None, **wanted: Any) -> list[Event]:
        return [
            event
            for event in self.log[start:end]
            if event.sequence >= self.entities[event.id].low
            and ("id" not in wanted or event.id == wanted["id"])
            and ("type" not in wanted or event.type == wanted["type"])
            and ("tag" not in wanted or wanted["tag"] in event.tags)
        ]

    def hits(self, matches: list[hw.Match], start: int) -> list[Event]:
        return [
            event
            for event in self.visible(start)
            for match in matches
            if set(match.tags) <= set(event.tags)
            and (not match.types or event.type in match.types)
            and (not match.ids or event.id in match.ids)
        ]

    def expectation(self, id: str, expected: str, sequence: int | None = None) -> Any:
        at = self.entities[id].sequence if sequence is None else sequence
        return {"any": None, "right": at, "zero": 0, "exists": hw.EXISTS, "wrong": at + 1}[expected]

    def holds(self, id: str, expected: Any) -> bool:
        entity = self.entities[id]
        if expected is hw.EXISTS:
            return entity.sequence > 0 and not entity.is_deleted
        return expected is None or expected == entity.sequence

    def after(self, choice: int | None) -> tuple[hw.Cut | None, int]:
        return (None, 0) if choice is None else self.cuts[choice % len(self.cuts)]

    # Persisting.

    @rule(id=ID, events=EVENTS, expected=EXPECTED, who=st.integers(0, 1))
    def persist(self, id: str, events: list[tuple[str, list[str]]], expected: str, who: int) -> None:
        self.do_persist(id, self.records(events), self.expectation(id, expected), [], None, who)

    @rule(id=ID, events=EVENTS, expected=EXPECTED, matches=MATCHES, after=st.none() | CHOICE, who=st.integers(0, 1))
    def persist_unless(
        self, id: str, events: list[tuple[str, list[str]]], expected: str, matches: list[hw.Match], after: int | None, who: int
    ) -> None:
        self.do_persist(id, self.records(events), self.expectation(id, expected), matches, after, who)

    def do_persist(self, id: str, records: list[hw.Record], expected: Any, matches: list[hw.Match], after: int | None, who: int) -> None:
        cut, start = self.after(after)
        journal, entity, hits = self.journals[who], self.entities[id], self.hits(matches, start)
        refused: hw.ConditionFailedError | None = None
        try:
            found = journal.persist(id, records, expected=expected, fail_if=matches, after=cut if matches else None)
        except hw.ConditionFailedError as error:
            refused = error
        if refused is not None:
            self.check_refusal(refused, id, expected, hits)
            return
        assert self.holds(id, expected) and not hits, "stored in spite of its condition"
        first = self.append(id, records)
        assert (found.id, found.first, found.last, found.repeated) == (id, first, entity.sequence, False)
        assert found.cut == self.store.cut(self.name)
        self.note_cut()

    def check_refusal(self, error: hw.ConditionFailedError, id: str, expected: Any, hits: list[Event]) -> None:
        assert error.id == id
        if not self.holds(id, expected):
            assert (error.expected, error.actual, error.position) == (expected, self.entities[id].sequence, None)
            return
        assert hits, "refused, though nothing forbids it"
        assert (error.expected, error.actual) == (None, None)
        at = {event.position: event.event_id for event in self.journals[0].events()}
        assert error.position is not None and at[error.position] in {event.event_id for event in hits}

    @rule(id=ID, expected=EXPECTED, matches=st.just([]) | MATCHES, who=st.integers(0, 1))
    def persist_again(self, id: str, expected: str, matches: list[hw.Match], who: int) -> None:
        """The last persist, by anyone, is answered as the first time, whatever is expected."""
        entity = self.entities[id]
        if entity.persists:
            before, records = entity.persists[-1]
            found = self.journals[who].persist(id, records, expected=self.expectation(id, expected), fail_if=matches)
            assert (found.first, found.last, found.repeated) == (before + 1, entity.sequence, True)

    @rule(id=ID, at=CHOICE)
    def persist_an_older_one(self, id: str, at: int) -> None:
        entity = self.entities[id]
        if len(entity.persists) < 2:
            return
        before, records = entity.persists[at % (len(entity.persists) - 1)]
        with pytest.raises(hw.ConditionFailedError) as caught:
            self.journals[0].persist(id, records, expected=before)
        assert caught.value.actual == entity.sequence

    @rule(
        given=st.lists(st.tuples(ID, EVENTS, st.sampled_from(["any", "right", "wrong"])), min_size=2, max_size=6),
        tag=st.none() | st.sampled_from(TAGS),
    )
    def persist_many(self, given: list[tuple[str, list[tuple[str, list[str]]], str]], tag: str | None) -> None:
        """Without waiting in between. With `tag`, none is stored after an event that has it. The cuts say in which order they came."""
        journal, start, cut = self.journals[0], len(self.log), self.store.cut(self.name)
        matches = [] if tag is None else [hw.Match(tags=(tag,))]
        persists = []
        for id, events, expected in given:
            records, wanted = self.records(events), self.expectation(id, expected)
            ack = journal.persist_async(id, records, expected=wanted, fail_if=matches, after=cut if matches else None)
            persists.append((id, records, wanted, ack))
        stored, refused = [], []
        for id, records, wanted, ack in persists:
            try:
                found = ack.result(60)
                stored.append((sum(found.cut.streams[self.name].segments.values()), id, records, wanted, found))
            except hw.ConditionFailedError as error:
                refused.append((wanted, error))
        for _, id, records, wanted, found in sorted(stored, key=lambda item: item[0]):
            assert self.holds(id, wanted) and not self.hits(matches, start)
            assert (self.append(id, records), False) == (found.first, found.repeated)
        for wanted, failed in refused:
            assert (failed.actual != wanted and wanted is not None) if failed.position is None else self.hits(matches, start)
        if tag is None:
            assert len(stored) >= sum(wanted is None for _, _, wanted, _ in persists), "refused, though nothing forbids it"
        self.note_cut()

    @rule(
        steps=st.lists(st.tuples(ID, EVENTS, EXPECTED), min_size=1, max_size=3),
        matches=st.just([]) | MATCHES,
        after=st.none() | CHOICE,
        required=st.none() | st.tuples(ID, st.sampled_from(["right", "right", "exists", "wrong"])),
        between=st.lists(st.sampled_from(["flush", "scale", "persist", "nothing", "resume"]), max_size=3),
        aborts=st.integers(0, 5),
    )
    def transact(
        self,
        steps: list[tuple[str, list[tuple[str, list[str]]], str]],
        matches: list[hw.Match],
        after: int | None,
        required: tuple[str, str] | None,
        between: list[str],
        aborts: int,
    ) -> None:
        """Persists that commit together or not at all; some are staged, and things happen before the commit."""
        tx = self.store.transaction()
        cut, start = self.after(after)
        written: dict[str, int] = {}
        given: list[tuple[str, list[hw.Record], int, Any]] = []
        for place, (id, events, expected) in enumerate(steps):
            records = self.records(events)
            at = written.get(id, self.entities[id].sequence)
            # A transaction that was resumed does not know what it persisted before.
            is_resumed = "resume" in between[:place] and id in written
            wanted = self.expectation(id, "right" if is_resumed and expected == "any" else expected, at)
            sequence = wanted if isinstance(wanted, int) else at
            more: dict[str, Any] = {"fail_if": matches, "after": cut} if matches and not place else {}
            tx.persist(self.name, id, records, expected=wanted, **more)
            given.append((id, records, sequence, wanted))
            written[id] = sequence + len(records)
            if place < len(between):
                tx = self.do_between(tx, between[place], place)
        if required is not None and required[0] not in written:
            condition = self.expectation(*required)
            tx.require_entity(self.name, required[0], condition)
        else:
            required = None
        if not aborts:
            tx.abort()
            return
        fits = not self.hits(matches, start) and (required is None or self.holds(required[0], condition))
        at_now = {id: entity.sequence for id, entity in self.entities.items()}
        for id, records, sequence, wanted in given:
            entity = self.entities[id]
            is_first = at_now[id] == entity.sequence
            fits = fits and at_now[id] == sequence and not (wanted is hw.EXISTS and is_first and (not sequence or entity.is_deleted))
            at_now[id] += len(records)
        try:
            tx.commit()
        except hw.ConditionFailedError:
            assert not fits, "refused, though nothing forbids it"
            return
        assert fits, "committed in spite of its conditions"
        for id, records, _, _ in given:
            self.append(id, records)
        self.note_cut()

    def do_between(self, tx: hw.Transaction, what: str, at: int) -> hw.Transaction:
        if what in ("flush", "resume"):
            tx.flush()
        if what == "resume":
            tx = self.stores[1].resume_transaction(tx.id)
        elif what == "scale":
            self.do_scale(at % 2 == 0, at)
        elif what == "persist":
            self.do_persist("b", self.records([("p", ["z"])]), None, [], None, 1)
        return tx

    # Deletion and snapshots.

    @rule(id=ID, back=st.integers(0, 3), who=st.integers(0, 1))
    def delete_to(self, id: str, back: int, who: int) -> None:
        entity = self.entities[id]
        sequence = max(entity.sequence - back, 0)
        self.journals[who].delete_to(id, sequence)
        entity.low = max(entity.low, sequence + 1)
        entity.snapshots = {at: state for at, state in entity.snapshots.items() if at >= sequence}

    @rule(id=ID, who=st.integers(0, 1))
    def delete(self, id: str, who: int) -> None:
        entity = self.entities[id]
        self.journals[who].delete(id)
        if entity.sequence:
            entity.low, entity.is_deleted, entity.snapshots = entity.sequence + 1, True, {}

    @rule(id=ID, back=st.integers(0, 3), state=CHOICE)
    def snapshot(self, id: str, back: int, state: int) -> None:
        entity = self.entities[id]
        sequence = entity.sequence - back
        if sequence < 1 or entity.is_deleted:
            with pytest.raises(hw.InvalidRequestError):
                self.journals[0].snapshot(id, sequence, state)
        else:
            self.journals[0].snapshot(id, sequence, state)
            entity.snapshots[sequence] = state

    @rule(id=ID, until=st.none() | st.integers(0, 9))
    def delete_snapshots(self, id: str, until: int | None) -> None:
        entity = self.entities[id]
        self.journals[1].delete_snapshots(id, until)
        entity.snapshots = {at: state for at, state in entity.snapshots.items() if until is not None and at > until}

    # Scaling, tiering, reopening.

    @rule(grow=st.booleans(), at=CHOICE)
    def scale(self, grow: bool, at: int) -> None:
        self.do_scale(grow, at)

    def do_scale(self, grow: bool, at: int) -> None:
        opened = sorted(self.stream.segments(), key=lambda segment: segment.start)
        if len(opened) == 1 or (grow and len(opened) < 6):
            self.stream.split(opened[at % len(opened)].number)
        else:
            first = at % (len(opened) - 1)
            self.stream.merge([opened[first].number, opened[first + 1].number])
        self.note_cut()

    @rule()
    def tend(self) -> None:
        assert self.store.run_upkeep().problems == ()

    @rule(who=st.integers(0, 1))
    def reopen(self, who: int) -> None:
        self.stores[who].close()
        self.stores[who] = hw.open(self.url, catalog=self.catalog, create=False, upkeep=False)
        self.open_journals()

    # Queries that stop and go on.

    @rule(
        wanted=st.sampled_from([{}, {"tag": "x"}, {"tag": "z"}, {"type": "p"}, {"id": "a"}]),
        at=CHOICE,
        count=st.integers(0, 6),
        live=st.booleans(),
    )
    def begin_query(self, wanted: dict[str, Any], at: int, count: int, live: bool) -> None:
        cut, start = self.cuts[at % len(self.cuts)]
        query = self.journals[0].query(**wanted, start=cut, follow=live)
        expected = len(self.visible(start, **wanted))
        given = list(itertools.islice(query, min(count, expected)))
        assert len(given) == min(count, expected)
        self.paused.append(Paused(hw.Cut.parse(str(query.cut)), given, wanted, start))
        del self.paused[:-3]

    @rule(at=CHOICE, who=st.integers(0, 1))
    def resume_query(self, at: int, who: int) -> None:
        if not self.paused:
            return
        paused = self.paused.pop(at % len(self.paused))
        given = paused.given + list(self.journals[who].events(**paused.wanted, start=paused.cut))
        self.same_events(given, self.visible(paused.start, **paused.wanted), may_be_gone=True)

    @rule(one=CHOICE, other=CHOICE, tag=st.none() | st.sampled_from(TAGS))
    def query_between(self, one: int, other: int, tag: str | None) -> None:
        (start, first), (end, last) = sorted((self.cuts[one % len(self.cuts)], self.cuts[other % len(self.cuts)]), key=lambda item: item[1])
        wanted: dict[str, Any] = {} if tag is None else {"tag": tag}
        self.same_events(list(self.journals[1].events(**wanted, start=start, end=end)), self.visible(first, last, **wanted))

    def same_events(self, given: list[hw.Recorded], wanted: list[Event], *, may_be_gone: bool = False) -> None:
        """Each event once, in its entity's order. `may_be_gone`: some were given before they were deleted."""
        found = {event.event_id: (event.id, event.sequence, event.type, event.tags, event.data) for event in given}
        assert len(found) == len(given), "an event was given twice"
        expected = {event.event_id: (event.id, event.sequence, event.type, event.tags, event.data) for event in wanted}
        if may_be_gone:
            gone = {event.event_id for event in self.log if event.sequence < self.entities[event.id].low}
            found = {id: event for id, event in found.items() if id not in gone}
        assert found == expected
        check_order([(event.position, event.id, event.sequence) for event in given], "a query")

    # Reading.

    @invariant()
    def heads_are_right(self) -> None:
        if not hasattr(self, "name"):
            return
        for id, entity in self.entities.items():
            newest = max(entity.snapshots, default=None)
            assert self.journals[1].head(id) == (entity.sequence, entity.low if entity.sequence else 0, newest)

    @rule(who=st.integers(0, 1))
    def read_all(self, who: int) -> None:
        journal = self.journals[who]
        by_id: dict[str, list[Event]] = defaultdict(list)
        for event in self.visible():
            by_id[event.id].append(event)
        for id, entity in self.entities.items():
            data = [event.data for event in by_id[id]]
            assert [event.data for event in journal.replay(id)] == data
            assert [event.data for event in journal.replay(id, reverse=True, limit=3)] == data[::-1][:3]
            assert [event.data for event in journal.replay(id, after=2, until=7)] == [
                one.data for one in by_id[id] if 2 < one.sequence <= 7
            ]
            found = journal.find_snapshot(id)
            newest = max(entity.snapshots, default=None)
            assert found is None if newest is None else found == (newest, entity.snapshots[newest], 1)
        alive = sorted((id for id, entity in self.entities.items() if entity.sequence and not entity.is_deleted), key=str.encode)
        assert list(journal.ids()) == alive
        queries: list[dict[str, Any]] = [
            {},
            *({"tag": tag} for tag in TAGS),
            *({"type": type} for type in TYPES),
            *({"id": id} for id in IDS),
        ]
        for wanted in queries:
            self.same_events(list(journal.events(**wanted)), self.visible(**wanted))

    def teardown(self) -> None:
        if hasattr(self, "name"):
            lows = {id: entity.low for id, entity in self.entities.items()}
            self.read_all(0)
            check_journal(self.store, self.name, lows=lows)
            self.tend()
            self.read_all(1)
            stored = check_journal(self.store, self.name, lows=lows)
            assert {event.event_id for event in stored} == {str(event.event_id) for event in self.log}
            report = check_store(self.store)
            assert report.ok, report.problems
            self.stream.seal()
            self.store.delete_stream(self.name)
        for store in self.stores:
            store.close()


@pytest.mark.slow
@pytest.mark.timeout(900)  # a failure is made small before it is shown, which takes its time
@pytest.mark.parametrize("catalog", ["memory", "sqlite", "postgresql"])
def test_a_journal_behaves_like_a_dict(catalog: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    url = f"memory://{tmp_path.name}" if catalog == "memory" else str(tmp_path / "store")
    catalog_url = str(request.getfixturevalue("postgres_url")) if catalog == "postgresql" else None
    # A step costs more on PostgreSQL.
    examples = (150 if request.config.getoption("--long") else 15) // (3 if catalog_url else 1)
    settings = hypothesis.settings(max_examples=examples, stateful_step_count=30)
    hw.open(url, catalog=catalog_url).close()
    make: Any = lambda: JournalMachine(url, catalog_url)  # noqa: E731
    run_state_machine_as_test(make, settings=settings)
