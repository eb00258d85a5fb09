"""What reading a journal costs: small row groups, no import of pandas, memory that does not grow with an entity."""

from __future__ import annotations

import subprocess
import sys

import pyarrow.parquet as pq
import pytest

import headwater as hw
from headwater.segments.chunk import JOURNAL_GROUP_BYTES

NAME = "shop/orders"
_COLD = """
import sys, headwater as hw
with hw.open(sys.argv[1], upkeep=False) as store:
    j = store.journal("shop/orders")
    assert [event.data["n"] for event in j.replay("e7")] == list(range(7, 2000, 100))
    assert len(list(j.events(tag="rare"))) == 2 and len(list(j.events(type="y"))) == 20
    assert len(list(j.ids())) == 100 and j.persist("e7", hw.Record("x", {})).last == 21
    assert len(list(j.events(id="e7", start=store.cut("shop/orders")))) == 0
assert "pandas" not in sys.modules
"""
_REPLAY = """
import resource, sys, headwater as hw
with hw.open(sys.argv[1], upkeep=False) as store:
    j = store.journal("shop/orders")
    assert len(list(j.replay("small"))) == 100
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert sum(len(event.data) for event in j.replay("large")) == 100_000_000
    assert sum(1 for _ in j.replay("large", reverse=True)) == 100_000
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def fill(j: hw.Journal) -> None:
    acks = []
    for number in range(2000):
        tags = ("rare",) if number in (77, 1500) else ()
        event = hw.Record("y" if number % 100 == 3 else "x", {"n": number, "text": f"{number:0500}"}, tags=tags)
        acks.append(j.persist_async(f"e{number % 100}", event))
    for ack in acks:
        ack.result()


def test_the_first_read_of_a_process_does_not_import_pandas(local_store: hw.Store) -> None:
    """It takes a hundred times as long as the read."""
    fill(local_store.journal(NAME, scaling=hw.Scaling.fixed(2)))
    subprocess.run([sys.executable, "-c", _COLD, local_store.url], check=True)


def test_the_first_read_of_parquet_does_not_import_pandas(local_store: hw.Store) -> None:
    fill(local_store.journal(NAME, scaling=hw.Scaling.fixed(2)))
    local_store.run_upkeep()
    subprocess.run([sys.executable, "-c", _COLD, local_store.url], check=True)


@pytest.mark.slow
def test_a_replay_takes_no_more_memory_the_more_events_an_entity_has(local_store: hw.Store) -> None:
    """From blocks and from Parquet: 100 MB are read within 64 MB."""
    j = local_store.journal(NAME)
    j.persist("small", [hw.Record("x", "." * 1000) for _ in range(100)])
    acks = [j.persist_async("large", [hw.Record("x", "." * 1000) for _ in range(1000)]) for _ in range(100)]
    assert acks[-1].result().last == 100_000
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", _REPLAY, local_store.url], check=True, capture_output=True, text=True)
        assert int(done.stdout) < 64 * 1024
        local_store.run_upkeep()


def test_row_groups_of_a_journal_are_small_after_a_compaction_too(local_store: hw.Store) -> None:
    j = local_store.journal(NAME)
    for _ in range(3):
        fill(j)
        local_store.run_upkeep()
    stream = local_store.stream(NAME)
    stream.seal()
    local_store.run_upkeep()
    [chunk] = stream.chunks()
    metadata = pq.ParquetFile(chunk.url.removeprefix("file://")).metadata
    sizes = [metadata.row_group(place).total_byte_size for place in range(metadata.num_row_groups)]
    assert metadata.num_rows == 6000 and len(sizes) > 10
    assert max(sizes) < 2 * JOURNAL_GROUP_BYTES
    assert [event.data["n"] for event in j.replay("e7", after=40)] == list(range(7, 2000, 100))
