"""Persisting: a persist on its way to the flusher, and what it does if its entity or its condition moved meanwhile."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

from headwater.catalog.persists import RESCALED, EntityMoves, NoMatch, Repeated
from headwater.errors import ConditionFailedError, ConflictError, HeadwaterError, InvalidRequestError, NotFoundError, UnavailableError
from headwater.journals.events import Wanted
from headwater.journals.queries import Query
from headwater.model.arguments import check_seconds
from headwater.model.cuts import Cut, StreamCut
from headwater.model.limits import PERSIST_ROUNDS, RACE_ROUNDS
from headwater.model.matches import EXISTS, Expected, Match
from headwater.model.records import Recorded, Row, columns_of, row_bytes, values_of
from headwater.runtime import failpoints
from headwater.segments.block import Chunk
from headwater.segments.lanes import EVENT_OVERHEAD_BYTES, Few, Run
from headwater.segments.pending import FEW_EVENTS

if TYPE_CHECKING:
    from headwater.journals.journal import Journal
    from headwater.runtime.workers import Workers

_MOST = (1 << 62) - 1


class Persisted:
    """What was persisted: the events `first` to `last` of an entity. `repeated`: an earlier persist of the same records stored them.

    `cut` is a place of the journal right after them, or, of a repeat, at or after it: to wait for a view that has them.
    """

    __slots__ = ("_cut", "first", "id", "last", "repeated")

    def __init__(self, id: str, first: int, last: int, cut: Cut | tuple[str, str, int, Mapping[int, int]], repeated: bool = False) -> None:
        self.id = id
        self.first = first
        self.last = last
        # Made when it is asked for: few ask, and it takes a good part of what a persist does.
        self._cut = cut
        self.repeated = repeated

    @property
    def cut(self) -> Cut:
        if not isinstance(self._cut, Cut):
            store, name, stream, numbers = self._cut
            self._cut = Cut(store, {name: StreamCut(stream, numbers)})
        return self._cut

    def _fields(self) -> tuple[Any, ...]:
        return self.id, self.first, self.last, self.cut, self.repeated

    def __iter__(self) -> Any:
        return iter(self._fields())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Persisted) and self._fields() == other._fields()

    def __hash__(self) -> int:
        return hash((self.id, self.first, self.last, self.repeated))

    def __repr__(self) -> str:
        return f"Persisted(id={self.id!r}, first={self.first}, last={self.last}, cut={self.cut!r}, repeated={self.repeated})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Persisted, self._fields()


class Condition:
    """The matches that may not be there after a cut; `after` is None for ever."""

    __slots__ = ("after", "matches")

    def __init__(self, matches: tuple[Match, ...], after: Cut | None) -> None:
        self.matches = matches
        self.after = after


class Known(NamedTuple):
    """The sequence of an entity, and the hash of the persist that brought it there, if it was one of this process's."""

    sequence: int
    previous: str


def ids_hash(rows: Sequence[Row]) -> bytes:
    """What tells a persist from others, by the ids of its events."""
    return blake2b("".join([row.event_id for row in rows]).encode(), digest_size=16).digest()


def moves(stream: int, name: str, id: str, head: Known, expected: int | None, rows: Sequence[Row], ids: bytes | None) -> EntityMoves:
    """The term of a persist whose events are a block of their own."""
    types: dict[str, tuple[int, int]] = {}
    tags: dict[str, list[int]] = {}
    for place, row in enumerate(rows):
        types[row.type] = place, types.get(row.type, (0, 0))[1] + 1
        for tag in row.tags:
            tags.setdefault(tag, []).append(place)
    by_type = tuple([(type, *found) for type, found in types.items()])
    by_tag = tuple([(tag, tuple(places)) for tag, places in tags.items()])
    return EntityMoves(stream, name, id, head.sequence, expected, len(rows), by_type, by_tag, ids, head.previous)


