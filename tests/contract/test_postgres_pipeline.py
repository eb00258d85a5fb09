"""Statements in one round trip: values come back as they went, errors end what is behind them, and nobody waits for each other for ever."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import psycopg
import pyarrow as pa
import pytest

import headwater as hw
from headwater.catalog.database import Row, Statement
from headwater.catalog.pgpipeline import Pipeline
from headwater.catalog.postgres import PostgresChanges

# It takes a server: not for a quick run.
pytestmark = pytest.mark.slow


@pytest.fixture
def pipeline(postgres_url: str) -> Iterator[Pipeline]:
    pipeline = Pipeline(psycopg.connect(postgres_url, autocommit=True))
    yield pipeline
    pipeline.close()


@pytest.mark.parametrize("value", [0, -1, 2**62, "", "naïve ✓", "?", b"", bytes(range(256)), 0.5, None])
def test_a_value_comes_back_as_it_went(pipeline: Pipeline, value: object) -> None:
    kind = {int: "BIGINT", str: "TEXT", bytes: "BYTEA", float: "FLOAT8"}.get(type(value), "BIGINT")
    for _ in range(5):  # It is prepared on the way.
        assert pipeline.run([(f"SELECT CAST(? AS {kind}), 1", (value,))]) == [[(value, 1)]]


def test_text_that_postgresql_does_not_take_is_an_error_and_not_cut_short(pipeline: Pipeline) -> None:
    with pytest.raises(psycopg.Error, match="0x00"):
        pipeline.run([("SELECT CAST(? AS TEXT)", ("a\0b",))])
    assert pipeline.run([("SELECT 1", ())]) == [[(1,)]]


def test_each_statement_has_its_rows(pipeline: Pipeline) -> None:
    for _ in range(5):
        answers = pipeline.run([("BEGIN", ()), ("SELECT CAST(? AS BIGINT)", (1,)), ("SELECT 1 WHERE false", ()), ("COMMIT", ())])
        assert answers == [[], [(1,)], [], []]


def test_an_error_ends_what_is_behind_it(pipeline: Pipeline) -> None:
    pipeline.run([("CREATE TABLE t (n BIGINT)", ())])
    for _ in range(5):
        with pytest.raises(psycopg.errors.DivisionByZero):
            pipeline.run([("BEGIN", ()), ("INSERT INTO t VALUES (?)", (1,)), ("SELECT 1 / 0", ()), ("COMMIT", ())])
        assert pipeline.is_open and not pipeline.is_idle
        pipeline.run([("ROLLBACK", ())])
        assert pipeline.is_idle
        assert pipeline.run([("INSERT INTO t VALUES (?)", (2,)), ("SELECT count(*) FROM t WHERE n = 1", ())]) == [[], [(0,)]]


def test_what_goes_in_one_round_trip_is_a_transaction_by_itself(pipeline: Pipeline) -> None:
    pipeline.run([("CREATE TABLE t (n BIGINT)", ())])
    with pytest.raises(psycopg.errors.DivisionByZero):
        pipeline.run([("INSERT INTO t VALUES (?)", (1,)), ("SELECT 1 / 0", ())])
    assert pipeline.is_idle
    assert pipeline.run([("INSERT INTO t VALUES (?)", (2,)), ("SELECT sum(n) FROM t", ())]) == [[], [(2,)]]


def test_what_goes_behind_is_run_and_nobody_waits_for_it_or_hears_of_its_errors(pipeline: Pipeline) -> None:
    pipeline.run([("CREATE TABLE t (n BIGINT)", ())])
    for number in range(5):  # It is prepared on the way.
        assert pipeline.run([("SELECT CAST(? AS BIGINT)", (number,))], behind=("INSERT INTO t VALUES (?)", (number,))) == [[(number,)]]
        assert pipeline.is_idle
    assert pipeline.run([("SELECT count(*) FROM t", ())]) == [[(5,)]]
    begun = time.monotonic()
    pipeline.run([("SELECT 1", ())], behind=("SELECT pg_sleep(1)", ()))
    assert time.monotonic() - begun < 0.9
    pipeline.run([("SELECT 1", ())], behind=("SELECT 1 / 0", ()))
    with pytest.raises(psycopg.errors.DivisionByZero):
        pipeline.run([("INSERT INTO t VALUES (5)", ()), ("SELECT 1 / 0", ())], behind=("INSERT INTO t VALUES (6)", ()))
    assert pipeline.is_idle
    assert pipeline.run([("SELECT max(n), count(*) FROM t", ())]) == [[(6, 6)]]
    assert pipeline.run([("BEGIN", ()), ("SELECT 1", ())]) == [[], [(1,)]] and not pipeline.is_idle


def test_what_goes_behind_a_transaction_that_failed_does_no_harm(pipeline: Pipeline) -> None:
    pipeline.run([("CREATE TABLE t (n BIGINT)", ())])
    behind = "INSERT INTO t VALUES (?)", (1,)
    for _ in range(5):  # It would be prepared on the way, and can't be in there.
        with pytest.raises(psycopg.errors.DivisionByZero):
            pipeline.run([("BEGIN", ()), ("SELECT 1 / 0", ()), ("COMMIT", ())], behind)
        assert pipeline.is_open and not pipeline.is_idle
        pipeline.run([("ROLLBACK", ())])
        assert pipeline.is_idle
    for number in range(5):
        assert pipeline.run([("BEGIN", ()), ("SELECT count(*) FROM t", ()), ("COMMIT", ())], behind) == [[], [(number,)], []]
        assert pipeline.is_idle


def test_much_in_both_directions_does_not_stand_still(pipeline: Pipeline) -> None:
    # Were it all sent before anything is read, the server would wait for us to read, and we for it.
    pipeline.run([("CREATE TABLE t (data BYTEA)", ()), ("INSERT INTO t VALUES (?)", (bytes(4_000_000),))])
    both = [("SELECT data FROM t LIMIT 1", ()), ("INSERT INTO t VALUES (?)", (bytes(4_000_000),))]
    answers = pipeline.run(both * 8)
    assert [len(rows) for rows in answers] == [1, 0] * 8


def test_a_connection_that_ends_is_an_error_and_closed(pipeline: Pipeline, postgres_url: str) -> None:
    with psycopg.connect(postgres_url, autocommit=True) as other:
        other.execute("SELECT pg_terminate_backend(%s)", (pipeline.connection.info.backend_pid,))
    with pytest.raises(psycopg.OperationalError):
        for _ in range(100):
            pipeline.run([("SELECT 1", ())])
            time.sleep(0.05)
    assert not pipeline.is_open


def test_a_connection_that_was_interrupted_is_not_used_again(pipeline: Pipeline) -> None:
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        pipeline.run([("SELECT pg_sleep(30)", ())])
    assert not pipeline.is_open


def test_one_event_at_a_time_is_one_round_trip_each(postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hw.open(tmp_path, catalog=postgres_url, upkeep=False) as store:
        stream = store.create_stream("s/one")
        trips: list[list[str]] = []
        run = Pipeline.run

        def counted(pipeline: Pipeline, statements: Iterable[Statement], behind: Statement | None = None) -> list[list[Row]]:
            statements = list(statements)
            if "pg_notify" not in statements[0][0]:
                trips.append([sql for sql, _ in statements])
            return run(pipeline, statements, behind)

        with stream.writer() as writer:
            writer.write(b"before").result()
            with store.transaction() as tx:
                tx.write("s/one", b"before")
            monkeypatch.setattr(Pipeline, "run", counted)
            for _ in range(3):
                writer.write(b"written").result()
                with store.transaction() as tx:
                    tx.write("s/one", b"committed")
            monkeypatch.undo()
        assert len(trips) == 6 and all(any("INSERT INTO extent" in sql for sql in trip) for trip in trips)
        assert [event.value for event in stream.read()] == [b"before"] * 2 + [b"written", b"committed"] * 3


def _notices(url: str) -> Iterator[str]:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("LISTEN headwater")
        yield "listening"
        for notice in connection.notifies(timeout=10):
            yield notice.payload


def test_the_notice_of_a_commit_goes_behind_it_and_says_where_to_look(postgres_url: str, tmp_path: Path) -> None:
    with hw.open(tmp_path, catalog=postgres_url, upkeep=False) as store:
        stream = store.create_stream("s/one", scaling=hw.Scaling.fixed(3))
        with stream.writer() as writer:
            writer.write(b"first").result()
            time.sleep(0.1)
            notices = _notices(postgres_url)
            assert next(notices) == "listening"
            for number in range(5):
                place = writer.write(b"a secret", key=number).result()
                where = f"{store.id}/{stream._ref.id}/{place.segment}"
                # Others are of what was before, or of several at once.
                payload = next(payload for payload in notices if where in payload.split())
                assert "secret" not in payload and len(payload.split()) % 2 == 0


def test_a_flush_to_many_segments_is_two_round_trips_and_its_notice_goes_behind(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hw.open(tmp_path, catalog=postgres_url, upkeep=False) as store:
        stream = store.create_stream("s/many", scaling=hw.Scaling.fixed(16))
        trips: list[tuple[list[str], Statement | None]] = []
        run = Pipeline.run

        def counted(pipeline: Pipeline, statements: Iterable[Statement], behind: Statement | None = None) -> list[list[Row]]:
            statements = list(statements)
            trips.append(([sql for sql, _ in statements], behind))
            return run(pipeline, statements, behind)

        with stream.writer() as writer:
            batch = pa.table({"value": [b"x" * 100] * 1000, "key": range(1000)})
            writer.write_batch(batch, key="key").result()
            time.sleep(0.1)
            monkeypatch.setattr(Pipeline, "run", counted)
            writer.write_batch(batch, key="key").result()
            monkeypatch.undo()
        (locks, nothing), (changes, notice) = trips
        assert nothing is None and sum("FOR UPDATE" in sql for sql in locks) == 2
        assert sum("UPDATE segment" in sql for sql in changes) == sum("INSERT INTO extent" in sql for sql in changes) == 1
        assert notice is not None and len(notice[1][1].split()) == 2 * 16, "it names all segments"
        assert sum(segment.events for segment in stream.segments()) == 2000


def test_a_segment_whose_notices_are_lost_is_read_while_another_has_news_all_the_time(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = count()
    monkeypatch.setattr(PostgresChanges, "heard", lambda self, key: str(next(numbers)) if key.endswith("/1") else None)
    with hw.open(tmp_path, catalog=postgres_url) as store, ThreadPoolExecutor() as pool:
        stream = store.create_stream("s/one", scaling=hw.Scaling.fixed(8))
        with stream.writer() as writer:
            key = next(key for key in range(1000) if writer.write(b"elsewhere", key=key).result().segment == 0)
            events = stream.read("tail", follow=True)
            found = pool.submit(next, events)
            writer.write(b"quiet", key=key).result()
        try:
            assert found.result(20).value == b"quiet"
        finally:
            stream.seal()  # which ends a follower that waits for ever
