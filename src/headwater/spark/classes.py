"""Spark's classes as Java lays them out, kept in a file: a JVM that gets it starts in half the processor time.

`python -m headwater.spark.keep` makes the file, of 170 MB, in the user's cache, and sessions use it if it is there. Java takes none that
does not fit it or its jars, and makes none if it can't: then Spark starts as usual.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pyspark

from headwater.spark.java import find_java
from headwater.spark.scripts import cache_folder

_OPTIONS = "SPARK_SUBMIT_OPTS"


def kept_classes() -> Path:
    """The file: one for each Java and Spark, and where they are."""
    java = os.path.realpath(find_java() or "java")
    changed = os.stat(java).st_mtime_ns if os.path.exists(java) else 0
    place = f"{java} {changed} {pyspark.__file__} {pyspark.__version__}"
    return cache_folder() / f"spark-{hashlib.sha256(place.encode()).hexdigest()[:16]}.jsa"


def use_kept_classes() -> None:
    """For the JVM that this process is about to start. Where there is no file it is told nothing: it would do without Java's own, too."""
    path = kept_classes()
    if path.exists() and "Archive" not in os.environ.get(_OPTIONS, ""):
        tell_java(f'"-XX:SharedArchiveFile={path}" -Xshare:auto -Xlog:cds=off -Xlog:cds+dynamic=off')


def tell_java(options: str) -> None:
    """Beside what it is told already."""
    os.environ[_OPTIONS] = f"{os.environ.get(_OPTIONS, '')} {options}".strip()