def no_matches(journal: Journal, id: str, condition: Condition, numbers: Sequence[int]) -> tuple[NoMatch, ...]:
    """The terms of a condition, where these are the open segments."""
    after, done, floor = journal._after(condition.after) if condition.after is not None else ((), (), -1)
    watched = tuple(sorted(numbers))
    ref = journal._ref
    return tuple(
        [
            NoMatch(ref.id, ref.name, id, watched, tuple(match.tags), tuple(match.types), tuple(match.ids), after, done, floor)
            for match in condition.matches
        ]
    )


def find_matches(journal: Journal, condition: Condition, end: Cut) -> Iterator[Recorded]:
    """The events that a condition forbids, up to a cut."""
    for match in condition.matches:
        # The narrowest of what the index knows.
        if match.tags:
            wanted = [Wanted(tag=match.tags[0])]
        elif match.ids:
            wanted = [Wanted(id=id) for id in match.ids]
        else:
            wanted = [Wanted(type=type) for type in match.types]
        for each in wanted:
            yield from (found for found in Query(journal, each, condition.after, end, False) if _matches(match, found))


def _matches(match: Match, found: Recorded) -> bool:
    return (
        set(match.tags) <= set(found.tags) and (not match.types or found.type in match.types) and (not match.ids or found.id in match.ids)
    )


