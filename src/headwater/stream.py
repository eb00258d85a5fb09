"""A stream: its life, its segments, its places, and the ways to write and read it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from headwater.batch import ChunkRange, SegmentRange, list_chunks
from headwater.bytestream import ByteReader, ByteWriter
from headwater.catalog import claims, replacements, segments, streams, writers
from headwater.catalog.segments import SegmentRow
from headwater.errors import HeadwaterError, InvalidRequestError, NotFoundError, SealedError
from headwater.exports import Exported, as_polars
from headwater.model.arguments import check_flag, shown
from headwater.model.cuts import Cut
from headwater.model.events import Event
from headwater.model.keys import KEY_SPACE, key_bytes
from headwater.model.names import parse_stream_name, parse_word
from headwater.model.policies import Retention, Scaling
from headwater.model.positions import Segment
from headwater.model.scaling_history import ScalingHistory
from headwater.model.segmentmap import SegmentMap
from headwater.segments.batches import Batch, Columns, check_columns
from headwater.segments.lanes import StreamRef
from headwater.streams import autoscaling, cuts, forks, lifecycle, reading, scaling, truncation
from headwater.streams.cuts import Place, Range
from headwater.tables import check_key
from headwater.transactions import check_owner
from headwater.writer import Writer

if TYPE_CHECKING:
    from headwater.datasets import StreamDataset
    from headwater.store import Store

#: What streams of each kind are, and how they are written and read.
_KINDS = {
    "events": ("a stream of events", "writer() and read()"),
    "bytes": ("a stream of bytes", "byte_writer() and byte_reader()"),
    "table": ("a table", "store.table({!r})"),
    "revisioned": ("a revisioned stream", "store.revisioned({!r})"),
    "journal": ("a journal", "store.journal({!r})"),
}


class Stream(Exported):
    """One stream of a store. Of a deleted stream the handle says so, even if the name is used again.

    If another stream takes the name by `store.replace_stream`, the handle is of that stream from then on.
    """

    def __init__(self, store: Store, ref: StreamRef) -> None:
        self._store = store
        self._ref = ref

    def __repr__(self) -> str:
        return f"<Stream {self._ref.name}>"

    @property
    def name(self) -> str:
        """The full name, `scope/name`."""
        return self._ref.name

    @property
    def scope(self) -> str:
        """The part of the name before the slash."""
        return parse_stream_name(self._ref.name).scope

    @property
    def kind(self) -> str:
        """ "events", "bytes", "table", "revisioned" or "journal"."""
        return self._ref.kind

    @property
    def id(self) -> int:
        """The stream's own number in its store; a stream made again under this name has another."""
        return self._ref.id

    def _row(self) -> streams.StreamRow:
        engine, ref = self._store._engine, self._ref
        try:
            row = lifecycle.current_row(engine, ref)
        except NotFoundError:
            successor = engine.run(replacements.find_successor, ref.id, ref.name)
            if successor is None:
                raise
            row = successor
        if row.full_name != ref.name:
            # Another stream took this one's name, or this stream another one's.
            row = engine.run(replacements.find_successor, ref.id, ref.name) or row
        if (row.id, row.full_name) != (ref.id, ref.name):
            self._ref = engine.stream_ref(row)
        return row

    def _refresh(self) -> StreamRef:
        """The stream with its present schema."""
        row = self._row()
        if row.schema_version != self._ref.schema_version:
            self._ref = self._store._engine.stream_ref(row)
        return self._ref

    def _map(self) -> SegmentMap[SegmentRow]:
        """The segments. Only a sealed stream can have been replaced, so only of that another one is looked for."""
        rows = self._store._engine.run(segments.list_segments, self._ref.id)
        if not any(row.is_open for row in rows):
            before = self._ref.id
            if self._refresh().id != before:
                rows = self._store._engine.run(segments.list_segments, self._ref.id)
        return SegmentMap(rows)

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema of the events; `value: binary` if they are opaque."""
        return self._refresh().schema

    @property
    def scaling(self) -> Scaling:
        """How the number of its segments follows its load."""
        return Scaling.from_json(self._row().scaling)

    @property
    def retention(self) -> Retention:
        """What of it is kept."""
        return Retention.from_json(self._row().retention)

    @property
    def labels(self) -> tuple[str, ...]:
        """Words to find it by, see `store.streams(label=...)`."""
        self._row()
        return self._store._engine.run(streams.list_labels, self._ref.id)

    @property
    def epoch(self) -> int:
        """How often the set of segments has changed."""
        return self._row().epoch

    @property
    def is_sealed(self) -> bool:
        """Whether it can never be written again."""
        return self._row().sealed_at is not None

    def segments(self) -> list[Segment]:
        """The open segments, by number."""
        self._row()
        return [_segment(row) for row in self._store._engine.run(segments.list_open_segments, self._ref.id)]

    def head(self) -> Cut:
        """The first readable place."""
        found = self._map().head()
        return cuts.single(self._store._engine, self._ref, found)

    def tail(self) -> Cut:
        """The place behind the last event."""
        found = self._map().tail()
        return cuts.single(self._store._engine, self._ref, found)

    def cut_at(self, time: datetime) -> Cut:
        """Before it lies what was appended before `time`, behind it the rest."""
        return cuts.at_time(self._store._engine, self._refresh(), time)

    def update(
        self,
        *,
        scaling: Scaling | None = None,
        retention: Retention | None = None,
        labels: Collection[str] | None = None,
        schema: pa.Schema | None = None,
    ) -> None:
        """Change what is given. A new schema may add nullable columns and widen types."""
        self._ref = lifecycle.update_stream(
            self._store._engine, self._ref, scaling=scaling, retention=retention, labels=labels, schema=schema
        )

    def split(self, segment_number: int, parts: int = 2) -> list[Segment]:
        """Replace an open segment by equal parts of its keys; returns them. Order holds for each key."""
        return [_segment(row) for row in scaling.split(self._store._engine, self._ref, segment_number, parts)]

    def merge(self, segment_numbers: Sequence[int]) -> list[Segment]:
        """Replace open neighbours by one segment; returns it in a list. Order holds for each key."""
        return [_segment(row) for row in scaling.merge(self._store._engine, self._ref, segment_numbers)]

    def scaling_history(self) -> ScalingHistory:
        """How the segments came and went, with which load, and why: as far as the catalog remembers."""
        self._row()
        return self._store._engine.run(autoscaling.scaling_history, self._ref.id)

    def seal(self) -> None:
        """End the stream: it can be read for ever and never written again."""
        try:
            self._store._engine.run(streams.seal_stream, self._ref.id)
        except NotFoundError:
            raise lifecycle.deleted(self._ref) from None

    def claim(self, owner: str, require: tuple[str, str, int]) -> None:
        """Let only commits append that require this (table, key, version): those of `tx.require`, and nobody else's.

        The entry must have the version now (ConditionFailedError). The owner's next claim moves to another version; another owner gets
        ConflictError until the claim is released. A refused writer hears of it at its flush. Tables and journals can be claimed too.
        """
        check_owner(owner)
        if not isinstance(require, tuple) or len(require) != 3 or require[2] is None:
            raise InvalidRequestError(f"a claim requires an entry as (table, key, version), not {shown(require)}")
        table, key, version = require
        check_key(key, version)
        with lifecycle.naming(self._ref):
            self._store._engine.run(claims.claim_stream, self._ref.id, owner, parse_stream_name(table), key, version)

    def release_claim(self, force: bool = False) -> None:
        """End the claim of whoever has it, if there is one. Without `force`, ConflictError while the required entry still holds."""
        check_flag(force, "force")
        with lifecycle.naming(self._ref):
            self._store._engine.run(claims.release_claim, self._ref.id, force=force)

    @property
    def claimed_by(self) -> str | None:
        """The owner of the stream's claim, None if there is none."""
        self._row()
        return self._store._engine.run(claims.find_owner, self._ref.id)

    def truncate(self, cut: Cut, force: bool = False) -> None:
        """Make everything before the cut unreadable, for good.

        A journal needs `force`: its entities lose events. Upkeep rebuilds its index; until then persist and replay raise UnavailableError.
        """
        cuts.check_cut(cut)
        truncation.truncate(self._store._engine, self._ref, cut, force=check_flag(force, "force"))

    def roll_back(self, cut: Cut, *, keep_as: str, force: bool = False) -> None:
        """End the stream at a cut again, in one commit; `keep_as` is the name of a new, sealed stream with all that it was.

        Whoever is past the cut, now or later, gets RolledBackError, whose `cut` is where to read on; groups are put back to the cut. Tags,
        keeps and ends of groups past the cut are a ConflictError. Named writers keep their last numbers. It takes `force` unless the stream
        is claimed. The index of a journal is rebuilt by upkeep.
        """
        cuts.check_cut(cut)
        self._row()
        with self._store.transaction() as tx:
            tx.roll_back(self.name, cut, keep_as=keep_as, force=force)

    def fork(self, new_name: str, at: Place = None) -> Stream:
        """A new stream that begins with what is readable of this one before `at` (its tail), without a copy of the bytes.

        From then on the two are independent: also truncating or deleting this one takes nothing from the fork.
        """
        return Stream(self._store, forks.fork(self._store._engine, self._ref, new_name, at))

    def forks(self) -> list[str]:
        """The names of the streams that share data with this one because they were forked from it."""
        return self._store._engine.run(streams.list_forks, self._ref.id)

    @property
    def origin(self) -> str | None:
        """The name of the stream this one was forked from, as long as it is there and they share data."""
        return self._store._engine.run(streams.find_origin, self._ref.id)

    # Writing.

    def writer(self, id: str | None = None) -> Writer:
        """A writer; with an id, the one holder of that id: it goes on after `last_number`, and older holders are fenced."""
        self._check_kind("events")
        return self._store._open_writer(self, id)

    def byte_writer(self) -> ByteWriter:
        """A writer of bytes, for a stream of kind "bytes"."""
        self._check_kind("bytes")
        return self._store._open_byte_writer(self)

    def byte_reader(self, start: int | Place = 0) -> ByteReader:
        """A reader of bytes, from an offset, or a place as `read` takes it."""
        self._check_kind("bytes")
        return ByteReader(self._store._engine, self._ref, start)

    def _check_kind(self, kind: str) -> None:
        if self._ref.kind != kind:
            what, call = _KINDS[self._ref.kind]
            raise InvalidRequestError(f"{self.name} is {what}: use {call.format(self.name)}")

    # Reading.

    def read(
        self, start: Place = None, end: Place = None, *, key: bytes | str | int | None = None, follow: bool = False
    ) -> Iterator[Event]:
        """Read the events from `start` (the head) to `end` (the tail as of now), in order for each key, across splits and merges too.

        `key` reads only the events with this routing key, and only those segments and row groups that may have some. `follow` goes on
        at the tail and waits for more; it ends only when the stream is sealed.
        """
        wanted = key_bytes(key)
        if not check_flag(follow, "follow"):
            ref, found = self._between(start, end)
            return _events(reading.read_batches(self._store._engine, ref, found, key=wanted), wanted)
        if end is not None:
            raise InvalidRequestError("a follower has no end: leave out `end`, or `follow`")
        return _events(reading.follow_batches(self._store._engine, self._check_events(), start, wanted), wanted)

    def ranges(self, start: Place = None, end: Place = None, *, skip_truncated: bool = False) -> list[SegmentRange]:
        """What lies between two places as ranges that may be read in parallel, also in other processes.

        TruncatedError if some of it is gone; with `skip_truncated`, what is left of it.
        """
        check_flag(skip_truncated, "skip_truncated")
        ref = self._check_events()
        found = cuts.ranges(self._store._engine, ref, start, end, skip_truncated=skip_truncated)
        return [
            SegmentRange(
                self._store,
                ref.name,
                item.segment.number,
                item.start,
                item.end,
                ref.id,
                size,
                item.segment.keys,
            )
            for item, size in zip(found, cuts.estimate_bytes(self._store._engine, ref, found), strict=True)
        ]

    def range(self, segment: int, start: int, end: int) -> SegmentRange:
        """Events [start, end) of one segment, by their numbers."""
        return SegmentRange(self._store, self.name, segment, start, end, self._check_events().id)

    def chunks(self, start: Place = None, end: Place = None) -> list[ChunkRange]:
        """The long-term Parquet files that hold what lies between two places, as far as it is in any.

        Upkeep may put larger ones in their place at any time; the old ones are then collected as garbage.
        """
        ref = self._check_events()
        return list_chunks(self._store._engine, ref, start, end)

    def to_arrow(self, start: Place = None, end: Place = None, columns: Sequence[str] | None = None) -> pa.Table:
        """What lies between two places as one table; by default the schema's columns with `_key, _time, _segment, _number`."""
        schema, batches = self._read_batches(start, end, columns)
        return pa.Table.from_batches(batches, schema=schema)

    def to_pandas(self, start: Place = None, end: Place = None, columns: Sequence[str] | None = None) -> Any:
        """Return the events between two places as a pandas DataFrame; the columns are those of `to_arrow`."""
        return self.to_arrow(start, end, columns).to_pandas()

    def to_polars(self, start: Place = None, end: Place = None, columns: Sequence[str] | None = None) -> Any:
        """Return the events between two places as a Polars DataFrame; the columns are those of `to_arrow`."""
        return as_polars(self.to_arrow(start, end, columns))

    def dataset(self, start: Place = None, end: Place = None) -> StreamDataset:
        """Open what lies between two places as a pyarrow Dataset, into which DuckDB and Polars push columns and filters.

        It keeps these events readable until it is closed or collected, or the store is closed; then reading it raises InvalidRequestError.
        """
        from headwater.datasets import open_dataset  # pyarrow.dataset takes a while to load, and most programs don't use it

        return open_dataset(self._store._engine, self._store._heart, self._check_events(), start, end)

    def _read_batches(
        self, start: Place = None, end: Place = None, columns: Sequence[str] | None = None
    ) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        ref, found = self._between(start, end)
        wanted = Columns(check_columns(ref, columns))
        batches = reading.read_batches(self._store._engine, ref, found, wanted.names)
        return wanted.schema_for(ref), (batch.to_arrow(wanted) for batch in batches)

    def _between(self, start: Place, end: Place) -> tuple[StreamRef, list[Range]]:
        """What lies between two places, and the stream as of then: its schema has all that those events have."""
        self._check_read()
        engine, ref = self._store._engine, self._ref
        try:
            found = cuts.ranges(engine, ref, start, end)
        except HeadwaterError:
            # The cut may be of the stream that has the name now.
            if self._refresh().id == ref.id:
                raise
        else:
            if self._refresh().id == ref.id:
                return self._ref, found
        return self._ref, cuts.ranges(engine, self._ref, start, end)

    def _check_events(self) -> StreamRef:
        self._check_read()
        return self._refresh()

    def _check_read(self) -> None:
        if self._ref.kind == "bytes":
            self._check_kind("events")
        if self._ref.kind in ("table", "revisioned"):
            # Wait for appends of unknown outcome first, as the table's own reads do.
            self._store._flusher.settle(self._ref.id)

    def _check_writable(self) -> StreamRef:
        row = self._row()
        if row.sealed_at is not None:
            raise SealedError(f"stream {self.name} is sealed")
        return self._refresh()

    def _open_named_writer(self, id: str) -> tuple[int, int]:
        return self._store._engine.run(writers.open_writer, self._ref.id, parse_word(id, "writer"))


def _events(batches: Iterator[Batch] | Iterator[Batch | None], key: bytes | None = None) -> Iterator[Event]:
    for batch in batches:
        if batch is not None:
            yield from batch.events() if key is None else batch.events_of_key(key)


def _segment(row: SegmentRow) -> Segment:
    return Segment(row.number, row.keys.start / KEY_SPACE, row.keys.end / KEY_SPACE, row.tail - row.head, row.bytes, row.made_epoch)
