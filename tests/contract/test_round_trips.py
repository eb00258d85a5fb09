"""What a public call costs at the catalog: round trips on PostgreSQL, statements on SQLite.

The numbers can only fall. The test of a call that costs more fails and shows what the call sent. The test of a call that costs less fails
until the number in the table is lowered.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import apsw
import psycopg
import pyarrow as pa
import pytest

import headwater as hw
from headwater.catalog.pgpipeline import Pipeline
from tests.crash.test_unknown_outcome import Proxy
from tests.ratchet import check_ratchet

#: Each item is one use of the same call. The generator prepares what the use needs before it yields the item.
Calls = Generator[Callable[[], object], None, None]
Case = Callable[[hw.Store], Calls]

#: The first uses of a call warm it up. The cost is the median of the uses after them, because one may coincide with the renewal of a lease.
_WARM_UP = 2
_MEASURED = 3

_BATCH = pa.table({"value": [b"x" * 100] * 1000, "key": range(1000)})
_LARGE_BATCH = pa.table({"value": [b"x" * 1000] * 1000, "key": range(1000)})


# Writing.


def ack_of_an_event(store: hw.Store) -> Calls:
    with store.create_stream("s/one").writer() as writer:
        while True:
            yield lambda: writer.write(b"x").result()


def ack_of_a_named_writer(store: hw.Store) -> Calls:
    with store.create_stream("s/one").writer("source") as writer:
        while True:
            yield lambda: writer.write(b"x").result()


def batch_to_one_segment(store: hw.Store) -> Calls:
    with store.create_stream("s/one").writer() as writer:
        while True:
            yield lambda: writer.write_batch(_BATCH.slice(0, 100), key="key").result()


def batch_to_16_segments(store: hw.Store) -> Calls:
    with _wide(store).writer() as writer:
        while True:
            yield lambda: writer.write_batch(_BATCH, key="key").result()


def large_batch(store: hw.Store) -> Calls:
    with store.create_stream("s/one").writer() as writer:
        while True:
            yield lambda: writer.write_batch(_LARGE_BATCH, key="key").result()


def open_a_writer(store: hw.Store) -> Calls:
    stream = store.create_stream("s/one")
    with ExitStack() as stack:
        while True:
            yield lambda: stack.enter_context(stream.writer())


def open_a_named_writer(store: hw.Store) -> Calls:
    stream = store.create_stream("s/one")
    with ExitStack() as stack:
        for number in count():
            yield partial(lambda name: stack.enter_context(stream.writer(name)), f"source{number}")


def append_bytes(store: hw.Store) -> Calls:
    def append() -> None:
        writer.write(b"x" * 100)
        writer.flush()

    with store.create_stream("s/bytes", kind="bytes").byte_writer() as writer:
        while True:
            yield append


# Transactions.


def transaction(store: hw.Store) -> Calls:
    store.create_stream("s/one")
    while True:
        yield partial(_transaction, store, lambda tx: tx.write("s/one", b"x"))


def transaction_of_16_segments(store: hw.Store) -> Calls:
    _wide(store)
    while True:
        yield partial(_transaction, store, lambda tx: tx.write_batch("s/wide", _BATCH, key="key"))


def transaction_with_a_marker(store: hw.Store) -> Calls:
    store.create_stream("s/one")
    for number in count():
        marker = hw.Marker("source", number)
        yield partial(_transaction, store, lambda tx: tx.write("s/one", b"x"), marker=marker)


def transaction_with_a_table_put(store: hw.Store) -> Calls:
    store.create_stream("s/one")
    store.table("s/table")

    def work(tx: hw.Transaction) -> None:
        tx.write("s/one", b"x")
        tx.put("s/table", "key", b"x")

    while True:
        yield partial(_transaction, store, work)


def transaction_with_an_update(store: hw.Store) -> Calls:
    counter = store.synchronizer("s/counter", 0, _add)
    while True:
        yield partial(_transaction, store, lambda tx: tx.update(counter, [1]))
        counter.fetch()


def transaction_with_a_readers_position(store: hw.Store) -> Calls:
    with _reader(store) as (reader, write):

        def work(tx: hw.Transaction) -> None:
            tx.write("s/out", b"x")
            tx.commit_reader(reader)

        store.create_stream("s/out")
        while True:
            write()
            assert reader.read(10) is not None
            yield partial(_transaction, store, work)


def transaction_staged_before_its_commit(store: hw.Store) -> Calls:
    store.create_stream("s/one")

    def work(tx: hw.Transaction) -> None:
        tx.write("s/one", b"x")
        tx.flush()

    while True:
        yield partial(_transaction, store, work)


def status_of_a_transaction(store: hw.Store) -> Calls:
    store.create_stream("s/one")
    with store.transaction() as tx:
        tx.write("s/one", b"x")
    while True:
        yield lambda: store.transaction_status(tx.id)


def list_of_transactions(store: hw.Store) -> Calls:
    store.create_stream("s/one")
    for _ in range(3):
        with store.transaction() as tx:
            tx.write("s/one", b"x")
    while True:
        yield store.transactions


# Reading.


def read_a_small_stream(store: hw.Store) -> Calls:
    stream = _filled(store)
    while True:
        yield lambda: list(stream.read())


def read_16_segments(store: hw.Store) -> Calls:
    stream = _filled(store, 16)
    while True:
        yield lambda: list(stream.read())


def stream_to_arrow(store: hw.Store) -> Calls:
    stream = _filled(store)
    while True:
        yield stream.to_arrow


def ranges(store: hw.Store) -> Calls:
    stream = _filled(store)
    while True:
        yield stream.ranges


def range_to_batches(store: hw.Store) -> Calls:
    stream = _filled(store)
    while True:
        (item,) = stream.ranges()
        yield partial(lambda item: list(item.to_batches()), item)


def head(store: hw.Store) -> Calls:
    stream = _filled(store)
    while True:
        yield stream.head


def tail(store: hw.Store) -> Calls:
    stream = _filled(store)
    while True:
        yield stream.tail


def segments(store: hw.Store) -> Calls:
    stream = _filled(store)
    while True:
        yield stream.segments


def cut_of_two_streams(store: hw.Store) -> Calls:
    streams = _filled(store), _filled(store, 16)
    while True:
        yield lambda: store.cut(*streams)


def advance(store: hw.Store) -> Calls:
    stream = _filled(store)
    start = stream.head()
    while True:
        yield lambda: store.advance(start, max_events=2)


def read_bytes(store: hw.Store) -> Calls:
    stream = store.create_stream("s/bytes", kind="bytes")
    with stream.byte_writer() as writer:
        writer.write(b"x" * 100)
    while True:
        yield lambda: stream.byte_reader().read()


# Reading in a group.


def open_a_group(store: hw.Store) -> Calls:
    _filled(store)
    for number in count():
        yield partial(store.reader_group, f"group{number}", ["s/one"])


def open_and_close_a_reader(store: hw.Store) -> Calls:
    _filled(store)
    group = store.reader_group("group", ["s/one"])
    for number in count():
        yield partial(lambda name: group.reader(name).close(), f"reader{number}")


def read_in_a_group(store: hw.Store) -> Calls:
    with _reader(store) as (reader, write):
        while True:
            write()
            yield lambda: reader.read(10)
            reader.commit()


def reader_commit(store: hw.Store) -> Calls:
    with _reader(store) as (reader, write):
        while True:
            write()
            assert reader.read(10) is not None
            yield reader.commit


def lag_of_a_group(store: hw.Store) -> Calls:
    _filled(store)
    group = store.reader_group("group", ["s/one"])
    while True:
        yield group.lag


# State and tables.


def table_put(store: hw.Store) -> Calls:
    table = store.table("s/table")
    while True:
        yield lambda: table.put("key", b"x")


def table_get(store: hw.Store) -> Calls:
    table = store.table("s/table")
    table.put("key", b"x")
    while True:
        yield lambda: table.get("key")


def table_items(store: hw.Store) -> Calls:
    table = store.table("s/table")
    table.put("key", b"x")
    while True:
        yield lambda: list(table.items())


def revisioned_append(store: hw.Store) -> Calls:
    revisioned = store.revisioned("s/revisioned")
    while True:
        yield lambda: revisioned.append(b"x")


def revisioned_append_to_what_was_seen(store: hw.Store) -> Calls:
    revisioned = store.revisioned("s/revisioned")
    while True:
        yield partial(revisioned.append, b"x", revisioned.latest)


def revisioned_latest(store: hw.Store) -> Calls:
    revisioned = store.revisioned("s/revisioned")
    while True:
        yield lambda: revisioned.latest


def synchronizer_update(store: hw.Store) -> Calls:
    counter = store.synchronizer("s/counter", 0, _add)
    while True:
        yield lambda: counter.update(lambda state: [1])


def synchronizer_fetch(store: hw.Store) -> Calls:
    counter = store.synchronizer("s/counter", 0, _add)
    counter.update(lambda state: [1])
    while True:
        yield counter.fetch


# Streams.


def open_a_stream(store: hw.Store) -> Calls:
    store.create_stream("s/one")
    while True:
        yield lambda: store.stream("s/one")


def create_a_stream(store: hw.Store) -> Calls:
    for number in count():
        yield partial(store.create_stream, f"s/{number}")


def update_a_stream(store: hw.Store) -> Calls:
    stream = store.create_stream("s/one")
    for number in count():
        yield partial(stream.update, labels=[f"label{number}"])


def seal_a_stream(store: hw.Store) -> Calls:
    for number in count():
        yield store.create_stream(f"s/{number}").seal


def delete_a_stream(store: hw.Store) -> Calls:
    for number in count():
        store.create_stream(f"s/{number}")
        yield partial(store.delete_stream, f"s/{number}", seal=True)


def fork_a_stream(store: hw.Store) -> Calls:
    stream = _filled(store)
    for number in count():
        yield partial(stream.fork, f"s/fork{number}")


def truncate_a_stream(store: hw.Store) -> Calls:
    stream = _filled(store)
    with stream.writer() as writer:
        while True:
            writer.write(b"x").result()
            yield partial(stream.truncate, stream.tail())


def split_a_segment(store: hw.Store) -> Calls:
    stream = _filled(store)
    while True:
        yield partial(stream.split, stream.segments()[0].number)


def merge_segments(store: hw.Store) -> Calls:
    stream = _filled(store, 16)
    while True:
        first, second = sorted(stream.segments(), key=lambda segment: segment.start)[:2]
        yield partial(stream.merge, [first.number, second.number])


def tag_a_cut(store: hw.Store) -> Calls:
    cut = _filled(store).tail()
    for number in count():
        yield partial(store.tag, f"tag{number}", cut)


def hold_and_release(store: hw.Store) -> Calls:
    cut = _filled(store).tail()

    def hold() -> None:
        store.hold("hold", None, cut)
        store.release("hold")

    while True:
        yield hold


# Journals.


def persist_as_expected(store: hw.Store) -> Calls:
    journal = store.journal("s/journal")
    for number in count():
        yield partial(journal.persist, "id", hw.Record("x", number), expected=number)


def persist_to_a_known_entity(store: hw.Store) -> Calls:
    journal = store.journal("s/journal")
    while True:
        yield lambda: journal.persist("id", hw.Record("x", 1))


def persist_to_an_unknown_entity(store: hw.Store) -> Calls:
    journal = store.journal("s/journal")
    for number in count():
        yield partial(journal.persist, f"id{number}", hw.Record("x", 1))


def persist_if_a_tag_is_unused(store: hw.Store) -> Calls:
    journal = store.journal("s/journal", scaling=hw.Scaling.fixed(4))
    for number in count():
        tag = f"tag{number}"
        yield partial(journal.persist, tag, hw.Record("x", 1, tags=(tag,)), expected=0, fail_if=hw.Match(tags=(tag,)))


def transaction_with_two_persists(store: hw.Store) -> Calls:
    store.journal("s/journal", scaling=hw.Scaling.fixed(4))

    def work(tx: hw.Transaction, number: int) -> None:
        tx.persist("s/journal", "a", hw.Record("x", 1), expected=number)
        tx.persist("s/journal", "b", hw.Record("x", 1), expected=number)

    for number in count():
        yield partial(_transaction, store, partial(work, number=number))


def replay_of_an_entity(store: hw.Store) -> Calls:
    journal = _filled_journal(store)
    while True:
        yield lambda: list(journal.replay("id3"))


def head_of_an_entity(store: hw.Store) -> Calls:
    journal = _filled_journal(store)
    while True:
        yield lambda: journal.head("id3")


def ids_of_a_journal(store: hw.Store) -> Calls:
    journal = _filled_journal(store)
    while True:
        yield lambda: list(journal.ids())


def events_by_tag(store: hw.Store) -> Calls:
    journal = _filled_journal(store)
    while True:
        yield lambda: list(journal.events(tag="tag3"))


def snapshot_of_an_entity(store: hw.Store) -> Calls:
    journal = _filled_journal(store)
    while True:
        yield lambda: journal.find_snapshot("id3")


def _filled_journal(store: hw.Store) -> hw.Journal:
    journal = store.journal("s/journal")
    for number in range(20):
        journal.persist(f"id{number}", [hw.Record("x", place, tags=(f"tag{number}",)) for place in range(10)])
    journal.snapshot("id3", 10, {})
    return journal


#: Round trips on PostgreSQL. A NOTIFY after a commit is not counted, because no caller waits for its answer.
ROUND_TRIPS: dict[Case, int] = {
    ack_of_an_event: 1,
    ack_of_a_named_writer: 2,
    batch_to_one_segment: 1,
    batch_to_16_segments: 2,
    large_batch: 1,
    open_a_writer: 2,
    open_a_named_writer: 5,
    append_bytes: 1,
    transaction: 1,
    transaction_of_16_segments: 2,
    transaction_with_a_marker: 3,
    transaction_with_a_table_put: 2,
    transaction_with_an_update: 3,
    transaction_with_a_readers_position: 6,
    transaction_staged_before_its_commit: 22,
    status_of_a_transaction: 1,
    list_of_transactions: 3,
    read_a_small_stream: 5,
    read_16_segments: 20,
    stream_to_arrow: 5,
    ranges: 3,
    range_to_batches: 1,
    head: 1,
    tail: 1,
    segments: 2,
    cut_of_two_streams: 1,
    advance: 2,
    read_bytes: 4,
    open_a_group: 9,
    open_and_close_a_reader: 10,
    read_in_a_group: 6,
    reader_commit: 5,
    lag_of_a_group: 6,
    table_put: 1,
    table_get: 1,
    table_items: 2,
    revisioned_append: 1,
    revisioned_append_to_what_was_seen: 2,
    revisioned_latest: 1,
    synchronizer_update: 3,
    synchronizer_fetch: 1,
    open_a_stream: 1,
    create_a_stream: 10,
    update_a_stream: 5,
    seal_a_stream: 6,
    delete_a_stream: 26,
    fork_a_stream: 14,
    truncate_a_stream: 18,
    split_a_segment: 11,
    merge_segments: 12,
    tag_a_cut: 5,
    hold_and_release: 19,
    persist_as_expected: 1,
    persist_to_a_known_entity: 1,
    persist_to_an_unknown_entity: 2,
    persist_if_a_tag_is_unused: 1,
    transaction_with_two_persists: 3,
    replay_of_an_entity: 2,
    head_of_an_entity: 1,
    ids_of_a_journal: 2,
    events_by_tag: 11,
    snapshot_of_an_entity: 1,
}

#: Statements on SQLite, including BEGIN and COMMIT. Most run under the lock that all writers of the host share.
STATEMENTS: dict[Case, int] = {
    ack_of_an_event: 6,
    ack_of_a_named_writer: 10,
    batch_to_16_segments: 38,
    transaction: 6,
    transaction_of_16_segments: 53,
    transaction_with_a_table_put: 14,
    # The session's receipt takes two of them: a put whose answer was lost is asked for again.
    table_put: 7,
    persist_as_expected: 9,
    persist_if_a_tag_is_unused: 11,
}


class CountingProxy(Proxy):
    """Records the statements of each round trip that a caller waits for."""

    def __init__(self, url: str, folder: Path) -> None:
        #: The statements of each round trip, with " | " between them.
        self.trips: list[str] = []
        super().__init__(url, folder)

    def _pass_on(self, client: socket.socket, server: socket.socket) -> None:
        requests = _Requests()
        # ValueError: closed under the select.
        with suppress(OSError, ValueError), client, server:
            while True:
                for ready in select.select([client, server], [], [])[0]:
                    data = ready.recv(1 << 20)
                    if not data:
                        return
                    if ready is client:
                        # Count the trip before the server sees it, so that the caller who has the answer finds it counted.
                        self.trips += [" | ".join(sent) for sent in requests.cut(data) if _has_a_waiting_caller(sent)]
                    (server if ready is client else client).sendall(data)


class _Requests:
    """Cuts what a client sends on one connection after each message that makes the server answer."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._is_started = False
        self._prepared: dict[bytes, str] = {}
        self._sent: list[str] = []

    def cut(self, data: bytes) -> Iterator[list[str]]:
        """The statements of each request that these bytes complete."""
        self._data += data
        while (message := self._next_message()) is not None:
            kind, body = message
            if kind == b"P":  # Parse: a statement, prepared under a name or under the empty one.
                name, sql, _ = body.split(b"\0", 2)
                self._prepared[name] = " ".join(sql.decode().split())
            elif kind == b"B":  # Bind: a use of a prepared statement.
                self._sent.append(self._prepared[body.split(b"\0", 2)[1]])
            elif kind in (b"S", b"H", b"Q"):  # Sync, Flush, a simple query.
                sent, self._sent = self._sent, []
                yield sent

    def _next_message(self) -> tuple[bytes, bytes] | None:
        # The first message of a connection has no letter that names its kind.
        start = 1 if self._is_started else 0
        end = start + int.from_bytes(self._data[start : start + 4], "big")
        if len(self._data) < max(end, start + 4):
            return None
        message = bytes(self._data[:start]), bytes(self._data[start + 4 : end])
        self._is_started = True
        del self._data[:end]
        return message


