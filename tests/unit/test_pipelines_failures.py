"""Which errors of a query a restart may help."""

from __future__ import annotations

import pytest

from headwater.pipelines.failures import classify

TASK = """org.apache.spark.api.python.PythonException: Traceback (most recent call last):
  File "worker.py", line 1, in main
  File "job.py", line 3, in double
{}

	at org.apache.spark.api.python.BasePythonRunner"""


@pytest.mark.parametrize(
    ("text", "kind", "reason"),
    [
        (TASK.format("headwater.errors.UnavailableError: the disk is full"), "repeat", "UnavailableError: the disk is full"),
        (TASK.format("headwater.errors.InvalidRequestError: 3 rows have no key"), "data", "InvalidRequestError: 3 rows have no key"),
        (TASK.format("headwater.errors.TruncatedError: events 1 to 4"), "definition", "TruncatedError: events 1 to 4"),
        (TASK.format("ZeroDivisionError: division by zero"), "data", "ZeroDivisionError: division by zero"),
        ("java.io.OptionalDataException\n\tat java.base/java.io", "repeat", "java.io.OptionalDataException"),
        ("[CONCURRENT_STREAM_LOG_UPDATE] Concurrent update to the log. Multiple streaming jobs detected", "repeat", "Concurrent update"),
        ("pyspark.errors.AnalysisException: [UNRESOLVED_COLUMN] no x", "definition", "UNRESOLVED_COLUMN"),
        ("[DIVIDE_BY_ZERO] Division by zero. SQLSTATE: 22012", "data", "DIVIDE_BY_ZERO"),
        ("something odd", "data", "something odd"),
    ],
)
def test_an_error_is_classed_by_its_text(text: str, kind: str, reason: str) -> None:
    found = classify(text)
    assert found.kind == kind and reason in found.reason
