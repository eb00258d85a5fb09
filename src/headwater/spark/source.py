"""The source: streams as DataFrames, in one go or in micro-batches. Offsets are cuts, and a re-run batch reads the same events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, Filter, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from headwater import Cut, InvalidRequestError, RolledBackError, SegmentRange, Store, Stream, TruncatedError
from headwater.spark.addresses import patiently
from headwater.spark.holding import Hold
from headwater.spark.options import SourceOptions
from headwater.spark.planning import divide
from headwater.spark.types import APPENDED, METADATA, conform, spark_arrow_schema, to_arrow, to_spark_schema, union_schema
from headwater.spark.where import Condition, columns_of, from_spark_filter, make_expression, may_match, parse_where

#: An idle query asks for new data about 20 times a second instead of 80.
_IDLE_SECONDS = 0.05
_BATCH_ROWS = 65536
_SMALL_ROWS = 16384
_SMALL_BYTES = 1024 * 1024
#: Twice as much as other readers: each batch costs Spark the same, and its workers have the memory.
_PREFETCH_BYTES = 32 * 1024 * 1024


class RangesPartition(InputPartition):
    """What one task reads: ranges in order. They open their store where they are unpickled."""

    def __init__(self, ranges: Sequence[SegmentRange]) -> None:
        super().__init__(None)
        self.ranges = list(ranges)


def open_streams(options: SourceOptions) -> tuple[Store, list[Stream]]:
    store = patiently(options.address.open)
    streams = [store.stream(name) for name in options.streams]
    for stream in streams:
        if stream.kind == "bytes":
            raise InvalidRequestError(f"{stream.name} is a stream of bytes: Spark reads events")
    return store, streams


def read_schemas(options: SourceOptions) -> tuple[pa.Schema, pa.Schema]:
    """(the columns that were asked for, those that the condition looks at), as Spark has them.

    No others are looked at: their types may differ between the streams, or be some that Spark lacks.
    """
    _, streams = open_streams(options)
    own = list(dict.fromkeys(name for stream in streams for name in stream.schema.names))
    names = options.columns or [*own, *METADATA.names]
    condition = parse_where(options.where) if options.where is not None else None
    looked_at = sorted(columns_of(condition))
    for name in (*names, *looked_at):
        if name not in (known := [*own, *METADATA.names, APPENDED.name]):
            raise InvalidRequestError(f"{', '.join(options.streams)} has no column {name!r}; there are: {', '.join(known)}")
    chosen = [pa.schema([field for field in stream.schema if field.name in names or field.name in looked_at]) for stream in streams]
    schema = spark_arrow_schema(pa.schema([*union_schema(chosen, options.streams), *METADATA, APPENDED]))
    if condition is not None:
        make_expression(condition, schema)
    return pa.schema([schema.field(name) for name in names]), pa.schema([schema.field(name) for name in looked_at])


def source_schema(options: SourceOptions) -> StructType:
    """The columns of the DataFrame: the streams' own and `_key, _time, _stream, _segment, _number`, or those asked for."""
    return to_spark_schema(read_schemas(options)[0])


