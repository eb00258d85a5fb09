"""The Spark session of a pipeline: taken or made, with state in RocksDB, whose files alone can be copied and divided anew."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pyspark.sql import SparkSession

from headwater import InvalidRequestError
from headwater.spark import register, session

_STATE = "spark.sql.streaming.stateStore."
PROVIDER = f"{_STATE}providerClass"
CHANGELOG = f"{_STATE}rocksdb.changelogCheckpointing.enabled"
ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
#: What a session needs, as `SparkSession.builder.config` takes it.
SETTINGS = {PROVIDER: ROCKSDB, CHANGELOG: "true"}
PARTITIONS = "spark.sql.shuffle.partitions"

_lock = threading.RLock()


def take_session(pipeline: str, given: SparkSession | None) -> SparkSession:
    """The session given, else the active one, else a new one. InvalidRequestError if it keeps state in another way."""
    found = given or SparkSession.getActiveSession()
    if found is None:
        found = session(f"headwater {pipeline}", **{name.replace(".", "__"): text for name, text in SETTINGS.items()})
        # Queries that fail are told by the pipeline, once.
        found.sparkContext.setLogLevel("ERROR")
        return found
    check_session(pipeline, found)
    _activate(found)
    return register(found)


def _activate(found: SparkSession) -> None:
    """Make the session this thread's active one: Spark finds `headwater` only by that when a query starts."""
    jvm: Any = found._jvm
    getattr(jvm, "org.apache.spark.sql.classic.SparkSession").setActiveSession(found._jsparkSession)


def check_session(pipeline: str, found: SparkSession) -> None:
    for name, wanted in SETTINGS.items():
        has = found.conf.get(name, "") or ""
        if has.lower() != wanted.lower():
            raise InvalidRequestError(
                f"pipeline {pipeline}: the session has {name}={has or 'nothing'}, and savepoints need {wanted}: set it with "
                f"spark.conf.set({name!r}, {wanted!r}), or leave `spark` out, and a session is made"
            )


@contextmanager
def setting(spark: SparkSession, name: str, value: str | None) -> Iterator[None]:
    """A setting for what is started in the block: a query copies the session's settings when it starts."""
    with _lock:
        before = spark.conf.get(name, None)
        if value is not None:
            spark.conf.set(name, value)
        try:
            yield
        finally:
            if value is not None:
                if before is None:
                    spark.conf.unset(name)
                else:
                    spark.conf.set(name, before)


def repartition(spark: SparkSession, checkpoint: str, partitions: int) -> None:
    """Divide the state of a stopped query anew, in place. Spark has no public call for it, and this one may be gone in any version."""
    manager: Any = getattr(spark, "_streamingCheckpointManager", None)
    if manager is None:
        raise InvalidRequestError(
            f"rescale is not available with Spark {spark.version}: this version can't divide a checkpoint's state. "
            "Run the pipeline with Spark 4.3, or give the output a new name with other `partitions`, which is filled from the head"
        )
    manager.repartition(checkpoint, partitions)


def can_repartition(spark: SparkSession) -> bool:
    return hasattr(spark, "_streamingCheckpointManager")
