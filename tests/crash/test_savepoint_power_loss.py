"""The power fails while or after a savepoint is taken: a savepoint that is listed has all of its files, whole.

Spark syncs nothing that it writes, so the files of its checkpoint are written here without a sync, too. See `disk` for what may be found.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

import headwater as hw
from headwater.pipelines import savepoints
from headwater.pipelines.register import Generation, Live, Owner, Register
from headwater.pipelines.tenure import Folders
from tests.crash.disk import Op, PowerCut, Recorder
from tests.crash.processes import Crew, Place

pytestmark = pytest.mark.slow

CUTS = 60
BATCHES = 3
INPUT, OUTPUT = "a/in", "a/out"
#: What Spark wrote, below the checkpoint, in sizes of several sectors.
FILES = {f"state/0/{partition}/{version}.changelog": 1500 * version for partition in (0, 1) for version in range(1, BATCHES + 1)}


def content(name: str) -> bytes:
    return (name.encode() + b"|") * (FILES[name] // len(name))


def write_as_spark(path: Path, data: bytes) -> None:
    """Write a file without a sync."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(str(path), os.O_WRONLY | os.O_CREAT, 0o644)
    os.pwritev(fd, [data], 0)
    os.close(fd)


def take(channel: Connection, root: str, deaf: str) -> None:
    """Take a savepoint of a checkpoint that was never synced, then tell all that was done to the disk."""
    recorder = Recorder(root, _DEAF[deaf])
    store = Place(os.path.join(root, "store")).open(create=True)
    store.create_stream(INPUT)
    store.create_stream(OUTPUT)
    register, folders = Register(store, "sales"), Folders(Path(root) / "checkpoints", "sales")
    checkpoint = folders.generation("copy", folders.make_generation("copy"))
    settings = json.dumps({"conf": {"spark.sql.shuffle.partitions": "2"}})
    for batch in range(BATCHES):
        write_as_spark(checkpoint / "offsets" / str(batch), f"v1\n{settings}\n{store.stream(INPUT).tail()}\n".encode())
        write_as_spark(checkpoint / "commits" / str(batch), b"v1\n{}\n")
    for name in FILES:
        write_as_spark(checkpoint / name, content(name))
    born = str(store.stream(OUTPUT).tail())
    generation = Generation(1, "query", BATCHES - 1, [[INPUT, str(store.stream(INPUT).head())]], born, {}, OUTPUT, False)
    live = register.put_live(Live(hw.ABSENT, Owner.of_this_process(), {"copy": generation}))
    savepoints.take(register, folders, live, "first", lambda output, batch: None)
    recorder.send("taken")
    channel.send(recorder.ops)


_DEAF: dict[str, Callable[[str], bool]] = {
    "nothing": lambda path: False,
    "files": lambda path: "/checkpoints/" in path and not path.endswith("/"),
    "names": lambda path: "/checkpoints/" in path and path.endswith("/"),
}


def lost_files(tmp_path: Path, crew: Crew, deaf: str) -> list[str]:
    """Take a savepoint, cut the power at many moments, and name each file that a listed savepoint then lacks."""
    root = tmp_path / "recorded"
    root.mkdir()
    worker = crew.start(take, str(root), deaf)
    ops: list[Op] = worker.hear()
    assert worker.wait() == 0
    rng, listed = random.Random(1), 0
    lost: list[str] = []
    for turn in range(CUTS):
        at = len(ops) if turn % 3 == 0 else rng.randrange(len(ops) // 2, len(ops))
        cut, folder = PowerCut(ops, at), tmp_path / "found"
        folder.mkdir()
        cut.lay_out(str(root), folder, random.Random(turn))
        try:
            with Place(str(folder / "store")).open() as store:
                found = savepoints.list_savepoints(Register(store, "sales"))
        except hw.NotFoundError:
            found = []  # The store itself was not made yet.
        assert found or not cut.said, f"a savepoint that was taken is not listed after a power cut at {at}"
        listed += bool(found)
        place = Folders(folder / "checkpoints", "sales").savepoint("first")
        for name in FILES if found else ():
            path = place / "copy" / name
            if not path.exists() or path.read_bytes() != content(name):
                lost.append(f"{name} at {at}, luck {turn}")
        if found and not (place / "manifest.json").exists():
            lost.append(f"manifest.json at {at}, luck {turn}")
        shutil.rmtree(folder)
    assert listed >= CUTS // 3
    return lost


def test_a_listed_savepoint_is_whole_when_the_power_fails(tmp_path: Path, crew: Crew) -> None:
    assert lost_files(tmp_path, crew, "nothing") == []


@pytest.mark.parametrize("deaf", ["files", "names"])
def test_without_these_syncs_a_listed_savepoint_is_torn(deaf: str, tmp_path: Path, crew: Crew) -> None:
    assert lost_files(tmp_path, crew, deaf), "this test would not notice"
