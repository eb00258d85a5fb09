"""`check` finds what is wrong, names it, and says nothing of what is right. Every fault here is planted by hand."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headwater as hw
from headwater.catalog.segments import SegmentRow
from headwater.catalog.sqlite import SqliteDatabase
from headwater.check import CheckReport, Progress, check_store, numbers
from headwater.check.lineage import find_lineage_faults
from headwater.model.keys import KEY_SPACE, KeyRange
from headwater.runtime import failpoints
from headwater.streams import forks

# Many kinds of damage: not for a quick run.
pytestmark = pytest.mark.slow

Open = Callable[[], hw.Store]
HURT, WHOLE = "a/hurt", "a/whole"
#: Above every id that a clock gives.
NEVER_GIVEN = 1 << 60
EVENTS = 3000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def open_store(path: Path, catalog_url: str | None) -> Open:
    return lambda: hw.open(path, catalog=catalog_url)


@pytest.fixture
def store(open_store: Open) -> Iterator[hw.Store]:
    """Two streams, each with a journal file of its own: a block there and one inline in each."""
    for name in (WHOLE, HURT):
        with open_store() as store:
            stream = store.create_stream(name)
            with stream.writer() as writer:
                writer.write_batch(pa.table({"value": pa.array([b"event %d" % number * 10 for number in range(EVENTS)], pa.binary())}))
                writer.flush()
                writer.write(b"a small one", key="k")
    with open_store() as store:
        yield store


def change(store: hw.Store, sql: str, *values: Any) -> None:
    store._engine.database.write(lambda tx: tx.run(sql, values))


def change_freely(store: hw.Store, sql: str) -> None:
    """A change that leaves rows which point nowhere, as only damage does."""
    database = store._engine.database
    if isinstance(database, SqliteDatabase):
        with sqlite3.connect(database.url) as connection:  # Where references are not kept.
            connection.execute(sql)
        connection.close()
    else:
        database.write(lambda tx: (tx.run("SET LOCAL session_replication_role = replica"), tx.run(sql)))


def log_of(store: hw.Store, name: str) -> int:
    return int(
        store._engine.database.query("SELECT g.log FROM segment g JOIN stream s ON s.id = g.stream WHERE s.name = ?", (name[2:],))[0][0]
    )


def journal_of(store: hw.Store, name: str) -> tuple[str, int, int]:
    """The key of a stream's journal file, and where its block is in there."""
    sql = "SELECT o.key, e.position, e.length FROM extent e JOIN object o ON o.id = e.object WHERE e.log = ?"
    key, position, length = store._engine.database.query(sql, (log_of(store, name),))[0]
    return str(key), int(position), int(length)


def only_hurt(report: CheckReport) -> list[str]:
    """The kinds of problems, all of which are the hurt stream's."""
    assert not report.ok
    for problem in report.problems:
        assert HURT in problem.message, problem
        assert problem.stream == HURT and problem.segment == 0
    return [problem.kind for problem in report.problems]


def test_a_sound_store_has_no_problems_and_all_of_it_was_looked_at(store: hw.Store) -> None:
    seen: list[Progress] = []
    report = check_store(store, seen.append)
    assert report.ok and report.problems == []
    assert (report.streams, report.segments, report.blocks, report.events) == (2, 2, 4, 2 * (EVENTS + 1))
    assert report.objects == 2 and report.unused_count == 0 and report.leftover_rows == 0
    assert seen[-1].done_bytes == seen[-1].total_bytes == report.bytes


def test_an_empty_store_has_no_problems(open_store: Open) -> None:
    with open_store() as store:
        assert check_store(store).ok


def test_a_store_that_went_through_everything_has_no_problems(open_store: Open) -> None:
    with open_store() as store:
        stream = store.create_stream("a/b", scaling=hw.Scaling.fixed(2), schema=pa.schema([("n", pa.int64())]))
        raw = store.create_stream("a/raw", kind="bytes")
        with stream.writer("w") as writer, raw.byte_writer() as byte_writer:
            for number in range(1, 301):
                writer.write({"n": number}, key=number, number=number)
                byte_writer.write(b"x" * number)
                if number == 60:
                    stream.split(0, 3)
                elif number == 120:
                    writer.flush()
                    stream.truncate(stream.tail())
                elif number == 180:
                    stream.merge([segment.number for segment in stream.segments()])
                elif number == 240:
                    stream.update(schema=pa.schema([("n", pa.int64()), ("m", pa.string())]))
        assert check_store(store).problems == []
        stream.seal()
        assert check_store(store).problems == []
        stream.truncate(stream.tail())
        store.delete_stream("a/b")
        report = check_store(store)
        assert report.problems == [] and report.events == 0 and report.bytes == sum(range(1, 301))