class RangeReader:
    """Reads ranges as batches that are exactly of the schema that Spark wants. It is pickled into every task."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self.options = options
        self.schema = schema
        self.condition: Condition | None = parse_where(options.where) if options.where is not None else None
        #: The columns that it looks at, also those that a stream lacks.
        self.looked_at = read_schemas(options)[1] if options.where is not None else pa.schema([])

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, RangesPartition):
            return iter(())
        return self._batches(partition.ranges)

    def _batches(self, ranges: Sequence[SegmentRange]) -> Iterator[pa.RecordBatch]:
        target = to_arrow(self.schema)
        small: list[pa.RecordBatch] = []
        rows = size = 0
        for part in ranges:
            for batch in self._read_range(part, target):
                if batch.num_rows >= _SMALL_ROWS or batch.nbytes >= _SMALL_BYTES:
                    yield from _joined(small)
                    small, rows, size = [], 0, 0
                    yield from _sliced(batch)
                    continue
                # Blocks may have a few events each, and every batch costs Spark the same.
                small.append(batch)
                rows += batch.num_rows
                size += batch.nbytes
                if rows >= _SMALL_ROWS or size >= _SMALL_BYTES:
                    yield from _joined(small)
                    small, rows, size = [], 0, 0
        yield from _joined(small)

    def _read_range(self, part: SegmentRange, target: pa.Schema) -> Iterator[pa.RecordBatch]:
        there = {*part.schema().names, *METADATA.names, APPENDED.name}
        full = pa.schema(list({field.name: field for field in (*self.looked_at, *target)}.values()))
        expression = make_expression(self.condition, full) if self.condition is not None else None
        # Rows without any of the columns are rows all the same.
        wanted = [name for name in full.names if name in there] or ["_number"]
        may_have = partial(may_match, self.condition, schema=full) if self.condition is not None else None
        for batch in part._read_chosen(wanted, _PREFETCH_BYTES, sorted(columns_of(self.condition)), may_have):
            if expression is not None:
                batch = conform(_with_nulls(batch, full), full).filter(expression)
            if batch.num_rows:
                yield conform(_with_nulls(batch, target), target)


def _with_nulls(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Columns that this stream lacks and others that are read with it have."""
    for field in schema:
        if batch.schema.get_field_index(field.name) < 0:
            batch = batch.append_column(field, pa.nulls(batch.num_rows, field.type))
    return batch


