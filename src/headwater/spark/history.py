"""History at the JVM's speed: long-term chunks are Parquet, which Spark reads by itself, and the rest comes from the source."""

from __future__ import annotations

import json
import os
import re
import uuid
from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime
from functools import reduce
from typing import Any, NamedTuple
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.types as pt
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import LongType, StructField, StructType

from headwater import ChunkRange, Cut, SegmentRange, Store, Stream
from headwater.spark.addresses import StoreAddress, address_of
from headwater.spark.options import read_source_options
from headwater.spark.source import source_schema

#: How long the files of a table stay as they are.
_HELD_SECONDS = 6 * 3600.0
Place = Cut | datetime | str | None


def table(
    spark: SparkSession,
    store: Store | str | os.PathLike[str],
    stream: str,
    start: Place = None,
    end: Place = None,
    *,
    hold: float = _HELD_SECONDS,
) -> DataFrame:
    """A DataFrame of what lies between two places: Parquet files by Spark's own reader, and what is not in any yet by the source.

    It has the columns of `spark.read.format("headwater")`. What it reads is settled now, and kept for `hold` seconds.
    """
    address = address_of(store)
    opened = address.open()
    source = opened.stream(stream)
    until = _cut(source, "tail" if end is None else end)
    # The head is left to what reads: up to a tagged cut it is where that was tagged.
    begun = _cut(source, start) if start not in (None, "head") else None
    opened.hold(f"spark-table-{uuid.uuid4().hex}", begun, until, hold)
    ranges = source.ranges(begun, until)
    chunks = source.chunks(begun, until) if _is_native(source.schema) else []
    options = {"store": address.url, "catalog": address.catalog or "", "stream": stream, **_storage(address)}
    schema = source_schema(read_source_options(options))
    parts = _read_files(spark, chunks, stream, schema)
    rest = _without(ranges, chunks)
    if rest or not parts:
        parts.append(spark.read.format("headwater").options(**options, **{"headwater.ranges": json.dumps(rest)}).load())
    return reduce(DataFrame.unionByName, parts)


def _read_files(spark: SparkSession, chunks: Sequence[ChunkRange], stream: str, schema: StructType) -> list[DataFrame]:
    """Files by Spark's own reader. None knows its segment, but its folder does: that is a partition, as Spark calls it."""
    tables: dict[str, list[ChunkRange]] = defaultdict(list)
    others: dict[int, list[ChunkRange]] = defaultdict(list)
    is_taken = any(name.lower() == "segment" for name in schema.names)
    for chunk in chunks:
        if chunk.is_whole and not is_taken:
            # A fork has its parent's folders too.
            tables[chunk.url.rpartition("/segment=")[0]].append(chunk)
        else:
            others[chunk.segment].append(chunk)
    found = [_read_table(spark, table, some, stream, schema) for table, some in sorted(tables.items())]
    return found + [_read_segment(spark, some, stream, schema) for _, some in sorted(others.items())]


def _read_table(spark: SparkSession, table: str, chunks: Sequence[ChunkRange], stream: str, schema: StructType) -> DataFrame:
    own = StructType([*_stored(schema), StructField("segment", LongType())])
    files = spark.read.schema(own).option("basePath", _path(table)).parquet(*(_literally(_path(chunk.url)) for chunk in chunks))
    return _with_names(files, stream, "segment", schema)


def _read_segment(spark: SparkSession, chunks: Sequence[ChunkRange], stream: str, schema: StructType) -> DataFrame:
    files = spark.read.schema(_stored(schema)).parquet(*(_literally(_path(chunk.url)) for chunk in chunks))
    if not all(chunk.is_whole for chunk in chunks):
        files = files.where(f"_number >= {min(chunk.start for chunk in chunks)} AND _number < {max(chunk.end for chunk in chunks)}")
    return _with_names(files, stream, f"{chunks[0].segment}L", schema)


def _stored(schema: StructType) -> StructType:
    return StructType([field for field in schema if field.name not in ("_stream", "_segment")])


def _with_names(files: DataFrame, stream: str, segment: str, schema: StructType) -> DataFrame:
    added = {"_stream": f"'{stream}' AS _stream", "_segment": f"{segment} AS _segment"}
    return files.selectExpr(*(added.get(name, "`" + name.replace("`", "``") + "`") for name in schema.names))


def _path(url: str) -> str:
    """The URL of a file as Hadoop has it: nothing in it is quoted."""
    return unquote(url) if url.startswith("file://") else url


def _literally(path: str) -> str:
    r"""The path with what Hadoop takes for a pattern escaped."""
    return re.sub(r"([\\{}\[\]*?])", r"\\\1", path)


class Compaction(NamedTuple):
    """What `compact` did: Parquet files that were made, and what went into them."""

    chunks: int
    events: int
    bytes: int


def compact(spark: SparkSession, store: Store | str | os.PathLike[str], stream: str) -> Compaction:
    """Move what a stream has in small blocks into large Parquet files, one task of the cluster for each.

    Upkeep does the same by itself, in one process. A task may fail or run twice; what it read stays readable throughout.
    """
    done = Compaction(0, 0, 0)
    context = spark.sparkContext
    with address_of(store).open().tiering(stream) as tiering:
        # As many as run at once: what was done before a failure stays done.
        for first in range(0, len(tiering.jobs), context.defaultParallelism):
            jobs = tiering.jobs[first : first + context.defaultParallelism]
            for made in context.parallelize(jobs, len(jobs)).map(_run_job).collect():
                moved = tiering.finish(made)
                if moved is not None:
                    done = Compaction(done.chunks + 1, done.events + moved.events, done.bytes + moved.stored_bytes)
    return done


def _run_job(job: Any) -> Any:
    return job.run()


def _cut(stream: Stream, place: Cut | datetime | str) -> Cut:
    if isinstance(place, datetime):
        return stream.cut_at(place)
    if place in ("head", "tail"):
        return stream.head() if place == "head" else stream.tail()
    cut = place if isinstance(place, Cut) else Cut.parse(place)
    # Of several streams it is as good as one of this alone.
    part = cut.streams.get(stream.name)
    return cut if part is None else Cut(cut.store, {stream.name: part})


def _storage(address: StoreAddress) -> dict[str, str]:
    return {f"storage.{name}": text for name, text in address.storage_options}


def _without(ranges: Sequence[SegmentRange], chunks: Sequence[ChunkRange]) -> list[tuple[int, int, int]]:
    """(segment, start, end) of what is in no file: in each segment it lies behind the files."""
    ends: dict[int, int] = {}
    for chunk in chunks:
        ends[chunk.segment] = max(ends.get(chunk.segment, 0), chunk.end)
    rest = [(part.segment, max(part.start, ends.get(part.segment, 0)), part.end) for part in ranges]
    return [part for part in rest if part[1] < part[2]]


def _is_native(schema: pa.Schema) -> bool:
    """Whether Spark's Parquet reader gives these types as the source does."""

    def fits(kind: pa.DataType) -> bool:
        if pt.is_struct(kind):
            return all(fits(field.type) for field in kind)
        if pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind):
            return fits(kind.value_type)
        if pt.is_map(kind):
            return fits(kind.key_type) and fits(kind.item_type)
        return not (pt.is_time(kind) or pt.is_duration(kind) or pt.is_float16(kind) or (pt.is_timestamp(kind) and kind.unit == "ns"))

    return all(fits(field.type) for field in schema)
