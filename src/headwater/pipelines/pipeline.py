"""A pipeline: its declaration, and all that can be done with it from any process that has the code and the store."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

from pyspark.sql import DataFrame, SparkSession

from headwater import InvalidRequestError, NotFoundError, Store
from headwater import open as open_store
from headwater.pipelines import preparing, savepoints
from headwater.pipelines.checkpoints import has_state, last_batch, local_folder, read_sources
from headwater.pipelines.graph import Graph, Output, View, refuse_later
from headwater.pipelines.queries import build_all
from headwater.pipelines.register import BEAT, Register, check_word
from headwater.pipelines.requests import NoRunnerError, ask
from headwater.pipelines.runner import Runner
from headwater.pipelines.savepoints import Savepoint
from headwater.pipelines.sessions import check_session, take_session
from headwater.pipelines.tenure import Folders

log = logging.getLogger("headwater.pipelines")
Builder = TypeVar("Builder", bound=Callable[[Any], Any])
Show = Callable[[Mapping[str, Any]], None]


class Pipeline:
    """A graph of Spark queries over streams and tables of a store, each row processed once, whatever is killed.

    Only one process runs it at a time. All other calls work beside it: they ask the process that runs the pipeline, or do it themselves.
    """

    def __init__(
        self,
        name: str,
        store: Store | str | os.PathLike[str],
        checkpoints: str | os.PathLike[str] | None = None,
        spark: SparkSession | None = None,
    ) -> None:
        """`checkpoints` is a folder that all who run the pipeline see: by default one in the store's own folder.

        `spark` is a session with state in RocksDB and its changelog; without one the active session is taken, or one is made.
        """
        self.name = check_word(name, "a pipeline's name")
        self.store = store if isinstance(store, Store) else open_store(store, create=False, upkeep=False)
        self._spark = spark
        self._graph = Graph(self.name)
        self._register = Register(self.store, self.name)
        self._folders = Folders(_find_root(self.store, checkpoints), self.name)

    def __repr__(self) -> str:
        return f"<Pipeline {self.name}: {', '.join(self._graph.outputs) or 'no outputs'}>"

    # Declaring.

    def view(self) -> Callable[[Builder], Builder]:
        """Declare a DataFrame that several outputs read with `read.view`. It is named as its function."""

        def declare(function: Builder) -> Builder:
            self._graph.add(View(function.__name__, function))
            return function

        return declare

    def stream(
        self,
        name: str,
        *,
        key: str | None = None,
        time: str | None = None,
        watermark: tuple[str, str] | None = None,
        partitions: int | None = None,
        trigger: str | None = None,
        max_events: int | None = None,
        segments: int = 1,
        late: str | None = None,
        dead_letters: str | None = None,
    ) -> Callable[[Builder], Builder]:
        """Declare a query whose rows are appended to a stream. The output is named as its function.

        `key` and `time` are columns: the routing key and the event time. `watermark` is (column, delay), for what the function reads.
        `partitions` of its state and `segments` of its stream count when they are made. Each batch has up to `max_events` of a stream.
        """
        for word, given in (("late", late), ("dead_letters", dead_letters)):
            if given is not None:
                raise refuse_later(word)
        facts: dict[str, Any] = {"key": key, "time": time, "segments": _check_count("segments", segments, 1)}
        return self._declare(name, False, watermark, partitions, trigger, max_events, **facts)

    def table(
        self,
        name: str,
        *,
        key: str,
        watermark: tuple[str, str] | None = None,
        partitions: int | None = None,
        trigger: str | None = None,
        max_events: int | None = None,
        dead_letters: str | None = None,
    ) -> Callable[[Builder], Builder]:
        """Declare a query whose rows are put into a table, the newest under each value of the column `key`."""
        if dead_letters is not None:
            raise refuse_later("dead_letters")
        return self._declare(name, True, watermark, partitions, trigger, max_events, key=key)

    def _declare(
        self,
        target: str,
        is_table: bool,
        watermark: tuple[str, str] | None,
        partitions: int | None,
        trigger: str | None,
        max_events: int | None,
        **facts: Any,
    ) -> Callable[[Builder], Builder]:
        scope, _, word = target.partition("/") if isinstance(target, str) else ("", "", "")
        if not scope or not word or "/" in word:
            raise InvalidRequestError(f"pipeline {self.name}: an output is a stream or table, 'scope/name', not {target!r}")
        is_pair = isinstance(watermark, tuple) and len(watermark) == 2 and all(isinstance(part, str) for part in watermark)
        if watermark is not None and not is_pair:
            raise InvalidRequestError(
                f"pipeline {self.name}: watermark is (column, delay), like ('_time', '10 minutes'), not {watermark!r}"
            )
        _check_count("partitions", partitions, None)
        _check_count("max_events", max_events, None, most=1_000_000_000)

        def declare(function: Builder) -> Builder:
            name = check_word(function.__name__, "an output's name, which is its function's,")
            self._graph.add(
                Output(
                    name,
                    function,
                    target,
                    is_table,
                    watermark=watermark,
                    partitions=partitions,
                    trigger=trigger,
                    max_events=max_events,
                    **facts,
                )
            )
            return function

        return declare

    def sql(self, *arguments: Any, **options: Any) -> NoReturn:
        """Not in this version: outputs are streams and tables of the store."""
        raise refuse_later("sql")

    def expect(self, *arguments: Any, **options: Any) -> NoReturn:
        """Not in this version: filter the rows in the function."""
        raise refuse_later("expect")

    def udf(self, *arguments: Any, **options: Any) -> NoReturn:
        """Not in this version: use pyspark's own udf."""
        raise refuse_later("udf")

    def fork(self, *arguments: Any, **options: Any) -> NoReturn:
        """Not in this version: give the changed output a new name."""
        raise refuse_later("fork")

    def compare(self, *arguments: Any, **options: Any) -> NoReturn:
        """Not in this version."""
        raise refuse_later("compare")

    def promote(self, *arguments: Any, **options: Any) -> NoReturn:
        """Not in this version."""
        raise refuse_later("promote")

    def backfill(self, *arguments: Any, **options: Any) -> NoReturn:
        """Not in this version: an output is filled from the head when it is new."""
        raise refuse_later("backfill")

    # Checking and running.

    def check(self) -> None:
        """Refuse, by a typed error, whatever would keep the pipeline from starting. Changes nothing.

        Names, cycles, missing inputs and claims are found without Spark; a session is needed for schemas and for definitions that don't
        fit the state.
        """
        self._check_graph()
        spark = self._session()
        live = self._register.find_live()
        generations = live.outputs if live is not None else {}
        built = build_all(spark, self.store, self._graph, generations, None)
        preparing.check_definitions(self._graph, generations, built)
        preparing.check_targets(self.store, self._graph, built)

    def _check_graph(self) -> None:
        self._graph.check()
        preparing.check_inputs(self.store, self._graph)
        preparing.check_claims(self.store, self._graph)
        self._check_folder()
        if self._spark is not None:
            check_session(self.name, self._spark)

    def _check_folder(self) -> None:
        folder = self._folders.root
        while not folder.exists():
            folder = folder.parent
        if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            raise InvalidRequestError(
                f"pipeline {self.name}: the checkpoints' folder {self._folders.root} can't be written: give another with `checkpoints`"
            )

    def _session(self) -> SparkSession:
        self._spark = take_session(self.name, self._spark)
        return self._spark

    def run(self, until: Literal["caught_up"] | None = None, *, standby: bool = False, progress: Show | None = None) -> None:
        """Run the pipeline in this process until SIGTERM or Ctrl-C, or until it has processed all there is now.

        Missing outputs are made. With `standby`, wait until nobody else runs it. `progress` gets the status once a second. ConflictError
        if another process runs it; FencedError if one took over; OutputFailedError if an output failed for good.
        """
        run = self._begin(until, standby, progress or _print_progress)
        with _ended_by_signals(run.end):
            run.wait()

    def start(self, until: Literal["caught_up"] | None = None, *, standby: bool = False, progress: Show | None = None) -> Run:
        """Run the pipeline in a thread of this process; returns when its queries have started."""
        run = self._begin(until, standby, progress or (lambda status: None))
        if not standby:
            run.wait_until_up()
        return run

    def _begin(self, until: str | None, standby: bool, progress: Show) -> Run:
        if until not in (None, "caught_up"):
            raise InvalidRequestError(f"until is None or 'caught_up', not {until!r}")
        self._check_graph()
        self._session()
        runner = Runner(self._register, self._folders, self._graph, self._session, until=until, waits=standby, status=progress)
        return Run(self, runner)

    # Commands.

    def savepoint(self, name: str) -> Savepoint:
        """Take a savepoint: the state, the inputs' places and the outputs' places of one moment. Running queries go on meanwhile.

        What the inputs have after it is kept readable until it is dropped.
        """
        self._do("savepoint", name=check_word(name, "a savepoint's name"))
        return next(found for found in self.savepoints() if found.name == name)

    def savepoints(self) -> list[Savepoint]:
        """The savepoints, the oldest first."""
        return savepoints.list_savepoints(self._register)

    def drop_savepoint(self, name: str) -> None:
        """Remove a savepoint. What only it kept of the inputs may be truncated from now on."""
        savepoints.get_record(self._register, name)
        self._do("drop_savepoint", name=name)

    def restore(self, name: str, outputs: Literal["roll_back", "append"] = "roll_back") -> None:
        """Go on from a savepoint. Its later input is processed again.

        With "roll_back" the outputs end again where they ended then, and their readers are told; later savepoints are abandoned. With
        "append" the outputs stay, and what is processed again is appended again.
        """
        if outputs not in ("roll_back", "append"):
            raise InvalidRequestError(f"outputs is 'roll_back' or 'append', not {outputs!r}")
        savepoints.get_record(self._register, name)
        self._do("restore", name=name, outputs=outputs)

    def rescale(self, partitions: int, output: str | None = None) -> None:
        """Divide the state of one output, or of all that have state, into another number of partitions. Queries stop for it.

        On an error everything is as it was.
        """
        if partitions is None or (output is not None and not isinstance(output, str)):
            raise InvalidRequestError("rescale takes a number of partitions, and the name of an output")
        _check_count("partitions", partitions, None)
        if output is not None:
            self._graph.get_output(output)
        self._do("rescale", partitions=partitions, output=output)

    def stop(self, savepoint: str | None = None) -> bool:
        """Stop the pipeline wherever it runs, with a savepoint of its last batch; False if nobody runs it."""
        if savepoint is not None:
            check_word(savepoint, "a savepoint's name")
        live = self._register.find_live()
        is_running = live is not None and live.owner is not None and not live.owner.is_gone()
        if is_running:
            self._do("stop", savepoint=savepoint)
            self._wait_for_end()
        elif savepoint is not None:
            self._do("savepoint", name=savepoint)
        return is_running

    def _wait_for_end(self) -> None:
        while (live := self._register.find_live()) is not None and live.owner is not None and not live.owner.is_gone():
            time.sleep(0.05)

    def _do(self, command: str, **arguments: Any) -> Any:
        """Have whoever runs the pipeline carry out a command, or do it here if nobody does."""
        self._graph.check()
        while True:
            live = self._register.find_live()
            if live is None:
                raise NotFoundError(f"pipeline {self.name} never ran with {self.store.url}: run it first")
            if live.owner is not None and not live.owner.is_gone():
                try:
                    return ask(self._register, live.owner, command, arguments)
                except NoRunnerError:
                    if command == "stop" and arguments.get("savepoint") is None:
                        return None
            runner = Runner(self._register, self._folders, self._graph, self._session, waits=True)
            runner.take("")
            try:
                return runner.carry_out(command, arguments)
            finally:
                runner.release()

    # Looking.

    def status(self) -> dict[str, dict[str, Any]]:
        """Of each output: state, batch, cut, lag, rate, watermark, state_rows, state_bytes, restarts, last_error, owner, generation."""
        live = self._register.find_live()
        generations = live.outputs if live is not None else {}
        found: dict[str, dict[str, Any]] = {}
        if live is not None and live.owner is not None and not live.owner.is_gone():
            found = self._register.find(BEAT + live.owner.id) or {}
        for name in [*self._graph.outputs, *generations]:
            if name not in found:
                found[name] = self._describe_stopped(name)
        return found

    def _describe_stopped(self, name: str) -> dict[str, Any]:
        live = self._register.find_live()
        generation = live.outputs.get(name) if live is not None else None
        batch = -1
        cut: list[str] = []
        if generation is not None:
            checkpoint = self._folders.generation(name, generation.number)
            batch = last_batch(checkpoint, "commits")
            cut = [str(part) for part in read_sources(checkpoint, batch)] if batch >= 0 else []
        empty = dict.fromkeys(("lag", "rate", "watermark", "state_rows", "state_bytes", "last_error", "owner"))
        return {
            "state": "stopped" if generation is not None else "new",
            "batch": batch if batch >= 0 else None,
            "cut": cut,
            **empty,
            "restarts": 0,
            "generation": generation.number if generation is not None else None,
        }

    def state(self, output: str, *, savepoint: str | None = None, operator: int = 0, **options: Any) -> DataFrame:
        """The state of a query as of its last batch, or of a savepoint: columns `key`, `value` and `partition_id`.

        `operator` counts stateful operators from the sources on; `options` are those of Spark's `statestore` source.
        """
        live = self._register.find_live()
        known = live.outputs if live is not None else {}
        if output not in known:
            raise NotFoundError(f"pipeline {self.name} has no state of {output!r}; outputs that ran: {', '.join(known) or 'none'}")
        folder = self._folders.generation(output, known[output].number)
        if savepoint is not None:
            if output not in savepoints.get_record(self._register, savepoint)["outputs"]:
                raise NotFoundError(f"pipeline {self.name}: the savepoint {savepoint!r} has no output {output!r}")
            folder = self._folders.savepoint(savepoint) / output
        if last_batch(folder, "commits") < 0 or not has_state(folder):
            raise NotFoundError(f"pipeline {self.name}: the output {output!r} keeps no state, or has finished no batch yet")
        reader = self._session().read.format("statestore").option("operatorId", operator).options(**options)
        return reader.load(str(folder))


