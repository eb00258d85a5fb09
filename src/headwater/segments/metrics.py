"""Metrics of operations: how often each was run, how long that took, and how often it failed."""

from __future__ import annotations

import threading
import time
from typing import NamedTuple, ParamSpec, TypeVar

from headwater.catalog.operations import Operation, Runner

P = ParamSpec("P")
T = TypeVar("T")


class OperationMetrics(NamedTuple):
    """One kind of request to the catalog, as this process made it: `failures` of the `calls` raised, `seconds` is the time of all."""

    calls: int
    failures: int
    seconds: float


class Metrics(NamedTuple):
    """What a process counted since it opened the store: its requests to the catalog, by the operation's name."""

    operations: dict[str, OperationMetrics]


class Metered:
    """A runner that counts what another one runs."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._begin()

    def _begin(self) -> None:
        # Reentrant, because a signal's handler may run an operation while this thread counts another one.
        self._lock = threading.RLock()
        self._operations: dict[str, OperationMetrics] = {}

    def after_fork(self) -> None:
        self._begin()

    def run(self, operation: Operation[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        began = time.perf_counter()
        failures = 1
        try:
            result = self._runner.run(operation, *args, **kwargs)
            failures = 0
            return result
        finally:
            self._count(operation.name, failures, time.perf_counter() - began)

    def _count(self, name: str, failures: int, seconds: float) -> None:
        with self._lock:
            before = self._operations.get(name, _NONE)
            self._operations[name] = OperationMetrics(before.calls + 1, before.failures + failures, before.seconds + seconds)

    def values(self) -> Metrics:
        with self._lock:
            return Metrics(dict(self._operations))


_NONE = OperationMetrics(0, 0, 0.0)