class Persist:
    """A persist that was given: its ack. `result` waits until the events are durable and readable."""

    __slots__ = (
        "_answer",
        "_condition",
        "_error",
        "_expected",
        "_id",
        "_ids",
        "_journal",
        "_left",
        "_lock",
        "_races",
        "_rounds",
        "_rows",
        "_run",
        "_sequence",
    )

    def __init__(self, journal: Journal, id: str, rows: list[Row], expected: int | Expected | None, condition: Condition | None) -> None:
        self._journal = journal
        self._id = id
        self._rows = rows
        self._ids = ids_hash(rows)
        self._expected = expected
        self._condition = condition
        self._lock = threading.Lock()
        self._races = 0
        self._rounds = 0
        self._sequence = 0
        #: Where the entity is after it.
        self._left = Known(0, "")
        self._run: Run | None = None
        self._answer: Persisted | None = None
        self._error: HeadwaterError | None = None

    def __repr__(self) -> str:
        return f"<Persist of {self._id!r} {'done' if self.done else 'pending'}>"

    @property
    def done(self) -> bool:
        """Whether `result` would return, or raise, at once."""
        return self.is_stored

    def result(self, timeout: float | None = None) -> Persisted:
        """What was persisted. Raises what went wrong. After UnavailableError or TimeoutError it may still be stored: ask again."""
        if timeout is not None:
            timeout = check_seconds(timeout, "timeout")
        while not self.is_decided:
            run = self._run
            assert run is not None
            if not run.ended:
                self._journal._flusher.wait_for(run, timeout)
            if run.error is not None:
                self._journal._refusals.handle()
            self._take(run)
        if self._error is not None:
            raise self._error.again()
        assert self._answer is not None
        return self._answer

    @property
    def id(self) -> str:
        return self._id

    @property
    def is_decided(self) -> bool:
        """Whether it is known what became of it."""
        return self._answer is not None or self._error is not None

    @property
    def is_stored(self) -> bool:
        """Whether it is stored, even if nobody asked for the answer."""
        run = self._run
        return self.is_decided or (run is not None and run.placement is not None)

    # What becomes of it.

    def give(self) -> None:
        """Give the events to the flusher, with the sequences that they have if nobody is quicker."""
        journal, is_fixed = self._journal, isinstance(self._expected, int)
        # What was refused goes first. Whoever relied on it is refused too.
        if journal._refusals.has(self._id):
            journal._refusals.handle()
        while True:
            head = Known(self._expected, "") if isinstance(self._expected, int) else journal._heads.get(self._id)
            if self._give_after(head, self._refused, None if is_fixed else head):
                return

    def _give_after(self, head: Known, refused: Callable[[], None], known: Known | None, *, is_again: bool = False) -> bool:
        """Give the events to the flusher, after this sequence; False if something other than `known` is known of the entity by then."""
        journal, count = self._journal, len(self._rows)
        route = journal._router.route(journal._ref)
        terms = self._conditions(route.numbers) if self._condition is not None else ()
        term = self._moves(head)
        events = self._events(head.sequence + 1)
        size = sum(map(row_bytes, self._rows)) + EVENT_OVERHEAD_BYTES * count
        # Otherwise the next call waits while it holds the lock.
        journal._flusher.wait_for_room()
        with journal._heads.lock:
            # Persists of one entity are given in the order of their sequences.
            if known is not None and not journal._heads.is_known(self._id, known):
                return False
            left = Known(head.sequence + count, self._ids.hex())
            # Others that were given after it are refused too, and given again in their order: new ones line up after them.
            if not is_again or journal._heads.is_known(self._id, self._left):
                journal._heads.put(self._id, left)
            self._sequence, self._left = head.sequence, left
            self._run = journal._flusher.give(journal._ref, events, size, (term, *terms), refused)
        return True

    def _give_again(self, sequence: int) -> None:
        """Give the events again, after this sequence. Whoever decides waits for it before the next one of the entity is given."""
        failpoints.reach("persist.refused")
        self._give_after(Known(sequence, ""), _ignore, None, is_again=True)

    def _events(self, first: int) -> Chunk | Few:
        """The events with their sequences, as columns if they are not a few."""
        rows, id = self._rows, self._id
        if len(rows) <= FEW_EVENTS:
            return Few(values_of(id, first, rows), [id.encode()] * len(rows))
        return Chunk(columns_of(id, first, rows), self._journal._keys(id, len(rows)), None)

    def _refused(self) -> None:
        self._journal._refusals.note(self)

    def decide(self) -> None:
        """After a refusal: take the outcome, or give the events again until there is one, if the reason may have passed."""
        while not self.is_decided:
            with self._journal._heads.lock:
                run = self._run  # it may have been refused before `give` knew of it
            if run is None:
                return
            if not run.ended:
                self._journal._flusher.wait_for(run)
            self._take(run)

    def _moves(self, head: Known) -> EntityMoves:
        expected = -1 if self._expected is EXISTS else self._expected
        assert expected is None or isinstance(expected, int)
        ref = self._journal._ref
        return moves(ref.id, ref.name, self._id, head, expected, self._rows, self._ids)

    def _conditions(self, numbers: Sequence[int]) -> tuple[NoMatch, ...]:
        assert self._condition is not None
        return no_matches(self._journal, self._id, self._condition, numbers)

    def _take(self, run: Run) -> None:
        with self._lock:
            if self._run is run and run.ended and not self.is_decided:
                self._answer = self._outcome(run)

    def _outcome(self, run: Run) -> Persisted | None:
        journal, error = self._journal, run.error
        if error is None:
            placement = run.placement
            assert placement is not None
            ref = journal._ref
            found = placement.answer
            cut: Any = journal._tail() if found is None else (journal._engine.store_id, ref.name, ref.id, found)
            return Persisted(self._id, self._sequence + 1, self._sequence + len(self._rows), cut)
        reason = error.facts.get("reason")
        is_race = reason == "moved" and not isinstance(self._expected, int)
        if is_race and self._races < RACE_ROUNDS:
            self._races += 1
            assert isinstance(error, ConditionFailedError) and error.actual is not None
            self._give_again(error.actual)
            return None
        if reason in ("look", RESCALED) and self._rounds < PERSIST_ROUNDS:
            self._rounds += 1
            if reason == RESCALED:
                journal._router.forget(journal._ref)
            elif (repeated := self._look()) is not None:
                journal._heads.forget(self._id, self._left)
                return repeated
            if self._error is None:
                self._give_again(self._sequence)
                return None
        journal._heads.forget(self._id, self._left)
        if isinstance(error, Repeated):
            return Persisted(self._id, error.facts["first"], error.facts["last"], journal._tail(), True)
        if is_race or reason in ("look", RESCALED):
            error = UnavailableError(f"{self._id!r} of {journal.name}, or what it depends on, changes all the time: repeat the call")
        self._error = self._error or error
        return None

    def _look(self) -> Persisted | None:
        """Read what the condition forbids, up to a new cut, from which it is checked the next time."""
        journal, condition = self._journal, self._condition
        assert condition is not None
        tail = journal._tail()
        for found in find_matches(journal, condition, tail):
            mine = [place for place, row in enumerate(self._rows) if row.event_id == str(found.event_id)]
            if mine and found.id == self._id:
                first = found.sequence - mine[0]
                return Persisted(self._id, first, first + len(self._rows) - 1, journal._tail(), True)
            self._error = ConditionFailedError(
                f"{journal.name}: {found.id!r} has an event that may not be there, of type {found.type!r} at {found.position}: "
                "read again, decide again",
                self._id,
                position=found.position,
            )
            return None
        self._condition = Condition(condition.matches, tail)
        return None


