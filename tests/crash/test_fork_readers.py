"""A process that forks while it reads in a group: its readers and heartbeats stay its own."""

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


@pytest.mark.slow
def test_a_child_s_store_renews_its_own_leases_and_leaves_the_parent_s_readers_alone(tmp_path: Path, catalog_url: str | None) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "store"), catalog_url or ""],
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
