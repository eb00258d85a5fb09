"""Which files are to be stored, which were before, and which are no longer what was stored."""

from __future__ import annotations

import time
from collections.abc import Sequence

import headwater as hw
from headwater.ingest.record import Files, FileState
from headwater.ingest.sources import SourceFile, Stamp


class Todo:
    """What is left to do, round by round. `before` files were stored by earlier runs, `changed` ones are left alone."""

    def __init__(self, files: Files, skip_changed: bool, settle: float | None) -> None:
        self.files = files
        self.changed: set[str] = set()
        self._skip_changed = skip_changed
        self._settle = settle
        self._unchanged: dict[str, Stamp] = {}
        self._seen: dict[str, tuple[Stamp, float]] = {}
        self._done_here: set[str] = set()
        self.before = 0

    def reload(self) -> None:
        """Look again at what is stored: what this process believed was not."""
        self.files.load()

    def choose(self, files: Sequence[SourceFile]) -> list[tuple[SourceFile, FileState]]:
        """The files to store, each with how far it is. ConflictError for one that changed since it was stored."""
        chosen = []
        before = 0
        for file in files:
            try:
                stamp = file.stamp()
            except hw.UnavailableError:
                if self._settle is not None:
                    continue  # it left as it came
                raise
            state = self.files.find(file)
            if state is not None and self._is_changed(file, stamp, state):
                if not self._skip_changed:
                    raise changed(file, state, "after it was ingested")
                self.changed.add(file.path)
            elif state is None:
                if self._is_settled(file, stamp):
                    chosen.append((file, FileState(stamp, file.format)))
                    self._done_here.add(file.key)
            elif state.position is not None:
                if state.format != file.format:
                    raise hw.InvalidRequestError(f"{file.path} is stored in part, read as {state.format}: go on with that format")
                chosen.append((file, state._replace(stamp=stamp)))
                self._done_here.add(file.key)
            else:
                before += file.key not in self._done_here
        self.before = before
        return chosen

    def is_as_chosen(self, file: SourceFile, state: FileState) -> bool:
        """Whether a file is still what was chosen, now that it is its turn. If not, a watch looks at it again, others leave it alone."""
        try:
            stamp = file.stamp()
        except hw.UnavailableError:
            if self._settle is None:
                raise
            return False
        if stamp == state.stamp or (self._settle is None and not self._skip_changed):
            return True
        if self._settle is None:
            self.changed.add(file.path)
        self._done_here.discard(file.key)
        return False

    def _is_changed(self, file: SourceFile, stamp: Stamp, state: FileState) -> bool:
        if stamp in (state.stamp, self._unchanged.get(file.key)):
            return False
        # Copied or touched, it is still the same if its bytes are.
        if stamp.size != state.stamp.size or file.fingerprint() != state.fingerprint:
            return True
        self._unchanged[file.key] = stamp
        return False

    def _is_settled(self, file: SourceFile, stamp: Stamp) -> bool:
        """Whether nobody has written to a file for a while. Without a watch what is there is taken as it is."""
        if self._settle is None or time.time() - stamp.modified_ns / 1e9 >= self._settle:
            return True
        now = time.monotonic()
        seen, since = self._seen.get(file.key, (None, now))
        if seen != stamp:
            self._seen[file.key] = (stamp, now)
            return False
        return now - since >= self._settle


def changed(file: SourceFile, state: FileState, when: str) -> hw.ConflictError:
    """What to say of a file that is not what it was."""
    stored = f"{state.events:,} events of it are stored" if state.events else "nothing of it is stored"
    now = file.stamp()
    if now.size != state.stamp.size:
        what = f"it had {state.stamp.size:,} bytes and has {now.size:,}"
    else:
        what = "it has other bytes" if state.fingerprint is not None else "it was written to"
    return hw.ConflictError(
        f"{file.path} changed {when}: {what}; {stored}. New rows belong in a file of their own; --skip-changed leaves it alone",
        path=file.path,
    )
