"""Sessions: one for each process that writes. Every commit checks its session, so a fenced process cannot commit."""

from __future__ import annotations

from headwater.catalog.database import Tx
from headwater.catalog.operations import operation
from headwater.catalog.schema import next_id
from headwater.model.limits import SESSION_SECONDS

_LEASE_US = int(SESSION_SECONDS * 1_000_000)


@operation("statement")
def get_time(tx: Tx) -> int:
    """The time of the catalog's clock, in microseconds."""
    return int(tx.run("SELECT now_us()")[0][0])


@operation("commit", repeatable=True)
def begin_session(tx: Tx, process: str, last_flush: int = 0) -> int:
    """A new live session; `process` says for people where it runs.

    Its flushes are numbered behind `last_flush`, which whoever flushes draws at random: should its id be given again, by a catalog that
    forgot this session, then of the two processes one is fenced by its number, instead of being answered for what the other stored.
    """
    session = next_id(tx, "session")
    tx.run(
        "INSERT INTO session (id, live, last_flush, renewed_at, process) VALUES (?, 1, ?, now_us(), ?)",
        (session, last_flush, process),
    )
    return session


@operation("commit", repeatable=True)
def renew_session(tx: Tx, session: int, first_file: int = 0) -> bool:
    """Keep a session alive; False if it was fenced. No later flush of it names a journal file with an index below `first_file`."""
    sql = "UPDATE session SET renewed_at = now_us(), first_file = ? WHERE id = ? AND live = 1 RETURNING id"
    return bool(tx.run(sql, (first_file, session)))


@operation("commit", repeatable=True)
def end_session(tx: Tx, session: int) -> None:
    """Forget a session whose every flush was answered."""
    tx.run("DELETE FROM session WHERE id = ?", (session,))


@operation("commit", repeatable=True)
def fence_expired_sessions(tx: Tx) -> list[int]:
    """Fence every session that was not renewed for SESSION_SECONDS. A wrong guess costs its process a retry, never data."""
    rows = tx.run("UPDATE session SET live = 0 WHERE live = 1 AND renewed_at < now_us() - ? RETURNING id", (_LEASE_US,))
    return sorted(int(row[0]) for row in rows)


@operation("statement")
def has_expired(tx: Tx) -> bool:
    """Whether `fence_expired_sessions` would fence any."""
    return bool(tx.run("SELECT 1 FROM session WHERE live = 1 AND renewed_at < now_us() - ? LIMIT 1", (_LEASE_US,)))
