"""Exactly once: what a task attempt stages, and the one commit that names only the attempts that count.

Every attempt of a task stages its rows in a transaction of its own, or sends them along if they are few, and tells the driver. The driver
begins one transaction under the marker (query and sink, batch), adopts those it was told of, in the order of the partitions, and commits.
Attempts that failed, lost a race or went on after they were given up were not told of: what they staged is dropped.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial

import pyarrow as pa
from pyspark import TaskContext

from headwater import Commit, ConflictError, HeadwaterError, InvalidRequestError, Marker, Store, Transaction, UnavailableError
from headwater.spark.addresses import patiently
from headwater.spark.hashing import hash_rows
from headwater.spark.options import SinkOptions
from headwater.spark.pieces import Piece, Staged


def make_owner(query: str | None, target: str) -> str:
    """Who a marker belongs to; a batch job that is no query's has one of its own."""
    return f"spark/{query}/{target}" if query is not None else f"spark/job/{uuid.uuid4().hex}"


def stage(batches: Iterable[pa.RecordBatch], options: SinkOptions, *, hashes_rows: bool, lists_keys: bool) -> Staged:
    """Run by a task attempt: stage rows, or keep a few for the message. On an error nothing stays behind."""
    context = TaskContext.get()
    assert context is not None, "this runs in a task"
    query = context.getLocalProperty("sql.streaming.queryId")
    batch_id = int(context.getLocalProperty("streaming.sql.batchId") or 0)
    message = Staged(context.partitionId(), query, batch_id)
    piece = Piece(patiently(options.address.open), options, Marker(make_owner(query, options.target), batch_id, None))
    try:
        for batch in batches:
            if batch.num_rows:
                message.count += batch.num_rows
                if hashes_rows:
                    message.hash = (message.hash + hash_rows(batch)) % (1 << 64)
                keys = piece.add(batch)
                message.keys += keys if lists_keys else []
        piece.finish(message)
    except BaseException:
        piece.drop()
        raise
    return message


def gather(tx: Transaction, messages: Sequence[Staged], key: str | None) -> None:
    """Put what task attempts staged into one transaction, in the order of their partitions."""
    waiting: list[str] = []
    for message in sorted(messages, key=lambda message: message.partition):
        if message.receipt is not None:
            waiting.append(message.receipt)
            continue
        if waiting and (message.rows or message.entries):
            patiently(lambda ids=tuple(waiting): tx.adopt(ids))  # type: ignore[misc]
            waiting = []
        for name, data in message.rows:
            for rows in pa.ipc.open_stream(data):
                # A call that finds the store out of reach has added nothing, so it may be made again.
                patiently(partial(tx.write_batch, name, rows, key=key, missing="null"))
        for table, entries in message.entries:
            for entry_key, value in entries:
                patiently(partial(tx.put, table, entry_key, value))
    if waiting:
        patiently(lambda: tx.adopt(waiting))


def choose_marker(store: Store, owner: str, batch: int, fingerprint: str, *, append_after_rollback: bool) -> tuple[Marker, bool]:
    """(the marker for a batch, whether it is committed already). ConflictError if the query's checkpoint was rolled back or copied.

    Spark repeats only its last batch, with the same data. Where it may go on all the same, it does so under another name.
    """
    names = [owner]
    last = store.marker(owner)
    while (later := store.marker(f"{owner}#{len(names)}")) is not None:
        names.append(f"{owner}#{len(names)}")
        last = later
    marker = Marker(names[-1], batch, fingerprint)
    if last is None or last.sequence < batch:
        return marker, False
    if last == marker:
        return marker, True
    if append_after_rollback:
        return Marker(f"{owner}#{len(names)}", batch, fingerprint), False
    what = "with other data" if last.sequence == batch else f"after batch {last.sequence}"
    raise ConflictError(
        f"{owner}: batch {batch} comes {what}, so the query's checkpoint was rolled back or copied, and events would be written twice. "
        "Nothing was written. Give the copy an id of its own, or option('on_rollback', 'append') to write them again",
        committed=last.sequence,
    )


def sum_hashes(messages: Sequence[Staged]) -> tuple[int, int]:
    """(rows, the sum of their hashes) over all tasks: the same however the rows are divided."""
    return sum(message.count for message in messages), sum(message.hash for message in messages) % (1 << 64)


def make_fingerprint(options: SinkOptions, batch: int, rows: int, hash: int) -> str:
    """What tells a repeated batch from other data: the checkpoint's note of its offsets if that can be read, else the rows themselves."""
    if not options.hashes_rows and options.checkpoint is not None:
        path = options.checkpoint / "offsets" / str(batch)
        try:
            return f"offsets {hashlib.sha256(path.read_bytes()).hexdigest()[:32]}"
        except OSError as error:
            raise InvalidRequestError(
                f"the checkpoint's {path} can't be read here ({error.strerror}): give option('fingerprint', 'rows') to compare rows instead"
            ) from error
    return f"rows {rows} {hash:016x}"


def publish(
    store: Store, options: SinkOptions, query: str, batch: int, fingerprint: str, fill: Callable[[Transaction], None]
) -> Commit | None:
    """Commit what `fill` gives to a transaction, under the marker of a query's batch; None if that batch is committed already."""
    owner = make_owner(query, options.target)
    marker, is_done = patiently(
        lambda: choose_marker(store, owner, batch, fingerprint, append_after_rollback=options.append_after_rollback)
    )
    commit = None if is_done else commit_filled(store, options, marker, fill)
    # What adopted pieces held is committed; everything else that this batch and earlier ones left open, in any run, is not needed.
    patiently(lambda: drop_leftovers(store, owner, batch))
    return commit


def commit_filled(store: Store, options: SinkOptions, marker: Marker | None, fill: Callable[[Transaction], None]) -> Commit:
    tx = store.transaction(lease=options.lease_seconds, marker=marker)
    try:
        if options.require is not None:
            tx.require(*options.require)
        fill(tx)
        return patiently(tx.commit)
    except UnavailableError:
        raise  # It may be committed or not. The marker tells, when Spark runs the batch again.
    except BaseException:
        with suppress(HeadwaterError):  # If it was committed all the same, it stays so, and the batch is not stored again.
            tx.abort()
        raise


def drop_pieces(store: Store, ids: Iterable[str | None]) -> None:
    """Drop what attempts staged. What a commit has adopted is no longer theirs, and stays."""
    for id in ids:
        if id is not None:
            _abort(store, id)


def drop_leftovers(store: Store, owner: str, batch: int) -> None:
    """Abort what attempts of this batch and earlier ones, in this run and others, left open."""
    for info in store.transactions(limit=10_000, only_open=True):
        if info.marker is not None and info.marker.owner.partition("#")[0] == owner and info.marker.sequence <= batch:
            _abort(store, info.id)


def _abort(store: Store, id: str) -> None:
    with suppress(HeadwaterError):  # It ended before, or its lease ends it.
        store.resume_transaction(id).abort()
