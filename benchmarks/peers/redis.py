"""Redis Streams: one server whose append-only file is synced before every answer, through redis-py."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.peers import fetch
from benchmarks.peers.peer import Event, Producer, Running, Take, Tick, due
from benchmarks.peers.servers import LOOPBACK, free_port, listens, started_server, version_of

#: Commands sent before their answers are read: what Redis's page on pipelining advises.
_PIPELINE = 1000


@dataclass(frozen=True)
class RedisPeer:
    name: str = "Redis"
    promise: str = "appendfsync always: fsync before each answer"

    @property
    def version(self) -> str:
        return _version()

    @contextmanager
    def running(self, folder: Path) -> Iterator[Running]:
        program, port = fetch.fetch_redis(), free_port()
        command: list[str | Path] = [program.path, "--bind", LOOPBACK, "--port", str(port), "--dir", folder, "--save", ""]
        command += ["--appendonly", "yes", "--appendfsync", "always", "--daemonize", "no"]
        with started_server(command, folder, lambda: listens(port), program.environment) as pid:
            yield Running(RedisClient(port), (pid,))


@cache
def _version() -> str:
    program = fetch.fetch_redis()
    return version_of(program.path, program.environment)


@dataclass(frozen=True)
class RedisClient:
    port: int

    def create(self, topic: str, partitions: int = 1) -> None:
        """A stream begins with its first event."""

    def producer(self, topic: str, *, low_latency: bool = False) -> Producer:
        return RedisProducer(self._connect(), topic)

    def read(self, topic: str, count: int) -> int:
        return sum(len(fields[b"v"]) for entries in self._pages(topic, count) for _, fields in entries)

    def read_batches(self, topic: str, count: int) -> int:
        return sum(len(entries) for entries in self._pages(topic, count))

    def _pages(self, topic: str, count: int) -> Iterator[Any]:
        connection, last, found = self._connect(), b"0", 0
        while found < count:
            entries = connection.xread({topic: last}, count=10_000)[0][1]
            last, found = entries[-1][0], found + len(entries)
            yield entries

    def follow(self, topic: str, take: Take) -> None:
        connection, last = self._connect(), b"0"
        while True:
            found = connection.xread({topic: last}, count=1000, block=1000)
            for entry, fields in found[0][1] if found else ():
                last = entry
                if not take(fields[b"v"]):
                    return

    @contextmanager
    def committer(self, topic: str) -> Iterator[Callable[[Sequence[Event]], None]]:
        connection = self._connect()

        def commit(events: Sequence[Event]) -> None:
            with connection.pipeline(transaction=True) as pipeline:
                for value, key in events:
                    pipeline.xadd(topic, {"v": value, "k": key})
                pipeline.execute()

        yield commit
        connection.close()

    def _connect(self) -> Any:
        import redis

        return redis.Redis(LOOPBACK, self.port, protocol=2)


class RedisProducer:
    def __init__(self, connection: Any, topic: str) -> None:
        self._connection, self._topic = connection, topic

    def write(self, events: Iterable[Event]) -> None:
        rest = iter(events)
        while piece := list(islice(rest, _PIPELINE)):
            self._send(piece)

    def prepare(self, events: Sequence[Event]) -> Any:
        return [{"v": value, "k": key} for value, key in events]

    def write_prepared(self, prepared: Any, times: int) -> None:
        for _ in range(times):
            for start in range(0, len(prepared), _PIPELINE):
                with self._connection.pipeline(transaction=False) as pipeline:
                    for fields in prepared[start : start + _PIPELINE]:
                        pipeline.execute_command("XADD", self._topic, "*", "v", fields["v"], "k", fields["k"])
                    pipeline.execute()

    def pace(self, ticks: Iterable[Tick]) -> None:
        for events in due(ticks):
            self._send(events)

    def _send(self, events: Sequence[Event]) -> None:
        with self._connection.pipeline(transaction=False) as pipeline:
            for value, key in events:
                # What xadd() does, without its checks of every argument.
                pipeline.execute_command("XADD", self._topic, "*", "v", value, "k", key)
            pipeline.execute()

    def close(self) -> None:
        self._connection.close()