def test_forks_tags_and_transactions_have_no_problems(open_store: Open) -> None:
    with open_store() as store:
        stream = store.create_stream("a/b", scaling=hw.Scaling.fixed(2))
        with stream.writer() as writer:
            for number in range(200):
                writer.write(b"x" * 1000, key=number)
                if number == 50:
                    writer.flush()
                    middle = stream.cut_at(datetime.now(UTC))
        store.tag("then", stream.tail())
        with store.transaction() as transaction:
            transaction.write("a/b", b"y" * 100_000, key="k")
            transaction.write("a/b", b"small", key="l")
            transaction.flush()
            stream.split(0)
        fork = stream.fork("a/fork", at=middle)
        with fork.writer() as writer:
            writer.write(b"only here")
        stream.truncate(stream.tail())
        assert check_store(store).problems == []
        stream.seal()
        store.untag("then")
        store.delete_stream("a/b")
        report = check_store(store)
        assert report.problems == [] and report.events == len(list(fork.read()))


def test_damage_that_only_a_fork_sees_is_its_own(store: hw.Store, path: Path) -> None:
    key, _, _ = journal_of(store, HURT)
    store.stream(HURT).fork("a/fork")
    store.stream(HURT).truncate(store.stream(HURT).tail())
    os.unlink(path / key)
    report = check_store(store)
    assert [(problem.kind, problem.stream, problem.object) for problem in report.problems] == [("missing", "a/fork", key)]


@pytest.mark.parametrize(
    ("fault", "kind", "said"),
    [
        ("DELETE FROM base", "gap", f"no log holds events 0-{EVENTS}"),
        ("UPDATE base SET until = 4", "gap", f"no log holds events 4-{EVENTS}"),
        ("UPDATE base SET first = 2", "gap", "no log holds events 0-1"),
        ("UPDATE base SET source = 1000000", "gap", f"no block holds events 0-{EVENTS}"),
        ("UPDATE base SET until = until + 1", "overlap", f"events {EVENTS + 1}-{EVENTS + 1} are in two logs"),
    ],
)
def test_a_fork_that_lost_what_it_has_of_its_parent_is_found(store: hw.Store, fault: str, kind: str, said: str) -> None:
    fork = store.stream(HURT).fork("a/fork")
    for stream in (store.stream(HURT), fork):
        with stream.writer() as writer:
            writer.write(b"another one")
    assert check_store(store).ok
    change(store, fault)
    problems = check_store(store).problems
    assert [(problem.kind, problem.stream) for problem in problems if problem.segment is not None] == [(kind, "a/fork")]
    assert said in problems[0].message


def test_damage_that_only_a_tag_sees_is_found(store: hw.Store, path: Path) -> None:
    key, _, _ = journal_of(store, HURT)
    store.tag("then", store.stream(HURT).tail())
    store.stream(HURT).truncate(store.stream(HURT).tail())
    assert check_store(store).ok
    os.unlink(path / key)
    assert only_hurt(check_store(store)) == ["missing"]


