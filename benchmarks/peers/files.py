"""Just files: Parquet by pyarrow, and Delta tables by the `deltalake` package. They are written in bulk and scanned, and not followed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.peers.peer import Event, Producer, Running, Take, Tick, Unsupported

_NO_EVENTS = "files take no single events"


@dataclass(frozen=True)
class FilesPeer:
    """`kind` is "Parquet" or "Delta"."""

    kind: str

    @property
    def name(self) -> str:
        return self.kind

    @property
    def promise(self) -> str:
        return "one file for each write, fsync at its end" if self.kind == "Parquet" else "one commit for each write, no fsync"

    @property
    def version(self) -> str:
        return version("pyarrow" if self.kind == "Parquet" else "deltalake")

    @contextmanager
    def running(self, folder: Path) -> Iterator[Running]:
        yield Running(FilesClient(self.kind, folder))


@dataclass(frozen=True)
class FilesClient:
    kind: str
    folder: Path

    def create(self, topic: str, partitions: int = 1) -> None:
        (self.folder / topic).mkdir(parents=True)

    def producer(self, topic: str, *, low_latency: bool = False) -> Producer:
        return (ParquetProducer if self.kind == "Parquet" else DeltaProducer)(self.folder / topic)

    def read(self, topic: str, count: int) -> int:
        raise Unsupported(_NO_EVENTS)

    def read_batches(self, topic: str, count: int) -> int:
        files = (self.folder / topic).glob("*.parquet")
        return sum(batch.num_rows for file in files for batch in pq.ParquetFile(file).iter_batches(1 << 20))

    def follow(self, topic: str, take: Take) -> None:
        raise Unsupported(_NO_EVENTS)

    def committer(self, topic: str) -> AbstractContextManager[Callable[[Sequence[Event]], None]]:
        raise Unsupported(_NO_EVENTS)


class _BulkProducer:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, events: Iterable[Event]) -> None:
        raise Unsupported(_NO_EVENTS)

    def prepare(self, events: Sequence[Event]) -> Any:
        values, keys = zip(*events, strict=True)
        return pa.table({"value": pa.array(values, pa.binary()), "key": pa.array(keys, pa.binary())})

    def pace(self, ticks: Iterable[Tick]) -> None:
        raise Unsupported(_NO_EVENTS)

    def close(self) -> None:
        """Nothing is open between writes."""


class ParquetProducer(_BulkProducer):
    def write_prepared(self, prepared: Any, times: int) -> None:
        path = self._folder / f"{len(os.listdir(self._folder))}.parquet"
        with open(path, "wb") as file:
            # Random bytes: what would compress them, or look for repeats, only costs.
            with pq.ParquetWriter(file, prepared.schema, compression="none", use_dictionary=False) as writer:
                for _ in range(times):
                    writer.write_table(prepared)
            file.flush()
            os.fsync(file.fileno())


class DeltaProducer(_BulkProducer):
    def write_prepared(self, prepared: Any, times: int) -> None:
        from deltalake import WriterProperties, write_deltalake

        batches = (batch for _ in range(times) for batch in prepared.to_batches())
        reader = pa.RecordBatchReader.from_batches(prepared.schema, batches)
        properties = WriterProperties(compression="UNCOMPRESSED")
        write_deltalake(str(self._folder), reader, mode="append", writer_properties=properties)
