"""The limit for a Python source or sink in Spark: batches that are ready already, and batches that are only taken."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from headwater.spark.types import METADATA, to_arrow, to_spark_schema

ROW_BYTES = 256
_SCHEMA = pa.schema([pa.field("value", pa.binary(), nullable=False), *METADATA])
_BATCH_ROWS = 16384
_FILE_BYTES = 8 * 1024 * 1024
_made: dict[tuple[int, int], pa.RecordBatch] = {}


def ready_batch(rows: int, partition: int) -> pa.RecordBatch:
    """Rows like those of a stream: a value, and where it is. Made once in each process."""
    found = _made.get((rows, partition))
    if found is None:
        now = datetime.now(UTC)
        columns = [
            pa.array([bytes([index % 256]) * ROW_BYTES for index in range(rows)], pa.binary()),
            pa.array([b"key%d" % (index % 1000) for index in range(rows)], pa.binary()),
            pa.array([now] * rows, METADATA.field("_time").type),
            pa.array(["bench/ready"] * rows),
            pa.array([partition] * rows, pa.int64()),
            pa.array(range(rows), pa.int64()),
        ]
        found = _made[rows, partition] = pa.RecordBatch.from_arrays(columns, schema=to_arrow(to_spark_schema(_SCHEMA)))
    return found


class _Ready:
    def __init__(self, rows: int, parts: int) -> None:
        self._rows = rows
        self._parts = parts

    def _partitions(self) -> Sequence[InputPartition]:
        return [InputPartition(index) for index in range(self._parts)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        left = self._rows // self._parts
        while left > 0:
            count = min(left, _BATCH_ROWS)
            yield ready_batch(count, partition.value)
            left -= count


class ReadyReader(_Ready, DataSourceReader):
    def partitions(self) -> Sequence[InputPartition]:
        return self._partitions()


class ReadyStreamReader(_Ready, DataSourceStreamReader):
    def initialOffset(self) -> dict[str, int]:
        return {"at": 0}

    def latestOffset(self) -> dict[str, int]:  # type: ignore[override]
        return {"at": 1}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        return self._partitions() if start != end else []


class _Taken:
    def __init__(self, folder: str | None) -> None:
        self._folder = folder

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        waiting: list[pa.RecordBatch] = []
        for batch in iterator:
            if self._folder is not None:
                waiting.append(batch)
                if sum(one.nbytes for one in waiting) >= _FILE_BYTES:
                    _store(waiting, self._folder)
                    waiting = []
        if waiting and self._folder is not None:
            _store(waiting, self._folder)
        return WriterCommitMessage()


def _store(batches: list[pa.RecordBatch], folder: str) -> None:
    """The bytes of batches, durable in a file of their own: what no durable sink gets around."""
    fd = os.open(f"{folder}/{uuid.uuid4().hex}", os.O_CREAT | os.O_WRONLY)
    try:
        for batch in batches:
            for column in batch.columns:
                for buffer in column.buffers():
                    if buffer is not None:
                        os.write(fd, buffer)
        os.fdatasync(fd)
    finally:
        os.close(fd)


class TakingWriter(_Taken, DataSourceArrowWriter):
    pass


class TakingStreamWriter(_Taken, DataSourceStreamArrowWriter):
    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        pass

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        pass


class ReadyDataSource(DataSource):
    """As a source: `rows` in `parts` partitions, made before. As a sink: takes every batch, and stores it in `folder` if one is given."""

    @classmethod
    def name(cls) -> str:
        return "ready"

    def schema(self) -> StructType:
        return to_spark_schema(_SCHEMA)

    def reader(self, schema: StructType) -> DataSourceReader:
        return ReadyReader(int(self.options["rows"]), int(self.options["parts"]))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return ReadyStreamReader(int(self.options["rows"]), int(self.options["parts"]))

    def writer(self, schema: StructType, overwrite: bool) -> TakingWriter:
        return TakingWriter(self.options.get("folder"))

    def streamWriter(self, schema: StructType, overwrite: bool) -> TakingStreamWriter:
        return TakingStreamWriter(self.options.get("folder"))
