"""Starting in less time: workers that don't compile PySpark each time, and JVMs that find Spark's classes laid out."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from headwater.spark.classes import kept_classes, use_kept_classes
from headwater.spark.scripts import keep_script

#: Prints the memory map of a session's JVM, and counts something.
LOOK = """
import pathlib, headwater.spark
spark = headwater.spark.session()
print(pathlib.Path(f"/proc/{spark.sparkContext._gateway.proc.pid}/maps").read_text())
assert spark.range(5).count() == 5
"""


def where_pyspark_is(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    import pyspark

    for _ in batches:
        yield pa.record_batch({"file": [pyspark.__file__]})


def test_workers_import_pyspark_from_where_it_is_compiled(spark: SparkSession) -> None:
    (row,) = spark.range(1, numPartitions=1).mapInArrow(where_pyspark_is, "file string").collect()
    assert ".zip" not in row.file


def test_java_is_told_of_kept_classes_once_and_only_if_there_are_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("SPARK_SUBMIT_OPTS", "-Xmx1g")
    use_kept_classes()
    assert os.environ["SPARK_SUBMIT_OPTS"] == "-Xmx1g"
    kept_classes().parent.mkdir(parents=True)
    kept_classes().touch()
    for _ in range(2):
        use_kept_classes()
        assert os.environ["SPARK_SUBMIT_OPTS"].startswith(f'-Xmx1g "-XX:SharedArchiveFile={kept_classes()}"')
        assert os.environ["SPARK_SUBMIT_OPTS"].count("SharedArchiveFile") == 1


def test_a_script_is_kept_and_goes_elsewhere_where_it_can_not_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = keep_script("a/b", "#!/bin/sh\necho one\n")
    assert path == keep_script("a/b", "#!/bin/sh\necho one\n") == tmp_path / "headwater" / "a" / "b"
    assert subprocess.run([keep_script("a/b", "#!/bin/sh\necho two\n")], capture_output=True, text=True).stdout == "two\n"
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    assert subprocess.run([keep_script("a/b", "#!/bin/sh\necho three\n")], capture_output=True, text=True).stdout == "three\n"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_jvm_uses_the_classes_that_were_kept_and_does_without_a_damaged_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("SPARK_SUBMIT_OPTS", raising=False)
    kept = kept_classes()
    gone = kept.parent.with_name("spark-0")
    for folder, jars in ((gone, tmp_path / "nothing"), (kept.parent, tmp_path)):
        folder.mkdir(parents=True)
        (folder / "jars").symlink_to(jars)
        (folder / "classes.jsa.1").touch()
    subprocess.run([sys.executable, "-m", "headwater.spark.keep"], check=True)
    assert kept.exists() and sorted(path.name for path in kept.parent.iterdir()) == ["classes.jsa", "jars"]
    assert not gone.exists()
    assert str(kept) in subprocess.run([sys.executable, "-c", LOOK], check=True, capture_output=True, text=True).stdout
    kept.chmod(0o644)
    kept.write_bytes(b"no classes")
    assert str(kept) not in subprocess.run([sys.executable, "-c", LOOK], check=True, capture_output=True, text=True).stdout
