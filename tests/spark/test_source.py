"""The source in batches: columns and types, places, pruning, partitions, and clear words for mistakes."""

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headwater as hw
import headwater.spark
import headwater.spark.history
from tests.spark.pipelines import SOURCE, Lab

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_a_stream_is_a_dataframe_with_its_columns_and_where_each_event_is(lab: Lab) -> None:
    stream = lab.create()
    lab.fill(0, 100)
    rows = lab.batch().collect()
    assert lab.batch().columns == ["id", "name", "_key", "_time", "_stream", "_segment", "_number"]
    found = {(row["_segment"], row["_number"]): (row["id"], row["name"], bytes(row["_key"]), row["_stream"]) for row in rows}
    expected = {event.position: (event.value["id"], event.value["name"], event.key, SOURCE) for event in stream.read()}
    assert found == expected


def test_opaque_events_are_a_column_of_bytes(lab: Lab) -> None:
    stream = lab.create(schema=None)
    with stream.writer() as writer:
        writer.write(b"\x00\xff", key=7, time=datetime(2026, 1, 2, tzinfo=UTC))
        writer.write("text")
    first, second = lab.batch(columns="value,_key,_time").orderBy("_key").collect()
    assert (bytes(second.value), bytes(second._key)) == (b"\x00\xff", b"7")
    assert second._time.astimezone(UTC) == datetime(2026, 1, 2, tzinfo=UTC)
    assert (bytes(first.value), first._key) == (b"text", None)


#: For each type a value as it is written, and as it is in Spark.
TYPES: list[tuple[pa.DataType, Any, Any]] = [
    (pa.bool_(), True, True),
    (pa.int8(), -7, -7),
    (pa.uint8(), 250, 250),
    (pa.uint16(), 65535, 65535),
    (pa.uint32(), 4_000_000_000, 4_000_000_000),
    (pa.uint64(), 2**64 - 1, Decimal(2**64 - 1)),
    (pa.float32(), 0.5, 0.5),
    (pa.float64(), 1e300, 1e300),
    (pa.decimal128(20, 3), Decimal("1.250"), Decimal("1.250")),
    (pa.large_string(), "é", "é"),
    (pa.large_binary(), b"b", b"b"),
    (pa.binary(2), b"ab", b"ab"),
    (pa.date32(), date(2026, 1, 2), date(2026, 1, 2)),
    (pa.date64(), date(2026, 1, 2), date(2026, 1, 2)),
    (pa.time32("s"), time(1, 2, 3), time(1, 2, 3)),
    (pa.timestamp("ms"), datetime(2026, 1, 2, 3), datetime(2026, 1, 2, 3)),
    (pa.timestamp("ns"), datetime(2026, 1, 2, 3, 4, 5, 6), datetime(2026, 1, 2, 3, 4, 5, 6)),
    (pa.duration("ms"), timedelta(seconds=1.5), timedelta(seconds=1.5)),
    (pa.list_(pa.int32()), [1, None, 3], [1, None, 3]),
    (pa.large_list(pa.string()), ["a"], ["a"]),
    (pa.map_(pa.string(), pa.int64()), {"a": 1}, {"a": 1}),
]


def test_every_type_arrives_as_the_nearest_that_spark_has(lab: Lab) -> None:
    schema = pa.schema([pa.field(f"c{index}", kind) for index, (kind, _, _) in enumerate(TYPES)])
    nested = pa.field("nested", pa.struct([pa.field("a", pa.int32()), pa.field("b", pa.timestamp("s", "UTC"))]))
    stream = lab.create(schema=schema.append(nested), segments=1)
    written = {f"c{index}": value for index, (_, value, _) in enumerate(TYPES)} | {
        "nested": {"a": 1, "b": datetime(2026, 1, 1, tzinfo=UTC)}
    }
    with stream.writer() as writer:
        writer.write(written)
        writer.write(dict.fromkeys(written))
    full, empty = lab.batch().orderBy("_number").collect()
    for index, (kind, _, expected) in enumerate(TYPES):
        found = full[f"c{index}"]
        assert (bytes(found) if isinstance(found, bytearray) else found) == expected, kind
        assert empty[f"c{index}"] is None
    assert full.nested.a == 1 and full.nested.b.astimezone(UTC) == datetime(2026, 1, 1, tzinfo=UTC)
    # And back: what Spark made of a type fits where it came from.
    lab.create("t/back", schema=stream.schema)
    lab.batch().write.format("headwater").options(**lab.place, stream="t/back").mode("append").save()
    assert lab.store.stream("t/back").to_arrow(columns=stream.schema.names) == stream.to_arrow(columns=stream.schema.names)