def test_a_flipped_bit_in_a_journal_is_found_and_named(store: hw.Store, path: Path) -> None:
    key, position, length = journal_of(store, HURT)
    with (path / key).open("r+b") as file:
        file.seek(position + length // 2)
        byte = file.read(1)[0]
        file.seek(position + length // 2)
        file.write(bytes([byte ^ 4]))
    report = check_store(store)
    assert only_hurt(report) == ["damaged"]
    assert report.problems[0].object == key and f"events 0-{EVENTS - 1}" in report.problems[0].message
    assert len(list(store.stream(WHOLE).read())) == EVENTS + 1


@pytest.mark.parametrize(("at", "said"), [(0, "does not begin as"), (-50, "the footer of"), (-1, "does not end as"), (200, "row groups")])
def test_a_flipped_bit_in_a_chunk_that_was_read_before_is_found(store: hw.Store, path: Path, at: int, said: str) -> None:
    store.run_upkeep()
    assert len(list(store.stream(HURT).read())) == EVENTS + 1 and check_store(store).ok
    key, _, _ = journal_of(store, HURT)
    flip(path / key, at)
    report = check_store(store)
    assert only_hurt(report) == ["damaged"] and report.problems[0].object == key and said in report.problems[0].message


def test_a_chunk_whose_checksum_the_catalog_lost_is_found_after_it_was_read(store: hw.Store) -> None:
    store.run_upkeep()
    assert len(list(store.stream(HURT).read())) == EVENTS + 1
    change(store, "UPDATE extent SET crc = crc + 1 WHERE log = ?", log_of(store, HURT))
    assert only_hurt(check_store(store)) == ["damaged"]


def test_a_missing_journal_is_found_and_named(store: hw.Store, path: Path) -> None:
    key, _, _ = journal_of(store, HURT)
    os.unlink(path / key)
    report = check_store(store)
    assert only_hurt(report) == ["missing"]
    assert report.problems[0].object == key and f"events 0-{EVENTS - 1}: {key} is missing" in report.problems[0].message


def test_a_journal_cut_short_is_found_and_named(store: hw.Store, path: Path) -> None:
    key, position, length = journal_of(store, HURT)
    os.truncate(path / key, position + length - 1)
    report = check_store(store)
    assert only_hurt(report) == ["damaged"]
    assert report.problems[0].object == key and "too short" in report.problems[0].message


def test_a_missing_extent_is_a_gap(store: hw.Store) -> None:
    change(store, "DELETE FROM extent WHERE log = ? AND first = 0", log_of(store, HURT))
    report = check_store(store)
    assert only_hurt(report) == ["gap"]
    assert f"no block holds events 0-{EVENTS - 1}" in report.problems[0].message
    # Its bytes are still there, and nothing names them.
    assert [unused.key for unused in report.unused] != []


def test_a_missing_extent_of_an_inline_block_leaves_bytes_that_nothing_names(store: hw.Store) -> None:
    change(store, "DELETE FROM extent WHERE log = ? AND first = ?", log_of(store, HURT), EVENTS)
    report = check_store(store)
    assert only_hurt(report) == ["gap", "dangling"]
    assert f"inline block at event {EVENTS} that no extent names" in report.problems[1].message


def test_a_missing_row_of_an_object_is_found_and_named(store: hw.Store) -> None:
    key, _, _ = journal_of(store, HURT)
    change(store, "DELETE FROM object WHERE key = ?", key)
    report = check_store(store)
    assert only_hurt(report) == ["dangling"]
    assert report.problems[0].object == key and "has no row for the object" in report.problems[0].message


def test_a_damaged_inline_block_is_found(store: hw.Store) -> None:
    log = log_of(store, HURT)
    data = bytearray(store._engine.database.query("SELECT data FROM inline_block WHERE log = ?", (log,))[0][0])
    data[-1] ^= 1
    change(store, "UPDATE inline_block SET data = ? WHERE log = ?", bytes(data), log)
    report = check_store(store)
    assert only_hurt(report) == ["damaged"]
    assert f"events {EVENTS}-{EVENTS}" in report.problems[0].message and "inline block" in report.problems[0].message


def test_missing_inline_bytes_are_found(store: hw.Store) -> None:
    change(store, "DELETE FROM inline_block WHERE log = ?", log_of(store, HURT))
    report = check_store(store)
    assert only_hurt(report) == ["missing"]


def test_a_block_with_another_count_than_its_row_is_found(store: hw.Store) -> None:
    log = log_of(store, HURT)
    change(store, "UPDATE extent SET count = count + 1 WHERE log = ? AND first = ?", log, EVENTS)
    change(store, "UPDATE segment SET tail = tail + 1 WHERE log = ?", log)
    report = check_store(store)
    assert only_hurt(report) == ["damaged"]
    assert "has 1 events, the catalog says 2" in report.problems[0].message


@pytest.mark.parametrize(
    ("column", "by", "kinds"), [("tail", 5, ["gap"]), ("tail", -1, ["overlap"]), ("bytes", 7, ["counter"]), ("head", 10**6, ["lineage"])]
)
def test_a_segment_whose_row_disagrees_with_its_blocks_is_found(store: hw.Store, column: str, by: int, kinds: list[str]) -> None:
    change(store, f"UPDATE segment SET {column} = {column} + ? WHERE log = ?", by, log_of(store, HURT))
    report = check_store(store)
    assert [problem.kind for problem in report.problems][: len(kinds)] == kinds
    assert all(problem.stream == HURT for problem in report.problems)


def test_overlapping_extents_are_found(store: hw.Store) -> None:
    log = log_of(store, HURT)
    change(store, "UPDATE extent SET first = first - 1 WHERE log = ? AND first = ?", log, EVENTS)
    change(store, "UPDATE inline_block SET first = first - 1 WHERE log = ?", log)
    assert "overlap" in only_hurt(check_store(store))


def test_a_segment_that_is_gone_is_found_by_its_keys_and_its_extents(store: hw.Store) -> None:
    log = log_of(store, HURT)
    store.stream(HURT).split(0)
    change(store, "DELETE FROM segment WHERE stream = ? AND number = 1", store.stream(HURT).id)
    change(store, "DELETE FROM segment WHERE log = ?", log)
    report = check_store(store)
    kinds = {problem.kind for problem in report.problems}
    assert kinds == {"lineage", "dangling"}
    assert any("don't cover the whole key space" in problem.message and problem.stream == HURT for problem in report.problems)
    assert any(f"extents of log {log}, which no segment owns" in problem.message for problem in report.problems)


def test_a_sealed_stream_with_an_open_segment_is_found(store: hw.Store) -> None:
    stream = store.stream(HURT)
    stream.seal()
    change(store, "UPDATE segment SET sealed_epoch = NULL WHERE stream = ?", stream.id)
    report = check_store(store)
    assert {problem.kind for problem in report.problems} == {"lineage"}
    assert "segment 0 is open, but the stream is sealed" in report.problems[0].message


def test_a_segment_among_the_dead_is_found(store: hw.Store) -> None:
    change(store, "INSERT INTO dead_log (log) VALUES (?)", log_of(store, HURT))
    assert only_hurt(check_store(store)) == ["dangling"]


def test_blocks_where_all_is_said_to_be_in_chunks_are_found(store: hw.Store) -> None:
    change(store, "INSERT INTO tier (log, until, small) VALUES (?, ?, 0)", log_of(store, HURT), EVENTS + 1)
    report = check_store(store)
    assert only_hurt(report) == ["counter"] and "at event 0 there is a block" in report.problems[0].message


def test_chunks_that_are_said_to_go_on_behind_the_tail_are_found(store: hw.Store) -> None:
    store.run_upkeep()
    assert check_store(store).ok
    change(store, "UPDATE tier SET until = until + 1 WHERE log = ?", log_of(store, HURT))
    report = check_store(store)
    assert only_hurt(report) == ["counter"] and f"its tail is {EVENTS + 1}" in report.problems[0].message


def test_a_tier_of_no_log_is_found(store: hw.Store) -> None:
    change(store, "INSERT INTO tier (log, until, small) VALUES (1000000, 2, 0)")
    problems = check_store(store).problems
    assert any(problem.kind == "dangling" and "tier rows of log 1000000, which no segment owns" in problem.message for problem in problems)


@pytest.mark.parametrize("name", ["tier.swapped", "tier.sliced"])
def test_tiering_that_stopped_half_way_is_no_fault(store: hw.Store, name: str) -> None:
    failpoints.arm(f"{name}=error")
    try:
        store.run_upkeep()
    finally:
        failpoints.arm("")
    assert store._engine.database.query("SELECT 1 FROM tier") and check_store(store).problems == []


def test_a_missing_schema_is_found(open_store: Open, store: hw.Store) -> None:
    change(store, "DELETE FROM stream_schema WHERE stream = ?", store.stream(HURT).id)
    with open_store() as again:
        report = check_store(again)
    assert [(problem.kind, problem.stream) for problem in report.problems] == [("catalog", HURT)]


def test_a_stream_deleted_while_it_is_checked_is_no_fault(open_store: Open, store: hw.Store) -> None:
    typed = store.create_stream("a/typed", schema=pa.schema([("n", pa.int64())]))
    with typed.writer() as writer:
        writer.write({"n": 1})

    def delete(progress: Progress) -> None:
        if progress.stream == "a/typed":
            typed.seal()
            store.delete_stream("a/typed")

    with open_store() as other:  # Which has not read the schema yet.
        report = check_store(other, delete)
    assert report.problems == [] and report.streams == 2


def test_a_block_of_a_newer_schema_of_a_stream_deleted_meanwhile_is_no_fault(
    tmp_path: Path, catalog_url: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _six_blocks(tmp_path / "six", catalog_url, monkeypatch) as store:
        typed = store.create_stream("a/typed", schema=pa.schema([("n", pa.int64())]))
        with typed.writer() as writer:
            for number in range(4):
                writer.write({"n": number}).result()
        typed.fork("a/with-the-same-blocks")
        seen: list[Progress] = []

        def delete(progress: Progress) -> None:
            seen.extend([progress] if progress.stream == "a/typed" else [])
            if len(seen) == 2 and progress is seen[-1]:  # Half of its blocks are done.
                typed.seal()
                store.delete_stream("a/typed")
                store._engine._schemas.clear()

        assert check_store(store, delete).problems == [] and len(seen) > 2


def test_a_catalog_that_is_out_of_reach_is_no_damage(open_store: Open, store: hw.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store() as other:

        def schema(stream: int, version: int) -> pa.Schema:
            raise hw.UnavailableError("out of reach")

        monkeypatch.setattr(other._engine, "schema", schema)
        with pytest.raises(hw.UnavailableError):
            check_store(other)


def test_a_sequence_that_would_give_an_id_again_is_found(store: hw.Store) -> None:
    change(store, "UPDATE sequence SET last = 0 WHERE name = 'log'")
    assert {problem.kind for problem in check_store(store).problems} == {"counter"}


def stage(store: hw.Store, path: Path) -> tuple[hw.Transaction, Path]:
    """A transaction with a block in a file of its own and a small one, and that file."""
    transaction = store.transaction(lease=3600)
    transaction.write(HURT, os.urandom(600_000))
    transaction.flush()
    transaction.write(HURT, b"small")
    transaction.flush()
    (file,) = (path / "txn").glob("*/*")
    assert check_store(store).problems == []
    return transaction, file


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 4
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("fault", "kind", "said"),
    [
        (lambda store, file: file.unlink(), "missing", "as its part 0-0"),
        (lambda store, file: flip(file, 1000), "damaged", "as its part 0-0"),
        (lambda store, file: change(store, "DELETE FROM object WHERE id < 0"), "dangling", "has no row for the object"),
        (lambda store, file: change(store, "UPDATE txn_extent SET crc = crc + 1 WHERE object IS NULL"), "damaged", "as its part 1-1"),
        (lambda store, file: change(store, "UPDATE txn_extent SET data = NULL"), "missing", "as its part 1-1"),
    ],
    ids=["file gone", "bit flipped", "object's row gone", "inline", "inline gone"],
)
def test_damage_to_what_a_transaction_staged_is_found(
    store: hw.Store, path: Path, fault: Callable[[hw.Store, Path], None], kind: str, said: str
) -> None:
    transaction, file = stage(store, path)
    fault(store, file)
    (problem,) = check_store(store).problems
    assert (problem.kind, problem.stream) == (kind, HURT)
    assert f"{HURT}, staged by transaction {transaction.id}" in problem.message and said in problem.message


def test_a_transaction_that_ends_while_it_is_checked_is_no_fault(store: hw.Store, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transaction, file = stage(store, path)
    size = store._engine.storage.size

    def abort(key: str) -> int | None:
        if key.startswith("txn/"):
            transaction.abort()
            file.unlink()
        return size(key)

    monkeypatch.setattr(store._engine.storage, "size", abort)
    assert check_store(store).problems == [] and not file.exists()


@pytest.fixture
def full(store: hw.Store) -> hw.Store:
    """With a group, a tag, a table and an open transaction too."""
    stream = store.stream(HURT)
    with store.reader_group("g", [HURT]).reader("r") as reader:
        reader.read()
    store.tag("then", stream.tail())
    store.table("a/table").put("key", b"value")
    transaction = store.transaction(lease=3600)
    transaction.write(HURT, b"staged")
    transaction.flush()
    assert check_store(store).problems == []
    return store


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("INSERT INTO group_stream (grp, stream, name) VALUES (99, 1, 'a/b')", "a stream of the reader_group 99"),
        ("UPDATE group_segment SET grp = 99", "a position of the reader_group 99"),
        ("UPDATE group_reader SET grp = 99", "a reader of the reader_group 99"),
        ("UPDATE group_segment SET position = 5000", f"g is at event 5000 of {HURT} segment 0, whose tail is {EVENTS + 1}"),
        ("UPDATE group_segment SET segment = 77", f"g is at segment 77 of {HURT}, which never had one"),
        ("DELETE FROM group_stream", "which is none of its streams"),
        ("DELETE FROM group_segment", f"g reads {HURT}, and has no position there"),
        (f"UPDATE group_stream SET stream = {NEVER_GIVEN}", f"{NEVER_GIVEN} is in use, as group_stream.stream"),
        ("DELETE FROM txn WHERE state = 'open'", "a staged block of the txn"),
        ("UPDATE txn_term SET txn = 'x'", "a staged term of the txn x"),
        ("UPDATE txn_extent SET segment = 77", f"a block staged for segment 77 of {HURT}, which never had one"),
        ("DELETE FROM pin", f"the tag then: its cut names the segments [0] of {HURT}, which it does not keep"),
        ("UPDATE pin SET segment = 77", "the tag then keeps segment 77"),
        (f"UPDATE pin SET stream = {NEVER_GIVEN}", f"{NEVER_GIVEN} is in use, as pin.stream"),
        ("UPDATE tag SET cut = 'xx'", "the tag then: its cut can't be read"),
        ("UPDATE tag SET head = 'xx'", "the tag then: its head can't be read"),
        ("UPDATE tag SET cut = replace(cut, '\"id\":', '\"id\":1')", "its cut is of the stream a/hurt, which does not exist"),
        ("UPDATE entry SET version = 900", "the table a/table has version 900 of the key 'key', but its last change is 1"),
        (
            f"UPDATE entry SET stream = (SELECT id FROM stream WHERE scope || '/' || name = '{WHOLE}')",
            f"a table's entries of {WHOLE}, which is a stream of events",
        ),
        ("INSERT INTO noted_time (stream, writer, time, noted_at) VALUES (99, 'w', 0, 0)", "a noted time of the stream 99"),
        ("INSERT INTO watermark (stream, number, low, high, numbers) VALUES (99, 0, 0, 0, '')", "a watermark of the stream 99"),
        ("UPDATE stream SET scaling = 'xx' WHERE name = 'hurt'", f"{HURT}: its scaling 'xx' can't be read"),
        ("UPDATE stream SET retention = '{}' WHERE name = 'hurt'", f"{HURT}: its retention '{{}}' can't be read"),
        ("UPDATE stream SET kind = 'odd' WHERE name = 'hurt'", f"{HURT}: it is of the kind 'odd'"),
        ("UPDATE extent SET form = 1 WHERE object IS NULL", "the catalog says that this is of form 1"),
        ("UPDATE extent SET form = 2", "the catalog says that this is of form 2"),
        ("UPDATE sequence SET last = 0 WHERE name = 'group'", "next group id would be 1"),
    ],
)
def test_a_row_that_does_not_fit_the_others_is_found(full: hw.Store, fault: str, said: str) -> None:
    change_freely(full, fault)
    messages = [problem.message for problem in check_store(full).problems]
    assert any(said in message for message in messages), messages


def test_what_a_deleted_stream_leaves_behind_is_no_fault(store: hw.Store) -> None:
    stream = store.stream(HURT)
    with store.reader_group("g", [HURT, WHOLE]).reader("r") as reader:
        reader.read()
    start, end = stream.head(), stream.tail()
    forks.hold(store._engine, "h", start, end, 600)
    transaction = store.transaction(lease=3600)
    transaction.write(WHOLE, b"staged")
    transaction.flush()
    stream.truncate(end)
    assert check_store(store).problems == []
    stream.seal()
    store.delete_stream(HURT)
    assert check_store(store).problems == []


def test_bytes_that_no_row_names_are_unused_and_no_damage(store: hw.Store, path: Path) -> None:
    (path / "journal" / "00000000ffff").mkdir()
    (path / "journal" / "00000000ffff" / "000000.hwj").write_bytes(b"x" * 100)
    report = check_store(store)
    assert report.ok
    assert [(unused.key, unused.bytes, unused.reason) for unused in report.unused] == [
        ("journal/00000000ffff/000000.hwj", 100, "no row names it")
    ]


def test_a_journal_whose_every_event_was_truncated_is_unused(store: hw.Store) -> None:
    key, _, _ = journal_of(store, HURT)
    store.stream(HURT).truncate(store.stream(HURT).tail())
    report = check_store(store)
    assert report.ok and [unused.key for unused in report.unused] == [key]


def test_a_journal_that_is_being_written_is_not_called_unused(store: hw.Store, path: Path) -> None:
    with store.stream(WHOLE).writer() as writer:
        writer.write_batch(pa.table({"value": pa.array([b"x" * 100_000], pa.binary())}))
        writer.flush()
        store.stream(WHOLE).truncate(store.stream(WHOLE).tail())
        live = {f"{row[0]:012x}" for row in store._engine.database.query("SELECT id FROM session WHERE live = 1")}
        assert live and not any(unused.key.split("/")[1] in live for unused in check_store(store).unused)


@pytest.mark.slow
def test_nothing_is_found_wrong_while_others_write_split_and_truncate(open_store: Open) -> None:
    stop = threading.Event()
    failures: list[BaseException] = []

    def busy() -> None:
        try:
            with open_store() as store:
                stream = store.stream("a/b")
                with stream.writer() as writer:
                    number = 0
                    while not stop.is_set():
                        number += 1
                        writer.write(b"x" * 50, key=number % 100)
                        if number % 200 == 0:
                            writer.flush()
                        if number % 2000 == 0:
                            stream.split(stream.segments()[0].number)
                            stream.merge([segment.number for segment in sorted(stream.segments(), key=lambda segment: segment.start)[:2]])
                        if number % 3000 == 0:
                            stream.truncate(stream.tail())
        except BaseException as error:
            failures.append(error)

    with open_store() as store:
        store.create_stream("a/b", scaling=hw.Scaling.fixed(3))
        writer = threading.Thread(target=busy)
        writer.start()
        try:
            events = 0
            for _ in range(400):
                report = check_store(store)
                assert report.problems == []
                events += report.events
                if events > 100_000:
                    break
        finally:
            stop.set()
            writer.join()
        assert not failures
        assert check_store(store).problems == []


# What only SQLite can have: a file, a schema and values that are damaged.


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (
            "UPDATE sqlite_schema SET sql = 'CREATE INDEX txn_by_state ON txn (state, begun_at)' WHERE name = 'txn_by_state'",
            "missing from index txn_by_state",
        ),
        ("UPDATE sqlite_schema SET sql = replace(sql, 'made_at', 'made_it') WHERE name = 'segment'", "no such column: made_at"),
        ("DROP TABLE tier", "no such table: tier"),
        ("UPDATE stream SET retention = CAST(x'ff' AS TEXT)", "a text that is none"),
        ("UPDATE tag SET cut = CAST(x'ff' AS TEXT)", "a text that is none"),
        (
            "UPDATE segment SET head = 'x' WHERE stream = (SELECT id FROM stream WHERE name = 'b')",
            "a/b: a value in its rows is not what it can be",
        ),
    ],
    ids=["index", "column", "table", "text", "tag's text", "value"],
)
def test_a_damaged_catalog_file_is_reported(tmp_path: Path, fault: str, said: str) -> None:
    with hw.open(tmp_path / "store") as store:
        stream = store.create_stream("a/b")
        with store.transaction() as transaction:
            transaction.write("a/b", b"x")
        store.tag("then", stream.tail())
        assert check_store(store).ok
    with sqlite3.connect(tmp_path / "store" / "catalog.sqlite") as connection:
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute(fault)
    connection.close()
    with hw.open(tmp_path / "store", upkeep=False) as store:
        messages = [problem.message for problem in check_store(store).problems]
    assert messages and any(said in message for message in messages), messages


