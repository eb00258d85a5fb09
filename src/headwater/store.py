"""The front door: opening a store, its scopes and streams, and closing it without losing anything."""

from __future__ import annotations

import atexit
import errno
import os
import stat
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

import pyarrow as pa

from headwater.bytestream import ByteWriter
from headwater.catalog import commits, groups, sessions, streams, transactions
from headwater.catalog.database import Database
from headwater.catalog.mounts import refuse_network_mount
from headwater.catalog.schema import is_catalog_used, open_catalog
from headwater.catalog.sqlite import SqliteDatabase
from headwater.committing import Committer
from headwater.errors import (
    AlreadyExistsError,
    ConditionFailedError,
    HeadwaterError,
    InvalidRequestError,
    NotFoundError,
    TransactionEndedError,
    UnavailableError,
)
from headwater.journals.journal import Journal
from headwater.journals.merged import Merged
from headwater.model.arguments import MOST, check_flag, check_seconds, check_time, check_whole, items_of, shown
from headwater.model.cuts import Cut
from headwater.model.markers import Look, Marker
from headwater.model.names import parse_stream_name, parse_word
from headwater.model.policies import Retention, Scaling
from headwater.model.records import JOURNAL_SCHEMA
from headwater.readers.group import ReaderGroup, open_group
from headwater.readers.reader import Reader
from headwater.runtime.clock import from_datetime, to_datetime
from headwater.runtime.heart import Heart
from headwater.segments.engine import Engine
from headwater.segments.flush import Flusher
from headwater.segments.lanes import StreamRef
from headwater.segments.metrics import Metrics
from headwater.segments.routing import Router
from headwater.segments.tiering import ChunkJob, MadeChunk, Moved
from headwater.storage import Storage, make_directory, open_storage, parse_file_url
from headwater.storage.layout import IDENTITY_KEY
from headwater.stream import Stream
from headwater.streams import cuts, forks, keeps, lifecycle, steps, truncation
from headwater.streams.autoscaling import ScalingReport, scale_streams
from headwater.streams.cuts import Place
from headwater.streams.upkeep import Upkeep, UpkeepReport
from headwater.synchronizer import Revisioned, Synchronizer, check_rules
from headwater.tables import TABLE_SCHEMA, Table
from headwater.transactions import Transaction, TransactionInfo, TransactionStatus, check_id, check_marker, check_owner, parse_receipt
from headwater.writer import Writer

S = TypeVar("S")
U = TypeVar("U")

#: How often a roll-back of a table is tried while others change the table.
_TABLE_ROUNDS = 10
_opened: weakref.WeakSet[Store] = weakref.WeakSet()
#: A store that a program let go of is gone from `_opened`; its flusher is kept alive by its thread, and still has events to store.
_flushers: weakref.WeakSet[Flusher] = weakref.WeakSet()
_memory: dict[str, tuple[Database, Storage]] = {}
_memory_lock = threading.Lock()
_reopened: dict[tuple[Any, ...], Store] = {}


