"""Garbage: stored objects that nobody needs, found by what the catalog says of their makers. Age makes nothing garbage.

An object goes from storage first and its row after it, so that a crash in between leaves a row that is looked at again. Where a catalog
may forget its last commits, by a fail-over to a standby that lagged, it stays for a while: that standby may still name it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from headwater.catalog import objects, sessions, transactions
from headwater.catalog.database import Tx
from headwater.catalog.objects import ObjectRow, Owners
from headwater.catalog.operations import operation
from headwater.errors import InvalidRequestError
from headwater.runtime import clock, failpoints
from headwater.segments.engine import Engine
from headwater.storage import layout
from headwater.storage.interface import ObjectInfo
from headwater.storage.layout import SessionKey

_SLICE = 200
#: A transaction may store its blocks before the catalog hears of it. One that is not heard of for this long is aborted there first, so
#: that a commit which comes after all is refused: then its bytes can go.
_UNHEARD_SECONDS = 3600.0
_PREFIXES = (layout.JOURNAL_PREFIX, layout.OBJECT_PREFIX, layout.CHUNK_PREFIX, layout.TRANSACTION_PREFIX)


def collect(engine: Engine, session: int) -> int:
    """Delete the objects whose last extent is gone, long enough ago; returns how many."""
    dead = engine.run(find_dead)
    kept_us = int(engine.garbage_seconds * 1_000_000)
    if dead and kept_us:
        new = [row.id for row in dead if row.dead_at is None]
        for start in range(0, len(new), _SLICE):
            engine.run(objects.note_dead, session, new[start : start + _SLICE])
        until = engine.run(sessions.get_time) - kept_us
        dead = [row for row in dead if row.dead_at is not None and row.dead_at < until]
    if dead:
        failpoints.reach("garbage.found")
    for start in range(0, len(dead), _SLICE):
        some = dead[start : start + _SLICE]
        engine.storage.delete([row.key for row in some], engine.pace.begin_freeing())
        failpoints.reach("garbage.deleted")
        engine.run(objects.forget, session, [row.id for row in some])
        failpoints.reach("garbage.forgotten")
    return len(dead)


@operation("read")
def find_dead(tx: Tx) -> list[ObjectRow]:
    """The objects that no extent names, and that nobody may name again."""
    unnamed = objects.list_unnamed(tx)
    owners = objects.get_owners(tx) if unnamed else Owners({}, frozenset())
    return [row for row in unnamed if not _may_be_named(row, owners)]


def _may_be_named(row: ObjectRow, owners: Owners) -> bool:
    """Whether its maker may still commit something that lies in this object."""
    transaction = layout.parse_transaction_key(row.key)
    if transaction is not None:
        return transaction in owners.transactions
    found = layout.parse_key(row.key)
    if found is None:
        return True  # Not one of ours to judge.
    # Other objects are named once, in the commit that made their row.
    return found.kind == "journal" and _may_name(owners, found)


def _may_name(owners: Owners, key: SessionKey) -> bool:
    """Whether a session is live and may still name an object of its own; of its journal, it says which files it is done with."""
    first_file = owners.sessions.get(key.session)
    return first_file is not None and (key.kind != "journal" or key.index >= first_file)


def collect_orphans(engine: Engine, session: int, note: Callable[[str], None]) -> int:
    """Delete what has no row in the catalog and no maker who could still name it: left by killed processes and aborted transactions.

    This lists the whole storage, so it is done seldom. What can't be listed, because of a foreign key there, is noted.
    """
    gone = 0
    prefixes = (*_PREFIXES, layout.TEMPORARY_PREFIX) if engine.storage.local else _PREFIXES
    for prefix in prefixes:
        try:
            for page in _pages(engine.storage.list(prefix)):
                _bury(engine, session, page)
                # The look comes after the listing: a maker that is not live now had named it by now, or never will.
                dead = engine.run(find_orphans, [info.key for info in page])
                if dead:
                    failpoints.reach("garbage.found")
                    engine.storage.delete(dead, engine.pace.begin_freeing())
                    failpoints.reach("garbage.deleted")
                gone += len(dead)
        except InvalidRequestError as error:
            note(f"orphans: {error}")
    return gone


def _pages(listing: Iterator[ObjectInfo]) -> Iterator[Sequence[ObjectInfo]]:
    while page := list(islice(listing, 1000)):
        yield page


def _bury(engine: Engine, session: int, page: Sequence[ObjectInfo]) -> None:
    """Abort transactions that stored something long ago and that the catalog never heard of: their commit can't come any more."""
    old = clock.now_us() - int(_UNHEARD_SECONDS * 1_000_000)
    aged = [info.key for info in page if info.modified_us < old and _transaction(info.key) is not None]
    # What is entered in the catalog was heard of; of a commit long ago no more may be known than that.
    known = engine.run(objects.find_known, [], aged) if aged else frozenset()
    ids = {_transaction(key) for key in aged if key not in known} - {None}
    unheard = engine.run(transactions.find_unknown, sorted(id for id in ids if id is not None))
    if unheard:
        engine.run(objects.bury, session, unheard)


def _transaction(key: str) -> str | None:
    return layout.parse_transaction_key(layout.parse_temporary_key(key) or key)


@operation("read")
def find_orphans(tx: Tx, keys: Sequence[str]) -> list[str]:
    """Which of these keys have no row, and no maker who may still name them."""
    parsed = [layout.parse_key(key) for key in keys]
    ids = [layout.object_id(found.session, found.index) for found in parsed if found is not None]
    known = objects.find_known(tx, ids, [key for key in keys if layout.parse_transaction_key(key) is not None])
    unheard = set(transactions.find_unknown(tx, sorted({id for id in map(_transaction, keys) if id is not None})))
    owners = objects.get_owners(tx)
    return [key for key in keys if key not in known and _is_orphan(key, owners, unheard)]


def _is_orphan(key: str, owners: Owners, unheard: set[str]) -> bool:
    transaction = _transaction(key)
    if transaction is not None:
        return transaction not in owners.transactions and transaction not in unheard
    if layout.parse_temporary_key(key) == layout.IDENTITY_KEY:
        return True  # The store has its id, or nobody could have opened it.
    found = layout.parse_key(layout.parse_temporary_key(key) or key)
    return found is not None and not _may_name(owners, found)
