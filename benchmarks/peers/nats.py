"""NATS JetStream: one server with file storage, through nats-py."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.peers import fetch
from benchmarks.peers.peer import LOST_SECONDS, Event, Producer, Running, Take, Tick, Unsupported
from benchmarks.peers.servers import LOOPBACK, free_port, listens, started_server, version_of

_PENDING = 4000
_TIMEOUT = 60.0


@dataclass(frozen=True)
class NatsPeer:
    """By default the file is synced every two minutes; `synced` does it before each ack."""

    synced: bool = False

    @property
    def name(self) -> str:
        return "NATS synced" if self.synced else "NATS"

    @property
    def promise(self) -> str:
        return "file storage, sync_interval always" if self.synced else "file storage, defaults: no fsync, lost if the machine stops"

    @property
    def version(self) -> str:
        return _version()

    @contextmanager
    def running(self, folder: Path) -> Iterator[Running]:
        program, port = fetch.fetch_nats(), free_port()
        folder.mkdir(parents=True)
        synced = "sync_interval: always" if self.synced else ""
        (folder / "nats.conf").write_text(f'listen: "{LOOPBACK}:{port}"\njetstream {{ store_dir: "{folder}/data"\n{synced}\n}}\n')
        with started_server([program.path, "-c", folder / "nats.conf"], folder, lambda: listens(port), program.environment) as pid:
            yield Running(NatsClient(port), (pid,))


@cache
def _version() -> str:
    return version_of(fetch.fetch_nats().path)


@dataclass(frozen=True)
class NatsClient:
    port: int

    def create(self, topic: str, partitions: int = 1) -> None:
        """One stream whatever `partitions` says: a stream of NATS has one log."""
        self._run(self._create(topic))

    async def _create(self, topic: str) -> None:
        from nats.js.api import StorageType, StreamConfig

        connection, js = await _connect(self.port)
        await js.add_stream(StreamConfig(name=topic, subjects=[f"{topic}.>"], storage=StorageType.FILE))
        await connection.close()

    def producer(self, topic: str, *, low_latency: bool = False) -> Producer:
        return NatsProducer(self.port, topic)

    def read(self, topic: str, count: int) -> int:
        size = found = 0

        def take(value: bytes) -> bool:
            nonlocal size, found
            size += len(value)
            found += 1
            return found < count

        self.follow(topic, take)
        return size

    def read_batches(self, topic: str, count: int) -> int:
        """There are none: messages come one by one."""
        return self.read(topic, count) and count

    def follow(self, topic: str, take: Take) -> None:
        self._run(self._follow(topic, take))

    async def _follow(self, topic: str, take: Take) -> None:
        """An ordered consumer: what NATS has for reading a stream from end to end, without an ack for each message."""
        connection, js = await _connect(self.port)
        ended = asyncio.get_running_loop().create_future()

        async def on_message(message: Any) -> None:
            if not ended.done() and not take(message.data):
                ended.set_result(None)

        await js.subscribe(f"{topic}.>", stream=topic, cb=on_message, ordered_consumer=True, pending_bytes_limit=1 << 30)
        await ended
        await connection.close()

    def committer(self, topic: str) -> AbstractContextManager[Callable[[Sequence[Event]], None]]:
        raise Unsupported("nats-py has no transactions")

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run(work)


async def _connect(port: int) -> tuple[Any, Any]:
    import nats

    connection = await nats.connect(f"nats://{LOOPBACK}:{port}", max_reconnect_attempts=1, pending_size=64_000_000)
    return connection, connection.jetstream(timeout=_TIMEOUT, publish_async_max_pending=_PENDING)


class NatsProducer:
    def __init__(self, port: int, topic: str) -> None:
        self._topic = topic
        self._loop = asyncio.new_event_loop()
        self._connection, self._js = self._loop.run_until_complete(_connect(port))

    def write(self, events: Iterable[Event]) -> None:
        self._loop.run_until_complete(self._write(events))

    async def _write(self, events: Iterable[Event]) -> None:
        publish, prefix = self._js.publish_async, f"{self._topic}."
        for value, key in events:
            await publish(prefix + key.decode(), value, wait_stall=_TIMEOUT)
        await self._js.publish_async_completed()

    def prepare(self, events: Sequence[Event]) -> Any:
        return events

    def write_prepared(self, prepared: Any, times: int) -> None:
        for _ in range(times):
            self.write(prepared)

    def pace(self, ticks: Iterable[Tick]) -> None:
        self._loop.run_until_complete(self._pace(ticks))

    async def _pace(self, ticks: Iterable[Tick]) -> None:
        for at, events in ticks:
            early = at - time.monotonic()
            if early < -LOST_SECONDS:
                break
            await asyncio.sleep(max(0.0, early))
            for value, key in events:
                await self._js.publish_async(f"{self._topic}.{key.decode()}", value, wait_stall=_TIMEOUT)
        await self._js.publish_async_completed()

    def close(self) -> None:
        self._loop.run_until_complete(self._connection.close())
        self._loop.close()
