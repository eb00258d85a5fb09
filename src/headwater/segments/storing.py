"""The storer: makes flushes durable and commits them, in the order in which they were begun.

It routes and encodes what a flush was given, writes large blocks to storage, and commits under its session's next number. Storage writes
overlap; commits are in order, and flushes that are stored when their turn comes share one commit. The storer does not know why a flush is
due, or who waits for it: `finish` answers for each part where it was placed, or why it was not.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from typing import NamedTuple

from headwater.catalog import sessions
from headwater.catalog.parts import SEALED, Refused, Stored
from headwater.errors import AlreadyExistsError, FencedError, UnavailableError
from headwater.model.limits import SESSION_SECONDS
from headwater.runtime import failpoints
from headwater.runtime.workers import Task
from headwater.segments.engine import Engine
from headwater.segments.lanes import Lane, Placement, Run
from headwater.segments.pending import PendingFlush, PendingPart, Piece, Session
from headwater.segments.routing import Router


class Answer(NamedTuple):
    """What became of a part of a flush: its runs with the place that they share; or why there is none.

    `refused` is a refusal of the catalog, `error` what failed before that.
    """

    part: PendingPart
    placements: list[tuple[list[Run], Placement]]
    refused: Refused | None = None
    error: BaseException | None = None


class Storer:
    """Stores flushes as one session after another. For the flusher's thread, or for one who stores in its place.

    `when_stored` is called by other threads, whenever the bytes of a flush are stored.
    """

    def __init__(self, engine: Engine, when_stored: Callable[[], None]) -> None:
        self._engine = engine
        self._when_stored = when_stored
        self.after_fork()

    def after_fork(self) -> None:
        """Begin with nothing: in a forked child, what is under way is the parent's."""
        self.router = Router(self._engine)
        #: The flushes that were begun and are not done, the oldest first.
        self.under_way: deque[PendingFlush] = deque()
        self.session: Session | None = None
        self._turn = 0

    # A flush on its way.

    def begin(self, flush: PendingFlush) -> None:
        """Begin to store a flush. UnavailableError: nothing of it was begun."""
        for part in flush.parts:
            try:
                self.route(part)
            except UnavailableError:
                raise
            except BaseException as error:
                # A panic in a library's Rust code is no Exception. Nobody else has these runs.
                part.routing_error = error
        self.under_way.append(flush)
        # `prepare` tries again when it is the flush's turn, and raises.
        with suppress(UnavailableError):
            self._begin_storing(flush)

    def route(self, part: PendingPart) -> None:
        """Route a part's runs to the open segments of its stream."""
        self._turn += 1
        part.pieces = [Piece(part.stream, part.runs, self.router.route(part.stream), self._turn)]

    def prepare(self, flush: PendingFlush) -> bool:
        """Give the oldest flush the session's next number; False if it is not stored yet.

        It absorbs the flushes after it that are stored by now: one commit, and one sync, for all of them.
        """
        if not flush.begun:
            self._begin_storing(flush)
        if flush.catalog_flush is not None:
            return True
        if flush.task is not None and not (flush.task.done and self._check_stored(flush.task)):
            return False
        if flush.parts and not flush.failed_parts:
            while len(self.under_way) > 1 and self.under_way[1].is_stored:
                flush.absorb(self.under_way[1])
                del self.under_way[1]
            flush.catalog_flush = flush.to_catalog(self._live_session(), self.under_way)
        return True

    def finish(self, flush: PendingFlush) -> list[Answer] | None:
        """Commit the oldest flush, which is prepared; `done` drops it. None if the session was fenced, and a new one stores it first.

        Parts that failed before the commit are answered for alone, and leave the flush: prepare and finish the rest again.
        """
        if flush.catalog_flush is None:
            failed = [Answer(part, [], error=part.error) for part in flush.failed_parts]
            flush.parts = [part for part in flush.parts if part.error is None]
            if not flush.parts:
                self.under_way.popleft()
            return failed
        try:
            return self.commit(flush)
        except FencedError:
            self._replace_session()
            return None

    def commit(self, flush: PendingFlush) -> list[Answer]:
        """Commit a prepared flush. FencedError if the session is fenced. Called again after any failure, it answers the same."""
        assert flush.catalog_flush is not None
        results = self._engine.commit_flush(flush.catalog_flush)
        if self.session is not None:
            self.session.last_flush = flush.catalog_flush.number
            self.session.renewed = time.monotonic()
        failpoints.reach("append.committed")
        answers = []
        for part, result in zip(flush.parts, results, strict=True):
            if isinstance(result, Stored):
                answers.append(Answer(part, _placements(part, result)))
                continue
            if result.reason == SEALED:
                self.router.forget(part.stream)
            answers.append(Answer(part, [], refused=result))
        return answers

    def done(self, flush: PendingFlush) -> None:
        """Drop a committed flush, and tell followers of it."""
        assert flush.catalog_flush is not None
        self._engine.announce(flush.catalog_flush)
        self.under_way.popleft()

    def take_out(self, lane: Lane) -> list[Run]:
        """Take a lane's runs out of the flushes under way, none of which is being committed."""
        runs: list[Run] = []
        for flush in self.under_way:
            for part in [part for part in flush.parts if part.lane is lane]:
                if flush.task is not None:
                    flush.task.wait()
                runs += part.runs
                flush.parts.remove(part)
            flush.catalog_flush = None
        return runs

    def drop_all(self) -> list[PendingPart]:
        """Drop all flushes under way; returns their parts."""
        parts = []
        for flush in self.under_way:
            if flush.task is not None:
                flush.task.wait()
            parts += flush.parts
        self.under_way.clear()
        # The last commit may have succeeded. Don't reuse its number: another flush would get its answer, and not be stored.
        if self.session is not None:
            self.session.close()
            self.session = None
        return parts

    def _begin_storing(self, flush: PendingFlush) -> None:
        """Encode the runs and write the blocks to storage. A small flush goes into the commit itself."""
        flush.begin_again()
        if flush.is_small:
            failpoints.reach("append.encoded")
            flush.begun = True
            return
        session = self._live_session()
        index = session.reserve()
        flush.first_file = session.first_file
        flush.begun = True
        flush.task = self._engine.workers.submit(lambda: flush.store(session, index), self._when_stored)

    def _check_stored(self, task: Task[None]) -> bool:
        """Raise what kept a flush from being stored; False if it has to be stored as another session."""
        try:
            task.result()
        except UnavailableError:
            # Store it again at the next attempt, and not before: after room was made, a retry must not raise this attempt's error.
            # Store the flushes after it again too, so that a later commit names later bytes.
            for other in self.under_way:
                if other.task is not None:
                    other.task.wait()
                other.begun = other.task is None
            raise
        except AlreadyExistsError:
            # Another process has the same session's id, and so the same names of objects: see `begin_session`.
            self._replace_session()
            return False
        failpoints.reach("append.stored")
        return True

    # The session.

    @property
    def is_used_up(self) -> bool:
        """Whether no flush may begin until those under way are committed and another session begins."""
        return self.session is not None and self.session.is_used_up

    @property
    def pause_seconds(self) -> float | None:
        """Call `rest` after this time without a flush. None: there is nothing to give back."""
        return self.session.pause_seconds if self.session is not None else None

    def rest(self) -> None:
        """Give back the space that the session preallocated."""
        if self.session is not None:
            self.session.rest()

    def renew(self) -> None:
        """Renew the session, if it is due."""
        session = self.session
        if session is not None and time.monotonic() - session.renewed > SESSION_SECONDS / 3:
            live = self._engine.run(sessions.renew_session, session.id, session.first_needed(self.under_way))
            session.renewed = time.monotonic()
            # A commit whose answer was lost may have been done before the fence: only its own repetition can tell.
            if not live and not (self.under_way and self.under_way[0].catalog_flush is not None):
                self._replace_session()

    def close(self) -> None:
        """End the session, after all that was begun is done."""
        session, self.session = self.session, None
        if session is not None:
            session.close()
            # If the catalog is out of reach, upkeep fences the session when its lease is over: all its flushes are answered.
            with suppress(UnavailableError):
                self._engine.run(sessions.end_session, session.id)

    def _live_session(self) -> Session:
        if self.is_used_up and not any(flush.begun for flush in self.under_way):
            self.close()
        if self.session is None:
            self.session = Session(self._engine)
        return self.session

    def _replace_session(self) -> None:
        """Continue with a new session after the old one was fenced or forgotten. Store all flushes again: none was committed.

        The old session's files may be garbage-collected, so no commit names them again.
        """
        if self.session is not None:
            old, self.session = self.session, None
            old.close()
        for flush in self.under_way:
            if flush.task is not None:
                flush.task.wait()
            flush.begun = False
        for flush in self.under_way:
            self._begin_storing(flush)


def _placements(part: PendingPart, stored: Stored) -> list[tuple[list[Run], Placement]]:
    firsts = iter(stored.firsts)
    found = []
    for piece in part.pieces:
        segments = tuple([segment for segment, _ in piece.encode()])
        placement = Placement(segments, tuple(islice(firsts, len(segments))), piece.which, stored.appended_at, stored.answer)
        found.append((piece.runs, placement))
    return found
