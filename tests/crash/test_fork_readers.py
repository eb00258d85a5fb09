"""A process that forks while it reads, or is in a transaction: what it has stays its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, sys, time
import headwater as hw

with hw.open(sys.argv[1], catalog=sys.argv[2] or None) as store:
    with store.create_stream("fork/events").writer() as writer:
        for number in range(5):
            writer.write(str(number))
    group = store.reader_group("group", ["fork/events"])
    reader = group.reader("parent", commit="auto")
    assert reader.read(timeout=30).value == b"0"
    child = os.fork()
    if not child:
        transaction = store.transaction(lease=1.5)
        identity = transaction.id
        deadline = time.monotonic() + 4
        while time.monotonic() < deadline:  # two and a half leases
            time.sleep(0.1)
            if store.transaction_status(identity) is not hw.TransactionStatus.OPEN:
                os._exit(3)
        transaction.commit()
        store.close()
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == 0, f"the child ended with {code}: its lease was not renewed"
    assert group.readers() == ["parent"]
    assert list(group.positions().streams["fork/events"].segments.values()) == [0], "the child committed for its parent"
    assert reader.read(timeout=30).value == b"1"
    reader.close()
"""


IN_BLOCKS = """
import os, sys
from datetime import timedelta
import headwater as hw

def fork_a_child_that_leaves():
    child = os.fork()
    if not child:
        sys.exit(0)  # Through the ends of all blocks it was forked in.
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

with hw.open(sys.argv[1], catalog=sys.argv[2] or None, upkeep=False) as store:
    stream = store.create_stream("fork/events", retention=hw.Retention.by_time(timedelta(days=1)))
    with stream.writer() as writer:
        for number in range(5):
            writer.write(str(number))
    with store.transaction() as tx:
        tx.write("fork/events", "5")
        tx.flush()
        fork_a_child_that_leaves()
        tx.write("fork/events", "6")
    with store.reader_group("group", ["fork/events"]).reader("parent", commit="manual") as reader:
        assert reader.read(timeout=30).value == b"0"
        fork_a_child_that_leaves()
        assert reader.read(timeout=30).value == b"1"
        reader.commit()
    with store.pause_upkeep():
        fork_a_child_that_leaves()
    holds = lambda: store._engine.database.query("SELECT count(*) FROM pin")
    for event in stream.read():
        if event.value == b"0":
            assert holds() == [(1,)]
            fork_a_child_that_leaves()
            assert holds() == [(1,)], "the child let go of what its parent reads"
    assert event.value == b"6" and holds() == [(0,)]
"""


def run(script: str, tmp_path: Path, catalog_url: str | None) -> None:
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "store"), catalog_url or ""],
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_child_s_store_renews_its_own_leases_and_leaves_the_parent_s_readers_alone(tmp_path: Path, catalog_url: str | None) -> None:
    run(SCRIPT, tmp_path, catalog_url)


@pytest.mark.slow
def test_a_child_that_leaves_the_blocks_it_was_forked_in_ends_nothing_of_its_parent_s(tmp_path: Path, catalog_url: str | None) -> None:
    run(IN_BLOCKS, tmp_path, catalog_url)
