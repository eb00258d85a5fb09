"""Servers that the bench starts: on loopback, on a free port, and none left behind."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

LOOPBACK = "127.0.0.1"
_START_SECONDS = 120.0
_STOP_SECONDS = 20.0


def free_port() -> int:
    with socket.socket() as found:
        found.bind((LOOPBACK, 0))
        return int(found.getsockname()[1])


def listens(port: int) -> bool:
    try:
        with socket.create_connection((LOOPBACK, port), timeout=1):
            return True
    except OSError:
        return False


@contextmanager
def started_server(
    command: Sequence[str | Path], folder: Path, is_ready: Callable[[], bool], environment: Mapping[str, str] | None = None
) -> Iterator[int]:
    """Run a server with `folder` as its own until the end of the block; gives its process id. The folder goes with it."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "server.log", "wb") as log:
        process = subprocess.Popen(
            [str(word) for word in command],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
        )
    try:
        deadline = time.monotonic() + _START_SECONDS
        while not is_ready():
            if process.poll() is not None or time.monotonic() > deadline:
                state = "did not become ready" if process.returncode is None else f"ended with {process.returncode}"
                raise RuntimeError(f"{Path(command[0]).name} {state}:\n{_last_lines(folder / 'server.log')}")
            time.sleep(0.05)
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _last_lines(path: Path) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-15:])


def cpu_seconds(pids: Sequence[int]) -> float:
    """What these processes have used so far."""
    found = [psutil.Process(pid).cpu_times() for pid in pids]
    return float(sum(times.user + times.system for times in found))


def resident_mb(pids: Sequence[int]) -> float:
    return float(sum(psutil.Process(pid).memory_info().rss for pid in pids)) / 1e6


def java() -> str:
    found = shutil.which("java")
    if found is None:
        raise RuntimeError("Kafka and Pravega need Java 17 or newer on the PATH")
    return found


def version_of(program: Path, environment: Mapping[str, str] | None = None) -> str:
    """The number in what a program says of itself."""
    told = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60, env={**os.environ, **(environment or {})})
    match = re.search(r"\d+\.\d+\.\d+", told.stdout + told.stderr)
    return match[0] if match else "?"
