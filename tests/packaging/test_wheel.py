"""The wheel as a stranger gets it, in an empty environment: the program of the README, the demo and the command line run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.docs.test_examples import ROOT, find_blocks

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]


def run(*command: str | Path, folder: Path) -> str:
    # Nothing of this checkout: neither its environment's variables nor its folder.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV", "HEADWATER"))}
    done = subprocess.run(list(map(str, command)), cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `make dist` does, by way of the source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, folder=folder)
    assert len(list(folder.glob("*.tar.gz"))) == 1
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment that has the wheel and what it requires."""
    folder = tmp_path_factory.mktemp("empty")
    run(sys.executable, "-m", "venv", folder / "venv", folder=folder)
    run(folder / "venv" / "bin" / "python", "-m", "pip", "install", "--quiet", wheel, folder=folder)
    return folder / "venv" / "bin"


def test_the_wheel_has_every_file_of_the_package_and_no_other(wheel: Path) -> None:
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    files = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "src"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    assert packed == {name.removeprefix("src/") for name in files}


def test_the_first_program_of_the_readme_runs(programs: Path, tmp_path: Path) -> None:
    program = next(block for block in find_blocks((ROOT / "README.md").read_text()) if block.language == "python")
    (tmp_path / "program.py").write_text(program.text)
    for _ in range(2):  # as people do
        assert run(programs / "python", "program.py", folder=tmp_path)


def test_the_demo_runs_without_spark(programs: Path, tmp_path: Path) -> None:
    small = "--files", "4", "--events", "100", "--kills", "2", "--rate", "500"
    said = run(programs / "headwater", "demo", "--folder", tmp_path / "demo", *small, folder=tmp_path)
    assert "400 of 400 events stored" in said and "0 lost" in said


KEYED = """
import sys
import headwater as hw
import pyarrow as pa
import pyarrow.parquet as pq

assert pa.__version__ == sys.argv[1]
with hw.open("store") as store:
    stream = store.create_stream("a/b", schema=pa.schema([("n", pa.int64())]))
    with stream.writer() as writer:
        writer.write_batch(pa.table({"n": range(1000), "key": [f"user-{n}" for n in range(1000)]}), key="key")
    store.run_upkeep()
    (chunk,) = stream.chunks()
    column = pq.read_metadata(chunk.url.removeprefix("file://")).row_group(0).column(1)
    assert column.bloom_filter_offset is not None and column.bloom_filter_length > 0
    assert [event.value["n"] for event in stream.read(key="user-7")] == [7]
    assert list(stream.read(key="nobody")) == []
    with stream.dataset() as dataset:
        assert dataset.count_rows() == pa.table(stream).num_rows == 1000
"""


def test_the_oldest_pyarrow_that_is_allowed_has_what_is_used(wheel: Path, tmp_path: Path) -> None:
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (bound,) = [found[1] for line in wanted if (found := re.match(r"pyarrow>=([0-9]+)", line))]
    oldest = f"{bound}.0.0"
    run(sys.executable, "-m", "venv", tmp_path / "venv", folder=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", wheel, f"pyarrow=={oldest}", folder=tmp_path)
    (tmp_path / "keyed.py").write_text(KEYED)
    run(python, "keyed.py", oldest, folder=tmp_path)


def test_the_command_line_says_its_version_and_completes(programs: Path, wheel: Path, tmp_path: Path) -> None:
    version = run(programs / "headwater", "--version", folder=tmp_path).strip()
    assert version == f"headwater {wheel.name.split('-')[1]}"
    script = tmp_path / "completion.bash"
    script.write_text(run(programs / "headwater", "completion", "bash", folder=tmp_path))
    asked = 'source "$1"; COMP_WORDS=(headwater trunc); COMP_CWORD=1; _headwater_completion "$2"; echo "${COMPREPLY[@]}"'
    assert run("bash", "-c", asked, "bash", script, programs / "headwater", folder=tmp_path).strip() == "truncate"
