"""kill -9 at every failpoint of the append path, of scaling and of truncation: what was acked is there, everything once and in order."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from headwater.runtime import failpoints
from tests.crash.history import Acked, check, create_streams
from tests.crash.processes import Crew, Place
from tests.crash.workers import write_plan
from tests.s3server import BUCKET, S3Server, running_s3

pytestmark = pytest.mark.slow

#: Up to which pass each is surely reached by any seed's plan.
PASSES = {
    "append.encoded": 12,
    "append.stored": 6,
    "append.begun": 12,
    "append.applied": 12,
    "append.committed": 12,
    "append.acked": 12,
    "journal.created": 1,
    "journal.written": 6,
    "scale.applied": 4,
    "scale.committed": 4,
    "truncate.committed": 4,
    "truncate.sliced": 4,
}


@pytest.fixture(scope="module")
def s3_server() -> Iterator[S3Server]:
    with running_s3() as server:
        yield server


def test_every_failpoint_of_the_append_path_is_tried() -> None:
    assert {name for name in failpoints.NAMES if name.split(".")[0] in ("append", "journal", "object", "scale", "truncate")} == {
        *PASSES,
        "object.put",
    }


@pytest.mark.parametrize("name", PASSES)
def test_nothing_acked_is_lost_when_a_process_is_killed_at(name: str, seed: int, place: Place, crew: Crew) -> None:
    _kill_and_go_on(crew, place, name, random.Random(f"{name}{seed}").randint(1, PASSES[name]), seed)


@pytest.mark.parametrize("name", ["object.put", "append.stored"])
def test_nothing_acked_is_lost_on_an_object_store_when_a_process_is_killed_at(
    name: str, seed: int, postgres_url: str, tmp_path: Path, s3_server: S3Server, crew: Crew
) -> None:
    place = Place(f"s3://{BUCKET}/{tmp_path.name}", postgres_url, s3_server.options)
    place.open(create=True).close()
    _kill_and_go_on(crew, place, name, random.Random(f"{name}{seed}").randint(1, 6), seed)


def _kill_and_go_on(crew: Crew, place: Place, name: str, at: int, seed: int) -> None:
    acked: list[Acked] = []
    killed = crew.start(write_plan, place, f"{name}=kill@{at}", seed, 1)
    for message in killed.hear_all():
        assert message != "done", f"pass {at} of {name} was never reached"
        acked += message
    assert killed.wait() == -9
    with place.open() as store:
        create_streams(store)
        check(store, seed, [1], acked)

    second = crew.start(write_plan, place, "", seed, 2)
    messages = list(second.hear_all())
    assert second.wait() == 0 and messages.pop() == "done"
    for message in messages:
        acked += message
    with place.open() as store:
        check(store, seed, [1, 2], acked, complete=True)