class Run:
    """A pipeline that runs in a thread of this process."""

    def __init__(self, pipeline: Pipeline, runner: Runner) -> None:
        self._pipeline = pipeline
        self._runner = runner
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name=f"headwater-run-{pipeline.name}", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            self._runner.run()
        except BaseException as error:
            self._error = error

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def status(self) -> dict[str, dict[str, Any]]:
        """The same as `Pipeline.status`, as of now."""
        return self._runner.status() or self._pipeline.status()

    def wait_until_up(self) -> None:
        """Return when the queries have started; raises what kept them from it."""
        self._runner.is_up.wait()
        if not self._thread.is_alive() or self._error is not None:
            self._raise()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the run ends, and raise what it ended with; False if it has not ended in time."""
        deadline = time.monotonic() + timeout if timeout is not None else None
        while self._thread.is_alive():
            # In slices: a signal is seen between them.
            self._thread.join(0.2)
            if deadline is not None and time.monotonic() > deadline:
                return False
        self._raise()
        return True

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def end(self) -> None:
        """Ask the run to end; `wait` returns when it has."""
        self._runner.stop()

    def stop(self, savepoint: str | None = None) -> None:
        """Stop the queries, take a savepoint of their last batch if one is named, and wait until the run has ended."""
        if savepoint is not None and self._thread.is_alive():
            self._pipeline.stop(savepoint)
        self.end()
        self.wait()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self.end()
        if error is None:
            self.wait()
        else:
            self._thread.join()


def _check_count(word: str, given: Any, default: int | None, most: int = 10_000) -> Any:
    if given is None and default is None:
        return None
    if isinstance(given, bool) or not isinstance(given, int) or not 1 <= given <= most:
        raise InvalidRequestError(f"{word} is a whole number from 1 to {most:,}, not {given!r}")
    return given


def _find_root(store: Store, given: str | os.PathLike[str] | None) -> Path:
    if given is not None:
        return local_folder(os.fspath(given))
    url = store.address[0]
    if "://" in url:
        raise InvalidRequestError(f"the store {url} is no local folder: give checkpoints=, a folder that all who run the pipeline can see")
    return Path(url) / "checkpoints"


@contextmanager
def _ended_by_signals(end: Callable[[], None]) -> Iterator[None]:
    """SIGTERM and Ctrl-C end the run in order; a second Ctrl-C is a KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    count = 0

    def handle(number: int, frame: Any) -> None:
        nonlocal count
        count += 1
        end()
        if count > 1 and number == signal.SIGINT:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _print_progress(status: Mapping[str, Any]) -> None:
    """One line on a terminal, written over and over."""
    if sys.stderr is None or not sys.stderr.isatty():
        return
    parts = [f"{name}: {found['state']}, batch {found['batch']}, lag {found['lag']}" for name, found in status.items()]
    sys.stderr.write(f"\r\x1b[K{' | '.join(parts)[:200]}")
    sys.stderr.flush()
