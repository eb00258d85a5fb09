"""Where ingestion's tasks run: on Spark, each file a task."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import click
import pyarrow as pa

import headwater as hw


def spark_spread(master: str | None) -> Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]]:
    """What calls a function for each item as a task of Spark. The session begins here: it takes some seconds."""
    try:
        import headwater.spark
    except ImportError as error:
        raise click.UsageError(str(error), click.get_current_context()) from error
    from pyspark.errors import PySparkException

    spark = headwater.spark.session("headwater-ingest", master)

    def spread(function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                for index in batch.column(0).to_pylist():
                    result = pickle.dumps(function(items[index]))
                    yield pa.RecordBatch.from_pydict({"item": pa.array([index], pa.int64()), "result": pa.array([result], pa.binary())})

        try:
            rows = spark.range(0, len(items), 1, len(items)).mapInArrow(work, "item long, result binary").collect()
        except PySparkException as error:
            raise hw.UnavailableError(f"Spark could not do it: {str(error).strip().splitlines()[-1]}") from error
        return [pickle.loads(row["result"]) for row in sorted(rows, key=lambda row: int(row["item"]))]

    return spread
