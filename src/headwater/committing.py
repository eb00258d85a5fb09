"""Committing what transactions were given: the half of a transaction that could live in another process.

It routes and encodes events, stores large blocks, and tries a commit until it is decided, since segments may be sealed, split or merged
meanwhile. A commit that must roll a stream waits a moment for others, which share the roll.
"""

from __future__ import annotations

import threading
import time as clock
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from headwater.catalog import commits, transactions
from headwater.catalog.commits import Outcome
from headwater.catalog.parts import Term, load_term
from headwater.catalog.persists import EntityIs, NoMatch
from headwater.catalog.targets import RollNeeded, RouteStale, ScaledMeanwhile
from headwater.catalog.transactions import Batch
from headwater.contents import Contents
from headwater.errors import ConditionFailedError, CorruptDataError, HeadwaterError
from headwater.gathering import forget_routes, gather, look_again
from headwater.journals.journal import Journal
from headwater.journals.staging import look
from headwater.model.limits import PERSIST_ROUNDS
from headwater.model.markers import Marker
from headwater.runtime import failpoints
from headwater.segments.engine import Engine
from headwater.segments.routing import Router

#: How long a commit that must roll waits for others to share it, and the shortest pause that says no more are coming.
_LONGEST_LINGER_SECONDS = 2.0
_PAUSE_SECONDS = 0.02


class CommitRequest(NamedTuple):
    """A call of commit: `caller` tells it from others for the same transaction, `after` is the last batch that the caller staged.

    `after` is None if the catalog does not know the transaction yet.
    """

    marker: Marker | None
    lease_us: int
    caller: str
    after: int | None


class Committer:
    """Stages and commits what the transactions of one open store were given. `journal` opens a journal by its name."""

    def __init__(self, engine: Engine, router: Router, journal: Callable[[str], Journal]) -> None:
        self._engine = engine
        self._router = router
        self._journal = journal
        self._lock = threading.Lock()
        #: The transactions whose commit is under way. One that must roll waits for those, since they may share it.
        self._undecided: set[str] = set()

    def stage(self, id: str, contents: Contents, after: int) -> None:
        """Make contents durable, still invisible, behind the batch `after`. Given again after a lost answer, they are added once."""
        batch = gather(self._engine, self._router, contents, id)
        failpoints.reach("txn.stored")
        self._engine.run(transactions.stage, id, batch, after)
        failpoints.reach("txn.staged")

    def commit(self, id: str, contents: Contents, request: CommitRequest) -> Outcome:
        """Commit what was staged together with contents. Given again by the same caller, it answers the same."""
        with self._deciding(id):
            outcome = self._commit(id, contents, request)
        # The next transaction of this process shall stage for the segments that are open now.
        forget_routes(self._router, contents, outcome.tails)
        return outcome

    @contextmanager
    def _deciding(self, id: str) -> Iterator[None]:
        with self._lock:
            self._undecided.add(id)
        try:
            yield
        finally:
            self._decide(id)

    def _decide(self, id: str) -> None:
        """It is committed, failed, or waits for a roll."""
        with self._lock:
            self._undecided.discard(id)

    def _commit(self, id: str, contents: Contents, request: CommitRequest) -> Outcome:
        if request.after is not None:
            self._check_objects(id)
        began = clock.monotonic()
        batch = gather(self._engine, self._router, contents, id)
        rounds = 0
        while True:
            try:
                return self._commit_once(id, batch, request)
            except ScaledMeanwhile:
                continue
            except ConditionFailedError as error:
                rounds += 1
                if error.facts.get("reason") != "look" or rounds >= PERSIST_ROUNDS:
                    raise
                # An event that may match is there: it is read, and the condition holds from then on if it does not.
                batch.looked = {**batch.looked, **self._look(error.facts["match"], batch.looked)}
            except RouteStale:
                look_again(self._router, contents)
                stale, batch = batch, gather(self._engine, self._router, contents, id)
                batch.looked = stale.looked
                if _places(batch) == _places(stale):
                    raise CorruptDataError(
                        f"transaction {id} can't be committed: a segment it writes to is open and closed at once"
                    ) from None
            except RollNeeded:
                # Only what was staged before needs one, so the catalog knows of it.
                self._engine.run(commits.prepare, id, batch, request.caller)
                failpoints.reach("txn.prepared")
                self._linger(id, clock.monotonic() - began)
                outcome = self._engine.run(commits.commit_prepared, id, batch, request.caller)
                if isinstance(outcome, HeadwaterError):
                    raise outcome from None
                return outcome

    def _commit_once(self, id: str, batch: Batch, request: CommitRequest) -> Outcome:
        self._engine.pace.note()
        if request.after is None and request.marker is None:
            outcome = self._engine.run(commits.commit_one, id, batch, request.lease_us, request.caller)
            if outcome is not None:
                return outcome
        return self._engine.run(commits.commit, id, batch, *request)

    def _check_objects(self, id: str) -> None:
        """CorruptDataError unless all that was staged is in storage: a commit must not name what is not there."""
        found = self._engine.run(transactions.list_objects, id)
        sizes = [(key, end, self._engine.workers.submit(partial(self._engine.storage.size, key))) for key, end in found if key is not None]
        lost = [key for key, end, size in sizes if (size.result() or 0) < end]
        if lost or len(sizes) < len(found):
            name = lost[0] if lost else "an object that the catalog does not have"
            raise CorruptDataError(f"transaction {id} can't be committed: what it staged in {name} is gone", object=name)

    def _look(self, fields: str, looked: Mapping[Term, Term]) -> dict[Term, Term]:
        """The condition that may not hold, as it was given, with what takes its place. ConditionFailedError if it does not hold."""
        term = load_term(NoMatch.__name__, fields, None, -1)
        again = look(self._journal(term.name), term)
        given = next((before for before, after in looked.items() if after == term), term)
        return {given: again}

    def _linger(self, id: str, spent: float) -> None:
        """Wait while more transactions come to share a roll: those of this process that are on their way, and others soon after them."""
        self._decide(id)
        now = clock.monotonic()
        deadline = now + _LONGEST_LINGER_SECONDS
        # As long as this one took to get here, another may take that began a little later.
        pause = max(_PAUSE_SECONDS, min(spent, _LONGEST_LINGER_SECONDS / 4))
        waiting = 0
        while now < deadline and (found := self._engine.run(commits.count_waiting)) > waiting:
            waiting = found
            coming = self._coming()
            until = now + pause
            while now < until or (now < deadline and coming & self._coming()):
                clock.sleep(_PAUSE_SECONDS / 4)
                now = clock.monotonic()

    def _coming(self) -> set[str]:
        with self._lock:
            return set(self._undecided)


def _places(batch: Batch) -> set[tuple[Any, ...]]:
    found: set[tuple[Any, ...]] = {(append.stream, append.segment, append.log) for append in batch.appends}
    return (
        found
        | {(term.stream, term.segments) for term in batch.terms if isinstance(term, NoMatch)}
        | {(term.stream, term.segment, term.id) for term in batch.terms if isinstance(term, EntityIs)}
    )
