"""The command as a process of its own: pipes that close, Ctrl-C, directories that can't be written, and the examples."""

from __future__ import annotations

import os
import resource
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import headwater as hw
from tests.rights import obey_permissions

# Processes of their own: not for a quick run.
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-c", "import headwater.cli; headwater.cli.main()"]
PATIENCE_SECONDS = 60.0


def run(*arguments: str, input: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([*COMMAND, *arguments], input=input, capture_output=True, timeout=PATIENCE_SECONDS)


@contextmanager
def started(*arguments: str, stdin: int | None = subprocess.DEVNULL) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([*COMMAND, *arguments], stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def url(tmp_path: Path) -> str:
    url = str(tmp_path / "store")
    with hw.open(url) as store:
        stream = store.create_stream("a/b")
        with stream.writer() as writer:
            for number in range(50_000):
                writer.write(b"event %d, long enough to fill any pipe" % number)
    return url


@pytest.mark.slow
def test_a_reader_that_stops_reading_ends_the_command_without_a_word(url: str) -> None:
    for extra in ([], ["--json"]):
        with started("read", "a/b", "-s", url, *extra) as process:
            assert process.stdout is not None and process.stderr is not None
            assert b"event 0," in process.stdout.readline()
            process.stdout.close()
            assert process.wait(PATIENCE_SECONDS) == 0
            assert process.stderr.read() == b""


@pytest.mark.slow
@pytest.mark.parametrize("command", ["list", "describe", "describe a/b", "scaling a/b", "check", "split a/b 0", "upkeep --once"])
def test_a_pipe_that_is_closed_already_is_no_error(url: str, command: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run([*COMMAND, *command.split(), "-s", url], stdout=writing, stderr=subprocess.PIPE, timeout=PATIENCE_SECONDS)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "read a/b >/dev/full",
        "list >/dev/full",
        "check >/dev/full",
        "--help >/dev/full",
        "list >&-",
        "list --json >&-",
        "write a/b <&-",
        "write a/b <&- >&-",
        "write a/b --file /proc/self/mem",
    ],
)
def test_what_can_not_be_read_or_written_is_one_line_and_1(url: str, command: str) -> None:
    line = f"{shlex.join(COMMAND)} {command}"
    done = subprocess.run(line, shell=True, env={**os.environ, "HEADWATER_STORE": url}, capture_output=True, timeout=PATIENCE_SECONDS)
    assert done.returncode == 1 and done.stdout == b"" and done.stderr.count(b"\n") == 1, done.stderr
    assert b"the input can't be read, or the output not written: " in done.stderr


def test_without_standard_output_a_command_that_prints_nothing_works(url: str) -> None:
    line = f"{shlex.join(COMMAND)} write a/b >&- 2>&-"
    environment = {**os.environ, "HEADWATER_STORE": url}
    assert subprocess.run(line, shell=True, env=environment, input=b"last\n", timeout=PATIENCE_SECONDS).returncode == 0
    assert run("tail", "a/b", "-n", "1", "-s", url).stdout == b"last\n"


@pytest.mark.slow
def test_a_follower_prints_what_comes_and_ends_with_ctrl_c(url: str) -> None:
    with started("tail", "a/b", "-n", "1", "-f", "-s", url) as process:
        assert process.stdout is not None and process.stderr is not None
        assert b"event 49999" in process.stdout.readline()
        with hw.open(url) as store, store.stream("a/b").writer() as writer:
            writer.write(b"one more")
            writer.flush()
            assert process.stdout.readline() == b"one more\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_SECONDS) == 0
        assert process.stderr.read() == b""


#: Runs the command as its script does, with a Ctrl-C when it begins to import a module.
_INTERRUPTED = """
import importlib, os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == moment:
            os.kill(os.getpid(), signal.SIGINT)

module, _, function = sys.argv.pop(1).partition(":")
moment = sys.argv.pop(1)
sys.meta_path.insert(0, Interrupt())
getattr(importlib.import_module(module), function)()
"""


@pytest.mark.slow
@pytest.mark.parametrize("module", ["headwater", "pyarrow.lib", "click", "headwater.cli.describe"])
def test_ctrl_c_ends_a_command_in_one_line_also_while_it_is_loaded(module: str) -> None:
    script = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["headwater"]
    for arguments, said in (
        (["list"], b"headwater: interrupted\n"),
        (["list", "--json"], b'{"error": "Interrupted", "message": "interrupted"}\n'),
    ):
        command = [sys.executable, "-c", _INTERRUPTED, script, module, *arguments]
        done = subprocess.run(command, capture_output=True, timeout=PATIENCE_SECONDS)
        assert (done.returncode, done.stdout, done.stderr) == (1, b"", said)


@pytest.mark.slow
def test_a_write_stores_lines_as_they_come_and_ctrl_c_keeps_them(url: str) -> None:
    with started("write", "a/b", "-s", url, stdin=subprocess.PIPE) as process, hw.open(url) as store:
        assert process.stdin is not None and process.stderr is not None
        follower = store.stream("a/b").read("tail", follow=True)
        process.stdin.write(b"first\nsecond\nnot yet a li")
        process.stdin.flush()
        # Durable and readable while the input is still open.
        assert [next(follower).value, next(follower).value] == [b"first", b"second"]
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_SECONDS) == 1
        said = process.stderr.read()
        assert b"2 events stored" in said and b"interrupted" in said and b"Traceback" not in said


@pytest.mark.slow
def test_upkeep_goes_on_until_ctrl_c(url: str) -> None:
    with started("upkeep", "--every", "0.1", "--json", "-s", url) as process:
        assert process.stdout is not None and process.stderr is not None
        assert b"rows_deleted" in process.stdout.readline() and b"rows_deleted" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_SECONDS) == 0
        assert process.stderr.read() == b""


