"""A store whose operations go through bytes works as any other; `make test-long` runs the whole contract suite that way."""

from __future__ import annotations

import pytest

import headwater as hw
from headwater.check import check_store
from tests.contract.writing import values
from tests.crash.processes import Place
from tests.loopback import Loopback


@pytest.fixture
def loopback(store: hw.Store, monkeypatch: pytest.MonkeyPatch) -> Loopback:
    loopback = Loopback(store._engine.runner)
    monkeypatch.setattr(store._engine, "runner", loopback)
    return loopback


def test_a_store_is_used_through_a_loopback(place: Place, store: hw.Store, loopback: Loopback) -> None:
    stream = store.create_stream("a/x", scaling=hw.Scaling.fixed(2))
    table = store.table("a/table")
    with stream.writer("source") as writer:
        acks = [writer.write(b"%d" % number, key=number) for number in range(20)]
        assert all(ack.result(60) is not None for ack in acks)
    with store.transaction(marker=hw.Marker("me", 1)) as tx:
        tx.write("a/x", b"20", key="k")
        tx.put("a/table", "k", b"v", version=hw.ABSENT)
        tx.flush()
        stream.split(0)
        tx.write("a/x", b"21", key="k")
    with pytest.raises(hw.ConditionFailedError, match="has version 1, not none"):
        table.put("k", b"w", version=hw.ABSENT)
    with store.reader_group("group", ["a/x"]).reader("r") as reader:
        assert sorted(int(event.value) for _ in range(22) if (event := reader.read(timeout=10)) is not None) == list(range(22))
    store.run_upkeep()
    assert sorted(values(stream)) == sorted(b"%d" % number for number in range(22))
    assert check_store(store).ok
    assert loopback.calls > 50 and loopback.bytes > 5000
