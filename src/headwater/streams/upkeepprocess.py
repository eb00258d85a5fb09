"""Upkeep in a process of its own, for those who ask for it: a child that ends with its parent, and is started again if it is killed."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Any, NamedTuple

from headwater.model.limits import UPKEEP_DELAY_SECONDS
from headwater.runtime.flag import Flag
from headwater.streams.upkeep import UpkeepReport

log = logging.getLogger("headwater.upkeep")

#: The child finds its modules where the parent does. Nothing secret is in its arguments, which every user of the host can list.
_CODE = (
    "import json, sys; given = json.loads(sys.stdin.buffer.readline()); sys.path[:] = given.pop('modules'); "
    "from headwater.upkeepchild import main; main(**given)"
)
#: Pauses before a child that ended is replaced: the first one, doubled with each child that does not live that long, and the longest.
_FIRST_SECONDS = 1.0
_LONGEST_SECONDS = 60.0
#: For a child to end its step when the store is closed. A killed step is done again by the next upkeep.
CLOSE_SECONDS = 10.0


class Address(NamedTuple):
    """What `hw.open` needs to open a store."""

    url: str
    catalog: str | None
    storage_options: dict[str, str] | None


class UpkeepProcess:
    """Keeps a child process that does a store's upkeep. The child's input is a pipe, which ends when this process does, however it ends.

    What the child reports is added to `totals`; the logger says each of its problems once.
    """

    def __init__(self, address: Address, totals: UpkeepReport) -> None:
        self._address = address
        self._totals = totals
        self._stop = Flag()
        self._child: subprocess.Popen[str] | None = None
        self._mutex = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="headwater-upkeep-process", daemon=True)

    def start(self) -> None:
        """Start the child after a while: a short command has none."""
        self._thread.start()

    def close(self) -> None:
        """End the child, whose step under way is finished or undone."""
        self._stop.set()
        with self._mutex:
            child = self._child
            if child is not None:
                _close_input(child)
        if child is not None:
            try:
                child.wait(CLOSE_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()
        self._thread.join(timeout=CLOSE_SECONDS)

    def forget(self) -> None:
        """In a forked process: the child is its parent's, and must see its input end when that parent dies."""
        child, self._child = self._child, None
        if child is not None:
            assert child.stdin is not None and child.stdout is not None
            # Not by closing the files: a thread of the parent, which is not here, may have had the lock of one.
            nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            os.dup2(nothing, child.stdin.fileno(), inheritable=False)
            os.dup2(nothing, child.stdout.fileno(), inheritable=False)
            os.close(nothing)
            # The fork never waits for it.
            child.returncode = 0

    def _run(self) -> None:
        pause = _FIRST_SECONDS
        wait = UPKEEP_DELAY_SECONDS
        while not self._stop.wait(wait):
            begun = time.monotonic()
            try:
                ended = self._run_child()
            except OSError as error:
                ended = f"could not be started: {error}"
            if self._stop.is_set:
                return
            pause = _FIRST_SECONDS if time.monotonic() - begun > _LONGEST_SECONDS else min(pause * 2, _LONGEST_SECONDS)
            wait = pause
            log.warning("the upkeep's process %s; another one starts in %g s", ended, wait)

    def _run_child(self) -> str:
        """Start a child and take its reports until it ended; says how it did."""
        with self._mutex:
            if self._stop.is_set:
                return "was not wanted any more"
            # The child has a session of its own: a Ctrl-C in the terminal goes to the parent, which decides about the child.
            child = self._child = subprocess.Popen(
                [sys.executable, "-c", _CODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
            )
        assert child.stdin is not None and child.stdout is not None
        try:
            child.stdin.write(json.dumps({"modules": [str(path) for path in sys.path], **self._address._asdict()}) + "\n")
            child.stdin.flush()
            for line in child.stdout:
                self._take(UpkeepReport(**json.loads(line)))
        except (OSError, ValueError):
            pass  # It was killed meanwhile, or `close` took its input away.
        finally:
            _close_input(child)
            code = child.wait()
            child.stdout.close()
        return f"ended with {code}"

    def _take(self, report: UpkeepReport) -> None:
        report.problems = tuple(report.problems)
        for problem in report.problems:
            if problem not in self._totals.problems:
                log.warning("%s", problem)
        self._totals.add(report)


def _close_input(child: subprocess.Popen[Any]) -> None:
    assert child.stdin is not None
    with suppress(OSError):  # It is gone.
        child.stdin.close()
