"""Upkeep: what a store needs done now and then, by one process at a time.

Whoever has the lease times out transactions, fences dead sessions, tiers, scales, retains and collects garbage. Each step is safe by
itself, however often it is begun and wherever it is broken off; the lease only keeps two processes from doing the same work.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields

from headwater.catalog import fills, leases, objects, rebuilds, sessions, streams, tags, tiers, transactions
from headwater.catalog.tiers import Backlog
from headwater.errors import (
    ConditionFailedError,
    CorruptDataError,
    FencedError,
    HeadwaterError,
    NotFoundError,
    TruncatedError,
    UnavailableError,
)
from headwater.model.limits import (
    LEASE_SECONDS,
    TIER_BYTES,
    TIER_EXTENTS,
    TIER_SECONDS,
    UPKEEP_DELAY_SECONDS,
)
from headwater.runtime import failpoints
from headwater.runtime.flag import Flag
from headwater.runtime.heart import Heart
from headwater.segments.engine import Engine
from headwater.segments.lanes import StreamRef
from headwater.segments.tiering import ChunkJob, Chunks, MadeChunk, Moved
from headwater.streams import autoscaling, garbage, rebuilding, retention, tableforks, truncation

log = logging.getLogger("headwater.upkeep")

_ROUND_SECONDS = 2.0
_GARBAGE_SECONDS = 30.0
_SCALING_SECONDS = 10.0
_RETENTION_SECONDS = 30.0
_ORPHANS_SECONDS = 3600.0
#: So many problems in one round mean that it is not a single log's: the storage is out of reach.
_MOST_FAILURES = 3
#: How long a round by hand waits for another one by hand.
_HAND_SECONDS = 60.0


def _us(seconds: float) -> int:
    return int(seconds * 1_000_000)


@dataclass
class UpkeepReport:
    """What upkeep did: in one round, or since the store was opened."""

    transactions_aborted: int = 0
    sessions_fenced: int = 0
    chunks_written: int = 0
    events_tiered: int = 0
    bytes_tiered: int = 0
    bytes_stored: int = 0
    chunks_compacted: int = 0
    indexes_rebuilt: int = 0
    streams_truncated: int = 0
    segments_split: int = 0
    segments_merged: int = 0
    rows_deleted: int = 0
    objects_deleted: int = 0
    seconds: float = 0.0
    #: What could not be done, a line each. The rest was; these are tried again next time.
    problems: tuple[str, ...] = ()

    def add(self, other: UpkeepReport) -> None:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))
        self.problems = self.problems[-100:]


class Upkeep:
    """The upkeep of one open store. `start` begins the background thread; `run` does one full round in the caller's."""

    def __init__(self, engine: Engine, heart: Heart) -> None:
        self._engine = engine
        self._heart = heart
        self._process = os.getpid()
        self._mutex = threading.Lock()
        self._stop = Flag()
        self._is_wanted = False
        self._thread: threading.Thread | None = None
        self._session: int | None = None
        self._is_held = False
        self._beats = False
        self._due: dict[str, float] = {}
        self._weighed: dict[int, tuple[int, int]] = {}
        self._resting: dict[int, float] = {}
        self._index = 0
        #: Everything done since the store was opened.
        self.totals = UpkeepReport()

    # Who does it.

    def start(self) -> None:
        """Begin the background thread, which asks for the lease after a while: short commands never take it."""
        self._thread = threading.Thread(target=self._run, name="headwater-upkeep", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        if not self._stop.wait(UPKEEP_DELAY_SECONDS):
            for _ in self.rounds(_ROUND_SECONDS):
                pass

    def rounds(self, every: float) -> Iterator[UpkeepReport | None]:
        """Do what is due, for ever: a report of each round, or None while another process does the upkeep."""
        while True:
            report = None
            try:
                self._engine.release_ended()
                with self._mutex:
                    try:
                        if not self._is_wanted and self._take_if_free():
                            report = self._round(eager=False)
                    except FencedError:
                        # Another one may take this session for dead, and what it stores for garbage: go on with a new one. Before
                        # the mutex is free: one who waits to do the upkeep by hand must not get that session, and lose it at once.
                        self._give_up()
            except UnavailableError as error:
                log.info("upkeep waits: %s", error)
            except HeadwaterError as error:
                if not self._engine.is_closed:
                    log.warning("upkeep failed, and is tried again: %s", error)
            except Exception:
                log.exception("upkeep failed, and is tried again")
            yield report
            if self._stop.wait(every):
                return

    def run(self) -> UpkeepReport:
        """One full round now: everything that waits is tiered, whatever its size, and the storage is searched for orphans."""
        with self._alone():
            return self._round(eager=True)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """No process tiers or deletes anything meanwhile. FencedError at the end if one may have, since the lease was lost."""
        with self._alone():
            yield
            if self._is_ours and (self._session is None or not self._engine.run(leases.is_held, self._session)):
                raise FencedError(
                    "the pause ended before its block: this process was not heard of for too long; repeat what was done in it"
                )

    @contextmanager
    def _alone(self) -> Iterator[None]:
        self._is_wanted = True
        try:
            with self._mutex, self._by_hand():
                yield
        finally:
            self._is_wanted = False

    @contextmanager
    def tiering(self, stream: StreamRef) -> Iterator[tuple[list[ChunkJob], Callable[[MadeChunk], Moved | None]]]:
        """All of a stream's blocks as jobs for other processes, and what puts a chunk they made in its place."""
        with self._alone():
            chunks = self._chunks()
            found = [backlog for backlog in self._engine.run(tiers.list_backlogs) if backlog.stream == stream.id]
            jobs = [job for backlog in found for job in chunks.plan(stream, backlog)]

            def finish(made: MadeChunk) -> Moved | None:
                try:
                    return chunks.finish(made)
                except ConditionFailedError:
                    return None  # Truncated or deleted meanwhile, or one before it was: then it is garbage.

            yield jobs, finish
            garbage.collect(self._engine, self._live_session())

    def stop(self) -> None:
        """End the rounds after the step under way."""
        self._stop.set()

    def close(self) -> None:
        """Stop, and let another process have the lease at once."""
        self.stop()
        if self._thread is not None:
            self._thread.join(timeout=60)
        self._give_up()

    def _take_if_free(self) -> bool:
        if self._is_held:
            return True
        if self._engine.run(leases.find_holder) is not None:
            return False
        # Never with a session from before: it may have been fenced, and what it stores be taken for garbage.
        self._give_up()
        if self._take(by_hand=False) is not None:
            self._give_up()  # Another one was quicker.
        return self._is_held

    def _take(self, *, by_hand: bool) -> str | None:
        """Take the lease; else who has it."""
        process = f"{socket.gethostname()}:{os.getpid()}"
        if self._session is None:
            self._session = self._engine.run(sessions.begin_session, f"{process} upkeep")
            self._index = 0
        holder = self._engine.run(leases.take, self._session, process, by_hand=by_hand)
        self._is_held = holder is None
        if self._is_held and not self._beats:
            self._beats = True
            self._heart.add(self._beat, LEASE_SECONDS / 3)
        return holder

    @contextmanager
    def _by_hand(self) -> Iterator[None]:
        deadline = time.monotonic() + _HAND_SECONDS
        try:
            # Never with a session from before: see `_take_if_free`.
            self._give_up()
            while (holder := self._take(by_hand=True)) is not None:
                if time.monotonic() > deadline:
                    raise UnavailableError(f"{holder} does the upkeep of this store: it is one process at a time; repeat when it is done")
                self._stop.wait(0.1)
            yield
        finally:
            # The background, here or elsewhere, may go on. Not if this is a child that was forked in the block: the parent is at it.
            if self._is_ours:
                with suppress(HeadwaterError):
                    self._give_up()

    @property
    def _is_ours(self) -> bool:
        return self._process == os.getpid()

    def _beat(self) -> bool:
        """For the heart: keep the lease and the session, while they are ours."""
        session = self._session
        if session is None or self._engine.is_closed:
            self._beats = False
            return False
        try:
            is_live = self._engine.run(sessions.renew_session, session)
            is_ours = is_live and (not self._is_held or self._engine.run(leases.renew, session))
            # Another session may have begun meanwhile.
            if not is_ours and self._session == session:
                self._is_held = False
        except HeadwaterError as error:
            log.info("the upkeep's lease could not be renewed: %s", error)
        return True

    def _give_up(self) -> None:
        session, self._session, self._is_held = self._session, None, False
        if session is not None and not self._engine.is_closed:
            # If the catalog is out of reach now, the lease runs out by itself.
            with suppress(UnavailableError):
                self._engine.run(leases.give_up, session)

    # What is done.

    def _round(self, *, eager: bool) -> UpkeepReport:
        began = time.monotonic()
        report = UpkeepReport()
        steps: list[tuple[str, float, Callable[[UpkeepReport], None]]] = [
            ("time-outs", 0.0, self._time_out),
            ("scaling", _SCALING_SECONDS, self._scale),
            ("retention", _RETENTION_SECONDS, self._retain),
            ("indexes", 0.0, lambda report: self._rebuild(report, eager)),
            ("tiering", 0.0, lambda report: self._tier(report, eager)),
            ("compaction", 0.0, lambda report: self._compact(report, eager)),
            ("garbage", _GARBAGE_SECONDS, self._collect),
            ("orphans", _ORPHANS_SECONDS, self._collect_orphans),
        ]
        for name, interval, step in steps:
            now = time.monotonic()
            if not eager and (self._is_wanted or self._stop.is_set or now < self._due.get(name, 0.0)):
                continue
            self._due[name] = now + interval
            try:
                step(report)
            except (FencedError, UnavailableError):
                raise
            except HeadwaterError as error:
                self._note(report, f"{name}: {error}")
            except Exception as error:
                # A fault of ours in one duty must not keep the store from the others: one policy stopped all tiering once.
                log.exception("upkeep: %s", name)
                report.problems += (f"{name}: {error!r}",)
        report.seconds = time.monotonic() - began
        self.totals.add(report)
        return report

    def _note(self, report: UpkeepReport, problem: str) -> None:
        report.problems += (problem,)
        # Whoever runs a round by hand has the report; the background says each thing once.
        if not self._is_wanted and problem not in self.totals.problems:
            log.warning("%s", problem)

    def _time_out(self, report: UpkeepReport) -> None:
        if self._engine.run(transactions.has_expired):
            while gone := self._engine.run(transactions.abort_expired):
                report.transactions_aborted += len(gone)
                failpoints.reach("txn.expired")
        if self._engine.run(sessions.has_expired):
            report.sessions_fenced += len(self._engine.run(sessions.fence_expired_sessions))
        if self._engine.run(tags.has_expired):
            self._engine.run(tags.delete_expired)
            report.rows_deleted += truncation.free_deleted(self._engine)
        for fill in self._engine.run(fills.list_expired):
            tableforks.drop(self._engine, fill, expired=True, may_go_on=lambda: not self._stop.is_set)

    def _scale(self, report: UpkeepReport) -> None:
        done = autoscaling.scale_streams(self._engine, self._now_us())
        report.segments_split += done.splits
        report.segments_merged += done.merges

    def _retain(self, report: UpkeepReport) -> None:
        session = self._live_session()
        report.streams_truncated += retention.retain(self._engine, session, self._now_us(), lambda problem: self._note(report, problem))
        report.rows_deleted += truncation.free_deleted(self._engine)

    def _rebuild(self, report: UpkeepReport, eager: bool) -> None:
        for build in self._engine.run(rebuilds.list_builds):
            session = self._live_session()
            try:
                is_done = rebuilding.rebuild(self._engine, session, build, lambda: self._may_go_on(eager))
                report.indexes_rebuilt += is_done
            except (ConditionFailedError, TruncatedError, NotFoundError):
                continue  # Truncated again, or deleted meanwhile: the next round begins from there.
            except CorruptDataError as error:
                self._note(report, f"the index of stream {build.stream} could not be rebuilt: {error}")

    def _tier(self, report: UpkeepReport, eager: bool) -> None:
        backlogs = self._engine.run(tiers.list_backlogs)
        now_us = self._now_us()
        self._weighed = {backlog.log: self._weighed[backlog.log] for backlog in backlogs if backlog.log in self._weighed}
        for backlog in self._rested(backlogs, eager):
            while self._may_go_on(eager) and (eager or self._is_due(backlog, now_us)):
                moved = self._try(report, backlog, lambda chunks, ref, backlog=backlog: chunks.tier(ref, backlog))  # type: ignore[misc]
                if moved is None:
                    break
                self._due["garbage"] = min(self._due.get("garbage", 0.0), time.monotonic() + _ROUND_SECONDS)
                backlog = backlog._replace(start=self._engine.run(tiers.get_until, backlog.log))
        for leftover, until in self._engine.run(tiers.list_leftover_inline):
            self._chunks().delete_inline(leftover, until)

    def _is_due(self, backlog: Backlog, now_us: int) -> bool:
        """Whether a log's blocks are many, large, old or final enough to be made a chunk."""
        until, due_at = self._weighed.get(backlog.log, (-1, 0))
        if until == backlog.tail and now_us < due_at and not backlog.is_sealed:
            return False
        weight = self._engine.run(tiers.weigh, backlog.log, backlog.start)
        due_at = (weight.oldest_at if weight.extents else now_us) + _us(TIER_SECONDS)
        enough = weight.bytes >= TIER_BYTES or weight.extents >= TIER_EXTENTS or backlog.is_sealed
        if weight.extents and (enough or now_us >= due_at):
            return True
        # Until then it need not be weighed again, if nothing is added.
        self._weighed[backlog.log] = (backlog.tail, due_at)
        return False

    def _compact(self, report: UpkeepReport, eager: bool) -> None:
        for backlog in self._rested(self._engine.run(tiers.list_crowded), eager):
            while self._may_go_on(eager):
                moved = self._try(report, backlog, lambda chunks, ref, backlog=backlog: chunks.compact(ref, backlog))  # type: ignore[misc]
                if moved is None:
                    break
                report.chunks_compacted += moved.extents

    def _try(self, report: UpkeepReport, backlog: Backlog, make: Callable[[Chunks, StreamRef], Moved | None]) -> Moved | None:
        """Make one chunk. What is damaged or was changed meanwhile is left, and the rest goes on."""
        name = f"stream {backlog.stream}"
        try:
            ref = self._engine.stream_ref(self._engine.run(streams.get_stream, backlog.stream))
            name = ref.name
            moved = make(self._chunks(), ref)
        except (ConditionFailedError, TruncatedError, NotFoundError):
            return None
        except FencedError:
            raise
        except Exception as error:
            # One log that can't be read must not keep the others waiting, nor be read again and again.
            self._resting[backlog.log] = time.monotonic() + TIER_SECONDS
            self._note(report, f"segment {backlog.segment} of {name} could not be tiered: {error}")
            if isinstance(error, UnavailableError) and len(report.problems) >= _MOST_FAILURES:
                raise
            return None
        if moved is not None:
            report.chunks_written += 1
            report.events_tiered += moved.events
            report.bytes_tiered += moved.raw_bytes
            report.bytes_stored += moved.stored_bytes
        return moved

    def _rested(self, backlogs: list[Backlog], eager: bool) -> list[Backlog]:
        """Those that did not fail just now."""
        now = time.monotonic()
        self._resting = {} if eager else {log: until for log, until in self._resting.items() if until > now}
        return [backlog for backlog in backlogs if backlog.log not in self._resting]

    def _collect(self, report: UpkeepReport) -> None:
        report.rows_deleted += self._engine.run(tags.forget_dropped)
        report.rows_deleted += truncation.free_deleted(self._engine)
        while gone := self._engine.run(objects.prune, self._live_session()):
            report.rows_deleted += gone
        report.objects_deleted += garbage.collect(self._engine, self._live_session())

    def _collect_orphans(self, report: UpkeepReport) -> None:
        report.objects_deleted += garbage.collect_orphans(self._engine, self._live_session(), lambda problem: self._note(report, problem))

    def _chunks(self) -> Chunks:
        return Chunks(self._engine, self._live_session(), self._next_index)

    def _next_index(self) -> int:
        self._index += 1
        return self._index

    def _live_session(self) -> int:
        if self._session is None or not self._is_held:
            raise FencedError("another process does the upkeep by now")
        return self._session

    def _may_go_on(self, by_hand: bool) -> bool:
        return not self._stop.is_set and (by_hand or not self._is_wanted)

    def _now_us(self) -> int:
        return self._engine.run(sessions.get_time)
