"""The demo's files arrive over time, each whole at once."""

from __future__ import annotations

import os
from pathlib import Path


class Delivery:
    """Moves files into a folder at a rate."""

    def __init__(self, waiting: list[Path], folder: Path, files_per_second: float) -> None:
        self.arrived: list[Path] = []
        self._waiting = waiting
        self._folder = folder
        self._seconds = 1 / files_per_second
        self._next_at = 0.0
        folder.mkdir()

    def deliver(self, now: float, *, most: int) -> None:
        """Move what is due, up to so many files in all."""
        while self._waiting and self._next_at <= now:
            if len(self.arrived) >= most:
                self._next_at = now
                return
            path = self._waiting.pop(0)
            os.rename(path, self._folder / path.name)
            self.arrived.append(self._folder / path.name)
            self._next_at += self._seconds
            if not self._waiting:
                path.parent.rmdir()
