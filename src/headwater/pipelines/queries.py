"""The Spark query of an output: its DataFrame, its sink, and its start under the fence of the pipeline's register."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StructType

from headwater import InvalidRequestError, Store
from headwater.pipelines.definitions import describe, is_stateful
from headwater.pipelines.graph import Graph, Output
from headwater.pipelines.reads import MissingInputError, Read, place_options, source_columns
from headwater.pipelines.register import LIVE, Generation
from headwater.pipelines.sessions import PARTITIONS, setting
from headwater.spark import transaction
from headwater.spark.options import read_sink_options
from headwater.spark.rows import check_target

#: Two queries that start in one session in the same moment may break each other (Spark 4.3: OptionalDataException).
_STARTING_SECONDS = 10.0


@dataclass(frozen=True)
class Built:
    """An output's DataFrame, and what was found out while it was built."""

    df: DataFrame
    starts: list[list[str]]
    definition: dict[str, Any]


def build(
    spark: SparkSession,
    store: Store,
    graph: Graph,
    output: Output,
    *,
    starts: Sequence[Sequence[str]] = (),
    planned: Mapping[str, StructType] | None = None,
) -> Built:
    """Run an output's function. MissingInputError if it reads an output of the pipeline that does not exist yet and is not planned."""
    read = Read(spark, store, graph, output, starts=starts, planned=planned)
    df = output.function(read)
    if not isinstance(df, DataFrame):
        raise InvalidRequestError(f"the output {output.name!r} returns a {type(df).__name__}: return a DataFrame")
    if not df.isStreaming:
        raise InvalidRequestError(
            f"the output {output.name!r} reads no stream, so it would be filled once: read one with read.stream, or write the rows "
            "with df.write.format('headwater')"
        )
    for word, column in (("key", output.key), ("time", output.time)):
        if column is not None and column not in df.columns:
            raise InvalidRequestError(
                f"the output {output.name!r} has {word}={column!r}, and its rows have no such column: {', '.join(df.columns)}"
            )
    definition = describe(df, [name for name, _ in read.starts], read.code)
    _check_mode(output, df, definition)
    return Built(df, read.starts, definition)


def _check_mode(output: Output, df: DataFrame, definition: Mapping[str, Any]) -> None:
    """Refuse what Spark would refuse when the query starts."""
    if not is_stateful(definition) and output.partitions is not None:
        raise InvalidRequestError(
            f"the output {output.name!r} has partitions={output.partitions}, which divide state, and its query keeps none: leave it out"
        )
    jvm: Any = df.sparkSession._jvm
    modes = jvm.org.apache.spark.sql.streaming.OutputMode
    mode = modes.Update() if output.is_table else modes.Append()
    try:
        jvm.org.apache.spark.sql.catalyst.analysis.UnsupportedOperationChecker.checkForStreaming(df._jdf.queryExecution().analyzed(), mode)
    except Exception as error:
        if "AnalysisException" not in type(error).__name__:
            return  # Spark has no public call for this check: the query's start makes it again.
        reason = str(error).split("\n", 1)[0]
        hint = "" if output.is_table or output.watermark else " (an aggregation into a stream needs watermark=(column, delay))"
        raise InvalidRequestError(f"the output {output.name!r} can't run: {reason}{hint}") from None


def build_all(
    spark: SparkSession, store: Store, graph: Graph, generations: Mapping[str, Generation], make: Callable[[Output, Built], None] | None
) -> dict[str, Built]:
    """Build all outputs, each after those that it reads; `make` creates what is missing, and without it nothing is changed."""
    built: dict[str, Built] = {}
    planned: dict[str, StructType] = {}
    waiting = graph.in_order()
    while waiting:
        blocked: list[tuple[Output, str]] = []
        for output in waiting:
            known = generations.get(output.name)
            try:
                found = build(spark, store, graph, output, starts=known.starts if known else (), planned=planned)
            except MissingInputError as error:
                blocked.append((output, error.name))
                continue
            built[output.name] = found
            if make is not None:
                make(output, found)
            planned[output.target] = source_columns(found.df.schema)
        if len(blocked) == len(waiting):
            output, name = blocked[0]
            raise InvalidRequestError(
                f"pipeline {graph.pipeline}: {output.name!r} reads {name}, which does not exist, and what fills it reads "
                f"{output.name!r} in turn. Create {name} first, with store.create_stream and a schema"
            )
        waiting = [output for output, _ in blocked]
    return built


def sink_options(store: Store, output: Output) -> dict[str, str]:
    """The options of headwater's sink for an output."""
    found = {**place_options(store), "create": "true"}
    if output.is_table:
        return {**found, "table": output.target, "key": str(output.key)}
    given = {"stream": output.target, "key": output.key, "time": output.time, "segments": str(output.segments)}
    return found | {name: text for name, text in given.items() if text is not None}


def make_target(store: Store, output: Output, df: DataFrame) -> None:
    """Create the stream or table of an output if it is missing. InvalidRequestError if its rows don't fit what is there."""
    check_target(store, read_sink_options(sink_options(store, output)), df.schema)


def start_query(
    output: Output, built: Built, store: Store, checkpoint: Path, fence: tuple[str, int], partitions: int | None, *, until: str | None
) -> StreamingQuery:
    """Start an output's query. `fence` is the register's table and the version of its live entry, which each commit requires.

    `until` is None (forever), "caught_up" (all there is now) or "batch" (one batch: the last one, if that was not finished).
    """
    require = (fence[0], LIVE, fence[1])
    writer = built.df.writeStream.option("checkpointLocation", str(checkpoint))
    if output.is_table:
        writer = writer.outputMode("update").foreachBatch(_upsert(store, output, require))
    else:
        options = {**sink_options(store, output), "headwater.require": json.dumps(require)}
        writer = writer.outputMode("append").format("headwater").options(**options)
    if until == "caught_up":
        writer = writer.trigger(availableNow=True)
    elif until == "batch":
        writer = writer.trigger(once=True)
    elif output.trigger is not None:
        writer = writer.trigger(processingTime=output.trigger)
    with setting(built.df.sparkSession, PARTITIONS, str(partitions) if partitions is not None else None):
        query = writer.start()
        _wait_for_start(query)
    return query


def _upsert(store: Store, output: Output, require: tuple[str, str, int]) -> Callable[[DataFrame, int], None]:
    def write(df: DataFrame, batch: int) -> None:
        with transaction(df, batch, store, name=f"table {output.target}", require=require) as tx:
            tx.upsert(df, output.target, key=output.key)

    return write


def _wait_for_start(query: StreamingQuery) -> None:
    """Wait until a query has planned something, or has nothing to do."""
    deadline = time.monotonic() + _STARTING_SECONDS
    while query.isActive and query.lastProgress is None and time.monotonic() < deadline:
        if query.status["message"] in ("Waiting for data to arrive", "Waiting for next trigger"):
            return
        time.sleep(0.02)
