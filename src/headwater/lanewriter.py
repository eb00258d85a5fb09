"""What every writer is: a handle on a lane, which it flushes, closes, and warns about when it is forgotten."""

from __future__ import annotations

import warnings
from typing import Any, Self

from headwater.errors import HeadwaterError, InvalidRequestError, UnavailableError
from headwater.segments.flush import Flusher
from headwater.segments.lanes import Lane, StreamRef


class LaneWriter:
    """A context manager over a lane: leaving the block flushes."""

    def __init__(self, flusher: Flusher, stream: StreamRef, lane: Lane) -> None:
        self._flusher = flusher
        self._stream = stream
        self._lane = lane
        self._is_closed = False
        #: What ended it, once the caller was told.
        self._told: HeadwaterError | None = None

    @property
    def is_ours(self) -> bool:
        """False after an error that ended it, as in a forked child, where a named writer is still the parent's."""
        return self._lane.error is None

    def flush(self) -> None:
        """Return when everything given so far is durable; raise what went wrong.

        After UnavailableError all is still buffered, and the next flush sends it first, in order.
        """
        with self._lane.lock:
            run = self._lane.last_run
            error = self._lane.error if run is None else None
        if run is not None:
            if not run.ended:
                self._flusher.wait_for(run)
            error = run.error
        if error is not None:
            self._told = error
            raise error.again()

    def close(self) -> None:
        """Take no more, and flush. Closing again does nothing; after UnavailableError the writer is open, and closing it tries again."""
        if not self._is_closed:
            with self._lane.lock:
                # Before the flush: what another thread gives from here on is refused, and what it gave before is in the last run.
                self._is_closed = True
            told = self._told
            try:
                self.flush()
            except BaseException as error:
                # What another try can't mend ends the writer: nobody is told of it twice.
                self._is_closed = isinstance(error, HeadwaterError) and not isinstance(error, UnavailableError)
                if told is None or error is not told:
                    raise

    def _check_open(self) -> None:
        """Refuse to take more. For one who holds the lane's lock, so that no `close` comes in between."""
        if self._is_closed:
            raise InvalidRequestError("this writer is closed")
        if self._lane.error is not None:
            self._told = self._lane.error
            raise self._lane.error.again()

    def abandon(self) -> None:
        """Mark as closed without a flush: its store was closed, or the last flush failed for good."""
        self._is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self.close()
            return
        # The block's own error is the one to be seen; what was given before it is stored all the same.
        try:
            self.close()
        except HeadwaterError:
            self.abandon()

    def __del__(self) -> None:
        if not getattr(self, "_is_closed", True):
            warnings.warn(
                f"a writer of {self._stream.name} was abandoned: close it, or use it in a with block", ResourceWarning, stacklevel=2
            )
