"""The power fails at any moment, and with it goes whatever was not synced: what was acked is there, everything once and in order.

The process is real; the disk after it is laid out from a record of what it did, see `disk`. That of PostgreSQL is its own affair.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

import headwater as hw
import headwater.catalog.sqlite
from headwater.check import check_store
from headwater.model.limits import KIB
from headwater.storage.journal import FileJournal
from tests.crash import history, upkeep_workers
from tests.crash.disk import Op, PowerCut, Recorder, Said
from tests.crash.processes import Crew, Place
from tests.crash.test_upkeep_kill import check as check_tended
from tests.crash.test_upkeep_kill import clean_up
from tests.crash.workers import write_plan

pytestmark = pytest.mark.slow

CUTS = 30


def work(channel: Connection, root: str, kind: str, seed: int, deaf: str) -> None:
    """Make a store and use it, then tell all that was done to the disk."""
    # Small ones, so that many are made, filled, checkpointed and removed.
    vars(headwater.catalog.sqlite)["WAL_BYTES"] = 128 * KIB
    assert FileJournal.__init__.__kwdefaults__ is not None
    FileJournal.__init__.__kwdefaults__["file_bytes"] = 512 * KIB
    recorder = Recorder(root, _DEAF[deaf])
    place = Place(os.path.join(root, "data", "store"))
    place.open(create=True).close()
    recorder.send("made")
    _WORK[kind](recorder, place, "", seed, 1)
    channel.send(recorder.ops)


_WORK: dict[str, Callable[..., None]] = {"writing": write_plan, "upkeep": upkeep_workers.tend}
_DEAF: dict[str, Callable[[str], bool]] = {
    "nothing": lambda path: False,
    "the catalog": lambda path: "catalog.sqlite" in path,
    "the journal": lambda path: path.endswith(".hwj"),
    "objects": lambda path: "/tmp/" in path and not path.endswith("/"),
    "names": lambda path: path.endswith("/"),
}


@pytest.mark.parametrize("kind", _WORK)
def test_nothing_acked_is_lost_when_the_power_fails(kind: str, seed: int, tmp_path: Path, crew: Crew) -> None:
    ops = _record(tmp_path, crew, kind, seed)
    for at, luck in _cuts(ops, seed):
        _check_after(tmp_path, ops, at, luck, kind, seed)


@pytest.mark.parametrize(
    ("kind", "deaf"), [("writing", "the catalog"), ("writing", "the journal"), ("writing", "names"), ("upkeep", "objects")]
)
def test_without_these_syncs_something_is_lost(kind: str, deaf: str, tmp_path: Path, crew: Crew) -> None:
    ops = _record(tmp_path, crew, kind, 1, deaf)
    lost = 0
    for at, luck in _cuts(ops, 1):
        try:
            _check_after(tmp_path, ops, at, luck, kind, 1)
        except (AssertionError, hw.HeadwaterError):
            lost += 1
    assert lost, "this test would not notice"


def _record(tmp_path: Path, crew: Crew, kind: str, seed: int, deaf: str = "nothing") -> list[Op]:
    root = tmp_path / "recorded"
    root.mkdir()
    worker = crew.start(work, str(root), kind, seed, deaf)
    ops: list[Op] = worker.hear()
    assert worker.wait() == 0
    return ops


def _cuts(ops: list[Op], seed: int) -> list[tuple[int, int]]:
    """Moments to cut at, each with the seed of what survives; every other one right behind an ack, and some while the store is made."""
    rng = random.Random(seed)
    acks = [index + 1 for index, op in enumerate(ops) if isinstance(op, Said)]
    moments = [rng.choice(acks) if turn % 2 else rng.randrange(len(ops)) for turn in range(CUTS)]
    return [(at, rng.getrandbits(32)) for at in [*moments, *(rng.randrange(acks[0] + 1) for _ in range(CUTS // 3))]]


def _check_after(tmp_path: Path, ops: list[Op], at: int, luck: int, kind: str, seed: int) -> None:
    folder = tmp_path / "found"
    folder.mkdir()
    cut = PowerCut(ops, at)
    cut.lay_out(str(tmp_path / "recorded"), folder, random.Random(luck))
    try:
        was_made = bool(cut.said)
        with Place(str(folder / "data" / "store")).open(create=not was_made) as store:
            _check(store, cut, kind, seed, luck)
    except BaseException as error:
        error.add_note(f"power cut behind op {at} of {len(ops)}, luck {luck}")
        raise
    finally:
        shutil.rmtree(folder)


def _check(store: hw.Store, cut: PowerCut, kind: str, seed: int, luck: int) -> None:
    said = [message for message in cut.said if message not in ("made", "done")]
    if kind == "writing":
        history.create_streams(store)
        history.check(store, seed, [1], [acked for message in said for acked in message], complete="done" in cut.said)
        report = check_store(store)
        assert report.ok, report.problems[:3]
        again = history.THREE
    else:
        upkeep_workers.create_streams(store)
        check_tended(store, said, "power was cut")
        if luck % 4 == 0:
            # Files that came back, since their removal was not synced, go again; and a fork that it had no time to delete.
            for name in store.streams("up"):
                if name.startswith("up/fork-"):
                    store.delete_stream(name, seal=True)
            clean_up(store)
            check_tended(store, said, "power was cut, and all cleaned up")
        again = upkeep_workers.EVENTS
    with store.stream(again).writer() as writer:
        position = writer.write(b"z.again|", key="again").result()
    assert [event.value for event in store.stream(again).read() if event.position == position] == [b"z.again|"]
