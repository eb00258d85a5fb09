"""The demo proves what it says, and its proof fails when an event is lost, repeated, altered or out of order."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import headwater as hw
from headwater.cli.demo.chart import draw_chart
from headwater.cli.demo.files import SCHEMA, make_files, parse_line
from headwater.cli.demo.proof import prove
from headwater.cli.demo.worker import ingest

COMMAND = [sys.executable, "-c", "import headwater.cli; headwater.cli.main()", "demo"]
FILES, EVENTS = 4, 100
AT_ONCE = 1e9


@pytest.fixture
def stream(tmp_path: Path) -> Iterator[hw.Stream]:
    with hw.open(tmp_path / "store") as store:
        yield store.create_stream("demo/readings", schema=SCHEMA, scaling=hw.Scaling.fixed(2))


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    return make_files(tmp_path / "files", files=FILES, events=EVENTS, seed=1)


@pytest.mark.slow
def test_the_demo_holds_through_kills_and_a_split(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    arguments = ["--folder", str(folder), "--files", "6", "--events", "200", "--kills", "3", "--rate", "1500", "--seed", "7"]
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    said = [line.strip() for line in done.stdout.splitlines()]
    for line in (
        "1,200 of 1,200 events stored",
        "0 lost",
        "0 repeated",
        "0 altered",
        "0 out of order, over 48 sensors and a split",
        "1,200 seen by the process that followed the tail, 0 of them out of order",
    ):
        assert line in said, done.stdout
    assert any(line.startswith("kill 3: ") for line in said) and any(line.startswith("split: ") for line in said)
    assert any(line.startswith("check all is well: ") for line in said)
    assert "The worker died 3 times".lower() in done.stdout.lower()
    # What it tells one to try works.
    with hw.open(folder / "store", create=False) as store:
        stream = store.stream("demo/readings")
        files = sorted((folder / "files").iterdir())
        assert prove(stream, files).holds
        # An event removed: the proof no longer holds.
        first = next(iter(stream.head().streams.values())).segments
        segment = max(first, key=lambda number: stream.ranges()[0].segment == number)
        numbers = {**first, segment: first[segment] + 1}
        text = json.loads(str(stream.head()))
        text["streams"]["demo/readings"]["segments"] = {str(number): at for number, at in numbers.items()}
        stream.truncate(hw.Cut.parse(json.dumps(text)))
        proof = prove(stream, files)
        assert (proof.lost, proof.stored) == (1, 1199) and not proof.holds


@pytest.mark.slow
@pytest.mark.parametrize(("by", "code"), [(signal.SIGINT, 1), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_demo_that_is_ended_leaves_no_process_behind(tmp_path: Path, by: signal.Signals, code: int) -> None:
    arguments = ["--folder", str(tmp_path / "demo"), "--files", "2", "--events", "1000", "--kills", "0", "--rate", "200"]
    with subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as demo:
        try:
            assert demo.stdout is not None and demo.stderr is not None
            assert "2 files" in demo.stdout.readline()
            assert "200 of 2,000 stored" in demo.stdout.readline()
            children = psutil.Process(demo.pid).children()
            assert len(children) == 2
            demo.send_signal(by)
            assert demo.wait(60) == code
            assert "Traceback" not in demo.stderr.read()
        finally:
            demo.kill()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert alive == []


def test_a_folder_that_is_not_empty_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    done = subprocess.run([*COMMAND, "--folder", str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "is not empty" in done.stderr
    assert os.listdir(tmp_path) == ["mine"]


def test_files_are_the_same_for_the_same_seed(tmp_path: Path) -> None:
    def texts(folder: str, seed: int) -> list[str]:
        return [path.read_text() for path in make_files(tmp_path / folder, files=2, events=10, seed=seed)]

    assert texts("a", 1) == texts("b", 1) != texts("c", 2)


def test_what_was_ingested_twice_is_stored_once(stream: hw.Stream, paths: list[Path]) -> None:
    for _ in range(2):
        ingest(stream, paths, AT_ONCE)
    proof = prove(stream, paths)
    assert proof.holds and proof.stored == FILES * EVENTS


def test_the_proof_fails_when_an_event_is_lost(stream: hw.Stream, paths: list[Path]) -> None:
    lines = paths[1].read_text().splitlines(keepends=True)
    paths[1].write_text("".join(lines[:40] + lines[41:]))
    ingest(stream, paths, AT_ONCE)
    paths[1].write_text("".join(lines))
    proof = prove(stream, paths)
    assert (proof.lost, proof.repeated, proof.holds) == (1, 0, False)


def test_the_proof_fails_when_an_event_is_repeated(stream: hw.Stream, paths: list[Path]) -> None:
    ingest(stream, paths, AT_ONCE)
    row = parse_line(paths[0].read_text().splitlines()[-1])
    with stream.writer() as writer:
        writer.write(row, key=row["sensor"])
    proof = prove(stream, paths)
    assert (proof.lost, proof.repeated, proof.holds) == (0, 1, False)


def test_the_proof_fails_when_an_event_is_altered(stream: hw.Stream, paths: list[Path]) -> None:
    ingest(stream, paths, AT_ONCE)
    paths[0].write_text(paths[0].read_text().replace('"celsius": ', '"celsius": 1', 1))
    proof = prove(stream, paths)
    assert (proof.lost, proof.repeated, proof.altered, proof.holds) == (0, 0, 1, False)


def test_the_proof_fails_when_the_order_of_a_sensor_is_lost(stream: hw.Stream, paths: list[Path]) -> None:
    lines = paths[2].read_text().splitlines(keepends=True)
    paths[2].write_text("".join(reversed(lines)))
    ingest(stream, paths, AT_ONCE)
    proof = prove(stream, paths)
    assert (proof.lost, proof.repeated) == (0, 0) and proof.disordered > 0 and not proof.holds


def test_the_chart_shows_rates_and_marks() -> None:
    lines = draw_chart([(0.0, 0), (1.0, 100), (2.0, 100), (3.0, 400)], [(1.5, "✗"), (1.5, "┿"), (9.0, "✗")], width=30, height=3)
    assert "300/s" in lines[0] and lines[0].endswith("█" * 10)
    assert "✗" in lines[3][10:29] and "┿" in lines[3] and lines[3].endswith("✗")
    assert lines[4].rstrip().endswith("3.0 s")
    assert draw_chart([], []) == []
