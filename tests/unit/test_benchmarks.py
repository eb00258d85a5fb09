"""The benchmarks run, with sizes so small that their figures mean nothing."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

import headwater as hw
from benchmarks import compare, coordination
from benchmarks.__main__ import BENCHMARKS, main, make_table
from benchmarks.bench import TINY, Bench, Catalog
from benchmarks.results import Goal, Result, at_least, at_most, in_turns, median_ratio, percentile


@pytest.mark.slow
# Those of Spark start a session each.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name.startswith(("spark", "pipeline")) else name for name in BENCHMARKS]
)
def test_every_benchmark_gives_figures(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordination, "_PROCESSES", 2)
    results = list(BENCHMARKS[name](Bench(TINY, tmp_path, [Catalog("SQLite")])))
    assert results
    for result in results:
        assert result.name == name
        assert (result.limit is None) == (result.ratio is None)
        figures = [figure for figure in (result.value, result.limit, result.ratio) if figure is not None]
        assert all(math.isfinite(figure) and figure > 0 for figure in figures)
    assert not list(tmp_path.iterdir()), "a benchmark leaves nothing behind"


def test_a_goal_is_reached_at_its_bound_and_lost_far_from_it() -> None:
    def result(goal: Goal) -> Result:
        return Result("write", "SQLite", 100.0, "MB/s", 200.0, "disk", 0.5, goal)

    assert result(at_least(100)).reached and result(at_most(100)).reached
    assert result(at_least(101)).reached is False and not result(at_least(101)).is_large_loss
    assert result(at_least(1000)).is_large_loss and result(at_most(10)).is_large_loss
    assert result(at_least(2, of="ratio")).is_large_loss and not result(at_least(400)).is_large_loss
    assert result(at_least(0.5, of="ratio")).reached and result(at_least(0.6, of="ratio")).reached is False
    assert Result("write", "SQLite", 100.0, "MB/s").reached is None


def test_measures_take_turns_and_none_is_always_first() -> None:
    order: list[str] = []

    def measure(name: str) -> float:
        order.append(name)
        return float(len(order))

    found = in_turns(2, lambda: measure("a"), lambda: measure("b"))
    assert order == ["a", "b", "b", "a"]
    assert found == [[1.0, 4.0], [2.0, 3.0]]


def test_a_round_that_was_slow_for_both_does_not_change_the_ratio() -> None:
    assert median_ratio([2.0, 200.0, 2.0], [1.0, 100.0, 1.0]) == 2.0
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([3.0, 1.0, 2.0], 0.99) == 3.0


def test_the_table_has_a_line_for_each_result() -> None:
    results = [Result("write", "SQLite", 1_234_567.0, "events/s", 2e6, "disk", 0.62, at_least(800_000)), Result("ack", "SQLite", 0.5, "ms")]
    console = Console(width=160)
    with console.capture() as captured:
        console.print(make_table(results))
    assert "1.23 M events/s" in captured.get() and ">= 800 k" in captured.get() and "0.5 ms" in captured.get()


@pytest.mark.slow
def test_json_names_the_machine_and_each_result(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["--only", "read-batches", "--catalog", "sqlite", "--quick", "--json", "--folder", str(tmp_path)])
    found = json.loads(done.stdout)
    assert found["machine"]["cores"] >= 1
    assert [result["name"] for result in found["results"]] == ["read-batches"]
    assert found["results"][0]["goal"] == {"of": "value", "at_least": 20_000_000}


def test_a_version_with_lower_rates_or_longer_times_is_worse() -> None:
    def run(rate: float, milliseconds: float) -> compare.Run:
        rates = compare.Figure(rate, "events/s", True)
        return {("write", "SQLite"): rates, ("ack", "SQLite"): compare.Figure(milliseconds, "ms", False)}

    write, ack = compare.compare([run(200, 2), run(400, 4)], [run(100, 3), run(400, 4)])
    assert (write.base, write.other, write.worse) == (300, 250, [1.0, 0.0])
    assert (ack.base, ack.other, ack.worse) == (3, 3.5, [0.5, 0.0])


def test_a_figure_that_only_one_version_has_is_not_compared() -> None:
    figure = compare.Figure(1.0, "ms", False)
    assert not compare.compare([{("new", "SQLite"): figure}], [{}])


@pytest.mark.slow
def test_two_versions_are_compared_in_processes_of_their_own(tmp_path: Path) -> None:
    source = str(Path(hw.__file__).parents[1])
    options = ["--only", "read-batches", "--catalog", "sqlite", "--quick", "--ratios", "--rounds", "1"]
    done = CliRunner().invoke(compare.main, [source, source, *options])
    assert done.exit_code == 0, done.output
    assert "read-batches" in done.output and "% to " in done.output
    done = CliRunner().invoke(compare.main, [str(tmp_path), source, *options])
    assert done.exit_code == 1 and "is not the source of a headwater" in done.output
