"""The catalog on PostgreSQL 14 or newer: READ COMMITTED, row locks, durable commits whatever the server's default is."""

from __future__ import annotations

import errno
import os
import re
import select
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from itertools import chain
from typing import Any, TypeVar

from headwater.catalog.database import NO_NEWS, Changes, News, Row, Statement, Tx
from headwater.errors import ConflictError, CorruptDataError, HeadwaterError, InvalidRequestError, OutcomeUnknownError, UnavailableError
from headwater.model.limits import (
    ABSENT_SECONDS,
    CONNECT_SECONDS,
    GARBAGE_SECONDS,
    LOCK_SECONDS,
    RETRY_SECONDS,
    SILENT_SECONDS,
    TRANSACTION_SECONDS,
)
from headwater.runtime.failpoints import reach
from headwater.runtime.flag import Flag
from headwater.runtime.retry import retry

try:
    import psycopg
    from psycopg import errors as pg

    from headwater.catalog.pgpipeline import Pipeline
except ImportError as missing:
    raise InvalidRequestError("a catalog on PostgreSQL needs psycopg: pip install 'headwater[postgres]'") from missing

T = TypeVar("T")
Connection = psycopg.Connection[Row]

_CHANNEL = "headwater"
_NOTIFY = "SELECT pg_notify(?, ?)"
_NOTIFY_LIGHTLY = "SELECT set_config('synchronous_commit', 'off', true), pg_notify(?, ?)"
#: Connections that are kept when nobody uses them.
_MOST_IDLE = 8
#: Of one INSERT; the protocol takes 65,535 values.
_MOST_ROWS = 1024
_BEGIN_READING = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
#: What a server says to those it will not let in, and PgBouncer. By its words: libpq gives no code for a connection that was not made.
#: A server that speaks another language is asked again, as one that is starting up or has no place left is.
_REFUSAL = re.compile(
    r"""FATAL:\s+(?:
        (?:database|role)\ ".*"\ does\ not\ exist | role\ ".*"\ is\ not\ permitted\ to\ log\ in | permission\ denied\ for\ database
        | (?:password|Peer|certificate|SASL)\ authentication\ failed | no\ pg_hba\.conf\ entry | pg_hba\.conf\ rejects
        | no\ such\ (?:database|user) | unsupported\ startup\ parameter
    )""",
    re.VERBOSE,
)
_opened: weakref.WeakSet[PostgresDatabase] = weakref.WeakSet()
# Connections of a parent process: closing one in a child would end the parent's session, so they are kept for ever.
_inherited: list[Any] = []


@lru_cache(maxsize=256)
def _of_many(sql: str, count: int) -> str:
    """An INSERT of one row as one of many."""
    found = re.search(r"VALUES (\((?:[^()]|\(\))*\))", sql)
    assert found is not None, sql
    return sql[: found.start(1)] + ", ".join([found[1]] * count) + sql[found.end(1) :]


