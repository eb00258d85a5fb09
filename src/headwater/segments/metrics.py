"""Metrics of operations: how often each was run, how long that took, and how often it failed."""

from __future__ import annotations

import threading
from time import perf_counter
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
        #: [calls, failures, seconds] by name.
        self._operations: dict[str, list[float]] = {}

    def after_fork(self) -> None:
        self._begin()

    def run(self, operation: Operation[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        began = perf_counter()
        failures = 1
        try:
            result = self._runner.run(operation, *args, **kwargs)
            failures = 0
            return result
        finally:
            seconds = perf_counter() - began
            with self._lock:
                counts = self._operations.get(operation.name)
                if counts is None:
                    counts = self._operations[operation.name] = [0, 0, 0.0]
                counts[0] += 1
                counts[1] += failures
                counts[2] += seconds

    def values(self) -> Metrics:
        with self._lock:
            found = {name: (int(calls), int(failures), seconds) for name, (calls, failures, seconds) in self._operations.items()}
        return Metrics({name: OperationMetrics(*counts) for name, counts in found.items()})
