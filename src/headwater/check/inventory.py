"""What a store holds: its streams, segments, named writers, and the space they take. Each function is one consistent look."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from headwater.catalog import claims, entities, leases, segments, streams, tiers, writers
from headwater.catalog.database import Tx
from headwater.catalog.journals import find_state
from headwater.catalog.operations import Right, operation
from headwater.catalog.segments import SegmentRow
from headwater.catalog.streams import StreamRow
from headwater.model.keys import KEY_SPACE
from headwater.store import Store
from headwater.stream import Stream
from headwater.streams.lifecycle import KINDS

#: Streams that are looked up with one query: a database takes only so many values.
_AT_ONCE = 1000


@dataclass(frozen=True, slots=True)
class SegmentContents:
    """A segment, open or sealed: `start` and `end` are fractions of the key space, numbers [head, tail) are readable."""

    number: int
    start: float
    end: float
    head: int
    tail: int
    bytes: int
    made_epoch: int
    sealed_epoch: int | None

    @property
    def events(self) -> int:
        return self.tail - self.head

    @property
    def is_open(self) -> bool:
        return self.sealed_epoch is None


@dataclass(frozen=True, slots=True)
class StreamContents:
    """A stream in numbers. Of a byte stream, `events` are its readable bytes, and `bytes` what they take."""

    name: str
    kind: str
    epoch: int
    is_sealed: bool
    labels: tuple[str, ...]
    events: int
    bytes: int
    #: Parquet files and what they take, compressed; the rest is in blocks as it was appended.
    chunks: int
    chunk_bytes: int
    segments: tuple[SegmentContents, ...]
    #: Of a journal: its entities that are not deleted.
    entities: int | None = None
    #: Of a journal alone: the state of its index, "ready" or "building".
    index: str | None = None
    #: Who alone may append, None if everybody may.
    claimed_by: str | None = None
    #: (id, last number) of each named writer.
    writers: tuple[tuple[str, int], ...] = ()

    @property
    def open_segments(self) -> int:
        return sum(segment.is_open for segment in self.segments)


@dataclass(frozen=True, slots=True)
class StoreContents:
    """A store in numbers. `stored_bytes` and `objects` are None where counting them takes a request for every thousand objects."""

    id: str
    catalog: str
    format: int
    created_at: int
    catalog_bytes: int
    stored_bytes: int | None
    objects: int | None
    live_sessions: int
    #: Who does the upkeep now: host and process.
    upkeep: str | None
    streams: tuple[StreamContents, ...]


def stream_contents(stream: Stream) -> StreamContents:
    """One stream with its named writers, or a journal with its index. NotFoundError if it was deleted."""
    return stream._store._engine.run(read_stream_contents, stream.id)


def list_contents(store: Store, scope: str | None = None, label: str | None = None) -> list[StreamContents]:
    """All streams and journals in the order of their names, or those in a scope or with a label; without their writers."""
    return store._engine.run(read_contents, scope, label)


def store_contents(store: Store) -> StoreContents:
    """The whole store."""
    engine = store._engine
    found = engine.run(read_contents, None, None)
    format, created_at, live = engine.database.query("SELECT format, created_at, (SELECT count(*) FROM session WHERE live = 1) FROM store")[
        0
    ]
    is_postgres = store._catalog is not None
    size = (
        "SELECT sum(pg_total_relation_size(quote_ident(tablename)::regclass)) FROM pg_tables WHERE schemaname = current_schema()"
        if is_postgres
        else "SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()"
    )
    catalog_bytes = int(engine.database.query(size)[0][0] or 0)
    stored = list(engine.storage.list("")) if engine.storage.local else None
    return StoreContents(
        id=engine.store_id,
        catalog="postgresql" if is_postgres else "sqlite",
        format=format,
        created_at=created_at,
        catalog_bytes=catalog_bytes,
        stored_bytes=sum(info.bytes for info in stored) if stored is not None else None,
        objects=len(stored) if stored is not None else None,
        live_sessions=live,
        upkeep=engine.run(leases.find_holder),
        streams=tuple(found),
    )


@operation("read", right=Right("read", "stream"))
def read_stream_contents(tx: Tx, stream: int) -> StreamContents:
    [found] = _contents(tx, [streams.get_stream(tx, stream)])
    if found.kind == "journal":
        return replace(found, index=find_state(tx, stream))
    return replace(found, writers=tuple(writers.list_writers(tx, stream)))


@operation("read")
def read_contents(tx: Tx, scope: str | None, label: str | None) -> list[StreamContents]:
    rows = streams.find_streams(tx, scope, label, (*KINDS, "journal"))
    return [found for start in range(0, len(rows), _AT_ONCE) for found in _contents(tx, rows[start : start + _AT_ONCE])]


def _contents(tx: Tx, rows: Sequence[StreamRow]) -> list[StreamContents]:
    """These streams, without their writers, by a few queries for all of them."""
    ids = [row.id for row in rows]
    labels, chunks = streams.list_labels_of(tx, ids), tiers.count_chunks(tx, ids)
    journals = [row.id for row in rows if row.kind == "journal"]
    counts = entities.count_entities(tx, journals) if journals else {}
    listed = segments.list_segments_of(tx, ids)
    parts = {stream: [_segment_contents(segment) for segment in found] for stream, found in listed.items()}
    return [
        StreamContents(
            name=row.full_name,
            kind=row.kind,
            epoch=row.epoch,
            is_sealed=row.sealed_at is not None,
            labels=tuple(labels[row.id]),
            events=sum(segment.events for segment in parts[row.id]),
            bytes=sum(segment.bytes for segment in parts[row.id]),
            chunks=chunks.get(row.id, (0, 0))[0],
            chunk_bytes=chunks.get(row.id, (0, 0))[1],
            segments=tuple(parts[row.id]),
            entities=counts.get(row.id, 0) if row.kind == "journal" else None,
            claimed_by=claims.owner_of(listed[row.id]),
        )
        for row in rows
    ]


def _segment_contents(row: SegmentRow) -> SegmentContents:
    return SegmentContents(
        number=row.number,
        start=row.keys.start / KEY_SPACE,
        end=row.keys.end / KEY_SPACE,
        head=row.head,
        tail=row.tail,
        bytes=row.bytes,
        made_epoch=row.made_epoch,
        sealed_epoch=row.sealed_epoch,
    )
