"""The catalog on SQLite: one file, one writer at a time behind the host's lock, any number of readers beside it.

WAL mode with synchronous=FULL: a commit that returned is on the disk. Checkpoints run under the lock, when the WAL is large.
"""

from __future__ import annotations

import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import lru_cache
from types import FrameType
from typing import Any, TypeVar

import apsw

from headwater.catalog.database import NO_NEWS, Changes, News, Row, Statement, Tx
from headwater.catalog.hostlock import HostLock
from headwater.catalog.walwatch import WalWatch
from headwater.errors import CorruptDataError, HeadwaterError, UnavailableError, is_of_system
from headwater.model.limits import LOCK_SECONDS, WAL_BYTES
from headwater.runtime import calls, clock
from headwater.runtime.failpoints import reach

T = TypeVar("T")

_IN_MEMORY = ":memory:"
_PAGE_BYTES = 4096
_opened: weakref.WeakSet[SqliteDatabase] = weakref.WeakSet()
#: Those that wait, with no connection open, for a fork to be over; one fork at a time.
_forking: list[SqliteDatabase] = []
_fork_lock = threading.Lock()


@lru_cache(maxsize=1024)
def _dialect(sql: str) -> str:
    return re.sub(r"\s+FOR (UPDATE|SHARE)\b", "", sql)


