"""Options and fixtures for every test: how long to run, which seeds, and a real PostgreSQL."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.postgres import PostgresServer, running_postgres

# No deadline: a busy machine is not a bug. The blob repeats a failure found elsewhere.
hypothesis.settings.register_profile("short", deadline=None, print_blob=True, max_examples=50)
hypothesis.settings.register_profile("long", deadline=None, print_blob=True, max_examples=1000)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also run tests marked long, and more seeds and examples of the others")


# Java that starts fast, for whatever starts Spark: these tests are over before its better compiler pays.
os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")


def pytest_configure(config: pytest.Config) -> None:
    # In the background of a shell Ctrl-C is ignored, by every process that is started from there too; some tests send one.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    hypothesis.settings.load_profile("long" if config.getoption("--long") else "short")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    # A test that takes `seed` runs once for each, and its name says which one failed.
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", _choose_seeds(metafunc.config), ids=lambda seed: f"seed{seed}")


class _OneForSpark(LoadScopeScheduling):  # type: ignore[misc]
    """Gives each process of `pytest -n` the next test, and one of them all that need Spark: its session takes time to start."""

    def _split_scope(self, nodeid: str) -> str:
        return "spark" if _needs_spark(nodeid) else nodeid


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _OneForSpark:
    return _OneForSpark(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--long"):
        long = [item for item in items if _takes_long(item)]
        items[:] = [item for item in items if not _takes_long(item)]
        config.hook.pytest_deselected(items=long)
    # Quick ones first: a mistake shows early. But where several processes share the work, one begins with Spark's, and has its session.
    is_shared = hasattr(config, "workerinput")
    items.sort(key=lambda item: (is_shared and not _needs_spark(item.nodeid), *_rank(item)))


def _takes_long(item: pytest.Item) -> bool:
    """Marked so, or a further seed on PostgreSQL, where each step takes longer and the same client runs on the same contract."""
    parameters: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    return bool(item.get_closest_marker("long")) or ("postgresql" in item.nodeid and parameters.get("seed", 1) > 1)


def _needs_spark(nodeid: str) -> bool:
    return "spark" in nodeid


def _rank(item: pytest.Item) -> tuple[bool, bool, bool]:
    return (bool(item.get_closest_marker("long")), bool(item.get_closest_marker("slow")), "unit" not in item.path.parts)


def _choose_seeds(config: pytest.Config) -> tuple[int, ...]:
    count = os.environ.get("HEADWATER_SEEDS") or (10 if config.getoption("--long") else 2)
    return tuple(range(1, int(count) + 1))


@pytest.fixture(scope="session")
def seeds(request: pytest.FixtureRequest) -> tuple[int, ...]:
    """The seeds to try: 2, or 10 with --long, or as many as HEADWATER_SEEDS says. Or take `seed`, for a test of each."""
    return _choose_seeds(request.config)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """One PostgreSQL for the whole run, started by the first test that asks for it."""
    with running_postgres() as server:
        yield server


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> Iterator[str]:
    """The address of an empty database that only this test knows."""
    with postgres_server.database() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def catalog_url(request: pytest.FixtureRequest) -> str | None:
    """What to give `hw.open` as `catalog`: None for SQLite, the address of an empty database for PostgreSQL."""
    return None if request.param == "sqlite" else str(request.getfixturevalue("postgres_url"))
