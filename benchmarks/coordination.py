"""Transactions, shared state, tables and reader groups, beside the same rows in the bare database."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import apsw
import pyarrow as pa

import headwater as hw
from benchmarks.bench import Bench, Place
from benchmarks.processes import say_ready, started
from benchmarks.results import Goal, Result, at_least, at_most, in_turns, median_ratio, percentile
from headwater.catalog import transactions
from headwater.catalog.parts import Append
from headwater.catalog.transactions import Batch
from headwater.model.schemas import OPAQUE
from headwater.segments.block import Chunk
from headwater.segments.encoding import encode

_VALUE = bytes(100)
_PROCESSES = 8

Insert = Callable[[int], None]


@contextmanager
def _bare_rows(path: Path, url: str | None, *, is_numbered: bool = False) -> Iterator[Insert]:
    """Gives what inserts that many rows of a key and a value in one commit, as durable as headwater's.

    A stream's events are numbered without gaps, in the order of their commits; with `is_numbered` the rows are so, too, by a counter.
    """
    if url is None:
        path.mkdir(parents=True, exist_ok=True)
        connection = apsw.Connection(str(path / "bare.sqlite"))
        connection.set_busy_timeout(60_000)
        connection.execute(
            "PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL; "
            "CREATE TABLE IF NOT EXISTS bare (id INTEGER PRIMARY KEY, key BLOB, value BLOB); "
            "CREATE TABLE IF NOT EXISTS counter (id INTEGER PRIMARY KEY, next INTEGER); INSERT OR IGNORE INTO counter VALUES (1, 0)"
        ).fetchall()

        def insert(rows: int) -> None:
            connection.execute("BEGIN IMMEDIATE")
            if is_numbered:
                connection.execute("UPDATE counter SET next = next + ? WHERE id = 1", (rows,))
            connection.executemany("INSERT INTO bare (key, value) VALUES (?, ?)", [(b"key", _VALUE)] * rows)
            connection.execute("COMMIT")

        try:
            yield insert
        finally:
            connection.close()
        return
    import psycopg  # an extra

    with psycopg.connect(url, autocommit=True) as server:
        server.execute("CREATE TABLE IF NOT EXISTS bare (id BIGSERIAL PRIMARY KEY, key BYTEA, value BYTEA)")
        server.execute("CREATE TABLE IF NOT EXISTS counter (id BIGINT PRIMARY KEY, next BIGINT)")
        server.execute("CREATE TABLE IF NOT EXISTS numbered (number BIGINT PRIMARY KEY, key BYTEA, value BYTEA)")
        server.execute("INSERT INTO counter VALUES (1, 0) ON CONFLICT DO NOTHING")

        def insert_there(rows: int) -> None:
            if is_numbered:
                # In one statement, which is one round trip.
                assert rows == 1
                server.execute(
                    "WITH counted AS (UPDATE counter SET next = next + 1 WHERE id = 1 RETURNING next) "
                    "INSERT INTO numbered SELECT next, %s, %s FROM counted",
                    (b"key", _VALUE),
                )
                return
            with server.transaction():
                server.cursor().executemany("INSERT INTO bare (key, value) VALUES (%s, %s)", [(b"key", _VALUE)] * rows)

        yield insert_there


def _commit(store: hw.Store, events: int) -> None:
    with store.transaction() as tx:
        for _ in range(events):
            tx.write("bench/tx", _VALUE, key=b"key")


def _rate(call: Callable[[], object], count: int) -> float:
    begun = time.perf_counter()
    for _ in range(count):
        call()
    return count / (time.perf_counter() - begun)


def commits(bench: Bench) -> Iterator[Result]:
    """Transactions a second of 1 and of 1,000 events, by 1 and by 8 processes, beside commits of as many bare rows."""
    for catalog in bench.catalogs:
        for events, goal in ((1, at_least(0.5, of="ratio")), (1000, at_least(0.5, of="ratio"))):
            count = bench.sizes.commits if events == 1 else max(1, bench.sizes.commits // 10)
            with bench.place(catalog) as place, hw.open(place.url, catalog=place.catalog) as store:
                store.create_stream("bench/tx")
                with _bare_rows(Path(place.url), place.catalog) as insert:
                    _commit(store, events)
                    insert(events)
                    own, bare = in_turns(
                        bench.sizes.rounds,
                        partial(_rate, partial(_commit, store, events), count),
                        partial(_rate, partial(insert, events), count),
                    )
            yield _commits_result(catalog.name, events, 1, own, bare, goal)
            with bench.place(catalog) as place, ExitStack() as stack:
                with hw.open(place.url, catalog=place.catalog) as store:
                    store.create_stream("bench/tx")
                with _bare_rows(Path(place.url), place.catalog) as insert:
                    insert(1)
                pipes = [stack.enter_context(started(_commit_on_demand, place, events, count)) for _ in range(_PROCESSES)]
                ways = ["own", "bare", "numbered"] if events == 1 else ["own", "bare"]
                own, bare, *numbered = in_turns(max(1, bench.sizes.rounds // 2), *(partial(_all, pipes, way, count) for way in ways))
            yield _commits_result(catalog.name, events, _PROCESSES, own, bare, goal)
            for found in numbered:
                yield _commits_result(catalog.name, events, _PROCESSES, own, found, goal, "rows numbered without gaps")


def _commits_result(
    catalog: str, events: int, processes: int, own: Sequence[float], bare: Sequence[float], goal: Goal, beside: str = "bare rows"
) -> Result:
    variant = f"{catalog}, {events:,} event{'s' if events > 1 else ''}, {processes} process{'es' if processes > 1 else ''}"
    return Result(
        "transactions",
        variant,
        statistics.median(own),
        "commits/s",
        statistics.median(bare),
        beside,
        median_ratio(own, bare),
        goal,
    )


def _commit_on_demand(pipe: Connection, place: Place, events: int, count: int) -> None:
    path = Path(place.url)
    with (
        hw.open(place.url, catalog=place.catalog, create=False) as store,
        _bare_rows(path, place.catalog) as insert,
        _bare_rows(path, place.catalog, is_numbered=True) as insert_numbered,
    ):
        _commit(store, events)
        say_ready(pipe)
        ways = {"own": partial(_commit, store, events), "bare": partial(insert, events), "numbered": partial(insert_numbered, events)}
        _serve(pipe, {name: partial(_rate, way, count) for name, way in ways.items()})


def _serve(pipe: Connection, calls: dict[str, Callable[[], object]]) -> None:
    try:
        while True:
            calls[pipe.recv()]()
            pipe.send("done")
    except EOFError:
        return


def _all(pipes: Sequence[Connection], which: str, count: int) -> float:
    begun = time.perf_counter()
    for pipe in pipes:
        pipe.send(which)
    for pipe in pipes:
        pipe.recv()
    return len(pipes) * count / (time.perf_counter() - begun)


def large_commit(bench: Bench) -> Iterator[Result]:
    """One commit of 1 GB in 10,000 staged blocks, and how long another writer's event waits meanwhile.

    The blocks are staged as rows that name one stored object: what is measured is the commit, not the staging.
    """
    count = bench.sizes.staged_blocks
    for catalog in bench.catalogs:
        with bench.place(catalog) as place, hw.open(place.url, catalog=place.catalog) as store:
            stream = store.create_stream("bench/large")
            store.create_stream("bench/other")
            seconds: list[float] = []
            waits: list[float] = []
            with store.stream("bench/other").writer() as writer:
                writer.write(_VALUE).result()
                for _ in range(min(3, bench.sizes.rounds)):
                    tx = store.transaction()
                    _stage_blocks(store, stream, tx.id, count)
                    with _committed_meanwhile(tx) as committed:
                        while not committed or not waits:
                            begun = time.perf_counter()
                            writer.write(_VALUE).result()
                            waits.append(time.perf_counter() - begun)
                    seconds.append(committed[0])
        size = f"{count * 100_000 / 1e9:g} GB in {count:,} blocks"
        for what, found, bound in ((size, statistics.median(seconds), 500), ("others' p99 meanwhile", percentile(waits, 0.99), 1000)):
            goal = at_most(bound) if count >= 10_000 else None
            yield Result("large-commit", f"{catalog.name}, {what}", found * 1000, "ms", goal=goal)


def _stage_blocks(store: hw.Store, stream: hw.Stream, id: str, count: int) -> None:
    chunk = Chunk(pa.RecordBatch.from_arrays([pa.array([bytes(1000)] * 100, pa.binary())], schema=OPAQUE), None, None)
    block = encode([chunk], 1, True)
    key = f"txn/{id}/blocks.hwb"
    store._engine.storage.put(key, block.buffers())
    for start in range(0, count, 1000):
        appends = [Append(stream.id, 0, block.count, block.length, block.crc, None, 0, None) for _ in range(min(1000, count - start))]
        store._engine.run(transactions.stage, id, Batch(id=start + 1, appends=appends, object_key=key))


@contextmanager
def _committed_meanwhile(tx: hw.Transaction) -> Iterator[list[float]]:
    found: list[float] = []

    def commit() -> None:
        begun = time.perf_counter()
        tx.commit()
        found.append(time.perf_counter() - begun)

    thread = threading.Thread(target=commit)
    thread.start()
    try:
        yield found
    finally:
        thread.join()


def shared_state(bench: Bench) -> Iterator[Result]:
    """Updates a second of one counter, by 1 and by 8 processes; puts and gets of a table."""
    count = bench.sizes.commits
    for catalog in bench.catalogs:
        with bench.place(catalog) as place, hw.open(place.url, catalog=place.catalog) as store:
            counter = store.synchronizer("bench/counter", initial=0, apply=_add)
            table = store.table("bench/table")
            with _bare_rows(Path(place.url), place.catalog) as insert:
                own, puts, gets, bare = in_turns(
                    bench.sizes.rounds,
                    partial(_rate, partial(counter.update, _one), count),
                    partial(_rate, partial(_put, table), count),
                    partial(_rate, partial(table.get, "key 1"), count),
                    partial(_rate, partial(insert, 1), count),
                )
        for what, found in (("synchronizer, 1 process", own), ("table put", puts), ("table get", gets)):
            unit = "gets/s" if found is gets else "updates/s" if found is own else "puts/s"
            ratio = None if found is gets else median_ratio(found, bare)
            limit = None if found is gets else statistics.median(bare)
            yield Result("state", f"{catalog.name}, {what}", statistics.median(found), unit, limit, "bare rows" if limit else "", ratio)
        with bench.place(catalog) as place, ExitStack() as stack:
            with hw.open(place.url, catalog=place.catalog) as store:
                store.synchronizer("bench/counter", initial=0, apply=_add)
            share = max(1, count // _PROCESSES)
            pipes = [stack.enter_context(started(_update_on_demand, place, share)) for _ in range(_PROCESSES)]
            (rates,) = in_turns(max(1, bench.sizes.rounds // 2), partial(_all, pipes, "own", share))
        yield Result("state", f"{catalog.name}, synchronizer, {_PROCESSES} processes", statistics.median(rates), "updates/s")


def _one(state: int) -> list[int]:
    return [1]


def _put(table: hw.Table) -> None:
    table.put(f"key {time.monotonic_ns() % 1000}", _VALUE)


def _add(state: int, update: int) -> int:
    return state + update


def _update_on_demand(pipe: Connection, place: Place, count: int) -> None:
    with hw.open(place.url, catalog=place.catalog, create=False) as store:
        counter = store.synchronizer("bench/counter", initial=0, apply=_add)
        say_ready(pipe)
        _serve(pipe, {"own": partial(_rate, partial(counter.update, _one), count)})


def group_reading(bench: Bench) -> Iterator[Result]:
    """A reader of a group that takes everything as batches, beside `ranges().to_batches` of the same columns."""
    columns = ["value", "_key", "_time", "_stream", "_segment", "_number"]
    for variant, segments, place in bench.places():
        with hw.open(place.url, catalog=place.catalog) as store:
            stream = store.create_stream("bench/read", scaling=hw.Scaling.fixed(segments))
            with stream.writer() as writer:
                rows = 100_000
                batch = pa.table({"value": [_VALUE] * rows, "key": [f"user-{index % 1000}" for index in range(rows)]})
                for _ in range(max(1, 3 * bench.sizes.read_events // rows)):
                    writer.write_batch(batch, key="key")
            numbers = iter(range(1_000_000))

            def by_group(store: hw.Store = store, numbers: Iterator[int] = numbers) -> float:
                group = store.reader_group(f"group{next(numbers)}", ["bench/read"])
                left = group.lag().events
                with group.reader("reader", commit="manual") as reader:
                    begun = time.perf_counter()
                    total = left
                    while left:
                        found = reader.read_batch()
                        assert found is not None
                        left -= found.num_rows
                    reader.commit()
                    return float(total / (time.perf_counter() - begun))

            def by_ranges(stream: hw.Stream = stream) -> float:
                begun = time.perf_counter()
                total = sum(int(found.num_rows) for item in stream.ranges() for found in item.to_batches(columns))
                return total / (time.perf_counter() - begun)

            by_group()
            own, bare = in_turns(bench.sizes.rounds, by_group, by_ranges)
        yield Result(
            "groups",
            variant,
            statistics.median(own),
            "events of 100 B/s",
            statistics.median(bare),
            "ranges().to_batches",
            median_ratio(own, bare),
            at_least(0.8, of="ratio"),
        )
