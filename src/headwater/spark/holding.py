"""A running query keeps what it still has to read, whatever is truncated meanwhile; a query that dies lets go by itself."""

from __future__ import annotations

import threading
import uuid
from contextlib import suppress
from typing import Any

from headwater import Cut, HeadwaterError
from headwater.spark.options import SourceOptions

_HELD_SECONDS = 90.0
_RENEWED_SECONDS = 5.0


class Hold:
    """Holds everything between a query's position and the tails: with each batch, and from a thread of the driver while that runs.

    What is appended later is held when the thread comes by, so it can be truncated before that.
    """

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._name = f"spark-{uuid.uuid4().hex}"
        self._cut: Cut | None = None
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()

    def __getstate__(self) -> dict[str, Any]:
        # The reader is pickled into tasks too, which hold nothing.
        return {"_options": self._options, "_name": self._name, "_cut": None, "_thread": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _ended=threading.Event())

    def renew(self, cut: Cut) -> None:
        """The query reads on from here: hold what there is, and let go of what lies before it."""
        self._cut = cut
        self._renew()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="headwater-hold", daemon=True)
            self._thread.start()

    def move(self, cut: Cut) -> None:
        """The query is here: what lies before it may go, when the hold is renewed."""
        if self._thread is None:
            self.renew(cut)
        self._cut = cut

    def _run(self) -> None:
        while not self._ended.wait(_RENEWED_SECONDS):
            self._renew()

    def _renew(self) -> None:
        # What is truncated already can't be held, and a store that is out of reach is asked again.
        with suppress(HeadwaterError):
            if self._cut is not None:
                store = self._options.address.open()
                store.hold(self._name, self._cut, store.cut(*self._options.streams), _HELD_SECONDS)

    def release(self) -> None:
        """The query ended."""
        self._ended.set()
        if self._thread is not None:
            with suppress(HeadwaterError):
                self._options.address.open().release(self._name)
