"""What a pipeline's function gets: `read`, which makes the DataFrames of its inputs and notes what it made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from headwater import Cut, InvalidRequestError, NotFoundError, Store
from headwater.pipelines.graph import Graph, Output, refuse_later, source_of
from headwater.spark.addresses import address_of
from headwater.spark.types import METADATA, to_spark_schema


class MissingInputError(Exception):
    """An output of this pipeline that is read does not exist yet. Never leaves the package."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def place_options(store: Store) -> dict[str, str]:
    """The options of headwater's source and sink that name a store."""
    address = address_of(store)
    storage = {f"storage.{name}": text for name, text in address.storage_options}
    return {"store": address.url, "catalog": address.catalog or "", **storage}


class Read:
    """The inputs of one output, as DataFrames."""

    def __init__(
        self,
        spark: SparkSession,
        store: Store,
        graph: Graph,
        output: Output,
        *,
        starts: Sequence[Sequence[str]] = (),
        planned: Mapping[str, StructType] | None = None,
    ) -> None:
        #: The session, for whatever the calls below don't have.
        self.spark = spark
        self._store = store
        self._graph = graph
        self._output = output
        self._known_starts = starts
        self._planned = planned or {}
        self._path: list[str] = []
        #: (stream, cut) in the order of the calls.
        self.starts: list[list[str]] = []
        self._sources = [source_of(output.function)]

    @property
    def code(self) -> str:
        """The source of all functions that ran."""
        return "\n".join(self._sources)

    def stream(self, name: str, start: Cut | datetime | str = "head", **options: Any) -> DataFrame:
        """A stream's events as they come, with the columns `_key, _time, _stream, _segment, _number` besides its own.

        `start` counts when the output is new: head, tail, a cut or a time. `options` are those of headwater's source: columns, where, ...
        """
        for word in ("stream", "streams", "end", "group", "store", "catalog"):
            if word in options:
                raise InvalidRequestError(f"read.stream({name!r}) takes no option {word!r}: the pipeline decides it")
        found = self._find(name)
        if found is not None:
            return self._with_watermark(self._source({"stream": name}).schema(found).load())
        begun = self._begin(name, start)
        given: dict[str, Any] = {"stream": name, "start": begun, **options}
        if self._output.max_events is not None:
            given.setdefault("max_events_per_batch", self._output.max_events)
        return self._with_watermark(self._source(given).load())

    def _source(self, options: Mapping[str, Any]) -> Any:
        return self.spark.readStream.format("headwater").options(**place_options(self._store), **options)

    def _find(self, name: str) -> StructType | None:
        """The planned schema of a stream that does not exist yet, None for one that exists."""
        if name in self._store.streams():
            return None
        if self._graph.producer(name) is None:
            raise NotFoundError(f"pipeline {self._graph.pipeline}: {self._output.name!r} reads {name}, and there is no such stream")
        if name not in self._planned:
            raise MissingInputError(name)
        self.starts.append([name, ""])
        return self._planned[name]

    def _begin(self, name: str, start: Cut | datetime | str) -> str:
        at = len(self.starts)
        if at < len(self._known_starts) and self._known_starts[at][0] == name:
            text = self._known_starts[at][1]
        else:
            stream = self._store.stream(name)
            cut = stream.tail() if start == "tail" else stream.head() if start == "head" else start
            cut = stream.cut_at(cut) if isinstance(cut, datetime) else cut
            text = str(Cut.parse(cut) if isinstance(cut, str) else cut)
        self.starts.append([name, text])
        return text

    def table(self, name: str) -> DataFrame:
        """A table's entries as of each micro-batch: columns `key`, `value` (bytes) and `version`."""
        known = name in self._store.tables()
        if not known and self._graph.producer(name) is None:
            raise NotFoundError(f"pipeline {self._graph.pipeline}: {self._output.name!r} reads {name}, and there is no such table")
        if not known and name not in self._planned:
            raise MissingInputError(name)
        return self.spark.read.format("headwater_table").options(**place_options(self._store), table=name).load()

    def parquet(self, *paths: str, **options: Any) -> DataFrame:
        """Parquet files, read as a table."""
        return self.spark.read.options(**options).parquet(*paths)

    def view(self, name: str) -> DataFrame:
        """What a view of this pipeline gives."""
        view = self._graph.views.get(name)
        if view is None or name in self._path:
            raise InvalidRequestError(f"pipeline {self._graph.pipeline}: there is no view {name!r}, or it reads itself")
        self._path.append(name)
        self._sources.append(source_of(view.function))
        try:
            df = view.function(self)
        finally:
            self._path.pop()
        if not isinstance(df, DataFrame):
            raise InvalidRequestError(f"the view {name!r} returns a {type(df).__name__}: return a DataFrame")
        return self._with_watermark(df)

    def parse(self, *arguments: Any, **options: Any) -> DataFrame:
        raise refuse_later("parse")

    def _with_watermark(self, df: DataFrame) -> DataFrame:
        """The output's watermark, on what its own function reads. Views are shared, so they have none."""
        watermark = self._output.watermark
        if watermark is None or self._path or not df.isStreaming or watermark[0] not in df.columns:
            return df
        return df.withWatermark(*watermark)


def source_columns(columns: StructType) -> StructType:
    """What `read.stream` will give for a stream that is made for rows with these columns."""
    own = [field for field in columns if not field.name.startswith("_")]
    return StructType([*own, *to_spark_schema(METADATA)])
