"""The catalog on PostgreSQL 14 or newer: READ COMMITTED, row locks, durable commits whatever the server's default is."""

from __future__ import annotations

import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from itertools import chain
from typing import Any, TypeVar

from headwater.catalog.database import Changes, Row, Statement, Tx
from headwater.errors import CorruptDataError, HeadwaterError, InvalidRequestError, OutcomeUnknownError, UnavailableError
from headwater.model.limits import LOCK_SECONDS, RETRY_SECONDS
from headwater.runtime.retry import retry

try:
    import psycopg
    from psycopg import errors as pg
except ImportError as missing:
    raise InvalidRequestError("a catalog on PostgreSQL needs psycopg: pip install 'headwater[postgres]'") from missing

T = TypeVar("T")
Connection = psycopg.Connection[Row]

_CHANNEL = "headwater"
#: Of one INSERT; the protocol takes 65,535 values.
_MOST_ROWS = 1024
_BEGIN_READING = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
_opened: weakref.WeakSet[PostgresDatabase] = weakref.WeakSet()
# Connections of a parent process: closing one in a child would end the parent's session, so they are kept for ever.
_inherited: list[Any] = []


@lru_cache(maxsize=1024)
def _dialect(sql: str) -> str:
    return sql.replace("%", "%%").replace("?", "%s")


@lru_cache(maxsize=256)
def _of_many(sql: str, count: int) -> str:
    """An INSERT of one row as one of many."""
    found = re.search(r"VALUES (\((?:[^()]|\(\))*\))", sql)
    assert found is not None, sql
    return sql[: found.start(1)] + ", ".join([found[1]] * count) + sql[found.end(1) :]


