"""The demo's processes: started, killed with all their children, started again, and never left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import headwater as hw


def module_command(module: str, *arguments: str) -> list[str]:
    """How to run a module of the demo."""
    return [sys.executable, "-m", f"headwater.demo.{module}", *arguments]


class DemoProcess:
    """One process at a time of a kind. What it says goes to `log`, or is to be read with `lines`. Leaving the block kills it."""

    def __init__(self, name: str, command: list[str], log: Path | None) -> None:
        self._name = name
        self._command = command
        self._log = log
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> DemoProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self.kill()

    def start(self) -> None:
        # A session of its own: Ctrl-C is for us to handle, and its children end with it.
        with contextlib.ExitStack() as stack:
            out: Any = stack.enter_context(self._log.open("a", encoding="utf-8")) if self._log is not None else subprocess.PIPE
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT if self._log is not None else None,
                text=True,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._running.pid

    def tell(self, line: str) -> None:
        """Send the process a line."""
        assert self._running.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `check` says that it ended.
            self._running.stdin.write(f"{line}\n")
            self._running.stdin.flush()

    def kill(self) -> int:
        """SIGKILL to it and to all that it started; returns its id."""
        process = self._running
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        return process.pid

    def stop(self) -> None:
        """Tell it to end, and wait."""
        self._running.send_signal(signal.SIGTERM)
        self.wait(60.0)

    def wait(self, seconds: float) -> None:
        try:
            self._running.wait(seconds)
        except subprocess.TimeoutExpired as error:
            raise hw.UnavailableError(f"{self._name} does not end") from error

    def check(self) -> None:
        """Raise if it ended although nobody ended it."""
        code = self._running.poll()
        if code is not None:
            said = self._log.read_text(encoding="utf-8", errors="replace")[-500:] if self._log is not None else ""
            raise hw.HeadwaterError(f"{self._name} ended with {code}: {said}")

    def lines(self) -> Iterator[str]:
        """What it says, until it ends."""
        out = self._running.stdout
        assert out is not None
        with contextlib.suppress(ValueError):  # closed by a kill
            yield from out

    @property
    def _running(self) -> subprocess.Popen[str]:
        assert self._process is not None, "it was started"
        return self._process
