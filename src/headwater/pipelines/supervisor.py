"""Keeps the queries of a pipeline running: starts them one after the other, and restarts those that a restart may help."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspark.sql.streaming.query import StreamingQuery

from headwater import Cut, HeadwaterError, Store
from headwater.pipelines.checkpoints import last_batch, read_sources
from headwater.pipelines.failures import Failure, classify
from headwater.pipelines.graph import Graph, Output
from headwater.pipelines.queries import Built, start_query
from headwater.pipelines.tenure import Tenure
from headwater.spark import lag

#: Restarts without a finished batch in between.
_BUDGET = {"repeat": 8, "data": 2, "definition": 0}
_BACKOFF_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0)
_LAG_SECONDS = 5.0
RUNNING, WAITING, FAILED, DONE, BLOCKED, STOPPED = "running", "restarting", "failed", "caught up", "blocked", "stopped"


@dataclass
class Task:
    """An output's query, and how it fared."""

    output: Output
    built: Built
    state: str = BLOCKED
    query: StreamingQuery | None = None
    restarts: int = 0
    #: Failures since the last batch that was finished.
    failures: int = 0
    last_batch: int = -1
    start_at: float = 0.0
    last_error: str | None = None
    lag_events: int | None = None
    lag_at: float = -_LAG_SECONDS


