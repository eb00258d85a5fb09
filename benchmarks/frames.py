"""Frames of other libraries, in and out of a stream, and a stream as a Dataset: each beside the library's own Parquet files."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow.dataset as ds

import headwater as hw
from benchmarks.bench import Bench
from benchmarks.history import prepare
from benchmarks.results import Result, at_least, in_turns, median_ratio

_LIBRARIES = ("polars", "pandas")


def frames(bench: Bench) -> Iterator[Result]:
    """A frame written to a stream, durably, and all of a stream's chunks as a frame: beside the library and one file of its own."""
    catalog, count = bench.catalogs[0], bench.sizes.read_events
    random = np.random.default_rng(1)
    made = pl.DataFrame({"id": np.arange(count), "amount": random.random(count), "city": random.integers(0, 1000, count).astype(str)})
    for library in _LIBRARIES:
        frame: Any = made if library == "polars" else made.to_pandas()
        file = bench.path()
        with bench.place(catalog) as place, hw.open(place.url, catalog=place.catalog, upkeep=False) as store:
            stream = store.create_stream("bench/frames", schema=made.to_arrow().schema)
            numbers = iter(range(1000))
            own, plain = in_turns(
                bench.sizes.rounds,
                partial(_seconds, lambda: _write(store, frame, next(numbers))),  # noqa: B023 - called in this turn of the loop
                partial(_seconds, lambda: _write_file(frame, file)),  # noqa: B023
            )
            yield _result("frames", f"{library}, in", count, own, plain, None)
            with stream.writer() as writer:
                writer.write_batch(frame)
            store.run_upkeep()
            read_own: Callable[[], Any] = stream.to_polars if library == "polars" else stream.to_pandas
            own, plain = in_turns(
                bench.sizes.rounds,
                partial(_seconds, read_own),
                partial(_seconds, lambda: _read_file(library, file)),  # noqa: B023
            )
            yield _result("frames", f"{library}, out", count, own, plain, None)
        file.unlink()


def datasets(bench: Bench) -> Iterator[Result]:
    """`stream.dataset()` of a typed stream of 20 columns, all in chunks, beside `pyarrow.dataset` over the same files."""
    catalog = bench.catalogs[0]
    with bench.place(catalog) as place:
        files, count = prepare(place, bench.sizes.read_events)
        with hw.open(place.url, catalog=place.catalog, upkeep=False) as store, store.stream("bench/history").dataset() as dataset:
            plain = ds.dataset(files, format="parquet")
            for variant, options in (
                ("all columns", {}),
                ("1 column of 20", {"columns": ["c7"]}),
                ("a filter that few rows pass", {"columns": ["c0"], "filter": ds.field("c0") < 1 << 20}),
            ):
                own, others = in_turns(
                    bench.sizes.rounds + 2,
                    partial(_seconds, partial(dataset.to_table, **options)),
                    partial(_seconds, partial(plain.to_table, **options)),
                )
                yield _result("dataset", variant, count, own, others, "pyarrow.dataset")


def _result(name: str, variant: str, count: int, own: list[float], plain: list[float], limit: str | None) -> Result:
    rates = [count / statistics.median(found) for found in (own, plain)]
    goal = at_least(0.9, "ratio") if limit is not None else None
    return Result(name, variant, rates[0], "events/s", rates[1], limit or "its own Parquet", median_ratio(plain, own), goal)


def _seconds(call: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def _write(store: hw.Store, frame: Any, number: int) -> None:
    stream = store.create_stream(f"bench/in-{number}", schema=store.stream("bench/frames").schema)
    with stream.writer() as writer:
        writer.write_batch(frame)


def _write_file(frame: Any, file: Path) -> None:
    if isinstance(frame, pl.DataFrame):
        frame.write_parquet(file)
    else:
        frame.to_parquet(file)


def _read_file(library: str, file: Path) -> Any:
    if library == "polars":
        return pl.read_parquet(file)
    import pandas as pd  # takes a second, and only this needs it

    return pd.read_parquet(file)