class PostgresTx:
    """A transaction on one connection. What is deferred goes out with the next statement that wants an answer, or with the commit."""

    def __init__(self, pipeline: Pipeline, begin: str) -> None:
        self._pipeline = pipeline
        self._deferred: list[Statement] = [(begin, ())]

    def run(self, sql: str, values: Sequence[Any] = ()) -> list[Row]:
        return self.run_all([(sql, values)])[0]

    def run_all(self, statements: Sequence[Statement], behind: Statement | None = None) -> list[list[Row]]:
        first, self._deferred = self._deferred, []
        return self._pipeline.run([*first, *statements], behind)[len(first) :]

    def defer(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        if len(rows) > 1 and "VALUES (" in sql and " DO UPDATE" not in sql:
            # A statement of many rows costs little more than one of one row. Of powers of two, so that few are prepared.
            at = 0
            while at < len(rows):
                count = min(_MOST_ROWS, 1 << (len(rows) - at).bit_length() - 1)
                self._deferred.append((_of_many(sql, count), list(chain.from_iterable(rows[at : at + count]))))
                at += count
        else:
            self._deferred += [(sql, row) for row in rows]

    def commit(self, behind: Statement | None = None) -> None:
        """Send what is deferred and the commit, in one round trip."""
        self.run_all([("COMMIT", ())], behind)

    def roll_back(self) -> None:
        if self._pipeline.is_open and not self._pipeline.is_idle:
            with suppress(psycopg.Error):
                self._pipeline.run([("ROLLBACK", ())])


class PostgresDatabase:
    """A catalog in the database, and in the first schema of its search path, that `url` names."""

    garbage_seconds = GARBAGE_SECONDS

    def __init__(self, url: str) -> None:
        self.url = _shown(url)
        self._url = url
        self._begin()
        _opened.add(self)
        self._look_for_server()

    def _begin(self) -> None:
        self._pool_lock = threading.Lock()
        self._idle: list[Pipeline] = []
        self._is_closed = False
        self._connections: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._changes = PostgresChanges(self)

    def _look_for_server(self) -> None:
        """Connect for the first time. A server that is briefly away is waited for, as by every call.

        InvalidRequestError if it does not let us in. Later that is as if it were away: passwords change and roles come back, and a writer
        must keep its events until then.
        """
        began = time.monotonic()

        def is_retryable(error: Exception) -> bool:
            # Where nobody listens at all, the address is wrong more often than the server is about to be there: who mistyped it should
            # not sit there for long, and a restart, which is over by then, is waited for all the same.
            is_absent = _is_nobody_there(error) and time.monotonic() - began > ABSENT_SECONDS
            return _is_retryable(error) and not is_absent and not _is_refused(error)

        try:
            self._repeated(lambda: self._give_back(self._take()), is_retryable)
        except UnavailableError as error:
            if _is_refused(error.__cause__):
                raise InvalidRequestError(f"PostgreSQL refuses at {self.url}: {str(error.__cause__).strip()}") from error.__cause__
            raise

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

    def connect(self) -> Pipeline:
        """A new connection, set up for us. No wait in here is without a limit: a server may go mute at any moment."""
        # Transactions begin and end by statements of our own, which go out together with others: psycopg's take a round trip each.
        connection = psycopg.connect(
            self._url,
            autocommit=True,
            connect_timeout=int(CONNECT_SECONDS),
            keepalives_idle=10,
            keepalives_interval=5,
            keepalives_count=3,
            tcp_user_timeout=25_000,
            application_name="headwater",
            client_encoding="utf8",
        )
        self._connections.add(connection)
        pipeline = Pipeline(connection, silent_seconds=CONNECT_SECONDS)
        try:
            # In one round trip of our own: psycopg's waits have no end, and as `options` of the connection poolers refuse it.
            pipeline.run([(f"SET {name} = {value}", ()) for name, value in _settings(connection.info.server_version)])
        except BaseException:
            pipeline.close()
            raise
        pipeline.silent_seconds = SILENT_SECONDS
        return pipeline

    def _take(self) -> Pipeline:
        with self._pool_lock:
            while self._idle:
                pipeline = self._idle.pop()
                if pipeline.is_open:
                    return pipeline
        return self.connect()

    def _give_back(self, pipeline: Pipeline) -> None:
        with self._pool_lock:
            # What another thread used while this was closed is not kept: nobody would close it.
            is_kept = pipeline.is_idle and len(self._idle) < _MOST_IDLE and not self._is_closed
            if is_kept:
                self._idle.append(pipeline)
        if not is_kept:
            pipeline.close()

    def query(self, sql: str, values: Sequence[Any] = ()) -> list[Row]:
        return self.query_all([(sql, values)])[0]

    def query_all(self, statements: Sequence[Statement]) -> list[list[Row]]:
        return self._repeated(lambda: self._query_all(statements))

    def verify(self) -> list[str]:
        return []  # It verifies each page that it reads, if it was set up to, and has tools of its own.

    def _query_all(self, statements: Sequence[Statement]) -> list[list[Row]]:
        pipeline = self._take()
        try:
            return pipeline.run(statements)
        finally:
            self._give_back(pipeline)

    def read(self, work: Callable[[Tx], T]) -> T:
        def attempt() -> T:
            pipeline = self._take()
            tx = PostgresTx(pipeline, _BEGIN_READING)
            try:
                return work(tx)
            finally:
                tx.roll_back()
                self._give_back(pipeline)

        return self._repeated(attempt)

    def write(self, work: Callable[[Tx], T], *, repeatable: bool = False, news: News = NO_NEWS) -> T:
        return self._repeated(lambda: self._write(work, repeatable, news))

    def _write(self, work: Callable[[Tx], T], repeatable: bool, news: News) -> T:
        pipeline = self._take()
        tx = PostgresTx(pipeline, "BEGIN")
        try:
            result = work(tx)
            notice = self._changes.notice_of(news)
            try:
                tx.commit(notice)
            except psycopg.OperationalError as error:
                if repeatable or pipeline.is_open:
                    raise
                raise OutcomeUnknownError(f"the connection to the catalog was lost during a commit ({error}): ask for the state") from error
            if notice is not None:
                self._changes.note_told(news)
            return result
        except BaseException:
            tx.roll_back()
            raise
        finally:
            self._give_back(pipeline)

    def write_whole(self, statements: Sequence[Statement], *failpoints: str, news: News = NO_NEWS) -> list[list[Row]] | None:
        for name in failpoints:
            reach(name)
        return self._repeated(lambda: self._write_whole(statements, news))

    def _write_whole(self, statements: Sequence[Statement], news: News) -> list[list[Row]] | None:
        pipeline = self._take()
        notice = self._changes.notice_of(news)
        try:
            # Without BEGIN and COMMIT, which would cost a tenth of it: what goes in one round trip is a transaction by itself.
            found = pipeline.run(statements, behind=notice)
            if notice is not None:
                self._changes.note_told(news)
            return found
        except psycopg.IntegrityError:
            return None
        finally:
            self._give_back(pipeline)

    def _repeated(self, attempt: Callable[[], T], is_retryable: Callable[[Exception], bool] | None = None) -> T:
        def attempt_anew() -> T:
            try:
                return attempt()
            except pg.ReadOnlySqlTransaction:
                # A standby, as after a failover: another connection may find the server in its place.
                self._close_idle()
                raise
            except psycopg.OperationalError as error:
                # Without a code, or with one of these, the server is gone or ends: the other connections' too.
                if error.sqlstate is None or error.sqlstate.startswith("57P"):
                    self._close_idle()
                raise

        with _translated(self.url):
            # Once in any case: to find out that a connection is mute takes longer than that, and another one may not be.
            return retry(attempt_anew, retryable=is_retryable or _is_retryable, deadline_seconds=RETRY_SECONDS, least_repeats=1)

    def _close_idle(self) -> None:
        with self._pool_lock:
            for pipeline in self._idle:
                pipeline.close()
            self._idle.clear()

    def check_alone(self) -> None:
        """Writes of one thread may overlap here, on connections of their own."""

    def announce(self, news: News = NO_NEWS) -> None:
        self._changes.bump()
        self._changes.tell_others(news)

    @property
    def changes(self) -> Changes:
        return self._changes

    def close(self) -> None:
        self._changes.close()
        self._is_closed = True
        self._close_idle()


class PostgresChanges(Changes):
    """Tells and hears of commits by NOTIFY, outside the append's own transaction (inside it would cost three times as much).

    A notice goes behind its commit on the same connection, if the last one is not just told; else, and for those who listen, there are
    threads with a connection each, begun when first needed. A lost notice costs no more than one poll: waits are short.
    """

    LONGEST_WAIT_SECONDS = 0.25
    PAUSE_SECONDS = 0.001
    TELLS_NEWS = True
    #: Told at once (the server takes 7,999 bytes for a notice), and kept of those heard.
    MOST_TOLD = 64
    MOST_KEPT = 1024

    def __init__(self, database: PostgresDatabase) -> None:
        super().__init__()
        self._database = weakref.ref(database)
        self._start_lock = threading.Lock()
        self._listener: threading.Thread | None = None
        self._teller: threading.Thread | None = None
        self._to_tell = Flag()
        self._news: deque[tuple[str, str]] = deque(maxlen=self.MOST_TOLD)
        self._told: News = NO_NEWS
        self._told_at = 0.0
        self._heard: OrderedDict[str, str] = OrderedDict()
        self._closed = Flag()

    def notice_of(self, news: News) -> Statement | None:
        """The statement that tells others, if it is its turn. What it commits need not be durable."""
        if not 0 < len(news) <= self.MOST_TOLD or time.monotonic() - self._told_at < self.PAUSE_SECONDS:
            return None
        return _NOTIFY_LIGHTLY, (_CHANNEL, _words(news.items()))

    def note_told(self, news: News) -> None:
        self._told, self._told_at = news, time.monotonic()

    def tell_others(self, news: News) -> None:
        if news and news == self._told:
            return
        self._news.extend(news.items())
        self._to_tell.set()
        if self._teller is None:
            with self._start_lock:
                if self._teller is None:
                    teller = threading.Thread(target=self._tell, name="headwater-notify", daemon=True)
                    # While the interpreter exits there may be no new threads: others look by themselves, a little later.
                    with suppress(RuntimeError):
                        teller.start()
                        self._teller = teller

    def wait(self, seen: int, timeout: float) -> None:
        if self._listener is None:
            with self._start_lock:
                if self._listener is None:
                    listener = threading.Thread(target=self._listen, name="headwater-listen", daemon=True)
                    with suppress(RuntimeError):
                        listener.start()
                        self._listener = listener
        super().wait(seen, min(timeout, self.LONGEST_WAIT_SECONDS))

    def _tell(self) -> None:
        while not self._closed.is_set:
            with suppress(psycopg.Error), self._connection() as pipeline:
                pipeline.run([("SET synchronous_commit = off", ())])
                while not self._closed.is_set:
                    self._to_tell.wait()
                    self._to_tell.clear()
                    news = [self._news.popleft() for _ in range(len(self._news))]
                    pipeline.run([(_NOTIFY, (_CHANNEL, _words(news)))])
                    # All that is committed in this pause shares the next notice.
                    time.sleep(self.PAUSE_SECONDS)
            self._closed.wait(0.5)

    def _listen(self) -> None:
        while not self._closed.is_set:
            with suppress(psycopg.Error), self._connection() as pipeline:
                pipeline.run([(f"LISTEN {_CHANNEL}", ())])
                self.bump()
                # psycopg's own `notifies` takes several times as long for one.
                pgconn, socket = pipeline.connection.pgconn, select.poll()
                socket.register(pgconn.socket, select.POLLIN)
                while not self._closed.is_set:
                    if socket.poll(500):
                        pgconn.consume_input()
                        notices = list(iter(pgconn.notifies, None))
                        for notice in notices:
                            self._hear(notice.extra.decode())
                        if notices:
                            self.bump()
            self._closed.wait(0.5)

    def _hear(self, news: str) -> None:
        words = iter(news.split())
        for key, text in zip(words, words, strict=False):
            self._heard[key] = text
            self._heard.move_to_end(key)
            if len(self._heard) > self.MOST_KEPT:
                self._heard.popitem(last=False)

    def heard(self, key: str) -> str | None:
        return self._heard.get(key)

    @contextmanager
    def _connection(self) -> Iterator[Pipeline]:
        database = self._database()
        if database is None:
            self._closed.set()
            raise psycopg.InterfaceError("this catalog was let go of")
        pipeline = database.connect()
        del database
        try:
            yield pipeline
        finally:
            pipeline.close()

    def close(self) -> None:
        self._closed.set()
        self._to_tell.set()
        for thread in (self._listener, self._teller):
            if thread is not None:
                thread.join(timeout=5)


def _settings(server_version: int) -> Iterator[tuple[str, object]]:
    """What each session is set to, whatever the server, the database or the role says."""
    # First: a low one of the role would end what follows too. Servers before 17 have no other limit for what runs in one round trip.
    yield "statement_timeout", int(TRANSACTION_SECONDS * 1000)
    # A stopped process must not hold a segment's lock for ever: the server ends its transaction, and its retry finds out.
    yield "lock_timeout", int(LOCK_SECONDS * 1000)
    yield "idle_in_transaction_session_timeout", int(LOCK_SECONDS * 1000)
    if server_version >= 170000:
        # The timeout above counts from the end of a round trip; a process may be stopped in the middle of one.
        yield "transaction_timeout", int(TRANSACTION_SECONDS * 1000)
    yield "default_transaction_isolation", "'read committed'"
    # For the session, and not in each transaction, where it would be one statement of nine.
    yield "synchronous_commit", "on"


def _words(news: Iterable[tuple[str, str]]) -> str:
    return " ".join(chain.from_iterable(news))


def _is_retryable(error: Exception) -> bool:
    final = pg.LockNotAvailable | pg.DiskFull | pg.OutOfMemory | pg.ProgramLimitExceeded
    if isinstance(error, final):
        return False
    # A row that was not there a moment ago: of two attempts of one commit, the later one finds out what the other did.
    again = pg.DeadlockDetected | pg.SerializationFailure | pg.UniqueViolation | pg.ReadOnlySqlTransaction
    return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError | again)


