"""A store that other processes can open too, and the processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.processes import Crew, Place


@pytest.fixture
def crew() -> Iterator[Crew]:
    crew = Crew()
    yield crew
    crew.close()


@pytest.fixture
def sqlite_place(tmp_path: Path) -> Place:
    """A store with its catalog in SQLite, made and closed again."""
    place = Place(str(tmp_path / "store"))
    place.open(create=True).close()
    return place


@pytest.fixture
def place(tmp_path: Path, catalog_url: str | None) -> Place:
    """A store on each catalog, made and closed again."""
    place = Place(str(tmp_path / "store"), catalog_url)
    place.open(create=True).close()
    return place
