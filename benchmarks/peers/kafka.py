"""Apache Kafka: one node in KRaft mode, through confluent-kafka."""

from __future__ import annotations

import base64
import logging
import subprocess
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers import fetch
from benchmarks.peers.peer import Event, Producer, Running, Take, Tick, due
from benchmarks.peers.servers import LOOPBACK, free_port, java, started_server

#: What Kafka's and librdkafka's own pages advise for throughput: larger batches, given time to fill. Random bytes don't compress.
_THROUGHPUT = {
    "linger.ms": 10,
    "batch.size": 1_000_000,
    "batch.num.messages": 100_000,
    "queue.buffering.max.messages": 1_000_000,
    "queue.buffering.max.kbytes": 1_000_000,
    "compression.type": "none",
}
#: And for latency. Of 0, 1 and 5 ms this was the best at every rate: with 0 the broker is busy with requests of a single event.
_LATENCY = {"linger.ms": 1, "compression.type": "none"}
_CATCHING_UP = {
    "fetch.min.bytes": 100_000,
    "fetch.max.bytes": 50_000_000,
    "max.partition.fetch.bytes": 10_000_000,
    "queued.min.messages": 1_000_000,
}
_TIMEOUT = 60.0
_SILENT = logging.getLogger("headwater.benchmarks.silent")
_SILENT.addHandler(logging.NullHandler())
_SILENT.propagate = False


@dataclass(frozen=True)
class KafkaPeer:
    """With the broker's defaults an ack means: in the page cache of this one node. `synced` flushes every append before its ack."""

    synced: bool = False

    @property
    def name(self) -> str:
        return "Kafka synced" if self.synced else "Kafka"

    @property
    def promise(self) -> str:
        return (
            "acks=all, flush.messages=1: fsync before each ack"
            if self.synced
            else "acks=all, defaults: no fsync, lost if the machine stops"
        )

    @property
    def version(self) -> str:
        return fetch.KAFKA.wanted[0][2]

    @contextmanager
    def running(self, folder: Path) -> Iterator[Running]:
        folder.mkdir(parents=True)
        classes = ":".join(map(str, fetch.fetch_jars(fetch.KAFKA)))
        port, control = free_port(), free_port()
        settings = folder / "server.properties"
        settings.write_text(_settings(folder / "data", port, control), encoding="utf-8")
        cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        formatting = [java(), "-cp", classes, "kafka.tools.StorageTool", "format", "-t", cluster, "-c", str(settings)]
        subprocess.run(formatting, check=True, capture_output=True, timeout=120)
        client = KafkaClient(f"{LOOPBACK}:{port}", self.synced)
        # The heap of Kafka's own start script.
        command: list[str | Path] = [java(), "-Xms1G", "-Xmx1G", "-XX:+UseG1GC", "-cp", classes, "kafka.Kafka", settings]
        with started_server(command, folder, client.is_ready) as pid:
            yield Running(client, (pid,))


def _settings(data: Path, port: int, control: int) -> str:
    """What one node needs; everything else is the broker's default."""
    return f"""
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@{LOOPBACK}:{control}
listeners=PLAINTEXT://{LOOPBACK}:{port},CONTROLLER://{LOOPBACK}:{control}
advertised.listeners=PLAINTEXT://{LOOPBACK}:{port}
controller.listener.names=CONTROLLER
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT
log.dirs={data}
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
group.initial.rebalance.delay.ms=0
"""