def _joined(batches: Sequence[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    if batches:
        yield batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def _sliced(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    for start in range(0, batch.num_rows, _BATCH_ROWS):
        yield batch.slice(start, _BATCH_ROWS)


class BatchReader(RangeReader, DataSourceReader):
    """Reads what lies between two places, as of when it is planned."""

    def partitions(self) -> list[InputPartition]:
        options = self.options
        _, streams = open_streams(options)
        ranges = patiently(lambda: self._ranges(streams))
        return [RangesPartition(part) for part in divide(ranges, options.partition_bytes)]

    def _ranges(self, streams: Sequence[Stream]) -> list[SegmentRange]:
        options = self.options
        if options.ranges is not None:
            return [streams[0].range(*item) for item in options.ranges]
        return [part for stream in streams for part in stream.ranges(options.start, options.end, skip_truncated=options.skip_truncated)]


class FilteringReader(BatchReader):
    """Takes filters from Spark, where that is switched on."""

    def pushFilters(self, filters: list[Filter]) -> Iterator[Filter]:
        schema = to_arrow(self.schema)
        for spark_filter in filters:
            condition = from_spark_filter(spark_filter)
            try:
                if condition is None:
                    raise InvalidRequestError("left to Spark")
                make_expression(condition, schema)
            except InvalidRequestError:
                yield spark_filter
                continue
            self.condition = condition if self.condition is None else ("and", self.condition, condition)


class StreamReader(RangeReader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads micro-batches. Its offsets are cuts, as JSON with keys in order; the first batch's also has where the query began."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self._initial: Cut | None = None
        self._target: Cut | None = None
        self._hold = Hold(options)

    # Places.

    def _store(self) -> Store:
        return patiently(self.options.address.open)

    def _resolve(self, place: Any, default: str) -> Cut:
        store, streams = open_streams(self.options)
        place = default if place is None else place
        if place == "tail":
            return store.cut(*self.options.streams)
        if isinstance(place, Cut):
            return self._check(place)
        if isinstance(place, datetime) and place > datetime.now(UTC):
            raise InvalidRequestError(
                f"a query's start or end is a time that has passed, not {place.isoformat()}: what comes until then is not known"
            )
        found = [stream.head() if place == "head" else stream.cut_at(place) for stream in streams]
        return Cut(store.id, {name: part for cut in found for name, part in cut.streams.items()})

    def _check(self, cut: Cut) -> Cut:
        """Refuse a place of another store or of other streams."""
        store = self._store()
        if cut.store != store.id:
            raise InvalidRequestError(
                f"this query's checkpoint (or start) is of another store ({cut.store}) than {store.url} ({store.id}): "
                "give the store it was made with, or another checkpointLocation"
            )
        if set(cut.streams) != set(self.options.streams):
            raise InvalidRequestError(
                f"this query's checkpoint (or start) is of {', '.join(cut.streams)}, not of {', '.join(self.options.streams)}: "
                "read the streams it was made with, or give another checkpointLocation"
            )
        return cut

    def _parse(self, offset: dict[str, Any]) -> Cut:
        return self._check(Cut.parse(json.dumps(offset)))

    def initialOffset(self) -> dict[str, Any]:
        self._initial = patiently(lambda: self._resolve(self.options.start, "head"))
        return _offset(self._initial)

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = patiently(lambda: self._resolve(self.options.end, "tail"))

    def getDefaultReadLimit(self) -> ReadLimit:
        if self.options.max_events is not None:
            return ReadMaxRows(self.options.max_events)
        if self.options.max_bytes is not None:
            return ReadMaxBytes(self.options.max_bytes)
        return ReadAllAvailable()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        cut = self._parse(start)
        self._hold.move(cut)
        if self._target is None and self.options.end is not None:
            self._target = patiently(lambda: self._resolve(self.options.end, "tail"))
        max_events = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        max_bytes = limit.max_bytes if isinstance(limit, ReadMaxBytes) else None
        if isinstance(limit, ReadMaxRows) and limit == self.getDefaultReadLimit():
            max_bytes = self.options.max_bytes
        end = patiently(lambda: self._advance(cut, max_events, max_bytes))
        if isinstance(limit, ReadMinRows) and self._target is None and self._count(cut, end) < limit.min_rows:
            return start
        if end == cut:
            return start
        found = _offset(end)
        if cut == self._initial and "began" not in start:
            # Spark does not log where a query began, and asks again if it is killed in its first batch: by then the tail has moved.
            found["began"] = _offset(cut)
        return found

    def _advance(self, cut: Cut, max_events: int | None, max_bytes: int | None) -> Cut:
        try:
            return self._store().advance(
                cut,
                end=self._target,
                max_events=max_events,
                max_bytes=max_bytes,
                wait=0.0 if self._target is not None else _IDLE_SECONDS,
                skip_truncated=self.options.skip_truncated,
                piece_bytes=self.options.partition_bytes,
            )
        except TruncatedError as error:
            raise TruncatedError(f"{error.message}, with option('on_truncation', 'skip')", error.head) from None
        except RolledBackError as error:
            raise _with_way_out(error, cut) from None

    def _count(self, start: Cut, end: Cut) -> int:
        return sum(part.count for part in self._ranges(start, end))

    def reportLatestOffset(self) -> dict[str, Any] | None:
        return _offset(patiently(lambda: self._store().cut(*self.options.streams)))

    # A batch.

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        begun = self._parse(end.get("began", start))
        until = self._parse(end)
        # Here, since a batch that is repeated after a restart is planned without being looked for.
        self._hold.renew(begun)
        ranges = patiently(lambda: self._ranges(begun, until))
        return [RangesPartition(part) for part in divide(ranges, self.options.partition_bytes)]

    def _ranges(self, start: Cut, end: Cut) -> list[SegmentRange]:
        _, streams = open_streams(self.options)
        try:
            return [part for stream in streams for part in stream.ranges(start, end, skip_truncated=self.options.skip_truncated)]
        except RolledBackError as error:
            raise _with_way_out(error, start) from None

    def commit(self, end: dict[str, Any]) -> None:
        """A batch is done, and so is all before it: the group follows."""
        if self.options.group is not None:
            cut = self._parse(end)
            group = patiently(lambda: self._store().reader_group(self.options.group, list(self.options.streams)))  # type: ignore[arg-type]
            # The query holds what it reads, so it may be before a head that was moved meanwhile: then the group follows when it is past it.
            with suppress(TruncatedError):
                patiently(lambda: group.reset(cut))

    def stop(self) -> None:
        self._hold.release()


def _with_way_out(error: RolledBackError, start: Cut) -> RolledBackError:
    """The error of a query that was at `start`, with what continues it: Spark shows users the text of an error, not its cut."""
    assert error.cut is not None, "each such error has a cut"
    cut = Cut(start.store, {**start.streams, **error.cut.streams})
    return RolledBackError(f"{error.message}, with a new checkpointLocation and option('start', '{cut}')", error.cut)


def _offset(cut: Cut) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(str(cut))
    return found
