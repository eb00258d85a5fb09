"""Processes on this host: whether the one that ingested last still runs. A guess that decides whom to suspect, and nothing else."""

from __future__ import annotations

import os
import socket
from typing import NamedTuple


class Holder(NamedTuple):
    """A process, so that another one can tell whether it still runs."""

    host: str
    pid: int
    started: str

    @staticmethod
    def here() -> Holder:
        return Holder(_host(), os.getpid(), _started(os.getpid()) or "")

    @property
    def is_known_dead(self) -> bool:
        """It ran here, and does not any more. False also means: who knows."""
        return self.host == _host() and _started(self.pid) != self.started

    @property
    def is_known_alive(self) -> bool:
        return self.host == _host() and not self.is_known_dead

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host.split()[0]}"


def _host() -> str:
    """The host's name, with its boot and our view of its pids where the system tells: a container's pids are its own."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{socket.gethostname()} {file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _started(pid: int) -> str | None:
    """When a process began, in any words that are the same each time; None if there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name in parentheses may hold anything; what follows are numbers. A zombie waits for its parent, and does nothing.
            fields = file.read().rpartition(b")")[2].split()
            return None if fields[0] in (b"Z", b"X") else fields[19].decode()
    except FileNotFoundError:
        if os.path.exists("/proc/self/stat"):
            return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return "running"
