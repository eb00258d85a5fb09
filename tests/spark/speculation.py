"""A program on a cluster of two real executors that races slow tasks: copies a stream whose first task is slow in its first attempt.

    python -m tests.spark.speculation STORE FOLDER

Each attempt leaves a file in the folder, whose name is its partition and attempt.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from pyspark import TaskContext
from pyspark.sql import functions

import headwater as hw
import headwater.spark
from tests.spark.pipelines import FAST, SINK, Lab, finish

RACING = {
    "spark__speculation": "true",
    "spark__speculation__interval": "200ms",
    "spark__speculation__multiplier": "1.2",
    "spark__speculation__quantile": "0.3",
    "spark__speculation__minTaskRuntime": "100ms",
    "spark__executor__memory": "1g",
}


def main(url: str, folder: str) -> None:
    spark = headwater.spark.session("racing", master="local-cluster[2,1,1024]", **FAST, **RACING)
    spark.sparkContext.setLogLevel("OFF")
    lab = Lab(spark, hw.open(url, create=False, upkeep=False), Path(folder))

    @functions.udf("long")
    def slowly(number: int) -> int:
        context = TaskContext.get()
        assert context is not None
        (Path(folder) / f"attempt-{context.partitionId()}-{context.attemptNumber()}").touch()
        if context.partitionId() == 0 and context.attemptNumber() == 0:
            time.sleep(0.1)
        return number

    rows = lab.source(partition_bytes=60_000).select(
        slowly("id").alias("id"), functions.expr("concat(name, repeat('.', 300)) AS name"), "_key"
    )
    finish(lab.sink(rows, stream=SINK))
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
