"""The seam to SQL: one set of statements, run on SQLite or PostgreSQL.

Statements are written once, with `?` for values and `FOR UPDATE` where PostgreSQL must lock; SQLite holds one lock for the whole
transaction and drops those words. `now_us()` is the catalog's clock on both.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
Row = tuple[Any, ...]
Statement = tuple[str, Sequence[Any]]
#: What is new, by key.
News = Mapping[str, str]
NO_NEWS: News = MappingProxyType({})


class Tx(Protocol):
    """One transaction, handed to catalog functions."""

    def run(self, sql: str, values: Sequence[Any] = ()) -> list[Row]:
        """Run a statement now and return its rows."""

    def run_all(self, statements: Sequence[Statement]) -> list[list[Row]]:
        """Run statements whose values don't depend on each other: one round trip on PostgreSQL."""

    def defer(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        """Run a statement for each row before the commit, without an answer: one round trip together with the commit."""


class Database(Protocol):
    """Connections to one catalog. Thread-safe; a forked child may use it too."""

    url: str
    #: It may go back to an earlier state of its own, as by a fail-over, but not by more than this: what its commits freed is kept as long.
    garbage_seconds: float

    def query(self, sql: str, values: Sequence[Any] = ()) -> list[Row]:
        """The rows of one SELECT, outside any transaction."""

    def query_all(self, statements: Sequence[Statement]) -> list[list[Row]]:
        """The rows of several SELECTs: one round trip on PostgreSQL. A later one may see what was committed meanwhile."""

    def verify(self) -> list[str]:
        """What is wrong with how the catalog itself is stored, as far as the database can tell by reading all of it."""

    def read(self, work: Callable[[Tx], T]) -> T:
        """Run `work` over one consistent look at the catalog."""

    def write(self, work: Callable[[Tx], T], *, repeatable: bool = False, news: News = NO_NEWS) -> T:
        """Run `work` and commit, durably. What `work` raises rolls back.

        `work` may run more than once. If the answer to the commit is lost, `repeatable` work runs again (it recognises that it was
        done); other work raises OutcomeUnknownError. News that will be announced may go along with the commit.
        """

    def write_whole(self, statements: Sequence[Statement], *failpoints: str, news: News = NO_NEWS) -> list[list[Row]] | None:
        """Run statements and commit, in one round trip; returns the rows of each. None if a constraint did not hold: nothing was done.

        If the answer is lost, they run again: a constraint must not hold then. The failpoints are passed before the commit. News as with
        `write`.
        """

    def check_alone(self) -> None:
        """UnavailableError if this thread is in the midst of a `write` beside which nobody writes: a wait for others would never end."""

    def announce(self, news: News = NO_NEWS) -> None:
        """Wake those who wait for a change, here and in other processes, soon. They may hear `news` along with it: see `Changes.heard`."""

    @property
    def changes(self) -> Changes: ...

    def close(self) -> None: ...


class Changes:
    """Lets threads wait until the catalog changed. `version` grows with each change seen; a wait may also end for nothing."""

    #: Whether news of `announce` are told to other processes.
    TELLS_NEWS = False

    def __init__(self) -> None:
        # Entered as a mutex: a Ctrl-C inside a condition's own `__enter__`, which is Python code, would leave it locked for ever.
        self._mutex = threading.RLock()
        self._condition = threading.Condition(self._mutex)
        self._version = 0

    def bump(self) -> None:
        with self._mutex:
            self._version += 1
            self._condition.notify_all()

    def version(self) -> int:
        """To be read before looking, and given to `wait` after having found nothing."""
        return self._version

    def heard(self, key: str) -> str | None:
        """The last news under a key, perhaps: they may be lost."""
        return None

    def wait(self, seen: int, timeout: float) -> None:
        """Return when the version is no longer `seen`, or after `timeout` seconds."""
        with self._mutex:
            if self._version == seen:
                self._condition.wait(timeout)
