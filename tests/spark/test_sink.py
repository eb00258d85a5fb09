"""The sinks: keys, times, schemas, streams and tables; batches that come twice or from a checkpoint that was rolled back."""

from __future__ import annotations

import json
import shutil
from datetime import UTC, datetime

import pyarrow as pa
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame
from pyspark.sql import functions as f
from pyspark.sql.readwriter import DataFrameWriter

import headwater as hw
import headwater.spark
from tests.spark.pipelines import SINK, SOURCE, Lab, finish, forget_commits

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_key_time_and_columns_arrive_where_a_writer_would_put_them(lab: Lab) -> None:
    df = lab.spark.sql("SELECT id, CAST(id % 3 AS INT) AS bucket, timestamp_micros(id * 1000000) AS at FROM range(10)")
    df.write.format("headwater").options(**lab.place, stream=SINK, key="bucket", time="at", create="true", segments="4").mode(
        "append"
    ).save()
    stream = lab.store.stream(SINK)
    assert len(stream.segments()) == 4
    assert stream.schema == pa.schema([("id", pa.int64()), ("bucket", pa.int32()), ("at", pa.timestamp("us", "UTC"))])
    other = lab.store.create_stream("t/writer", scaling=hw.Scaling.fixed(4))
    with other.writer() as writer:
        expected = {key: writer.write("x", key=key).result(30).segment for key in (0, 1, 2)}
    for event in stream.read():
        assert event.key == str(event.value["bucket"]).encode()
        assert event.time == datetime.fromtimestamp(event.value["id"], UTC)
        assert event.position.segment == expected[event.value["bucket"]]


def test_a_dataframe_is_written_whole_or_not_at_all(lab: Lab) -> None:
    lab.create(SINK)
    # Large enough to be staged by tasks, not sent along; the last partition fails.
    df = lab.spark.range(0, 40_000, 1, 4).selectExpr("id", "IF(id = 39999, CAST(raise_error('boom') AS STRING), repeat('x', 20)) AS name")
    with pytest.raises(Exception, match="boom"):
        df.write.format("headwater").options(**lab.place, stream=SINK).mode("append").save()
    assert lab.ids() == []
    df.where("id < 39999").write.format("headwater").options(**lab.place, stream=SINK, key="id").mode("append").save()
    assert sorted(lab.ids()) == list(range(39_999))
    lab.check()


def test_rows_of_one_batch_go_to_several_streams_at_once(lab: Lab) -> None:
    lab.create()
    lab.create("t/even")
    lab.create("t/odd", schema=pa.schema([("id", pa.int64())]))
    lab.fill(0, 50)
    routed = lab.source().select(
        "id", f.expr("IF(id % 2 = 0, name, NULL) AS name"), "_key", f.expr("IF(id % 2 = 0, 't/even', 't/odd') AS target")
    )
    finish(lab.sink(routed, stream_column="target"))
    assert sorted(lab.ids("t/even")) == list(range(0, 50, 2)) and sorted(lab.ids("t/odd")) == list(range(1, 50, 2))


def test_a_table_takes_the_last_row_of_a_key(lab: Lab) -> None:
    lab.create()
    lab.fill(0, 100)
    finish(lab.sink(lab.source(max_events_per_batch=40).select("name", "id"), table="t/last", key="name", create="true"))
    assert set(lab.table("t/last")) == {f"n{number}" for number in range(7)}
    values = lab.spark.createDataFrame([("a", b"raw"), ("b", b"more")], "k string, value binary")
    values.write.format("headwater").options(**lab.place, table="t/raw", key="k", create="true").mode("append").save()
    assert lab.table("t/raw") == {"a": b"raw", "b": b"more"}


def test_complete_mode_replaces_a_table(lab: Lab) -> None:
    lab.create()
    lab.fill(0, 70)
    lab.store.table("t/counts").put("old", b"gone after the first batch")
    counts = lab.source().groupBy("name").count()
    finish(lab.sink(counts, table="t/counts", key="name").outputMode("complete"))
    assert lab.table("t/counts") == {f"n{number}": b'{"count":10}' for number in range(7)}


def test_update_mode_goes_through_upsert_exactly_once(lab: Lab) -> None:
    lab.create()
    lab.fill(0, 70)
    calls = []
    upsert = headwater.spark.upsert(lab.store, "t/counts")

    def twice(df: DataFrame, batch: int) -> None:
        upsert(df, batch)
        calls.append(batch)
        if len(calls) == 1:
            raise RuntimeError("after the commit, before Spark hears of it")

    def run() -> None:
        query = lab.source().groupBy("name").count().writeStream.outputMode("update").foreachBatch(twice)
        finish(query.option("checkpointLocation", str(lab.folder / "c")))

    with pytest.raises(StreamingQueryException, match="before Spark hears"):
        run()
    run()
    assert calls[:2] == [0, 0]
    assert lab.table("t/counts") == {f"n{number}": b'{"count":10}' for number in range(7)}
    assert len(list(lab.store.table("t/counts").changes())) == 7
    lab.check()


def test_an_output_of_foreach_batch_that_the_catalog_forgot_is_not_left_out(lab: Lab) -> None:
    lab.create()
    lab.fill(0, 60)
    failures = iter([True, False])

    def outputs(df: DataFrame, batch: int) -> None:
        with headwater.spark.transaction(df, batch, lab.store) as tx:
            tx.write(df.where("id % 2 = 0").select("id", "name"), "t/even", key="id", create=True)
            if next(failures):
                # As a fail-over to a standby that lagged: the transaction is known, and what was staged is not.
                lab.store._engine.database.write(lambda tx: [tx.run(f"DELETE FROM {table}") for table in ("txn_term", "txn_extent")])
            tx.write(df.where("id % 2 = 1").select("id", "name"), "t/odd", key="id", create=True)

    def run() -> None:
        finish(lab.source().writeStream.foreachBatch(outputs).option("checkpointLocation", str(lab.folder / "c")))

    with pytest.raises(StreamingQueryException, match="went back in time"):
        run()
    assert lab.ids("t/even") == lab.ids("t/odd") == []
    run()
    assert sorted(lab.ids("t/even") + lab.ids("t/odd")) == list(range(60))


def test_several_outputs_of_foreach_batch_are_one_commit_and_once(lab: Lab) -> None:
    lab.create()
    lab.fill(0, 60)
    failures = iter([True, True, False])

    def outputs(df: DataFrame, batch: int) -> None:
        with headwater.spark.transaction(df, batch, lab.store) as tx:
            tx.write(df.where("id % 2 = 0").select("id", "name"), "t/even", key="id", create=True)
            tx.write(df.where("id % 2 = 1").select("id", "name"), "t/odd", key="id", create=True)
            if next(failures):
                raise RuntimeError("between the outputs")
            tx.upsert(df.groupBy("name").count(), "t/counts")

    def run() -> None:
        finish(lab.source().writeStream.foreachBatch(outputs).option("checkpointLocation", str(lab.folder / "c")))

    for _ in range(2):
        with pytest.raises(StreamingQueryException, match="between the outputs"):
            run()
        assert lab.ids("t/even") == lab.ids("t/odd") == []
    run()
    assert sorted(lab.ids("t/even") + lab.ids("t/odd")) == list(range(60))
    assert len(lab.table("t/counts")) == 7
    lab.check()
    with pytest.raises(hw.InvalidRequestError, match="foreachBatch"):
        headwater.spark.transaction(lab.batch(), 0, lab.store)


def test_a_second_transaction_of_one_name_in_a_batch_is_refused_and_not_dropped_in_silence(lab: Lab) -> None:
    lab.create()
    lab.fill(0, 10)
    names = {"t/one": "transaction", "t/two": "transaction"}

    def outputs(df: DataFrame, batch: int) -> None:
        for stream, name in names.items():
            with headwater.spark.transaction(df, batch, lab.store, name=name) as tx:
                tx.write(df.select("id", "name"), stream, create=True)

    def run() -> None:
        finish(lab.source().writeStream.foreachBatch(outputs).option("checkpointLocation", str(lab.folder / "c")))

    with pytest.raises(StreamingQueryException, match="give each transaction a name of its own"):
        run()
    # The batch is repeated: what is stored stays so, and the other is stored now.
    names["t/two"] = "second"
    run()
    assert sorted(lab.ids("t/one")) == sorted(lab.ids("t/two")) == list(range(10))
    lab.check()


def test_a_transactions_name_is_no_rollbacks(lab: Lab) -> None:
    with pytest.raises(hw.InvalidRequestError, match="without '#'"):
        headwater.spark.transaction(lab.spark.range(1), 0, lab.store, name="out#1")


