"""`python -m benchmarks.soak`: gigabytes through one process, with transactions, a reader and upkeep beside; memory and rows stay flat."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import click

import headwater as hw
from benchmarks.bench import MB
from benchmarks.writing import sample_batch, sample_keys, sample_values

_TABLES = ("extent", "inline_block", "object", "session", "txn", "txn_extent", "marker", "tier", "segment")
_MEMORY_MB = 400


@click.command()
@click.option("--gb", type=float, default=10.0, show_default=True, help="How much is written.")
@click.option("--catalog", help="postgresql://... for a catalog there.")
@click.option("--folder", type=click.Path(file_okay=False), help="On the disk to use; a temporary one by default.")
def main(gb: float, catalog: str | None, folder: str | None) -> None:
    """Write, read and look after a store for a while; ends with 1 if memory or the catalog grows."""
    path = Path(tempfile.mkdtemp(prefix="headwater-soak-", dir=folder))
    try:
        sys.exit(_run(path, gb, catalog))
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _run(path: Path, gb: float, catalog: str | None) -> int:
    steps = 40
    step_bytes = int(gb * 1000 * MB / steps)
    rows: list[dict[str, int]] = []
    most_memory = 0.0
    with hw.open(str(path), catalog=catalog) as store:
        stream = store.create_stream("soak/events", scaling=hw.Scaling.fixed(4))
        counts = store.create_stream("soak/counts", retention=hw.Retention.by_size(10 * MB))
        follower = _Follower(stream)
        written = 0
        began = time.monotonic()
        for step in range(steps):
            written += _write(store, stream, counts, step_bytes)
            follower.wait(written)
            while step % 10 == 9 and _waiting(store) > 2000:
                time.sleep(0.5)  # Let the upkeep catch up now and then, as it does on any machine that is not always busy.
            rows.append({table: store._engine.database.query(f"SELECT count(*) FROM {table}")[0][0] for table in _TABLES})
            most_memory = max(most_memory, _memory_mb())
            rate = (step + 1) * step_bytes / MB / (time.monotonic() - began)
            shown = " ".join(f"{table} {count:,}" for table, count in rows[-1].items() if count)
            print(f"{(step + 1) * step_bytes / MB / 1000:5.2f} GB  {rate:4.0f} MB/s  {_memory_mb():4.0f} MB  {shown}", flush=True)
        follower.stop()
        store.run_upkeep()
        found = sum(batch.num_rows for part in stream.ranges() for batch in part.to_batches(["_number"]))
        totals = store.upkeep_totals
    print(f"{written:,} events written, {follower.seen:,} followed, {found:,} in history; tiered {totals.bytes_tiered / MB:,.0f} MB")
    failures = [] if written == found == follower.seen else ["events are missing, or there are too many"]
    if most_memory > _MEMORY_MB:
        failures.append(f"{most_memory:.0f} MB of memory were used: more than {_MEMORY_MB}")
    half = len(rows) // 2
    for table in _TABLES:
        if table == "txn":
            continue  # Finished ones are kept for a week.
        early, late = max(row[table] for row in rows[:half]), max(row[table] for row in rows[half:])
        if late > 2 * early + 200:
            failures.append(f"the table {table} grew from {early:,} to {late:,} rows")
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


def _write(store: hw.Store, stream: hw.Stream, counts: hw.Stream, size: int) -> int:
    """Half in batches, a good part one by one, the rest in transactions; all of 1 kB."""
    batch, values, keys = sample_batch(4000, 1000), sample_values(1000), sample_keys()
    written = 0
    with stream.writer() as writer, counts.writer() as counter:
        for _ in range(size // 2 // 4_000_000):
            writer.write_batch(batch, key="user")
            written += batch.num_rows
        for number in range(size * 3 // 8 // 1000):
            writer.write(values[number % len(values)], keys[number % len(keys)])
            written += 1
        counter.write(str(written))
    for _ in range(size // 8 // 4_000_000):
        with store.transaction() as tx:
            tx.write_batch("soak/events", batch, key="user")
        written += batch.num_rows
    return written


def _waiting(store: hw.Store) -> int:
    return int(store._engine.database.query("SELECT count(*) FROM extent WHERE form = 0")[0][0])


class _Follower:
    """Counts what a follower sees, in a thread."""

    def __init__(self, stream: hw.Stream) -> None:
        self.seen = 0
        self._stream = stream
        self._group = stream._store.reader_group("soak", [stream.name])
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with self._group.reader("follower") as reader:
            while not self._stop.is_set():
                batch = reader.read_batch(timeout=0.5)
                self.seen += batch.num_rows if batch is not None else 0

    def wait(self, count: int) -> None:
        _until(lambda: self.seen >= count)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 600
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the follower fell behind")
        time.sleep(0.05)


def _memory_mb() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MB


if __name__ == "__main__":
    main()
