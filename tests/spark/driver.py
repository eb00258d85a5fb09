"""A driver of its own process, to be killed: copies a stream and counts its events by name with state of its own, until it is told to end.

    python -m tests.spark.driver STORE FOLDER [end] [counts]

With "end" it processes what there is and ends; without, it goes on for ever. It counts with "counts" only.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

import headwater as hw
import headwater.spark
from tests.spark.pipelines import FAST, SINK, Lab, wait_for_batch

COUNTS = "t/counts"
ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"


class CountByName(StatefulProcessor):
    """For each name, how many there were so far."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._count = handle.getValueState("count", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        count = (self._count.get() or (0,))[0] + sum(1 for _ in rows)
        self._count.update((count,))
        yield Row(name=key[0], n=count)

    def close(self) -> None:
        pass


def main(url: str, folder: str, is_last: bool, counts: bool) -> None:
    spark = headwater.spark.session("driver", master="local[2,3]", **FAST, spark__sql__streaming__stateStore__providerClass=ROCKSDB)
    spark.sparkContext.setLogLevel("ERROR")
    lab = Lab(spark, hw.open(url, create=False, upkeep=False), Path(folder))
    source = lab.source(max_events_per_batch=500, partition_bytes=20_000)
    writers = [lab.sink(source, "copy", stream=SINK)]
    if counts:
        counted = source.groupBy("name").transformWithState(CountByName(), "name string, n long", "Update", "None")
        writers.append(lab.sink(counted, "count", table=COUNTS, key="name", create="true"))
    queries = []
    for writer in writers:
        queries.append((writer.trigger(availableNow=True) if is_last else writer).start())
        wait_for_batch(queries[-1])
    for query in queries:
        query.awaitTermination()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], "end" in sys.argv, "counts" in sys.argv)
