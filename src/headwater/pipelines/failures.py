"""Why a query ended: something that a restart may help, its data, or its definition."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

Class = Literal["repeat", "data", "definition"]

_OURS = re.compile(r"headwater\.(?:\w+\.)*(\w+Error): ([^\n]*)")
_PYTHON = re.compile(r"^(?:\w+\.)*(\w*(?:Error|Exception)): ([^\n]*)", re.MULTILINE)
_REPEATED = {"UnavailableError", "OutcomeUnknownError", "FencedError", "TransactionEndedError"}
_DEFINITIONS = {"NotFoundError", "AlreadyExistsError", "SealedError", "RolledBackError", "TruncatedError", "IncompatibleError"}
#: Texts of Spark and Java that stand for something outside of the query.
_OUTSIDE = (
    "OptionalDataException",
    "ConcurrentModificationException",
    "CONCURRENT_STREAM_LOG_UPDATE",
    "Multiple streaming jobs detected",
    "ExecutorLostFailure",
    "FetchFailed",
    "Py4JNetworkError",
    "ConnectException",
    "SocketException",
    "SocketTimeoutException",
    "EOFException",
    "Python worker exited unexpectedly",
    "No space left on device",
    "OutOfMemoryError",
    "cannot schedule new futures",
)
_OF_DEFINITION = ("AnalysisException", "STATE_STORE_KEY_SCHEMA_NOT_COMPATIBLE", "STATE_STORE_VALUE_SCHEMA_NOT_COMPATIBLE")


class Failure(NamedTuple):
    """The class of an error, and a line that says what happened."""

    kind: Class
    reason: str


def classify(text: str) -> Failure:
    """Judge an error by its whole text, a Python traceback in a Java one."""
    ours = _OURS.findall(text)
    if ours:
        name, message = ours[-1]
        kind: Class = "repeat" if name in _REPEATED else "definition" if name in _DEFINITIONS else "data"
        return Failure(kind, f"{name}: {message.strip()}")
    for word in _OUTSIDE:
        if word in text:
            return Failure("repeat", _line_with(text, word))
    for word in _OF_DEFINITION:
        if word in text:
            return Failure("definition", _line_with(text, word))
    found = [(name, message) for name, message in _PYTHON.findall(text) if name not in ("StreamingQueryException", "Py4JJavaError")]
    if "Traceback (most recent call last)" in text and found:
        name, message = found[-1]
        return Failure("data", f"{name}: {message.strip()}")
    return Failure("data", _line_with(text, "SQLSTATE") if "SQLSTATE" in text else text.strip().split("\n", 1)[0][:500])


def _line_with(text: str, word: str) -> str:
    return next((line.strip()[:500] for line in text.splitlines() if word in line), word)
