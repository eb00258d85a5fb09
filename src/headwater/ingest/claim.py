"""The right to ingest: of all who try, the one whose transaction the record points at.

The record changes only by conditional updates, and every commit of events carries one. So a process that was stopped, or believed dead,
can't commit anything after another took over, whatever it believes: it finds out at its next commit, and stops.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable
from typing import Any

import headwater as hw
from headwater.ingest.holder import Holder

#: The record's history is replaced by its last state after so many commits.
_COMPACT_COMMITS = 1000
_LOOK_SECONDS = 0.5

Pause = Callable[[float], None]
Record = dict[str, Any]


class Claim:
    """The record under a name, taken or not. While it is taken, `tx` is the open transaction that it points at."""

    def __init__(self, store: hw.Store, name: str, lease: float) -> None:
        self._store = store
        self.name = name
        self._lease = lease
        self._id = uuid.uuid4().hex
        self._sync = store.synchronizer(name, initial=None, apply=_replace)
        self._commits = 0
        self.tx: hw.Transaction

    def take(self, *, standby: bool, take_over: bool, pause: Pause, notice: Callable[[str], None]) -> None:
        """Take it, and end what its last holder left open.

        While another process holds it: wait with `standby`, else ConflictError. One that died here gives way at once; one elsewhere when
        its transaction was not renewed for a lease. `take_over` asks for none of that.
        """
        seen: Record | None = self._sync.fetch()
        said = False
        while True:
            if seen is not None and not take_over and self._may_be_alive(seen):
                if not said:
                    notice(self._refuse_or_say(seen, standby))
                    said = True
                if not standby and self._is_renewed(seen, pause):
                    raise self._busy(seen)
                if standby:
                    pause(min(_LOOK_SECONDS, self._lease / 3))
            elif self._replace(seen):
                if seen is not None:
                    self._end(seen["transaction"])
                return
            seen = self._sync.fetch()

    def _may_be_alive(self, record: Record) -> bool:
        return self._status(record) is hw.TransactionStatus.OPEN and not Holder(*record["holder"]).is_known_dead

    def _refuse_or_say(self, record: Record, standby: bool) -> str:
        holder = Holder(*record["holder"])
        if standby:
            return f"{holder} ingests into {self.name} now: waiting to take over"
        if holder.is_known_alive:
            raise self._busy(record)
        return f"{holder} was at work on {self.name} a moment ago: waiting up to {self._lease:.0f} s for a sign of life"

    def _busy(self, record: Record) -> hw.ConflictError:
        return hw.ConflictError(f"{Holder(*record['holder'])} ingests into {self.name} already: wait for it with --standby")

    def _status(self, record: Record) -> hw.TransactionStatus:
        try:
            return self._store.transaction_status(record["transaction"])
        except hw.NotFoundError:
            return hw.TransactionStatus.ABORTED  # long ago

    def _is_renewed(self, record: Record, pause: Pause) -> bool:
        """Whether the transaction is renewed, or the record moved on, before the lease ran out."""
        expires = self._expires(record)
        while self._status(record) is hw.TransactionStatus.OPEN:
            if self._expires(record) != expires or self._sync.fetch() != record:
                return True
            pause(min(_LOOK_SECONDS, self._lease / 3))
        return False

    def _expires(self, record: Record) -> object:
        return next((info.expires for info in self._store.transactions(100_000, only_open=True) if info.id == record["transaction"]), None)

    def _replace(self, seen: Record | None) -> bool:
        """Point the record at a transaction of ours, unless it changed since it was seen."""
        tx = self._store.transaction(lease=self._lease)
        record = self._record(tx)

        def decide(found: Record | None) -> list[Record]:
            if found != seen:
                raise _MovedError
            return [record]

        try:
            self._sync.update(decide)
        except BaseException as error:
            _abort_quietly(tx)
            if isinstance(error, _MovedError):
                return False
            raise
        self.tx = tx
        return True

    def _record(self, tx: hw.Transaction) -> Record:
        return {"claim": self._id, "holder": list(Holder.here()), "transaction": tx.id}

    def _end(self, id: str) -> None:
        """Abort a transaction of a former holder: it could not commit any more, but its lease would keep what it staged."""
        with contextlib.suppress(hw.TransactionEndedError, hw.NotFoundError):
            self._store.resume_transaction(id).abort()

    def commit(self) -> None:
        """Commit the transaction together with the record that points at the next one, which is `tx` then.

        `recover` says what to do after TransactionEndedError and ConditionFailedError: nothing was stored.
        """
        following = self._store.transaction(lease=self._lease)
        try:
            self.tx.update(self._sync, [self._record(following)])
            self.tx.commit()
        except BaseException:
            _abort_quietly(following)
            raise
        self.tx = following
        self._commits += 1
        if self._commits % _COMPACT_COMMITS == 0:
            self._sync.compact()
        self._check_mine(self._sync.fetch())

    def recover(self) -> None:
        """After a commit that was refused: go on with a new transaction if only the lease ran out; FencedError if another took over."""
        found = self._sync.fetch()
        self._check_mine(found)
        if not self._replace(found):
            self._check_mine(self._sync.fetch())

    def _check_mine(self, found: Record | None) -> None:
        if found is None or found["claim"] != self._id:
            who = f"{Holder(*found['holder'])} took over" if found is not None else "another process took over, and is done"
            raise hw.FencedError(f"{who}: this one stops. Nothing is stored twice")

    def release(self) -> None:
        """Give it back, with nothing left open. It is fine if another took over."""
        _abort_quietly(self.tx)
        with contextlib.suppress(hw.HeadwaterError):
            self._sync.update(lambda found: [None] if found is not None and found["claim"] == self._id else [])


class _MovedError(Exception):
    """Another was first."""


def _replace(_: Record | None, update: Record | None) -> Record | None:
    return update


def _abort_quietly(tx: hw.Transaction) -> None:
    with contextlib.suppress(hw.HeadwaterError):
        tx.abort()