def test_start_and_end_are_cuts_times_and_words(lab: Lab) -> None:
    stream = lab.create()
    lab.fill(0, 10)
    middle = stream.tail()
    lab.fill(10, 30)

    def ids(**options: str) -> list[int]:
        return sorted(row.id for row in lab.batch(columns="id", **options).collect())

    assert ids(end=str(middle)) == list(range(10))
    assert ids(start=str(middle), end="tail") == list(range(10, 30))
    assert ids(start="tail") == []
    assert ids(start="2000-01-01", end=datetime.now(UTC).isoformat()) == list(range(30))
    assert ids(end="2000-01-01T00:00:00+00:00") == []


def test_columns_and_conditions_prune_at_the_source(lab: Lab) -> None:
    lab.create()
    lab.fill(0, 100)
    pruned = lab.batch(columns="id", where="name IN ('n1', 'n2') AND id BETWEEN 10 AND 20 OR _key = 'k5' AND id < 10")
    assert pruned.columns == ["id"]
    assert sorted(row.id for row in pruned.collect()) == [5, 15, 16]
    assert lab.batch(where="_number < 3 and _appended > '2020-01-01' and _time is not null").count() == 6
    assert lab.batch(where="_time < TIMESTAMP '2020-01-01 00:00:00'").count() == 0


def test_spark_pushes_its_own_filters_where_that_is_switched_on(lab: Lab) -> None:
    lab.create()
    lab.fill(0, 100)
    lab.spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        found = lab.batch().where("id > 90 and name = 'n0' and _time > '2020-01-01' and id % 2 = 1")
        assert sorted(row.id for row in found.collect()) == [91]
        assert lab.batch().where("name is null").count() == 0
    finally:
        lab.spark.conf.set("spark.sql.python.filterPushdown.enabled", "false")


def test_large_ranges_are_cut_and_small_ones_joined(lab: Lab) -> None:
    lab.create(segments=8)
    lab.fill(0, 2000)
    assert lab.batch().rdd.getNumPartitions() == 1
    cut = lab.batch(partition_bytes="3000")
    assert cut.rdd.getNumPartitions() > 8
    assert sorted(row.id for row in cut.collect()) == list(range(2000))


def test_several_streams_are_read_as_one(lab: Lab) -> None:
    lab.create("t/a")
    wider = lab.create("t/b", schema=pa.schema([("id", pa.int64()), ("extra", pa.string())]))
    lab.fill(0, 5, "t/a")
    with wider.writer() as writer:
        writer.write({"id": 5, "extra": "x"})
    both = lab.spark.read.format("headwater").options(**lab.place, streams="t/a, t/b").load()
    found = {row.id: (row._stream, row.name, row.extra) for row in both.collect()}
    assert found[5] == ("t/b", None, "x") and found[4] == ("t/a", "n4", None) and len(found) == 6
    assert both.where("extra = 'x'").count() == 1


def test_a_stream_that_grew_a_column_is_read_with_it(lab: Lab) -> None:
    stream = lab.create()
    lab.fill(0, 3)
    stream.update(schema=pa.schema([*stream.schema, pa.field("more", pa.int64())]))
    with stream.writer() as writer:
        writer.write({"id": 3, "name": "x", "more": 9})
    assert {row.id: row.more for row in lab.batch().collect()} == {0: None, 1: None, 2: None, 3: 9}


