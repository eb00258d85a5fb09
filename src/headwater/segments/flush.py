"""The flusher: one thread of a process that makes all its writers' events durable, many at once.

It gathers what came while the previous flush was under way, stores the blocks, commits, and ends the runs. Storage writes may overlap;
commits are in order. Whatever fails stays at the front and is repeated before anything newer.

While its thread has nothing to do, one who waits for the ack of a few events commits them in its own: see `_store_here`.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from types import FrameType

from headwater.catalog import sessions
from headwater.catalog.claims import claimed
from headwater.catalog.parts import CLAIMED, SEALED, PartResult, Refused, Stored, Term
from headwater.errors import (
    AlreadyExistsError,
    FencedError,
    HeadwaterError,
    InvalidRequestError,
    NotFoundError,
    OutcomeUnknownError,
    UnavailableError,
)
from headwater.model.limits import (
    BUFFERED_BYTES,
    FLUSH_BLOCK_BYTES,
    FLUSH_BYTES,
    INLINE_BYTES,
    LARGE_FLUSH_BYTES,
    LOCAL_WRITES,
    MIB,
    REMOTE_WRITES,
    SESSION_SECONDS,
)
from headwater.runtime import calls, failpoints
from headwater.segments.block import Chunk
from headwater.segments.engine import Engine
from headwater.segments.lanes import Lane, Placement, Run, StreamRef
from headwater.segments.memory import Burst
from headwater.segments.pending import PendingFlush, PendingPart, Piece, Session
from headwater.segments.routing import Router

#: While a flush is under way another begins only with this share of one: few large flushes are faster than many small ones, and so is
#: reading what they stored. Not a whole one, which batches seldom fill. This much will do while somebody waits, who may not give more until
#: all of it is stored, or where storage is far.
_OVERLAP = 0.75
_OVERLAP_BYTES_WAITED_FOR = 1 * MIB
#: Beside two, none begins while they have more than this: of events that were given one by one, two keep a disk busy.
_UNDER_WAY_BYTES = 48 * MIB
_LONGEST_PAUSE_SECONDS = 2.0
#: For so long after an ack was stored in its place, the thread looks so often for something to do instead of being told: telling it, to
#: find that it is done already, takes a fifth of an ack's time.
_LOOKING_SECONDS = 0.1
_LOOK_SECONDS = 0.002


class Flusher:
    """Stores the events of all writers of one process, in the order in which each lane gave them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lanes: dict[tuple[int, int, str | None, int], Lane] = {}
        self._begin()

    def _begin(self) -> None:
        # Entered as a mutex, and not as a condition, whose `__enter__` is Python code: a Ctrl-C in there would leave it locked for ever.
        self._mutex = threading.RLock()
        #: What the thread waits for, and what those do who gave it something to store.
        self._work = threading.Condition(self._mutex)
        self._news = threading.Condition(self._mutex)
        self._router = Router(self._engine)
        self._active: dict[Lane, None] = {}
        self._inflight: deque[PendingFlush] = deque()
        #: Appends, by stream, whose caller does not know what became of them.
        self._given_up: dict[int, list[Run]] = {}
        self._buffered_bytes = 0
        #: How much the next flush gathers.
        self._flush_bytes = FLUSH_BYTES
        self._session: Session | None = None
        self._thread: threading.Thread | None = None
        self._turn = 0
        self._failures = 0
        self._failure: HeadwaterError | None = None
        self._kicked = False
        self._burst = Burst()
        #: How many threads wait for a run. A Ctrl-C may leave one too many, which does no harm.
        self._waiters = 0
        #: Whoever closed the store was told that what waits, all of it, can't be stored now.
        self.is_told = False
        #: Nothing new is taken; and, when all that was taken is stored, the thread ends.
        self._is_closed = False
        self._closing = False
        #: The thread waits for something to do, and nobody stores in its place.
        self._is_idle = False
        #: It looks for itself whether there is, since somebody stored in its place a moment ago.
        self._is_looking = False
        self._stored_here = -_LOOKING_SECONDS
        #: The call that stores in its place.
        self._storing: FrameType | None = None

    def after_fork(self) -> None:
        """In a child: the parent stores what was given before the fork; the child begins with nothing."""
        runs = [run for flush in self._inflight for part in flush.parts for run in part.runs]
        for lane in self._lanes.values():
            runs += [*lane.queue, *filter(None, (lane.run, lane.last_run))]
            lane.forget()
            if lane.writer is not None:
                lane.error = FencedError(f"the writer {lane.writer!r} belongs to the parent process: open it again to take it over")
        for run in runs:
            _leave_to_parent(run)
        self._lanes = {key: lane for key, lane in self._lanes.items() if lane.error is None}
        self._begin()

    # What writers call.

    def lane(self, stream: StreamRef, writer: str | None = None, generation: int = 0, last_number: int = 0) -> Lane:
        """The lane of a named writer, or the one that all anonymous writers of a stream share."""
        key = (stream.id, stream.schema_version, writer, generation)
        with self._mutex:
            found = self._lanes.get(key)
            if found is None or found.error is not None:
                found = self._lanes[key] = Lane(self, stream, writer, generation, last_number)
            return found

    def append(self, stream: StreamRef, chunk: Chunk, size: int, terms: tuple[Term, ...]) -> Placement:
        """Store one chunk as a part of its own, which is committed on these terms; return when it is durable, with its place.

        What a term refuses is raised as the term's error. After a lost answer it is found out what happened. OutcomeUnknownError if that
        takes too long: `settle` waits until it is known. After UnavailableError nothing of it is stored, now or later.
        """
        self._check_not_storing()
        run = self.give(stream, chunk, size, terms)
        try:
            self.wait_for(run)
        except BaseException as error:
            is_taken_back = self._give_up(run)
            if not isinstance(error, UnavailableError) or is_taken_back:
                raise
            if not run.ended:
                raise OutcomeUnknownError(
                    f"it is not known whether {stream.name} was changed ({error}): look at it before you do this again"
                ) from error
        if run.error is not None:
            raise run.error.again()
        assert run.placement is not None
        return run.placement

    def give(
        self, stream: StreamRef, chunk: Chunk, size: int, terms: tuple[Term, ...], when_refused: Callable[[], None] | None = None
    ) -> Run:
        """Give one chunk on a lane of its own, to be committed on these terms. It is stored whether or not anybody waits for it.

        `when_refused` is called in the flusher's thread, before the run ends; several refusals in the order of their runs.
        """
        self.wait_for_room()
        lane = Lane(self, stream, None, 0, 0, terms, when_refused)
        with lane.lock:
            return lane.add_chunk(chunk, size)

    def _give_up(self, run: Run) -> bool:
        """Wait no longer for an append. True: it is taken back. False: it is on its way, and tried again until `settle` can tell."""
        with run.lane.lock:
            is_waiting = run in run.lane.queue
            if is_waiting:
                run.lane.queue.remove(run)
        if is_waiting:
            self._release([run])
            return True
        with self._mutex:
            if not run.ended:
                self._given_up.setdefault(run.lane.stream.id, []).append(run)
        return False

    def settle(self, stream: int) -> None:
        """Return when of each append that was given up on it is known whether it is stored. UnavailableError if it can't be known now."""
        if stream not in self._given_up:
            return
        for run in self._given_up.get(stream, [])[:]:
            self.wait_for(run)
        with self._mutex:
            self._given_up = {id: left for id, runs in self._given_up.items() if (left := [run for run in runs if not run.ended])}

    def forget(self, lane: Lane) -> None:
        """Drop a lane that is empty and will not be used again."""
        with self._mutex:
            self._lanes = {key: other for key, other in self._lanes.items() if other is not lane}

    def forget_stream(self, stream: int) -> None:
        """Drop what is known of a stream that was deleted. What still waits for it stays, to be told so."""
        self._router.forget_stream(stream)
        with self._mutex:
            self._lanes = {key: lane for key, lane in self._lanes.items() if lane.stream.id != stream or lane.run or lane.queue}

    def wait_for_room(self) -> None:
        """Block while this process has as many events waiting as it may. UnavailableError if they can't be stored now."""
        if self._buffered_bytes < BUFFERED_BYTES:
            return
        with self._mutex:
            failures = self._failures
            while self._buffered_bytes >= BUFFERED_BYTES:
                if self._failures > failures:
                    raise self._copy_of_failure()
                self._news.wait(1.0)

    def activate(self, lane: Lane) -> None:
        """Note that a lane has something to store."""
        with self._mutex:
            if self._is_closed:
                raise InvalidRequestError("the store is closed")
            self._active[lane] = None
            self.is_told = False
            self._start()
            if not self._is_looking:
                self._work.notify()

    def account(self, size: int) -> None:
        """Count a closed run against the process's limit."""
        with self._mutex:
            self._buffered_bytes += size
            if self._inflight:
                self._work.notify()  # It may be enough for another flush.

    def wait_for(self, run: Run, timeout: float | None = None) -> None:
        """Return when the run ended. UnavailableError if an attempt fails meanwhile: the run stays, and is tried again."""
        if run.process != os.getpid():
            # Some were in nobody's hands but the parent's thread's when it forked.
            _leave_to_parent(run)
            return
        self._check_not_storing()
        if timeout is None and self._is_idle and self._store_here(run):
            return
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._mutex:
            failures = self._failures
            self._kicked = True
            self._waiters += 1
            self._work.notify()
            try:
                while not run.ended:
                    if self._failures > failures:
                        raise self._copy_of_failure()
                    left = None if deadline is None else deadline - time.monotonic()
                    if left is not None and left <= 0:
                        raise TimeoutError("the events are not durable yet; they stay buffered and will be stored")
                    self._news.wait(left)
            finally:
                self._waiters -= 1

    def _check_not_storing(self) -> None:
        self._engine.check_alone()
        if threading.current_thread() is self._thread:
            raise UnavailableError("a finaliser in the midst of another change can't wait for what its own thread is to store: do it later")
        if self._storing is not None and calls.is_under_way(self._storing):
            raise UnavailableError(
                "this thread is in the midst of storing events, and can't wait for that: in a signal handler raise SystemExit, or note "
                "that it is time to end, and close the store outside of it"
            )

    def _store_here(self, run: Run) -> bool:
        """Commit a run of a few events, all that waits, in the thread that waits for it; False if it is not that simple.

        That saves two changes of threads, a third of an ack's time. A Ctrl-C may end this at any line, and anything but success is not
        for here: what was taken is in flight by then, and the flusher's thread goes on with it, as after a lost answer.
        """
        lane, is_mine = run.lane, False
        try:
            with self._mutex:
                if not self._is_idle or self._inflight or self._session is None or list(self._active) != [lane]:
                    return False
                self._is_idle, is_mine = False, True
            self._storing = calls.this_call()
            flush = self._take_few(run)
            if flush is None:
                return False
            self._prepare(flush)
            assert flush.catalog_flush is not None
            results = self._engine.commit_flush(flush.catalog_flush)
            if all(isinstance(result, Stored) for result in results):
                self._complete(flush, results)
                self._stored_here = time.monotonic()
            return run.ended
        except UnavailableError as error:
            self._note_failure(error)
            raise
        except HeadwaterError:
            return False
        finally:
            if is_mine:
                self._storing = None
                self._is_idle = True
                if self._active or self._inflight or self._closing:
                    with self._mutex:
                        self._work.notify()

    def _take_few(self, run: Run) -> PendingFlush | None:
        """Take a run from its lane into a flush without storage, if it is all that waits there."""
        lane = run.lane
        with lane.lock:
            lane.close_run()
            if run.size > 3 * INLINE_BYTES or list(lane.queue) != [run]:
                return None
            flush = PendingFlush([self._make_part(lane, [run])])
            if not flush.is_small or flush.parts[0].error is not None:
                return None
            flush.begun = True
            failpoints.reach("append.encoded")
            empty, inflight = deque[Run](), deque([flush])
            # In one line without a call, in which a Ctrl-C can't come: the run is always in one of them.
            lane.queue, self._inflight = empty, inflight
            with self._mutex:
                self._active.pop(lane, None)
        return flush

    def _copy_of_failure(self) -> HeadwaterError:
        assert self._failure is not None
        copy = type(self._failure)(self._failure.message, **self._failure.facts)
        copy.__cause__ = self._failure.__cause__
        return copy

    def _start(self) -> None:
        # One that a Ctrl-C kept from starting is replaced; should it start after all, it ends at once. Not `is_alive`: a Ctrl-C in there
        # makes Python believe that a thread ended which runs.
        if self._thread is None or self._thread.ident is None:
            self._thread = threading.Thread(target=self._run, name="headwater-flusher", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Store what waits, then end the session. UnavailableError if it can't be stored now: close again to try again."""
        self._check_not_storing()
        with self._mutex:
            self._is_closed = True
        try:
            for lane in list(self._lanes.values()):
                with lane.lock:
                    run = lane.last_run
                if run is not None and not run.ended:
                    self.wait_for(run)
        except BaseException:
            self._is_closed = False
            raise
        with self._mutex:
            self._closing = True
            self._work.notify()
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join()
        self._end_session()

    def _end_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()
            # If it can't be told now, it is fenced when its lease is over: everything it stored is answered.
            with suppress(UnavailableError):
                self._engine.run(sessions.end_session, session.id)

    # What the thread does.

    def _run(self) -> None:
        with self._mutex:
            if threading.current_thread() is not self._thread:
                return
        pause = 0.05
        while not self._closing or self._active or self._inflight:
            try:
                self._step()
                pause = 0.05
            except UnavailableError as error:
                self._note_failure(error)
                if self._closing:
                    # Of those that no writer gave, who would have waited for it: they are told.
                    self._fail_all(error)
                with self._mutex:
                    if not self._kicked and not self._closing:
                        self._work.wait(pause)
                pause = min(pause * 2, _LONGEST_PAUSE_SECONDS)
            except BaseException as error:
                # Also a fault in a library's Rust code, which is no Exception: without this thread writers would wait for ever.
                self._fail_all(error)

    def _note_failure(self, error: UnavailableError) -> None:
        with self._mutex:
            self._failure = error
            self._failures += 1
            self._kicked = False
            self._news.notify_all()

    def _fail_all(self, error: BaseException) -> None:
        """Something that no retry will mend: end every lane with it, so that nobody waits for ever."""
        known = _known(error)
        lanes: dict[Lane, list[Run]] = {}
        for flush in self._inflight:
            if flush.task is not None:
                flush.task.wait()
            for part in flush.parts:
                lanes.setdefault(part.lane, []).extend(part.runs)
        self._inflight.clear()
        # The last commit may have been done. Its number must not be used again: another flush would get its answer, and not be stored.
        if self._session is not None:
            self._session.close()
            self._session = None
        with self._mutex:
            lanes.update({lane: lanes.get(lane, []) for lane in self._active})
            self._active.clear()
        for lane, runs in lanes.items():
            self._fail_lane(lane, known, runs)

    def _step(self) -> None:
        """Begin what flushes may begin, then finish the oldest one."""
        self._renew_session()
        self._begin_flushes()
        if self._inflight:
            self._finish(self._inflight[0])
            return
        pauses = [self._burst.pause_seconds, self._session.pause_seconds if self._session is not None else None]
        if not self._rest(min([pause for pause in pauses if pause is not None], default=SESSION_SECONDS / 3)):
            self._burst.end()
            if self._session is not None:
                self._session.rest()

    def _rest(self, seconds: float) -> bool:
        """Wait until there is something to do; False if there was nothing for so long."""
        until = time.monotonic() + seconds
        with self._mutex:
            self._is_idle = True
            while not (is_wanted := self._is_wanted()):
                now = time.monotonic()
                # Whoever stores in our place renews the session too.
                if now >= until and self._is_idle:
                    break
                self._is_looking = now < self._stored_here + _LOOKING_SECONDS
                # And while somebody does it: a Ctrl-C may keep that one from telling what came meanwhile.
                is_short = self._is_looking or not self._is_idle
                self._work.wait(_LOOK_SECONDS if is_short else max(until - now, _LOOK_SECONDS))
            self._is_idle = self._is_looking = False
        return is_wanted

    def _begin_flushes(self) -> None:
        while self._may_begin():
            flush = self._gather()
            if flush is None:
                break
            self._inflight.append(flush)
            self._begin_storing(flush)

    def _is_wanted(self) -> bool:
        return self._is_idle and bool(self._active or self._inflight or self._closing)

    def _may_begin(self) -> bool:
        if not self._active:
            return False
        if not self._inflight:
            return True
        if self._session is not None and self._session.is_used_up:
            return False  # Another session begins when all of this one's is committed.
        local = self._engine.storage.local
        # What is being committed is stored: it keeps neither the disk busy nor its blocks in memory.
        storing = [flush.size for flush in self._inflight if flush.catalog_flush is None]
        if len(storing) >= (LOCAL_WRITES if local else REMOTE_WRITES):
            return False
        if local and len(storing) >= 2 and sum(storing) > _UNDER_WAY_BYTES:
            return False
        waiting = self._buffered_bytes - sum([flush.size for flush in self._inflight])
        return waiting >= (_OVERLAP * self._flush_bytes if local and not self._waiters else _OVERLAP_BYTES_WAITED_FOR)

    def _gather(self) -> PendingFlush | None:
        """Take the oldest runs of the lanes that have any, up to a flush's size."""
        with self._mutex:
            lanes = list(self._active)
            self._active.clear()
        parts: list[PendingPart] = []
        room, left = self._flush_bytes, []
        failure: UnavailableError | None = None
        for lane in lanes:
            if room <= 0 or failure is not None:
                left.append(lane)
                continue
            runs = lane.take(room)
            if not runs:
                continue
            try:
                parts.append(self._make_part(lane, runs))
            except UnavailableError as error:
                failure = error
                lane.put_back(runs)
                left.append(lane)
                continue
            except BaseException as error:
                # Whatever it is: they are in nobody's hands but ours.
                self._fail_lane(lane, _known(error), runs)
                continue
            room -= sum(run.size for run in runs)
            if lane.queue:
                left.append(lane)
        with self._mutex:
            # Those that were left out go first next time.
            self._active = {**dict.fromkeys(left), **self._active}
        if failure is not None and not parts:
            raise failure
        if not parts:
            return None
        flush = PendingFlush(parts)
        self._flush_bytes = min(LARGE_FLUSH_BYTES, max(FLUSH_BYTES, FLUSH_BLOCK_BYTES * flush.segments))
        return flush

    def _make_part(self, lane: Lane, runs: list[Run]) -> PendingPart:
        if lane.error is not None:
            raise lane.error.again()
        self._turn += 1
        return PendingPart(lane, [Piece(lane, runs, self._router.route(lane.stream), self._turn)])

    def _begin_storing(self, flush: PendingFlush) -> None:
        """Encode the runs and write the blocks to storage, unless they are so few that they go into the commit itself."""
        flush.begin_again()
        if flush.is_small:
            failpoints.reach("append.encoded")
            flush.begun = True
            return
        session = self._live_session()
        index = session.reserve()
        flush.first_file = session.first_file
        flush.begun = True
        flush.task = self._engine.workers.submit(lambda: flush.store(session, index), self._wake_after_store)

    def _wake_after_store(self) -> None:
        with self._mutex:
            self._work.notify()

    def _live_session(self) -> Session:
        if self._session is not None and self._session.is_used_up and not any(flush.begun for flush in self._inflight):
            self._end_session()
        if self._session is None:
            self._session = Session(self._engine)
        return self._session

    def _renew_session(self) -> None:
        session = self._session
        if session is not None and time.monotonic() - session.renewed > SESSION_SECONDS / 3:
            live = self._engine.run(sessions.renew_session, session.id, session.first_needed(self._inflight))
            session.renewed = time.monotonic()
            # A commit whose answer was lost may have been done before the fence: only its own repetition can tell.
            if not live and not (self._inflight and self._inflight[0].catalog_flush is not None):
                self._replace_session()

    def _replace_session(self) -> None:
        """Go on with a new session after the old one was fenced or forgotten. Nothing in flight was committed: all is stored anew.

        The old session's journal may be collected as garbage, so its bytes are not named again.
        """
        if self._session is not None:
            old, self._session = self._session, None
            old.close()
        for flush in self._inflight:
            if flush.task is not None:
                flush.task.wait()
            flush.begun = False
        for flush in self._inflight:
            self._begin_storing(flush)

    def _finish(self, flush: PendingFlush) -> None:
        """Commit the oldest flush once it is stored, and end its runs."""
        if not flush.begun:
            self._begin_storing(flush)
        if flush.catalog_flush is None:
            if flush.task is not None and not flush.task.done:
                with self._mutex:
                    if not flush.task.done and not self._may_begin():
                        self._work.wait(SESSION_SECONDS / 3)
                if not flush.task.done:
                    return
            if not self._prepare(flush):
                return
            # A commit waits for a disk that is busy with others' blocks: the next ones are encoded meanwhile.
            self._begin_flushes()
        assert flush.catalog_flush is not None and self._session is not None
        try:
            results = self._engine.commit_flush(flush.catalog_flush)
        except FencedError:
            self._replace_session()
            return
        self._complete(flush, results)
        for part, result in zip(list(flush.parts), results, strict=True):
            if isinstance(result, Refused):
                self._handle_refusal(part, result)

    def _complete(self, flush: PendingFlush, results: Sequence[PartResult]) -> None:
        """End the runs of a committed flush. All of this may be done twice: it is in flight until the end."""
        assert flush.catalog_flush is not None and self._session is not None
        self._session.last_flush = flush.catalog_flush.number
        self._session.renewed = time.monotonic()
        failpoints.reach("append.committed")
        stored: list[Run] = []
        freed = 0
        for part, result in zip(flush.parts, results, strict=True):
            if isinstance(result, Stored):
                firsts = iter(result.firsts)
                for piece in part.pieces:
                    segments = tuple([segment for segment, _ in piece.encode()])
                    placement = Placement(segments, tuple(islice(firsts, len(segments))), piece.which, result.appended_at, result.answer)
                    for run in piece.runs:
                        part.lane.stored_number = max(part.lane.stored_number, run.last_number)
                        freed += run.size if run.chunk is None else 0
                        run.end(placement, None)
                    stored += piece.runs
        self._release(stored)
        failpoints.reach("append.acked")
        self._engine.announce(flush.catalog_flush)
        self._inflight.popleft()
        if freed:
            self._burst.note(freed)
        else:
            self._burst.end()

    def _prepare(self, flush: PendingFlush) -> bool:
        """Make the catalog's form of a stored flush, with the session's next number; False if nothing is left of it.

        Those behind it that are stored by now go along: that is one commit, and one sync, for all of them.
        """
        if flush.task is not None:
            try:
                flush.task.result()
            except UnavailableError:
                # Stored anew when it is tried again, and not before: a flush after room was made must not hear of an older attempt.
                # Those behind it too, so that what is committed later is stored later.
                for other in self._inflight:
                    if other.task is not None:
                        other.task.wait()
                    other.begun = other.task is None
                raise
            except AlreadyExistsError:
                # Another process has the same session, whose objects have the same names: see `begin_session`.
                self._replace_session()
                return False
            failpoints.reach("append.stored")
        for part in list(flush.parts):
            if part.error is not None:
                flush.parts.remove(part)
                self._fail_lane(part.lane, _known(part.error), self._take_out(part.lane, part.runs))
        if not flush.parts:
            self._inflight.popleft()
            return False
        while len(self._inflight) > 1 and self._inflight[1].is_stored:
            flush.absorb(self._inflight[1])
            del self._inflight[1]
        flush.catalog_flush = flush.to_catalog(self._live_session(), self._inflight)
        return True

    def _handle_refusal(self, part: PendingPart, refusal: Refused) -> None:
        lane = part.lane
        runs = self._take_out(lane, part.runs)
        if refusal.reason == SEALED:
            self._router.forget(lane.stream)
            self._go_on(lane, runs)
        elif refusal.reason == CLAIMED:
            if lane.when_refused is not None:
                lane.when_refused()
            self._fail_lane(lane, claimed(lane.stream.name, refusal.facts["owner"]), runs)
        elif refusal.term < len(lane.terms):
            if lane.when_refused is not None:
                lane.when_refused()
            self._fail_lane(lane, lane.terms[refusal.term].error(refusal), runs)
        else:
            self._handle_refused_lane(lane, refusal, runs)

    def _go_on(self, lane: Lane, runs: list[Run]) -> None:
        """Store runs that were taken out before anything newer of their lane."""
        lane.put_back(runs)
        with self._mutex:
            self._active = {lane: None, **self._active}

    def _handle_refused_lane(self, lane: Lane, refusal: Refused, runs: list[Run]) -> None:
        """A refusal that is not by the terms of a run, but by the stream or by the writer."""
        if refusal.reason == "fenced":
            self._fail_lane(
                lane, FencedError(f"the writer {lane.writer!r} of {lane.stream.name} was opened elsewhere: this one is fenced"), runs
            )
        elif refusal.reason == "forgotten":
            lost = (
                f"the catalog went back in time: of the writer {lane.writer!r} of {lane.stream.name} it has {refusal.facts['number']}, not "
            )
            advice = f"{lane.stored_number}, as was acked. Open the writer again, and go on behind its last_number"
            self._fail_lane(lane, FencedError(lost + advice), runs)
        elif refusal.reason == "unknown schema":
            lost = f"the catalog went back in time and lost the schema that {lane.stream.name} had: look at it, and open the writer again"
            self._fail_lane(lane, InvalidRequestError(lost), runs)
        elif refusal.reason == "passed":
            # Somebody stored on with this writer's generation: what it has is not stored again, and the rest follows.
            lane.stored_number = max(lane.stored_number, refusal.facts["number"])
            for run in runs:
                run.skip(lane.stored_number)
            self._release([run for run in runs if run.ended])
            self._go_on(lane, [run for run in runs if not run.ended])
        elif refusal.reason == "deleted":
            self._fail_lane(lane, NotFoundError(f"stream {lane.stream.name} was deleted"), runs)
        else:
            self._fail_lane(lane, HeadwaterError(f"events for {lane.stream.name} were refused: {refusal.reason}"), runs)

    def _take_out(self, lane: Lane, runs: list[Run]) -> list[Run]:
        """These runs, with the lane's newer ones that are in flight already: they must not overtake, so they leave their flushes."""
        runs = list(runs)
        for flush in self._inflight:
            for other in [other for other in flush.parts if other.lane is lane]:
                if flush.task is not None:
                    flush.task.wait()
                runs += other.runs
                flush.parts.remove(other)
            flush.catalog_flush = None
        return runs

    def _fail_lane(self, lane: Lane, error: HeadwaterError, runs: list[Run]) -> None:
        self._release(lane.fail(error, runs))
        self.forget(lane)

    def _release(self, runs: list[Run]) -> None:
        with self._mutex:
            for run in runs:
                # Once, also if a Ctrl-C comes: there is no call in these two lines.
                self._buffered_bytes -= run.size
                run.size = 0
            self._news.notify_all()


def _leave_to_parent(run: Run) -> None:
    if not run.ended:
        run.end(None, FencedError("these events were given before a fork: they are the parent process's to store"))


def _known(error: BaseException) -> HeadwaterError:
    if isinstance(error, HeadwaterError):
        return error
    known = HeadwaterError(f"storing events failed: {error!r}")
    known.__cause__ = error
    return known
