"""`stream.dataset()`: history and tail as one pyarrow Dataset, with pushed columns and filters, that never meets a missing file."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pytest

import headwater as hw
from headwater import datasets
from tests.crash.processes import wait_until

SCHEMA = pa.schema([("n", pa.int32()), ("s", pa.string())])
WIDER = pa.schema([("n", pa.int64()), ("s", pa.string()), ("more", pa.float64())])


def write(stream: hw.Stream, numbers: range) -> None:
    with stream.writer() as writer:
        writer.write_batch(pl.DataFrame({"n": numbers, "s": [f"text {n}" for n in numbers]}), key="n", missing="null")


@pytest.fixture
def stream(store: hw.Store) -> hw.Stream:
    """Chunks of two schemas, and a tail."""
    stream = store.create_stream("a/stream", schema=SCHEMA, scaling=hw.Scaling.fixed(2))
    write(stream, range(1000))
    store.run_upkeep()
    stream.update(schema=WIDER)
    write(stream, range(1000, 2000))
    store.run_upkeep()
    write(stream, range(2000, 3000))
    return stream


def numbers(table: Any) -> list[int]:
    return sorted(table.column("n").to_pylist())


def test_a_dataset_has_the_rows_and_columns_of_to_arrow(stream: hw.Stream) -> None:
    with stream.dataset() as dataset:
        assert isinstance(dataset, ds.Dataset)
        order = [("_segment", "ascending"), ("_number", "ascending")]
        assert dataset.to_table().sort_by(order).equals(stream.to_arrow().sort_by(order))
        assert dataset.count_rows() == 3000
        found = dataset.to_table(columns=["n", "_segment"], filter=(ds.field("n") >= 995) & (ds.field("n") < 1005))
        assert found.column_names == ["n", "_segment"] and numbers(found) == list(range(995, 1005))


def test_duckdb_and_polars_push_columns_and_filters(stream: hw.Stream) -> None:
    with stream.dataset() as dataset:
        query = "FROM dataset SELECT n WHERE n BETWEEN 998 AND 1001"
        assert sorted(duckdb.sql(query).fetchall()) == [(998,), (999,), (1000,), (1001,)]
        plan = duckdb.sql(f"EXPLAIN {query}").fetchall()[0][1]
        scan = plan[plan.index("SCAN") :]
        assert "Filters" in scan and "n>=998" in scan and "Projections" in scan and "more" not in scan
        frame = pl.scan_pyarrow_dataset(dataset).filter(pl.col("n") > 2997).select("n", "more")
        assert "PYTHON SCAN" in frame.explain() and "FILTER" not in frame.explain().replace("SELECTION", "")
        assert sorted(frame.collect()["n"].to_list()) == [2998, 2999]


def test_a_filter_skips_segments_and_row_groups_by_their_statistics(local_store: hw.Store) -> None:
    stream = local_store.create_stream("a/large", schema=pa.schema([("n", pa.int64())]))
    with stream.writer() as writer:
        for start in range(0, 800_000, 100_000):
            writer.write_batch(pa.table({"n": range(start, start + 100_000)}))
            writer.flush()
    local_store.run_upkeep()
    with stream.dataset() as dataset:
        wanted = ds.field("n") < 10
        (chunk,) = dataset.get_fragments()
        assert chunk.num_row_groups > 2
        assert chunk.subset(filter=wanted).num_row_groups == 1
        assert numbers(dataset.to_table(filter=wanted)) == list(range(10))
        assert list(dataset.get_fragments(filter=ds.field("_segment") == 5)) == []


def test_a_dataset_begins_and_ends_in_the_midst_of_chunks_and_blocks(store: hw.Store) -> None:
    stream = store.create_stream("a/stream", schema=SCHEMA)
    cuts = []
    for start in range(0, 1000, 100):
        cuts.append(stream.tail())
        write(stream, range(start, start + 100))
    store.run_upkeep()
    for start in range(1000, 2000, 100):
        cuts.append(stream.tail())
        write(stream, range(start, start + 100))
    assert len(stream.chunks()) == 1
    for first, last in ((0, 3), (3, 7), (7, 12), (12, 15), (5, 5)):
        with stream.dataset(cuts[first], cuts[last]) as dataset:
            assert numbers(dataset.to_table()) == list(range(first * 100, last * 100))
    with stream.dataset(cuts[15]) as dataset:
        write(stream, range(9000, 9010))
        assert numbers(dataset.to_table()) == list(range(1500, 2000)), "what was appended later is not in it"
    fork = stream.fork("a/fork", at=cuts[5])
    with fork.dataset() as dataset:
        assert numbers(dataset.to_table()) == list(range(500))


def test_what_a_dataset_names_stays_until_it_is_closed(store: hw.Store, stream: hw.Stream) -> None:
    dataset = stream.dataset()
    again = stream.dataset()
    stream.truncate(stream.tail())
    write(stream, range(5000, 5100))
    store.run_upkeep()
    assert numbers(dataset.to_table()) == numbers(again.to_table()) == list(range(3000))
    scanner = again.scanner()
    relation = duckdb.sql("SELECT count(*) FROM again")
    dataset.close()
    dataset.close()
    store.run_upkeep()
    assert numbers(again.to_table()) == list(range(3000)), "each dataset holds for itself"
    again.close()
    store.run_upkeep()
    assert store.run_upkeep().objects_deleted == 0, "what only they held is gone"
    for read in (dataset.to_table, again.count_rows, lambda: again.scanner(columns=["n"]), scanner.to_table):
        with pytest.raises(hw.InvalidRequestError, match="this dataset of a/stream was closed"):
            read()
    with pytest.raises((duckdb.Error, hw.InvalidRequestError)):
        relation.fetchall()


READS: dict[str, Callable[[Any], int]] = {
    "duckdb": lambda dataset: duckdb.sql("SELECT count(*) FROM dataset WHERE n >= 0").fetchall()[0][0],
    "polars": lambda dataset: pl.scan_pyarrow_dataset(dataset).select("n").collect().height,
    "pyarrow": lambda dataset: dataset.to_table().num_rows,
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
@pytest.mark.parametrize("closed_at", [1, 2, 3])
def test_a_dataset_that_is_closed_in_the_middle_of_a_query_says_so(
    stream: hw.Stream, closed_at: int, read: Callable[[Any], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = stream.dataset()
    opened = 0
    open_file = datasets._Files.open_input_file

    def close_and_open(files: Any, path: str) -> Any:
        nonlocal opened
        opened += 1
        if opened == closed_at:
            dataset.close()
        return open_file(files, path)

    monkeypatch.setattr(datasets._Files, "open_input_file", close_and_open)
    for _ in range(2):
        with pytest.raises((duckdb.Error, hw.InvalidRequestError), match="this dataset of a/stream was closed"):
            read(dataset)


@pytest.mark.timeout(60)
def test_duckdb_begins_to_read_while_files_are_slow_to_open(stream: hw.Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that begins under the interpreter's lock waits for no thread that wants this lock."""
    open_file = datasets._Files.open_input_file

    def open_slowly(files: Any, path: str) -> Any:
        time.sleep(0.002)
        return open_file(files, path)

    monkeypatch.setattr(datasets._Files, "open_input_file", open_slowly)
    for _ in range(100):
        with stream.dataset() as dataset:  # noqa: F841 - DuckDB finds it by this name
            assert duckdb.sql("SELECT count(*) FROM dataset WHERE n >= 0").fetchall() == [(3000,)]


