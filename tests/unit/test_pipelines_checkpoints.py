"""Copies of checkpoints: exactly the files that Spark needs to go on after a batch, whatever else lies there."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

import headwater as hw
from headwater.pipelines.checkpoints import copy_checkpoint, create, last_batch, read_partitions, read_sources, size_of

CUT = '{"store": "s", "streams": {"a/x": {"id": 7, "segments": {"0": 12}}}}'


def write(path: Path, text: str = "x") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    (path.parent / f".{path.name}.crc").write_text("crc")


def make(folder: Path, *, batches: int, planned: int = 0, partitions: int = 2) -> Path:
    """A checkpoint as Spark leaves it: a snapshot of the state at version 3, changes for all versions."""
    create(folder, "old")
    settings = json.dumps({"conf": {"spark.sql.shuffle.partitions": str(partitions)}})
    for batch in range(batches + planned):
        write(folder / "offsets" / str(batch), f"v1\n{settings}\n{CUT}\n-")
    for batch in range(batches):
        write(folder / "commits" / str(batch))
    for partition in range(partitions):
        place = folder / "state" / "0" / str(partition)
        write(place / "_metadata" / "schema")
        for version in range(1, batches + planned + 1):
            write(place / f"{version}.changelog")
        write(place / "SSTs" / "a-1.sst")
        write(place / "SSTs" / "b-2.sst")
        with zipfile.ZipFile(place / "3.zip", "w") as snapshot:
            snapshot.writestr("metadata", 'v1\n{"sstFiles":[{"dfsSstFileName":"a-1.sst"}],"logFiles":[]}')
    return folder


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and not path.name.endswith(".crc"))


def test_a_copy_ends_with_the_batch_and_has_only_the_state_that_it_needs(tmp_path: Path) -> None:
    source = make(tmp_path / "source", batches=6)
    size = copy_checkpoint(source, tmp_path / "copy", commits=4, query="new")
    store = [f"state/0/{partition}/{name}" for partition in (0, 1) for name in ("3.zip", "4.changelog", "5.changelog", "SSTs/a-1.sst")]
    schemas = [f"state/0/{partition}/_metadata/schema" for partition in (0, 1)]
    logs = [f"{log}/{batch}" for log in ("commits", "offsets") for batch in range(5)]
    assert files(tmp_path / "copy") == sorted([*logs, "metadata", *schemas, *store])
    assert (tmp_path / "copy" / "commits" / ".4.crc").exists()
    assert json.loads((tmp_path / "copy" / "metadata").read_text()) == {"id": "new"}
    assert size == size_of(tmp_path / "copy")
    assert last_batch(tmp_path / "copy", "commits") == 4 and read_partitions(source) == 2
    assert read_sources(source, 4) == [hw.Cut.parse(CUT)]


def test_a_copy_before_the_snapshot_takes_all_changes(tmp_path: Path) -> None:
    copy_checkpoint(make(tmp_path / "source", batches=6), tmp_path / "copy", commits=1, query="new")
    assert [name for name in files(tmp_path / "copy") if name.startswith("state/0/1/")] == [
        "state/0/1/1.changelog",
        "state/0/1/2.changelog",
        "state/0/1/_metadata/schema",
    ]


def test_a_batch_that_is_stored_but_not_noted_is_copied_to_be_run_again(tmp_path: Path) -> None:
    copy_checkpoint(make(tmp_path / "source", batches=4, planned=1), tmp_path / "copy", commits=3, offsets=4, query="old")
    assert last_batch(tmp_path / "copy", "offsets") == 4 and last_batch(tmp_path / "copy", "commits") == 3
    assert "state/0/0/5.changelog" not in files(tmp_path / "copy")


def test_partitions_that_a_rescale_left_behind_are_not_copied(tmp_path: Path) -> None:
    source = make(tmp_path / "source", batches=4)
    write(source / "state" / "0" / "2" / "1.changelog")
    copy_checkpoint(source, tmp_path / "copy", commits=3, query="new")
    assert not (tmp_path / "copy" / "state" / "0" / "2").exists()


@pytest.mark.parametrize("missing", ["state/0/1/4.changelog", "state/0/1/SSTs/a-1.sst", "commits/3"])
def test_a_copy_that_misses_a_file_is_refused_and_leaves_nothing(tmp_path: Path, missing: str) -> None:
    source = make(tmp_path / "source", batches=4)
    (source / missing).unlink()
    with pytest.raises(hw.UnavailableError):
        copy_checkpoint(source, tmp_path / "copy", commits=3, query="new")
    assert not (tmp_path / "copy").exists()


def test_a_change_of_the_source_does_not_reach_the_copy(tmp_path: Path) -> None:
    source = make(tmp_path / "source", batches=4)
    copy_checkpoint(source, tmp_path / "copy", commits=3, query="new")
    # As Spark writes: under another name, then renamed.
    (source / "fresh").write_text("other")
    (source / "fresh").replace(source / "state" / "0" / "0" / "4.changelog")
    assert (tmp_path / "copy" / "state" / "0" / "0" / "4.changelog").read_text() == "x"
    assert json.loads((source / "metadata").read_text()) == {"id": "old"}


def test_a_copy_names_its_own_files_where_the_state_names_files_by_whole_paths(tmp_path: Path) -> None:
    source = make(tmp_path / "source", batches=4)
    write(source / "state" / "0" / "_metadata" / "v2" / "0", f'v2\n{{"paths":["file:{source}/state/0/_stateSchema/default/0_a"]}}')
    write(source / "state" / "0" / "_stateSchema" / "default" / "0_a")
    for number, folder in enumerate(("copy", "copy of the copy")):
        target = tmp_path / folder
        copy_checkpoint(source, target, commits=3, query=f"new {number}")
        facts = target / "state" / "0" / "_metadata" / "v2" / "0"
        assert facts.read_text() == f'v2\n{{"paths":["file:{target}/state/0/_stateSchema/default/0_a"]}}'
        assert (target / "state" / "0" / "_stateSchema" / "default" / "0_a").exists()
        assert not (facts.parent / ".0.crc").exists(), "the checksum of the old text"
        source = target
