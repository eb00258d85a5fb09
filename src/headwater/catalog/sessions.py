"""Sessions: one for each process that writes. Every commit checks its session, so a fenced process cannot commit."""

from __future__ import annotations

from headwater.catalog.database import Tx
from headwater.catalog.schema import next_id


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


def renew_session(tx: Tx, session: int) -> bool:
    """Keep a session alive; False if it was fenced."""
    return bool(tx.run("UPDATE session SET renewed_at = now_us() WHERE id = ? AND live = 1 RETURNING id", (session,)))


def end_session(tx: Tx, session: int) -> None:
    """Forget a session whose every flush was answered."""
    tx.run("DELETE FROM session WHERE id = ?", (session,))


def fence_expired_sessions(tx: Tx, lease_us: int) -> list[int]:
    """Fence every session that was not renewed for this long. A wrong guess costs its process a retry, never data."""
    rows = tx.run("UPDATE session SET live = 0 WHERE live = 1 AND renewed_at < now_us() - ? RETURNING id", (lease_us,))
    return sorted(int(row[0]) for row in rows)


def has_expired(tx: Tx, lease_us: int) -> bool:
    """Whether `fence_expired_sessions` would fence any."""
    return bool(tx.run("SELECT 1 FROM session WHERE live = 1 AND renewed_at < now_us() - ? LIMIT 1", (lease_us,)))
