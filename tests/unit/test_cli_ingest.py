"""`headwater ingest` as people use it: its options, its answers, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import headwater as hw
from headwater.cli import main
from tests.rights import obey_permissions

COMMAND = [sys.executable, "-c", "import headwater.cli; headwater.cli.main()", "ingest"]
PATIENCE_SECONDS = 60.0


@pytest.fixture
def url(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.csv").write_text("user,n,at\n" + "".join(f"u{n % 3},{n},2031-05-01T12:00:{n:02d}Z\n" for n in range(20)))
    return folder


def run(url: Path, *arguments: object, code: int = 0) -> Result:
    result = CliRunner(env={"HEADWATER_STORE": str(url)}).invoke(main, ["ingest", *map(str, arguments)])
    assert result.exit_code == code, (result.output, result.exception)
    return result


@contextmanager
def started(url: Path, *arguments: object, **options: Any) -> Iterator[subprocess.Popen[str]]:
    command = [*COMMAND, *map(str, arguments), "--store", str(url)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def count(url: Path, name: str = "a/b") -> int:
    with hw.open(url, create=False) as store:
        return len(list(store.stream(name).read()))


def test_a_folder_becomes_a_stream_and_a_second_run_finds_nothing_to_do(url: Path, folder: Path) -> None:
    result = run(url, folder, "--stream", "a/b", "--key", "user", "--time", "at", "--segments", 2)
    assert "60 events of 3 files stored in a/b" in result.stderr
    with hw.open(url) as store:
        stream = store.stream("a/b")
        assert stream.schema.names == ["user", "n", "at"] and len(stream.segments()) == 2
        assert all(event.key == event.value["user"].encode() and event.time == event.value["at"] for event in stream.read())
    result = run(url, folder, "--stream", "a/b")
    assert "0 events of 0 files stored in a/b, 3 files were stored before" in result.stderr


def test_answers_in_json_are_a_line_for_each_file_and_one_for_all(url: Path, folder: Path) -> None:
    (folder / "2.csv").write_text("user,n,at\nann,x,\nann,1,\n")
    result = run(url, folder, "--stream", "a/b", "--schema", "user:string,n:int64,at:timestamp", "--bad-rows", "a/dead", "--json")
    *files, last = map(json.loads, result.stdout.splitlines())
    assert [(Path(file["file"]).name, file["events"], file["bad_rows"]) for file in files] == [
        ("0.csv", 20, 0),
        ("1.csv", 20, 0),
        ("2.csv", 1, 1),
    ]
    assert (last["stream"], last["files"], last["events"], last["bad_rows"], last["files_before"]) == ("a/b", 3, 41, 1, 0)
    assert count(url, "a/dead") == 1


def test_a_bad_row_ends_it_with_file_line_and_reason(url: Path, folder: Path) -> None:
    (folder / "1.csv").write_text("user,n,at\nann,1,\nann,x,\n")
    result = run(url, folder, "--stream", "a/b", code=1)
    assert f"{folder}/1.csv, line 3: column 'n': can't become int64: invalid value 'x'" in result.stderr
    assert result.stderr.count("\n") == 1 and count(url) == 20
    result = run(url, folder, "--stream", "a/b", "--json", code=1)
    assert json.loads(result.stderr)["error"] == "InvalidRequestError"


def test_options_of_csv(url: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("ann|1\nbob|2\n")
    run(url, tmp_path / "a.txt", "--stream", "a/b", "--format", "csv", "--delimiter", "|", "--no-header", "--schema", "user:string,n:int64")
    with hw.open(url) as store:
        assert [event.value["n"] for event in store.stream("a/b").read()] == [1, 2]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([], 2, "Missing argument 'SOURCE...'"),
        (["in"], 2, "Missing option '--stream'"),
        (["in", "--stream", "nonsense"], 1, "can't name a stream"),
        (["nowhere", "--stream", "a/b"], 1, "there is no file or folder"),
        (["*.none", "--stream", "a/b"], 1, "no file matches"),
        (["in", "--stream", "a/b", "--schema", "x"], 2, "is not of the form column:type"),
        (["in", "--stream", "a/b", "--schema", "x:int64"], 1, "the stream has no column 'user', 'n', 'at'"),
        (["in", "--stream", "a/b", "--key", "nobody"], 1, "the stream has no column 'nobody'"),
        (["in", "--stream", "a/b", "--events-per-transaction", "0"], 2, "0 is not in the range x>=1"),
        (["in", "--stream", "a/b", "--bad-rows", "no-stream"], 1, "can't name a stream"),
    ],
)
def test_mistakes_are_one_line_and_a_code(url: Path, folder: Path, arguments: list[str], code: int, said: str) -> None:
    result = run(url, *[str(folder) if argument == "in" else argument for argument in arguments], code=code)
    assert said in result.stderr and result.stderr.startswith("headwater: ") and result.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_file_that_may_not_be_read_is_named(url: Path, folder: Path) -> None:
    (folder / "1.csv").chmod(0)
    with started(url, folder, "--stream", "a/b", preexec_fn=obey_permissions) as process:
        said = process.communicate(timeout=PATIENCE_SECONDS)[1]
    assert process.returncode == 1 and said == f"headwater: {folder}/1.csv can't be read: Permission denied\n"
    assert count(url) == 20, "what came before it is stored"


@pytest.mark.slow
def test_avro_without_its_library_is_one_line(url: Path, tmp_path: Path) -> None:
    (tmp_path / "a.avro").write_bytes(b"")
    (tmp_path / "fastavro.py").write_text("raise ImportError('not installed')\n")
    with started(url, tmp_path / "a.avro", "--stream", "a/b", env={**os.environ, "PYTHONPATH": str(tmp_path)}) as process:
        assert "pip install 'headwater[avro]'" in process.communicate(timeout=PATIENCE_SECONDS)[1]


@pytest.mark.slow
@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_a_watch_goes_on_until_it_is_told_to_end_and_ends_well(url: Path, folder: Path, by: signal.Signals) -> None:
    with started(url, folder, "--stream", "a/b", "--watch", "--settle", "0", "--json") as process:
        assert process.stdout is not None and process.stderr is not None
        assert [json.loads(process.stdout.readline())["events"] for _ in range(3)] == [20, 20, 20]
        (folder / "new.part").write_text("user,n,at\nann,1,\n")
        os.rename(folder / "new.part", folder / "3.csv")
        assert json.loads(process.stdout.readline()) == {"file": str(folder / "3.csv"), "events": 1, "bad_rows": 0}
        process.send_signal(by)
        assert process.wait(PATIENCE_SECONDS) == 0
        assert json.loads(process.stdout.readline())["events"] == 61 and process.stderr.read() == ""
    with hw.open(url) as store:
        assert not store.transactions(only_open=True)


@pytest.mark.slow
@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_told_to_end_leaves_nothing_half_done(url: Path, tmp_path: Path, by: signal.Signals) -> None:
    # More than it can do before it is told.
    (tmp_path / "a.txt").write_bytes(b"a line of some length, for a file that takes a while\n" * 4_000_000)
    with started(url, tmp_path / "a.txt", "--stream", "a/b", "--events-per-transaction", 1000, "--json") as process, hw.open(url) as store:
        while "a/b" not in store.streams() or not store.stream("a/b").segments()[0].events:
            assert process.poll() is None
        process.send_signal(by)
        out, said = process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == 1 and json.loads(said)["error"] == "Interrupted"
        stored = json.loads(out)["events"]
        assert stored % 1000 == 0 and 0 < stored == count(url) < 4_000_000
        assert not store.transactions(only_open=True)


@pytest.mark.slow
def test_a_second_one_ends_with_a_line_or_stands_by(url: Path, folder: Path) -> None:
    with started(url, folder, "--stream", "a/b", "--watch", "--json") as first:
        assert first.stdout is not None
        first.stdout.readline()
        done = subprocess.run([*COMMAND, str(folder), "--stream", "a/b", "--store", str(url)], capture_output=True, text=True, timeout=60)
        assert done.returncode == 1 and f"process {first.pid} on " in done.stderr and "wait for it with --standby" in done.stderr
        with started(url, folder, "--stream", "a/b", "--standby", "--json") as second:
            assert second.stdout is not None
            assert "waiting to take over" in json.loads(second.stdout.readline())["notice"]
            first.kill()
            assert json.loads(second.stdout.readline().splitlines()[-1])["files_before"] == 3
            assert second.wait(PATIENCE_SECONDS) == 0


def test_a_pattern_that_finds_a_pipe_is_refused(url: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "p.csv")
    assert "is no file that can be read again" in run(url, tmp_path / "*.csv", "--stream", "a/b", code=1).stderr


def test_a_link_to_nothing_is_said_to_be_unreadable(url: Path, tmp_path: Path) -> None:
    (tmp_path / "p.csv").symlink_to(tmp_path / "nowhere")
    assert "p.csv can't be read" in run(url, tmp_path / "*.csv", "--stream", "a/b", code=1).stderr


def test_it_fails_when_nobody_reads_its_answers(url: Path, folder: Path) -> None:
    with started(url, folder, "--stream", "a/b", "--json") as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert "nobody reads its output any more" in process.stderr.read()
        assert process.wait(PATIENCE_SECONDS) == 1
    run(url, folder, "--stream", "a/b")
    assert count(url) == 60
