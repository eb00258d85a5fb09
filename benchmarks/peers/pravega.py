"""Pravega standalone, which keeps everything in memory, through its Python client."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers import fetch
from benchmarks.peers.peer import Event, Producer, Running, Take, Tick, due
from benchmarks.peers.servers import LOOPBACK, free_port, java, listens, started_server

_SCOPE = "bench"
_IN_FLIGHT = 10_000
_LOGGING = '<configuration><root level="OFF"/></configuration>'


@dataclass(frozen=True)
class PravegaPeer:
    name: str = "Pravega"
    promise: str = "standalone: in memory only, lost with the process"

    @property
    def version(self) -> str:
        return fetch.PRAVEGA.wanted[0][2]

    @contextmanager
    def running(self, folder: Path) -> Iterator[Running]:
        folder.mkdir(parents=True)
        classes = ":".join(map(str, fetch.fetch_jars(fetch.PRAVEGA)))
        controller, segments, zookeeper, gateway = (free_port() for _ in range(4))
        settings = folder / "standalone.properties"
        settings.write_text(
            f"singlenode.zk.port={zookeeper}\nsinglenode.segmentStore.port={segments}\nsinglenode.controller.rpc.port={controller}\n"
            f"singlenode.controller.rest.enable=false\nsinglenode.admin.gateway.enable=false\nsinglenode.admin.gateway.port={gateway}\n"
            f"pravegaservice.service.listener.host.nameOrIp={LOOPBACK}\npravegaservice.service.published.host.nameOrIp={LOOPBACK}\n"
        )
        (folder / "logback.xml").write_text(_LOGGING)
        options = [
            f"-Dlogback.configurationFile={folder}/logback.xml",
            f"-Dsinglenode.configurationFile={settings}",
            f"-Djava.io.tmpdir={folder}",
        ]
        # All it is ever given stays in this memory, and it stands still when that is full.
        command = [java(), "-Xmx6G", "-XX:MaxDirectMemorySize=4G", *options, "-cp", classes, "io.pravega.local.LocalPravegaEmulator"]
        client = PravegaClient(controller)
        with started_server(command, folder, lambda: listens(controller) and listens(segments)) as pid:
            client.manager().create_scope(_SCOPE)
            yield Running(client, (pid,))


@dataclass(frozen=True)
class PravegaClient:
    controller: int

    def manager(self) -> Any:
        import pravega_client

        return pravega_client.StreamManager(f"tcp://{LOOPBACK}:{self.controller}", False, False)

    def create(self, topic: str, partitions: int = 1) -> None:
        self.manager().create_stream(_SCOPE, topic, partitions)

    def producer(self, topic: str, *, low_latency: bool = False) -> Producer:
        return PravegaProducer(self.manager(), topic)

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
        """A slice holds many events, and its client gives them one by one."""
        return self.read(topic, count) and count

    def follow(self, topic: str, take: Take) -> None:
        asyncio.run(self._follow(topic, take))

    async def _follow(self, topic: str, take: Take) -> None:
        manager = self.manager()
        group = manager.create_reader_group(f"group-{uuid.uuid4().hex}", _SCOPE, topic)
        reader = group.create_reader("reader")
        goes_on = True
        while goes_on:
            found = await reader.get_segment_slice_async()
            for event in found or ():
                if not take(event.data()):
                    goes_on = False
                    break
            if found:
                reader.release_segment(found)
        reader.reader_offline()

    @contextmanager
    def committer(self, topic: str) -> Iterator[Callable[[Sequence[Event]], None]]:
        manager = self.manager()
        writer = manager.create_transaction_writer(_SCOPE, topic, 1)

        def commit(events: Sequence[Event]) -> None:
            transaction = writer.begin_txn()
            for value, key in events:
                transaction.write_event_bytes(value, routing_key=key.decode())
            transaction.commit()

        yield commit


class PravegaProducer:
    def __init__(self, manager: Any, topic: str) -> None:
        # The writer works only as long as its manager lives.
        self._manager = manager
        self._writer = manager.create_writer(_SCOPE, topic, _IN_FLIGHT)

    def write(self, events: Iterable[Event]) -> None:
        write = self._writer.write_event_bytes
        for value, key in events:
            write(value, key.decode())
        self._writer.flush()

    def prepare(self, events: Sequence[Event]) -> Any:
        return events

    def write_prepared(self, prepared: Any, times: int) -> None:
        for _ in range(times):
            self.write(prepared)

    def pace(self, ticks: Iterable[Tick]) -> None:
        for events in due(ticks):
            for value, key in events:
                self._writer.write_event_bytes(value, key.decode())
        self._writer.flush()

    def close(self) -> None:
        self._writer.flush()
