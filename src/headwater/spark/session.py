"""Getting a Spark session that knows headwater, with Java found or brought along."""

from __future__ import annotations

import os
import sys
from typing import Any

from pyspark.sql import SparkSession

from headwater.spark.datasource import HeadwaterDataSource
from headwater.spark.java import java_home


def register(spark: SparkSession) -> SparkSession:
    """Make `format("headwater")` known to a session; returns it."""
    spark.dataSource.register(HeadwaterDataSource)
    return spark


def session(name: str = "headwater", master: str | None = None, **config: Any) -> SparkSession:
    """A session that knows headwater, on this machine unless `master` says where. `config` are Spark's settings, dots written as `__`.

    Where there is no Java 17 or newer, the one that came with `headwater[spark]` is used.
    """
    home = java_home()
    if home is not None:
        os.environ["JAVA_HOME"] = home
    # Workers must find the packages that this Python has.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(name)
    if master is not None or "SPARK_REMOTE" not in os.environ:
        builder = builder.master(master or "local[*]")
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": str(os.cpu_count() or 2),
        "spark.python.unix.domain.socket.enabled": "true",
    } | {key.replace("__", "."): str(value) for key, value in config.items()}
    for key, value in settings.items():
        builder = builder.config(key, value)
    return register(builder.getOrCreate())
