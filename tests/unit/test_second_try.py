"""`make test` gives a failed test a second try, and says which tests passed only then."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import second_try

FLAKY = """
from pathlib import Path

def test_good(): pass

def test_flaky():
    seen = Path(__file__).with_name("seen")
    was_there = seen.exists()
    seen.touch()
    assert was_there
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text(FLAKY)
    return tmp_path


def test_what_passed_only_on_a_second_try_is_counted_and_named_at_the_end(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert second_try.run(["-q", "-n", "2", "--dist", "loadscope"], folder) == 0
    assert capfd.readouterr().out.splitlines()[-2:] == ["passed only on a second try: 1", "  test_it.py::test_flaky"]
    assert second_try.run(["-q"], folder) == 0
    assert "second try" not in capfd.readouterr().out


def test_what_fails_twice_fails(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "test_bad.py").write_text("def test_bad(): assert False\n")
    assert second_try.run(["-q"], folder) == 1
    assert capfd.readouterr().out.splitlines()[-2:] == ["passed only on a second try: 1", "  test_it.py::test_flaky"]


def test_no_tests_at_all_are_no_success(folder: Path) -> None:
    assert second_try.run(["-q", "-k", "nothing"], folder) == 5
    (folder / "test_broken.py").write_text("import nothing_of_that_name\n")
    assert second_try.run(["-q"], folder) == 2
