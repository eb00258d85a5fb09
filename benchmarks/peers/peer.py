"""What an adapter does: one small class for each system, so that every job is the same lines for all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

#: A value and its key.
Event = tuple[bytes, bytes]
#: What is due at a time (of `time.monotonic`, in seconds).
Tick = tuple[float, Sequence[Event]]
#: Takes each event as it arrives; says whether to go on.
Take = Callable[[bytes], bool]

#: A writer that is later than this has lost: it can't keep up with the rate.
LOST_SECONDS = 2.0


class Unsupported(Exception):
    """The peer, or its Python client, has nothing of the kind."""


class Producer(Protocol):
    """Writes to one topic. Each call returns when everything it was given is acknowledged as the peer promises."""

    def write(self, events: Iterable[Event]) -> None:
        """Give the events one by one, as an application does."""

    def prepare(self, events: Sequence[Event]) -> Any:
        """What `write_prepared` takes for these events; not timed."""

    def write_prepared(self, prepared: Any, times: int) -> None:
        """The peer's fastest way in: the same events again and again."""

    def pace(self, ticks: Iterable[Tick]) -> None:
        """Write each tick's events when they are due; ends early when it is hopelessly late."""

    def close(self) -> None: ...


class Client(Protocol):
    """A running peer as a process sees it. Picklable."""

    def create(self, topic: str, partitions: int = 1) -> None: ...

    def producer(self, topic: str, *, low_latency: bool = False) -> Producer: ...

    def read(self, topic: str, count: int) -> int:
        """From the beginning, `count` events, with a look at each value: their bytes."""

    def read_batches(self, topic: str, count: int) -> int:
        """The same in the largest pieces that the client has: the events."""

    def follow(self, topic: str, take: Take) -> None:
        """Hand over each value as it arrives, from the beginning, until `take` says no."""

    def committer(self, topic: str) -> AbstractContextManager[Callable[[Sequence[Event]], None]]:
        """Gives what writes events in one transaction."""


@dataclass(frozen=True)
class Running:
    """A peer that has been started, and its server's processes."""

    client: Client
    pids: tuple[int, ...] = ()


class Peer(Protocol):
    """A system to compare with, and what its ack promises as it is set up here."""

    @property
    def name(self) -> str: ...

    @property
    def promise(self) -> str: ...

    @property
    def version(self) -> str: ...

    def running(self, folder: Path) -> AbstractContextManager[Running]:
        """Start it with its data in `folder`; fetches it first if need be."""


def due(ticks: Iterable[Tick]) -> Iterable[Sequence[Event]]:
    """Each tick's events at its time, for those who may sleep in between."""
    for at, events in ticks:
        early = at - time.monotonic()
        if early > 0:
            time.sleep(early)
        elif early < -LOST_SECONDS:
            return
        yield events
