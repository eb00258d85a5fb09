"""The sinks: rows to a stream, to several, or to a table, in batches and micro-batches, each batch whole and once."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from headwater import InvalidRequestError, Store, Transaction
from headwater.spark.addresses import patiently
from headwater.spark.options import SinkOptions
from headwater.spark.pieces import Staged
from headwater.spark.rows import check_target
from headwater.spark.staging import (
    commit_filled,
    drop_leftovers,
    drop_pieces,
    gather,
    make_fingerprint,
    make_owner,
    publish,
    stage,
    sum_hashes,
)


class _Writer:
    """What both writers share. Pickled into every task; what a task finds out travels in its message."""

    def __init__(self, options: SinkOptions, schema: StructType, overwrite: bool) -> None:
        if overwrite and options.table is None:
            raise InvalidRequestError(
                f"a stream is only appended to: {options.target} takes append mode. For results that replace each other "
                "write to a table: option('table', 'scope/name') with option('key', column)"
            )
        self._options = options
        self._overwrite = overwrite
        store = patiently(lambda: options.address.open(create=options.create))
        patiently(lambda: check_target(store, options, schema))

    def _store(self) -> Store:
        return patiently(self._options.address.open)

    def _fill(self, tx: Transaction, messages: Sequence[Staged]) -> None:
        """Give a transaction all that the tasks staged; of a table that is replaced, remove the other keys."""
        gather(tx, messages, self._options.key)
        if self._overwrite:
            kept = {key for message in messages for key in message.keys}
            table = str(self._options.table)
            for key, _ in self._store().table(table).items():
                if key not in kept:
                    tx.remove(table, key)


class BatchWriter(_Writer, DataSourceArrowWriter):
    """Writes a DataFrame: all of it becomes visible at once, or nothing."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return stage(iterator, self._options, hashes_rows=self._options.hashes_part, lists_keys=self._overwrite)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        arrived, store, options = _arrived(messages), self._store(), self._options
        if options.into is not None:
            # A part of `headwater.spark.transaction`, which commits it later.
            tx = store.resume_transaction(options.into)
            self._fill(tx, arrived)
            patiently(tx.flush)
            assert options.report is not None, "whoever wants a part wants its receipt"
            Path(options.report).write_text(json.dumps([patiently(lambda: tx.receipt), *sum_hashes(arrived)]), encoding="utf-8")
            return
        commit_filled(store, options, None, lambda tx: self._fill(tx, arrived))
        if arrived[0].query is not None:
            # In foreachBatch: earlier batches may have left something. This one may be written by several jobs at once.
            drop_leftovers(store, make_owner(arrived[0].query, options.target), arrived[0].batch - 1)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        drop_pieces(self._store(), _transactions(messages))


class StreamWriter(_Writer, DataSourceStreamArrowWriter):
    """Writes micro-batches: each becomes visible at once, and once, however often it is tried."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return stage(iterator, self._options, hashes_rows=self._options.hashes_rows, lists_keys=self._overwrite)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        arrived, options = _arrived(messages), self._options
        query = arrived[0].query
        assert query is not None, "a micro-batch belongs to a query"
        fingerprint = make_fingerprint(options, batchId, *sum_hashes(arrived))
        publish(self._store(), options, query, batchId, fingerprint, lambda tx: self._fill(tx, arrived))

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        # Also called after a commit that raised: pieces that it adopted are not touched by this.
        drop_pieces(self._store(), _transactions(messages))


def _arrived(messages: Sequence[WriterCommitMessage | None]) -> list[Staged]:
    found = [message for message in messages if isinstance(message, Staged)]
    assert found and len(found) == len(messages), "Spark commits when all tasks are done"
    return found


def _transactions(messages: Sequence[WriterCommitMessage | None]) -> list[str | None]:
    return [message.transaction for message in messages if isinstance(message, Staged)]
