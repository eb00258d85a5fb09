"""`python -m headwater.spark.keep`: make the file of Spark's classes that `classes` tells of."""

from __future__ import annotations

import os
import shutil
import tempfile

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

import headwater as hw
from headwater.spark.classes import JARS, kept_classes, tell_java
from headwater.spark.scripts import cache_folder
from headwater.spark.session import session


def keep_classes() -> None:
    """Make the file, if there is none: from a JVM that ran queries, when it ends."""
    path = kept_classes()
    if path.exists():
        return
    for folder in cache_folder().glob("spark-*"):
        if (folder / "jars").is_symlink() and not (folder / "jars").exists():
            shutil.rmtree(folder, ignore_errors=True)  # That Spark is gone.
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.iterdir():
        left.unlink()
    (path.parent / "jars").symlink_to(JARS)
    # Half of a file would crash a JVM, so it has another name until it is whole.
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    tell_java(f'"-XX:ArchiveClassesAtExit={fresh}" -Xlog:disable -XX:TieredStopAtLevel=1')
    spark = session("headwater-classes", master="local[2]", spark__driver__memory="1g", spark__sql__shuffle__partitions=1)
    spark.sparkContext.setLogLevel("ERROR")
    with tempfile.TemporaryDirectory(prefix="headwater-classes-") as work:
        _run_queries(spark, work)
    jvm = spark.sparkContext._gateway.proc  # type: ignore[union-attr]
    spark.stop()
    jvm.stdin.close()
    jvm.wait()
    if fresh.exists():
        fresh.replace(path)


def _run_queries(spark: SparkSession, folder: str) -> None:
    """What most programs do: from stream to stream, with a join and windows, and a look at the result."""
    place = {"store": f"{folder}/store"}
    with hw.open(place["store"], upkeep=False) as store:
        stream = store.create_stream("a/in", schema=pa.schema([("id", pa.int64()), ("at", pa.timestamp("us", "UTC"))]))
        with stream.writer() as writer:
            writer.write_batch(pa.table({"id": range(100), "at": pa.array(range(100), pa.timestamp("us", "UTC"))}))
    names = spark.createDataFrame([(number, str(number)) for number in range(10)], "id long, name string")
    rows = spark.readStream.format("headwater").options(**place, stream="a/in").load().join(f.broadcast(names), "id")
    counted = rows.withWatermark("at", "1 minute").groupBy(f.window("at", "1 minute"), "name").agg(f.count("*").alias("n"))
    for name, df in (("rows", rows.select("id", "name")), ("counted", counted.select("name", "n"))):
        target = {**place, "stream": f"a/{name}", "create": "true", "checkpointLocation": f"{folder}/{name}"}
        df.writeStream.format("headwater").options(**target).trigger(availableNow=True).start().awaitTermination()
    spark.read.format("headwater").options(**place, stream="a/rows").load().groupBy("name").count().orderBy("name").collect()


if __name__ == "__main__":
    keep_classes()