class SqliteTx:
    """A transaction on one connection."""

    def __init__(self, connection: apsw.Connection) -> None:
        self._connection = connection

    def run(self, sql: str, values: Sequence[Any] = ()) -> list[Row]:
        return self._connection.execute(_dialect(sql), tuple(values)).fetchall()

    def run_all(self, statements: Sequence[Statement]) -> list[list[Row]]:
        return [self.run(sql, values) for sql, values in statements]

    def defer(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        if len(rows) == 1:
            self._connection.execute(_dialect(sql), tuple(rows[0]))
        elif rows:
            self._connection.executemany(_dialect(sql), (tuple(row) for row in rows))


class SqliteDatabase:
    """A catalog in the file at `path`, or in memory."""

    garbage_seconds = 0.0

    def __init__(self, path: str, *, now_us: Callable[[], int] = clock.now_us, lock_seconds: float = LOCK_SECONDS) -> None:
        self.url = path
        self._path = path
        self._now_us = now_us
        self._memory = path == _IN_MEMORY
        self._lock = None if self._memory else HostLock(f"{path}-lock", lock_seconds)
        self._memory_lock = threading.RLock()
        self._memory_connection: apsw.Connection | None = self._connect() if self._memory else None
        self._begin()
        _opened.add(self)

    def _begin(self) -> None:
        # Entered as a mutex, and not as a condition, whose `__enter__` is Python code: a Ctrl-C in there would leave it locked for ever.
        self._pool_mutex = threading.Lock()
        self._pool_lock = threading.Condition(self._pool_mutex)
        #: The threads that use a connection.
        self._users: set[int] = set()
        self._is_forking = False
        self._readers: list[apsw.Connection] = []
        self._writer: apsw.Connection | None = None
        #: The call of `write` that each thread is in.
        self._writes: dict[int, FrameType] = {}
        self._wal_pages = 0
        self._changes = SqliteChanges(self)

    def _before_fork(self) -> None:
        # SQLite notes for the whole process which locks of a file it holds. A child would inherit the notes, but not the locks: it
        # lost events when its parent died (seen), and waited for ever when another thread of the parent was just writing (seen). So
        # there is no connection at all while a process forks; both sides open new ones when they need them.
        if self._memory:
            self._memory_lock.acquire()
            return
        with self._pool_mutex:
            self._is_forking = True
            self._pool_lock.wait_for(lambda: not self._users - {threading.get_ident()})
            for connection in [*self._readers, *filter(None, (self._writer, self._changes.connection))]:
                connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
                connection.close()
            self._begin_closed()

    def _after_fork_in_parent(self) -> None:
        if self._memory:
            self._memory_lock.release()
            return
        with self._pool_mutex:
            self._is_forking = False
            self._pool_lock.notify_all()

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """Held while a connection is used: a fork waits until none is."""
        self._note_used()
        try:
            yield
        finally:
            self._note_unused()

    def _note_used(self) -> None:
        with self._pool_mutex:
            while self._is_forking:
                self._pool_lock.wait()
            self._users.add(threading.get_ident())

    def _note_unused(self) -> None:
        with self._pool_mutex:
            self._users.discard(threading.get_ident())
            if self._is_forking:
                self._pool_lock.notify_all()

    def _after_fork(self) -> None:
        if self._lock is not None:
            self._lock.forget()
        self._memory_lock = threading.RLock()
        self._changes.forget()
        self._begin()

    def _connect(self) -> apsw.Connection:
        with _translated(self._path):
            connection = apsw.Connection(self._path, statementcachesize=200)
            connection.set_busy_timeout(int(LOCK_SECONDS * 1000))
            # A plan does not depend on the values. Else a statement is compiled again for each new value of an indexed column: most of
            # a query's time.
            connection.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1)
            # Not by a method of ours: a connection that is in use must not keep a database alive that nobody has any more.
            now_us = self._now_us
            connection.create_scalar_function("now_us", lambda *_: now_us(), 0)
            if not self._memory:
                connection.execute("PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL; PRAGMA wal_autocheckpoint=0").fetchall()
            connection.execute("PRAGMA foreign_keys=ON; PRAGMA cache_size=-16384; PRAGMA temp_store=MEMORY").fetchall()
            return connection

    def _take_reader(self) -> apsw.Connection:
        try:
            # A list's pop and append are atomic.
            return self._readers.pop()
        except IndexError:
            return self._connect()

    @contextmanager
    def _reader(self) -> Iterator[apsw.Connection]:
        if self._memory_connection is not None:
            with self._memory_lock:
                try:
                    yield self._memory_connection
                finally:
                    _roll_back(self._memory_connection)
            return
        with self._in_use():
            connection = self._take_reader()
            try:
                yield connection
            finally:
                _roll_back(connection)
                self._readers.append(connection)

    def query(self, sql: str, values: Sequence[Any] = ()) -> list[Row]:
        return self.query_all(((sql, values),))[0]

    def query_all(self, statements: Sequence[Statement]) -> list[list[Row]]:
        if self._memory_connection is not None:
            with self._reader() as connection, _translated(self._path):
                return _query(connection, statements)
        # As `_reader` does, without context managers: these would take a third of a small query's time.
        self._note_used()
        try:
            connection = self._take_reader()
            try:
                return _query(connection, statements)
            except Exception:
                with _translated(self._path):
                    raise
            finally:
                _roll_back(connection)
                self._readers.append(connection)
        finally:
            self._note_unused()

    def verify(self) -> list[str]:
        return [row[0] for row in self.query("PRAGMA integrity_check") if row[0] != "ok"]

    def read(self, work: Callable[[Tx], T]) -> T:
        with self._reader() as connection, _translated(self._path):
            connection.execute("BEGIN")
            return work(SqliteTx(connection))

    def write(self, work: Callable[[Tx], T], *, repeatable: bool = False, news: News = NO_NEWS) -> T:
        # A commit that failed may still be found after a crash, so repeatable work recognises itself; the rest asks (`repeatable` is
        # about an answer lost on a network, which can't be here).
        self.check_alone()
        thread = threading.get_ident()
        self._writes[thread] = calls.this_call()
        try:
            with _translated(self._path), self._lock or self._memory_lock:
                self._note_used()
                connection = self._memory_connection or self._writer
                if connection is None:
                    connection = self._writer = self._connect()
                    connection.set_wal_hook(self._note_wal)
                # As a second Ctrl-C, while the first one is handled, may have left it.
                _roll_back(connection)
                try:
                    connection.execute("BEGIN IMMEDIATE")
                    result = work(SqliteTx(connection))
                    connection.execute("COMMIT")
                finally:
                    _roll_back(connection)
                self._checkpoint_if_large(connection)
                self._note_unused()
            return result
        except BaseException:
            self._let_go()
            raise
        finally:
            self._writes.pop(thread, None)

    def check_alone(self) -> None:
        """Refuse to begin in the midst of a change of this very thread. What that has done would be taken for left over, and be undone."""
        if calls.is_under_way(self._writes.get(threading.get_ident())):
            raise UnavailableError(
                f"a change of the catalog {self._path} can't begin in the middle of another one of the same thread, as in a signal "
                "or logging handler or a finaliser: repeat when that is over"
            )

    def _let_go(self) -> None:
        """After an error. A Ctrl-C may have come in the midst of what ends a `with` block, so that it did not end."""
        if self._lock is not None and self._lock.is_mine:
            if self._writer is not None:
                _roll_back(self._writer)
            self._lock.leave()
        self._note_unused()

    def write_whole(self, statements: Sequence[Statement], *failpoints: str, news: News = NO_NEWS) -> list[list[Row]] | None:
        def work(tx: Tx) -> list[list[Row]]:
            found = tx.run_all(statements)
            for name in failpoints:
                reach(name)
            return found

        try:
            return self.write(work)
        except apsw.ConstraintError:
            return None

    def _checkpoint_if_large(self, connection: apsw.Connection) -> None:
        if self._wal_pages * _PAGE_BYTES < WAL_BYTES:
            return
        # The commit is done; a checkpoint that can't run now (a full disk, a reader in the way) is left to whoever commits next. The file
        # is used again from its start and not cut short: commits into a file that need not grow take half the time.
        connection.set_busy_timeout(0)
        with suppress(apsw.Error):
            connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_RESTART)
        connection.set_busy_timeout(int(LOCK_SECONDS * 1000))

    def _note_wal(self, connection: apsw.Connection, name: str, pages: int) -> int:
        self._wal_pages = pages
        return apsw.SQLITE_OK

    def announce(self, news: News = NO_NEWS) -> None:
        self._changes.bump()

    @property
    def changes(self) -> Changes:
        return self._changes

    def close(self) -> None:
        if self._memory:
            return
        self.check_alone()
        self._changes.close()
        # The last connection empties the WAL, so those that may write go under the lock. One that only read can't always take it.
        lock = self._lock if self._writer is not None else None
        with lock or nullcontext(), self._pool_mutex:
            for connection in [*self._readers, *filter(None, (self._writer, self._changes.connection))]:
                connection.close()
            self._begin_closed()
        if self._lock is not None:
            self._lock.close()

    def _begin_closed(self) -> None:
        self._readers = []
        self._writer = None
        self._changes.connection = None


