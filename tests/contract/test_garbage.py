"""Garbage: what nothing needs and nobody may still name goes, and nothing else does. Rows of what is over go with it."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headwater as hw
from headwater.catalog import objects, sessions
from headwater.check import check_store
from headwater.model.limits import GARBAGE_SECONDS
from headwater.runtime import failpoints
from headwater.segments import pending
from headwater.storage import layout
from headwater.storage.journal import FileJournal
from headwater.streams import garbage
from tests.crash.processes import Crew, Place, wait_until
from tests.crash.workers import obey
from tests.operations import fence_all, intercept

# Many of them wait for something: not for a quick run.
pytestmark = pytest.mark.slow

LARGE = b"." * 100_000
#: Tables that hold rows only while something is under way or kept.
TABLES = ("extent", "inline_block", "object", "dead_log", "tier", "lease", "session", "txn_extent", "txn_term", "tag", "pin", "base")


#: Where the catalog makes no difference: it is the same client.
on_sqlite = pytest.mark.parametrize("catalog_url", ["sqlite"], indirect=True)


def write(stream: hw.Stream, count: int, padding: bytes = b"") -> None:
    with stream.writer() as writer:
        for number in range(count):
            writer.write(b"%d|" % number + padding)
            writer.flush()


def values(stream: hw.Stream) -> list[bytes]:
    return [event.value.partition(b"|")[0] for event in stream.read()]


def stored(store: hw.Store) -> list[str]:
    """Every stored object, with those that are not finished."""
    prefixes = [layout.JOURNAL_PREFIX, layout.OBJECT_PREFIX, layout.CHUNK_PREFIX, layout.TRANSACTION_PREFIX, layout.TEMPORARY_PREFIX]
    return [info.key for prefix in prefixes for info in store._engine.storage.list(prefix)]


def rows(store: hw.Store, *tables: str) -> dict[str, int]:
    query = store._engine.database.query
    return {table: query(f"SELECT count(*) FROM {table}")[0][0] for table in tables or TABLES}


@pytest.fixture
def disarm() -> Iterator[None]:
    yield
    failpoints.arm("")


def test_a_closed_store_that_is_tiered_holds_its_chunks_and_nothing_else(place: Place) -> None:
    with place.open(create=True) as store:
        write(store.create_stream("g/x"), 20, LARGE)
        write(store.create_stream("g/y"), 20)
    with place.open() as store:
        assert store.run_upkeep().objects_deleted == 1
        assert [key.split("/")[0] for key in stored(store)] == ["chunks", "chunks"]
        assert rows(store) == {**dict.fromkeys(TABLES, 0), "extent": 2, "object": 2, "tier": 2}
        assert values(store.stream("g/x")) == values(store.stream("g/y")) == [b"%d" % number for number in range(20)]


def test_where_a_catalog_may_go_back_in_time_garbage_stays_for_a_while(place: Place) -> None:
    with place.open(create=True) as store:
        write(store.create_stream("g/x"), 20, LARGE)
    with place.open() as store:
        store._engine.database.garbage_seconds = 600.0
        for _ in range(2):
            assert store.run_upkeep().objects_deleted == 0
        assert len(stored(store)) == 2, "the journal's file and the chunk"
        store._engine.database.write(lambda tx: tx.run("UPDATE object SET dead_at = dead_at - 601 * 1000000"))
        assert store.run_upkeep().objects_deleted == 1
        assert [key.split("/")[0] for key in stored(store)] == ["chunks"]


def test_on_postgresql_it_may(place: Place) -> None:
    with hw.open(place.url, catalog=place.catalog, upkeep=False) as store:
        assert store._engine.database.garbage_seconds == (0.0 if place.catalog is None else GARBAGE_SECONDS)


def test_a_deleted_stream_frees_its_space_and_its_rows(store: hw.Store) -> None:
    for number in range(2):
        stream = store.create_stream("g/gone")
        write(stream, 5, LARGE)
        if number:
            store.run_upkeep()
        write(stream, 5)
        stream.seal()
        store.delete_stream("g/gone")
    store.run_upkeep()
    fence_all(store._engine.database)
    store.run_upkeep()
    assert stored(store) == []
    assert rows(store) == dict.fromkeys(TABLES, 0)


def test_the_journal_is_trimmed_after_tiering_and_the_file_in_use_stays(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FileJournal.__init__, "__kwdefaults__", {"file_bytes": 300_000})
    with place.open(create=True) as store:
        stream = store.create_stream("g/x")
        with stream.writer() as writer:
            for number in range(20):
                writer.write(b"%d|" % number + LARGE).result()
            # Without the one that is begun ahead.
            journals = [row[0] for row in store._engine.database.query("SELECT key FROM object ORDER BY key")]
            report = store.run_upkeep()
            left = [key for key in stored(store) if key in journals]
            assert left == journals[-1:], "the file in use"
            assert report.objects_deleted == len(journals) - 1 > 0
            for number in range(20, 40):
                writer.write(b"%d|" % number + LARGE).result()
            store.run_upkeep()
        assert values(stream) == [b"%d" % number for number in range(40)]
    with place.open() as store:
        store.run_upkeep()
        assert [key.split("/")[0] for key in stored(store)] == ["chunks", "chunks"]
        assert check_store(store).unused_count == 0


def test_a_process_that_writes_no_more_keeps_no_journal(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending, "_PAUSE_SECONDS", 0.05)
    with place.open(create=True) as store:
        stream = store.create_stream("g/x")
        with stream.writer() as writer:
            writer.write(b"0|" + LARGE).result()
            wait_until(lambda: store.run_upkeep() is not None and [key.split("/")[0] for key in stored(store)] == ["chunks"])
            writer.write(b"1|" + LARGE).result()
            assert values(stream) == [b"0", b"1"]
            stream.seal()
            store.delete_stream("g/x")
            wait_until(lambda: store.run_upkeep() is not None and stored(store) == [])


@on_sqlite
def test_while_its_writer_lives_a_store_takes_little_more_than_its_data(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    written, used = 200_000_000, list[int]()

    def disk_bytes() -> int:
        files = [Path(root, name) for root, _, names in os.walk(place.url) for name in names if not name.startswith("catalog")]
        total = 0
        for file in files:
            with contextlib.suppress(FileNotFoundError):
                total += file.stat().st_blocks * 512
        return total

    def measured(name: str, run: Callable[[], Any]) -> Any:
        result = run()
        if name.startswith(("tiers.", "objects.")):
            used.append(disk_bytes())
        return result

    with place.open(create=True) as store:
        stream = store.create_stream("g/x")
        with stream.writer() as writer:
            for number in range(200):
                writer.write_batch(
                    pa.record_batch({"value": [random.Random(number * 100 + part).randbytes(10_000) for part in range(100)]})
                )
            writer.flush()
            intercept(monkeypatch, store, measured)
            store.run_upkeep()
            assert max(used) <= 2.5 * written, "during tiering"
            assert disk_bytes() <= 1.5 * written, "after it"
            monkeypatch.undo()
            stream.seal()
            store.delete_stream("g/x")
            store.run_upkeep()
            assert disk_bytes() <= 0.5 * written, "two files of the journal"


def test_a_flush_that_is_stored_and_not_committed_keeps_its_file(place: Place, store: hw.Store, crew: Crew) -> None:
    stream = store.create_stream("g/x")
    worker = crew.start(obey, place)
    worker.ask("open", "g/x")
    assert worker.ask("write", "g/x", None, [b"0|" + LARGE])[0]
    store.run_upkeep()
    assert rows(store, "object")["object"] == 2, "the chunk's, and the journal's, which no extent names any more"
    worker.ask("arm", "append.stored=stop")
    worker.ask("give", "g/x", None, [b"1|" + LARGE])
    worker.tell(("acks",))
    worker.wait_until_stopped()
    for _ in range(2):
        store.run_upkeep()
    assert [key.split("/")[0] for key in stored(store)].count("journal") == 1 and values(stream) == [b"0"]
    worker.go_on()
    assert worker.hear() == (True, [hw.Position(0, 1)])
    for _ in range(2):
        assert values(stream) == [b"0", b"1"]
        store.run_upkeep()


@on_sqlite
def test_a_flush_in_an_older_file_than_those_committed_before_it_keeps_that_file(store: hw.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second flush lies in the first file and waits for its commit, while the first one is stored late, in a newer file."""
    monkeypatch.setattr(FileJournal.__init__, "__kwdefaults__", {"file_bytes": 8 << 20})
    stream = store.create_stream("g/x")
    append = FileJournal.append
    reached = {name: threading.Event() for name in (b"1", b"2", b"3")}
    may_go_on = {name: threading.Event() for name in (b"1", b"2")}

    def append_when_told(journal: FileJournal, buffers: Any, length: int | None = None) -> Any:
        name = next(name for name in reached if name + b"|" in b"".join(bytes(buffer)[:200] for buffer in buffers))
        if name == b"1":
            reached[name].set()
            assert may_go_on[name].wait(60)
        found = append(journal, buffers, length)
        places[name] = found.key
        reached[name].set()
        assert name not in may_go_on or may_go_on[name].wait(60)
        return found

    places: dict[bytes, str] = {}
    with stream.writer() as writer:
        writer.write(b"0|" + LARGE * 20).result()
        monkeypatch.setattr(FileJournal, "append", append_when_told)
        acks = []
        for name in (b"1", b"2", b"3"):
            acks.append(writer.write(name + b"|" + b"." * (5 << 20)))
            # More than one flush begins only while somebody waits.
            waiting = threading.Thread(target=acks[-1].result, daemon=True)
            waiting.start()
            assert reached[name].wait(60)
        may_go_on[b"1"].set()
        acks[0].result()
        assert places[b"2"] < min(places[b"1"], places[b"3"])
        for _ in range(2):
            store.run_upkeep()
        assert rows(store, "extent") == {"extent": 1} and places[b"2"] in stored(store)
        may_go_on[b"2"].set()
        for ack in acks:
            ack.result()
    for _ in range(2):
        assert values(stream) == [b"0", b"1", b"2", b"3"]
        store.run_upkeep()


