"""The process that runs a pipeline: it takes the pipeline over, supervises its queries, carries out commands, and lets it go."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from pyspark.sql import SparkSession

from headwater import HeadwaterError, InvalidRequestError, Store, UnavailableError
from headwater.pipelines import commands, savepoints
from headwater.pipelines.errors import OutputFailedError
from headwater.pipelines.graph import Graph
from headwater.pipelines.preparing import prepare
from headwater.pipelines.register import ANSWER, REQUEST, SAVEPOINT, Register
from headwater.pipelines.requests import make_answer
from headwater.pipelines.supervisor import BLOCKED, RUNNING, WAITING, Supervisor
from headwater.pipelines.tenure import Folders, Tenure, acquire

log = logging.getLogger("headwater.pipelines")
_TICK_SECONDS = 0.1
_SERVE_SECONDS = 0.4


class Runner:
    """Has the pipeline, with or without running queries. Its methods are called by one thread, `stop` by any."""

    def __init__(
        self,
        register: Register,
        folders: Folders,
        graph: Graph,
        session: Callable[[], SparkSession],
        *,
        until: str | None = None,
        waits: bool = False,
        status: Callable[[Mapping[str, Any]], None] = lambda status: None,
    ) -> None:
        self._register = register
        self._folders = folders
        self._graph = graph
        self._session = session
        self._until = until
        self._waits = waits
        self._show = status
        self._tenure: Tenure | None = None
        self._supervisor: Supervisor | None = None
        self._stopping = threading.Event()
        self._stop_savepoint: str | None = None
        self._command: threading.Thread | None = None
        #: Set when all queries were started for the first time, or the runner ended.
        self.is_up = threading.Event()

    @property
    def _store(self) -> Store:
        return self._register.store

    def stop(self) -> None:
        """End soon, in order. Any thread may call it."""
        self._stopping.set()

    def status(self) -> dict[str, dict[str, Any]]:
        supervisor = self._supervisor
        return supervisor.status() if supervisor is not None else {}

    # Having the pipeline.

    def take(self, command: str) -> bool:
        """Take the pipeline over; False if this was stopped while it waited. ConflictError says to do `command`."""
        self._tenure = acquire(self._register, self._folders, waits=self._waits, is_stopped=self._stopping.is_set, command=command)
        if self._tenure is None:
            return False
        try:
            commands.complete_restore(self._tenure, self._store)
            savepoints.drop_leftovers(self._register, self._folders)
        except BaseException:
            self.release()
            raise
        return True

    def release(self) -> None:
        if self._tenure is not None:
            self._tenure.release()
            self._tenure = None

    @property
    def _held(self) -> Tenure:
        assert self._tenure is not None, "commands are for those who have the pipeline"
        return self._tenure

    # Running the queries.

    def run(self) -> None:
        """Run the pipeline until it is stopped or has caught up. OutputFailedError if an output failed for good."""
        try:
            if self._waits:
                # A standby warms its session up before it waits.
                self._session().range(1).collect()
            if not self.take("wait with standby=True (--standby), or stop it"):
                return
            try:
                self._start()
                try:
                    self._loop()
                finally:
                    self._end()
            finally:
                self.release()
        finally:
            self.is_up.set()

    def _start(self) -> None:
        built = prepare(self._held, self._session(), self._store, self._graph)
        self._supervisor = Supervisor(self._held, self._store, self._graph, built, until=self._until)
        self._held.status = self.status
        self._notice_leftovers()

    def _notice_leftovers(self) -> None:
        for name in self._held.live.outputs:
            if name not in self._graph.outputs:
                log.warning(
                    "pipeline %s: the output %r is no longer in the code; its state and savepoints stay", self._graph.pipeline, name
                )

    def _loop(self) -> None:
        served = shown = 0.0
        assert self._supervisor is not None
        while not self._stopping.is_set():
            self._held.check()
            self._supervisor.tick()
            self.is_up.set()
            now = time.monotonic()
            if now - served > _SERVE_SECONDS and (self._command is None or not self._command.is_alive()):
                served = now
                self._serve()
            if now - shown > 1.0:
                shown = now
                self._show(self.status())
            if self._supervisor.is_done():
                self._raise_failures()
                if self._until is not None:
                    break
            self._stopping.wait(_TICK_SECONDS)
        self._show(self.status())

    def _raise_failures(self) -> None:
        assert self._supervisor is not None
        failed = self._supervisor.failed()
        if failed:
            reasons = "; ".join(f"{task.output.name!r} after {task.restarts} restarts: {task.last_error}" for task in failed)
            raise OutputFailedError(f"pipeline {self._graph.pipeline}: failed: {reasons}", outputs=[task.output.name for task in failed])

    def _end(self) -> None:
        if self._command is not None:
            self._command.join()
        if self._supervisor is not None:
            self._supervisor.stop()
        self._supervisor = None

    # Commands.

    def _serve(self) -> None:
        requests = sorted(self._register.items(REQUEST).items(), key=lambda item: float(item[1]["at"]))
        for id, request in requests:
            if request["command"] == "savepoint":
                # Batches go on and are supervised meanwhile; other commands wait.
                self._command = threading.Thread(target=self._answer, args=(id, request), name="headwater-savepoint")
                self._command.start()
                return
            self._answer(id, request)
            if self._stopping.is_set():
                return

    def _answer(self, id: str, request: Mapping[str, Any]) -> None:
        try:
            answer = make_answer(self.carry_out(request["command"], request["arguments"]))
        except HeadwaterError as error:
            answer = make_answer(error=error)
        except Exception as error:
            log.exception("pipeline %s: the command %s failed", self._graph.pipeline, request["command"])
            answer = make_answer(error=error)
        self._register.put(ANSWER + id, answer)
        self._register.remove(REQUEST + id)

    def carry_out(self, command: str, arguments: Mapping[str, Any]) -> Any:
        """Do what a command says, with or without running queries; returns what can be written as JSON."""
        if command == "savepoint":
            return self._take_savepoint(arguments["name"])
        if command == "drop_savepoint":
            return savepoints.drop(self._register, self._folders, arguments["name"])
        if command == "restore":
            commands.check_restore(self._held, self._session(), self._store, self._graph, arguments["name"])
            return self._between(
                lambda: commands.restore(self._held, self._session(), self._store, self._graph, arguments["name"], arguments["outputs"])
            )
        if command == "rescale":
            commands.check_rescale(self._held, self._session(), self._graph, arguments["output"])
            return self._between(
                lambda: commands.rescale(
                    self._held, self._session(), self._store, self._graph, arguments["partitions"], arguments["output"]
                )
            )
        if command == "stop":
            return self._stop(arguments.get("savepoint"))
        raise InvalidRequestError(f"pipeline {self._graph.pipeline}: there is no command {command!r}")

    def _between(self, work: Callable[[], Any]) -> Any:
        """Do something while no query runs; those that ran are started again, whatever it came to."""
        was_running = self._supervisor is not None
        if self._supervisor is not None:
            self._supervisor.stop()
        try:
            return work()
        finally:
            if was_running:
                self._start()

    def _stop(self, savepoint: str | None) -> Any:
        if savepoint is None:
            self._stopping.set()
            return None
        if self._register.find(SAVEPOINT + savepoint) is not None:
            self._take_savepoint(savepoint)  # It says that there is one.
        if self._supervisor is not None:
            # The last batch is in the savepoint: nothing is processed after it.
            self._supervisor.stop()
        try:
            return self._take_savepoint(savepoint)
        finally:
            self._stopping.set()

    def _take_savepoint(self, name: str) -> dict[str, Any]:
        live = self._held.live
        savepoints.take(self._register, self._folders, live, name, self._finish)
        return {}

    def _finish(self, output: str, batch: int) -> None:
        """Return when Spark has noted that a batch is done."""
        supervisor = self._supervisor
        if supervisor is not None and output in supervisor.tasks:
            if supervisor.wait_for_commit(output, batch):
                return
            task = supervisor.tasks[output]
            if task.state in (RUNNING, WAITING, BLOCKED):
                raise UnavailableError(
                    f"pipeline {self._graph.pipeline}: the output {output!r} is {task.state} and does not finish its batch {batch} "
                    f"({task.last_error or 'no error yet'}): repeat the call"
                )
        commands.finish_batch(self._held, self._session, self._store, self._graph, output)
