"""The names of stored objects: the one place that knows them.

    journal/<session>/<index>.hwj   a session's journal files, on local storage
    l0/<session>/<index>.hwb        a flush as one object
    chunks/<scope>/<stream>-<id>/segment=<n>/<first>-<session>-<index>.parquet (.bytes for byte streams)
                                    long-term chunks; a folder is a table for whatever reads Parquet
    txn/<transaction>/<name>.hwb    staged bytes, which belong to a transaction and not to a session
    store/id                        whose bytes these are: the id that the catalog has too
    tmp/<key>.<token>               local storage: a put under way, or left by a crash; listed only when asked for by this prefix

Session and index are hexadecimal with leading zeros, so that keys sort like numbers. No key is ever used twice.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

from headwater.errors import InvalidRequestError

JOURNAL_PREFIX: Final = "journal/"
OBJECT_PREFIX: Final = "l0/"
CHUNK_PREFIX: Final = "chunks/"
TRANSACTION_PREFIX: Final = "txn/"
IDENTITY_KEY: Final = "store/id"
TEMPORARY_PREFIX: Final = "tmp/"

_INDEX_BITS: Final = 24
#: Objects one session can name.
INDEXES: Final = 1 << _INDEX_BITS
#: Session ids: an object's id must fit into a database's signed 64-bit integer.
SESSIONS: Final = 1 << (63 - _INDEX_BITS)

_CHUNK_KEY = re.compile(r"chunks/.*/[0-9]+-([0-9a-f]{12})-([0-9a-f]{6})(?:-[0-9a-f]+)?\.(parquet|bytes)")
_TRANSACTION_KEY = re.compile(r"txn/([^/]+)/[^/]+")
_KEY = re.compile(r"(journal|l0)/([0-9a-f]{12})/([0-9a-f]{6})\.(hwj|hwb)")
_SUFFIXES = {"journal": "hwj", "l0": "hwb"}


@dataclass(frozen=True, slots=True)
class SessionKey:
    """A key of a session's own object, taken apart."""

    kind: Literal["journal", "l0", "chunk"]
    session: int
    index: int


def journal_key(session: int, index: int) -> str:
    _check(session, index)
    return f"{JOURNAL_PREFIX}{session:012x}/{index:06x}.hwj"


def object_key(session: int, index: int) -> str:
    _check(session, index)
    return f"{OBJECT_PREFIX}{session:012x}/{index:06x}.hwb"


def transaction_key(transaction: str, name: str) -> str:
    return f"{TRANSACTION_PREFIX}{transaction}/{name}.hwb"


def chunk_folder(stream: str, stream_id: int) -> str:
    """Where the chunks of a stream are."""
    return f"{CHUNK_PREFIX}{stream}-{stream_id}/"


def chunk_key(stream: str, stream_id: int, segment: int, first: int, session: int, index: int, suffix: str) -> str:
    _check(session, index)
    return f"{chunk_folder(stream, stream_id)}segment={segment}/{first:016d}-{session:012x}-{index:06x}{suffix}"


def parse_transaction_key(key: str) -> str | None:
    """The transaction that a staged object belongs to; None if it is none."""
    found = _TRANSACTION_KEY.fullmatch(key)
    return found[1] if found else None


def parse_key(key: str) -> SessionKey | None:
    """Take the key of a journal, an object or a chunk apart; None if it is none."""
    found = _CHUNK_KEY.fullmatch(key)
    if found is not None:
        parsed = SessionKey("chunk", int(found[1], 16), int(found[2], 16))
    else:
        found = _KEY.fullmatch(key)
        if found is None or _SUFFIXES[found[1]] != found[4]:
            return None
        parsed = SessionKey("journal" if found[1] == "journal" else "l0", int(found[2], 16), int(found[3], 16))
    # Twelve hexadecimal digits hold larger numbers than a session can have.
    return parsed if parsed.session < SESSIONS else None


def temporary_key(key: str, token: str) -> str:
    """The name under which local storage writes `key` before it is whole."""
    if key.startswith(CHUNK_PREFIX):
        # A stream's full name and the rest would be too long for a file's; the session and the index say whose it is.
        key = f"{CHUNK_PREFIX}/{key.rpartition('/')[2]}"
    return f"{TEMPORARY_PREFIX}{key.replace('/', '~')}.{token}"


def parse_temporary_key(key: str) -> str | None:
    """The key that a file below tmp/ was to become, of a chunk's without its folder; None if it is no such file."""
    if not key.startswith(TEMPORARY_PREFIX):
        return None
    return key.removeprefix(TEMPORARY_PREFIX).rpartition(".")[0].replace("~", "/") or None


def object_id(session: int, index: int) -> int:
    """One number for a session's object, as the catalog keeps it."""
    _check(session, index)
    return session << _INDEX_BITS | index


def parse_object_id(id: int) -> tuple[int, int]:
    """The session and index of `object_id`."""
    if not 0 <= id < SESSIONS << _INDEX_BITS:
        raise InvalidRequestError(f"{id} is no object id")
    return id >> _INDEX_BITS, id & (INDEXES - 1)


def _check(session: int, index: int) -> None:
    if not 0 <= session < SESSIONS:
        raise InvalidRequestError(f"{session} is no session: ids go from 0 to {SESSIONS - 1}")
    if not 0 <= index < INDEXES:
        raise InvalidRequestError(f"session {session} cannot name object {index}: it has {INDEXES} names. Open the store again for more")