@on_sqlite
def test_after_a_failure_no_event_lies_in_an_older_file_than_those_before_it(store: hw.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flush that failed is stored anew, and all that are in flight after it too."""
    stream = store.create_stream("g/x")
    began_first, stored_second, failures = threading.Event(), threading.Event(), list[str]()
    append = FileJournal.append

    def fail_first(journal: FileJournal, buffers: Any, length: int | None = None) -> Any:
        if b"first" in b"".join(bytes(buffer)[:200] for buffer in buffers):
            began_first.set()
            assert stored_second.wait(60)
            if len(failures) < 3:
                failures.append("a file that can't be written to takes no more")
                monkeypatch.setattr(journal, "_file", None)
                raise hw.UnavailableError("the disk is full")
            return append(journal, buffers, length)
        place = append(journal, buffers, length)
        stored_second.set()
        return place

    with stream.writer() as writer:
        writer.write(b"begun|" + LARGE).result()
        monkeypatch.setattr(FileJournal, "append", fail_first)
        acks = [writer.write(b"first|" + b"." * (5 << 20))]
        assert began_first.wait(60)
        acks.append(writer.write(b"second|" + b"." * (5 << 20)))
        while not all(ack.done for ack in acks):
            with contextlib.suppress(hw.UnavailableError):
                writer.flush()
    monkeypatch.undo()
    assert len(failures) == 3
    assert values(stream) == [b"begun", b"first", b"second"]
    named = [row[0] for row in store._engine.database.query("SELECT object FROM extent ORDER BY first")]
    assert named == sorted(named)


@on_sqlite
def test_what_a_killed_process_left_goes_when_its_session_is_fenced_and_not_before(place: Place, store: hw.Store, crew: Crew) -> None:
    stream = store.create_stream("g/x")
    worker = crew.start(obey, place)
    worker.ask("open", "g/x")
    assert worker.ask("write", "g/x", None, [b"0|" + LARGE])[0]
    worker.ask("arm", "append.stored=kill")
    worker.tell(("give", "g/x", None, [b"1|" + LARGE]))
    assert worker.wait() == -9
    store.run_upkeep()
    store.run_upkeep()
    assert len(stored(store)) == 2 and values(stream) == [b"0"]
    fence_all(store._engine.database)
    assert store.run_upkeep().objects_deleted == 1
    assert values(stream) == [b"0"] and len(stored(store)) == 1


@on_sqlite
def test_a_journal_without_any_row_goes_when_its_session_is_over(place: Place, store: hw.Store, crew: Crew) -> None:
    store.create_stream("g/x")
    worker = crew.start(obey, place, "append.stored=kill")
    worker.ask("open", "g/x")
    worker.tell(("give", "g/x", None, [b"0|" + LARGE]))
    assert worker.wait() == -9
    assert store.run_upkeep().objects_deleted == 0 and len(stored(store)) == 1
    fence_all(store._engine.database)
    assert store.run_upkeep().objects_deleted == 1 and stored(store) == []


def test_unfinished_files_of_the_dead_go_and_those_of_the_living_stay(tmp_path: Path) -> None:
    with hw.open(tmp_path / "store", upkeep=False) as store:
        live = store._engine.run(sessions.begin_session, "a test")
        dead = layout.temporary_key(layout.chunk_key("g/x", 1, 0, 0, live + 1000, 1, ".parquet"), "ab" * 8)
        ours = layout.temporary_key(layout.chunk_key("g/x", 1, 0, 0, live, 1, ".parquet"), "ab" * 8)
        ended = layout.temporary_key(layout.transaction_key("0" * 32, "x"), "ab" * 8)
        strange = "tmp/what is this"
        for key in (dead, ours, ended, strange):
            path = tmp_path / "store" / key
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"half")
        with store.transaction() as tx:
            begun = layout.temporary_key(layout.transaction_key(tx.id, "x"), "ab" * 8)
            (tmp_path / "store" / begun).write_bytes(b"half")
            store.run_upkeep()
            assert set(stored(store)) == {ours, ended, strange, begun}, "of one that was never heard of, nobody knows yet"
        store.run_upkeep()
        assert set(stored(store)) == {ours, ended, strange}


# Transactions.


def test_what_aborted_and_expired_transactions_staged_goes_and_what_open_ones_staged_stays(store: hw.Store) -> None:
    stream = store.create_stream("g/x")
    transactions = {name: store.transaction() for name in ("aborted", "open", "committed", "adopted")}
    expired = store.transaction(lease=0.01, auto_renew=False)
    for name, tx in transactions.items():
        tx.write("g/x", name.encode() + b"|" + LARGE * 3)
        tx.flush()
    with pytest.raises(hw.TransactionEndedError):
        expired.write("g/x", b"expired|" + LARGE * 3)
        expired.flush()
        time.sleep(0.02)
        expired.commit()
    transactions["aborted"].abort()
    transactions["committed"].commit()
    transactions["open"].adopt([transactions["adopted"].id])
    for _ in range(2):
        store.run_upkeep()
    assert len([key for key in stored(store) if key.startswith("txn/")]) == 2, "the open one's, and what it adopted"
    transactions["open"].commit()
    assert values(stream) == [b"committed", b"open", b"adopted"]
    for _ in range(2):
        store.run_upkeep()
        assert values(stream) == [b"committed", b"open", b"adopted"]
    assert [key.split("/")[0] for key in stored(store)] == ["chunks", "chunks"]


def test_where_storage_can_not_be_listed_is_noted_and_the_rest_is_searched(store: hw.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    session = store._engine.run(sessions.begin_session, "a process that is gone")
    store._engine.run(sessions.end_session, session)
    orphan = layout.chunk_key("g/x", 1, 0, 0, session, 0, ".parquet")
    store._engine.storage.put(orphan, [b"x"])
    real = store._engine.storage.list

    def list_all_but_l0(prefix: str) -> Any:
        if prefix == layout.OBJECT_PREFIX:
            raise hw.InvalidRequestError("there is a foreign key")
        return real(prefix)

    with monkeypatch.context() as patch:
        patch.setattr(store._engine.storage, "list", list_all_but_l0)
        report = store.run_upkeep()
    assert report.problems == ("orphans: there is a foreign key",) and report.objects_deleted == 1
    assert stored(store) == []


def test_what_an_adopting_transaction_took_over_goes_when_it_is_aborted(store: hw.Store) -> None:
    store.create_stream("g/x")
    one, other = store.transaction(), store.transaction()
    one.write("g/x", LARGE * 3)
    one.flush()
    other.adopt([one.id])
    other.abort()
    assert store.run_upkeep().objects_deleted == 1 and stored(store) == []


def test_an_object_stored_before_the_catalog_heard_of_its_transaction_is_safe(
    store: hw.Store, monkeypatch: pytest.MonkeyPatch, disarm: None
) -> None:
    stream = store.create_stream("g/x")
    committed: list[bool] = []
    with store.transaction() as tx:
        tx.write("g/x", b"whole|" + LARGE * 3)

        def garbage_first(operation: str, run: Callable[[], Any]) -> Any:
            if operation == "commits.commit" and not committed:
                committed.append(True)
                assert len(stored(store)) == 1 and rows(store, "txn")["txn"] == 0
                assert store.run_upkeep().objects_deleted == 0
            return run()

        intercept(monkeypatch, store, garbage_first)
    assert committed and values(stream) == [b"whole"]


def test_a_transaction_that_was_not_heard_of_for_an_hour_can_not_commit_any_more(store: hw.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = store.create_stream("g/x")
    monkeypatch.setattr(garbage, "_UNHEARD_SECONDS", -60.0)
    tx = store.transaction()
    tx.write("g/x", b"late|" + LARGE * 3)
    seen: list[str] = []

    def garbage_first(operation: str, run: Callable[[], Any]) -> Any:
        if operation == "commits.commit" and not seen:
            seen.append(operation)
            assert store.run_upkeep().objects_deleted == 1
        return run()

    intercept(monkeypatch, store, garbage_first)
    with pytest.raises(hw.TransactionEndedError):
        tx.commit()
    assert values(stream) == [] and stored(store) == []


def test_a_committed_transaction_that_is_forgotten_is_never_told_to_be_aborted(store: hw.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = store.create_stream("g/x")
    monkeypatch.setattr(garbage, "_UNHEARD_SECONDS", -60.0)
    with store.transaction() as tx:
        tx.write("g/x", b"old|" + LARGE * 3)
    id = tx.id
    store._engine.database.write(lambda database: database.run("DELETE FROM txn"))
    session = store._engine.run(sessions.begin_session, "a test")
    store._engine.database.write(lambda database: database.run("INSERT INTO lease VALUES ('upkeep', ?, 'a test', 0, now_us())", (session,)))
    assert garbage.collect_orphans(store._engine, session, pytest.fail) == 0
    with pytest.raises(hw.NotFoundError):
        store.transaction_status(id)
    assert values(stream) == [b"old"]


# Rows.


def test_ended_transactions_sessions_and_markers_are_forgotten_in_time_and_open_ones_are_not(
    store: hw.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.create_stream("g/x")
    open_one = store.transaction(lease=20 * 86400.0)
    open_one.write("g/x", b"open")
    open_one.flush()
    for number in range(30):
        with store.transaction(marker=hw.Marker(f"owner{number}", 1)) as tx:
            tx.write("g/x", b"%d" % number)
    write(store.stream("g/x"), 1)
    fence_all(store._engine.database)
    store.run_upkeep()
    assert rows(store, "txn", "marker") == {"txn": 31, "marker": 30}, "kept for a week at least"
    shift = int(timedelta(days=8).total_seconds() * 1_000_000)
    store._engine.database.write(lambda tx: tx.run("UPDATE txn SET ended_at = ended_at - ?, expires_at = expires_at - ?", (shift, shift)))
    store._engine.database.write(lambda tx: tx.run("UPDATE session SET renewed_at = renewed_at - ? WHERE live = 0", (shift,)))
    store.run_upkeep()
    assert rows(store, "txn", "marker", "session") == {"txn": 1, "marker": 30, "session": 0}
    assert store.transaction_status(open_one.id) is hw.TransactionStatus.OPEN
    store._engine.database.write(
        lambda tx: tx.run("UPDATE marker SET committed_at = committed_at - ? WHERE owner <> 'owner3'", (47 * shift,))
    )
    store.run_upkeep()
    assert rows(store, "marker") == {"marker": 1} and store.marker("owner3") == hw.Marker("owner3", 1)
    open_one.abort()


@on_sqlite
def test_forgetting_looks_only_at_what_is_over(store: hw.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A week of transactions must not be looked through under the lock each time."""
    database = store._engine.database
    condition = "state IN ('committed', 'aborted') AND expires_at < now_us() - ? AND ended_at < now_us() - ?"
    plan = [row[3] for row in database.query(f"EXPLAIN QUERY PLAN SELECT id FROM txn WHERE {condition} LIMIT 5", (1, 1))]
    assert any("txn_by_state (state=? AND expires_at<?)" in line for line in plan), plan
    for number in range(3):
        with store.transaction() as tx:
            tx.write(store.create_stream(f"g/{number}").name, b"x")
    session = store._engine.run(sessions.begin_session, "a test")
    store._engine.database.write(lambda tx: tx.run("INSERT INTO lease VALUES ('upkeep', ?, 'a test', 0, now_us())", (session,)))
    assert store._engine.run(objects.prune, session) == 0
    monkeypatch.setattr(objects, "_KEPT_US", -60_000_000)
    monkeypatch.setattr(objects, "_PRUNED_ROWS", 2)
    assert store._engine.run(objects.prune, session) == 2
    store._engine.database.write(lambda tx: tx.run("DELETE FROM lease"))


def test_rows_stay_flat_while_a_stream_is_written_tiered_and_truncated_for_long(store: hw.Store) -> None:
    stream = store.create_stream("g/x", scaling=hw.Scaling.fixed(2), retention=hw.Retention.by_size(1))
    seen = []
    for number in range(8):
        write(stream, 3, LARGE if number % 2 else b"")
        with store.transaction() as tx:
            tx.write("g/x", b"tx" + LARGE * 3, key="a")
            tx.flush()
        if number % 3 == 0:
            stream.split(stream.segments()[0].number)
            segments = sorted(stream.segments(), key=lambda segment: segment.start)
            stream.merge([segment.number for segment in segments])
            stream.split(stream.segments()[0].number)
        stream.fork("g/fork")
        store.stream("g/fork").seal()
        store.delete_stream("g/fork")
        for _ in range(3):
            assert store.run_upkeep().problems == ()
        seen.append((sum(rows(store).values()), len(stored(store)), rows(store, "segment")["segment"]))
    assert seen[-1][0] <= seen[2][0] + 4 and seen[-1][1] <= seen[2][1] + 1 and seen[-1][2] <= seen[2][2], seen


def test_inline_blocks_that_a_killed_tiering_left_behind_go_also_with_their_stream(store: hw.Store) -> None:
    stream = store.create_stream("g/x")
    write(stream, 10)
    blocks = store._engine.database.query("SELECT log, first, data FROM inline_block")
    store.run_upkeep()
    assert rows(store, "inline_block") == {"inline_block": 0}

    def put_back() -> None:
        store._engine.database.write(lambda tx: tx.defer("INSERT INTO inline_block (log, first, data) VALUES (?, ?, ?)", blocks))

    put_back()
    assert check_store(store).ok, "they are garbage, not damage"
    store.run_upkeep()
    assert rows(store, "inline_block") == {"inline_block": 0}
    put_back()
    stream.seal()
    store.delete_stream("g/x")
    assert rows(store, "inline_block", "tier", "dead_log", "extent") == {"inline_block": 0, "tier": 0, "dead_log": 0, "extent": 0}


@on_sqlite
def test_deleting_much_is_done_in_slices_by_rows_and_by_bytes(store: hw.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.catalog.extents._SLICE_BYTES", 1000)
    stream = store.create_stream("g/x")
    write(stream, 30, b"." * 200)
    deleted: list[int] = []

    def counted(name: str, run: Callable[[], Any]) -> Any:
        before = rows(store, "inline_block")["inline_block"]
        result = run()
        deleted.append(before - rows(store, "inline_block")["inline_block"])
        return result

    intercept(monkeypatch, store, counted)
    stream.truncate(stream.tail())
    assert sum(deleted) == 30 and 1 < max(deleted) < 8


def test_chunks_of_one_stream_that_a_fork_needs_outlive_it_and_go_with_the_fork(store: hw.Store) -> None:
    parent = store.create_stream("g/parent")
    write(parent, 10)
    fork = parent.fork("g/fork")
    store.run_upkeep()
    parent.seal()
    store.delete_stream("g/parent")
    store.run_upkeep()
    assert values(fork) == [b"%d" % number for number in range(10)]
    assert len(stored(store)) == 1
    fork.seal()
    store.delete_stream("g/fork")
    store.run_upkeep()
    assert stored(store) == [] and rows(store, "extent", "tier", "base", "dead_log", "object") == dict.fromkeys(
        ("extent", "tier", "base", "dead_log", "object"), 0
    )


def test_a_swap_whose_extents_changed_leaves_them_as_they_are(store: hw.Store) -> None:
    """What a swap compares is what was read: a truncation in between makes the chunk garbage."""
    stream = store.create_stream("g/x")
    write(stream, 5)
    cut = stream.tail()
    write(stream, 5)
    engine = store._engine
    write_object = engine.storage.write

    def truncate_meanwhile(key: str, produce: Any, push: Any = None) -> None:
        write_object(key, produce, push)
        stream.truncate(cut)

    engine.storage.write = truncate_meanwhile  # type: ignore[method-assign]
    report = store.run_upkeep()
    engine.storage.write = write_object  # type: ignore[method-assign]
    assert report.chunks_written == 0 and report.problems == ()
    assert values(stream) == [b"%d" % number for number in range(5)]
    assert store.run_upkeep().chunks_written == 1
    assert values(stream) == [b"%d" % number for number in range(5)]
    assert len(stored(store)) == 1, "the chunk that was not taken is gone"
