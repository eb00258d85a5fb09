"""The demo proves what it says, and its proof fails when an event is lost, repeated, altered or out of order."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import psutil
import pyarrow as pa
import pytest

import headwater as hw
from headwater.demo.chart import draw_chart, save_chart
from headwater.demo.files import BEGINNING, LATEST_SECONDS, SCHEMA, enriched, make_files, parse_line
from headwater.demo.proof import prove, prove_enriched, prove_windows
from headwater.ingest import ingest as ingest_files

COMMAND = [sys.executable, "-c", "import headwater.cli; headwater.cli.main()", "demo"]
FILES, EVENTS = 4, 100
WINDOW_SCHEMA = pa.schema([("site", pa.string()), ("minute", SCHEMA.field("at").type), ("readings", pa.int64()), ("hot", pa.int64())])


@pytest.fixture
def stream(tmp_path: Path) -> Iterator[hw.Stream]:
    with hw.open(tmp_path / "store", upkeep=False) as store:
        yield store.create_stream("demo/readings", schema=SCHEMA, scaling=hw.Scaling.fixed(2))


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    return make_files(tmp_path / "files", files=FILES, events=EVENTS, seed=1)


def ingest(stream: hw.Stream, paths: Sequence[Path]) -> None:
    ingest_files(stream._store, paths, stream.name, key="sensor", time="at")


def run_demo(folder: Path, *arguments: str, seconds: float = 110.0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*COMMAND, "--folder", str(folder), *arguments], capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.mark.slow
def test_the_demo_holds_through_kills_and_a_split(tmp_path: Path) -> None:
    folder, apart = tmp_path / "demo", tmp_path / "apart"
    options = "--no-spark", "--files", "6", "--events", "200", "--kills", "3", "--rate", "500", "--seed", "7"
    done = run_demo(folder, *options, "--store", str(apart))
    assert (apart / "catalog.sqlite").exists() and not (folder / "store").exists()
    said = [line.strip() for line in done.stdout.splitlines()]
    for line in (
        "1,200 of 1,200 events stored",
        "0 lost",
        "0 repeated",
        "0 altered",
        "0 out of order, of 48 sensors, over a split",
        "1,200 seen by the process that followed the tail, 0 of them out of order",
    ):
        assert line in said, done.stdout
    assert any(line.startswith("kill 3: ") for line in said) and any(line.startswith("split: ") for line in said)
    assert any(line.startswith("check all is well: ") for line in said)
    assert "the ingester died 3 times, and every event counts once" in done.stdout
    assert (folder / "chart.png").read_bytes().startswith(b"\x89PNG")
    # What it tells one to try works.
    tries = [line for line in said if line.endswith(f"--store {apart}")]
    assert len(tries) == 3
    for line in tries:
        arguments = line.split()[1:]
        assert subprocess.run([*COMMAND[:-1], *arguments], capture_output=True, timeout=60).returncode == 0, line
    with hw.open(apart, create=False, upkeep=False) as store:
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


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_demo_holds_through_spark_with_a_driver_that_is_killed_and_a_wrong_version_that_is_undone(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    arguments = ["--spark", "--files", "8", "--events", "100", "--kills", "2", "--rate", "2000", "--seed", "3", "--json"]
    outcome = json.loads(run_demo(folder, *arguments, seconds=500.0).stdout)
    assert outcome["ok"] and outcome["driver_kills"] == 1 and outcome["kills"] == 2, outcome
    assert outcome["restores"] == 1 and outcome["wrong_windows"] > 0, outcome
    assert outcome["stages"]["demo/enriched"]["stored"] == 800
    windows = outcome["stages"]["demo/windows"]
    assert (windows["counted"], windows["open"], windows["wrong"], windows["repeated"]) == (794, 6, 0, 0) and windows["late"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(("by", "code"), [(signal.SIGINT, 1), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_demo_that_is_ended_leaves_no_process_behind(tmp_path: Path, by: signal.Signals, code: int) -> None:
    arguments = ["--folder", str(tmp_path / "demo"), "--no-spark", "--files", "20", "--events", "100", "--kills", "0", "--rate", "200"]
    with subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as demo:
        try:
            assert demo.stdout is not None and demo.stderr is not None
            assert "20 files" in demo.stdout.readline()
            assert "of 2,000 stored" in demo.stdout.readline()
            children = psutil.Process(demo.pid).children(recursive=True)
            assert len(children) == 2, "an ingester and a follower"
            demo.send_signal(by)
            assert demo.wait(60) == code
            assert "Traceback" not in demo.stderr.read()
        finally:
            demo.kill()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert alive == []


def test_a_folder_that_is_not_empty_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    for option in ("--folder", "--store"):
        done = subprocess.run([*COMMAND, option, str(tmp_path)], capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and "is not empty" in done.stderr and option in done.stderr
    assert os.listdir(tmp_path) == ["mine"]


def test_files_are_the_same_for_the_same_seed(tmp_path: Path) -> None:
    def texts(folder: str, seed: int) -> list[str]:
        return [path.read_text() for path in make_files(tmp_path / folder, files=2, events=10, seed=seed)]

    assert texts("a", 1) == texts("b", 1) != texts("c", 2)


def test_what_was_ingested_twice_is_stored_once(stream: hw.Stream, paths: list[Path]) -> None:
    for _ in range(2):
        ingest(stream, paths)
    proof = prove(stream, paths)
    assert proof.holds and proof.stored == FILES * EVENTS


def test_the_proof_fails_when_an_event_is_lost(stream: hw.Stream, paths: list[Path]) -> None:
    lines = paths[1].read_text().splitlines(keepends=True)
    paths[1].write_text("".join(lines[:40] + lines[41:]))
    ingest(stream, paths)
    paths[1].write_text("".join(lines))
    proof = prove(stream, paths)
    assert (proof.lost, proof.repeated, proof.holds) == (1, 0, False)


def test_the_proof_fails_when_an_event_is_repeated(stream: hw.Stream, paths: list[Path]) -> None:
    ingest(stream, paths)
    row = parse_line(paths[0].read_text().splitlines()[-1])
    with stream.writer() as writer:
        writer.write(row, key=row["sensor"])
    proof = prove(stream, paths)
    assert (proof.lost, proof.repeated, proof.holds) == (0, 1, False)


def test_the_proof_fails_when_an_event_is_altered(stream: hw.Stream, paths: list[Path]) -> None:
    ingest(stream, paths)
    paths[0].write_text(paths[0].read_text().replace('"celsius": ', '"celsius": 1', 1))
    proof = prove(stream, paths)
    assert (proof.lost, proof.repeated, proof.altered, proof.holds) == (0, 0, 1, False)


def test_the_proof_fails_when_the_order_of_a_sensor_is_lost(stream: hw.Stream, paths: list[Path]) -> None:
    lines = paths[2].read_text().splitlines(keepends=True)
    paths[2].write_text("".join(reversed(lines)))
    ingest(stream, paths)
    proof = prove(stream, paths)
    assert (proof.lost, proof.repeated) == (0, 0) and proof.disordered > 0 and not proof.holds


def test_the_proof_of_the_pipeline_fails_when_a_step_is_wrong(stream: hw.Stream, paths: list[Path]) -> None:
    store = stream._store
    fields = [*SCHEMA, pa.field("site", pa.string()), pa.field("hot", pa.bool_())]
    rows = [enriched(parse_line(line)) for path in paths for line in path.read_text().splitlines()]
    good = store.create_stream("demo/good", schema=pa.schema(fields))
    bad = store.create_stream("demo/bad", schema=pa.schema(fields))
    for target, chosen in ((good, rows), (bad, [{**row, "hot": True} for row in rows])):
        with target.writer() as writer:
            for row in chosen:
                writer.write(row, key=row["sensor"])
    assert prove_enriched(good, paths).holds
    proof = prove_enriched(bad, paths)
    assert (proof.lost, proof.repeated) == (0, 0) and proof.altered > 0 and not proof.holds


def test_the_proof_of_windows_fails_when_one_is_wrong_repeated_or_missing(stream: hw.Stream, paths: list[Path]) -> None:
    store = stream._store
    rows = [enriched(parse_line(line)) for path in paths for line in path.read_text().splitlines()]
    windows: dict[tuple[str, int], dict[str, object]] = {}
    for row in rows:
        minute = int((row["at"] - BEGINNING).total_seconds() // 60)
        window = windows.setdefault(
            (row["site"], minute), {"site": row["site"], "minute": BEGINNING + timedelta(minutes=minute), "readings": 0, "hot": 0}
        )
        window["readings"] = int(str(window["readings"])) + 1
        window["hot"] = int(str(window["hot"])) + row["hot"]
    last = max(minute for _, minute in windows)
    closed = [window for (_, minute), window in windows.items() if minute < last]

    def proven(name: str, chosen: list[dict[str, object]]) -> bool:
        target = store.create_stream(name, schema=WINDOW_SCHEMA)
        with target.writer() as writer:
            for window in chosen:
                writer.write(window, key=str(window["site"]))
        return prove_windows(target, paths).holds

    assert proven("demo/w1", closed) and proven("demo/w2", list(windows.values())), "the last minute may be over or not"
    assert not proven("demo/w3", closed[1:])
    assert not proven("demo/w4", [*closed, closed[0]])
    assert not proven("demo/w5", [{**closed[0], "hot": 10**6}, *closed[1:]])


def test_some_readings_come_late_and_the_last_ones_after_a_pause(paths: list[Path]) -> None:
    times = [parse_line(line)["at"] for path in paths for line in path.read_text().splitlines()]
    newest, delays = BEGINNING, []
    for at in times:
        delays.append((newest - at).total_seconds())
        newest = max(newest, at)
    assert 0 < sum(delay > 1 for delay in delays) < len(delays) / 10 and max(delays) <= LATEST_SECONDS
    assert times[-1] - times[-7] > timedelta(minutes=8) and len(set(times[-6:])) == 1


def test_the_chart_shows_rates_and_marks() -> None:
    lines = draw_chart([(0.0, 0), (1.0, 100), (2.0, 100), (3.0, 400)], [(1.5, "✗"), (1.5, "┿"), (9.0, "✗")], width=30, height=3)
    assert "300/s" in lines[0] and lines[0].endswith("█" * 10)
    assert "✗" in lines[3][10:29] and "┿" in lines[3] and lines[3].endswith("✗")
    assert lines[4].rstrip().endswith("3.0 s")
    assert draw_chart([], []) == []


def test_the_chart_is_a_picture_too(tmp_path: Path) -> None:
    samples = [(0.0, 0), (1.0, 100), (2.0, 400)]
    meanings = {"✗": "killed", "◆": "driver killed", "┿": "split"}
    for stages in ({"one": samples}, {"one": samples, "two": []}):
        assert save_chart(tmp_path / "chart.png", stages, [(0.5, "✗"), (1.5, "┿")], meanings)
        assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
