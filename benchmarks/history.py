"""Long-term history: how fast blocks become Parquet, what that costs those who write, and how fast it is read again."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import headwater as hw
from benchmarks.bench import MB, Bench, Place
from benchmarks.results import Result, at_least, in_turns, median_ratio
from benchmarks.writing import sample_batch
from headwater.check import stream_contents
from headwater.streams import upkeep

_COLUMNS = 20


def tiering(bench: Bench) -> Iterator[Result]:
    """One round of upkeep over events of 1 kB, beside pyarrow writing the same table with the same compression."""
    for catalog in bench.catalogs:
        own, plain = [], []
        for _ in range(bench.sizes.rounds):
            with bench.place(catalog) as place, hw.open(place.url, catalog=place.catalog, upkeep=False) as store:
                stream = store.create_stream("bench/tier")
                _write(stream, bench.sizes.batch_mb)
                begun = time.perf_counter()
                report = store.run_upkeep()
                own.append(report.bytes_tiered / MB / (time.perf_counter() - begun))
                plain.append(report.bytes_tiered / MB / _seconds_to_write(stream.to_arrow(), bench.path()))
        ratio = median_ratio(own, plain)
        yield Result("tiering", catalog.name, statistics.median(own), "MB/s", statistics.median(plain), "pyarrow writes Parquet", ratio)


def _write(stream: hw.Stream, megabytes: int) -> None:
    batch = sample_batch(4000, 1000)
    with stream.writer() as writer:
        for _ in range(max(1, megabytes * MB // 4_000_000)):
            writer.write_batch(batch, key="user")


def _seconds_to_write(table: pa.Table, path: Path) -> float:
    begun = time.perf_counter()
    pq.write_table(table, path, compression="zstd", compression_level=1, row_group_size=16_000)
    taken = time.perf_counter() - begun
    path.unlink()
    return taken


def writing_beside(bench: Bench) -> Iterator[Result]:
    """Batches written while upkeep tiers what was written before, beside the same without upkeep."""
    for catalog in bench.catalogs:
        megabytes = bench.sizes.batch_mb * 4
        with (
            bench.place(catalog) as quiet,
            bench.place(catalog) as busy,
            hw.open(quiet.url, catalog=quiet.catalog, upkeep=False) as alone,
            hw.open(busy.url, catalog=busy.catalog) as shared,
        ):
            streams = [store.create_stream("bench/beside") for store in (alone, shared)]
            while not shared._upkeep._is_held:
                time.sleep(0.1)
            before = vars(upkeep)["TIER_BYTES"]
            vars(upkeep)["TIER_BYTES"] = min(8, megabytes // 4) * MB
            try:
                # So much that upkeep is at work all the time that is measured.
                for stream in streams:
                    _write(stream, megabytes)
                while not (begun := stream_contents(streams[1]).chunks):
                    time.sleep(0.1)
                first, second = in_turns(bench.sizes.rounds, *(partial(_seconds_to_fill, stream, megabytes) for stream in streams))
                while bench.sizes.rounds > 1 and stream_contents(streams[1]).chunks == begun:
                    # Small sizes are written before its next round begins.
                    second.append(_seconds_to_fill(streams[1], megabytes))
                    first.append(_seconds_to_fill(streams[0], megabytes))
            finally:
                vars(upkeep)["TIER_BYTES"] = before
        rates = [megabytes / statistics.median(found) for found in (second, first)]
        ratio, goal = median_ratio(first, second), at_least(0.9, "ratio")
        yield Result("write-beside", f"{catalog.name}, tiering", rates[0], "MB/s", rates[1], "without upkeep", ratio, goal)


def _seconds_to_fill(stream: hw.Stream, megabytes: int) -> float:
    begun = time.perf_counter()
    _write(stream, megabytes)
    return time.perf_counter() - begun


def scans(bench: Bench) -> Iterator[Result]:
    """A typed stream of 20 columns, all in chunks, beside pyarrow reading the same files: all columns, and one of them."""
    catalog = bench.catalogs[0]
    with bench.place(catalog) as place:
        files, count = prepare(place, bench.sizes.read_events)
        with hw.open(place.url, catalog=place.catalog, upkeep=False) as store:
            stream = store.stream("bench/history")
            for variant, columns in (("all columns", None), ("1 column of 20", ["c7"])):
                own, plain = in_turns(
                    bench.sizes.rounds + 2,
                    partial(_seconds_to_scan, stream, columns, count),
                    partial(_seconds_to_read, files, columns, count),
                )
                rates = [count / statistics.median(found) for found in (own, plain)]
                limit = "pyarrow.parquet"
                yield Result("scan", variant, rates[0], "events/s", rates[1], limit, median_ratio(plain, own), at_least(0.8, "ratio"))


def prepare(place: Place, count: int) -> tuple[list[str], int]:
    kinds = [pa.int64(), pa.float64(), pa.string(), pa.int32()]
    schema = pa.schema([(f"c{index}", kinds[index % 4]) for index in range(_COLUMNS)])
    random = np.random.default_rng(1)
    made = {
        pa.int64(): random.integers(0, 1 << 40, 50_000),
        pa.float64(): random.random(50_000),
        pa.string(): np.array([f"city-{number}" for number in random.integers(0, 1000, 50_000)]),
        pa.int32(): random.integers(0, 100, 50_000),
    }
    batch = pa.RecordBatch.from_arrays([pa.array(made[field.type], field.type) for field in schema], schema=schema)
    with hw.open(place.url, catalog=place.catalog, upkeep=False) as store:
        stream = store.create_stream("bench/history", schema=schema)
        with stream.writer() as writer:
            for _ in range(max(1, count // batch.num_rows)):
                writer.write_batch(batch, key="c2")
        store.run_upkeep()
        chunks = stream.chunks()
    return [chunk.url.removeprefix("file://") for chunk in chunks], sum(chunk.count for chunk in chunks)


def _seconds_to_scan(stream: hw.Stream, columns: Sequence[str] | None, count: int) -> float:
    begun = time.perf_counter()
    found = sum(batch.num_rows for part in stream.ranges() for batch in part.to_batches(columns))
    taken = time.perf_counter() - begun
    assert found == count
    return taken


def _seconds_to_read(files: Sequence[str], columns: list[str] | None, count: int) -> float:
    """Row group by row group, as someone would who can't hold all of it."""
    begun = time.perf_counter()
    found = 0
    for file in files:
        found += sum(batch.num_rows for batch in pq.ParquetFile(file).iter_batches(batch_size=1 << 20, columns=columns))
    taken = time.perf_counter() - begun
    assert found == count
    return taken