def test_an_output_that_failed_and_is_tried_again_is_committed_once(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.create()
    lab.fill(0, 10)
    save = DataFrameWriter.save

    def save_and_fail(writer: DataFrameWriter) -> None:
        monkeypatch.undo()
        save(writer)
        raise RuntimeError("after its rows were staged")

    def outputs(df: DataFrame, batch: int) -> None:
        with headwater.spark.transaction(df, batch, lab.store) as tx:
            monkeypatch.setattr(DataFrameWriter, "save", save_and_fail)
            with pytest.raises(RuntimeError, match="after its rows were staged"):
                tx.write(df.select("id", "name"), "t/one", create=True)
            tx.write(df.select("id", "name"), "t/one", create=True)

    finish(lab.source().writeStream.foreachBatch(outputs).option("checkpointLocation", str(lab.folder / "c")))
    assert sorted(lab.ids("t/one")) == list(range(10))
    lab.check()


@pytest.mark.parametrize("form", ["file:{}", "file://{}"])
def test_a_checkpoint_may_be_named_by_a_url(lab: Lab, form: str) -> None:
    lab.create()
    lab.fill(0, 10)
    checkpoint = lab.folder / "a%20b"
    writer = lab.sink(lab.source()).option("checkpointLocation", form.format(checkpoint))
    finish(writer)
    forget_commits(checkpoint, 0)
    finish(writer)
    assert sorted(lab.ids()) == list(range(10))


def test_a_batch_that_is_committed_is_not_written_again(lab: Lab) -> None:
    lab.create()
    lab.fill(0, 20)
    lab.copy()
    # As if the driver was killed between our commit and Spark's note of it.
    forget_commits(lab.folder / "checkpoint", 0)
    lab.fill(20, 30)
    lab.copy()
    assert sorted(lab.ids()) == list(range(30))
    lab.check()


def test_a_checkpoint_that_was_rolled_back_is_an_error_unless_it_may_append(lab: Lab) -> None:
    lab.create()
    lab.fill(0, 20)
    lab.copy()
    shutil.copytree(lab.folder / "checkpoint", lab.folder / "saved")
    lab.fill(20, 30)
    lab.copy()
    lab.fill(30, 40)
    with pytest.raises(StreamingQueryException, match="rolled back or copied") as caught:
        lab.copy("saved")
    assert "on_rollback" in str(caught.value)
    assert sorted(lab.ids()) == list(range(30))
    lab.copy("saved", on_rollback="append")
    assert sorted(lab.ids()) == [*range(20), *sorted([*range(20, 30)] * 2), *range(30, 40)]
    # Gone on from there, it is exactly once again.
    forget_commits(lab.folder / "saved", 1)
    lab.fill(40, 50)
    lab.copy("saved", on_rollback="append")
    assert sorted(lab.ids())[-20:] == list(range(30, 50))
    lab.check()


def test_without_a_readable_checkpoint_rows_are_compared(lab: Lab) -> None:
    lab.create()
    lab.fill(0, 20)
    lab.copy(fingerprint="rows")
    forget_commits(lab.folder / "checkpoint", 0)
    lab.copy(fingerprint="rows")
    assert sorted(lab.ids()) == list(range(20))
    marker = next(info.marker for info in lab.store.transactions() if info.marker is not None)
    assert marker.fingerprint is None or marker.fingerprint.startswith("rows 20 ")
    forget_commits(lab.folder / "checkpoint", 0)
    for path in (lab.folder / "checkpoint" / "offsets").iterdir():
        path.unlink()
    lab.fill(20, 21)
    with pytest.raises(StreamingQueryException, match="comes with other data"):
        lab.copy(fingerprint="rows")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stream": "t/none"}, "there is no stream t/none"),
        ({"stream": "t/other"}, "column 'name' is not in the stream's schema"),
        ({"stream": SOURCE, "key": "nope"}, "names the column 'nope'"),
        ({"stream": SOURCE, "time": "id"}, "can't be the event time"),
        ({"stream": SOURCE, "table": "t/x"}, "stream and table was given"),
        ({"table": "t/x"}, "a table needs option('key', column)"),
        ({"stream_column": "name", "create": "true"}, "make the streams that stream_column names before"),
        ({"stream": SOURCE, "onrollback": "x"}, "has no option 'onrollback'"),
    ],
)
def test_a_mistake_is_told_before_the_first_row(lab: Lab, options: dict[str, str], words: str) -> None:
    lab.create()
    lab.create("t/other", schema=pa.schema([("id", pa.int64())]))
    rows = lab.spark.createDataFrame([(1, "a")], "id long, name string")
    with pytest.raises(Exception, match="Error: ") as caught:
        rows.write.format("headwater").options(**lab.place, **options).mode("append").save()
    assert words in str(caught.value)
    assert lab.ids(SOURCE) == []


def test_a_stream_is_only_appended_to(lab: Lab) -> None:
    lab.create()
    with pytest.raises(Exception, match=r"write to a table: option\('table'"):
        lab.batch().write.format("headwater").options(**lab.place, stream=SOURCE).mode("overwrite").save()
    with pytest.raises(StreamingQueryException, match=r"write to a table: option\('table'"):
        lab.fill(0, 1)
        finish(lab.sink(lab.source().groupBy("name").count(), stream=SOURCE).outputMode("complete"))


def test_values_of_a_table_are_json_of_the_other_columns(lab: Lab) -> None:
    df = lab.spark.sql("SELECT 1 AS k, timestamp '2026-01-01 00:00:00 UTC' AS at, CAST(1.5 AS DECIMAL(4,2)) AS d, array(1, 2) AS l")
    df.write.format("headwater").options(**lab.place, table="t/json", key="k", create="true").mode("append").save()
    value = json.loads(lab.table("t/json")["1"])
    assert value["d"] == "1.50" and value["l"] == [1, 2] and datetime.fromisoformat(value["at"]) == datetime(2026, 1, 1, tzinfo=UTC)