class Supervisor:
    """The queries of a pipeline's live generations."""

    def __init__(self, tenure: Tenure, store: Store, graph: Graph, built: Mapping[str, Built], *, until: str | None) -> None:
        self._tenure = tenure
        self._store = store
        self._graph = graph
        self._until = until
        self.tasks = {output.name: Task(output, built[output.name]) for output in graph.in_order()}

    def _checkpoint(self, task: Task) -> Path:
        generation = self._tenure.live.outputs[task.output.name]
        return self._tenure.folders.generation(task.output.name, generation.number)

    # Running.

    def tick(self) -> None:
        """Look at all queries once: note what ended, start what may start. FencedError if the pipeline was taken over."""
        for task in self.tasks.values():
            if task.state == RUNNING and task.query is not None:
                self._look(task, task.query)
            if task.state in (BLOCKED, WAITING) and time.monotonic() >= task.start_at and self._may_start(task):
                self._start(task)

    def _may_start(self, task: Task) -> bool:
        """With an end, an output starts when all that it reads has caught up. In a cycle nothing waits."""
        if self._until is None:
            return True
        return all(
            self.tasks[other.name].state == DONE
            for other in self._graph.upstream(task.output)
            if other != task.output and task.output not in self._graph.upstream(other)
        )

    def _start(self, task: Task) -> None:
        try:
            task.query = start_query(
                task.output,
                task.built,
                self._store,
                self._checkpoint(task),
                self._tenure.fence,
                task.output.partitions,
                until=self._until,
            )
            task.state = RUNNING
        except Exception as error:
            # Spark raises what it likes here; it is judged by its text.
            self._fail(task, describe_error(error))

    def _look(self, task: Task, query: StreamingQuery) -> None:
        progress = query.lastProgress
        if progress is not None and progress.batchId > task.last_batch and (progress.durationMs or {}).get("addBatch") is not None:
            task.last_batch = progress.batchId
            task.failures = 0
        if query.isActive:
            return
        error = query.exception()
        if error is None:
            task.state = DONE
        else:
            self._fail(task, describe_error(error))

    def _fail(self, task: Task, failure: Failure) -> None:
        self._tenure.check()
        task.last_error = f"{failure.kind}: {failure.reason}"
        if task.failures >= _BUDGET[failure.kind]:
            task.state = FAILED
            return
        task.state = WAITING
        task.start_at = time.monotonic() + _BACKOFF_SECONDS[min(task.failures, len(_BACKOFF_SECONDS) - 1)]
        task.failures += 1
        task.restarts += 1

    def is_done(self) -> bool:
        """Whether nothing will happen any more: all have caught up or failed, or wait for one that failed."""
        states = [task.state for task in self.tasks.values()]
        if any(state in (RUNNING, WAITING) for state in states):
            return False
        if any(task.state == BLOCKED and self._may_start(task) for task in self.tasks.values()):
            return False
        if FAILED not in states and self._graph.has_cycle() and self._has_new_input():
            for task in self.tasks.values():
                task.state = BLOCKED
            return False
        return True

    def _has_new_input(self) -> bool:
        """Whether a round through a cycle gave it something to read."""
        return any(self._count_lag(task) for task in self.tasks.values())

    def failed(self) -> list[Task]:
        return [task for task in self.tasks.values() if task.state == FAILED]

    def stop(self) -> None:
        """Stop all queries, the last ones of the graph first."""
        for task in reversed(self.tasks.values()):
            if task.query is not None:
                with suppress(Exception):  # It is stopped, or its session is gone.
                    task.query.stop()
                if task.state in (RUNNING, WAITING):
                    task.state = STOPPED

    # What commands need.

    def wait_for_commit(self, name: str, batch: int, seconds: float = 120.0) -> bool:
        """Wait until Spark has noted that a batch is done; False if its query ends before that."""
        task = self.tasks.get(name)
        deadline = time.monotonic() + seconds
        while task is not None and time.monotonic() < deadline:
            if last_batch(self._checkpoint(task), "commits") >= batch:
                return True
            if task.query is None or not task.query.isActive:
                return last_batch(self._checkpoint(task), "commits") >= batch
            time.sleep(0.01)
        return False

    # Status.

    def status(self) -> dict[str, Any]:
        return {name: self._describe(task) for name, task in self.tasks.items()}

    def _describe(self, task: Task) -> dict[str, Any]:
        generation = self._tenure.live.outputs.get(task.output.name)
        progress: Any = None
        if task.query is not None:
            with suppress(Exception):
                last = task.query.lastProgress
                progress = json.loads(last.json) if last is not None else None
        sources = progress["sources"] if progress else []
        ends = [end for source in sources if isinstance(end := source.get("endOffset"), dict) and "streams" in end]
        operators = progress["stateOperators"] if progress else []
        watermark = (progress.get("eventTime") or {}).get("watermark") if progress else None
        if task.query is not None and time.monotonic() - task.lag_at > _LAG_SECONDS:
            task.lag_at = time.monotonic()
            with suppress(Exception):
                task.lag_events = lag(task.query, self._store).events
        return {
            "state": task.state,
            "batch": progress["batchId"] if progress else None,
            "cut": [str(Cut.parse(json.dumps(end))) for end in ends],
            "lag": task.lag_events,
            "rate": round(sum(float(source.get("processedRowsPerSecond") or 0.0) for source in sources), 1),
            "watermark": watermark,
            "state_rows": sum(int(operator["numRowsTotal"]) for operator in operators),
            "state_bytes": sum(int(operator["memoryUsedBytes"]) for operator in operators),
            "restarts": task.restarts,
            "last_error": task.last_error,
            "owner": str(self._tenure.owner),
            "generation": generation.number if generation is not None else None,
        }

    def _count_lag(self, task: Task) -> int:
        checkpoint = self._checkpoint(task)
        batch = last_batch(checkpoint, "commits")
        cuts: Sequence[Cut] = read_sources(checkpoint, batch) if batch >= 0 else ()
        found = 0
        for cut in cuts:
            for name in cut.streams:
                with suppress(HeadwaterError):
                    found += sum(part.count for part in self._store.stream(name).ranges(cut, skip_truncated=True))
        return found


def describe_error(error: BaseException) -> Failure:
    """The class of whatever ended a query, by the text of it and of its causes."""
    texts: list[str] = []
    seen: BaseException | None = error
    while seen is not None and len(texts) < 8:
        texts += [f"{type(seen).__name__}: {seen}", str(getattr(seen, "_desc", "") or ""), str(getattr(seen, "_stackTrace", "") or "")]
        seen = getattr(seen, "_cause", None) or seen.__cause__
    if isinstance(error, HeadwaterError):
        return classify(f"headwater.errors.{type(error).__name__}: {error}")
    return classify("\n".join(text for text in texts if text))
