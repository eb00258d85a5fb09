"""What every catalog promises: numbers become visible in order and without gaps, a flush is committed once, a fenced session never."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import psycopg
import pytest
from psycopg import sql

import headwater as hw
from headwater.catalog import extents, flushes, leases, schema, segments, sessions, streams, tiers, writers
from headwater.catalog.conditions import TailIs
from headwater.catalog.database import Database, Tx
from headwater.catalog.extents import PARQUET
from headwater.catalog.flushes import Flush
from headwater.catalog.operations import DatabaseRunner
from headwater.catalog.parts import Append, Part, PartResult, Refused, Stored, Term
from headwater.catalog.postgres import PostgresDatabase
from headwater.catalog.sqlite import SqliteDatabase
from headwater.catalog.tiers import NewExtent
from headwater.catalog.writers import WriterIs
from headwater.errors import ConflictError, CorruptDataError, FencedError, InvalidRequestError, NotFoundError, SealedError
from headwater.model.keys import WHOLE
from headwater.model.names import StreamName
from tests.operations import fence_all

T = TypeVar("T")
WAIT_SECONDS = 60.0
#: How long something that must not happen is given to happen.
MOMENT_SECONDS = 0.2


class Catalog:
    """One catalog that may be opened several times, as by several processes."""

    def __init__(self, path: Path, url: str | None) -> None:
        self.dialect = "postgresql" if url else "sqlite"
        self._path, self._url = path, url
        self._opened: list[Database] = []

    def open(self, *, create: bool = True) -> Database:
        database: Database = PostgresDatabase(self._url) if self._url else SqliteDatabase(str(self._path))
        self._opened.append(database)
        schema.open_catalog(database, self.dialect, create=create)
        return database

    def close(self) -> None:
        for database in self._opened:
            database.close()


@pytest.fixture(params=["at once", pytest.param("part by part", marks=pytest.mark.slow)], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A flush of one block is committed in one round trip; what is promised must not depend on that."""
    if request.param == "part by part":
        monkeypatch.setattr(flushes, "_commit_one", lambda *_: None)
    return str(request.param)


@pytest.fixture
def catalog(tmp_path: Path, catalog_url: str | None) -> Iterator[Catalog]:
    found = Catalog(tmp_path / "catalog.sqlite", catalog_url)
    yield found
    found.close()


@pytest.fixture
def database(catalog: Catalog) -> Database:
    return catalog.open()


def make_stream(database: Database, name: str = "x", count: int = 1) -> int:
    row = database.write(
        lambda tx: streams.create_stream(
            tx, StreamName("s", name), kind="events", segments=count, scaling="{}", retention="{}", schema=b"", labels=()
        )
    )
    assert row is not None
    return row.id


def begin(database: Database) -> int:
    return database.write(lambda tx: sessions.begin_session(tx, "test"))


def append(stream: int, segment: int, count: int, data: bytes = b"block") -> Append:
    return Append(stream, segment, count, len(data), 0, None, 0, data)


def part(stream: int, *counts: tuple[int, int], terms: Sequence[Term] = ()) -> Part:
    """A part with `count` events for each (segment, count)."""
    return Part(tuple(append(stream, segment, count) for segment, count in counts), tuple(terms))


def part_at(stream: int, tail: int, count: int) -> Part:
    """A part for the first segment, which must end at `tail`."""
    return part(stream, (0, count), terms=[TailIs(stream, 0, tail)])


def commit(database: Database, session: int, number: int, *parts: Part) -> list[PartResult]:
    return DatabaseRunner(database).run(flushes.commit_flush, Flush(session, number, parts))


def firsts(result: PartResult) -> tuple[int, ...]:
    assert isinstance(result, Stored), result
    return result.firsts


def rows_of(database: Database, stream: int) -> list[segments.SegmentRow]:
    return database.read(lambda tx: segments.list_segments(tx, stream))


def tails(database: Database, stream: int) -> list[int]:
    return [row.tail for row in rows_of(database, stream)]


