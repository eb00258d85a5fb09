"""`python -m benchmarks`: run them and print one table, or JSON."""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from benchmarks import beside, coordination, frames, growth, history, journal, latency, onekey, pipelines, reading, spark, writing
from benchmarks.bench import DEFAULT, FULL, QUICK, Bench, Benchmark, Catalog
from benchmarks.results import Goal, Result

#: In the order in which they run: those that leave the disk busy come last.
BENCHMARKS: dict[str, Benchmark] = {
    "ack": latency.acks,
    "tail": latency.tails,
    "read-events": reading.read_events,
    "read-batches": reading.read_batches,
    "transactions": coordination.commits,
    "large-commit": coordination.large_commit,
    "state": coordination.shared_state,
    "groups": coordination.group_reading,
    "journal-persist": journal.persists,
    "journal-replay": journal.replays,
    "journal-tag": journal.tags,
    "journal-live": journal.live,
    "journal-entities": journal.entities,
    "write-events": writing.write_events,
    "write-batches": writing.write_batches,
    "processes": writing.four_processes,
    "object-store": writing.object_store,
    "tiering": history.tiering,
    "write-beside": history.writing_beside,
    "latency-beside": beside.latency_beside,
    "scan": history.scans,
    "one-key": onekey.one_key,
    "frames": frames.frames,
    "dataset": frames.datasets,
    "spark-read": spark.reading,
    "spark-where": spark.conditions,
    "spark-write": spark.writing,
    "spark-table": spark.history,
    "spark-batch": spark.small_batches,
    "pipeline-state": pipelines.state,
    "pipeline-rescale": pipelines.rescale,
    "pipeline-takeover": pipelines.take_over,
    "pipeline-overhead": pipelines.overhead,
    "growth": growth.growth,
    "memory": growth.memory,
}
#: What `--quick` runs: each of them has a physical limit beside it, and takes seconds.
_QUICK = ("ack", "tail", "read-batches", "transactions", "groups", "write-events", "write-batches", "scan")
_CATALOGS = {"sqlite": ("SQLite",), "postgresql": ("PostgreSQL",), "both": ("SQLite", "PostgreSQL")}


@click.command()
@click.option("--only", "names", multiple=True, type=click.Choice(list(BENCHMARKS)), help="Run this one; may be given again.")
@click.option("--catalog", type=click.Choice(list(_CATALOGS)), default="both", show_default=True)
@click.option("--quick", is_flag=True, help="About a minute; ends with 1 if something is far from its goal.")
@click.option("--full", is_flag=True, help="More rounds, and 10 GB through memory.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option("--markdown", is_flag=True, help="Print the table as docs/benchmarks.md has it.")
@click.option("--folder", type=click.Path(file_okay=False, path_type=Path), help="On the disk to measure; a temporary one by default.")
def main(names: tuple[str, ...], catalog: str, quick: bool, full: bool, as_json: bool, markdown: bool, folder: Path | None) -> None:
    """Measure headwater beside the limits of this machine."""
    if quick and full:
        raise click.UsageError("--quick or --full, not both")
    sizes = QUICK if quick else FULL if full else DEFAULT
    progress = Console(stderr=True)
    with ExitStack() as stack:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        base = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headwater-bench-", dir=folder)))
        bench = Bench(sizes, base, list(_open_catalogs(stack, _CATALOGS[catalog])))
        results: list[Result] = []
        status = stack.enter_context(progress.status("starting"))
        chosen = names or (_QUICK if quick else tuple(BENCHMARKS))
        for name in [name for name in BENCHMARKS if name in chosen]:
            status.update(name)
            results += BENCHMARKS[name](bench)
    if as_json:
        print(json.dumps({"machine": describe_machine(), "results": [result.to_json() for result in results]}, indent=2))
    elif markdown:
        print(make_markdown(results))
    else:
        Console(width=None if sys.stdout.isatty() else 160).print(make_table(results))
    lost = [result for result in results if result.is_large_loss]
    if quick and lost:
        for result in lost:
            progress.print(f"{result.name} ({result.variant}) has {result.share:.0%} of its goal", style="red")
        sys.exit(1)


def _open_catalogs(stack: ExitStack, names: Sequence[str]) -> Iterator[Catalog]:
    for name in names:
        if name == "SQLite":
            yield Catalog(name)
        else:
            from tests.postgres import running_postgres  # a server is only needed for this catalog

            server = stack.enter_context(running_postgres())
            yield Catalog(name, server.database)


def describe_machine() -> dict[str, str | int | None]:
    return {
        "headwater": version("headwater"),
        "python": platform.python_version(),
        "pyarrow": version("pyarrow"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": os.cpu_count(),
    }


def make_table(results: Sequence[Result]) -> Table:
    """One line for each result."""
    machine = describe_machine()
    title = f"headwater {machine['headwater']}, Python {machine['python']}, {machine['cores']} cores, {machine['system']}"
    table = Table(title=title, title_justify="left")
    for heading in ("what", "on"):
        table.add_column(heading)
    for heading in ("headwater", "limit"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("limit is")
    for heading in ("ratio", "goal"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("reached")
    earlier = None
    for result in results:
        if earlier is not None and earlier != result.name:
            table.add_section()
        table.add_row(
            result.name if earlier != result.name else "",
            result.variant,
            f"{readable(result.value)} {result.unit}",
            "" if result.limit is None else readable(result.limit),
            result.limit_name,
            "" if result.ratio is None else f"{result.ratio:.2f}x",
            "" if result.goal is None else _goal_text(result.goal, result.unit),
            {None: "", True: "[green]yes", False: "[red]no"}[result.reached],
        )
        earlier = result.name
    return table


def make_markdown(results: Sequence[Result]) -> str:
    """The same table for a page."""
    lines = ["| what | on | headwater | limit | limit is | ratio | goal | reached |", "|---|---|---:|---:|---|---:|---:|---|"]
    for result in results:
        cells = (
            result.name,
            result.variant,
            f"{readable(result.value)} {result.unit}",
            "" if result.limit is None else readable(result.limit),
            result.limit_name,
            "" if result.ratio is None else f"{result.ratio:.2f}x",
            "" if result.goal is None else _goal_text(result.goal, result.unit),
            {None: "", True: "yes", False: "no"}[result.reached],
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _goal_text(goal: Goal, unit: str) -> str:
    sign = ">=" if goal.at_least else "<="
    return f"{sign} {readable(goal.bound)}{'x' if goal.of == 'ratio' else f' {unit.split()[0]}'}"


def readable(figure: float) -> str:
    if figure >= 1_000_000:
        return f"{figure / 1_000_000:.2f} M"
    if figure >= 10_000:
        return f"{figure / 1000:.0f} k"
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.3g}"


if __name__ == "__main__":
    main()
