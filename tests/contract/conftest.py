"""A store on each catalog, checked as a whole when its test is over, and processes that work on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import headwater as hw
from headwater.check import check_store
from tests.crash.processes import Crew, Place


@pytest.fixture
def place(tmp_path: Path, catalog_url: str | None) -> Place:
    return Place(str(tmp_path / "store"), catalog_url)


@pytest.fixture
def store(place: Place) -> Iterator[hw.Store]:
    with place.open(create=True) as store:
        yield store
        report = check_store(store)
        assert report.ok, report.problems


@pytest.fixture
def local_store(tmp_path: Path) -> Iterator[hw.Store]:
    """For what does not depend on the catalog."""
    with hw.open(tmp_path / "store") as store:
        yield store


@pytest.fixture
def wide(store: hw.Store) -> hw.Stream:
    return store.create_stream("a/wide", scaling=hw.Scaling.fixed(4))


@pytest.fixture
def crew() -> Iterator[Crew]:
    crew = Crew()
    yield crew
    crew.close()