# Lineage, without a store.


def row(number: int, start: float, end: float, made: int = 0, sealed: int | None = None) -> SegmentRow:
    keys = KeyRange(int(start * KEY_SPACE), int(end * KEY_SPACE))
    return SegmentRow(number, number + 10, keys, made, 0, sealed, None if sealed is None else 1, 0, 0, 0, 0, 0, 0)


FIRST = [row(0, 0, 0.5, 0, 1), row(1, 0.5, 1)]
SPLIT = [*FIRST, row(2, 0, 0.25, 1), row(3, 0.25, 0.5, 1)]
MERGED = [row(0, 0, 0.5, 0, 1), row(1, 0.5, 1, 0, 1), row(2, 0, 1, 1)]
ROLLED = [row(0, 0, 1, 0, 1), row(1, 0, 1, 1, 1), row(2, 0, 1, 1)]


@pytest.mark.parametrize(
    ("rows", "epoch", "is_sealed", "next_segment"),
    [
        ([row(0, 0, 1)], 0, False, 1),
        (SPLIT, 1, False, 4),
        (SPLIT[1:], 1, False, 4),
        (MERGED, 1, False, 3),
        (MERGED[1:], 1, False, 3),
        (MERGED[2:], 1, False, 3),
        (ROLLED, 1, False, 3),
        (ROLLED[1:], 1, False, 3),
        ([row(0, 0, 0.5, 0, 1), row(1, 0.5, 1, 0, 1)], 0, True, 2),
    ],
    ids=["one", "split", "split-truncated", "merged", "merged-cut", "merged-truncated", "rolled", "rolled-truncated", "sealed"],
)
def test_segments_that_tile_have_no_faults(rows: list[SegmentRow], epoch: int, is_sealed: bool, next_segment: int) -> None:
    assert find_lineage_faults(rows, epoch=epoch, is_sealed=is_sealed, next_segment=next_segment) == []