@pytest.mark.slow
def test_a_bench_that_is_interrupted_leaves_nothing_behind(tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    with started("bench", "--seconds", "0.3", "-s", url) as process:
        assert process.stderr is not None
        assert b"ack of one event" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_SECONDS) == 1
        assert process.stderr.read().endswith(b"headwater: interrupted\n")
    with hw.open(url, create=False) as store:
        assert store.streams() == []


def test_a_wrong_command_line_ends_with_2() -> None:
    done = run("read", "a/b", "--start", "never")
    assert done.returncode == 2 and done.stdout == b"" and done.stderr.startswith(b"headwater: ") and done.stderr.count(b"\n") == 1


@pytest.mark.parametrize(("mode", "arguments"), [(0o500, ("create", "a/b", "-s", "{}/store")), (0o000, ("list", "-s", "{}"))])
def test_a_directory_that_may_not_be_written_or_read_is_one_line(tmp_path: Path, mode: int, arguments: tuple[str, ...]) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=mode)
    command = [*COMMAND, *(argument.format(closed) for argument in arguments)]
    done = subprocess.run(command, capture_output=True, timeout=PATIENCE_SECONDS, preexec_fn=obey_permissions)
    assert done.returncode == 1 and done.stderr.count(b"\n") == 1 and b"Traceback" not in done.stderr
    assert str(closed).encode() in done.stderr and b"denied" in done.stderr.lower()


def test_a_write_that_can_not_go_on_is_one_line_with_how_much_is_stored(url: str) -> None:
    def limited() -> None:
        # As a full disk: no file may have more.
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    command = [*COMMAND, "write", "a/new", "-s", url]
    with hw.open(url, upkeep=False) as store:
        stream = store.create_stream("a/new")
        lines = (b"10 kB a line".ljust(10_000) + b"\n") * 500 + b"larger than any file may be".ljust(3_000_000) + b"\n"
        done = subprocess.run(command, input=lines, capture_output=True, timeout=PATIENCE_SECONDS, preexec_fn=limited)
        assert done.returncode == 1 and done.stderr.count(b"\n") == 1, done.stderr
        said = int(done.stderr.rsplit(b"at least ")[1].split()[0].replace(b",", b""))
        assert said == sum(segment.events for segment in stream.segments()) <= 500


def test_a_store_in_a_directory_that_may_not_be_entered_is_not_said_to_be_missing(url: str) -> None:
    folder = Path(url).parent
    folder.chmod(0)
    try:
        command = [*COMMAND, "list", "-s", url]
        done = subprocess.run(command, capture_output=True, timeout=PATIENCE_SECONDS, preexec_fn=obey_permissions)
    finally:
        folder.chmod(0o700)
    assert done.returncode == 1 and done.stderr.count(b"\n") == 1 and b"Permission denied" in done.stderr, done.stderr


def test_a_store_whose_files_may_not_be_changed_is_not_written(url: str) -> None:
    store = Path(url)
    for path in [store, *store.rglob("*")]:
        path.chmod(0o500 if path.is_dir() else 0o400)
    command = [*COMMAND, "write", "a/b", "-s", url]
    done = subprocess.run(command, input=b"x\n", capture_output=True, timeout=PATIENCE_SECONDS, preexec_fn=obey_permissions)
    assert done.returncode == 1 and done.stderr.count(b"\n") == 1 and url.encode() in done.stderr
    for path in [store, *store.rglob("*")]:
        path.chmod(0o700 if path.is_dir() else 0o600)
    assert run("read", "a/b", "-s", url).returncode == 0


@pytest.mark.slow
def test_output_that_is_not_utf8_is_no_reason_to_fail(url: str) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = subprocess.run([*COMMAND, "describe", "a/b", "-s", url], env=environment, capture_output=True, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_examples_run(tmp_path: Path) -> None:
    def example(name: str, *arguments: str) -> str:
        command = [sys.executable, str(ROOT / "examples" / name), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    url, folder = str(tmp_path / "store"), tmp_path / "files"
    folder.mkdir()
    for name in ("one", "two"):
        (folder / name).write_text("a\nb\nc\n")
    assert example("ingest_files.py", url, "a/lines", str(folder)) == "one: 3 lines stored\ntwo: 3 lines stored\n"
    (folder / "two").write_text("a\nb\nc\nd\n")
    assert example("ingest_files.py", url, "a/lines", str(folder)) == "one: 0 lines stored\ntwo: 1 lines stored\n"
    with hw.open(url) as store:
        store.stream("a/lines").seal()
    assert example("follow.py", url, "a/lines") == "one: 3\ntwo: 4\n"
    assert example("batches.py", url) == "3 rides stored\n3 rides in all, 73.5 in fares\n"
    for _ in range(2):
        said = example("shop.py", url).splitlines()
        assert said[:3] == ["4 customers registered", "3 orders placed, 1 refused, mugs left: 0", "the live query saw 3 orders: the same"]
        assert said[3] == "after a cancellation mugs left: 1" and said[4].startswith("an order's history: placed paid shipped")
    assert "every zone's rides are there, in order" in example("taxi.py", str(tmp_path / "city"))
    (folder / "a.txt").write_text("the cat and the dog\nand the bird\n")
    assert example("word_count.py", url, str(folder)) == "2 new lines stored\n     3 the\n     2 and\n     1 bird\n"
    (folder / "b.txt").write_text("the end\n")
    assert example("word_count.py", url, str(folder)).startswith("1 new lines stored\n     4 the\n")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_example_with_spark_runs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "sensors.py"), str(tmp_path)], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said[0] == "900 readings of 3 files stored, 0 files were stored before"
    assert said[3] == "12:00 north: 20 readings, 17.6 degrees" and "readings in 58 windows" in said[-1]