def open(
    url: str | os.PathLike[str],
    *,
    catalog: str | None = None,
    create: bool = True,
    upkeep: bool = True,
    storage_options: dict[str, str] | None = None,
) -> Store:
    """Open the store at `url`, made anew if it is missing and `create` is true.

    "some/dir", "~/dir" or file:// is a SQLite catalog and files in that directory; s3://, gs:// and az:// (and file:// too) take
    catalog="postgresql://..."; memory://name lives in this process. Any number of processes may have it open.
    """
    text = os.fspath(url) if isinstance(url, str | os.PathLike) else None
    if not isinstance(text, str) or not text:
        raise InvalidRequestError(f"the address of a store is a path or URL, not {shown(url)}")
    if catalog is not None and not (isinstance(catalog, str) and catalog.startswith(("postgresql://", "postgres://"))):
        raise InvalidRequestError(
            f"a catalog is given as postgresql://..., not {shown(catalog)}; without one, SQLite in the store's directory is used"
        )
    check_flag(create, "create")
    check_flag(upkeep, "upkeep")
    _check_options(storage_options)
    scheme, _, rest = text.partition("://") if "://" in text else ("file", "", text)
    if scheme == "memory":
        if catalog is not None:
            raise InvalidRequestError("a store in memory has its own catalog: leave out `catalog`")
        database, storage = _open_memory(rest, create, storage_options or {})
    elif scheme == "file":
        path = text = os.path.abspath(parse_file_url(text) if "://" in text else _expand_home(text))
        if catalog is None:
            refuse_network_mount(path)
        # Before the directory is made: of a server that does not answer, nothing stays.
        server = _open_postgres(catalog) if catalog else None
        try:
            _check_directory(path, create)
            storage = open_storage(path, storage_options or {})
            database = server or _open_sqlite(path, storage, create)
        except BaseException:
            if server is not None:
                server.close()
            raise
    else:
        if catalog is None and scheme in ("s3", "gs", "az"):
            raise InvalidRequestError(
                f"a store at {scheme}:// needs a catalog on PostgreSQL: hw.open({text!r}, catalog='postgresql://...'), or --catalog"
            )
        storage = open_storage(text, storage_options or {})
        assert catalog is not None, "other schemes have no storage"
        database = _open_postgres(catalog)
    try:
        store_id = open_catalog(database, "postgresql" if catalog else "sqlite", create=create)
        if scheme != "memory":
            # Asked before the storage, which a new store's maker marks before it uses the catalog. SQLite lies beside the files it names.
            is_used = catalog is not None and is_catalog_used(database)
            _check_identity(storage, store_id, text, is_used)
    except BaseException:
        if scheme != "memory":
            database.close()
            storage.close()
        raise
    return Store(text, catalog, storage_options, Engine(store_id, database, storage), upkeep=upkeep)


def _check_options(options: Any) -> None:
    if options is None:
        return
    if not isinstance(options, dict) or not all(isinstance(name, str) and isinstance(value, str | bool) for name, value in options.items()):
        # Not shown: they may hold a password.
        raise InvalidRequestError("storage_options is a dict of texts or flags by their names, like {'region': 'us-east-1'}; these are not")


def _expand_home(path: str) -> str:
    return os.path.expanduser(path) if path == "~" or path.startswith("~/") else path


def _open_memory(name: str, create: bool, options: dict[str, str]) -> tuple[Database, Storage]:
    with _memory_lock:
        storage = open_storage(f"memory://{name}", options)
        if name not in _memory:
            if not create:
                raise NotFoundError(f"there is no headwater store at memory://{name}")
            _memory[name] = SqliteDatabase(":memory:"), storage
        return _memory[name]


def _open_sqlite(path: str, storage: Storage, create: bool) -> Database:
    file = os.path.join(path, "catalog.sqlite")
    # Asked before the catalog, which comes first in a new store: so another process that is just making it is not taken for a loss.
    has_identity = storage.size(IDENTITY_KEY) is not None
    if not os.path.exists(file):
        if has_identity:
            raise InvalidRequestError(
                f"{path} has the files of a store, but no catalog.sqlite: put it back, "
                "or give the catalog if that is on PostgreSQL (catalog='postgresql://...', --catalog)"
            )
        if not create:
            raise NotFoundError(f"there is no headwater store at {path}")
    return SqliteDatabase(file)


def _open_postgres(url: str) -> Database:
    from headwater.catalog.postgres import PostgresDatabase  # an extra, which only stores on PostgreSQL need

    return PostgresDatabase(url)


def _check_directory(path: str, create: bool) -> None:
    try:
        if create:
            # Before anything is in it, so that a power cut does not take it away with all that is.
            if not os.path.exists(os.path.join(path, IDENTITY_KEY)):
                make_directory(path)
        elif not _is_directory(path):
            raise NotFoundError(f"there is no headwater store at {path}")
        os.listdir(path)
    except NotADirectoryError:
        raise InvalidRequestError(f"{path} is not a directory: a store is one") from None
    except FileExistsError:
        raise InvalidRequestError(f"{path} is a file: a store is a directory") from None
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{shown(path)} can't name a directory: {error}") from None
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            raise InvalidRequestError(f"{shown(path)} can't name a directory: {error.strerror}") from None
        raise UnavailableError(f"the directory {path} can't be used as a store: {error.strerror}") from error


