"""A program on a cluster of two real executors, one of which is killed while its task stages: copies a stream.

    python -m tests.spark.executors STORE FOLDER

Each attempt of a task leaves a file in the folder, whose name is its partition and attempt.
"""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
from pyspark import TaskContext
from pyspark.sql import functions

import headwater as hw
import headwater.spark
from tests.spark.pipelines import FAST, SINK, Lab, finish


def main(url: str, folder: str) -> None:
    spark = headwater.spark.session("cluster", master="local-cluster[2,1,1024]", **FAST, spark__executor__memory="1g")
    spark.sparkContext.setLogLevel("OFF")
    lab = Lab(spark, hw.open(url, create=False, upkeep=False), Path(folder))

    @functions.udf("long")
    def deadly(number: int) -> int:
        context = TaskContext.get()
        assert context is not None
        (Path(folder) / f"attempt-{context.partitionId()}-{context.attemptNumber()}").touch()
        if context.partitionId() == 0 and context.attemptNumber() == 0 and number > 3000:
            # The executor, and not this worker: that finds out, or goes on for a while.
            next(parent for parent in psutil.Process().parents() if "java" in parent.name()).kill()
        return number

    rows = lab.source(partition_bytes=60_000).select(
        deadly("id").alias("id"), functions.expr("concat(name, repeat('.', 300)) AS name"), "_key"
    )
    finish(lab.sink(rows, stream=SINK))
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
