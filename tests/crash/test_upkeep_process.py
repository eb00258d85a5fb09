"""Upkeep in a process of its own: it ends with its parent, however that ends, and is started again when it is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import headwater as hw
from headwater.catalog import leases
from headwater.check import stream_contents
from headwater.streams import upkeepprocess
from tests.crash.processes import PATIENCE_SECONDS, wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeepprocess, "UPKEEP_DELAY_SECONDS", 0.01)
    monkeypatch.setattr(upkeepprocess, "_FIRST_SECONDS", 0.01)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[hw.Store]:
    with hw.open(tmp_path / "store", upkeep="process") as opened:
        yield opened


def child_of(store: hw.Store) -> psutil.Process:
    """The child that has the upkeep's lease."""
    wait_until(lambda: holder(store) in {str(child.pid) for child in children()})
    return psutil.Process(int(holder(store)))


def children(pid: int | None = None) -> list[psutil.Process]:
    found = psutil.Process(pid).children()
    return [child for child in found if child.status() != psutil.STATUS_ZOMBIE and "upkeepchild" in " ".join(child.cmdline())]


def holder(store: hw.Store) -> str:
    return (store._engine.run(leases.find_holder) or "").rpartition(":")[2]


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def fill(store: hw.Store, name: str) -> hw.Stream:
    """A stream of which something is tiered soon: its segment is sealed."""
    stream = store.create_stream(name)
    with stream.writer() as writer:
        for number in range(100):
            writer.write(b"%d" % number)
    stream.seal()
    return stream


def test_the_child_tiers_and_its_reports_are_the_parents_totals(store: hw.Store) -> None:
    stream = fill(store, "process/events")
    wait_until(lambda: stream_contents(stream).chunks > 0)
    wait_until(lambda: store.upkeep_totals.events_tiered == 100)
    assert [event.value for event in stream.read()] == [b"%d" % number for number in range(100)]


def test_closing_the_store_ends_the_child_and_frees_the_lease(tmp_path: Path) -> None:
    store = hw.open(tmp_path / "store", upkeep="process")
    child = child_of(store)
    store.close()
    assert is_gone(child)
    with hw.open(tmp_path / "store", upkeep=False) as again:
        assert holder(again) == "", "the child gave the lease back, so that another process has it at once"


def test_a_killed_child_is_replaced_and_its_work_goes_on(store: hw.Store) -> None:
    first = child_of(store)
    first.kill()
    wait_until(lambda: any(child.pid != first.pid for child in children()))
    stream = fill(store, "process/after")
    wait_until(lambda: stream_contents(stream).chunks > 0)
    assert child_of(store).pid != first.pid


def test_a_store_that_is_closed_at_once_has_no_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeepprocess, "UPKEEP_DELAY_SECONDS", 5.0)
    begun = time.monotonic()
    hw.open(tmp_path / "store", upkeep="process").close()
    assert children() == [] and time.monotonic() - begun < 5.0


def test_upkeep_by_hand_takes_the_lease_from_the_child_and_gives_it_back(store: hw.Store) -> None:
    child_of(store)
    stream = store.create_stream("process/by-hand")
    with stream.writer() as writer:
        writer.write(b"one").result()
    assert store.run_upkeep().events_tiered == 1
    child_of(store)


def test_a_ctrl_c_in_the_terminal_is_not_the_childs(store: hw.Store) -> None:
    child = child_of(store)
    assert os.getsid(child.pid) != os.getsid(0)
    child.send_signal(signal.SIGINT)
    stream = fill(store, "process/interrupted")
    wait_until(lambda: stream_contents(stream).chunks > 0)
    assert not is_gone(child)


PARENT = """
import os, sys, time
import headwater as hw
from headwater.catalog import leases
from headwater.streams import upkeepprocess
upkeepprocess.UPKEEP_DELAY_SECONDS = 0.01
store = hw.open(sys.argv[1], upkeep="process")
while store._engine.run(leases.find_holder) is None:
    time.sleep(0.01)
child = store._upkeep_process._child.pid
fork = os.fork() if sys.argv[2] == "fork" else 0
if fork or sys.argv[2] != "fork":
    print(child, fork, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("how", ["alone", "fork"])
def test_the_child_of_a_killed_parent_ends_even_if_a_fork_of_the_parent_lives(tmp_path: Path, how: str) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path / "store"), how], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    try:
        child, fork = map(int, parent.stdout.readline().split())
        watched = psutil.Process(child)
        parent.kill()
        wait_until(lambda: is_gone(watched))
        if fork:
            assert not is_gone(psutil.Process(fork))
            # Its duties fall back to the fork, in a thread.
            with hw.open(tmp_path / "store", upkeep=False) as store:
                wait_until(lambda: holder(store) == str(fork))
    finally:
        parent.kill()
        parent.wait(PATIENCE_SECONDS)
        parent.stdout.close()
        if locals().get("fork"):
            os.kill(fork, signal.SIGKILL)


def test_a_fork_has_no_child_of_its_own_and_does_not_end_its_parents(store: hw.Store) -> None:
    child = child_of(store)
    pid = os.fork()
    if not pid:
        try:
            code = 0 if store._upkeep_process is None and not children() else 1
            store.close()
        except BaseException:
            code = 2
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    stream = fill(store, "process/forked")
    wait_until(lambda: stream_contents(stream).chunks > 0)
    assert not is_gone(child)


def test_a_store_in_memory_has_no_upkeep_in_another_process() -> None:
    with pytest.raises(hw.InvalidRequestError, match="lives in one process"):
        hw.open("memory://upkeep-process", upkeep="process")


def test_secrets_are_not_in_the_childs_arguments(tmp_path: Path, store: hw.Store) -> None:
    assert str(tmp_path) not in " ".join(child_of(store).cmdline())
