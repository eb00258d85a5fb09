"""Event stores that the benchmarks of the journal use in turns: headwater's, and those of `pip install 'headwater[journal-peers]'`.

Each stores one event at a time under a condition, is filled quickly and replays an entity. Those that have tags find the events with one.
Its description is picklable, so that a benchmark can open it in other processes.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import headwater as hw
from benchmarks.bench import Bench, Catalog, Place
from benchmarks.peers.servers import LOOPBACK, free_port, listens, started_server
from headwater.model.records import JOURNAL_SCHEMA

JOURNAL, STREAM = "bench/journal", "bench/typed"
TYPE, DATA = "placed", {"item": "mug", "count": 1, "note": "as it came from the shop's form"}
STATE = json.dumps(DATA).encode()
#: Persists that a fill gives before it waits for the first of them.
_WINDOW = 256
_BULK = 1000

#: Store the event of an entity with this sequence, durably.
Persist = Callable[[str, int], None]


class Filling(NamedTuple):
    """Events of one entity to fill a store with. The first one has the tag, and its type, if there is one."""

    id: str
    events: int
    tag: str | None = None


class Opened(Protocol):
    """An event store that is open."""

    def persist(self) -> Persist:
        """What one thread persists with."""

    def fill(self, fillings: Iterable[Filling]) -> None: ...

    def replay(self, id: str) -> int:
        """Read the events of an entity; returns their number."""


@runtime_checkable
class Tagged(Opened, Protocol):
    """An open event store that finds events by their tags."""

    def find(self, tag: str) -> int:
        """Read the events with a tag; returns their number."""


class EventStore(Protocol):
    """Where an event store is, and how it is opened."""

    @property
    def name(self) -> str: ...

    def opened(self) -> Any: ...

    def for_one_thread(self) -> EventStore:
        """The same store for a process that uses it in one thread."""


@dataclass(frozen=True)
class Headwater:
    """A journal of headwater's; `condition` is expected, fail_if, or ack: a typed event without a condition."""

    place: Place
    condition: str
    segments: int = 4
    upkeep: bool = True

    @property
    def name(self) -> str:
        return "typed acks" if self.condition == "ack" else f"headwater, {self.condition}"

    def for_one_thread(self) -> Headwater:
        return self

    @contextmanager
    def opened(self) -> Iterator[OpenedHeadwater]:
        with hw.open(self.place.url, catalog=self.place.catalog, upkeep=self.upkeep) as store:
            stream = store.create_stream(STREAM, schema=JOURNAL_SCHEMA, scaling=hw.Scaling.fixed(self.segments), exist_ok=True)
            with stream.writer() as writer:
                journal = store.journal(JOURNAL, scaling=hw.Scaling.fixed(self.segments))
                yield OpenedHeadwater(store, journal, writer, self.condition)


class OpenedHeadwater:
    def __init__(self, store: hw.Store, journal: hw.Journal, writer: hw.Writer, condition: str) -> None:
        self.store = store
        self.journal = journal
        self._writer = writer
        self._condition = condition

    def persist(self) -> Persist:
        journal = self.journal
        if self._condition == "expected":

            def expect(id: str, sequence: int) -> None:
                journal.persist(id, hw.Record(TYPE, DATA), expected=sequence - 1)

            return expect
        if self._condition == "fail_if":

            def forbid(id: str, sequence: int) -> None:
                tag = f"at:{id}:{sequence}"
                journal.persist(id, hw.Record(TYPE, DATA, tags=(tag,)), fail_if=hw.Match(tags=(tag,)))

            return forbid
        writer = self._writer

        def write(id: str, sequence: int) -> None:
            record = hw.Record(TYPE, DATA)
            values = (id, sequence, TYPE, 1, json.dumps(DATA), (), None, str(record.event_id))
            writer.write(dict(zip(JOURNAL_SCHEMA.names, values, strict=True)), id).result()

        return write

    def fill(self, fillings: Iterable[Filling]) -> None:
        acks: deque[Any] = deque()
        for filling in fillings:
            records = [hw.Record(TYPE, DATA) for _ in range(filling.events)]
            if filling.tag is not None:
                records[0] = hw.Record(filling.tag, DATA, tags=(filling.tag,))
            for start in range(0, len(records), _BULK):
                acks.append(self.journal.persist_async(filling.id, records[start : start + _BULK], expected=start))
            while len(acks) > _WINDOW:
                acks.popleft().result()
        for ack in acks:
            ack.result()

    def replay(self, id: str) -> int:
        return sum(1 for _ in self.journal.replay(id))

    def find(self, tag: str) -> int:
        return sum(1 for _ in self.journal.events(tag=tag))


