"""Pipelines: Spark queries over streams and tables that survive crashes, upgrades and second thoughts."""

try:
    import pyspark  # noqa: F401
except ImportError as error:
    raise ImportError("headwater.pipelines needs PySpark: pip install 'headwater[spark]'") from error

from headwater.pipelines.errors import IncompatibleError, OutputFailedError
from headwater.pipelines.pipeline import Pipeline, Run
from headwater.pipelines.reads import Read
from headwater.pipelines.savepoints import Savepoint

__all__ = ["IncompatibleError", "OutputFailedError", "Pipeline", "Read", "Run", "Savepoint"]
