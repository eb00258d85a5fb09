"""Deleted events: a journal keeps them, and its readers leave them out. What is deleted is looked up once, and then only what is new."""

from __future__ import annotations

import threading

from headwater.catalog import entities
from headwater.catalog.entities import Hidden
from headwater.segments.engine import Engine


class HiddenEvents:
    """The entities of one journal that have deleted events, as of the last `refresh`."""

    def __init__(self, engine: Engine, stream: int) -> None:
        self._engine = engine
        self._stream = stream
        self._lock = threading.Lock()
        self._last = 0
        self._found: dict[str, Hidden] = {}

    def refresh(self) -> None:
        """Learn of the deletions that were committed before this call."""
        with self._lock:
            for row in self._engine.run(entities.list_hidden, self._stream, self._last):
                self._found[row.id] = row
                self._last = row.deletion

    def __bool__(self) -> bool:
        return bool(self._found)

    def low(self, id: str) -> int:
        """The first sequence of an entity that is not deleted."""
        found = self._found.get(id)
        return found.low if found is not None else 1

    def first(self, id: str) -> int:
        """The sequence of an entity's first event since it was last deleted as a whole."""
        found = self._found.get(id)
        return max(found.deleted, 1) if found is not None else 1