@pytest.mark.parametrize(
    ("rows", "epoch", "is_sealed", "next_segment", "said"),
    [
        ([], 0, False, 1, "it has no segments"),
        ([row(0, 0, 0.5)], 0, False, 1, "don't cover the whole key space"),
        ([row(0, 0, 0.6), row(1, 0.5, 1)], 0, False, 2, "segments 0 and 1 of epoch 0 cover the same keys"),
        (SPLIT[:3], 1, False, 4, "have no successors for some of their keys"),
        ([*FIRST, row(2, 0, 0.75, 1), row(3, 0.75, 1, 1)], 1, False, 4, "cover the same keys"),
        ([row(0, 0, 1)], 0, True, 1, "segment 0 is open, but the stream is sealed"),
        ([row(0, 0, 1, 2)], 1, False, 1, "was made in epoch 2"),
        ([row(5, 0, 1)], 0, False, 5, "the next one to be made would be 5"),
        ([row(0, 0, 0.5, 0, 1), row(1, 0.5, 1), row(2, 0.25, 0.5, 1), row(3, 0, 0.25, 0)], 1, False, 4, "cover the same keys"),
    ],
)
def test_segments_that_do_not_tile_are_found(rows: list[SegmentRow], epoch: int, is_sealed: bool, next_segment: int, said: str) -> None:
    faults = find_lineage_faults(rows, epoch=epoch, is_sealed=is_sealed, next_segment=next_segment)
    assert any(said in fault for fault in faults), faults


