"""The events with one routing key: `stream.read(key=...)` beside a scan of the chunks' columns with pyarrow."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import headwater as hw
from benchmarks.bench import Bench
from benchmarks.results import Result, at_least, in_turns, median_ratio
from headwater.segments.chunk import ROW_GROUP_BYTES

_SIZE = 100
#: The rare key is in one of them.
_GROUPS = 100
#: All in the middle of the other keys: statistics deny none of them.
_NOBODY, _RARE, _OFTEN = "user-5-nobody", "user-5-rare", "user-5-often"
#: What an event is made of.
_COLUMNS = ["value", "_key", "_time", "_number"]


def one_key(bench: Bench) -> Iterator[Result]:
    """One key's events out of chunks: of a key that is nowhere, in one row group of a hundred, in each of them."""
    groups = max(4, min(_GROUPS, bench.sizes.read_events // 10_000))
    with bench.place(bench.catalogs[0]) as place, hw.open(place.url, catalog=place.catalog, upkeep=False) as store:
        stream = store.create_stream("bench/keys")
        _write(stream, groups)
        store.run_upkeep()
        files = [chunk.url.removeprefix("file://") for chunk in stream.chunks()]
        assert sum(pq.read_metadata(file).num_row_groups for file in files) >= groups, "as many row groups as are meant"
        for variant, key, goal in (("nowhere", _NOBODY, 10), (f"in 1 of {groups} row groups", _RARE, 10), ("everywhere", _OFTEN, 1)):
            own, scan = in_turns(
                bench.sizes.rounds + 2,
                partial(_seconds, partial(_read, stream, key)),
                partial(_seconds, partial(_scan, files, key.encode())),
            )
            assert _read(stream, key) == _scan(files, key.encode())
            rates = [1000 * statistics.median(found) for found in (own, scan)]
            yield Result("one-key", variant, rates[0], "ms", rates[1], "pyarrow scans", median_ratio(scan, own), at_least(goal, "ratio"))


def _write(stream: hw.Stream, groups: int) -> None:
    """Batches that each fill a row group."""
    # A batch takes its place whole only if no other one fits beside it.
    rows = ROW_GROUP_BYTES * 2 // 3 // _SIZE
    random = np.random.default_rng(1)
    with stream.writer() as writer:
        for group in range(groups):
            data = random.bytes(rows * _SIZE)
            keys = [f"user-{number}" for number in random.integers(0, 1_000_000, rows)]
            keys[7] = _RARE if group == groups // 2 else keys[7]
            keys[1000 :: rows // 4] = [_OFTEN] * len(keys[1000 :: rows // 4])
            values = pa.array([data[start : start + _SIZE] for start in range(0, len(data), _SIZE)], pa.binary())
            writer.write_batch(pa.table({"value": values, "key": keys}), key="key")
            writer.flush()


def _read(stream: hw.Stream, key: str) -> int:
    return sum(len(event.value) for event in stream.read(key=key))


def _scan(files: list[str], key: bytes) -> int:
    """The bytes of a key's values, by reading the columns, verified as ours are, and looking at each key."""
    tables = [pq.read_table(file, columns=_COLUMNS, filters=[("_key", "==", key)], page_checksum_verification=True) for file in files]
    return sum(len(value) for table in tables for value in table.column("value").to_pylist())


def _seconds(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun
