"""What Spark calls: the data source `headwater`, and its registration with a session."""

from __future__ import annotations

import sys

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, DataSourceStreamWriter, DataSourceWriter
from pyspark.sql.types import StructType

from headwater.spark.options import read_sink_options, read_source_options
from headwater.spark.sink import BatchWriter, StreamWriter
from headwater.spark.source import BatchReader, FilteringReader, StreamReader, source_schema


class HeadwaterDataSource(DataSource):
    """Streams of a headwater store, as a source and a sink, in batches and in micro-batches."""

    @classmethod
    def name(cls) -> str:
        return "headwater"

    def schema(self) -> StructType:
        return source_schema(read_source_options(self.options))

    def reader(self, schema: StructType) -> DataSourceReader:
        # Where Spark's setting for it is off, a reader that takes filters fails: only when it is on is this module loaded.
        takes_filters = "pyspark.sql.worker.data_source_pushdown_filters" in sys.modules
        return (FilteringReader if takes_filters else BatchReader)(read_source_options(self.options), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return StreamReader(read_source_options(self.options), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        return BatchWriter(read_sink_options(self.options), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        return StreamWriter(read_sink_options(self.options), schema, overwrite)
