"""The file that `headwater pipeline` is given: totals per item, and a copy of all orders. It is killed again and again.

HEADWATER_TEST_SHOP=FOLDER headwater pipeline run tests/spark/sales_job.py
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pyspark.sql import functions as f

import headwater as hw
import headwater.spark
from headwater.pipelines import Pipeline
from headwater.pipelines.sessions import SETTINGS
from tests.spark.pipelines import FAST
from tests.spark.shop import ORDERS, TOTALS

COPIED = "shop/copied"


def declare(store: hw.Store, folder: Path, spark: Any = None) -> Pipeline:
    pipeline = Pipeline("sales", store, checkpoints=folder / "checkpoints", spark=spark)

    @pipeline.table(TOTALS, key="item", partitions=2, max_events=150)
    def totals(read: Any) -> Any:
        return read.stream(ORDERS).groupBy("item").agg(f.sum("price").alias("total"))

    @pipeline.stream(COPIED, key="item", max_events=100)
    def copied(read: Any) -> Any:
        return read.stream(ORDERS).select("id", "item")

    return pipeline


if __name__.startswith("_headwater_"):
    settings = {**FAST, **{name.replace(".", "__"): value for name, value in SETTINGS.items()}}
    session = headwater.spark.session("sales", master="local[2,3]", **settings)
    session.sparkContext.setLogLevel("OFF")
    folder = Path(os.environ["HEADWATER_TEST_SHOP"])
    pipeline = declare(hw.open(folder / "store", create=False, upkeep=False), folder)
