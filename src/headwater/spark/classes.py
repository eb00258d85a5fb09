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
JARS = Path(pyspark.__file__).parent / "jars"


def kept_classes() -> Path:
    """The file: one for each Java and each Spark, as they are now where they are."""
    places = [os.path.realpath(find_java() or "java"), str(JARS)]
    found = [(place, os.stat(place).st_mtime_ns) for place in places if os.path.exists(place)]
    return cache_folder() / f"spark-{hashlib.sha256(repr(found).encode()).hexdigest()[:16]}" / "classes.jsa"


def use_kept_classes() -> None:
    """For the JVM that this process is about to start. Where there is no file it is told nothing: it would do without Java's own, too."""
    path = kept_classes()
    if path.exists() and "Archive" not in os.environ.get(_OPTIONS, ""):
        tell_java(f'"-XX:SharedArchiveFile={path}" -Xshare:auto')


def tell_java(options: str) -> None:
    """Beside what it is told already."""
    os.environ[_OPTIONS] = f"{os.environ.get(_OPTIONS, '')} {options}".strip()