def test_an_empty_stream_is_an_empty_dataframe(lab: Lab) -> None:
    lab.create()
    assert lab.batch().count() == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stream": "t/none"}, "there is no stream t/none"),
        ({"stream": SOURCE, "columns": "id,nope"}, "has no column 'nope'"),
        ({"stream": SOURCE, "where": "id >"}, "a value is expected"),
        ({"stream": SOURCE, "where": "nope = 1"}, "has no column 'nope'"),
        ({"stream": SOURCE, "start": "yesterday"}, "head, tail, the text of a cut, or an ISO time"),
        ({"stream": SOURCE, "max_event_per_batch": "1"}, "has no option 'max_event_per_batch'; it has: "),
        ({"stream": SOURCE, "max_events_per_batch": "0"}, "a whole number above 0, not '0'"),
        ({}, "which stream?"),
    ],
)
def test_a_mistake_is_told_in_one_line(lab: Lab, options: dict[str, str], words: str) -> None:
    lab.create()
    with pytest.raises(Exception, match="Error: ") as caught:
        lab.spark.read.format("headwater").options(**lab.place, **options).load().count()
    assert words in str(caught.value)


def test_a_store_that_is_not_there_is_told(lab: Lab) -> None:
    with pytest.raises(Exception, match="there is no headwater store at"):
        lab.spark.read.format("headwater").options(store=str(lab.folder / "none"), stream=SOURCE).load()


def test_history_in_parquet_and_the_tail_are_one_table(lab: Lab) -> None:
    stream = lab.create()
    lab.fill(0, 3000)
    lab.store.run_upkeep()
    assert stream.chunks()
    stream.split(0)
    lab.fill(3000, 3100)
    whole = headwater.spark.table(lab.spark, lab.store, SOURCE)
    assert whole.columns == lab.batch().columns
    assert sorted(row.id for row in whole.select("id").collect()) == list(range(3100))
    assert whole.subtract(lab.batch()).count() == 0
    middle = lab.store.advance(stream.head(), max_events=1000)
    assert headwater.spark.table(lab.spark, lab.store, SOURCE, middle).count() == sum(part.count for part in stream.ranges(middle))


def test_a_folder_of_chunks_is_a_table_for_spark_without_headwater(lab: Lab) -> None:
    stream = lab.create()
    lab.fill(0, 3000)
    lab.store.run_upkeep()
    found = lab.spark.read.parquet(str(lab.folder / "store" / "chunks" / f"{stream.name}-{stream.id}"))
    expected = {(event.position.segment, event.position.number): (event.value["id"], event.key) for event in stream.read()}
    assert {(row.segment, row._number): (row.id, bytes(row._key)) for row in found.collect()} == expected
    assert len(expected) == 3000


def test_history_of_many_segments_is_one_table_too(lab: Lab) -> None:
    stream = lab.create(segments=4)
    lab.fill(0, 500)
    lab.store.run_upkeep()
    middle = lab.store.advance(stream.head(), max_events=200)
    lab.fill(500, 510)
    for start in (None, middle):
        expected = lab.batch(**({} if start is None else {"start": str(start)}))
        found = headwater.spark.table(lab.spark, lab.store, SOURCE, start)
        assert sorted(found.collect()) == sorted(expected.collect())
    one = headwater.spark.table(lab.spark, lab.store, SOURCE, end=middle).where("_segment = 1")
    assert sorted(one.collect()) == sorted(lab.batch(end=str(middle)).where("_segment = 1").collect())


def test_history_of_a_fork_is_one_table_with_its_parents(lab: Lab) -> None:
    stream = lab.create(segments=2)
    lab.fill(0, 500)
    lab.store.run_upkeep()
    stream.split(0)
    lab.fill(500, 600)
    fork = stream.fork("t/fork")
    with fork.writer() as writer:
        writer.write({"id": 600, "name": "x"}, key="k")
    lab.store.run_upkeep()
    assert len({chunk.url.rpartition("/segment=")[0] for chunk in fork.chunks()}) == 2
    found = headwater.spark.table(lab.spark, lab.store, "t/fork")
    assert sorted(found.collect()) == sorted(lab.batch("t/fork").collect())
    assert found.count() == 601


def test_history_up_to_a_tagged_cut_is_all_that_the_tag_keeps(lab: Lab) -> None:
    stream = lab.create()
    lab.create("t/other")
    lab.fill(0, 10)
    lab.store.run_upkeep()
    tagged = lab.store.cut(SOURCE, "t/other")
    lab.store.tag("v1", tagged)
    lab.fill(10, 20)
    stream.truncate(stream.tail())
    for end in (tagged, str(tagged)):
        found = headwater.spark.table(lab.spark, lab.store, SOURCE, end=end)
        assert sorted(row.id for row in found.collect()) == list(range(10))