def _ignore() -> None:
    """Whoever gave it waits for it."""


class Refusals:
    """Persists that were refused, and are decided one after the other, given again if need be: those of one entity keep their order."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._waiting: deque[Persist] = deque()
        self._ids = Counter[str]()
        #: Guards these two, for a moment.
        self._mutex = threading.Lock()
        self._lock = threading.Lock()
        #: Those given last, the oldest first, without those that are stored.
        self._given: deque[Persist] = deque()

    def note(self, persist: Persist) -> None:
        """Called by the flusher's thread, which must not wait."""
        with self._mutex:
            self._waiting.append(persist)
            self._ids[persist.id] += 1
        with suppress(RuntimeError):  # The workers are closed: whoever closes the store handles what is left.
            self._workers.submit(self._handle_quietly)

    def has(self, id: str) -> bool:
        """Whether a persist of this entity was refused and is not decided."""
        return id in self._ids

    def _handle_quietly(self) -> None:
        # What is out of reach now is asked for again by whoever waits for it, or closes the store.
        with suppress(HeadwaterError):
            self.handle()

    def handle(self) -> None:
        """Decide all that were refused before this call. UnavailableError if that is not possible now: they stay refused."""
        with self._lock:
            while self._waiting:
                persist = self._waiting[0]
                persist.decide()
                with self._mutex:
                    self._waiting.popleft()
                    self._ids[persist.id] -= 1
                    if not self._ids[persist.id]:
                        del self._ids[persist.id]

    def watch(self, persist: Persist) -> None:
        """Remember a persist, so that closing the store waits for it."""
        given = self._given
        with suppress(IndexError):
            while given[0].is_stored:
                given.popleft()
        given.append(persist)

    def settle(self) -> None:
        """Return when all that was given is stored, or can't be."""
        with suppress(IndexError):
            while True:
                persist = self._given[0]
                # What was decided before was told to whoever asked.
                with suppress(ConflictError, NotFoundError, InvalidRequestError):
                    if not persist.is_decided:
                        persist.result()
                self._given.popleft()


class Heads:
    """The sequences of entities, as this process last knew them with what it gave since. A wrong one costs a round, never an event."""

    _KEPT = 50_000

    def __init__(self, look: Callable[[str], int]) -> None:
        self._look = look
        self._found: dict[str, Known] = {}
        self.lock = threading.Lock()

    def get(self, id: str) -> Known:
        """Where an entity is, looked up if that is not known."""
        found = self._found.get(id)
        return Known(self._look(id), "") if found is None else found

    def is_known(self, id: str, head: Known) -> bool:
        """Whether nothing else is known of an entity by now."""
        return self._found.get(id, head) == head

    def put(self, id: str, head: Known) -> None:
        if len(self._found) >= self._KEPT:
            self._found.clear()
        self._found[id] = head

    def forget(self, id: str, left: Known) -> None:
        """Look the entity up next time, if it was left so. Otherwise somebody was given after that, who says where it is."""
        with self.lock:
            if self._found.get(id) == left:
                del self._found[id]