def _is_directory(path: str) -> bool:
    """Like `os.path.isdir`, but not False where one may not look."""
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except PermissionError:
        raise
    except (OSError, ValueError):
        return False


def _check_identity(storage: Storage, store_id: str, url: str, is_used: bool) -> None:
    """Tell a catalog and a storage that don't belong together before anything is lost between them."""
    size = storage.size(IDENTITY_KEY)
    if size is None and is_used:
        raise InvalidRequestError(
            f"{url} holds nothing of the store in this catalog: mount it, or correct the address (a moved store brings its store/id along)"
        )
    if size is None:
        try:
            storage.put(IDENTITY_KEY, [store_id.encode()])
            return
        except AlreadyExistsError:
            size = storage.size(IDENTITY_KEY) or 0
    found = bytes(storage.get(IDENTITY_KEY, 0, size)).decode(errors="replace")
    if found != store_id:
        raise InvalidRequestError(f"the storage at {url} belongs to another store ({found}) than the catalog ({store_id})")


class Store:
    """An open store. Thread-safe; a context manager; picklable: unpickled elsewhere, it opens the same store."""

    def __init__(
        self, url: str, catalog: str | None, storage_options: dict[str, str] | None, engine: Engine, *, upkeep: bool = True
    ) -> None:
        self.url = url
        self._has_upkeep = upkeep
        self._catalog = catalog
        self._storage_options = storage_options
        self._engine = engine
        self._begin()
        _opened.add(self)

    def _begin(self) -> None:
        self._flusher = Flusher(self._engine)
        _flushers.add(self._flusher)
        self._router = Router(self._engine)
        self._heart = Heart()
        self._begin_upkeep()
        self._committer = Committer(self._engine, self._router, self._open_journal)
        self._writers: weakref.WeakSet[Writer | ByteWriter] = weakref.WeakSet()
        self._readers: weakref.WeakSet[Reader] = weakref.WeakSet()
        self._journals: weakref.WeakSet[Journal] = weakref.WeakSet()
        self._is_closed = False

    def _open_journal(self, name: str) -> Journal:
        """A journal that is there."""
        ref = lifecycle.open_stream(self._engine, parse_stream_name(name))
        if ref.kind != "journal":
            raise InvalidRequestError(f"{name} is of kind {ref.kind!r}, not 'journal'")
        return Journal(self, ref)

    def _begin_upkeep(self) -> None:
        self._upkeep = Upkeep(self._engine, self._heart)
        if self._has_upkeep:
            self._upkeep.start()

    def __repr__(self) -> str:
        return f"<Store {self.url}>"

    @property
    def id(self) -> str:
        """The store's own id, which cuts carry."""
        return self._engine.store_id

    @property
    def address(self) -> tuple[str, str | None, dict[str, str] | None]:
        """(url, catalog, storage_options) with which `hw.open` opens this store again."""
        return self.url, self._catalog, self._storage_options

    # Scopes and streams.

    def create_scope(self, name: str) -> None:
        """Make a scope. AlreadyExistsError if it is there; `create_stream` makes a missing one by itself."""
        if not self._engine.run(streams.create_scope, parse_word(name, "scope")):
            raise AlreadyExistsError(f"scope {name!r} exists")

    def delete_scope(self, name: str) -> None:
        """Delete an empty scope."""
        self._engine.run(streams.delete_scope, parse_word(name, "scope"))

    def scopes(self) -> list[str]:
        """The names of all scopes, in order."""
        return self._engine.run(streams.list_scopes)

    def create_stream(
        self,
        name: str,
        *,
        scaling: Scaling | None = None,
        retention: Retention | None = None,
        schema: pa.Schema | None = None,
        kind: str = "events",
        labels: Collection[str] = (),
        exist_ok: bool = False,
    ) -> Stream:
        """Make a stream, and its scope if it is missing.

        AlreadyExistsError if the name is taken; with `exist_ok` only if kind or schema differ.
        """
        lifecycle.check_kind(kind)
        check_flag(exist_ok, "exist_ok")
        ref = lifecycle.create_stream(
            self._engine,
            name,
            scaling=scaling if scaling is not None else Scaling.fixed(1),
            retention=retention if retention is not None else Retention.forever(),
            schema=schema,
            kind=kind,
            labels=labels,
            exist_ok=exist_ok,
        )
        return Stream(self, ref)

    def stream(self, name: str) -> Stream:
        """An existing stream; NotFoundError if there is none."""
        return Stream(self, lifecycle.open_stream(self._engine, parse_stream_name(name)))

    def streams(self, scope: str | None = None, label: str | None = None, kinds: Collection[str] = ("events", "bytes")) -> list[str]:
        """List the streams of events and of bytes by full name, in order; only those of a scope, with a label, or of other `kinds`.

        The other kinds are "table", "revisioned" and "journal".
        """
        if label is not None:
            parse_word(label, "label")
        chosen = lifecycle.check_kinds(kinds)
        return self._engine.run(streams.list_streams, None if scope is None else parse_word(scope, "scope"), label, chosen)

    def delete_stream(self, name: str, *, seal: bool = False) -> None:
        """Delete a sealed stream with all its data. The name may be used again, for another stream.

        `seal` seals an open one in the same step: if the deletion is refused, because a tag keeps the stream, nothing changes.
        """
        check_flag(seal, "seal")
        deleted = self._engine.run(streams.delete_by_name, parse_stream_name(name), seal=seal)
        self._router.forget_name(name)
        self._router.forget_stream(deleted)
        self._flusher.forget_stream(deleted)
        truncation.free_deleted(self._engine)

    def replace_stream(self, name: str, *, by: str, keep_as: str, consumers: str = "reread") -> None:
        """Give the name of a stream or table to another one, `by`, in one commit; the old one is sealed, and called `keep_as` from then on.

        Cuts of the old one hold up to where `by` was forked from it. Others, and all if it is no fork, raise RolledBackError with the cut
        to read on from. Reader groups read on in the new one, from such a place; with consumers="continue" from its tail, and a group that
        has not read all of the old one is a ConflictError. So are named writers of the old one.
        """
        with self.transaction() as tx:
            tx.replace_stream(name, by=by, keep_as=keep_as, consumers=consumers)
        for each in (name, by, keep_as):
            self._router.forget_name(each)

    def cut(self, *names: str | Stream) -> Cut:
        """One consistent cut over the tails of all these streams."""
        if not names:
            raise InvalidRequestError("a cut takes the names of one or more streams")
        refs = [name._ref if isinstance(name, Stream) else lifecycle.open_stream(self._engine, parse_stream_name(name)) for name in names]
        return cuts.tail(self._engine, refs)

    def advance(
        self,
        cut: Cut,
        *,
        end: Cut | None = None,
        max_events: int | None = None,
        max_bytes: int | None = None,
        wait: float = 0.0,
        skip_truncated: bool = False,
        piece_bytes: int = steps.PIECE_BYTES,
    ) -> Cut:
        """Where a reader at `cut` gets to with up to so many events, not behind `end`; `cut` itself if nothing came in `wait` seconds.

        No segment is read before its predecessors are finished, and one is in the same step as its predecessors only where they have up
        to `piece_bytes` together. So reading a step's overlapping ranges one after the other, the others in parallel, keeps every key's
        order. TruncatedError if some of what lies behind `cut` is gone; `skip_truncated` goes on from what is left.
        """
        cuts.check_cut(cut)
        if end is not None:
            cuts.check_cut(end)
        steps.check_limit(max_events, "max_events")
        steps.check_limit(max_bytes, "max_bytes")
        check_flag(skip_truncated, "skip_truncated")
        check_whole(piece_bytes, "piece_bytes")
        wait = check_seconds(wait, "wait")
        arguments = (self.id, cut, end, max_events, max_bytes, skip_truncated, piece_bytes)
        deadline = time.monotonic() + wait
        while True:
            seen = self._engine.changes.version()
            found = self._engine.run(steps.advance, *arguments)
            left = deadline - time.monotonic()
            if found != cut or left <= 0:
                return found
            self._engine.changes.wait(seen, left)

    def look(self, streams: Collection[str | Stream] = (), markers: Collection[str] = ()) -> Look:
        """Look at the tails of streams and at the last markers of owners in the same moment.

        What a marker's commit wrote lies before the cut, and so does everything that was committed before the look.
        """
        for owner in items_of(markers, "markers", "owners"):
            check_owner(owner)
        refs = [each._ref if isinstance(each, Stream) else lifecycle.open_stream(self._engine, parse_stream_name(each)) for each in streams]
        return cuts.look(self._engine, refs, list(markers))

    def keep_from(self, name: str, cut: Cut) -> None:
        """Keep everything of the cut's streams from the cut on, in segments that are made later too, until `unkeep`.

        Truncating a stream past the cut and deleting the stream raise ConflictError; retention stops at the cut. A keep of this name
        moves to the new cut. TruncatedError if the cut lies before the head.
        """
        keeps.keep_from(self._engine, name, cut)

    def kept(self) -> dict[str, Cut]:
        """Return the cut of each keep, by the keep's name."""
        return keeps.list_keeps(self._engine)

    def unkeep(self, name: str) -> None:
        """Forget a keep; what only it kept may go from now on."""
        keeps.unkeep(self._engine, name)

    def tag(self, name: str, cut: Cut) -> None:
        """Name a cut: what is readable before it now stays so, also after a truncation. AlreadyExistsError if the name is taken."""
        forks.tag(self._engine, name, cut)

    def tags(self) -> dict[str, Cut]:
        """The named cuts."""
        return forks.list_tags(self._engine)

    def untag(self, name: str) -> None:
        """Forget a named cut; what only it kept is freed."""
        forks.untag(self._engine, name)

    def hold(self, name: str, start: Cut | None, end: Cut, seconds: float = 60.0) -> None:
        """Keep what lies between two cuts readable for so many seconds, whatever is truncated: a tag for a running reader.

        Without a start it is what `ranges(end=end)` gives: from the head, or from where a tagged cut was tagged.
        Given again under the same name, it takes the place of the one before; a reader that dies lets go by itself.
        """
        forks.hold(self._engine, name, start, end, seconds)

    def release(self, name: str) -> None:
        """End a hold before its time; nothing happens if there is none."""
        forks.release(self._engine, name)

    def run_upkeep(self) -> UpkeepReport:
        """One full round of upkeep now, in this thread: everything that waits is tiered, and all garbage collected.

        UnavailableError if another process is at it by hand. One that does it in the background is fenced, and goes on afterwards.
        """
        self._check_open()
        return self._upkeep.run()

    def upkeep_rounds(self, every: float = 2.0) -> Iterator[UpkeepReport | None]:
        """Do the upkeep in this thread, for a store opened with upkeep=False: what is due every so many seconds, for ever.

        Gives a report of each round, or None while another process has the lease.
        """
        self._check_open()
        seconds = check_seconds(every, "every")
        if seconds < 0:
            raise InvalidRequestError(f"every is a number of seconds that is not negative, not {shown(every)}")
        return self._upkeep.rounds(seconds)

    @contextmanager
    def pause_upkeep(self) -> Iterator[None]:
        """In this block no process tiers, retains or deletes anything, so that files and catalog can be copied one after the other."""
        self._check_open()
        with self._upkeep.pause():
            yield

    @contextmanager
    def tiering(self, stream: str) -> Iterator[Tiering]:
        """Tier a stream by other processes: give its `jobs` to them, and what each `run` returns to `finish`, in the order of the jobs.

        Until the end of the block no other upkeep runs. A job may be run twice, or never: what is not finished is garbage, and so is what
        comes behind it in the same segment.
        """
        self._check_open()
        ref = lifecycle.open_stream(self._engine, parse_stream_name(stream))
        with self._upkeep.tiering(ref) as (jobs, finish):
            yield Tiering([TierJob(self, ref.name, job) for job in jobs], finish)

    @property
    def upkeep_totals(self) -> UpkeepReport:
        """What this process's upkeep did since the store was opened."""
        return self._upkeep.totals

    def metrics(self) -> Metrics:
        """Count this process's requests to the catalog since it opened the store: calls, failures and seconds by operation.

        The commits of writers are not among them. A forked child begins at zero.
        """
        return self._engine.metrics()

    def scale_streams(self, now: datetime | None = None) -> ScalingReport:
        """Sample the load of all streams that scale by rate, and split and merge where it is time; upkeep does this every 10 s.

        `now` is for simulations that go faster than the clock, in a store without other upkeep: each time later than the one before.
        """
        self._check_open()
        if now is None:
            return scale_streams(self._engine, self._engine.run(sessions.get_time))
        check_time(now, "now")
        return scale_streams(self._engine, from_datetime(now))

    # Transactions, readers and state.

    def transaction(self, lease: float = 30.0, auto_renew: bool = True, marker: Marker | None = None) -> Transaction:
        """Begin a transaction: use it in a `with` block, or commit it yourself.

        `marker` makes it idempotent: its owner's last sequence again, with an equal fingerprint, stores nothing and answers as before.
        """
        self._check_open()
        if isinstance(lease, bool) or not isinstance(lease, int | float) or not 0 < lease <= 30 * 86400:
            raise InvalidRequestError(f"a lease is a number of seconds above 0 and up to 30 days, not {shown(lease)}")
        check_flag(auto_renew, "auto_renew")
        if marker is not None:
            check_marker(marker)
        return Transaction(self, self._router, lease=float(lease), auto_renew=auto_renew, marker=marker, resumed=None)

    def resume_transaction(self, id: str) -> Transaction:
        """An open transaction of any process, to add to it, commit it or abort it.

        By its receipt: then neither a commit nor a flush succeeds if the store lost what the receipt is for.
        """
        self._check_open()
        id, staged = parse_receipt(id)
        state, lease_us = self._engine.run(transactions.look_up, id)
        if state not in (transactions.OPEN, transactions.COMMITTING):
            raise TransactionEndedError(f"transaction {id} is {state} already")
        return Transaction(self, self._router, lease=lease_us / 1_000_000, auto_renew=True, marker=None, resumed=id, staged=staged)

    def transaction_status(self, id: str) -> TransactionStatus:
        """What became of a transaction. A finished one is kept for at least 7 days."""
        state = self._engine.run(transactions.find_state, check_id(id)) or self._engine.run(transactions.get_state, id)
        return TransactionStatus.OPEN if state in (transactions.OPEN, transactions.COMMITTING) else TransactionStatus(state)

    def transactions(self, limit: int = 100, *, only_open: bool = False) -> list[TransactionInfo]:
        """List the newest transactions first, without those that were aborted before anything was staged, unless they had a marker."""
        check_whole(limit, "limit", most=MOST)
        check_flag(only_open, "only_open")
        return [
            TransactionInfo(
                row.id,
                TransactionStatus.OPEN if row.ended_at is None else TransactionStatus(row.state),
                to_datetime(row.begun_at),
                to_datetime(row.expires_at),
                to_datetime(row.ended_at) if row.ended_at is not None else None,
                row.streams,
                row.marker,
            )
            for row in self._engine.run(transactions.list_transactions, limit, only_open)
        ]

    def marker(self, owner: str) -> Marker | None:
        """The last marker that was committed for this owner."""
        check_owner(owner)
        return self._engine.run(commits.find_marker, owner)

    def reader_group(self, name: str, streams: list[str] | None = None, start: Place = None, end: Place = None) -> ReaderGroup:
        """Create or open a group of readers; with the name alone, open it. It begins at `start`, and ends at `end` if that is given."""
        self._check_open()
        return open_group(self, name, streams, start, end)

    def reader_groups(self) -> list[str]:
        """The names of all groups."""
        return self._engine.run(groups.list_groups)

    def table(self, name: str) -> Table:
        """Create or open a table."""
        self._check_open()
        return Table(self._engine, self._flusher, self._open_inner(name, "table", TABLE_SCHEMA), self._roll_table_back)

    def _roll_table_back(self, name: str, version: int) -> None:
        for _ in range(_TABLE_ROUNDS - 1):
            with suppress(ConditionFailedError), self.transaction() as tx:
                tx.roll_back(name, version)
            if tx.status is TransactionStatus.COMMITTED:
                return
        with self.transaction() as tx:
            tx.roll_back(name, version)

    def tables(self, scope: str | None = None) -> list[str]:
        """Full names, in order, of all tables, or of those in a scope."""
        return self._engine.run(streams.list_streams, None if scope is None else parse_word(scope, "scope"), None, ("table",))

    def journal(self, name: str, *, scaling: Scaling | None = None) -> Journal:
        """Create or open a journal; `scaling` is that of a new one. AlreadyExistsError if the name is another stream's."""
        self._check_open()
        return Journal(self, self._open_inner(name, "journal", JOURNAL_SCHEMA, scaling))

    def journals(self, scope: str | None = None) -> list[str]:
        """Full names, in order, of all journals, or of those in a scope."""
        return self._engine.run(streams.list_streams, None if scope is None else parse_word(scope, "scope"), None, ("journal",))

    def read_merged(self, *names: str | Stream, start: Place = None, end: Place = None, follow: bool = False) -> Merged:
        """The events of several streams (as Event) and journals (as Recorded) in the order of their appends, as one stream.

        Each key's and each entity's events are in order, and an event comes after those that were readable before it was written, unless
        the catalog's clock went back. `start` and `end` are places as in `Stream.read`, or cuts of all these streams. `follow` goes on at
        the tails and waits for more; it ends when all are sealed. `stream` of what is returned says where the last event came from, and
        `cut` where to go on later.
        """
        self._check_open()
        check_flag(follow, "follow")
        opened = [name if isinstance(name, Stream) else self.stream(name) for name in names]
        return Merged(self._engine, [stream._check_events() for stream in opened], start, end, follow)

    def revisioned(self, name: str) -> Revisioned:
        """Create or open a revisioned stream."""
        self._check_open()
        return Revisioned(self._engine, self._flusher, self._open_inner(name, "revisioned", None))

    def synchronizer(self, name: str, initial: S, apply: Callable[[S, Any], S]) -> Synchronizer[S, Any]:
        """Create or open state that many processes share; it is fetched once. All must give the same `initial` and `apply`."""
        check_rules(initial, apply)
        synchronizer = Synchronizer(self.revisioned(name), initial, apply)
        synchronizer.fetch()
        return synchronizer

    def _open_inner(self, name: str, kind: str, schema: pa.Schema | None, scaling: Scaling | None = None) -> StreamRef:
        lifecycle.check_policies(scaling, None)
        try:
            found = lifecycle.open_stream(self._engine, parse_stream_name(name))
        except NotFoundError:
            return lifecycle.create_stream(
                self._engine,
                name,
                scaling=scaling or Scaling.fixed(1),
                retention=Retention.forever(),
                schema=schema,
                kind=kind,
                labels=(),
                exist_ok=True,
            )
        if found.kind != kind:
            raise AlreadyExistsError(f"{name} exists as {found.kind}, not as {kind}")
        return found

    # Writers.

    def _open_writer(self, stream: Stream, id: str | None) -> Writer:
        self._check_open()
        if id is None:
            ref = stream._check_writable()
            lane = self._flusher.lane(ref)
        else:
            generation, last_number = stream._open_named_writer(id)
            ref = stream._check_writable()
            lane = self._flusher.lane(ref, id, generation, last_number)
        writer = Writer(self, self._flusher, ref, lane)
        self._writers.add(writer)
        return writer

    def _open_byte_writer(self, stream: Stream) -> ByteWriter:
        self._check_open()
        ref = stream._check_writable()
        writer = ByteWriter(self._flusher, ref, self._flusher.lane(ref))
        self._writers.add(writer)
        return writer

    def _check_open(self) -> None:
        if self._is_closed:
            raise InvalidRequestError(f"the store {self.url} is closed")

    # The end.

    def close(self) -> None:
        """Store what writers still have, then let go of everything. Closing again does nothing.

        UnavailableError if it can't be stored now: the store stays open, and closing it again tries again.
        """
        if self._is_closed:
            return
        try:
            self._close()
        except UnavailableError:
            self._flusher.is_told = True
            raise

    def _close(self) -> None:
        failure: HeadwaterError | None = None
        for writer in list(self._writers):
            try:
                writer.close()
            except UnavailableError:
                raise
            except HeadwaterError as error:
                writer.abandon()
                failure = failure or error
        for journal in list(self._journals):
            journal._refusals.settle()
        for reader in list(self._readers):
            try:
                # Whether what it handed out last was done with, nobody knows here.
                reader.close(commit=False)
            except HeadwaterError as error:
                failure = failure or error
        self._flusher.close()
        self._upkeep.close()
        self._heart.close()
        self._is_closed = True
        _opened.discard(self)
        self._engine.close()
        if failure is not None:
            raise failure

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except HeadwaterError as second:
            error.add_note(f"closing the store failed too: {second}")

    def __reduce__(self) -> tuple[Any, ...]:
        options = tuple(sorted(self._storage_options.items())) if self._storage_options else None
        return _reopen, (self.url, self._catalog, options)

    def _after_fork(self) -> None:
        self._engine.after_fork()
        self._flusher.after_fork()
        # The parent's readers are the parent's: closing them here would fence them there. Its heart's thread did not come along. Its named
        # writers say so when they are used; a child that does nothing with them need not hear of it at its exit.
        self._writers = weakref.WeakSet(writer for writer in self._writers if writer.is_ours)
        self._readers = weakref.WeakSet()
        for journal in self._journals:
            journal._begin()
        self._heart = Heart()
        self._begin_upkeep()
        self._committer = Committer(self._engine, self._router, self._open_journal)


