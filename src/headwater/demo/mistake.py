"""A mistake and the way back: a savepoint, a wrong version of the pipeline, its wrong counts, and the restore to the savepoint.

All of it happens while files arrive and the ingester is killed. The savepoint is asked for by this process, and taken by the one that runs
the pipeline. The counts are checked against the files, with plain Python.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import headwater as hw
from headwater.demo.pipeline import ENRICHED, RIGHT, WINDOWS, WRONG, declare, is_counting
from headwater.demo.proof import WindowCounts

SAVED, DEPLOYED, RESTORED = "●", "!", "↩"
SAVEPOINT = f"before-{WRONG}"
_LOOK_SECONDS = 0.2


class Mistake:
    """Runs in a thread of the demo. `tell` sends a line to the process that runs the pipeline, `note` adds a mark and a line of news."""

    def __init__(
        self,
        store: hw.Store,
        checkpoints: Path,
        arrived: Sequence[Path],
        tell: Callable[[str], None],
        note: Callable[[str, str], None],
    ) -> None:
        self._store = store
        self._pipeline = declare(store, checkpoints)
        self._arrived = arrived
        self._tell = tell
        self._note = note
        self._counts = WindowCounts()
        self._error: BaseException | None = None
        self._ended = threading.Event()
        #: Whether the wrong version runs, so that the other files may come.
        self.is_deployed = False
        #: How many windows the wrong version stored that the files disprove.
        self.wrong = 0
        self._thread = threading.Thread(target=self._run, name="headwater-demo-mistake", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether the pipeline was restored. Raises what kept it from that."""
        if self._error is not None:
            raise self._error
        return not self._thread.is_alive()

    def end(self) -> None:
        """Wait for nothing more: the demo ends."""
        self._ended.set()

    def _run(self) -> None:
        try:
            if self._wait(lambda: is_counting(self._pipeline)):
                self._make()
                if self._wait(self._has_wrong_windows):
                    self._restore()
        except BaseException as error:
            self._error = error

    def _wait(self, condition: Callable[[], bool]) -> bool:
        """Wait until something is so; False if the demo ends."""
        while not condition():
            if self._ended.wait(_LOOK_SECONDS):
                return False
        return True

    def _make(self) -> None:
        begun = time.monotonic()
        taken = self._pipeline.savepoint(SAVEPOINT)
        self._note(SAVED, f"savepoint: {taken.name}, taken in {time.monotonic() - begun:.1f} s while the pipeline runs")
        self._tell(f"deploy {WRONG}")
        self._note(DEPLOYED, f"deploy: {WRONG} of the pipeline leaves readings of broken sensors out, and its limit is wrong")
        self.is_deployed = True

    def _has_wrong_windows(self) -> bool:
        with suppress(hw.NotFoundError):  # No window was stored yet.
            rows = [event.value for event in self._store.stream(WINDOWS).read()]
            self._counts.add(self._arrived)
            self.wrong = sum(not self._counts.agree(row) for row in rows)
        return self.wrong > 0

    def _restore(self) -> None:
        self._note(DEPLOYED, f"noticed: {self.wrong:,} windows count fewer readings than the files have")
        begun = time.monotonic()
        streams = [self._store.stream(name) for name in (ENRICHED, WINDOWS)]
        generation = self._generation()
        self._tell(f"restore {RIGHT} {SAVEPOINT}")
        if not self._wait(lambda: self._generation() not in (None, generation)):
            return
        seconds = time.monotonic() - begun
        kept = [sum(part.count for part in stream.ranges()) for stream in streams]
        self._note(
            RESTORED,
            f"restore: {SAVEPOINT}, in {seconds:.1f} s: {kept[0]:,} readings and {kept[1]:,} windows stay, the rest is done again by "
            f"{RIGHT}",
        )

    def _generation(self) -> int | None:
        found = self._pipeline.status()["windows"]["generation"]
        return int(found) if found is not None else None