def numbers_seen(database: Database, stream: int) -> list[tuple[int, int]]:
    """(first, count) of every extent of a stream's first segment, in one look."""
    log = rows_of(database, stream)[0].log
    return [(extent.first, extent.count) for extent in extents.plan(database, log, 0, 1 << 62, 100_000)]


@contextmanager
def in_thread(call: Callable[[], T]) -> Iterator[Callable[[], T]]:
    """Run a call beside the block; the block's value waits for its result."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(call)
        yield lambda: future.result(WAIT_SECONDS)


# Order.


def test_a_commit_that_came_second_is_never_seen_first(catalog: Catalog) -> None:
    """The classic mistake on PostgreSQL: a number is taken, another transaction takes the next one and commits earlier."""
    first, second, reader = catalog.open(), catalog.open(), catalog.open()
    stream = make_stream(first)
    one, two = begin(first), begin(second)
    applied, go_on = threading.Event(), threading.Event()

    def hold(tx: Tx) -> list[PartResult]:
        results = flushes.apply_flush(tx, Flush(one, 1, (part(stream, (0, 3)),)))
        applied.set()
        assert go_on.wait(WAIT_SECONDS)
        return results

    with in_thread(lambda: first.write(hold, repeatable=True)) as first_result:
        assert applied.wait(WAIT_SECONDS)
        ended = threading.Event()

        def follow() -> list[PartResult]:
            try:
                return commit(second, two, 1, part(stream, (0, 2)))
            finally:
                ended.set()

        with in_thread(follow) as second_result:
            assert not ended.wait(MOMENT_SECONDS), "the second commit did not wait for the first"
            assert numbers_seen(reader, stream) == []
            assert tails(reader, stream) == [0]
            go_on.set()
            assert firsts(second_result()[0]) == (3,)
        assert firsts(first_result()[0]) == (0,)
    assert numbers_seen(reader, stream) == [(0, 3), (3, 2)]


@pytest.mark.slow
def test_with_many_committers_at_once_every_look_is_gapless(catalog: Catalog) -> None:
    stream = make_stream(catalog.open())
    flushes, committers = 40, 3
    done = threading.Event()

    def write() -> None:
        database = catalog.open()
        session = begin(database)
        for number in range(1, flushes + 1):
            commit(database, session, number, part(stream, (0, 1 + number % 3)))

    def look() -> int:
        database, looks = catalog.open(), 0
        while not done.is_set():
            at = 0
            for first, count in numbers_seen(database, stream):
                assert first == at
                at += count
            looks += 1
        return looks

    with in_thread(look) as looks, ThreadPoolExecutor(committers) as pool:
        try:
            for future in [pool.submit(write) for _ in range(committers)]:
                future.result(WAIT_SECONDS)
        finally:
            done.set()
        assert looks() > 1
    expected = committers * sum(1 + number % 3 for number in range(1, flushes + 1))
    assert tails(catalog.open(), stream) == [expected]
    assert sum(count for _, count in numbers_seen(catalog.open(), stream)) == expected


def test_flushes_that_touch_the_same_segments_in_opposite_order_both_finish(catalog: Catalog) -> None:
    first, second = catalog.open(), catalog.open()
    left, right = make_stream(first, "left", 3), make_stream(first, "right", 3)
    rounds = 15

    def write(database: Database, *order: int) -> None:
        session = begin(database)
        for number in range(1, rounds + 1):
            results = commit(database, session, number, *(part(stream, (2, 1), (0, 1)) for stream in order))
            assert all(isinstance(result, Stored) for result in results)

    with in_thread(lambda: write(first, left, right)) as one, in_thread(lambda: write(second, right, left)) as two:
        one()
        two()
    assert tails(first, left) == tails(first, right) == [2 * rounds, 0, 2 * rounds]


def test_append_times_never_decrease_in_a_segment(tmp_path: Path) -> None:
    now = [1_000_000]
    database = SqliteDatabase(str(tmp_path / "catalog.sqlite"), now_us=lambda: now[0])
    schema.open_catalog(database, "sqlite", create=True)
    stream, session = make_stream(database), begin(database)
    commit(database, session, 1, part(stream, (0, 1)))
    now[0] = 500_000  # the clock was set back
    result = commit(database, session, 2, part(stream, (0, 1)))[0]
    assert isinstance(result, Stored) and result.appended_at == 1_000_000
    made = database.write(lambda tx: segments.replace_segments(tx, stream, epoch=0, seal=[0], ranges=WHOLE.split(2)))
    assert all(row.made_at > 1_000_000 for row in rows_of(database, stream) if row.number in made)
    result = commit(database, session, 3, part(stream, (made[0], 1)))[0]
    assert isinstance(result, Stored) and result.appended_at > 1_000_000
    database.close()


# One flush, once.


def test_the_same_flush_again_gets_the_same_answer_and_changes_nothing(database: Database) -> None:
    stream, session = make_stream(database, count=2), begin(database)
    flush = [part(stream, (0, 3), (1, 1)), part_at(stream, 99, 2), part(stream, (0, 2))]
    first = commit(database, session, 1, *flush)
    assert [type(result) for result in first] == [Stored, Refused, Stored]
    assert commit(database, session, 1, *flush) == first
    assert tails(database, stream) == [5, 1]


def test_a_repeated_flush_is_answered_also_after_its_extents_were_truncated(database: Database) -> None:
    stream, session = make_stream(database), begin(database)
    first = commit(database, session, 1, part(stream, (0, 3)))
    log = rows_of(database, stream)[0].log
    database.write(lambda tx: segments.advance_heads(tx, stream, {0: 3}, []))
    assert database.write(lambda tx: extents.delete_extents_below(tx, log, 3, 100)) == 1
    assert commit(database, session, 1, part(stream, (0, 3))) == first
    assert tails(database, stream) == [3] and numbers_seen(database, stream) == []


def test_a_repeated_flush_is_answered_also_after_its_segments_were_dropped(database: Database) -> None:
    stream, session = make_stream(database), begin(database)
    first = commit(database, session, 1, part(stream, (0, 3)))
    database.write(lambda tx: segments.replace_segments(tx, stream, epoch=0, seal=[0], ranges=WHOLE.split(2)))
    database.write(lambda tx: segments.advance_heads(tx, stream, {}, [0]))
    assert commit(database, session, 1, part(stream, (0, 3))) == first
    assert [row.number for row in rows_of(database, stream)] == [1, 2]


def test_a_repeated_flush_is_answered_also_after_its_session_was_fenced(database: Database) -> None:
    stream, session = make_stream(database), begin(database)
    first = commit(database, session, 1, part(stream, (0, 3)))
    assert fence_all(database) == [session]
    assert commit(database, session, 1, part(stream, (0, 3))) == first
    with pytest.raises(FencedError, match="nothing of its flush 2 was stored"):
        commit(database, session, 2, part(stream, (0, 3)))
    assert tails(database, stream) == [3]


def test_a_fenced_session_can_not_commit_and_not_be_renewed(catalog: Catalog) -> None:
    database, other = catalog.open(), catalog.open()
    stream, session = make_stream(database), begin(database)
    assert database.write(lambda tx: sessions.renew_session(tx, session))
    assert other.write(lambda tx: sessions.fence_expired_sessions(tx)) == [], "a session in use is left alone"
    assert fence_all(other) == [session]
    assert not database.write(lambda tx: sessions.renew_session(tx, session))
    with pytest.raises(FencedError):
        commit(database, session, 1, part(stream, (0, 1)))
    assert numbers_seen(database, stream) == [] and tails(database, stream) == [0]


def test_a_session_that_never_was_can_not_commit(database: Database) -> None:
    stream = make_stream(database)
    with pytest.raises(FencedError):
        commit(database, 999, 1, part(stream, (0, 1)))


# Parts.


def test_a_part_that_fails_is_left_out_and_the_others_commit(database: Database) -> None:
    stream, sealed, session = make_stream(database, "x", 2), make_stream(database, "sealed"), begin(database)
    database.write(lambda tx: streams.seal_stream(tx, sealed))
    generation, _ = database.write(lambda tx: writers.open_writer(tx, stream, "w"))
    results = commit(
        database,
        session,
        1,
        part(stream, (0, 2)),
        part(sealed, (0, 1)),
        part(stream, (0, 1), terms=[WriterIs(stream, "w", generation - 1, 0, 5)]),
        part(stream, (1, 1), terms=[WriterIs(stream, "nobody", 1, 0, 5)]),
        part(stream, (0, 1), (7, 1)),
        part(stream, (0, 4), (1, 1)),
    )
    assert [getattr(result, "reason", None) for result in results] == [None, "sealed", "fenced", "deleted", "sealed", None]
    assert firsts(results[0]) == (0,) and firsts(results[-1]) == (2, 0)
    assert tails(database, stream) == [6, 1] and tails(database, sealed) == [0]
    assert [count for _, count in numbers_seen(database, stream)] == [2, 4]


def test_each_part_sees_the_tails_left_by_the_ones_before(database: Database) -> None:
    stream, session = make_stream(database), begin(database)
    results = commit(
        database,
        session,
        1,
        part_at(stream, 0, 2),
        part_at(stream, 0, 1),
        part_at(stream, 2, 1),
        part(stream, (0, 1)),
    )
    assert results[1] == Refused("moved", {"found": 2}, 0)
    assert [firsts(result) for result in (results[0], results[2], results[3])] == [(0,), (2,), (3,)]


def test_an_append_with_an_expected_tail_succeeds_only_there(catalog: Catalog) -> None:
    first, second = catalog.open(), catalog.open()
    stream = make_stream(first)
    one, two = begin(first), begin(second)
    assert firsts(commit(first, one, 1, part_at(stream, 0, 1))[0]) == (0,)
    assert commit(second, two, 1, part_at(stream, 0, 1)) == [Refused("moved", {"found": 1}, 0)]
    assert firsts(commit(second, two, 2, part_at(stream, 1, 1))[0]) == (1,)


def test_a_part_touches_all_its_segments_or_none(database: Database) -> None:
    stream, session = make_stream(database, count=2), begin(database)
    database.write(lambda tx: segments.replace_segments(tx, stream, epoch=0, seal=[1], ranges=WHOLE.split(2)[1:]))
    assert commit(database, session, 1, part(stream, (0, 1), (1, 1))) == [Refused("sealed", {})]
    assert tails(database, stream) == [0, 0, 0]


def test_many_segments_are_locked_in_one_flush(database: Database) -> None:
    stream, session = make_stream(database, count=300), begin(database)
    result = commit(database, session, 1, part(stream, *((segment, 1) for segment in range(300))))[0]
    assert firsts(result) == (0,) * 300
    assert tails(database, stream) == [1] * 300


def test_a_block_for_a_segment_that_is_sealed_or_gone_is_refused_and_leaves_nothing(database: Database) -> None:
    stream, session = make_stream(database), begin(database)
    commit(database, session, 1, part(stream, (0, 2)))
    database.write(lambda tx: segments.replace_segments(tx, stream, epoch=0, seal=[0], ranges=[WHOLE]))
    before = rows_of(database, stream)
    assert commit(database, session, 2, part(stream, (0, 3))) == [Refused("sealed", {})]
    assert commit(database, session, 3, part(stream, (7, 3))) == [Refused("sealed", {})]
    assert commit(database, session, 4, part(stream + 1, (0, 3))) == [Refused("sealed", {})]
    assert rows_of(database, stream) == before and numbers_seen(database, stream) == [(0, 2)]
    assert firsts(commit(database, session, 5, part(stream, (1, 3)))[0]) == (0,)


# Named writers.


def test_a_writer_s_number_and_generation_are_kept_with_its_events(database: Database) -> None:
    stream, session = make_stream(database), begin(database)
    first, number = database.write(lambda tx: writers.open_writer(tx, stream, "w"))
    assert number == 0
    commit(database, session, 1, part(stream, (0, 2), terms=[WriterIs(stream, "w", first, 0, 17)]))
    second, number = database.write(lambda tx: writers.open_writer(tx, stream, "w"))
    assert second > first and number == 17
    late = part(stream, (0, 2), terms=[WriterIs(stream, "w", first, 17, 18)])
    assert commit(database, session, 2, late) == [Refused("fenced", {"generation": second}, 0)]
    assert database.read(lambda tx: writers.list_writers(tx, stream)) == [("w", 17)]
    with pytest.raises(NotFoundError):
        database.write(lambda tx: writers.open_writer(tx, 999, "w"))


# Epochs.


def test_of_two_scales_from_one_epoch_the_second_changes_nothing(catalog: Catalog) -> None:
    first, second = catalog.open(), catalog.open()
    stream = make_stream(first)

    def scale(database: Database, parts: int) -> list[int]:
        return database.write(lambda tx: segments.replace_segments(tx, stream, epoch=0, seal=[0], ranges=WHOLE.split(parts)))

    assert scale(first, 2) == [1, 2]
    before = rows_of(first, stream)
    with pytest.raises(ConflictError, match="scaled by another process"):
        scale(second, 3)
    assert rows_of(second, stream) == before
    assert [row.number for row in before if row.is_open] == [1, 2]


def test_of_many_scales_at_once_exactly_one_wins(catalog: Catalog) -> None:
    stream = make_stream(catalog.open())
    databases = [catalog.open() for _ in range(4)]
    barrier = threading.Barrier(len(databases))

    def scale(database: Database) -> bool:
        barrier.wait(WAIT_SECONDS)
        try:
            database.write(lambda tx: segments.replace_segments(tx, stream, epoch=0, seal=[0], ranges=WHOLE.split(2)))
        except ConflictError:
            return False
        return True

    with ThreadPoolExecutor(len(databases)) as pool:
        assert sorted(pool.map(scale, databases)) == [False, False, False, True]
    assert [row.number for row in rows_of(databases[0], stream)] == [0, 1, 2]


def test_a_sealed_or_deleted_stream_is_not_scaled(database: Database) -> None:
    stream = make_stream(database)
    database.write(lambda tx: streams.seal_stream(tx, stream))
    with pytest.raises(SealedError):
        database.write(lambda tx: segments.replace_segments(tx, stream, epoch=0, seal=[0], ranges=[WHOLE]))
    database.write(lambda tx: streams.delete_stream(tx, stream))
    with pytest.raises(NotFoundError):
        database.write(lambda tx: segments.replace_segments(tx, stream, epoch=0, seal=[0], ranges=[WHOLE]))


# Transactions, ids, format.


def test_what_work_raises_rolls_everything_back(database: Database) -> None:
    stream, session = make_stream(database), begin(database)

    def work(tx: Tx) -> None:
        flushes.apply_flush(tx, Flush(session, 1, (part(stream, (0, 1)),)))
        raise RuntimeError("user code")

    with pytest.raises(RuntimeError, match="user code"):
        database.write(work)
    assert tails(database, stream) == [0] and numbers_seen(database, stream) == []
    assert firsts(commit(database, session, 1, part(stream, (0, 1)))[0]) == (0,)


def test_a_look_is_consistent_whatever_is_committed_meanwhile(catalog: Catalog) -> None:
    database, other = catalog.open(), catalog.open()
    left, right = make_stream(database, "left"), make_stream(database, "right")
    session = begin(other)

    def look(tx: Tx) -> list[int]:
        first = [row.tail for row in segments.list_segments(tx, left)]
        commit(other, session, 1, part(left, (0, 1)), part(right, (0, 1)))
        return first + [row.tail for row in segments.list_segments(tx, right)]

    assert database.read(look) == [0, 0]
    assert tails(database, left) == tails(database, right) == [1]


def test_ids_are_never_used_again(database: Database) -> None:
    first = make_stream(database)
    log = rows_of(database, first)[0].log
    database.write(lambda tx: streams.seal_stream(tx, first))
    database.write(lambda tx: streams.delete_stream(tx, first))
    second = make_stream(database)
    assert second > first
    assert rows_of(database, second)[0].log > log


def test_extents_are_deleted_only_wholly_below_a_number_and_in_slices(database: Database) -> None:
    stream, session = make_stream(database), begin(database)
    for number in range(1, 6):
        commit(database, session, number, part(stream, (0, 2)))
    log = rows_of(database, stream)[0].log

    def delete(below: int, limit: int) -> int:
        return database.write(lambda tx: extents.delete_extents_below(tx, log, below, limit))

    assert delete(1, 100) == 0
    assert delete(7, 2) == 2
    assert delete(7, 100) == 1
    assert numbers_seen(database, stream) == [(6, 2), (8, 2)]


def test_the_password_of_the_catalog_is_in_no_message(postgres_url: str) -> None:
    with_user = postgres_url.replace("postgres@", "postgres:geheim@")
    for url in (with_user, postgres_url + "&password=geheim"):
        database = PostgresDatabase(url)
        with pytest.raises(NotFoundError) as caught:
            schema.open_catalog(database, "postgresql", create=False)
        database.close()
        assert "geheim" not in str(caught.value)


OPEN = "import sys, headwater as hw; print(hw.open(sys.argv[1], catalog=sys.argv[2] or None).id)"


@pytest.mark.slow
def test_of_processes_that_create_one_store_at_once_all_get_the_same(tmp_path: Path, catalog_url: str | None) -> None:
    command = [sys.executable, "-c", OPEN, str(tmp_path / "store"), catalog_url or ""]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    answers = [process.communicate(timeout=WAIT_SECONDS) for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, answers
    assert len({out for out, _ in answers}) == 1


def test_commits_are_durable_whatever_the_server_is_set_to(postgres_url: str, tmp_path: Path) -> None:
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        name = connection.info.dbname
        connection.execute(sql.SQL("ALTER DATABASE {} SET synchronous_commit = off").format(sql.Identifier(name)))
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        assert connection.execute("SHOW synchronous_commit").fetchone() == ("off",)
    with hw.open(tmp_path / "store", catalog=postgres_url, upkeep=False) as store:
        database = store._engine.database
        assert database.write(lambda tx: tx.run("SHOW synchronous_commit")) == [("on",)]


def test_a_scale_whose_successors_leave_out_keys_is_refused(database: Database) -> None:
    stream = make_stream(database)
    with pytest.raises(InvalidRequestError, match="cover exactly the keys"):
        database.write(lambda tx: segments.replace_segments(tx, stream, epoch=0, seal=[0], ranges=WHOLE.split(2)[:1]))
    assert [row.is_open for row in rows_of(database, stream)] == [True]


def test_a_scale_of_a_segment_that_was_sealed_without_a_new_epoch_names_the_damage(database: Database) -> None:
    stream = make_stream(database)
    database.write(lambda tx: tx.run("UPDATE segment SET sealed_epoch = 0, sealed_at = 0 WHERE stream = ?", (stream,)))
    with pytest.raises(CorruptDataError, match=r"segments \[0\] are not all open"):
        database.write(lambda tx: segments.replace_segments(tx, stream, epoch=0, seal=[0], ranges=[WHOLE]))


def test_a_chunk_that_holds_other_numbers_than_it_replaces_is_refused(database: Database) -> None:
    stream, session = make_stream(database), begin(database)
    commit(database, session, 1, part(stream, (0, 3)))
    assert DatabaseRunner(database).run(leases.take, session, "test", by_hand=True) is None
    log = rows_of(database, stream)[0].log
    old = DatabaseRunner(database).run(tiers.list_blocks, log, 0)
    short = NewExtent(0, 2, 10, 0, old[0].appended_at, 0, PARQUET, 10, old[0].appended_at)
    with pytest.raises(CorruptDataError, match="does not hold exactly events 0 to 2"):
        DatabaseRunner(database).run(tiers.swap, session, log, old, [short], (1, "chunk"))
    assert numbers_seen(database, stream) == [(0, 3)]
