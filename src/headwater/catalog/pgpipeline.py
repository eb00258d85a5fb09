"""Statements to PostgreSQL, many in one round trip, by libpq's own pipeline.

psycopg's cursors can do the same, at three times the processor time: a commit is eight small statements, and most of its time was theirs.
Connecting, errors and values that come back are psycopg's.
"""

from __future__ import annotations

import select
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from struct import Struct
from typing import Any

import psycopg
from psycopg import errors, pq
from psycopg.adapt import Transformer

from headwater.catalog.database import Row, Statement
from headwater.model.limits import SILENT_SECONDS

_pack_int = Struct("!q").pack
_pack_float = Struct("!d").pack
#: Of a connection. A statement with values is prepared when it is used again, and never forgotten.
_MOST_PREPARED = 512
_USES_BEFORE = 2
_Key = tuple[str, tuple[int, ...]]


@lru_cache(maxsize=1024)
def _dialect(sql: str) -> bytes:
    """With $1, $2, ... for values."""
    first, *rest = sql.split("?")
    return (first + "".join(f"${number}{text}" for number, text in enumerate(rest, start=1))).encode()


class _Forms(dict[type, tuple[int, Callable[[Any], bytes | None]]]):
    """For each type of value: its number in PostgreSQL, and what gives its binary form."""

    def __missing__(self, kind: type) -> tuple[int, Callable[[Any], bytes | None]]:
        for base in kind.__mro__:
            if base in self:
                return self[base]
        raise TypeError(f"a {kind.__name__} is no value of the catalog")


_FORMS = _Forms(
    {
        type(None): (0, lambda value: value),
        int: (20, _pack_int),
        str: (25, str.encode),
        float: (701, _pack_float),
        bytes: (17, bytes),
        bytearray: (17, bytes),
        memoryview: (17, bytes),
    }
)


class Pipeline:
    """A connection that is used for nothing else. Not for several threads at once.

    A server that says nothing for `silent_seconds` is given up, and the connection with it.
    """

    def __init__(self, connection: psycopg.Connection[Any], silent_seconds: float = SILENT_SECONDS) -> None:
        self.connection = connection
        self.silent_seconds = silent_seconds
        self._pgconn = connection.pgconn
        self._pgconn.nonblocking = 1
        self._pgconn.enter_pipeline_mode()
        self._rows = Transformer(connection)
        self._uses: defaultdict[_Key, int] = defaultdict(int)
        self._names: dict[_Key, bytes] = {}
        self._prepared = 0
        #: Whether the answers to what went `behind` the last statements are still to come.
        self._is_owed = False
        self._socket = select.poll()
        self._socket.register(self._pgconn.socket, select.POLLIN)

    @property
    def is_open(self) -> bool:
        return not self.connection.closed

    @property
    def is_idle(self) -> bool:
        """Whether it is open, and outside of a transaction."""
        return self.is_open and (self._is_owed or self._pgconn.transaction_status == pq.TransactionStatus.IDLE)

    def close(self) -> None:
        self.connection.close()

    def run(self, statements: Iterable[Statement], behind: Statement | None = None) -> list[list[Row]]:
        """Run them in one round trip; returns the rows of each. After an error of the server none behind it ran.

        `behind` goes out with them, to be run in any case, after them and by itself. Nobody waits for it, or hears of its errors.
        """
        done = False
        #: For each answer to come: what is prepared by it, None if it is a statement's own.
        sent: list[_Key | None] = []
        sent_behind: list[_Key | None] = []
        try:
            for sql, values in statements:
                self._send(sql, values, sent)
            self._pgconn.pipeline_sync()
            if behind is not None:
                self._send(*behind, sent_behind)
                self._pgconn.pipeline_sync()
            results, error = self._fetch()
            self._is_owed = behind is not None
            if error is not None:
                # Whether a transaction is still open is known when all has come.
                self._fetch_owed()
            done = True
        finally:
            if not done:
                # A broken connection, or a Ctrl-C: nobody knows what is still to come.
                self.connection.close()
        if error is not None:
            # Those behind it were not prepared either, and those before it are, under names that are not used again.
            for key in filter(None, sent + sent_behind):
                del self._names[key]
            raise error
        return [self._load(result) for key, result in zip(sent, results, strict=True) if key is None]

    def _send(self, sql: str, values: Sequence[Any], sent: list[_Key | None]) -> None:
        forms = [_FORMS[type(value)] for value in values]
        types = tuple([kind for kind, _ in forms])
        data = [dump(value) for (_, dump), value in zip(forms, values, strict=True)]
        formats = [pq.Format.BINARY] * len(data)
        key = sql, types
        name = self._names.get(key)
        if name is None:
            self._uses[key] += 1
            if not values or self._uses[key] <= _USES_BEFORE or self._prepared >= _MOST_PREPARED:
                self._pgconn.send_query_params(_dialect(sql), data, types, formats, pq.Format.BINARY)
                sent.append(None)
                return
            self._prepared += 1
            name = self._names[key] = b"headwater_%d" % self._prepared
            self._pgconn.send_prepare(name, _dialect(sql), types)
            sent.append(key)
        sent.append(None)
        self._pgconn.send_query_prepared(name, data, formats, pq.Format.BINARY)

    def _fetch(self) -> tuple[list[pq.abc.PGresult], psycopg.Error | None]:
        """What the server answers to a round trip: the results with rows or without, and the first error."""
        while self._pgconn.flush():
            # More than the socket takes: the server may itself wait for us to read.
            self._wait(select.POLLIN | select.POLLOUT)
        self._fetch_owed()
        return self._fetch_to_sync()

    def _fetch_owed(self) -> None:
        if self._is_owed:
            self._fetch_to_sync()
            self._is_owed = False

    def _fetch_to_sync(self) -> tuple[list[pq.abc.PGresult], psycopg.Error | None]:
        results: list[pq.abc.PGresult] = []
        error: psycopg.Error | None = None
        pgconn = self._pgconn
        while True:
            while pgconn.is_busy():
                self._wait(select.POLLIN)
            result = pgconn.get_result()
            if result is None:
                if pgconn.status == pq.ConnStatus.BAD:
                    raise psycopg.OperationalError(pgconn.get_error_message())
                continue
            status = result.status
            if status == pq.ExecStatus.PIPELINE_SYNC:
                return results, error
            if status == pq.ExecStatus.FATAL_ERROR:
                if pgconn.status == pq.ConnStatus.BAD:
                    raise psycopg.OperationalError(pgconn.get_error_message())
                error = error or errors.error_from_result(result)
            elif status != pq.ExecStatus.PIPELINE_ABORTED:
                results.append(result)

    def _wait(self, events: int) -> None:
        self._socket.modify(self._pgconn.socket, events)
        ready = self._socket.poll(self.silent_seconds * 1000)
        if not ready:
            raise psycopg.OperationalError(f"the server did not answer for {self.silent_seconds:g} s")
        if any(found & ~select.POLLOUT for _, found in ready):
            self._pgconn.consume_input()

    def _load(self, result: pq.abc.PGresult) -> list[Row]:
        if result.status != pq.ExecStatus.TUPLES_OK or not result.ntuples:
            return []
        self._rows.set_pgresult(result, format=pq.Format.BINARY)
        return self._rows.load_rows(0, result.ntuples, tuple)
