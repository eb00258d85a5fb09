"""Ingestion on Spark: each file a task, each row once, also when tasks fail."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import headwater as hw
from headwater.cli.engines import spark_spread
from headwater.ingest import ingest
from headwater.ingest.spread import FileTask, StagedFile

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    for file in range(4):
        (folder / f"{file}.jsonl").write_text("".join(json.dumps({"file": file, "n": n}) + "\n" for n in range(50)))
    return folder


def rows(store: hw.Store) -> list[tuple[int, int]]:
    return [(event.value["file"], event.value["n"]) for event in store.stream("a/rows").read()]


def test_files_are_ingested_by_tasks_some_of_which_fail(spark: SparkSession, tmp_path: Path, folder: Path) -> None:
    spread = spark_spread(None)
    notes = str(tmp_path)

    def spread_with_failures(stage: Callable[[FileTask], StagedFile], tasks: Sequence[FileTask]) -> Sequence[StagedFile]:
        def stage_at_second_attempt(task: FileTask) -> StagedFile:
            staged = stage(task)
            note = Path(notes, f"{Path(task.file.path).name}.tried")
            if task.file.path.endswith("2.jsonl") and not note.exists():
                note.touch()
                raise RuntimeError("this attempt fails after it staged everything")
            return staged

        return spread(stage_at_second_attempt, tasks)

    with hw.open(tmp_path / "store", upkeep=False) as store:
        report = ingest(store, folder, "a/rows", key="file", segments=2, spread=spread_with_failures)
        assert (tmp_path / "2.jsonl.tried").exists() and report.events == 200
        assert sorted(rows(store)) == [(file, n) for file in range(4) for n in range(50)]
        assert all(before < after for before, after in zip(rows(store), rows(store)[1:], strict=False) if before[0] == after[0])
        assert store.transactions(only_open=True) == [], "what the failed attempt staged is dropped"


def test_what_is_wrong_with_a_file_is_one_error(spark: SparkSession, tmp_path: Path, folder: Path) -> None:
    (folder / "1.jsonl").write_text("no row\n")
    with hw.open(tmp_path / "store", upkeep=False) as store:
        with pytest.raises(hw.InvalidRequestError, match=r"1\.jsonl, line 1: not JSON"):
            ingest(store, folder, "a/rows", spread=spark_spread(None))
        assert len(rows(store)) == 50
