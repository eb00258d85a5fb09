"""pipeline: run the pipelines that a Python file declares, and take, list, restore and drop their savepoints."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.live import Live
from rich.table import Table

import headwater as hw
from headwater.cli.output import console, emit, plain, size, table, time_text

if TYPE_CHECKING:
    from headwater.pipelines import Pipeline, Savepoint


@click.group("pipeline")
def pipeline_command() -> None:
    """Run and manage the Spark pipelines of a Python file.

    FILE is a Python file that declares a headwater.pipelines.Pipeline; with several, FILE:NAME chooses the one of that name.
    """


def with_pipeline(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the pipeline that its first argument names."""

    @click.argument("place", metavar="FILE[:NAME]")
    @click.option("--json", "as_json", is_flag=True, help="Answer in JSON, one object per line.")
    @wraps(function)
    def command(place: str, as_json: bool, **arguments: Any) -> Any:
        logging.basicConfig(format="headwater: %(message)s", level=logging.WARNING)
        # What Spark's bridge to Java says of a query that failed is in the query's error.
        logging.getLogger("py4j").setLevel(logging.CRITICAL)
        loaded = load_pipeline(place)
        try:
            return function(loaded, as_json, **arguments)
        finally:
            from pyspark.sql import SparkSession

            session = SparkSession.getActiveSession()
            if session is not None:
                session.stop()

    return command


