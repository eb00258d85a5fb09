"""For `foreachBatch`: several outputs in one commit, exactly once, and tables that are updated by key."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from pyspark.sql import DataFrame

from headwater import Commit, InvalidRequestError, Marker, Store
from headwater.spark.addresses import StoreAddress, address_of, patiently, read_address
from headwater.spark.options import SinkOptions, find_local
from headwater.spark.staging import drop_pieces, make_fingerprint, make_owner, publish

#: (store, owner) -> (run, batch) of what this process stored last: in one run Spark gives each batch to the function once.
_stored: dict[tuple[str, str], tuple[str, int]] = {}


def transaction(
    batch_df: DataFrame,
    batch_id: int,
    store: Store | str | os.PathLike[str] | None = None,
    *,
    name: str = "transaction",
    on_rollback: str = "fail",
    lease: float = 86400.0,
    require: tuple[str, str, int] | None = None,
) -> BatchTransaction:
    """One commit for all that a function given to `foreachBatch` writes: use it in a `with` block.

    However often Spark runs the batch, it is stored once. `store` may be left out where HEADWATER_STORE names it. A function that has
    several transactions gives each a `name`: by that a repeated batch is told from another output. With `require`, a table, a key and a
    version, the commit is refused unless the entry is at that version.
    """
    if not name or "#" in name:
        raise InvalidRequestError(f"a transaction's name is a text without '#', which counts rollbacks, not {name!r}")
    if on_rollback not in ("fail", "append"):
        raise InvalidRequestError(f"on_rollback is 'fail' or 'append', not {on_rollback!r}")
    address = read_address({}) if store is None else address_of(store)
    return BatchTransaction(batch_df, batch_id, address, name, on_rollback == "append", lease, require)


def upsert(
    store: Store | str | os.PathLike[str], table: str, key: str | None = None, *, require: tuple[str, str, int] | None = None
) -> Callable[[DataFrame, int], None]:
    """A function for `foreachBatch` that puts each row into a table, exactly once, also in update mode.

    `key` is the column whose rows replace each other, by default the first one. `require` is that of `transaction`.
    """
    address = address_of(store)

    def write(batch_df: DataFrame, batch_id: int) -> None:
        with BatchTransaction(batch_df, batch_id, address, f"table {table}", False, 86400.0, require) as tx:
            tx.upsert(batch_df, table, key=key)

    return write


class BatchTransaction:
    """Outputs of one micro-batch that are committed together when the `with` block ends, and dropped if it ends with an error."""

    def __init__(
        self,
        batch_df: DataFrame,
        batch_id: int,
        address: StoreAddress,
        name: str,
        append_after_rollback: bool,
        lease: float,
        require: tuple[str, str, int] | None,
    ) -> None:
        query = batch_df.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId")
        if query is None:
            raise InvalidRequestError("headwater.spark.transaction and upsert belong into a function that is given to foreachBatch")
        self._query = query
        self._batch_id = batch_id
        checkpoint, self._run = _find_run(batch_df, query)
        self._options = SinkOptions(
            address,
            None,
            None,
            None,
            None,
            None,
            False,
            1,
            lease,
            append_after_rollback,
            checkpoint,
            checkpoint is None,
            name,
            require=require,
        )
        #: The transactions of the outputs, and their receipts.
        self._outputs: list[str] = []
        self._receipts: list[str] = []
        self._count = self._hash = 0
        #: What the commit said; None if the batch was committed before.
        self.commit: Commit | None = None

    def write(
        self, df: DataFrame, stream: str, *, key: str | None = None, time: str | None = None, create: bool = False, segments: int = 1
    ) -> None:
        """Add a DataFrame's rows to a stream. Its tasks run now; the rows are visible after the commit."""
        self._stage(df, {"stream": stream, "key": key, "time": time, "create": str(create).lower(), "segments": str(segments)})

    def upsert(self, df: DataFrame, table: str, *, key: str | None = None) -> None:
        """Put each row into a table, made if it is missing, under the value of its key column (the first one)."""
        self._stage(df, {"table": table, "key": key or df.columns[0], "create": "true"})

    def _stage(self, df: DataFrame, options: dict[str, str | None]) -> None:
        """Run the DataFrame's job. Its rows gather in a transaction that is not committed, but adopted by the one that is."""
        address = self._options.address
        store = patiently(address.open)
        label = Marker(self._owner, self._batch_id, None)
        collector = store.transaction(lease=self._options.lease_seconds, auto_renew=False, marker=label)
        with tempfile.TemporaryDirectory(prefix="headwater-") as folder:
            report = Path(folder) / "rows.json"
            writer = df.write.format("headwater").mode("append").option("store", address.url)
            inner = {"headwater.into": collector.id, "headwater.label": self._options.target, "headwater.report": str(report)}
            if self._options.hashes_rows:
                inner["headwater.hash"] = "true"
            place = {"catalog": address.catalog or "", "lease": str(max(1, int(self._options.lease_seconds)))}
            storage = {f"storage.{name}": text for name, text in address.storage_options}
            given = {**place, **storage, **options, **inner}
            try:
                writer.options(**{name: text for name, text in given.items() if text is not None}).save()
            except BaseException:
                # The function may go on all the same: then half an output is not committed with the others.
                drop_pieces(store, [collector.id])
                raise
            receipt, count, total = json.loads(report.read_text(encoding="utf-8"))
            if self._options.hashes_rows:
                self._count += count
                self._hash = (31 * self._hash + total) % (1 << 64)
        self._outputs.append(collector.id)
        self._receipts.append(receipt)

    def __enter__(self) -> BatchTransaction:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        store = patiently(self._options.address.open)
        if error is not None:
            drop_pieces(store, self._outputs)
        elif self._outputs:
            self._check_name(store)
            fingerprint = make_fingerprint(self._options, self._batch_id, self._count, self._hash)
            adopt = lambda tx: patiently(lambda: tx.adopt(self._receipts))  # noqa: E731
            self.commit = publish(store, self._options, self._query, self._batch_id, fingerprint, adopt)
            _stored[store.id, self._owner] = (self._run, self._batch_id)

    @property
    def _owner(self) -> str:
        return make_owner(self._query, self._options.target)

    def _check_name(self, store: Store) -> None:
        """Refuse a second transaction of one name in a batch: by its marker it would be found to be stored, and its rows dropped."""
        if _stored.get((store.id, self._owner)) == (self._run, self._batch_id):
            drop_pieces(store, self._outputs)
            raise InvalidRequestError(
                f"batch {self._batch_id} has stored a transaction called {self._options.target!r} already: write all outputs in one, "
                "or give each transaction a name of its own, transaction(..., name='totals'). Nothing of this one was written"
            )


def _find_run(batch_df: DataFrame, query: str) -> tuple[Path | None, str]:
    """(where the query's checkpoint is, if it is on this machine and Spark tells; the id of the query's run)."""
    session: Any = batch_df.sparkSession
    try:
        # The session in foreachBatch is a copy that knows no queries; what all copies share does.
        running = session._jsparkSession.sharedState().activeStreamingQueries()
        found = running.get(session._jvm.java.util.UUID.fromString(query))
        return find_local(str(found.resolvedCheckpointRoot())), str(found.runId())
    except Exception:  # Spark has no public way to ask, and this one may be gone in any version: rows are compared then.
        return None, str(session.sparkContext.getLocalProperty("spark.jobGroup.id"))
