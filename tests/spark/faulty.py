"""A sink with faults: the real one, in which a process is killed, a task fails, or an attempt is run twice, as a file says.

A folder given as option holds one file for each fault, which is taken away by the attempt that meets it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceStreamWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from headwater.runtime import failpoints
from headwater.spark.datasource import HeadwaterDataSource
from headwater.spark.options import read_sink_options
from headwater.spark.sink import StreamWriter

OPTION = "storage.faults"
#: Longer than Spark keeps idle workers, and than any lease but the sink's own.
SLOW_SECONDS = 190.0


def plant(folder: Path, *faults: str) -> None:
    """Let these faults happen, each once: "twice", "error", "kill-task", "slow", or "commit:" and a failpoint's name."""
    folder.mkdir(exist_ok=True)
    for fault in faults:
        (folder / fault).touch()


def _meets(folder: Path, fault: str) -> bool:
    try:
        (folder / fault).unlink()
    except FileNotFoundError:
        return False
    return True


class FaultyWriter(StreamWriter):
    def __init__(self, options: Mapping[str, str], schema: StructType, overwrite: bool) -> None:
        self._folder = Path(options[OPTION])
        super().__init__(read_sink_options({name: text for name, text in options.items() if name != OPTION}), schema, overwrite)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        if _meets(self._folder, "twice"):
            # As a speculative attempt that loses: it stages everything, and its message goes nowhere.
            batches = list(iterator)
            super().write(iter(batches))
            iterator = iter(batches)
        context = TaskContext.get()
        assert context is not None
        message = super().write(iterator)
        if context.partitionId() == 0 and _meets(self._folder, "error"):
            raise RuntimeError("this attempt fails after it staged")
        if context.partitionId() == 0 and _meets(self._folder, "kill-task"):
            os.kill(os.getpid(), signal.SIGKILL)
        if context.partitionId() == 0 and _meets(self._folder, "slow"):
            time.sleep(SLOW_SECONDS)
        return message

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        for path in list(self._folder.iterdir()):
            kind, _, failpoint = path.name.partition(":")
            if kind == "commit" and _meets(self._folder, path.name):
                if failpoint == "before":
                    os.kill(os.getpid(), signal.SIGKILL)
                failpoints.arm(f"{failpoint}=kill")
        super().commit(messages, batchId)
        if _meets(self._folder, "commit-after"):
            os.kill(os.getpid(), signal.SIGKILL)


class FaultyDataSource(HeadwaterDataSource):
    @classmethod
    def name(cls) -> str:
        return "faulty"

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        return FaultyWriter(dict(self.options), schema, overwrite)
