"""kill -9 at every failpoint of tiering, compaction, truncation, deletion and garbage: nothing is lost or doubled, nothing is left."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import headwater as hw
from headwater.check import check_store
from headwater.runtime import failpoints
from tests.crash.processes import Crew, Place
from tests.crash.upkeep_workers import BYTES, EVENTS, SHORT, TYPED, create_streams, tend
from tests.operations import fence_all
from tests.s3server import BUCKET, S3Server, running_s3

pytestmark = pytest.mark.slow

#: Up to which pass each is surely reached by any seed's plan.
PASSES = {
    "tier.read": 6,
    "garbage.found": 2,
    "tier.written": 6,
    "garbage.deleted": 2,
    "tier.applied": 6,
    "garbage.forgotten": 2,
    "tier.swapped": 6,
    "truncate.committed": 2,
    "tier.sliced": 5,
    "truncate.sliced": 2,
    "object.put": 6,
}


@pytest.fixture(scope="module")
def s3_server() -> Iterator[S3Server]:
    with running_s3() as server:
        yield server


def test_every_failpoint_of_upkeep_is_tried() -> None:
    assert {name for name in failpoints.NAMES if name.split(".")[0] in ("tier", "garbage", "truncate")} <= set(PASSES)


def test_nothing_is_lost_and_nothing_left_when_processes_are_killed_one_after_the_other(seed: int, place: Place, crew: Crew) -> None:
    # Each seed takes half of them, the other half on PostgreSQL, in an order and at passes of its own.
    names = list(PASSES)[(seed + (place.catalog is not None)) % 2 :: 2]
    rng = random.Random(seed)
    rng.shuffle(names)
    _kill_one_after_the_other(crew, place, [(name, rng.randint(1, PASSES[name])) for name in names], seed)


def test_nothing_is_lost_and_nothing_left_on_an_object_store(postgres_url: str, tmp_path: Path, s3_server: S3Server, crew: Crew) -> None:
    place = Place(f"s3://{BUCKET}/{tmp_path.name}", postgres_url, s3_server.options)
    place.open(create=True).close()
    _kill_one_after_the_other(crew, place, [("tier.written", 3), ("garbage.deleted", 1)], 1)


def _kill_one_after_the_other(crew: Crew, place: Place, kills: list[tuple[str, int]], seed: int) -> None:
    acked: list[tuple[str, str]] = []
    for run, (name, at) in enumerate(kills):
        killed = crew.start(tend, place, f"{name}=kill@{at}", seed, run)
        acked += killed.hear_all()
        assert killed.wait() == -9, f"pass {at} of {name} was never reached"
        with place.open() as store:
            create_streams(store)
            check(store, acked, f"killed at pass {at} of {name}")
    with place.open() as store:
        clean_up(store)
        check(store, acked, "all cleaned up")
        with store.stream(EVENTS).writer() as writer:
            writer.write(b"at last|").result()
        check(store, [*acked, (EVENTS, "at last")], "written to again")


def check(store: hw.Store, acked: list[tuple[str, str]], when: str) -> None:
    """What was acked is there, everything once, and the numbers have no gap."""
    for name in (EVENTS, TYPED, SHORT):
        found, numbers = [], dict[int, list[int]]()
        for event in store.stream(name).read():
            found.append(event.value["id"] if name == TYPED else event.value.partition(b"|")[0].decode())
            numbers.setdefault(event.position.segment, []).append(event.position.number)
        assert max(Counter(found).values(), default=1) == 1, f"twice in {name}, {when}"
        assert "never" not in found
        for seen in numbers.values():
            assert seen == list(range(seen[0], seen[0] + len(seen))), (name, when)
        lost = {id for stream, id in acked if stream == name} - set(found)
        assert not lost or name == SHORT, f"lost of {name}, {when}: {sorted(lost)[:5]}"
    text = store.stream(BYTES).byte_reader().readall()
    tags = [text[at : at + 20].partition(b";")[0].decode() for at in range(0, len(text), 20)]
    assert max(Counter(tags).values(), default=1) == 1 and {id for stream, id in acked if stream == BYTES} <= set(tags)
    report = check_store(store)
    assert report.ok, (when, report.problems[:3])


def clean_up(store: hw.Store) -> None:
    """Two rounds of upkeep, when the dead are known to be dead: nothing is left that nothing needs."""
    fence_all(store._engine.database)
    store._engine.database.write(lambda tx: tx.run("UPDATE txn SET expires_at = 0 WHERE state IN ('open', 'committing')"))
    for _ in range(2):
        assert store.run_upkeep().problems == ()
    report = check_store(store)
    assert report.unused_count == 0 and report.leftover_rows == 0, report.unused
    query = store._engine.database.query
    assert query("SELECT count(*) FROM extent WHERE form = 0") == [(0,)], "all is tiered"
    assert query("SELECT count(*) FROM object WHERE id NOT IN (SELECT object FROM extent)") == [(0,)]
    for table in ("inline_block", "dead_log", "base", "lease", "pin", "tag", "txn_extent", "txn_term"):
        assert query(f"SELECT count(*) FROM {table}") == [(0,)], table
    assert query("SELECT count(*) FROM tier WHERE log NOT IN (SELECT log FROM segment)") == [(0,)]
