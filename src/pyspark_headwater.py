"""PySpark looks for modules of this name's form by itself: with headwater installed, `format("headwater")` needs no registration."""

from headwater.spark.datasource import HeadwaterDataSource as DefaultSource

__all__ = ["DefaultSource"]