@dataclass(frozen=True)
class KafkaClient:
    servers: str
    synced: bool = False

    def is_ready(self) -> bool:
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import AdminClient

        try:
            return bool(AdminClient({**self._base(), "log_level": 0, "logger": _SILENT}).list_topics(timeout=1).brokers)
        except KafkaException:
            return False

    def create(self, topic: str, partitions: int = 1) -> None:
        from confluent_kafka.admin import AdminClient, NewTopic

        config = {"flush.messages": "1"} if self.synced else {}
        new = NewTopic(topic, num_partitions=partitions, replication_factor=1, config=config)
        admin = AdminClient(self._base())
        for made in admin.create_topics([new]).values():
            made.result(_TIMEOUT)

    def producer(self, topic: str, *, low_latency: bool = False) -> Producer:
        return KafkaProducer(topic, {**self._base(), "acks": "all", **(_LATENCY if low_latency else _THROUGHPUT)})

    def read(self, topic: str, count: int) -> int:
        """`consume` of many at once: less per event than `poll`. It waits for all it is asked for, so never for more than there is."""
        found = size = 0
        with self._consumer(topic, _CATCHING_UP) as consumer:
            while found < count:
                messages = consumer.consume(min(10_000, count - found), timeout=10.0)
                for message in messages:
                    size += len(message.value())
                found += len(messages)
        return size

    def read_batches(self, topic: str, count: int) -> int:
        """There are none: the same lists of messages, without a look at each."""
        found = 0
        with self._consumer(topic, _CATCHING_UP) as consumer:
            while found < count:
                found += len(consumer.consume(min(10_000, count - found), timeout=10.0))
        return found

    def follow(self, topic: str, take: Take) -> None:
        with self._consumer(topic, {"fetch.wait.max.ms": 500, "fetch.min.bytes": 1}) as consumer:
            while True:
                message = consumer.poll(1.0)
                if message is not None and message.error() is None and not take(message.value()):
                    return

    @contextmanager
    def committer(self, topic: str) -> Iterator[Callable[[Sequence[Event]], None]]:
        producer = KafkaProducer(topic, {**self._base(), "transactional.id": uuid.uuid4().hex, **_LATENCY})
        producer.inner.init_transactions(_TIMEOUT)

        def commit(events: Sequence[Event]) -> None:
            producer.inner.begin_transaction()
            for value, key in events:
                producer.inner.produce(topic, value, key)
            producer.inner.commit_transaction(_TIMEOUT)

        yield commit
        producer.close()

    @contextmanager
    def _consumer(self, topic: str, settings: dict[str, Any]) -> Iterator[Any]:
        from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

        consumer = Consumer(
            {**self._base(), "group.id": "bench", "enable.auto.commit": False, "isolation.level": "read_committed", **settings}
        )
        try:
            partitions = consumer.list_topics(topic, timeout=_TIMEOUT).topics[topic].partitions
            consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for number in partitions])
            yield consumer
        finally:
            consumer.close()

    def _base(self) -> dict[str, Any]:
        return {"bootstrap.servers": self.servers, "broker.address.family": "v4", "log_level": 3}


class KafkaProducer:
    def __init__(self, topic: str, settings: dict[str, Any]) -> None:
        from confluent_kafka import Producer as Inner

        self._topic = topic
        self.inner = Inner(settings)

    def write(self, events: Iterable[Event]) -> None:
        produce, topic = self.inner.produce, self._topic
        for value, key in events:
            try:
                produce(topic, value, key)
            except BufferError:
                self._produce_when_there_is_room(value, key)
        self._finish()

    def prepare(self, events: Sequence[Event]) -> Any:
        return [{"value": value, "key": key} for value, key in events]

    def write_prepared(self, prepared: Any, times: int) -> None:
        for _ in range(times):
            while len(self.inner) > 500_000:
                self.inner.poll(0.01)
            queued = self.inner.produce_batch(self._topic, prepared)
            assert queued == len(prepared), f"{len(prepared) - queued} events were not taken"
        self._finish()

    def pace(self, ticks: Iterable[Tick]) -> None:
        for events in due(ticks):
            for value, key in events:
                try:
                    self.inner.produce(self._topic, value, key)
                except BufferError:
                    self._produce_when_there_is_room(value, key)
        self._finish()

    def close(self) -> None:
        self._finish()

    def _produce_when_there_is_room(self, value: bytes, key: bytes) -> None:
        while True:
            self.inner.poll(0.005)
            try:
                self.inner.produce(self._topic, value, key)
                return
            except BufferError:
                continue

    def _finish(self) -> None:
        if self.inner.flush(_TIMEOUT):
            raise RuntimeError("Kafka did not acknowledge everything within a minute")
