"""Run the tests, those that fail once more by themselves, and say at the end which passed only then: `python -m tests.second_try OPTIONS`.

The options are pytest's, for the first try. The second try runs one test at a time: some measure time, on machines that others use too.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_PYTEST = [sys.executable, "-m", "pytest"]
#: Options about sharing the work between processes, each with a value.
_SHARING = ("-n", "--dist")


def run(options: Sequence[str], folder: Path) -> int:
    """Return the exit code: 0 if each test passed at least once."""
    first = subprocess.run([*_PYTEST, *options], cwd=folder).returncode
    failed = _last_failed(folder)
    if first != 1 or not failed:
        return first
    again = [*_alone(options), "--last-failed", "--last-failed-no-failures", "none"]
    second = subprocess.run([*_PYTEST, *again], cwd=folder).returncode
    passed = sorted(failed - _last_failed(folder))
    if passed:
        print(f"\npassed only on a second try: {len(passed)}", *passed, sep="\n  ", flush=True)
    return second


def _alone(options: Sequence[str]) -> list[str]:
    shared = {place + offset for place, option in enumerate(options) if option in _SHARING for offset in (0, 1)}
    return [option for place, option in enumerate(options) if place not in shared]


def _last_failed(folder: Path) -> set[str]:
    found = folder / ".pytest_cache" / "v" / "cache" / "lastfailed"
    return set(json.loads(found.read_text())) if found.exists() else set()


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:], Path.cwd()))
