"""Headwater itself: SQLite and files in one folder, every ack after its fsync."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa

import headwater as hw
from benchmarks.peers.peer import Event, Producer, Running, Take, Tick, due


@dataclass(frozen=True)
class HeadwaterPeer:
    name: str = "headwater"
    promise: str = "fsync before each ack"

    @property
    def version(self) -> str:
        return version("headwater")

    @contextmanager
    def running(self, folder: Path) -> Iterator[Running]:
        """There is nothing to start."""
        with hw.open(str(folder), upkeep=False):
            yield Running(HeadwaterClient(str(folder)))


@dataclass(frozen=True)
class HeadwaterClient:
    url: str

    def create(self, topic: str, partitions: int = 1) -> None:
        with hw.open(self.url, upkeep=False) as store:
            store.create_stream(f"bench/{topic}", scaling=hw.Scaling.fixed(partitions))

    def producer(self, topic: str, *, low_latency: bool = False) -> Producer:
        return HeadwaterProducer(self.url, topic)

    def read(self, topic: str, count: int) -> int:
        size = 0
        with hw.open(self.url, create=False) as store:
            for event in store.stream(f"bench/{topic}").read():
                size += len(event.value)
        return size

    def read_batches(self, topic: str, count: int) -> int:
        with hw.open(self.url, create=False) as store:
            return sum(batch.num_rows for part in store.stream(f"bench/{topic}").ranges() for batch in part.to_batches())

    def follow(self, topic: str, take: Take) -> None:
        with hw.open(self.url, create=False) as store:
            for event in store.stream(f"bench/{topic}").read(follow=True):
                if not take(event.value):
                    return

    @contextmanager
    def committer(self, topic: str) -> Iterator[Callable[[Sequence[Event]], None]]:
        name = f"bench/{topic}"
        with hw.open(self.url, create=False) as store:

            def commit(events: Sequence[Event]) -> None:
                with store.transaction() as tx:
                    for value, key in events:
                        tx.write(name, value, key)

            yield commit


class HeadwaterProducer:
    def __init__(self, url: str, topic: str) -> None:
        with ExitStack() as stack:
            store = stack.enter_context(hw.open(url, create=False))
            self._writer = stack.enter_context(store.stream(f"bench/{topic}").writer())
            self._opened = stack.pop_all()

    def write(self, events: Iterable[Event]) -> None:
        write = self._writer.write
        for value, key in events:
            write(value, key)
        self._writer.flush()

    def prepare(self, events: Sequence[Event]) -> Any:
        values, keys = zip(*events, strict=True)
        return pa.RecordBatch.from_arrays([pa.array(values, pa.binary()), pa.array(keys, pa.binary())], ["value", "key"])

    def write_prepared(self, prepared: Any, times: int) -> None:
        for _ in range(times):
            self._writer.write_batch(prepared, key="key")
        self._writer.flush()

    def pace(self, ticks: Iterable[Tick]) -> None:
        for events in due(ticks):
            for value, key in events:
                self._writer.write(value, key)
        self._writer.flush()

    def close(self) -> None:
        self._opened.close()