class PostgresTx:
    """A transaction on one connection. What is deferred goes out with the next statement that wants an answer, or with the commit."""

    def __init__(self, connection: Connection, begin: str) -> None:
        self._connection = connection
        self._deferred: list[tuple[str, Sequence[Sequence[Any]]]] = [(begin, [()])]

    def run(self, sql: str, values: Sequence[Any] = ()) -> list[Row]:
        return self.run_all([(sql, values)])[0]

    def run_all(self, statements: Sequence[Statement]) -> list[list[Row]]:
        with self._connection.pipeline():
            self._send_deferred()
            cursors = [self._connection.execute(_dialect(sql), values, binary=True) for sql, values in statements]
        return [cursor.fetchall() if cursor.description else [] for cursor in cursors]

    def defer(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        self._deferred.append((sql, rows))

    def _send_deferred(self) -> None:
        # Nobody looks at their answers, so one cursor does for all.
        cursor = self._connection.cursor()
        for sql, rows in self._deferred:
            if len(rows) == 1:
                cursor.execute(_dialect(sql), rows[0])
            elif rows and " VALUES (" in sql and " DO UPDATE" not in sql:
                # A statement of many rows costs little more than one of one row. Of powers of two, so that few are prepared.
                at = 0
                while at < len(rows):
                    count = min(_MOST_ROWS, 1 << (len(rows) - at).bit_length() - 1)
                    cursor.execute(_of_many(_dialect(sql), count), list(chain.from_iterable(rows[at : at + count])))
                    at += count
            elif rows:
                cursor.executemany(_dialect(sql), rows)
        self._deferred.clear()

    def commit(self) -> None:
        """Send what is deferred and the commit, in one round trip."""
        self.defer("COMMIT", [()])
        with self._connection.pipeline():
            self._send_deferred()

    def roll_back(self) -> None:
        if self._connection.info.transaction_status == psycopg.pq.TransactionStatus.INERROR:
            # The server skipped the statements behind the one that failed; psycopg takes them for prepared there, and never learns.
            self._connection.close()
        elif self._connection.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
            with suppress(psycopg.Error):
                self._connection.execute("ROLLBACK")


class PostgresDatabase:
    """A catalog in the database, and in the first schema of its search path, that `url` names."""

    def __init__(self, url: str, *, retry_seconds: float = RETRY_SECONDS) -> None:
        self.url = _shown(url)
        self._url = url
        self._retry_seconds = retry_seconds
        self._begin()
        _opened.add(self)
        with _translated(url):
            self._give_back(self._take())

    def _begin(self) -> None:
        self._pool_lock = threading.Lock()
        self._idle: list[Connection] = []
        self._connections: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._changes = PostgresChanges(self)

    def _after_fork(self) -> None:
        # Not their sockets, though: while a child has them, the server does not notice that the parent died, and keeps its locks (seen).
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for connection in list(self._connections):
            _inherited.append(connection)
            with suppress(psycopg.Error):
                os.dup2(null, connection.fileno(), inheritable=False)
        os.close(null)
        _inherited.append(self._changes)
        self._begin()

    def connect(self) -> Connection:
        # Transactions begin and end by statements of our own, which go out together with others: psycopg's take a round trip each.
        connection = psycopg.connect(
            self._url,
            autocommit=True,
            connect_timeout=10,
            keepalives_idle=10,
            keepalives_interval=5,
            keepalives_count=3,
            application_name="headwater",
        )
        self._connections.add(connection)
        # A stopped process must not hold a segment's lock for ever: the server ends its transaction, and its retry finds out.
        connection.execute(f"SET lock_timeout = {int(LOCK_SECONDS * 1000)}")
        connection.execute(f"SET idle_in_transaction_session_timeout = {int(LOCK_SECONDS * 1000)}")
        if connection.info.server_version >= 170000:
            # The timeout above never fires after a pipeline: psycopg sends a Flush behind its Sync, and that message stops the server's
            # timer for good (seen with psycopg 3.3 and PostgreSQL 18).
            connection.execute(f"SET transaction_timeout = {int(3 * LOCK_SECONDS * 1000)}")
        connection.execute("SET default_transaction_isolation = 'read committed'")
        # Whatever the server or the role is set to. For the session, and not in each transaction, where it would be one statement of nine.
        connection.execute("SET synchronous_commit = on")
        return connection

    def _take(self) -> Connection:
        with self._pool_lock:
            while self._idle:
                connection = self._idle.pop()
                if not connection.closed:
                    return connection
        return self.connect()

    def _give_back(self, connection: Connection) -> None:
        if connection.closed or connection.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
            connection.close()
            return
        with self._pool_lock:
            self._idle.append(connection)

    def query(self, sql: str, values: Sequence[Any] = ()) -> list[Row]:
        return self._repeated(lambda: self._query(sql, values))

    def _query(self, sql: str, values: Sequence[Any]) -> list[Row]:
        connection = self._take()
        try:
            return connection.execute(_dialect(sql), values, binary=True).fetchall()
        finally:
            self._give_back(connection)

    def read(self, work: Callable[[Tx], T]) -> T:
        def attempt() -> T:
            connection = self._take()
            tx = PostgresTx(connection, _BEGIN_READING)
            try:
                return work(tx)
            finally:
                tx.roll_back()
                self._give_back(connection)

        return self._repeated(attempt)

    def write(self, work: Callable[[Tx], T], *, repeatable: bool = False) -> T:
        return self._repeated(lambda: self._write(work, repeatable))

    def _write(self, work: Callable[[Tx], T], repeatable: bool) -> T:
        connection = self._take()
        tx = PostgresTx(connection, "BEGIN")
        try:
            result = work(tx)
            try:
                tx.commit()
            except psycopg.OperationalError as error:
                if repeatable or not connection.broken:
                    raise
                raise OutcomeUnknownError(f"the connection to the catalog was lost during a commit ({error}): ask for the state") from error
            return result
        except BaseException:
            tx.roll_back()
            raise
        finally:
            self._give_back(connection)

    def _repeated(self, attempt: Callable[[], T]) -> T:
        with _translated(self.url):
            return retry(attempt, retryable=_is_retryable, deadline_seconds=self._retry_seconds)

    def announce(self) -> None:
        self._changes.bump()
        self._changes.tell_others()

    @property
    def changes(self) -> Changes:
        return self._changes

    def close(self) -> None:
        self._changes.close()
        with self._pool_lock:
            for connection in self._idle:
                connection.close()
            self._idle.clear()


class PostgresChanges(Changes):
    """Tells and hears of commits by NOTIFY, outside the append's own transaction (inside it would cost three times as much).

    Two threads with a connection each, begun when first needed. A lost notice costs no more than one poll: waits are short.
    """

    LONGEST_WAIT_SECONDS = 0.25
    PAUSE_SECONDS = 0.001

    def __init__(self, database: PostgresDatabase) -> None:
        super().__init__()
        self._database = weakref.ref(database)
        self._start_lock = threading.Lock()
        self._listener: threading.Thread | None = None
        self._teller: threading.Thread | None = None
        self._to_tell = threading.Event()
        self._closed = threading.Event()

    def tell_others(self) -> None:
        self._to_tell.set()
        if self._teller is None:
            with self._start_lock:
                if self._teller is None:
                    self._teller = threading.Thread(target=self._tell, name="headwater-notify", daemon=True)
                    self._teller.start()

    def wait(self, seen: int, timeout: float) -> None:
        if self._listener is None:
            with self._start_lock:
                if self._listener is None:
                    self._listener = threading.Thread(target=self._listen, name="headwater-listen", daemon=True)
                    self._listener.start()
        super().wait(seen, min(timeout, self.LONGEST_WAIT_SECONDS))

    def _tell(self) -> None:
        while not self._closed.is_set():
            with suppress(psycopg.Error), self._connection() as connection:
                connection.execute("SET synchronous_commit = off")
                while not self._closed.is_set():
                    self._to_tell.wait()
                    self._to_tell.clear()
                    connection.execute(f"NOTIFY {_CHANNEL}")
                    # All that is committed in this pause shares the next notice.
                    time.sleep(self.PAUSE_SECONDS)
            self._closed.wait(0.5)

    def _listen(self) -> None:
        while not self._closed.is_set():
            with suppress(psycopg.Error), self._connection() as connection:
                connection.execute(f"LISTEN {_CHANNEL}")
                self.bump()
                while not self._closed.is_set():
                    for _ in connection.notifies(timeout=0.5):
                        self.bump()
            self._closed.wait(0.5)

    @contextmanager
    def _connection(self) -> Iterator[Connection]:
        database = self._database()
        if database is None:
            self._closed.set()
            return
        connection = database.connect()
        del database
        try:
            yield connection
        finally:
            connection.close()

    def close(self) -> None:
        self._closed.set()
        self._to_tell.set()
        for thread in (self._listener, self._teller):
            if thread is not None:
                thread.join(timeout=5)


def _is_retryable(error: Exception) -> bool:
    if isinstance(error, pg.LockNotAvailable | pg.DiskFull | pg.OutOfMemory | pg.InvalidPassword | pg.InvalidCatalogName):
        return False
    if isinstance(error, psycopg.OperationalError) and "password" in str(error):
        return False
    return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError | pg.DeadlockDetected | pg.SerializationFailure)