@dataclass(frozen=True)
class TierJob:
    """A chunk to be made of some of a stream's blocks. Picklable: it opens the same store where it is unpickled."""

    store: Store
    stream: str
    job: ChunkJob

    def run(self) -> MadeChunk:
        """Write the chunk to storage; nobody reads it before `finish`."""
        ref = lifecycle.open_stream(self.store._engine, parse_stream_name(self.stream))
        return self.job.run(self.store._engine, ref, uuid.uuid4().hex[:12])


@dataclass(frozen=True)
class Tiering:
    """Jobs that tier a stream, and what puts the chunks they made in their place."""

    jobs: list[TierJob]
    #: What became of a chunk; None if its extents changed meanwhile.
    finish: Callable[[MadeChunk], Moved | None]


def _reopen(url: str, catalog: str | None, options: tuple[tuple[str, str], ...] | None) -> Store:
    """The same store in another process, opened once there however often it is unpickled."""
    key = (os.getpid(), url, catalog, options)
    found = _reopened.get(key)
    if found is None or found._is_closed:
        found = _reopened[key] = open(url, catalog=catalog, create=False, upkeep=False, storage_options=dict(options) if options else None)
    return found


def _close_all() -> None:
    """At exit: store what waits in all open stores, and say what can't be stored, unless a `close` has said so."""
    failures = []
    everything: list[Store | Flusher] = [*_opened, *_flushers]
    for each in everything:
        is_told = (each._flusher if isinstance(each, Store) else each).is_told
        try:
            each.close()
        except Exception as error:  # the other stores' events must not be lost with this one's
            if not (is_told and isinstance(error, UnavailableError)):
                failures.append(error)
    if failures:
        raise failures[0]


def _after_fork() -> None:
    _flushers.clear()
    for store in list(_opened):
        store._after_fork()
        _flushers.add(store._flusher)


atexit.register(_close_all)
# Registered after the catalog's own hook, and hooks of children run in the order they were registered: connections first.
os.register_at_fork(after_in_child=_after_fork)
