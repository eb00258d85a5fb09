"""The Spark pipeline that the demo kills: `python -m headwater.demo.pipeline STORE CHECKPOINTS [standby]`.

Two steps, from stream to stream: each reading gets its site and whether it is hot (a join), then readings are counted by site and minute of
event time, late ones too. Started again, it goes on from its checkpoints; headwater's sink stores each batch once. That is all of it.
A standby is a driver that is up, and begins when it gets a line: a JVM takes longer to start than these queries to recover.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headwater.demo.files import LIMITS, SENSORS, WATERMARK_SECONDS, WINDOW_SECONDS
from headwater.demo.orphans import end_with_parent

READINGS, ENRICHED, WINDOWS = "demo/readings", "demo/enriched", "demo/windows"
#: A small session that is there soon: this is a demo, not a cluster.
_QUICK = {
    "spark__driver__extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
    "spark__driver__memory": "1g",
    "spark__sql__shuffle__partitions": 1,
}


def start(spark: Any, store: str, checkpoints: Path, wait: Callable[[], object]) -> None:
    """Prepare both steps, then `wait`, then start them."""
    from pyspark.sql import functions as f  # an extra, which only this part of the demo needs

    def read(stream: str) -> Any:
        return spark.readStream.format("headwater").options(store=store, stream=stream).load()

    def write(rows: Any, stream: str, **options: str) -> Any:
        writer = rows.writeStream.format("headwater").queryName(stream.replace("/", "_"))
        return writer.options(store=store, stream=stream, checkpointLocation=str(checkpoints / stream), create="true", **options).start()

    sensors = spark.createDataFrame(
        [(sensor, site, LIMITS[site]) for sensor, site in SENSORS.items()], "sensor string, site string, limit double"
    )
    joined = read(READINGS).join(f.broadcast(sensors), "sensor")
    enriched = joined.select("sensor", "reading", "celsius", "at", "site", (f.col("celsius") > f.col("limit")).alias("hot"))
    minutes = f.window("at", f"{WINDOW_SECONDS} seconds")
    by_minute = read(ENRICHED).withWatermark("at", f"{WATERMARK_SECONDS} seconds").groupBy(minutes, "site")
    windows = by_minute.agg(
        f.count("*").alias("readings"), f.sum(f.col("hot").cast("long")).alias("hot"), f.avg("celsius").alias("celsius")
    )
    counted = windows.select("site", f.col("window.start").alias("minute"), "readings", "hot", "celsius")
    wait()
    write(enriched, ENRICHED, key="sensor", time="at")
    write(counted, WINDOWS, key="site", time="minute")


def main() -> None:
    told = end_with_parent()
    store, checkpoints, *is_standby = sys.argv[1:]
    import headwater.spark

    spark = headwater.spark.session("headwater-demo", master="local[2]", spark__sql__session__timeZone="UTC", **_QUICK)
    spark.sparkContext.setLogLevel("ERROR")
    start(spark, store, Path(checkpoints), told.wait if is_standby else lambda: None)
    spark.streams.awaitAnyTermination()


if __name__ == "__main__":
    main()
