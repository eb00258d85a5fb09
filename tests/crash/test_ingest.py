"""Files are ingested exactly once: by processes killed anywhere, by two at once, and by one that was stopped and believes itself alone."""

from __future__ import annotations

import contextlib
import json
import os
import random
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from headwater.check import check_store
from headwater.ingest import ingest
from headwater.ingest.holder import Holder
from tests.crash.ingest_workers import ingest_folder
from tests.crash.processes import Crew, Place, Worker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STREAM = "in/events"
SCHEMA = pa.schema([("file", pa.int64()), ("n", pa.int64()), ("key", pa.string()), ("pad", pa.string())])
#: Passed by an ingester, in this order: taking the record, beginning transactions, staging, committing, compacting, ending.
FAILPOINTS = (
    "append.encoded",
    "append.begun",
    "append.applied",
    "append.committed",
    "append.acked",
    "txn.begun",
    "txn.stored",
    "txn.inserted",
    "txn.staged",
    "txn.applied",
    "txn.committed",
    "txn.aborted",
)


def write_files(folder: Path, files: int, events: int, *, bad: bool = False) -> None:
    folder.mkdir()
    rng = random.Random(files * events)
    for file in range(files):
        rows = [json.dumps({"file": file, "n": n, "key": f"k{rng.randrange(20)}", "pad": "x" * rng.randrange(200)}) for n in range(events)]
        if bad:
            rows.insert(events // 2, f"no row {file}")
        (folder / f"{file:03d}.jsonl").write_text("\n".join(rows) + "\n")


def check(place: Place, files: int, events: int) -> None:
    """Each event is there once, each key's in order, and the store is sound."""
    with place.open() as store:
        rows = [event.value for event in store.stream(STREAM).read()]
        assert len(rows) == files * events
        assert max(Counter((row["file"], row["n"]) for row in rows).values()) == 1
        last: dict[tuple[int, str], int] = {}
        for row in rows:
            assert row["n"] > last.get((row["file"], row["key"]), -1), "order holds for each key"
            last[row["file"], row["key"]] = row["n"]
        report = check_store(store)
        assert report.ok, report.problems


def run_until_done(crew: Crew, place: Place, folder: Path, options: dict[str, Any]) -> None:
    worker = crew.start(ingest_folder, place, "", str(folder), STREAM, options)
    assert worker.hear() == "begun"
    how, *rest = worker.hear()
    assert how == "done", rest


def test_killed_at_each_step_it_goes_on_where_it_was(place: Place, crew: Crew, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    files, events = 30, 20
    write_files(folder, files, events, bad=True)
    # Parts of files, and many stages before each commit.
    options = {"key": "key", "events_per_transaction": 15, "bad_rows": "in/dead", "segments": 2, "schema": SCHEMA, "stage_bytes": 500}
    # The first append takes the record, the second gives it back.
    steps = [f"{at}=kill@{1 if at.startswith('append') else 2}" for at in FAILPOINTS]
    for at in (*steps, "append.applied=kill@2", "append.committed=kill@2"):
        worker = crew.start(ingest_folder, place, at, str(folder), STREAM, options)
        assert list(worker.hear_all()) in ([], ["begun"]) and worker.wait() == -9, f"it was to be killed at {at}"
    run_until_done(crew, place, folder, options)
    check(place, files, events)
    with place.open() as store:
        assert len(list(store.stream("in/dead").read())) == files, "bad rows are put aside once, too"


def test_killed_at_random_it_ingests_exactly_once(seed: int, place: Place, crew: Crew, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    rng = random.Random(seed)
    files, events = (50, 1000) if pytestconfig.getoption("--long") else (20, 100)
    folder = tmp_path / "files"
    write_files(folder, files, events)
    each = rng.choice([None, events // 3, events * 3])
    options = {"key": "key", "segments": 3, "events_per_transaction": each, "stage_bytes": 5000, "seconds": 0.01}
    kills = 0
    for _ in range(8):
        spec = f"{rng.choice(FAILPOINTS)}=kill@{rng.randint(1, 4)}" if rng.random() < 0.5 else ""
        worker = crew.start(ingest_folder, place, spec, str(folder), STREAM, options)
        with contextlib.suppress(EOFError):
            worker.hear()
        if not spec:
            threading.Event().wait(rng.uniform(0, 0.1))
            with contextlib.suppress(ProcessLookupError):
                worker.kill()
        heard = list(worker.hear_all())
        kills += worker.wait() == -9
        if heard[-1:] and heard[-1][0] == "done":
            break
    print(f"{kills} ingesters were killed")
    run_until_done(crew, place, folder, options)
    check(place, files, events)


def test_two_at_once_that_both_take_over_store_each_event_once(seed: int, place: Place, crew: Crew, tmp_path: Path) -> None:
    rng = random.Random(seed)
    folder = tmp_path / "files"
    write_files(folder, 20, 50)
    options = {"key": "key", "take_over": True, "events_per_transaction": 70, "seconds": 0.02}
    running: list[Worker] = []
    ends: Counter[str] = Counter()
    for _ in range(8):
        running.append(crew.start(ingest_folder, place, "", str(folder), STREAM, options))
        threading.Event().wait(rng.uniform(0, 0.1))
    for worker in running:
        heard = list(worker.hear_all())
        ends[heard[-1][0]] += 1
    print(dict(ends))
    assert set(ends) <= {"done", "FencedError"}, ends
    run_until_done(crew, place, folder, {**options, "take_over": False})
    check(place, 20, 50)


def test_a_standby_takes_over_from_one_that_is_killed(place: Place, crew: Crew, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    write_files(folder, 6, 50)
    first = crew.start(ingest_folder, place, "txn.begun=stop@3", str(folder), STREAM, {"lease": 30.0})
    first.wait_until_stopped()
    second = crew.start(ingest_folder, place, "", str(folder), STREAM, {"standby": True, "lease": 30.0})
    assert second.hear() == "begun"
    first.kill()
    # At once: its process is gone, so there is no need to wait for its lease.
    assert second.hear(20)[0] == "done"
    check(place, 6, 50)


@pytest.mark.parametrize("at", ["txn.begun", "txn.staged", "txn.committed"])
def test_a_stopped_one_is_taken_over_and_stops_itself_when_it_continues(at: str, place: Place, crew: Crew, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    write_files(folder, 6, 50)
    options = {"lease": 1.0, "key": "key", "stage_bytes": 500}
    zombie = crew.start(ingest_folder, place, f"{at}=stop@2", str(folder), STREAM, options)
    zombie.wait_until_stopped()
    assert zombie.hear() == "begun"
    second = crew.start(ingest_folder, place, "", str(folder), STREAM, {**options, "standby": True})
    assert second.hear() == "begun"
    assert second.hear()[0] == "done"
    zombie.go_on()
    how, said = zombie.hear()
    assert how == "FencedError" and "this one stops" in said
    check(place, 6, 50)


def test_one_that_died_elsewhere_gives_way_when_its_lease_runs_out(
    place: Place, crew: Crew, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "files"
    write_files(folder, 6, 50)
    first = crew.start(ingest_folder, place, "txn.begun=kill@3", str(folder), STREAM, {"lease": 4.0})
    assert first.wait() == -9
    monkeypatch.setattr("headwater.ingest.holder._host", lambda: "elsewhere")
    said: list[str] = []
    with place.open() as store:
        ingest(store, folder, STREAM, notice=said.append, lease=4.0)
    assert "waiting up to 4 s for a sign of life" in said[0] and str(first.pid) in said[0]
    check(place, 6, 50)


def test_a_pid_that_was_given_to_another_process_is_not_taken_for_the_first() -> None:
    here = Holder.here()
    assert here.is_known_alive and not here.is_known_dead
    assert here._replace(started="long ago").is_known_dead
    assert not here._replace(host="elsewhere").is_known_dead and not here._replace(host="elsewhere").is_known_alive
    child = os.fork()
    if child == 0:
        os._exit(0)
    # A child that ended and was not waited for is dead, too.
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert here._replace(pid=child).is_known_dead
    os.waitpid(child, 0)
