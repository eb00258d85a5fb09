"""What a store counts of its requests to the catalog."""

from __future__ import annotations

import os

import pytest

import headwater as hw

_NONE = hw.OperationMetrics(0, 0, 0.0)


def counted(store: hw.Store, name: str) -> tuple[int, int]:
    """(calls, failures) of an operation."""
    found = store.metrics().operations.get(name, _NONE)
    assert (found.seconds > 0) == (found.calls > 0)
    return found.calls, found.failures


def test_a_store_counts_its_writes_and_reads_by_operation(store: hw.Store) -> None:
    assert counted(store, "streams.create_stream") == (0, 0)
    store.create_stream("a/x")
    store.create_stream("a/y")
    assert counted(store, "streams.create_stream") == (2, 0)
    assert store.streams() == ["a/x", "a/y"]
    assert counted(store, "streams.list_streams") == (1, 0)


def test_acks_and_reads_are_counted_by_the_operations_that_they_take(store: hw.Store) -> None:
    stream = store.create_stream("a/x")
    with stream.writer() as writer:
        for number in range(3):
            writer.write(b"%d" % number).result()
    assert counted(store, "sessions.begin_session") == (1, 0)
    assert counted(store, "flushes.commit_flush") == (3, 0)
    assert [event.value for event in stream.read()] == [b"0", b"1", b"2"]
    assert counted(store, "extents.plan_segment") == (1, 0)


def test_a_call_that_raises_counts_as_a_failure(store: hw.Store) -> None:
    store.create_scope("a")
    store.delete_scope("a")
    with pytest.raises(hw.NotFoundError):
        store.delete_scope("a")
    assert counted(store, "streams.delete_scope") == (2, 1)


def test_metrics_are_a_snapshot(store: hw.Store) -> None:
    before = store.metrics()
    store.create_stream("a/x")
    assert "streams.create_stream" not in before.operations


def test_the_metrics_of_a_forked_child_begin_at_zero(store: hw.Store) -> None:
    store.create_stream("a/x")
    child = os.fork()
    if not child:
        status = 1
        try:
            if store.metrics() == hw.Metrics({}) and store.streams() and counted(store, "streams.list_streams") == (1, 0):
                status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert counted(store, "streams.create_stream") == (1, 0)
    assert counted(store, "streams.list_streams") == (0, 0)
