"""The one seam between the client's classes and the parts below: a catalog, a storage, and what a process needs to use them.

Clients ask the catalog through `run` with a declared operation, append through the flusher, and read through `cursor` and `fetch`: plans,
extents and chunks stay below. A store behind a gateway would be another implementation of these few calls.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple, ParamSpec, TypeVar

import pyarrow as pa

from headwater.catalog import extents, flushes, news, streams, tags, undone
from headwater.catalog.database import NO_NEWS, Changes, Database, News
from headwater.catalog.extents import PARQUET, InChunk
from headwater.catalog.flushes import Flush
from headwater.catalog.operations import DatabaseRunner, Operation, Runner
from headwater.catalog.parts import PartResult
from headwater.catalog.streams import StreamRow
from headwater.errors import CorruptDataError, HeadwaterError, InvalidRequestError, NotFoundError, TruncatedError
from headwater.model.limits import PLAN_EXTENTS
from headwater.model.names import StreamName
from headwater.model.numbers import Numbers
from headwater.model.schemas import is_opaque
from headwater.runtime.workers import Workers
from headwater.segments.batches import check_columns
from headwater.segments.bounds import Choice
from headwater.segments.chunk import ChunkFiles
from headwater.segments.fetching import Fetched, fetch
from headwater.segments.lanes import StreamRef
from headwater.segments.memory import release_unused
from headwater.segments.metrics import Metered, Metrics
from headwater.segments.read import SegmentCursor
from headwater.storage import Storage

#: Schemas that are kept before all are looked up anew: those of deleted streams go by that.
_KEPT_SCHEMAS = 1000

P = ParamSpec("P")
T = TypeVar("T")


class ChunkPlace(NamedTuple):
    """A Parquet file, and which numbers of a segment are in it. A fork may have only the first ones of its parent's file."""

    url: str
    first: int
    end: int
    bytes: int
    #: Whether the file was made of the segment's own log, and so by the schemas of this stream alone. All of its numbers count then.
    is_own: bool


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
        if self.is_closed:
            self._check_open()
        if self._ended_holds and operation.how == "commit":
            self.release_ended()
        return self.runner.run(operation, *args, **kwargs)

    def metrics(self) -> Metrics:
        """Calls, failures and seconds of the operations that this process ran."""
        return self._metered.values()

    def end_hold(self, name: str) -> None:
        """End a reader's hold with the next change. A finaliser may call this at any moment, even in the middle of this thread's commit."""
        self._ended_holds.append(name)

    def release_ended(self) -> None:
        """End the holds of readers that are gone."""
        while self._ended_holds and not self.is_closed:
            # If the catalog is out of reach, the hold expires.
            with suppress(IndexError, HeadwaterError):
                self.runner.run(tags.end_hold, self._ended_holds.popleft())

    def commit_flush(self, flush: Flush) -> list[PartResult]:
        """Commit a flush; given again after any failure, it is committed once and answered the same."""
        return self.runner.run(flushes.commit_flush, flush, self._news(flush))

    def check_alone(self) -> None:
        """UnavailableError if this thread is in the middle of a commit, so that it must not wait for another thread's."""
        self.database.check_alone()

    def announce(self, flush: Flush) -> None:
        """Notify followers of a committed flush."""
        self.database.announce(self._news(flush))

    def _news(self, flush: Flush) -> News:
        return news.of_flush(self.store_id, flush) if self.changes.TELLS_NEWS else NO_NEWS

    def last_news(self, stream: int, segment: int) -> str | None:
        """The last notice of a commit to a segment. Notices may be lost: the segment may have more even if this did not change."""
        return self.changes.heard(news.place(self.store_id, stream, segment)) if self.changes.TELLS_NEWS else None

    # Reading.

    def cursor(
        self,
        stream: StreamRef,
        segment: int,
        start: int,
        end: int | None,
        columns: Sequence[str] | None = None,
        *,
        keeps_schema: bool = False,
        key: bytes | None = None,
    ) -> SegmentCursor:
        """A cursor over numbers [start, end) of a segment; over all from `start` on, also those to come, if `end` is None.

        It asks nothing before its first batch. See `SegmentCursor` for `columns`, `keeps_schema` and `key`.
        """
        return SegmentCursor(self, stream, segment, start, end, columns, keeps_schema=keeps_schema, key=key)

    def open_cursor(
        self,
        name: StreamName,
        stream: int,
        segment: int,
        start: int,
        end: int,
        columns: Sequence[str] | None,
        prefetch_bytes: int,
        choice: Choice | None = None,
    ) -> tuple[SegmentCursor, list[str]]:
        """A cursor over numbers [start, end) of a segment, and the columns that it reads; in one round trip, with its first plan.

        NotFoundError if the stream of this id has the name no more, TruncatedError if some of the numbers are gone.
        """
        found = self.run(extents.open_range, name, stream, segment, start, end, PLAN_EXTENTS)
        if found is None:
            raise NotFoundError(f"there is no stream {name}")
        if found.stream.id != stream:
            try:
                renamed = self.run(streams.get_stream, stream)
            except NotFoundError:
                raise NotFoundError(f"stream {name} was deleted; another has its name by now") from None
            return self.open_cursor(StreamName(renamed.scope, renamed.name), stream, segment, start, end, columns, prefetch_bytes, choice)
        ref, row = self.stream_ref(found.stream), found.segment
        names = check_columns(ref, columns)
        # Tags are asked only for numbers that are not readable without one.
        if row is None or not (tags.is_kept(row, start, end, {}) or tags.is_kept(row, start, end, self.run(tags.get_pins, stream))):
            error = self.run(undone.explain, stream, {segment: end}) if row is None else None
            raise error or TruncatedError(f"some of segment {segment} of {name} was truncated")
        planned = found.extents
        return SegmentCursor(
            self, ref, segment, start, end, names, prefetch_bytes, keeps_schema=True, planned=planned, choice=choice
        ), names

    def wait_for_more(self, cursors: Collection[SegmentCursor], seen: int, seconds: float) -> None:
        """Wait until these cursors, all at their tails, may have more than when the catalog was at version `seen`; up to `seconds`.

        The wait may end early, and for no reason.
        """
        self.changes.wait(seen, seconds)

    def fetch(self, stream: StreamRef, runs: Iterable[Numbers], *, reverse: bool = False) -> Iterator[Fetched]:
        """The events of runs of numbers, in the order of the runs. While the caller has one window of them, the next one is fetched.

        `reverse`: the runs are given the last one first, and so are the parts that are handed out; the numbers in each ascend.
        """
        return fetch(self, stream, runs, reverse)

    def list_chunks(self, stream: StreamRef, segment: int, start: int, end: int) -> Iterator[ChunkPlace]:
        """The Parquet files that hold the first of numbers [start, end) of a segment, up to the first number that is in none."""
        at = start
        while at < end:
            planned = self.run(extents.plan_segment, stream.id, segment, at, end, PLAN_EXTENTS)
            for extent in planned:
                # Blocks follow all chunks.
                if extent.form != PARQUET or extent.key is None:
                    return
                yield ChunkPlace(f"{self.storage.url}/{extent.key}", extent.first, extent.end, extent.length, extent.limit is None)
            if not planned:
                return
            at = planned[-1].end

    def find_time(self, place: InChunk, time_us: int) -> int:
        """The first number in a chunk that was appended at a time or later, else the chunk's end. CorruptDataError if it is gone."""
        return self.chunks.open(place.chunk).find_time(self.storage, time_us)

    @property
    def garbage_seconds(self) -> float:
        """Seconds that an object stays after its last extent is gone: a fail-over may bring back a catalog that names it."""
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

    def schema_history(self, stream: int, version: int) -> list[pa.Schema]:
        """The versions of a stream's schema up to this one, oldest first."""
        found = self.run(streams.get_schemas, stream)
        return [pa.ipc.read_schema(pa.py_buffer(found[number])) for number in sorted(found) if number <= version]

    def stream_ref(self, row: StreamRow) -> StreamRef:
        """A stream with its schema, as of its row."""
        schema = self.schema(row.id, row.schema_version)
        return StreamRef(row.id, row.full_name, row.kind, schema, row.schema_version, is_opaque(schema))

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


def schema_bytes(schema: pa.Schema) -> bytes:
    """A schema as the catalog keeps it."""
    return bytes(schema.serialize())