class SqliteChanges(Changes):
    """Sees other processes' commits by `PRAGMA data_version`, 5 us a call: when the WAL was written to, and now and then in any case."""

    WATCHED_POLL_SECONDS = 0.02
    #: Where files can't be watched.
    SHORTEST_POLL_SECONDS = 0.001
    LONGEST_POLL_SECONDS = 0.005

    def __init__(self, database: SqliteDatabase) -> None:
        super().__init__()
        self._database = weakref.ref(database)
        self._poll_lock = threading.Lock()
        self._data_version = -1
        self._watch: WalWatch | None = None
        self._can_watch = not database._memory
        self.connection: apsw.Connection | None = None

    def _poll(self) -> bool:
        """Whether there is news."""
        database = self._database()
        if database is None or database._memory:
            return False
        with self._poll_lock, database._in_use():
            if self.connection is None:
                self.connection = database._connect()
            found = self.connection.pragma("data_version")
            changed = bool(found != self._data_version)
            self._data_version = found
        if changed:
            self.bump()
        return changed

    def wait(self, seen: int, timeout: float) -> None:
        started = time.monotonic()
        while True:
            self._poll()
            waited = time.monotonic() - started
            if self._is_watched():
                pause = self.WATCHED_POLL_SECONDS
            else:
                pause = self.SHORTEST_POLL_SECONDS if waited <= 0.1 else self.LONGEST_POLL_SECONDS
            with self._mutex:
                if self._version != seen or waited >= timeout:
                    return
                self._condition.wait(min(pause, timeout - waited))

    def _is_watched(self) -> bool:
        if self._watch is None and self._can_watch:
            with self._poll_lock:
                if self._watch is None and self._can_watch:
                    try:
                        self._watch = WalWatch(f"{self._path()}-wal", self._look)
                    except OSError:
                        self._can_watch = False
        return self._watch is not None and self._watch.is_alive

    def _look(self) -> bool:
        """For the watching thread, which ends when the database is gone without having been closed."""
        if self._database() is None:
            raise ReferenceError
        return self._poll()

    def _path(self) -> str:
        database = self._database()
        return database._path if database is not None else ""

    def close(self) -> None:
        watch, self._watch, self._can_watch = self._watch, None, False
        if watch is not None:
            watch.close()

    def forget(self) -> None:
        """In a forked child: what was watched is the parent's."""
        if self._watch is not None:
            self._watch.forget()


def _query(connection: apsw.Connection, statements: Sequence[Statement]) -> list[list[Row]]:
    return [connection.execute(_dialect(sql), tuple(values)).fetchall() for sql, values in statements]


def _roll_back(connection: apsw.Connection) -> None:
    """End the transaction that a connection is in, if it is in one."""
    if connection.in_transaction:
        with suppress(apsw.Error):
            connection.execute("ROLLBACK")


@contextmanager
def _translated(path: str) -> Iterator[None]:
    """SQLite's errors as ours."""
    try:
        yield
    except HeadwaterError:
        raise
    except apsw.FullError as error:
        raise UnavailableError(f"no space left for the catalog {path}: free some, then repeat") from error
    except (apsw.BusyError, apsw.LockedError) as error:
        raise UnavailableError(f"the catalog {path} is busy ({error}): repeat") from error
    except (apsw.CorruptError, apsw.NotADBError) as error:
        raise CorruptDataError(f"the catalog {path} is damaged: {error}", object=path) from error
    except UnicodeDecodeError as error:
        raise CorruptDataError(f"the catalog {path} is damaged: it has a text that is none ({error})", object=path) from error
    except apsw.SQLError as error:
        # Our statements fit our tables: other ones are there.
        if not str(error).startswith("no such "):
            raise
        raise CorruptDataError(f"the catalog {path} is damaged: {error}", object=path) from error
    except (apsw.ReadOnlyError, apsw.CantOpenError, apsw.PermissionsError, apsw.AuthError) as error:
        raise UnavailableError(
            f"the catalog {path} can't be opened for writing ({error}): check the directory's rights and mount"
        ) from error
    except apsw.IOError as error:
        raise UnavailableError(f"the catalog {path} can't be read or written ({error}): check the disk and its free space") from error
    except OSError as error:
        if not is_of_system(error):
            raise
        raise UnavailableError(f"the catalog {path} can't be used: {error}") from error


def _reset_all() -> None:
    _forking.clear()
    _fork_lock.release()
    for database in list(_opened):
        database._after_fork()


def _before_fork() -> None:
    _fork_lock.acquire()
    _forking[:] = list(_opened)
    for database in _forking:
        database._before_fork()


def _after_fork_in_parent() -> None:
    while _forking:
        _forking.pop()._after_fork_in_parent()
    _fork_lock.release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_reset_all)