def test_opening_a_dataset_reads_the_footers_of_chunks_alone_that_its_ends_cut(
    local_store: hw.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = local_store.create_stream("a/stream", schema=SCHEMA)
    write(stream, range(1000))
    middle = stream.tail()
    write(stream, range(1000, 2000))
    local_store.run_upkeep()
    assert len(stream.chunks()) == 1
    opened: list[str] = []
    open_file = datasets._Files.open_input_file

    def note_and_open(files: Any, path: str) -> Any:
        opened.append(path)
        return open_file(files, path)

    monkeypatch.setattr(datasets._Files, "open_input_file", note_and_open)
    with stream.dataset() as dataset:
        assert opened == []
        assert numbers(dataset.to_table()) == list(range(2000))
        assert len(set(opened)) == 1
    opened.clear()
    with stream.dataset(middle) as dataset:
        assert len(set(opened)) == 1
        assert numbers(dataset.to_table()) == list(range(1000, 2000))


def test_a_dataset_that_was_collected_holds_no_more(store: hw.Store, stream: hw.Stream) -> None:
    dataset = stream.dataset()
    stream.truncate(stream.tail())
    before = len(list(store._engine.storage.list("chunks/"))) or len(list(store._engine.storage.list("")))
    scanner = dataset.scanner()
    del dataset
    gc.collect()
    store.run_upkeep()
    assert scanner.to_table().num_rows == 3000, "a scanner may still read"
    del scanner
    gc.collect()

    def is_gone() -> bool:
        store.run_upkeep()
        return (len(list(store._engine.storage.list("chunks/"))) or len(list(store._engine.storage.list("")))) < before

    wait_until(is_gone)


def test_a_dataset_of_a_store_that_was_closed_says_so(local_store: hw.Store) -> None:
    stream = local_store.create_stream("a/stream", schema=SCHEMA)
    write(stream, range(10))
    dataset = stream.dataset()
    scanner = dataset.scanner()
    local_store.close()
    for read in (dataset.to_table, scanner.to_table, lambda: dataset.schema):
        with pytest.raises(hw.InvalidRequestError, match="was closed"):
            read()


def test_a_dataset_of_what_is_gone_is_refused_at_once(stream: hw.Stream) -> None:
    start = stream.head()
    stream.truncate(stream.tail())
    with pytest.raises(hw.TruncatedError):
        stream.dataset(start)
    for wrong in (5, "middle"):
        with pytest.raises(hw.InvalidRequestError):
            stream.dataset(wrong)  # type: ignore[arg-type]


def test_the_import_of_headwater_does_not_load_pyarrow_dataset() -> None:
    program = "import sys, headwater; assert 'pyarrow.dataset' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
