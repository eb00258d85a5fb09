"""Ingestion by tasks elsewhere: the attempts that count are stored, in the order of the files, and the others leave nothing behind."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pytest

import headwater as hw
from headwater.ingest import ingest, spread
from headwater.ingest.spread import FileTask, StagedFile

STREAM = "a/rows"
SCHEMA = pa.schema([("file", pa.int64()), ("n", pa.int64())])
Stage = Callable[[FileTask], StagedFile]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    for file in range(5):
        (folder / f"{file}.jsonl").write_text("".join(json.dumps({"file": file, "n": n}) + "\n" for n in range(20)))
    return folder


def rows(store: hw.Store) -> list[tuple[int, int]]:
    return [(event.value["file"], event.value["n"]) for event in store.stream(STREAM).read()]


ALL = [(file, n) for file in range(5) for n in range(20)]


def backwards(stage: Stage, tasks: Sequence[FileTask]) -> list[StagedFile]:
    """Whatever order they are done in."""
    return [stage(task) for task in reversed(tasks)][::-1]


def test_files_are_stored_in_their_order_whoever_reads_them_first(store: hw.Store, folder: Path) -> None:
    report = ingest(store, folder, STREAM, spread=backwards)
    assert rows(store) == ALL
    assert (report.files, report.events, report.transactions) == (5, 100, 1)
    assert ingest(store, folder, STREAM, spread=backwards).files_before == 5
    assert ingest(store, folder, STREAM).files_before == 5, "it is the same book, however it is kept"


def test_empty_files_are_stored_too_also_as_the_first(store: hw.Store, folder: Path) -> None:
    (folder / "0.jsonl").write_bytes(b"")
    assert ingest(store, folder, STREAM, spread=backwards).files == 5
    assert rows(store) == [row for row in ALL if row[0]]


def test_attempts_that_do_not_count_leave_nothing_behind(store: hw.Store, folder: Path) -> None:
    def twice(stage: Stage, tasks: Sequence[FileTask]) -> list[StagedFile]:
        for task in tasks:
            stage(task)
        return [stage(task) for task in tasks]

    ingest(store, folder, STREAM, spread=twice)
    assert rows(store) == ALL
    assert store.transactions(only_open=True) == []


def test_a_driver_that_died_leaves_nothing_that_counts(store: hw.Store, folder: Path) -> None:
    class Died(BaseException):
        pass

    def die(stage: Stage, tasks: Sequence[FileTask]) -> list[StagedFile]:
        backwards(stage, tasks)
        raise Died

    with pytest.raises(Died):
        ingest(store, folder, STREAM, spread=die)
    assert rows(store) == [] and len(store.transactions(only_open=True)) == 5
    ingest(store, folder, STREAM, spread=backwards)
    assert rows(store) == ALL and store.transactions(only_open=True) == []


def test_a_bad_file_ends_it_and_those_before_it_are_stored(store: hw.Store, folder: Path) -> None:
    (folder / "3.jsonl").write_text('{"file": 3, "n": 0}\nno row\n')
    with pytest.raises(hw.InvalidRequestError, match=r"3\.jsonl, line 2: not JSON"):
        ingest(store, folder, STREAM, spread=backwards)
    assert rows(store) == ALL[:60] and store.transactions(only_open=True) == []
    report = ingest(store, folder, STREAM, spread=backwards, bad_rows="a/dead")
    assert (report.files, report.bad_rows) == (2, 1) and rows(store) == [*ALL[:60], (3, 0), *ALL[80:]]


def test_groups_of_files_commit_one_after_the_other(store: hw.Store, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spread, "_GROUP_FILES", 2)
    assert ingest(store, folder, STREAM, spread=backwards).transactions == 3
    assert rows(store) == ALL
    monkeypatch.setattr(spread, "_GROUP_BYTES", 1)
    assert ingest(store, folder, "a/again", spread=backwards).transactions == 5


def test_who_was_taken_over_stores_nothing(store: hw.Store, folder: Path) -> None:
    def late(stage: Stage, tasks: Sequence[FileTask]) -> list[StagedFile]:
        staged = backwards(stage, tasks)
        ingest(store, folder, STREAM, take_over=True)
        return staged

    with pytest.raises(hw.FencedError, match="this one stops"):
        ingest(store, folder, STREAM, spread=late)
    assert rows(store) == ALL


def test_tasks_store_whole_files(store: hw.Store, folder: Path) -> None:
    with pytest.raises(hw.InvalidRequestError, match="whole files"):
        ingest(store, folder, STREAM, spread=backwards, events_per_transaction=5)
