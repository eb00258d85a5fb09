"""docs/architecture.md names files that exist, and an event's way from `write` to its ack names each of them once."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "headwater"
TEXT = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text(encoding="utf-8")
_FILES = re.compile(r"`((?:\w+/)*\w+\.(?:py|sql))\b")


def _section(title: str) -> str:
    return TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_the_way_from_write_to_its_ack_names_each_file_once() -> None:
    named = Counter(_FILES.findall(_section("From `write` to its ack")))
    assert len(named) > 15
    assert [name for name, count in named.items() if count > 1] == []
    assert [name for name in named if not (PACKAGE / name).is_file()] == []


def test_reading_the_source_has_six_entry_points_and_names_files_that_exist() -> None:
    section = _section("Reading the source")
    assert re.findall(r"^(\d)\. ", section, re.MULTILINE) == list("123456")
    for item in re.split(r"^\d\. ", section, flags=re.MULTILINE)[1:]:
        entry = item.split("\n\n")[0]
        assert len(re.findall(r"[.](?=\s|$)", entry.split("** ", 1)[1])) == 5, "the entry's file, and its way in four sentences"
    assert [name for name in _FILES.findall(section) if not (PACKAGE / name).is_file()] == []


def test_every_file_of_a_folder_that_the_page_names_exists() -> None:
    missing = {name for name in _FILES.findall(TEXT) if "/" in name and not (PACKAGE / name).is_file()}
    assert missing == set()
