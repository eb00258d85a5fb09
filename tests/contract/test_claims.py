"""Claims: streams that only commits which require an entry may append to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import headwater as hw
from headwater.check import stream_contents
from tests.contract.writing import values

LEASE = "a/lease"


@pytest.fixture
def lease(store: hw.Store) -> hw.Table:
    return store.table(LEASE)


def commit(store: hw.Store, value: bytes, version: int, *, staged: bool = False, name: str = "a/x") -> None:
    tx = store.transaction()
    tx.write(name, value, key=value)
    tx.require(LEASE, "owner", version)
    if staged:
        tx.flush()
    tx.commit()


@pytest.mark.parametrize("staged", [False, True])
def test_only_commits_that_require_the_entry_append(store: hw.Store, lease: hw.Table, staged: bool) -> None:
    stream = store.create_stream("a/x", scaling=hw.Scaling.fixed(2))
    version = lease.put("owner", b"one")
    stream.claim("job", (LEASE, "owner", version))
    assert stream.claimed_by == "job" and stream_contents(stream).claimed_by == "job"
    commit(store, b"1", version, staged=staged)
    for required in (None, version + 1):
        tx = store.transaction()
        tx.write("a/x", b"stranger")
        if required is not None:
            tx.require(LEASE, "other", hw.ABSENT)
        if staged:
            tx.flush()
        with pytest.raises(hw.ConflictError, match="claimed by 'job'") as caught:
            tx.commit()
        assert caught.value.owner == "job" and not isinstance(caught.value, hw.ConditionFailedError)
    second = lease.put("owner", b"two")
    with pytest.raises(hw.ConditionFailedError):
        commit(store, b"zombie", version, staged=staged)
    with pytest.raises(hw.ConflictError):
        commit(store, b"too early", second, staged=staged)
    stream.claim("job", (LEASE, "owner", second))
    commit(store, b"2", second, staged=staged)
    assert sorted(values(stream)) == [b"1", b"2"]


def test_a_refused_writer_hears_it_at_its_flush_and_nothing_else_of_the_flush_is_touched(store: hw.Store, lease: hw.Table) -> None:
    claimed, free = store.create_stream("a/x"), store.create_stream("a/free")
    named = claimed.writer("w")
    claimed.claim("job", (LEASE, "owner", lease.put("owner", b"")))
    with claimed.writer() as writer, free.writer() as other:
        acks = [writer.write(b"%d" % number) for number in range(3)]
        more = [other.write(b"%d" % number) for number in range(3)]
        with pytest.raises(hw.ConflictError, match="a/x is claimed by 'job'") as caught:
            writer.flush()
        assert caught.value.owner == "job"
        other.flush()
        for ack in acks:
            with pytest.raises(hw.ConflictError):
                ack.result(30)
        assert [ack.result(30) is not None for ack in more] == [True] * 3
        with pytest.raises(hw.ConflictError):
            writer.write(b"finished")
    named.write(b"x", number=1)
    with pytest.raises(hw.ConflictError):
        named.flush()
    assert values(claimed) == [] and len(values(free)) == 3
    claimed.release_claim(force=True)
    with claimed.writer("w") as again:
        again.write(b"x", number=1)
    assert values(claimed) == [b"x"]


def test_a_claim_goes_along_with_splits_merges_and_rolls(store: hw.Store, lease: hw.Table) -> None:
    stream = store.create_stream("a/x")
    version = lease.put("owner", b"one")
    strange = store.transaction()
    strange.write("a/x", b"stranger", key="k")
    strange.flush()
    mine = store.transaction()
    mine.write("a/x", b"mine", key="k")
    mine.require(LEASE, "owner", version)
    mine.flush()
    stream.claim("job", (LEASE, "owner", version))
    stream.split(0)
    with pytest.raises(hw.ConflictError, match="claimed by 'job'") as caught:
        strange.commit()
    assert caught.value.owner == "job"
    mine.commit()
    assert stream.claimed_by == "job" and stream.epoch > 1, "it rolled"
    with pytest.raises(hw.ConflictError), stream.writer() as writer:
        writer.write(b"x")
    stream.merge([segment.number for segment in stream.segments()])
    with pytest.raises(hw.ConflictError), stream.writer() as writer:
        writer.write(b"x")
    assert values(stream) == [b"mine"]


def test_who_may_claim_and_who_may_release(store: hw.Store, lease: hw.Table) -> None:
    stream = store.create_stream("a/x")
    assert stream.claimed_by is None
    stream.release_claim()
    version = lease.put("owner", b"one")
    with pytest.raises(hw.ConditionFailedError, match=f"has version {version}, not {version + 1}"):
        stream.claim("job", (LEASE, "owner", version + 1))
    with pytest.raises(hw.ConditionFailedError):
        stream.claim("job", (LEASE, "owner", hw.ABSENT))
    stream.claim("job", (LEASE, "free", hw.ABSENT))
    stream.claim("job", (LEASE, "owner", version))
    with pytest.raises(hw.ConflictError, match="claimed by 'job'") as caught:
        stream.claim("other", (LEASE, "owner", version))
    assert caught.value.owner == "job"
    with pytest.raises(hw.ConflictError, match="still holds") as caught:
        stream.release_claim()
    assert caught.value.owner == "job" and stream.claimed_by == "job"
    # A zombie can't take its successor's claim back.
    second = lease.put("owner", b"two")
    stream.claim("job", (LEASE, "owner", second))
    with pytest.raises(hw.ConditionFailedError):
        stream.claim("job", (LEASE, "owner", version))
    lease.remove("owner")
    stream.release_claim()
    assert stream.claimed_by is None
    with stream.writer() as writer:
        writer.write(b"x")


@pytest.mark.parametrize("end", ["seal", "delete"])
def test_a_claim_by_a_table_that_is_gone_can_be_released(store: hw.Store, lease: hw.Table, end: str) -> None:
    stream = store.create_stream("a/x")
    stream.claim("job", (LEASE, "owner", lease.put("owner", b"")))
    store.stream(LEASE).seal()
    if end == "delete":
        store.delete_stream(LEASE)
    with pytest.raises(hw.ConflictError), stream.writer() as writer:
        writer.write(b"x")
    stream.release_claim()
    assert stream.claimed_by is None


def test_tables_journals_and_other_kinds_are_claimed_too(store: hw.Store, lease: hw.Table) -> None:
    version = lease.put("owner", b"")
    table, journal = store.table("a/t"), store.journal("a/j")
    raw, state = store.create_stream("a/raw", kind="bytes"), store.synchronizer("a/state", 0, lambda state, update: state + update)
    for name in ("a/t", "a/j", "a/raw", "a/state"):
        store.stream(name).claim("job", (LEASE, "owner", version))

    def write_bytes() -> None:
        with raw.byte_writer() as writer:
            writer.write(b"x")

    calls: list[Callable[[], Any]] = [
        lambda: table.put("k", b"v"),
        lambda: table.remove("k"),
        lambda: journal.persist("id", hw.Record("t", 1)),
        lambda: journal.persist_async("id", hw.Record("t", 1)).result(30),
        write_bytes,
        lambda: state.update(lambda state: [1]),
        lambda: store.revisioned("a/state").append(b"1"),
    ]
    for call in calls:
        with pytest.raises(hw.ConflictError) as caught:
            call()
        assert caught.value.owner == "job"
    with store.transaction() as tx:
        tx.require(LEASE, "owner", version)
        tx.put("a/t", "k", b"v")
        tx.persist("a/j", "id", hw.Record("t", 1))
        tx.update(state, [5])
    assert table.get("k") is not None and journal.head("id").sequence == 1 and state.fetch() == 5


def test_a_claim_does_not_stop_upkeep_scaling_truncation_or_sealing(store: hw.Store, lease: hw.Table) -> None:
    stream = store.create_stream("a/x")
    version = lease.put("owner", b"")
    stream.claim("job", (LEASE, "owner", version))
    for number in range(50):
        commit(store, b"%d" % number, version)
    assert store.run_upkeep().events_tiered
    stream.split(0)
    stream.truncate(stream.tail())
    fork = stream.fork("a/fork")
    with fork.writer() as writer:
        writer.write(b"a fork is nobody's")
    stream.seal()
    assert stream.claimed_by is None
    store.delete_stream("a/x")


NO_REQUIREMENTS = [
    None,
    "a/lease",
    ("a/lease", "k"),
    ("a/lease", "", 1),
    ("a/lease", "k", None),
    ("a/lease", "k", -1),
    ("lease", "k", 1),
    [1, 2, 3],
]


@pytest.mark.parametrize("require", NO_REQUIREMENTS)
def test_what_is_no_requirement(local_store: hw.Store, require: Any) -> None:
    local_store.table(LEASE)
    with pytest.raises(hw.InvalidRequestError):
        local_store.create_stream("a/x").claim("job", require)


def test_what_can_not_be_claimed(store: hw.Store, lease: hw.Table) -> None:
    stream, version = store.create_stream("a/x"), lease.put("owner", b"")
    owner: Any
    for owner in ("", None, 7, "x" * 5000, "a\0b"):
        with pytest.raises(hw.InvalidRequestError):
            stream.claim(owner, (LEASE, "owner", version))
    with pytest.raises(hw.InvalidRequestError, match="'events'"):
        stream.claim("job", ("a/x", "owner", version))
    with pytest.raises(hw.NotFoundError, match="a/none"):
        stream.claim("job", ("a/none", "owner", version))
    force: Any = "no"
    with pytest.raises(hw.InvalidRequestError):
        stream.release_claim(force)
    stream.seal()
    with pytest.raises(hw.SealedError):
        stream.claim("job", (LEASE, "owner", version))
    store.delete_stream("a/x")
    with pytest.raises(hw.NotFoundError, match="a/x was deleted"):
        stream.claim("job", (LEASE, "owner", version))
    with pytest.raises(hw.NotFoundError, match="a/x was deleted"):
        stream.release_claim()
