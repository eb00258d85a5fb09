"""The flusher: one thread of a process that orders the events of all its writers: it fills the next flush, and decides about failures.

It gathers the events that arrived while the previous flush was under way, gives them to the storer, and ends their runs by the storer's
answers. A failed flush stays the oldest one and is repeated before anything newer.

While the thread is idle, a thread that waits for the ack of a few events commits them itself: see `_store_here`.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import FrameType

from headwater.catalog.claims import claimed
from headwater.catalog.parts import CLAIMED, SEALED, Refused, Term
from headwater.errors import FencedError, HeadwaterError, InvalidRequestError, NotFoundError, OutcomeUnknownError, UnavailableError
from headwater.model.limits import (
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
from headwater.segments.intake import Intake
from headwater.segments.lanes import Few, Lane, Placement, Run, StreamRef
from headwater.segments.memory import Burst
from headwater.segments.pending import PendingFlush, PendingPart
from headwater.segments.storing import Answer, Storer

#: While a flush is under way, another begins only with this share of a full one: few large flushes are faster to write and to read than
#: many small ones, and batches seldom fill a whole one. The second number holds while a thread waits, since it may give no more events
#: before these are stored, and for remote storage.
_OVERLAP = 0.75
_OVERLAP_BYTES_WAITED_FOR = 1 * MIB
#: While two flushes have more than this, no third one begins: two keep a disk busy.
_UNDER_WAY_BYTES = 48 * MIB
_LONGEST_PAUSE_SECONDS = 2.0
#: For this time after another thread stored an ack, the flusher's thread looks for work at this interval, and nobody wakes it. To wake it
#: for work that is done already takes a fifth of an ack's time.
_LOOKING_SECONDS = 0.1
_LOOK_SECONDS = 0.002


class Flusher:
    """Stores the events of all writers of one process, in the order in which each lane gave them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lanes: dict[tuple[int, int, str | None, int], Lane] = {}
        self._intake = Intake(self._start, lambda: bool(self._storer.under_way))
        self._storer = Storer(engine, self._wake)
        self._begin()

    def _begin(self) -> None:
        #: Appends by stream whose callers stopped waiting, and whose outcome is unknown.
        self._given_up: dict[int, list[Run]] = {}
        #: Bytes that the next flush gathers.
        self._flush_bytes = FLUSH_BYTES
        self._thread: threading.Thread | None = None
        self._burst = Burst()
        #: The thread ends when all buffered events are stored.
        self._closing = False
        #: The thread waits for work, and no other thread stores in its place.
        self._is_idle = False
        self._stored_here = -_LOOKING_SECONDS
        #: The call of `_store_here` that is under way.
        self._storing: FrameType | None = None

    def after_fork(self) -> None:
        """Begin with nothing in a forked child: the parent stores the events that were given before the fork."""
        runs = [run for flush in self._storer.under_way for part in flush.parts for run in part.runs]
        for lane in self._lanes.values():
            runs += [*lane.queue, *filter(None, (lane.run, lane.last_run))]
            lane.forget()
            if lane.writer is not None:
                lane.error = FencedError(f"the writer {lane.writer!r} belongs to the parent process: open it again to take it over")
        for run in runs:
            _leave_to_parent(run)
        self._lanes = {key: lane for key, lane in self._lanes.items() if lane.error is None}
        self._intake.begin()
        self._storer.after_fork()
        self._begin()

    # What writers call.

    def lane(self, stream: StreamRef, writer: str | None = None, generation: int = 0, last_number: int = 0) -> Lane:
        """The lane of a named writer, or the one that all anonymous writers of a stream share."""
        key = (stream.id, stream.schema_version, writer, generation)
        with self._intake.mutex:
            found = self._lanes.get(key)
            if found is None or found.error is not None:
                found = self._lanes[key] = Lane(self._intake, self.wait_for, stream, writer, generation, last_number)
            return found

    def append(self, stream: StreamRef, events: Chunk | Few, size: int, terms: tuple[Term, ...]) -> Placement:
        """Store events as a part of their own, which is committed on these terms; return when they are durable, with their place.

        A refusal of a term is raised as the term's error. After a lost answer the commit is asked for its outcome. OutcomeUnknownError if
        that takes too long: `settle` waits until the outcome is known. After UnavailableError the chunk is not stored, now or later.
        """
        self._check_not_storing()
        run = self.give(stream, events, size, terms)
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
        self,
        stream: StreamRef,
        events: Chunk | Few,
        size: int,
        terms: tuple[Term, ...],
        when_refused: Callable[[], None] | None = None,
    ) -> Run:
        """Give events on a lane of their own, to be committed on these terms. They are stored whether or not anybody waits for them.

        `when_refused` is called in the flusher's thread, before the run ends; several refusals in the order of their runs.
        """
        self._intake.wait_for_room()
        lane = Lane(self._intake, self.wait_for, stream, None, 0, 0, terms, when_refused)
        with lane.lock:
            return lane.add_chunk(events, size) if isinstance(events, Chunk) else lane.add_few(events, size)

    def _give_up(self, run: Run) -> bool:
        """Stop waiting for an append. True if it is taken back; False if it is under way: `settle` waits for its outcome."""
        with run.lane.lock:
            is_waiting = run in run.lane.queue
            if is_waiting:
                run.lane.queue.remove(run)
        if is_waiting:
            self._intake.release([run])
            return True
        with self._intake.mutex:
            if not run.ended:
                self._given_up.setdefault(run.lane.stream.id, []).append(run)
        return False

    def settle(self, stream: int) -> None:
        """Return when the outcome of each append that nobody waits for any more is known. UnavailableError if it can't be known now."""
        if stream not in self._given_up:
            return
        for run in self._given_up.get(stream, [])[:]:
            self.wait_for(run)
        with self._intake.mutex:
            self._given_up = {id: left for id, runs in self._given_up.items() if (left := [run for run in runs if not run.ended])}

    def forget(self, lane: Lane) -> None:
        """Drop a lane that is empty and will not be used again."""
        with self._intake.mutex:
            self._lanes = {key: other for key, other in self._lanes.items() if other is not lane}

    def forget_stream(self, stream: int) -> None:
        """Drop the routes and empty lanes of a deleted stream. Lanes with events stay, and their events fail when they are flushed."""
        self._storer.router.forget_stream(stream)
        with self._intake.mutex:
            self._lanes = {key: lane for key, lane in self._lanes.items() if lane.stream.id != stream or lane.run or lane.queue}

    @property
    def is_told(self) -> bool:
        """Whether a close of the store raised that the buffered events, all of them, can't be stored now."""
        return self._intake.is_told

    @is_told.setter
    def is_told(self, is_told: bool) -> None:
        self._intake.is_told = is_told

    def wait_for_room(self) -> None:
        """Block while this process has as many events waiting as it may. UnavailableError if they can't be stored now."""
        self._intake.wait_for_room()

    def wait_for(self, run: Run, timeout: float | None = None) -> None:
        """Return when the run ended. UnavailableError if an attempt fails meanwhile: the run stays, and is tried again."""
        if run.process != os.getpid():
            # The parent's thread may have held the run when the process forked, so `after_fork` did not find it.
            _leave_to_parent(run)
            return
        self._check_not_storing()
        if timeout is None and self._is_idle and not self._intake.is_crowded and self._store_here(run):
            return
        self._intake.wait_for_end(run, timeout)

    def _check_not_storing(self) -> None:
        self._engine.check_alone()
        if threading.current_thread() is self._thread:
            raise UnavailableError(
                "a finaliser in the middle of another change can't wait for events that its own thread stores: retry later"
            )
        if self._storing is not None and calls.is_under_way(self._storing):
            raise UnavailableError(
                "this thread is in the middle of storing events, and can't wait for itself: in a signal handler raise SystemExit, or set a "
                "flag, and close the store outside of the handler"
            )

    def _store_here(self, run: Run) -> bool:
        """Commit a run of a few events in the thread that waits for it; False unless these are all the buffered events.

        That saves two changes of threads, a third of an ack's time. A Ctrl-C may end this call at any line, and it handles success only:
        in any other case the flush is under way already, and the flusher's thread continues with it, as after a lost answer.
        """
        lane, is_mine = run.lane, False
        try:
            with self._intake.mutex:
                if not self._is_idle or self._storer.under_way or self._storer.session is None or list(self._intake.active) != [lane]:
                    return False
                self._is_idle, is_mine = False, True
            self._storing = calls.this_call()
            flush = self._take_few(run)
            if flush is None:
                return False
            self._storer.prepare(flush)
            answers = self._storer.commit(flush)
            if all(answer.placements for answer in answers):
                self._complete(flush, answers, waiters=1)
                self._stored_here = time.monotonic()
            return run.ended
        except UnavailableError as error:
            self._intake.note_failure(error)
            raise
        except HeadwaterError:
            return False
        finally:
            if is_mine:
                self._storing = None
                self._is_idle = True
                if self._intake.active or self._storer.under_way or self._closing:
                    with self._intake.mutex:
                        self._intake.work.notify()

    def _take_few(self, run: Run) -> PendingFlush | None:
        """Take a run from its lane into a flush that goes inline, if the lane has no other run."""
        lane = run.lane
        with lane.lock:
            lane.close_run()
            if run.size > 3 * INLINE_BYTES or lane.error is not None or list(lane.queue) != [run]:
                return None
            flush = PendingFlush([PendingPart(lane, [run])])
            self._storer.route(flush.parts[0])
            if not flush.is_small or flush.parts[0].error is not None:
                return None
            flush.begun = True
            failpoints.reach("append.encoded")
            empty, under_way, storer = deque[Run](), deque([flush]), self._storer
            # One line without a call, which a Ctrl-C can't interrupt: the run is always in one of the two.
            lane.queue, storer.under_way = empty, under_way
            with self._intake.mutex:
                self._intake.active.pop(lane, None)
        return flush

    def _start(self) -> None:
        # A thread that a Ctrl-C kept from starting is replaced; if it starts after all, it ends at once. Don't use `is_alive`: after a
        # Ctrl-C in it, Python takes a running thread for one that ended.
        if self._thread is None or self._thread.ident is None:
            self._thread = threading.Thread(target=self._run, name="headwater-flusher", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Store all buffered events, then end the session. UnavailableError if that fails now: close again to retry."""
        self._check_not_storing()
        with self._intake.mutex:
            self._intake.is_closed = True
        try:
            for lane in list(self._lanes.values()):
                with lane.lock:
                    run = lane.last_run
                if run is not None and not run.ended:
                    self.wait_for(run)
        except BaseException:
            self._intake.is_closed = False
            raise
        with self._intake.mutex:
            self._closing = True
            self._intake.work.notify()
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join()
        self._storer.close()

    # What the thread does.

    def _run(self) -> None:
        with self._intake.mutex:
            if threading.current_thread() is not self._thread:
                return
        pause = 0.05
        while not self._closing or self._intake.active or self._storer.under_way:
            try:
                self._step()
                pause = 0.05
            except UnavailableError as error:
                self._intake.note_failure(error)
                if self._closing:
                    # No writer waits for these runs; fail them now.
                    self._fail_all(error)
                with self._intake.mutex:
                    if not self._intake.is_hurried and not self._closing:
                        self._intake.work.wait(pause)
                pause = min(pause * 2, _LONGEST_PAUSE_SECONDS)
            except BaseException as error:
                # A panic in a library's Rust code is no Exception. Without this thread, writers would wait forever.
                self._fail_all(error)

    def _fail_all(self, error: BaseException) -> None:
        """End every lane with an error that no retry can mend, so that nobody waits forever."""
        known = _known(error)
        lanes: dict[Lane, list[Run]] = {}
        for part in self._storer.drop_all():
            lanes.setdefault(part.lane, []).extend(part.runs)
        for lane in self._intake.take_active():
            lanes.setdefault(lane, [])
        for lane, runs in lanes.items():
            self._fail_lane(lane, known, runs)

    def _step(self) -> None:
        """Begin as many flushes as may run at once, then finish the oldest one."""
        self._storer.renew()
        if not self._storer.under_way:
            self._intake.wait_for_crowd()
        self._begin_flushes()
        if self._storer.under_way:
            self._finish(self._storer.under_way[0])
            return
        pauses = [self._burst.pause_seconds, self._storer.pause_seconds]
        if not self._rest(min([pause for pause in pauses if pause is not None], default=SESSION_SECONDS / 3)):
            self._burst.end()
            self._storer.rest()

    def _rest(self, seconds: float) -> bool:
        """Wait for work; False if there was none for this time."""
        until = time.monotonic() + seconds
        with self._intake.mutex:
            self._is_idle = True
            while not (is_wanted := self._is_wanted()):
                now = time.monotonic()
                # A thread that stores in our place renews the session too.
                if now >= until and self._is_idle:
                    break
                self._intake.is_looking = now < self._stored_here + _LOOKING_SECONDS
                # Look at the short interval while another thread stores too: a Ctrl-C may keep it from waking this one.
                is_short = self._intake.is_looking or not self._is_idle
                self._intake.work.wait(_LOOK_SECONDS if is_short else max(until - now, _LOOK_SECONDS))
            self._is_idle = self._intake.is_looking = False
        return is_wanted

    def _begin_flushes(self) -> None:
        while self._may_begin():
            flush = self._gather()
            if flush is None:
                break
            try:
                self._storer.begin(flush)
            except UnavailableError:
                for part in flush.parts:
                    part.lane.put_back(part.runs)
                self._intake.put_first(part.lane for part in flush.parts)
                raise
            self._flush_bytes = min(LARGE_FLUSH_BYTES, max(FLUSH_BYTES, FLUSH_BLOCK_BYTES * flush.segments))

    def _is_wanted(self) -> bool:
        return self._is_idle and bool(self._intake.active or self._storer.under_way or self._closing)

    def _may_begin(self) -> bool:
        if not self._intake.active:
            return False
        if not self._storer.under_way:
            return True
        if self._storer.is_used_up:
            return False
        local = self._engine.storage.local
        # A flush that is being committed is stored: it keeps neither the disk busy nor its blocks in memory.
        storing = [flush.size for flush in self._storer.under_way if flush.catalog_flush is None]
        if len(storing) >= (LOCAL_WRITES if local else REMOTE_WRITES):
            return False
        if local and len(storing) >= 2 and sum(storing) > _UNDER_WAY_BYTES:
            return False
        waiting = self._intake.buffered_bytes - sum([flush.size for flush in self._storer.under_way])
        return waiting >= (_OVERLAP * self._flush_bytes if local and not self._intake.has_waiters else _OVERLAP_BYTES_WAITED_FOR)

    def _gather(self) -> PendingFlush | None:
        """Take the oldest runs of the lanes that have any, up to a flush's size."""
        parts: list[PendingPart] = []
        room, left = self._flush_bytes, []
        for lane in self._intake.take_active():
            if room <= 0:
                left.append(lane)
                continue
            runs = lane.take(room)
            if lane.error is not None:
                self._fail_lane(lane, lane.error, runs)
            elif runs:
                parts.append(PendingPart(lane, runs))
                room -= sum(run.size for run in runs)
                if lane.queue:
                    left.append(lane)
        self._intake.put_first(left)
        return PendingFlush(parts) if parts else None

    def _finish(self, flush: PendingFlush) -> None:
        """Commit the oldest flush once it is stored, and end its runs."""
        is_new = flush.catalog_flush is None
        if not self._storer.prepare(flush):
            with self._intake.mutex:
                if not flush.is_ready and not self._may_begin():
                    self._intake.work.wait(SESSION_SECONDS / 3)
            return
        if is_new:
            # The commit may wait for a disk that is busy; the next flushes are encoded meanwhile.
            self._begin_flushes()
        is_committed = flush.catalog_flush is not None
        answers = self._storer.finish(flush)
        if answers is None:
            return
        if is_committed:
            self._complete(flush, answers)
        for answer in answers:
            if answer.error is not None:
                self._fail_lane(answer.part.lane, _known(answer.error), self._take_out(answer.part))
            elif answer.refused is not None:
                self._handle_refusal(answer.part, answer.refused)

    def _complete(self, flush: PendingFlush, answers: Sequence[Answer], waiters: int = 0) -> None:
        """End the runs of a committed flush. Each step may be done twice: the flush is under way until the last one."""
        stored: list[Run] = []
        freed = 0
        for answer in answers:
            lane = answer.part.lane
            for runs, placement in answer.placements:
                for run in runs:
                    lane.stored_number = max(lane.stored_number, run.last_number)
                    freed += run.size if run.chunk is None else 0
                    run.end(placement, None)
                stored += runs
        self._intake.release(stored, waiters=waiters)
        failpoints.reach("append.acked")
        self._storer.done(flush)
        if freed:
            self._burst.note(freed)
        else:
            self._burst.end()

    def _wake(self) -> None:
        """Called by the storer's threads when the bytes of a flush are stored."""
        with self._intake.mutex:
            self._intake.work.notify()

    # What was refused.

    def _handle_refusal(self, part: PendingPart, refusal: Refused) -> None:
        lane = part.lane
        runs = self._take_out(part)
        if refusal.reason == SEALED:
            self._go_on(lane, runs)
        elif refusal.reason == CLAIMED:
            if lane.when_refused is not None:
                lane.when_refused()
            self._fail_lane(lane, claimed(lane.stream.name, refusal.facts["owner"]), runs)
        elif 0 <= refusal.term < len(lane.terms):
            if lane.when_refused is not None:
                lane.when_refused()
            self._fail_lane(lane, lane.terms[refusal.term].error(refusal), runs)
        else:
            self._handle_refused_lane(lane, refusal, runs)

    def _go_on(self, lane: Lane, runs: list[Run]) -> None:
        """Store runs that were taken out of flushes, before anything newer of their lane."""
        lane.put_back(runs)
        self._intake.put_first([lane])

    def _handle_refused_lane(self, lane: Lane, refusal: Refused, runs: list[Run]) -> None:
        """End a lane, or skip stored events, by a refusal that no term of a run explains."""
        if refusal.reason == "fenced":
            self._fail_lane(
                lane, FencedError(f"the writer {lane.writer!r} of {lane.stream.name} was opened elsewhere: this one is fenced"), runs
            )
        elif refusal.reason == "forgotten":
            lost = (
                f"the catalog went back in time: of the writer {lane.writer!r} of {lane.stream.name} it has {refusal.facts['number']}, not "
            )
            advice = f"{lane.stored_number}, as was acked. Open the writer again, and continue after its last_number"
            self._fail_lane(lane, FencedError(lost + advice), runs)
        elif refusal.reason == "unknown schema":
            lost = f"the catalog went back in time and lost the schema that {lane.stream.name} had: look at it, and open the writer again"
            self._fail_lane(lane, InvalidRequestError(lost), runs)
        elif refusal.reason == "passed":
            # Another process stored events under this writer's generation: they are duplicates, and the rest is stored.
            lane.stored_number = max(lane.stored_number, refusal.facts["number"])
            for run in runs:
                run.skip(lane.stored_number)
            self._intake.release([run for run in runs if run.ended])
            self._go_on(lane, [run for run in runs if not run.ended])
        elif refusal.reason == "deleted":
            self._fail_lane(lane, NotFoundError(f"stream {lane.stream.name} was deleted"), runs)
        else:
            self._fail_lane(lane, HeadwaterError(f"events for {lane.stream.name} were refused: {refusal.reason}"), runs)

    def _take_out(self, part: PendingPart) -> list[Run]:
        """A part's runs, and the lane's newer runs under way: these must not overtake the part, so they leave their flushes."""
        return [*part.runs, *self._storer.take_out(part.lane)]

    def _fail_lane(self, lane: Lane, error: HeadwaterError, runs: list[Run]) -> None:
        self._intake.release(lane.fail(error, runs))
        self.forget(lane)


def _leave_to_parent(run: Run) -> None:
    if not run.ended:
        run.end(None, FencedError("these events were given before a fork: they are the parent process's to store"))


def _known(error: BaseException) -> HeadwaterError:
    if isinstance(error, HeadwaterError):
        return error
    known = HeadwaterError(f"storing events failed: {error!r}")
    known.__cause__ = error
    return known
