"""The lease of the upkeep: one process at a time. Whoever holds it checks that with everything it changes, so a second one is fenced."""

from __future__ import annotations

from headwater.catalog.database import Tx
from headwater.catalog.operations import operation
from headwater.catalog.sessions import end_session
from headwater.errors import FencedError
from headwater.model.limits import LEASE_SECONDS

_NAME = "upkeep"
_LEASE_US = int(LEASE_SECONDS * 1_000_000)


@operation("commit", repeatable=True)
def take(tx: Tx, session: int, holder: str, *, by_hand: bool) -> str | None:
    """Become the holder; else who it is.

    A lease that ran out is free. One taken by hand goes over one of the background, which is fenced by it and comes back later.
    """
    rows = tx.run(
        "INSERT INTO lease (name, session, holder, by_hand, expires_at) VALUES (?, ?, ?, ?, now_us() + ?) ON CONFLICT (name) DO UPDATE SET "
        "session = excluded.session, holder = excluded.holder, by_hand = excluded.by_hand, expires_at = excluded.expires_at "
        "WHERE lease.expires_at < now_us() OR lease.session = excluded.session OR lease.by_hand < excluded.by_hand RETURNING session",
        (_NAME, session, holder, int(by_hand), _LEASE_US),
    )
    return None if rows else find_holder(tx)


@operation("statement")
def find_holder(tx: Tx) -> str | None:
    """Who does the upkeep now; None if nobody."""
    rows = tx.run("SELECT holder FROM lease WHERE name = ? AND expires_at >= now_us()", (_NAME,))
    return str(rows[0][0]) if rows else None


@operation("commit", repeatable=True)
def renew(tx: Tx, session: int) -> bool:
    """Put the end of the lease off; False if another one has it."""
    sql = "UPDATE lease SET expires_at = now_us() + ? WHERE name = ? AND session = ? RETURNING session"
    return bool(tx.run(sql, (_LEASE_US, _NAME, session)))


def hold(tx: Tx, session: int) -> None:
    """Check that a session has the lease and is live, and keep it so until this transaction ends. FencedError if it is not.

    What a session that was fenced stores counts as garbage, also while it has the lease.
    """
    held, live = tx.run_all(
        [
            ("SELECT session FROM lease WHERE name = ? AND session = ? FOR UPDATE", (_NAME, session)),
            ("SELECT id FROM session WHERE id = ? AND live = 1 FOR UPDATE", (session,)),
        ]
    )
    if not held or not live:
        raise FencedError("another process does the upkeep by now: nothing was changed")


@operation("statement")
def is_held(tx: Tx, session: int) -> bool:
    """Whether a session has the lease, and had it all the time."""
    return bool(tx.run("SELECT 1 FROM lease WHERE name = ? AND session = ? AND expires_at >= now_us()", (_NAME, session)))


@operation("commit", repeatable=True)
def give_up(tx: Tx, session: int) -> None:
    """End the upkeep's session, and its lease if it has one: another process can take the lease at once."""
    tx.run("DELETE FROM lease WHERE name = ? AND session = ?", (_NAME, session))
    end_session(tx, session)
