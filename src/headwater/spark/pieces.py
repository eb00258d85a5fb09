"""What one attempt of one task writes: a piece of a batch, in a transaction of its own, which another one adopts or nobody ever sees."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import pyarrow as pa
from pyspark.sql.datasource import WriterCommitMessage

from headwater import HeadwaterError, Marker, Store, Transaction
from headwater.spark.addresses import patiently
from headwater.spark.options import SinkOptions
from headwater.spark.rows import by_stream, shape, to_entries, without_strangers

#: Up to this size a task's rows travel with its message: a small batch then is one commit, and no task writes anything.
_MESSAGE_BYTES = 64 * 1024
#: Batches that wait to be staged while Spark hands over more.
_WAITING = 4


@dataclass
class Staged(WriterCommitMessage):
    """What one task attempt tells the driver."""

    partition: int
    query: str | None
    batch: int
    transaction: str | None = None
    #: The transaction with its last batch, which its adopter must find.
    receipt: str | None = None
    #: (stream, rows as Arrow IPC) and (table, entries) that were not staged because they are few.
    rows: list[tuple[str, bytes]] = field(default_factory=list)
    entries: list[tuple[str, list[tuple[str, bytes]]]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    count: int = 0
    hash: int = 0


class Piece:
    """A task attempt's rows: in memory while they are few, then staged, by a thread of its own so that Spark is not kept waiting."""

    def __init__(self, store: Store, options: SinkOptions, label: Marker) -> None:
        self._store = store
        self._options = options
        self._label = label
        self._schemas: dict[str, pa.Schema] = {}
        self._rows: list[tuple[str, pa.RecordBatch]] = []
        self._entries: dict[str, bytes] = {}
        self._size = 0
        self._tx: Transaction | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._under_way: deque[Future[None]] = deque()

    def add(self, batch: pa.RecordBatch) -> list[str]:
        """Take a batch; returns the keys it has, if it is for a table."""
        options = self._options
        if options.table is not None:
            found = dict(to_entries(batch, options))
            self._entries |= found
            self._size += sum(len(key) + len(value) for key, value in found.items())
            self._stage_if_much()
            return list(found)
        for name, rows in by_stream(batch, options):
            schema = self._schemas.get(name)
            if schema is None:
                schema = self._schemas[name] = patiently(lambda name=name: self._store.stream(name).schema)  # type: ignore[misc]
            if options.stream_column is not None:
                rows = without_strangers(rows, name, schema, options)
            self._rows.append((name, shape(rows, options, schema)))
            self._size += rows.nbytes
        self._stage_if_much()
        return []

    def _stage_if_much(self) -> None:
        if self._tx is None and self._size <= _MESSAGE_BYTES:
            return
        if self._tx is None or self._thread is None:
            # The worker may be gone long before the driver commits: a long lease, which nobody renews.
            self._tx = self._store.transaction(lease=self._options.lease_seconds, auto_renew=False, marker=self._label)
            self._thread = ThreadPoolExecutor(1, "headwater-stage")
        rows, entries = self._rows, self._entries
        self._rows, self._entries = [], {}
        self._under_way.append(self._thread.submit(self._stage, self._tx, rows, entries))
        while len(self._under_way) > _WAITING:
            self._under_way.popleft().result()

    def _stage(self, tx: Transaction, rows: list[tuple[str, pa.RecordBatch]], entries: dict[str, bytes]) -> None:
        # A call that finds the store out of reach has added nothing, so it may be made again.
        calls: list[Callable[[], None]] = [
            partial(tx.write_batch, name, some, key=self._options.key, missing="null") for name, some in rows
        ]
        calls += [partial(tx.put, str(self._options.table), key, value) for key, value in entries.items()]
        for call in calls:
            patiently(call)

    def finish(self, message: Staged) -> None:
        """Make it durable, or put it into the message."""
        if self._tx is not None and self._thread is not None:
            while self._under_way:
                self._under_way.popleft().result()
            self._thread.shutdown()
            patiently(self._tx.flush)
            message.transaction, message.receipt = self._tx.id, self._tx.receipt
            return
        for name, rows in self._rows:
            message.rows.append((name, _to_ipc(rows)))
        if self._entries:
            message.entries.append((str(self._options.table), list(self._entries.items())))

    def drop(self) -> None:
        """Leave nothing behind."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        if self._tx is not None:
            with suppress(HeadwaterError):  # Then its lease ends it.
                self._tx.abort()


def _to_ipc(rows: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_batch(rows)
    return bytes(sink.getvalue().to_pybytes())