def _six_blocks(path: Path, catalog_url: str | None, monkeypatch: pytest.MonkeyPatch) -> hw.Store:
    """A store whose stream has six blocks of an event each, which are checked two at a time."""
    monkeypatch.setattr(numbers, "_SLICE_EXTENTS", 2)
    store = hw.open(path, catalog=catalog_url, upkeep=False)
    with store.create_stream("a/six").writer() as writer:
        for _ in range(6):
            writer.write(b"x").result()
    return store


def test_blocks_that_become_a_chunk_while_they_are_checked_are_no_fault(
    tmp_path: Path, catalog_url: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _six_blocks(tmp_path / "six", catalog_url, monkeypatch) as store:
        written: list[int] = []

        def tier(progress: Progress) -> None:
            if progress.done_bytes and not written:
                written.append(store.run_upkeep().chunks_written)

        report = check_store(store, tier)
        assert written == [1] and report.ok, report.problems
        assert check_store(store).blocks == 1


def test_blocks_that_overlap_are_found_also_where_a_slice_ends(
    tmp_path: Path, catalog_url: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _six_blocks(tmp_path / "six", catalog_url, monkeypatch) as store:
        for fault in ("DELETE FROM extent WHERE first = 3", "UPDATE extent SET count = 2 WHERE first IN (1, 2)"):
            store._engine.database.write(lambda tx, fault=fault: tx.run(fault))  # type: ignore[misc]
        assert "overlap" in {problem.kind for problem in check_store(store).problems}