def _is_refused(error: BaseException | None) -> bool:
    """Whether the server does not let us in, and will not, until someone changes the address or the server."""
    if not isinstance(error, psycopg.OperationalError):
        return False
    asked_for_password = error.pgconn is not None and error.pgconn.needs_password
    return asked_for_password or all(_REFUSAL.search(attempt) for attempt in _attempts(error))


def _is_nobody_there(error: Exception) -> bool:
    """Whether no server was found: not one that answers, whatever it says, and not one that is mute."""
    unheard = (os.strerror(errno.ECONNREFUSED), os.strerror(errno.ENOENT), "resolve host")
    return all("FATAL:" not in attempt and any(words in attempt for words in unheard) for attempt in _attempts(error))


def _attempts(error: Exception) -> list[str]:
    """What each of the servers said that an address names: one may be the right one, and be away for a moment."""
    return re.split(r"^- ", str(error), flags=re.MULTILINE)[1:] or [str(error)]


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
    except pg.InsufficientPrivilege as error:
        raise InvalidRequestError(f"PostgreSQL refuses at {_shown(url)}: {error}") from error
    except (psycopg.ProgrammingError, pg.ProgramLimitExceeded) as error:
        raise InvalidRequestError(f"PostgreSQL can't make sense of what it was given at {_shown(url)}: {str(error).strip()}") from error
    except (psycopg.DataError, psycopg.NotSupportedError) as error:
        raise InvalidRequestError(f"the catalog at {_shown(url)} can't hold what it was given: {str(error).strip()}") from error
    except psycopg.IntegrityError as error:
        raise ConflictError(f"the catalog changed meanwhile ({str(error).strip()}): look again, decide again") from error
    except psycopg.Error as error:
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
