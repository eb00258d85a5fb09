"""Every example in README.md and docs/ is run, so that none is ever wrong.

The blocks of one file run in order, in one fresh process and one temporary folder. ```python blocks share a namespace. Of ```console blocks
the lines `$ command` run in bash (`> ` continues a command); the rest is what a reader would see. A comment on the line above changes that:

    <!-- not run: why -->    leaves the block out
    <!-- exit 1 -->          the console block has to end with that code
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if path.exists()]
FILE_SECONDS = 110.0

FENCE = re.compile(r"^\s*(?P<fence>`{3,}|~{3,})\s*(?P<language>[\w+-]*)")
NOT_RUN = re.compile(r"<!--\s*not run:\s*\S.*-->")
PREAMBLE = "set -eo pipefail; trap 'echo \"line $LINENO ended with $?: $BASH_COMMAND\" >&2' ERR"
EXIT = re.compile(r"<!--\s*exit\s+(?P<code>\d+)\s*-->")


@dataclass(frozen=True)
class Block:
    """A piece of a file to run; `line` is the number of the first line of `text`, from 1."""

    language: str
    line: int
    text: str
    exit_code: int = 0


def find_blocks(text: str) -> Iterator[Block]:
    """The blocks of a Markdown text that are to be run, in order."""
    lines = text.splitlines()
    above = ""  # the last line before this one that isn't empty
    at = 0
    while at < len(lines):
        opening = FENCE.match(lines[at])
        if not opening:
            above = lines[at].strip() or above
            at += 1
            continue
        fence = opening["fence"]
        start = at + 1
        at = next((n for n in range(start, len(lines)) if lines[n].strip().startswith(fence) and not lines[n].strip(" " + fence[0])), -1)
        if at < 0:
            raise ValueError(f"line {start}: this block does not end")
        if opening["language"] in ("python", "console") and not NOT_RUN.fullmatch(above):
            code = EXIT.fullmatch(above)
            yield Block(opening["language"], start + 1, textwrap.dedent("\n".join(lines[start:at])), int(code["code"]) if code else 0)
        above = ""
        at += 1


def console_script(block: Block) -> str:
    """The commands of a console block as a bash script in which each stands on the line it has in the document."""
    script = [PREAMBLE, *[""] * (block.line - 2)]  # a fence stands above, so there is a line for it
    is_command = False
    for line in block.text.splitlines():
        if line.startswith("$ "):
            is_command = True
            script.append(line[2:])
        elif is_command and line.startswith("> "):
            script.append(line[2:])
        elif is_command and script[-1].endswith("\\"):
            script.append(line)
        else:
            is_command = False
            script.append("")
    return "\n".join(script)


def run_file(path: Path) -> None:
    """Run all blocks of a file in this process; end it with a message that names the file and the line if one fails."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in find_blocks(path.read_text(encoding="utf-8")):
        print(f"{path}:{block.line}: {block.language}", flush=True)
        if block.language == "python":
            # Padded, so that a traceback shows the document's own lines.
            exec(compile("\n" * (block.line - 1) + block.text, str(path), "exec"), namespace)
            continue
        done = subprocess.run(["bash", "-c", console_script(block)])
        if done.returncode != block.exit_code:
            raise SystemExit(f"{path}:{block.line}: this console block ended with {done.returncode}, not {block.exit_code}")


def run_in_a_fresh_process(path: Path, folder: Path) -> tuple[int, str]:
    """Run a file's blocks in `folder`; returns the exit code and all that was printed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADWATER_")}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    environment["PYTHONUNBUFFERED"] = "1"
    command = [sys.executable, __file__, str(path)]
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=FILE_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            return -1, f"{output}\n{path}: not done after {FILE_SECONDS:.0f} s"
    return process.returncode, output


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_test_that_is_named_is_there(path: Path) -> None:
    named = set(re.findall(r"\btests/[\w/]+\.py", path.read_text()))
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_examples_run(path: Path, tmp_path: Path) -> None:
    code, output = run_in_a_fresh_process(path, tmp_path)
    assert code == 0, output


@pytest.mark.slow
def test_the_readmes_examples_can_be_run_twice(tmp_path: Path) -> None:
    for _ in range(2):
        code, output = run_in_a_fresh_process(ROOT / "README.md", tmp_path)
        assert code == 0, output


def run_text(text: str, folder: Path) -> tuple[int, str]:
    document = folder / "page.md"
    document.write_text(textwrap.dedent(text), encoding="utf-8")
    return run_in_a_fresh_process(document, folder)


def test_blocks_share_a_namespace_and_a_folder(tmp_path: Path) -> None:
    code, output = run_text(
        """
        ```python
        from pathlib import Path
        name = "made-here"
        ```
        Text.
        ```python
        Path(name).write_text("by python")
        ```
        ```console
        $ cat \\
            made-here
        by python
        $ for word in one two; do
        >     echo "$word" >> made-there
        > done
        ```
        ```python
        assert Path("made-there").read_text() == "one\\ntwo\\n"
        ```
        ```text
        not ( python
        ```
        """,
        tmp_path,
    )
    assert code == 0, output


def test_a_python_block_that_fails_is_named_by_its_line(tmp_path: Path) -> None:
    code, output = run_text("# Title\n\n```python\nx = 1\nassert x == 2\n```\n", tmp_path)
    assert code != 0
    assert 'page.md", line 5' in output


def test_a_console_block_that_fails_is_named_by_its_line(tmp_path: Path) -> None:
    code, output = run_text("# Title\n\n```console\n$ echo fine\nfine\n$ false\n$ echo never\n```\n", tmp_path)
    assert code != 0
    assert "line 6 ended with 1: false" in output
    assert "page.md:4: this console block ended with 1, not 0" in output
    assert "never" not in output


def test_a_block_may_be_left_out_only_with_a_reason(tmp_path: Path) -> None:
    assert run_text("<!-- not run: needs a cluster -->\n\n```python\n1 / 0\n```\n", tmp_path)[0] == 0
    assert run_text("<!-- not run: -->\n```python\n1 / 0\n```\n", tmp_path)[0] != 0


def test_a_block_that_shows_a_failure_has_to_fail_so(tmp_path: Path) -> None:
    assert run_text("<!-- exit 3 -->\n```console\n$ exit 3\n```\n", tmp_path)[0] == 0
    assert run_text("<!-- exit 3 -->\n```console\n$ true\n```\n", tmp_path)[0] != 0
    assert run_text("<!-- exit 3 -->\nText between.\n```console\n$ exit 3\n```\n", tmp_path)[0] != 0


def test_a_block_without_an_end_is_an_error() -> None:
    with pytest.raises(ValueError, match="line 2: this block does not end"):
        list(find_blocks("text\n```python\nx = 1\n"))


if __name__ == "__main__":
    run_file(Path(sys.argv[1]))