def test_history_with_a_column_that_is_called_segment(lab: Lab) -> None:
    """As the folders of its files are."""
    stream = lab.create(schema=pa.schema([("Segment", pa.string())]), segments=2)
    with stream.writer() as writer:
        writer.write_batch(pa.table({"Segment": [f"of {number}" for number in range(100)], "_key": [str(number) for number in range(100)]}))
    lab.store.run_upkeep()
    found = headwater.spark.table(lab.spark, lab.store, SOURCE)
    assert {row.Segment for row in found.collect()} == {f"of {number}" for number in range(100)}
    assert sorted(found.collect()) == sorted(lab.batch().collect())


def test_history_is_read_in_a_folder_of_any_name(lab: Lab) -> None:
    """Spark takes paths as they are, and brackets in them for a pattern."""
    with hw.open(lab.folder / "my store [1] a%20b {c,d}", upkeep=False) as store:
        other = Lab(lab.spark, store, lab.folder)
        stream = other.create()
        other.fill(0, 10)
        store.run_upkeep()
        assert stream.chunks()
        middle = store.advance(stream.head(), max_events=4)
        assert headwater.spark.table(lab.spark, store, SOURCE).count() == 10
        assert headwater.spark.table(lab.spark, store, SOURCE, end=middle).count() == 4


def test_history_of_a_column_with_a_backtick(lab: Lab) -> None:
    stream = lab.create(schema=pa.schema([("tick`", pa.int32())]))
    with stream.writer() as writer:
        writer.write({"tick`": 7})
    lab.store.run_upkeep()
    assert [row["tick`"] for row in headwater.spark.table(lab.spark, lab.store, SOURCE).collect()] == [7]


def test_an_open_store_is_not_looked_for_where_the_environment_says(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.create()
    lab.fill(0, 5)
    monkeypatch.setenv("HEADWATER_CATALOG", "postgresql://nobody@127.0.0.1:1/none")
    assert headwater.spark.table(lab.spark, lab.store, SOURCE).count() == 5


def test_blocks_become_parquet_in_as_many_tasks_at_once_as_there_is_room_for(lab: Lab) -> None:
    lab.create(segments=4)
    lab.fill(0, 500)
    context = lab.spark.sparkContext
    context.setJobGroup("compact", "in this test")
    try:
        assert headwater.spark.compact(lab.spark, lab.store, SOURCE).chunks == 4
    finally:
        context.setLocalProperty("spark.jobGroup.id", None)  # type: ignore[arg-type]
    assert context.defaultParallelism == 2
    assert len(context.statusTracker().getJobIdsForGroup("compact")) == 2


def test_blocks_become_parquet_in_tasks_of_which_one_may_fail(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = lab.create()
    lab.fill(0, 500)
    done = headwater.spark.compact(lab.spark, lab.store, SOURCE)
    assert done.chunks == 2 and done.events == 500
    assert sum(chunk.count for chunk in stream.chunks()) == 500
    lab.fill(500, 600)
    (lab.folder / "fail").touch()
    monkeypatch.setattr(headwater.spark.history, "_run_job", FailsOnce(lab.folder / "fail"))
    assert headwater.spark.compact(lab.spark, lab.store, SOURCE).events == 100
    assert not (lab.folder / "fail").exists()
    assert sorted(row.id for row in lab.batch().collect()) == list(range(600))
    lab.check()


class FailsOnce:
    """Runs jobs; the first one that meets its file fails after its work."""

    def __init__(self, flag: Path) -> None:
        self._flag = flag

    def __call__(self, job: Any) -> Any:
        made = job.run()
        if self._flag.exists():
            self._flag.unlink()
            raise RuntimeError("this attempt fails")
        return made


def test_a_stream_of_bytes_is_refused(lab: Lab) -> None:
    lab.store.create_stream("t/bytes", kind="bytes")
    with pytest.raises(Exception, match="is a stream of bytes"):
        lab.batch("t/bytes").count()


def test_a_cut_of_another_store_is_refused(lab: Lab) -> None:
    lab.create()
    other = hw.Cut("elsewhere", lab.store.stream(SOURCE).head().streams)
    with pytest.raises(Exception, match="another store"):
        lab.batch(start=str(other)).count()
