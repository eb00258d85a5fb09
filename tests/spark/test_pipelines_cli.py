"""`headwater pipeline`: every command, on a pipeline that runs and on one that does not, for people and for machines."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner, Result
from pyspark.sql import SparkSession

from headwater.cli import main
from tests.spark.shop import ORDERS, Shop, sums, wait_until
from tests.spark.test_pipelines import shop as shop

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
Run = Callable[..., Result]


@pytest.fixture
def run(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command on a file that declares the pipeline `sales`; the test fails if it ends otherwise than with `code`."""
    module = ModuleType("declared_in_a_test")
    vars(module)["pipeline"] = shop.totals(partitions=2)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    path = shop.folder / "sales.py"
    path.write_text(f"from {module.__name__} import pipeline\n")
    # A command stops the session that it finds when it ends; this one is for all tests.
    monkeypatch.setattr(SparkSession, "getActiveSession", classmethod(lambda cls: None))

    def run(command: str, *arguments: str, code: int = 0) -> Result:
        result = CliRunner().invoke(main, ["pipeline", command, str(path), *arguments])
        assert result.exit_code == code, (result.output, result.exception)
        assert "Traceback" not in result.output
        return result

    return run


def objects(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_every_command_works_on_a_pipeline_that_runs_and_on_one_that_does_not(shop: Shop, run: Run) -> None:
    shop.fill(0, 100)
    assert "sales can start" in run("check").stdout
    assert objects(run("check", "--json")) == [{"pipeline": "sales", "ok": True}]
    run("run", "--until", "caught-up")
    status = objects(run("status", "--json"))[0]["totals"]
    assert "stopped" in run("status").stdout and status["state"] == "stopped" and status["batch"] == 0
    (taken,) = objects(run("savepoint", "first", "--json"))
    assert taken["name"] == "first" and taken["state"] == "complete" and taken["bytes"] > 0
    assert {(row["key"]["item"], row["value"]["sum"]) for row in objects(run("state", "totals", "--limit", "99", "--json"))} == set(
        sums(range(100)).items()
    )
    shop.fill(100, 200)
    with shop.totals().start() as running:
        shop.wait_for(running, shop.store.stream(ORDERS).tail(), ["totals"])
        # The runner writes its status with each sign of life.
        wait_until(lambda: "running" in run("status").stdout)
        run("savepoint", "second")
        assert "has 3 partitions" in run("rescale", "3").stdout
        assert objects(run("restore", "first", "--json")) == [{"pipeline": "sales", "restored": "first", "outputs": "roll-back"}]
        shop.wait_for(running, shop.store.stream(ORDERS).tail(), ["totals"])
        assert objects(run("stop", "--savepoint", "last", "--json")) == [{"pipeline": "sales", "was_running": True, "savepoint": "last"}]
        running.wait()
    assert shop.table() == sums(range(200))
    found = {row["name"]: row["state"] for row in objects(run("savepoints", "--json"))}
    assert found == {"first": "complete", "second": "abandoned", "last": "complete"}
    listed = run("savepoints").stdout
    assert all(word in listed for word in ("first", "second", "last", "abandoned"))
    assert "dropped the savepoint second" in run("drop-savepoint", "second").stdout
    assert "was not running" in run("stop").stdout
    said = run("restore", "second", code=1).output
    assert "pipeline sales has no savepoint 'second'; its savepoints: first, last" in said
    shop.check()