@dataclass(frozen=True)
class EventSourcing:
    """The library `eventsourcing` at its lowest level, a recorder: no aggregate, no transcoder. It has no tags."""

    place: Place
    threads: int

    @property
    def name(self) -> str:
        return "eventsourcing"

    def for_one_thread(self) -> EventSourcing:
        return replace(self, threads=1)

    @contextmanager
    def opened(self) -> Iterator[OpenedEventSourcing]:
        if self.place.catalog is None:
            from eventsourcing.sqlite import SQLiteApplicationRecorder, SQLiteDatastore

            path = f"{self.place.url}-eventsourcing.sqlite"
            store = SQLiteDatastore(path, lock_timeout=60, pool_size=self.threads, pool_timeout=60.0, originator_id_type="text")
            recorder: Any = SQLiteApplicationRecorder(store)
        else:
            from eventsourcing.postgres import PostgresApplicationRecorder, PostgresDatastore
            from psycopg.conninfo import conninfo_to_dict

            where = conninfo_to_dict(self.place.catalog)
            store = PostgresDatastore(
                str(where["dbname"]),
                str(where["host"]),
                str(where.get("port", 5432)),
                str(where["user"]),
                str(where.get("password", "")),
                connect_timeout=60.0,
                pool_size=self.threads,
                originator_id_type="text",
            )
            recorder = PostgresApplicationRecorder(store)
        try:
            recorder.create_table()
            yield OpenedEventSourcing(recorder)
        finally:
            store.close()


class OpenedEventSourcing:
    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder

    def persist(self) -> Persist:
        from eventsourcing.persistence import StoredEvent

        insert = self._recorder.insert_events

        def persist(id: str, sequence: int) -> None:
            insert([StoredEvent(id, sequence, TYPE, json.dumps(DATA).encode())])

        return persist

    def fill(self, fillings: Iterable[Filling]) -> None:
        from eventsourcing.persistence import StoredEvent

        for some in _in_bulk(fillings):
            self._recorder.insert_events([StoredEvent(id, sequence, TYPE, STATE) for id, sequence, _ in some])

    def replay(self, id: str) -> int:
        return sum(1 for event in self._recorder.select_events(id) if json.loads(event.state))


@dataclass(frozen=True)
class UmaDB:
    """UmaDB, a server of its own; the condition is that no event has a tag that is not used yet."""

    url: str

    @property
    def name(self) -> str:
        return "UmaDB"

    def for_one_thread(self) -> UmaDB:
        return self

    @contextmanager
    def opened(self) -> Iterator[OpenedUmaDB]:
        import umadb

        client = umadb.Client(self.url)
        try:
            yield OpenedUmaDB(client)
        finally:
            client.close()


class OpenedUmaDB:
    def __init__(self, client: Any) -> None:
        self.client = client

    def persist(self) -> Persist:
        import umadb

        append = self.client.append

        def persist(id: str, sequence: int) -> None:
            tag = f"at:{id}:{sequence}"
            unused = umadb.AppendCondition(umadb.Query([umadb.QueryItem(tags=[tag])]))
            append([umadb.Event(TYPE, json.dumps(DATA).encode(), [f"id:{id}", tag])], unused)

        return persist

    def fill(self, fillings: Iterable[Filling]) -> None:
        import umadb

        for some in _in_bulk(fillings):
            self.client.append([umadb.Event(tag or TYPE, STATE, [f"id:{id}", *([tag] if tag else [])]) for id, _, tag in some])

    def replay(self, id: str) -> int:
        return self.find(f"id:{id}")

    def find(self, tag: str) -> int:
        import umadb

        found = self.client.read(umadb.Query([umadb.QueryItem(tags=[tag])]))
        return sum(1 for each in found if json.loads(each.event.data))


def _in_bulk(fillings: Iterable[Filling]) -> Iterator[list[tuple[str, int, str | None]]]:
    """(id, sequence, tag) of the events, some at a time."""
    some: list[tuple[str, int, str | None]] = []
    for filling in fillings:
        for sequence in range(1, filling.events + 1):
            some.append((filling.id, sequence, filling.tag if sequence == 1 else None))
            if len(some) == _BULK:
                yield some
                some = []
    if some:
        yield some


@contextmanager
def running_peers(bench: Bench, catalog: Catalog, place: Place) -> Iterator[Sequence[EventStore]]:
    """The other event stores that are installed. UmaDB has no catalog: it stands beside SQLite."""
    with ExitStack() as stack:
        peers: list[EventStore] = []
        if find_spec("eventsourcing") is not None:
            peers.append(EventSourcing(place, max(bench.sizes.journal_threads)))
        if find_spec("umadb") is not None and place.catalog is None:
            peers.append(UmaDB(stack.enter_context(running_umadb(bench.path()))))
        yield peers


@contextmanager
def running_umadb(folder: Path) -> Iterator[str]:
    """UmaDB's server, from its package; gives its address."""
    port = free_port()
    # As the package's script does, wherever it is.
    server = "import sys, umadb; sys.argv[0] = 'umadb'; umadb.run_server_from_args(sys.argv)"
    command = [sys.executable, "-c", server, "--listen", f"{LOOPBACK}:{port}", "--db-path", "uma.db"]
    with started_server(command, folder, lambda: listens(port)):
        yield f"http://{LOOPBACK}:{port}"
