"""What the processes of the transaction tests do: jobs of every kind, one command at a time, and the ingestion of files."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import headwater as hw
from headwater.runtime import failpoints
from tests.crash.processes import Place

ONE, TWO, JOBS = "jobs/one", "jobs/two", "jobs/done"
OWNER = "worker"
#: How a job's transaction goes: committed at once; staged before; in storage, being large; staged by two handles; across a split, which
#: takes a roll; and those whose first attempt is aborted, or runs out of its lease.
KINDS = ("plain", "staged", "object", "shared", "rolled", "aborted", "timed_out")
LARGE_BYTES = 100_000


class Job(NamedTuple):
    """One unit of work: events for both streams and a table entry, in one transaction."""

    number: int
    kind: str
    counts: dict[str, int]

    def events(self, stream: str, tag: str) -> list[str]:
        return [f"{tag}.{stream}.{index:02d}" for index in range(self.counts[stream])]


def plan_jobs(seed: int) -> list[Job]:
    """One of each kind, in any order."""
    rng = random.Random(seed)
    kinds = rng.sample(KINDS, len(KINDS))
    return [Job(number, kind, {ONE: rng.randint(1, 9), TWO: rng.randint(4, 12)}) for number, kind in enumerate(kinds)]


def create_job_streams(store: hw.Store) -> None:
    for name, segments in ((ONE, 1), (TWO, 2)):
        store.create_stream(name, scaling=hw.Scaling.fixed(segments), exist_ok=True)
    store.table(JOBS)


def do_jobs(channel: Connection, place: Place, spec: str, seed: int, run: int) -> None:
    """Do all jobs that are not done yet, and go through the failpoints in `spec` on the way.

    The last one that is done is done again: its marker says so, and nothing is stored twice.
    """
    failpoints.arm(spec)
    with place.open() as store:
        create_job_streams(store)
        last = store.table(JOBS).get("last")
        for job in plan_jobs(seed)[int(last.value) if last is not None else 0 :]:
            _do(channel, store, job, run)
        channel.send("done")


def _do(channel: Connection, store: hw.Store, job: Job, run: int) -> None:
    marker = hw.Marker(OWNER, job.number, job.kind)
    if job.kind == "aborted":
        first = store.transaction()
        _write(channel, store, job, first, f"{job.number:02d}.{run}a")
        first.abort()
    elif job.kind == "timed_out":
        late = store.transaction(auto_renew=False)
        _write(channel, store, job, late, f"{job.number:02d}.{run}a")
        # As if its lease had run out, which would take a while.
        store._engine.database.write(lambda tx: tx.run("UPDATE txn SET expires_at = 0 WHERE id = ?", (late.id,)))
        store.run_upkeep()
    with store.transaction(marker=marker) as tx:
        _write(channel, store, job, tx, f"{job.number:02d}.{run}b")
    channel.send(("committed", f"{job.number:02d}.{run}b", tx.commit().repeated))


def _write(channel: Connection, store: hw.Store, job: Job, tx: hw.Transaction, tag: str) -> None:
    """Add the job's events, the first half of them staged if the kind says so, and its entries."""
    events = [(stream, value) for stream in (TWO, ONE) for value in job.events(stream, tag)]
    for index, (stream, value) in enumerate(events):
        padding = "." * (LARGE_BYTES if job.kind == "object" and index in (0, len(events) - 1) else 0)
        tx.write(stream, f"{value}|{padding}", key=f"k{index % 5}")
        if index == len(events) // 2 and job.kind != "plain":
            # A stage for the wrong reasons would show: the parent knows the id of each one that is begun.
            channel.send(("begun", tag, tx.id))
            tx.flush()
            if job.kind == "shared":
                tx.put(JOBS, f"{tag}.shared", b"")
                tx.flush()
                tx = store.resume_transaction(tx.id)
            if job.kind == "rolled":
                _scale(store.stream(TWO))
    tx.put(JOBS, tag, b"")
    tx.put(JOBS, "last", str(job.number).encode())
    if job.kind == "shared":
        tx.flush()


def _scale(stream: hw.Stream) -> None:
    """From n segments to n + 1: no new one covers an old one."""
    opened = [segment.number for segment in stream.segments()]
    whole = stream.merge(opened)[0].number if len(opened) > 1 else opened[0]
    stream.split(whole, parts=len(opened) + 1)