@contextmanager
def _translated(url: str) -> Iterator[None]:
    """PostgreSQL's errors as ours."""
    try:
        yield
    except HeadwaterError:
        raise
    except pg.LockNotAvailable as error:
        raise UnavailableError(f"the catalog's lock is held by another process for over {LOCK_SECONDS:g} s: repeat") from error
    except (pg.DataCorrupted, pg.IndexCorrupted) as error:
        raise CorruptDataError(f"the catalog is damaged: {error}", object=_shown(url)) from error
    except (pg.InsufficientPrivilege, pg.InvalidPassword, pg.InvalidCatalogName) as error:
        raise InvalidRequestError(f"PostgreSQL refuses at {_shown(url)}: {error}") from error
    except psycopg.ProgrammingError as error:
        raise InvalidRequestError(f"PostgreSQL can't make sense of what it was given at {_shown(url)}: {str(error).strip()}") from error
    except (psycopg.OperationalError, psycopg.InterfaceError) as error:
        raise UnavailableError(f"the catalog at {_shown(url)} is out of reach ({str(error).strip()}): repeat") from error


def _shown(url: str) -> str:
    """The URL without its password."""
    scheme, _, rest = url.partition("://")
    user, at, host = rest.rpartition("@")
    return re.sub(r"([?&]password=)[^&]*", r"\1***", f"{scheme}://{user.partition(':')[0]}{at}{host}")


def _reset_all() -> None:
    for database in list(_opened):
        database._after_fork()


os.register_at_fork(after_in_child=_reset_all)
