"""One Spark session for all tests that kill no driver, set up to start fast, and stores for it to work on."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import headwater as hw
import headwater.spark
from tests.spark.pipelines import FAST, Lab


@pytest.fixture(scope="session")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    # The workers import sinks with faults from these tests.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    spark = headwater.spark.session(
        "tests", master="local[2,3]", **{**FAST, "spark__sql__warehouse__dir": str(tmp_path_factory.mktemp("warehouse"))}
    )
    spark.sparkContext.setLogLevel("OFF")
    # A query that fails on purpose is no reason for 100 lines.
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    yield spark
    spark.stop()


@pytest.fixture
def spark(session: SparkSession) -> Iterator[SparkSession]:
    """The session, with nothing left running by the test."""
    yield session
    for query in session.streams.active:
        query.stop()


@pytest.fixture
def lab(spark: SparkSession, tmp_path: Path) -> Iterator[Lab]:
    """A store on SQLite, and short words for what tests do with it."""
    with hw.open(tmp_path / "store", upkeep=False) as store:
        yield Lab(spark, store, tmp_path)