def obey_transactions(channel: Connection, place: Place) -> None:
    """Do what the test says, one command at a time, and answer with the result or with an error's name and text."""
    puppet = _Puppet(place)
    while True:
        try:
            command, *args = channel.recv()
        except EOFError:
            return
        try:
            channel.send((True, getattr(puppet, command)(*args)))
        except hw.HeadwaterError as error:
            channel.send((False, type(error).__name__, str(error)))


class _Puppet:
    def __init__(self, place: Place) -> None:
        self._store = place.open()
        self._tx = self._store.transaction()
        self._reader: hw.Reader | None = None

    def arm(self, spec: str) -> None:
        failpoints.arm(spec)

    def begin(self, lease: float, auto_renew: bool = True) -> str:
        self._tx = self._store.transaction(lease=lease, auto_renew=auto_renew)
        return self._tx.id

    def resume(self, id: str) -> None:
        self._tx = self._store.resume_transaction(id)

    def write(self, stream: str, values: Sequence[str], key: str | None = None) -> None:
        for value in values:
            self._tx.write(stream, value, key=key)

    def put(self, table: str, key: str, value: bytes) -> None:
        self._tx.put(table, key, value)

    def flush(self) -> None:
        self._tx.flush()

    def commit(self) -> bool:
        return self._tx.commit().repeated

    def abort(self) -> None:
        self._tx.abort()

    def status(self) -> str:
        return self._tx.status.value

    def join(self, group: str, id: str) -> None:
        self._reader = self._store.reader_group(group).reader(id, commit="manual")

    def read(self, count: int) -> list[bytes]:
        assert self._reader is not None
        found = [self._reader.read(timeout=10.0) for _ in range(count)]
        return [event.value for event in found if event is not None]

    def commit_reader(self) -> None:
        assert self._reader is not None
        self._tx.commit_reader(self._reader)

    def commit_positions(self) -> None:
        assert self._reader is not None
        self._reader.commit()


# Ingestion: whole files, one transaction each, exactly once, from a process that may die anywhere, twice at the same time if need be.


class Overtaken(Exception):
    """Another ingester took over: this one must stop."""


class Ingester:
    """Stores the lines of files in a stream, each once.

    Before a file is written, {file, transaction} is recorded in shared state by a conditional update. Who starts looks at the record:
    a committed transaction means that its file is done; one that is open is aborted, and an aborted one's file is done again. Of two
    who start from one record only one replaces it; the other has lost, also if it was only slow.
    """

    def __init__(self, store: hw.Store, files: Sequence[Path], stream: str) -> None:
        self._store = store
        self._files = files
        self._stream = stream
        self._record = store.synchronizer("ingest/record", initial=None, apply=lambda _, update: update)
        self._seen: Any = self._record.state

    def run(self) -> Iterator[Path]:
        """Go on where the record says, to the last file; yields each when it is stored. Overtaken if another ingester does so too."""
        for at in range(self._settle(), len(self._files)):
            self._ingest(at)
            yield self._files[at]

    def _settle(self) -> int:
        """The first file that is not stored. Whoever may still be storing it can no longer."""
        if self._seen is None:
            return 0
        if not self._was_committed(self._seen["transaction"]):
            return int(self._seen["file"])
        return int(self._seen["file"]) + 1

    def _was_committed(self, id: str) -> bool:
        while self._store.transaction_status(id) is hw.TransactionStatus.OPEN:
            try:
                self._store.resume_transaction(id).abort()
            except hw.TransactionEndedError:
                continue  # It ended between the two: look again how.
        return self._store.transaction_status(id) is hw.TransactionStatus.COMMITTED

    def _ingest(self, at: int) -> None:
        tx = self._store.transaction(lease=30.0)
        self._claim({"file": at, "transaction": tx.id})
        try:
            for line in self._files[at].read_text().splitlines():
                tx.write(self._stream, line, key=line.partition(":")[2])
            tx.commit()
        except hw.TransactionEndedError as error:
            raise Overtaken from error

    def _claim(self, record: dict[str, Any]) -> None:
        def decide(found: Any) -> list[Any]:
            if found != self._seen:
                raise Overtaken
            return [record]

        self._record.update(decide)
        self._seen = record


def ingest(channel: Connection, place: Place, spec: str, folder: str, stream: str) -> None:
    """Ingest a folder, each file when the test says so, and go through the failpoints in `spec` on the way."""
    failpoints.arm(spec)
    channel.recv()
    with place.open() as store:
        try:
            for _ in Ingester(store, sorted(Path(folder).iterdir()), stream).run():
                channel.send("stored")
                channel.recv()
        except Overtaken:
            channel.send("overtaken")
        else:
            channel.send("done")
