"""The pipeline of `make demo`, small: python sensors.py FOLDER

Files of sensor readings are ingested; Spark joins each reading with its sensor's site, and counts readings by site and minute of event
time, late ones too. Kill it at any time and run it again: every reading counts once. Needs `pip install 'headwater[spark]'`.
"""

import json
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

import headwater as hw
import headwater.spark
from headwater.ingest import ingest

SITES = {"a": "north", "b": "north", "c": "south"}
NOON = datetime(2031, 5, 1, 12, tzinfo=UTC)


def main() -> None:
    folder = Path(sys.argv[1])
    store, files = str(folder / "store"), folder / "files"
    write_files(files)
    with hw.open(store) as opened:
        report = ingest(opened, files, "demo/readings", key="sensor", time="at")
        print(f"{report.events} readings of {report.files} files stored, {report.files_before} files were stored before")
    spark = headwater.spark.session("sensors", spark__sql__session__timeZone="UTC", spark__sql__shuffle__partitions=1)

    sensors = spark.createDataFrame(list(SITES.items()), "sensor string, site string")
    run(read(spark, store, "demo/readings").join(f.broadcast(sensors), "sensor"), store, "demo/enriched", folder, key="sensor")

    readings = read(spark, store, "demo/enriched").withWatermark("at", "2 minutes")
    by_minute = readings.groupBy(f.window("at", "1 minute"), "site").agg(f.count("*").alias("readings"), f.avg("celsius").alias("celsius"))
    run(by_minute.select("site", f.col("window.start").alias("minute"), "readings", "celsius"), store, "demo/windows", folder, key="site")
    spark.stop()

    with hw.open(store) as opened:
        windows = [event.value for event in opened.stream("demo/windows").read()]
    for window in sorted(windows, key=lambda window: (window["minute"], window["site"]))[:4]:
        print(f"{window['minute']:%H:%M} {window['site']}: {window['readings']} readings, {window['celsius']:.1f} degrees")
    print(f"{sum(window['readings'] for window in windows)} readings in {len(windows)} windows; the last minutes are not over")


def write_files(files: Path) -> None:
    """Three files of ten minutes each. Every tenth reading is a minute late; the last file's are much later, and end all windows before."""
    files.mkdir(parents=True, exist_ok=True)
    for number in range(3):
        start = NOON + timedelta(minutes=number * 10 + (60 if number == 2 else 0))
        rows = [
            {"sensor": "abc"[n % 3], "celsius": 15 + n % 7, "at": str(start + timedelta(seconds=n * 2 - (60 if n % 10 == 9 else 0)))}
            for n in range(300)
        ]
        path = files / f"{number}.jsonl"
        if not path.exists():
            path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def read(spark: SparkSession, store: str, stream: str) -> DataFrame:
    return spark.readStream.format("headwater").options(store=store, stream=stream).load()


def run(rows: DataFrame, store: str, stream: str, folder: Path, **options: str) -> None:
    """Write all there is to a stream, each batch once."""
    kept = [column for column in rows.columns if not column.startswith("_")]
    query = (
        rows.select(kept)
        .writeStream.format("headwater")
        .options(store=store, stream=stream, create="true", checkpointLocation=str(folder / "checkpoints" / stream), **options)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


if __name__ == "__main__":
    main()