def _has_a_waiting_caller(sent: list[str]) -> bool:
    """Whether these statements are more than a NOTIFY or the settings of a new connection, both of which background threads send."""
    return not all(sql.startswith(("SET ", "LISTEN ")) or "pg_notify" in sql for sql in sent)


@pytest.fixture
def proxy(postgres_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CountingProxy]:
    proxy = CountingProxy(postgres_url, tmp_path_factory.mktemp("s"))
    yield proxy
    proxy.close()


@pytest.mark.slow  # It takes a server.
def test_a_round_trip_to_postgresql_is_counted_once_and_a_notify_after_it_is_not_counted(proxy: CountingProxy) -> None:
    pipeline = Pipeline(psycopg.connect(proxy.url, autocommit=True))
    for number in range(4):  # The third use prepares the statements.
        notify = "SELECT pg_notify(?, ?)", ("channel", "news")
        assert pipeline.run([("SELECT CAST(? AS BIGINT)", (number,)), ("SELECT 2", ())], notify) == [[(number,)], [(2,)]]
    pipeline.run([("SELECT CAST(? AS BYTEA)", (bytes(1_000_000),))])
    pipeline.close()
    assert proxy.trips == ["SELECT CAST($1 AS BIGINT) | SELECT 2"] * 4 + ["SELECT CAST($1 AS BYTEA)"]


