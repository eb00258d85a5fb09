"""Without a session: options and where they point to, and rows on their way into a table or a commit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headwater as hw
from headwater.spark.addresses import read_address
from headwater.spark.options import find_local, read_sink_options, read_source_options
from headwater.spark.pieces import Staged, _to_ipc
from headwater.spark.rows import to_entries
from headwater.spark.source import StreamReader, source_schema
from headwater.spark.staging import gather
from tests.spark.pipelines import SCHEMA, SINK, SOURCE


@pytest.fixture
def store(tmp_path: Path) -> Iterator[hw.Store]:
    with hw.open(tmp_path / "store", upkeep=False) as store:
        yield store


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/ck/a b", "/ck/a b"),
        ("ck/x", "ck/x"),
        ("ck/a:b", "ck/a:b"),
        ("file:/ck/x", "/ck/x"),
        ("file:///ck/a%20b", "/ck/a%20b"),
        ("file://localhost/ck", "/ck"),
        ("hdfs:/ck", None),
        ("dbfs:/ck/x", None),
        ("s3a://bucket/ck", None),
        (None, None),
    ],
)
def test_a_checkpoint_is_read_where_spark_writes_it_if_that_is_here(path: str | None, expected: str | None) -> None:
    assert find_local(path) == (Path(expected) if expected is not None else None)


def test_a_catalog_that_is_given_and_empty_is_none_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWATER_CATALOG", "postgresql://elsewhere")
    assert read_address({"store": "x", "catalog": ""}).catalog is None
    assert read_address({"store": "x"}).catalog == "postgresql://elsewhere"


@pytest.mark.parametrize("option", ["start", "end"])
def test_a_query_neither_begins_nor_ends_at_a_time_that_is_to_come(store: hw.Store, option: str) -> None:
    head = store.create_stream(SOURCE, schema=SCHEMA).head()
    soon = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    options = read_source_options({"store": store.url, "stream": SOURCE, option: soon})
    reader = StreamReader(options, source_schema(options))
    try:
        with pytest.raises(hw.InvalidRequestError, match="a time that has passed"):
            reader.initialOffset()
            reader.latestOffset(json.loads(str(head)), reader.getDefaultReadLimit())
    finally:
        reader.stop()


def test_values_of_a_table_are_json_also_where_numbers_are_not_finite() -> None:
    rows = pa.record_batch({"k": ["a"], "x": [float("nan")], "l": [[1.0, float("-inf")]], "s": [{"y": float("inf")}]})
    options = read_sink_options({"store": "x", "table": "t/x", "key": "k"})
    (entry,) = to_entries(rows, options)

    def refuse(name: str) -> Any:
        raise AssertionError(f"{name} is not JSON")

    found = json.loads(entry[1], parse_constant=refuse)
    assert found == {"x": "NaN", "l": [1.0, "-Infinity"], "s": {"y": "Infinity"}}


def test_a_key_of_a_table_that_is_no_text_is_refused() -> None:
    options = read_sink_options({"store": "x", "table": "t/x", "key": "k"})
    with pytest.raises(hw.InvalidRequestError, match=r"give hex\(k\)"):
        list(to_entries(pa.record_batch({"k": [b"\xff\x00"], "x": [1]}), options))


def test_a_commit_waits_for_a_store_that_is_out_of_reach_for_a_moment(store: hw.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = store.create_stream(SINK, schema=SCHEMA)
    rows = pa.record_batch({"id": [1], "name": ["a"]}, schema=SCHEMA)
    messages = [
        Staged(0, "q", 0, rows=[(SINK, _to_ipc(rows))]),
        Staged(1, "q", 0, entries=[("t/table", [("k", b"v")])]),
    ]
    store.table("t/table")
    failures = iter([True, False, True, False])

    def fails_first(call: Any) -> Any:
        def wrapped(*given: Any, **options: Any) -> None:
            if next(failures):
                raise hw.UnavailableError("for a moment")
            call(*given, **options)

        return wrapped

    with store.transaction() as tx:
        monkeypatch.setattr(tx, "write_batch", fails_first(tx.write_batch))
        monkeypatch.setattr(tx, "put", fails_first(tx.put))
        gather(tx, messages, None)
    assert [event.value["id"] for event in stream.read()] == [1]
    assert {key: entry.value for key, entry in store.table("t/table").items()} == {"k": b"v"}
