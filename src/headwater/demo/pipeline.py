"""The Spark pipeline of the demo, and a process that runs it: `python -m headwater.demo.pipeline STORE CHECKPOINTS`.

Two outputs: each reading gets its site and whether it is hot (a join), then readings are counted by site and minute of event time, late
readings too. Two such processes are started: one runs the pipeline, the other waits with a warm session, as a JVM takes longer to start
than the queries take to recover. A line `deploy VERSION` ends the run and starts that version; `restore VERSION SAVEPOINT` goes back first.
"""

from __future__ import annotations

import queue
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.demo.files import LIMITS, SENSORS, WATERMARK_SECONDS, WINDOW_SECONDS
from headwater.demo.orphans import end_with_parent

if TYPE_CHECKING:
    from headwater import Store
    from headwater.pipelines import Pipeline

READINGS, ENRICHED, WINDOWS = "demo/readings", "demo/enriched", "demo/windows"
RIGHT, WRONG = "v1", "v2"
#: Version 2 shall leave readings of broken sensors out. The limit was to be 80 degrees, and half of all readings are above 19.
FAULTY_CELSIUS = {WRONG: 19.0}
#: A small session that is there soon: this is a demo, not a cluster.
_QUICK = {
    "spark__driver__extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
    "spark__driver__memory": "1g",
    "spark__sql__shuffle__partitions": 1,
}
_LOOK_SECONDS = 0.2


def declare(store: Store | str, checkpoints: Path, version: str = RIGHT, spark: Any = None) -> Pipeline:
    """The pipeline in one of its versions. Without a session it can be looked at and asked for savepoints."""
    from pyspark.sql import functions as f  # an extra, which only this part of the demo needs

    from headwater.pipelines import Pipeline

    pipeline = Pipeline("demo", store, checkpoints, spark)

    @pipeline.stream(ENRICHED, key="sensor", time="at")
    def enriched(read: Any) -> Any:
        rows = [(sensor, site, LIMITS[site]) for sensor, site in SENSORS.items()]
        sensors = read.spark.createDataFrame(rows, "sensor string, site string, limit double")
        joined = read.stream(READINGS).join(f.broadcast(sensors), "sensor")
        return joined.select("sensor", "reading", "celsius", "at", "site", (f.col("celsius") > f.col("limit")).alias("hot"))

    @pipeline.stream(WINDOWS, key="site", time="minute", watermark=("at", f"{WATERMARK_SECONDS} seconds"))
    def windows(read: Any) -> Any:
        readings = read.stream(ENRICHED)
        if version in FAULTY_CELSIUS:
            readings = readings.where(f.col("celsius") <= FAULTY_CELSIUS[version])
        by_minute = readings.groupBy(f.window("at", f"{WINDOW_SECONDS} seconds"), "site")
        found = by_minute.agg(
            f.count("*").alias("readings"), f.sum(f.col("hot").cast("long")).alias("hot"), f.avg("celsius").alias("celsius")
        )
        return found.select("site", f.col("window.start").alias("minute"), "readings", "hot", "celsius")

    return pipeline


def find_owner(store: Store) -> int | None:
    """The process that runs the pipeline."""
    from headwater.pipelines.register import Register

    live = Register(store, "demo").find_live()
    return live.owner.pid if live is not None and live.owner is not None else None


def is_counting(pipeline: Pipeline) -> bool:
    """Whether somebody runs the pipeline, and it has state: readings that are counted in windows."""
    from headwater.pipelines.checkpoints import last_batch

    found = pipeline.status()["windows"]
    return found["state"] == "running" and last_batch(pipeline._folders.generation("windows", found["generation"]), "commits") >= 0


def main() -> None:
    lines = end_with_parent()
    store, checkpoints = sys.argv[1], Path(sys.argv[2])
    import headwater.spark
    from headwater.pipelines.sessions import SETTINGS

    settings = {**_QUICK, **{name.replace(".", "__"): value for name, value in SETTINGS.items()}}
    spark = headwater.spark.session("headwater-demo", master="local[2]", spark__sql__session__timeZone="UTC", **settings)
    spark.sparkContext.setLogLevel("ERROR")
    run = declare(store, checkpoints, RIGHT, spark).start(standby=True)
    while True:
        try:
            command, version, *savepoint = lines.get(timeout=_LOOK_SECONDS).split()
        except queue.Empty:
            run.wait(timeout=0.0)  # It raises what the run ended with.
            continue
        run.stop()
        pipeline = declare(store, checkpoints, version, spark)
        if command == "restore":
            pipeline.restore(savepoint[0])
        run = pipeline.start()


if __name__ == "__main__":
    main()
