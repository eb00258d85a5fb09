"""Objects that other libraries read as Arrow data, by Arrow's PyCapsule interface, and the two frames that most people want."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import pyarrow as pa


class Exported(ABC):
    """Rows that `pa.table(x)`, `pl.DataFrame(x)` and `duckdb.sql("FROM x")` take as they are, batch by batch."""

    @abstractmethod
    def _read_batches(self) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        """All rows as of now."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """Export all rows as of now, for any library with Arrow's PyCapsule interface."""
        return pa.RecordBatchReader.from_batches(*self._read_batches()).__arrow_c_stream__(requested_schema)


class ExportedWhole(Exported):
    """Rows that are also given as one table or frame."""

    def to_arrow(self) -> pa.Table:
        """Return all rows as of now as one Arrow table."""
        schema, batches = self._read_batches()
        return pa.Table.from_batches(batches, schema=schema)

    def to_pandas(self) -> Any:
        """Return all rows as of now as a pandas DataFrame."""
        return self.to_arrow().to_pandas()

    def to_polars(self) -> Any:
        """Return all rows as of now as a Polars DataFrame."""
        return as_polars(self.to_arrow())


def as_polars(table: pa.Table) -> Any:
    """An Arrow table as a Polars DataFrame."""
    import polars  # not required: whoever asks for its frames has it

    return polars.from_arrow(table)