def load_pipeline(place: str) -> Pipeline:
    """The pipeline that FILE[:NAME] names. Its module is pickled by value: Spark's workers can't import it."""
    try:
        from headwater.pipelines import Pipeline
    except ImportError as error:
        raise click.UsageError(str(error), click.get_current_context()) from error
    from pyspark import cloudpickle

    path, name = (place, None) if Path(place).exists() or ":" not in place else place.rsplit(":", 1)
    if not Path(path).is_file():
        raise click.UsageError(f"there is no file {path}", click.get_current_context())
    module_name = f"_headwater_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise click.UsageError(f"{path} is no Python file", click.get_current_context())
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    sys.path.insert(0, str(Path(path).parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except (hw.HeadwaterError, KeyboardInterrupt):
        raise
    except Exception as error:
        raise click.ClickException(f"{path}: {type(error).__name__}: {error}") from error
    cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
    found = {value.name: value for value in vars(module).values() if isinstance(value, Pipeline)}
    known = ", ".join(sorted(found)) or "none"
    if name is not None and name not in found:
        raise click.UsageError(f"{path} has no pipeline {name!r}; it has: {known}", click.get_current_context())
    if name is None and len(found) != 1:
        raise click.UsageError(f"which pipeline? {path} has: {known}; give {path}:NAME", click.get_current_context())
    return found[name] if name is not None else next(iter(found.values()))


@pipeline_command.command("check")
@with_pipeline
def check_command(pipeline: Pipeline, as_json: bool) -> None:
    """Find what would keep a pipeline from starting. Changes nothing."""
    pipeline.check()
    if as_json:
        emit({"pipeline": pipeline.name, "ok": True})
    else:
        console().print(f"{pipeline.name} can start")


@pipeline_command.command("run")
@with_pipeline
@click.option("--until", type=click.Choice(["caught-up"]), help="End when all that there is now is processed.")
@click.option("--standby", is_flag=True, help="Wait, with a warm session, until nobody else runs it, and take over.")
def run_command(pipeline: Pipeline, as_json: bool, until: str | None, standby: bool) -> None:
    """Run a pipeline until Ctrl-C or SIGTERM, or until it has caught up."""
    with _shown(as_json) as show:
        pipeline.run("caught_up" if until else None, standby=standby, progress=show)
    _print_status(pipeline.status(), as_json)


@pipeline_command.command("status")
@with_pipeline
def status_command(pipeline: Pipeline, as_json: bool) -> None:
    """Show how each output fares, wherever the pipeline runs."""
    _print_status(pipeline.status(), as_json)


@pipeline_command.command("savepoint")
@with_pipeline
@click.argument("name")
def savepoint_command(pipeline: Pipeline, as_json: bool, name: str) -> None:
    """Take a savepoint. A running pipeline goes on meanwhile."""
    _print_savepoints([pipeline.savepoint(name)], as_json)


@pipeline_command.command("savepoints")
@with_pipeline
def savepoints_command(pipeline: Pipeline, as_json: bool) -> None:
    """List the savepoints, the oldest first."""
    _print_savepoints(pipeline.savepoints(), as_json)


@pipeline_command.command("drop-savepoint")
@with_pipeline
@click.argument("name")
def drop_savepoint_command(pipeline: Pipeline, as_json: bool, name: str) -> None:
    """Remove a savepoint. What only it kept of the inputs may be truncated from then on."""
    pipeline.drop_savepoint(name)
    _print_done({"pipeline": pipeline.name, "dropped": name}, f"dropped the savepoint {name}", as_json)


@pipeline_command.command("restore")
@with_pipeline
@click.argument("name")
@click.option(
    "--outputs",
    type=click.Choice(["roll-back", "append"]),
    default="roll-back",
    show_default=True,
    help="Let the outputs end again where they ended then, or leave them, and append again.",
)
def restore_command(pipeline: Pipeline, as_json: bool, name: str, outputs: str) -> None:
    """Go on from a savepoint. Its later input is processed again."""
    pipeline.restore(name, "append" if outputs == "append" else "roll_back")
    _print_done({"pipeline": pipeline.name, "restored": name, "outputs": outputs}, f"{pipeline.name} goes on from {name}", as_json)


@pipeline_command.command("rescale")
@with_pipeline
@click.argument("partitions", type=click.IntRange(min=1))
@click.option("--output", metavar="NAME", help="Only this output's state.")
def rescale_command(pipeline: Pipeline, as_json: bool, partitions: int, output: str | None) -> None:
    """Divide the state into another number of partitions."""
    pipeline.rescale(partitions, output)
    answer = {"pipeline": pipeline.name, "partitions": partitions, "output": output}
    _print_done(answer, f"the state of {output or 'all outputs'} has {partitions} partitions", as_json)


@pipeline_command.command("state")
@with_pipeline
@click.argument("output")
@click.option("--savepoint", metavar="NAME", help="As of a savepoint. Without: as of the last batch.")
@click.option("--operator", type=click.IntRange(min=0), default=0, show_default=True, help="Which stateful operator.")
@click.option("--limit", type=click.IntRange(min=1), default=20, show_default=True, metavar="N", help="Show up to so many keys.")
def state_command(pipeline: Pipeline, as_json: bool, output: str, savepoint: str | None, operator: int, limit: int) -> None:
    """Show the state of an output's query."""
    rows = [row.asDict(recursive=True) for row in pipeline.state(output, savepoint=savepoint, operator=operator).limit(limit).collect()]
    if as_json:
        for row in rows:
            emit(plain(row))
        return
    shown = table(*(rows[0] if rows else ("key", "value")))
    for row in rows:
        shown.add_row(*(str(plain(value)) for value in row.values()))
    console().print(shown)


@pipeline_command.command("stop")
@with_pipeline
@click.option("--savepoint", metavar="NAME", help="Take a savepoint of the last batch.")
def stop_command(pipeline: Pipeline, as_json: bool, savepoint: str | None) -> None:
    """Stop a pipeline, wherever it runs."""
    was_running = pipeline.stop(savepoint)
    answer = {"pipeline": pipeline.name, "was_running": was_running, "savepoint": savepoint}
    _print_done(answer, f"{pipeline.name} stopped" if was_running else f"{pipeline.name} was not running", as_json)


def _print_done(answer: dict[str, Any], text: str, as_json: bool) -> None:
    if as_json:
        emit(answer)
    else:
        console().print(text)


def _print_savepoints(savepoints: list[Savepoint], as_json: bool) -> None:
    if as_json:
        for found in savepoints:
            taken = time_text(found.taken_at)
            emit({"name": found.name, "taken_at": taken, "bytes": found.bytes, "state": found.state, "cut": str(found.cut)})
        return
    shown = table("savepoint", "taken at", "age", "size", "state", right=("age", "size"))
    for found in savepoints:
        age = datetime.now(UTC) - found.taken_at
        shown.add_row(found.name, time_text(found.taken_at), str(age).partition(".")[0], size(found.bytes), found.state)
    console().print(shown)


def _print_status(status: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        emit(dict(status))
    else:
        console().print(_status_table(status))


def _status_table(status: Mapping[str, Any]) -> Table:
    numbers = ("batch", "lag", "rows/s", "state rows", "state", "restarts")
    shown = table("output", "is", "batch", "lag", "rows/s", "watermark", "state rows", "state", "restarts", "last error", right=numbers)
    for name, found in status.items():
        shown.add_row(
            name,
            found["state"],
            _number(found["batch"]),
            _number(found["lag"]),
            _number(found["rate"]),
            found["watermark"] or "",
            _number(found["state_rows"]),
            size(found["state_bytes"]) if found["state_bytes"] is not None else "",
            _number(found["restarts"]),
            found["last_error"] or "",
        )
    return shown


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,}"


@contextmanager
def _shown(as_json: bool) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """What shows the progress: a table on a terminal, a line of JSON for each change, or nothing."""
    if as_json:
        last: list[Any] = []

        def show(status: Mapping[str, Any]) -> None:
            if last != [status]:
                last[:] = [status]
                emit(dict(status))
                sys.stdout.flush()

        yield show
    elif sys.stderr.isatty():
        with Live(console=console(stderr=True), transient=True) as live:
            yield lambda status: live.update(_status_table(status))
    else:
        yield lambda status: None
