"""Getting a Spark session that knows headwater, with Java found or brought along."""

from __future__ import annotations

import hashlib
import os
import shlex
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pyspark
from pyspark.sql import SparkSession

from headwater.spark.classes import use_kept_classes
from headwater.spark.datasource import HeadwaterDataSource
from headwater.spark.java import java_home
from headwater.spark.scripts import keep_script
from headwater.spark.tables import TableDataSource

_PYTHON = """#!/bin/sh
# Spark's Python processes would import PySpark from a zip, and compile it each time: 1 s of processor time for each of them.
rest=
set -f
IFS=:
for folder in $PYTHONPATH; do
    case $folder in
        */pyspark.zip | */py4j-*.zip) ;;
        *) rest=$rest${{rest:+:}}$folder ;;
    esac
done
PYTHONPATH=$rest exec {python} "$@"
"""


def register(spark: SparkSession) -> SparkSession:
    """Make `format("headwater")` known to a session; returns it."""
    spark.dataSource.register(HeadwaterDataSource)
    spark.dataSource.register(TableDataSource)
    return spark


def session(name: str = "headwater", master: str | None = None, **config: Any) -> SparkSession:
    """A session that knows headwater, on this machine unless `master` says where. `config` are Spark's settings, dots written as `__`.

    Where there is no Java 17 or newer, the one that came with `headwater[spark]` is used. `python -m headwater.spark.keep` makes
    later sessions start in less time.
    """
    home = java_home()
    if home is not None:
        os.environ["JAVA_HOME"] = home
    use_kept_classes()
    builder = SparkSession.builder.appName(name)
    if master is None and "SPARK_REMOTE" not in os.environ:
        master = "local[*]"
    if master is not None:
        builder = builder.master(master)
    # Workers must find the packages that this Python has.
    os.environ.setdefault("PYSPARK_PYTHON", _local_python() if (master or "").startswith("local") else sys.executable)
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": str(os.cpu_count() or 2),
        "spark.python.unix.domain.socket.enabled": "true",
    } | {key.replace("__", "."): str(value) for key, value in config.items()}
    for key, value in settings.items():
        builder = builder.config(key, value)
    return register(builder.getOrCreate())


def _local_python() -> str:
    """This Python, for Spark's own processes on this machine."""
    if Path(pyspark.__file__).parents[1] not in (Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("platlib"))):
        return sys.executable  # It may be in that zip only.
    name = hashlib.sha256(sys.executable.encode()).hexdigest()[:16]
    return str(keep_script(f"python-{name}/python", _PYTHON.format(python=shlex.quote(sys.executable))))
