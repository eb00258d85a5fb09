"""Tables of a store as DataFrames, as of the moment at which Spark plans to read them: in a micro-batch that is the batch's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType

from headwater import InvalidRequestError, NotFoundError
from headwater.spark.addresses import StoreAddress, patiently, read_address
from headwater.spark.types import to_arrow

_SCHEMA = StructType(
    [StructField("key", StringType(), False), StructField("value", BinaryType(), False), StructField("version", LongType(), False)]
)
_ROWS = 10_000


class TableDataSource(DataSource):
    """`headwater_table`: the entries of a table, with the options `table` and those that name the store."""

    @classmethod
    def name(cls) -> str:
        return "headwater_table"

    def schema(self) -> StructType:
        return _SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:
        return TableReader(self.options)


class TableReader(DataSourceReader):
    """Reads all entries in one task: a table's entries are few beside a stream's events."""

    def __init__(self, options: Mapping[str, str]) -> None:
        table = options.get("table")
        if not table:
            raise InvalidRequestError("which table? Give option('table', 'scope/name')")
        self._table = table
        self._address: StoreAddress = read_address(options)

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(None)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        store = patiently(self._address.open)
        if self._table not in store.tables():
            raise NotFoundError(f"there is no table {self._table} in {store.url}")
        entries = iter(store.table(self._table).items())
        schema = to_arrow(_SCHEMA)
        while rows := list(islice(entries, _ROWS)):
            columns = [[key for key, _ in rows], [entry.value for _, entry in rows], [entry.version for _, entry in rows]]
            yield pa.RecordBatch.from_arrays(
                [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)], schema=schema
            )