@pytest.mark.slow
@pytest.mark.parametrize("case", ROUND_TRIPS, ids=lambda case: case.__name__)
def test_a_call_takes_no_more_round_trips_on_postgresql(case: Case, proxy: CountingProxy, tmp_path: Path) -> None:
    with hw.open(tmp_path / "store", catalog=proxy.url, upkeep=False) as store:
        trips = _measure(case(store), proxy.trips)
    check_ratchet(trips, f"ROUND_TRIPS[{case.__name__}]", ROUND_TRIPS[case])


@pytest.mark.parametrize("case", STATEMENTS, ids=lambda case: case.__name__)
def test_a_call_takes_no_more_statements_on_sqlite(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    statements: list[str] = []

    def note(cursor: Any, sql: str, values: Any) -> bool:
        statements.append(sql)
        return True

    def watch(connection: apsw.Connection) -> None:
        connection.exec_trace = note

    monkeypatch.setattr(apsw, "connection_hooks", [*apsw.connection_hooks, watch])
    with hw.open(tmp_path / "store", upkeep=False) as store:
        found = _measure(case(store), statements)
    check_ratchet(found, f"STATEMENTS[{case.__name__}]", STATEMENTS[case])


def _measure(calls: Calls, log: list[str]) -> list[str]:
    """What the median use of a call adds to the log."""
    found = []
    with closing(calls):
        for call in islice(calls, _WARM_UP + _MEASURED):
            before = len(log)
            call()
            found.append(log[before:])
    return sorted(found[_WARM_UP:], key=len)[_MEASURED // 2]


def _wide(store: hw.Store) -> hw.Stream:
    return store.create_stream("s/wide", scaling=hw.Scaling.fixed(16))


def _filled(store: hw.Store, segments: int = 1) -> hw.Stream:
    stream = _wide(store) if segments == 16 else store.create_stream("s/one")
    with stream.writer() as writer:
        writer.write_batch(_BATCH, key="key")
    return stream


@contextmanager
def _reader(store: hw.Store) -> Iterator[tuple[hw.Reader, Callable[[], object]]]:
    """A manual reader of a stream, and a function that writes the next event for it."""
    with store.create_stream("s/one").writer() as writer, store.reader_group("group", ["s/one"]).reader("reader", "manual") as reader:
        yield reader, lambda: writer.write(b"x").result()


def _transaction(store: hw.Store, work: Callable[[hw.Transaction], None], **options: Any) -> None:
    with store.transaction(**options) as tx:
        work(tx)


def _add(state: int, update: int) -> int:
    return state + update
