"""Headwater for Spark: streams as sources and sinks of PySpark, every event counted once."""

try:
    import pyspark  # noqa: F401
except ImportError as error:
    raise ImportError("headwater.spark needs PySpark: pip install 'headwater[spark]'") from error

from headwater.spark.datasource import HeadwaterDataSource
from headwater.spark.foreach import BatchTransaction, transaction, upsert
from headwater.spark.history import Compaction, compact, table
from headwater.spark.java import java_home
from headwater.spark.progress import lag
from headwater.spark.session import register, session

__all__ = [
    "BatchTransaction",
    "Compaction",
    "HeadwaterDataSource",
    "compact",
    "java_home",
    "lag",
    "register",
    "session",
    "table",
    "transaction",
    "upsert",
]
