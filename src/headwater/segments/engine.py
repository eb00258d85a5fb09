"""The one seam between the client's classes and the parts below: a catalog, a storage, and what a process needs to use them.

Clients read and change the catalog through `run` with a declared operation, append through the flusher, and fetch bytes from the
storage. A store behind a gateway would be another implementation of these few calls.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Concatenate, ParamSpec, TypeVar

import pyarrow as pa

from headwater.catalog import extents, flushes, news, segments, streams, tags
from headwater.catalog.database import NO_NEWS, Changes, Database, News, Row, Statement, Tx
from headwater.catalog.extents import Extent, OpenRange
from headwater.catalog.flushes import Flush
from headwater.catalog.operations import DatabaseRunner, Operation, Runner
from headwater.catalog.parts import PartResult
from headwater.catalog.segments import SegmentRow
from headwater.errors import CorruptDataError, HeadwaterError, InvalidRequestError
from headwater.model.limits import PLAN_EXTENTS
from headwater.model.names import StreamName
from headwater.runtime.workers import Workers
from headwater.segments.chunk import ChunkFiles
from headwater.segments.memory import release_unused
from headwater.segments.metrics import Metered, Metrics
from headwater.storage import Storage

#: Schemas that are kept before all are looked up anew: those of deleted streams go by that.
_KEPT_SCHEMAS = 1000

P = ParamSpec("P")
T = TypeVar("T")


class Engine:
    """One open store in one process."""

    def __init__(self, store_id: str, database: Database, storage: Storage) -> None:
        self.store_id = store_id
        self.database = database
        self.storage = storage
        self.is_closed = False
        self._metered = Metered(DatabaseRunner(database))
        #: A decorator of how operations run takes the place of this one, which it is given.
        self.runner: Runner = self._metered
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._schemas: dict[tuple[int, int], pa.Schema] = {}
        self.chunks = ChunkFiles(self.storage)
        self.workers = Workers("headwater-io", 8, release_unused)
        self._ended_holds: deque[str] = deque()

    def after_fork(self) -> None:
        self._metered.after_fork()
        self._begin()

    def run(self, operation: Operation[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a declared operation on the catalog: the one way in which clients and upkeep ask it for anything."""
        self._check_open()
        if self._ended_holds and operation.how == "commit":
            self.release_ended()
        return self.runner.run(operation, *args, **kwargs)

    def metrics(self) -> Metrics:
        """What was counted of the operations that this process ran."""
        return self._metered.values()

    def read(self, look: Callable[Concatenate[Tx, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a catalog function over one consistent look."""
        self._check_open()
        return self.database.read(lambda tx: look(tx, *args, **kwargs))

    def look(self, look: Callable[Concatenate[Tx, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a catalog function of one statement, which is a consistent look by itself: a round trip less on PostgreSQL."""
        self._check_open()
        return look(_OneStatement(self.database), *args, **kwargs)

    def write(self, change: Callable[Concatenate[Tx, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a catalog function and commit what it did."""
        return self._write(lambda tx: change(tx, *args, **kwargs), repeatable=False)

    def write_once(self, change: Callable[Concatenate[Tx, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Like `write`, for what recognises that it was done: a lost answer is asked for again."""
        return self._write(lambda tx: change(tx, *args, **kwargs), repeatable=True)

    def _write(self, change: Callable[[Tx], T], *, repeatable: bool) -> T:
        self._check_open()
        self.release_ended()
        result = self.database.write(change, repeatable=repeatable)
        self.database.announce()
        return result

    def end_hold(self, name: str) -> None:
        """End a reader's hold, with the next change. It may be called at any moment, also in the midst of a commit of this very thread:
        that is where Python may find out that nobody has the reader any more."""
        self._ended_holds.append(name)

    def release_ended(self) -> None:
        """Let go of what was kept for readers that are gone."""
        while self._ended_holds and not self.is_closed:
            # If it can't be told now, the hold ends by itself.
            with suppress(IndexError, HeadwaterError):
                self.runner.run(tags.end_hold, self._ended_holds.popleft())

    def attempt(self, change: Callable[Concatenate[Database, P], T | None], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Run a catalog function that commits in one round trip, or does nothing and returns None."""
        self._check_open()
        result = change(self.database, *args, **kwargs)
        if result is not None:
            self.database.announce()
        return result

    def commit_flush(self, flush: Flush) -> list[PartResult]:
        """Commit a flush; given again after any failure, it is committed once and answered the same."""
        return self.runner.run(flushes.commit_flush, flush, self._news(flush))

    def announce(self, flush: Flush) -> None:
        """Tell followers of a committed flush."""
        self.database.announce(self._news(flush))

    def _news(self, flush: Flush) -> News:
        return news.of_flush(self.store_id, flush) if self.changes.TELLS_NEWS else NO_NEWS

    def last_news(self, stream: int, segment: int) -> str | None:
        """What was heard last of a segment, with the notice of a commit. There may be more in it all the same."""
        return self.changes.heard(news.place(self.store_id, stream, segment)) if self.changes.TELLS_NEWS else None

    def open_range(self, name: StreamName, stream: int, segment: int, start: int, end: int) -> OpenRange | None:
        """The stream of a name, and, if it is that stream, a segment with the next extents in its own log for numbers [start, end)."""
        self._check_open()
        return extents.open_range(self.database, name, stream, segment, start, end, PLAN_EXTENTS)

    def plan(self, row: SegmentRow, start: int, end: int, limit: int = PLAN_EXTENTS) -> list[Extent]:
        """The next extents of a segment that hold numbers [start, end)."""
        self._check_open()
        if start >= row.base_until:
            return extents.plan(self.database, row.log, start, end, limit)
        log, until = self.read(segments.find_piece, row, start)
        found = extents.plan(self.database, log, start, min(end, until), limit)
        for extent in found[-1:]:
            extent.limit = until
        return found

    @property
    def garbage_seconds(self) -> float:
        """How long an object stays after its last extent is gone: a fail-over may take the catalog back to when it was named."""
        return self.database.garbage_seconds

    @property
    def changes(self) -> Changes:
        return self.database.changes

    def schema(self, stream: int, version: int) -> pa.Schema:
        """A version of a stream's schema. Versions never change, so they are kept."""
        found = self._schemas.get((stream, version))
        if found is None:
            if len(self._schemas) > _KEPT_SCHEMAS:
                self._schemas = {}
            for number, arrow in self.run(streams.get_schemas, stream).items():
                self._schemas[stream, number] = pa.ipc.read_schema(pa.py_buffer(arrow))
            found = self._schemas.get((stream, version))
            if found is None:
                raise CorruptDataError(f"version {version} of the schema of stream {stream} is not in the catalog")
        return found

    def _check_open(self) -> None:
        # A closed catalog would quietly open its connections again.
        if self.is_closed:
            raise InvalidRequestError("this store is closed: open it again")

    def close(self) -> None:
        self.release_ended()
        self.is_closed = True
        self.workers.close()
        self.database.close()
        self.storage.close()


class _OneStatement:
    """For a function that runs one SELECT: no transaction around it."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._is_used = False

    def run(self, sql: str, values: Sequence[Any] = ()) -> list[Row]:
        assert not self._is_used, "a second statement might see another state: use Engine.read"
        self._is_used = True
        return self._database.query(sql, values)

    def run_all(self, statements: Sequence[Statement]) -> list[list[Row]]:
        raise AssertionError("several statements are for Engine.read")

    def defer(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        raise AssertionError("a change is for Engine.write")


def schema_bytes(schema: pa.Schema) -> bytes:
    """A schema as the catalog keeps it."""
    return bytes(schema.serialize())
