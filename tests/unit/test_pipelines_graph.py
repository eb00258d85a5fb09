"""The graph of a pipeline, checked without Spark: names, cycles, inputs, and what later versions bring."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headwater as hw
from headwater.pipelines import Pipeline
from headwater.pipelines.graph import Graph, Input, Output, View, find_inputs, source_of
from headwater.pipelines.register import Register
from headwater.pipelines.savepoints import check_input


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with hw.open(tmp_path / "store", upkeep=False) as opened:
        opened.create_stream("shop/orders", schema=pa.schema([("id", pa.int64())]))
        yield opened


def output(function: Any, target: str, *, is_table: bool = False) -> Output:
    return Output(function.__name__, function, target, is_table, "id")


def graph(*nodes: Output | View) -> Graph:
    made = Graph("sales")
    for node in nodes:
        made.add(node)
    return made


def orders(read: Any) -> Any:
    return read.stream("shop/orders")


def totals(read: Any) -> Any:
    return read.view("orders").groupBy("id").count()


def report(given: Any) -> Any:
    both = given.stream(name="shop/counts").join(given.table("shop/totals"), "id")
    return both.union(read_elsewhere.stream("shop/other"))


read_elsewhere: Any = None


def test_the_inputs_of_a_function_are_found_in_its_source() -> None:
    assert find_inputs(report) == [Input("stream", "shop/counts"), Input("table", "shop/totals")]
    assert find_inputs(orders) == [Input("stream", "shop/orders")]
    assert find_inputs(len) == []


def test_the_inputs_of_views_are_those_of_the_outputs_that_read_them() -> None:
    made = graph(View("orders", orders), output(totals, "shop/totals", is_table=True))
    assert made.inputs(made.outputs["totals"]) == [Input("stream", "shop/orders")]


def test_the_source_of_a_function_is_known_without_its_decorators() -> None:
    assert source_of(orders) == "def orders(read: Any) -> Any:\n    return read.stream('shop/orders')"


def test_outputs_come_after_those_that_they_read() -> None:
    def last(read: Any) -> Any:
        return read.stream("shop/b")

    def middle(read: Any) -> Any:
        return read.stream("shop/a")

    def first(read: Any) -> Any:
        return read.stream("shop/orders")

    made = graph(output(last, "shop/c"), output(middle, "shop/b"), output(first, "shop/a"))
    assert [one.name for one in made.in_order()] == ["first", "middle", "last"]
    assert not made.has_cycle()


def test_a_cycle_through_a_stream_is_allowed_and_ordered() -> None:
    def entry(read: Any) -> Any:
        return read.stream("shop/orders").union(read.stream("shop/again"))

    def again(read: Any) -> Any:
        return read.stream("shop/entered")

    def after(read: Any) -> Any:
        return read.stream("shop/again")

    made = graph(output(after, "shop/end"), output(entry, "shop/entered"), output(again, "shop/again"))
    made.check()
    assert made.has_cycle()
    assert [one.name for one in made.in_order()] == ["entry", "again", "after"]


def test_a_cycle_through_a_table_is_refused() -> None:
    def counted(read: Any) -> Any:
        return read.stream("shop/known")

    def known(read: Any) -> Any:
        return read.stream("shop/orders").join(read.table("shop/counts"), "id")

    made = graph(output(counted, "shop/counts", is_table=True), output(known, "shop/known"))
    with pytest.raises(hw.InvalidRequestError, match="'known' reads the table shop/counts, which depends on 'known'"):
        made.check()


def test_a_view_that_reads_itself_is_refused() -> None:
    def one(read: Any) -> Any:
        return read.view("two")

    def two(read: Any) -> Any:
        return read.view("one")

    made = graph(View("one", one), View("two", two), output(totals, "shop/totals"))
    made.views["orders"] = View("orders", one)
    with pytest.raises(hw.InvalidRequestError, match=r"the view '(one|two)' reads itself"):
        made.check()


def test_two_functions_of_one_name_and_two_outputs_into_one_stream_are_refused() -> None:
    with pytest.raises(hw.InvalidRequestError, match="two functions are called 'orders'"):
        graph(View("orders", orders), output(orders, "shop/copy"))
    with pytest.raises(hw.InvalidRequestError, match="'orders' and 'totals' both fill shop/copy"):
        graph(output(orders, "shop/copy"), output(totals, "shop/copy"))


def declare(store: hw.Store) -> Pipeline:
    pipeline = Pipeline("sales", store)
    pipeline.view()(orders)
    pipeline.table("shop/totals", key="id")(totals)
    return pipeline


def test_a_missing_input_is_named_before_spark_starts(store: hw.Store) -> None:
    pipeline = declare(store)

    @pipeline.stream("shop/report")
    def reported(read: Any) -> Any:
        return read.stream("shop/missing")

    with pytest.raises(hw.InvalidRequestError, match=r"'reported' reads the stream shop/missing, and there is no such stream"):
        pipeline.check()
    assert store.streams() == ["shop/orders"] and store.tables() == [], "a check changes nothing"


def test_a_table_that_is_read_as_a_stream_is_named(store: hw.Store) -> None:
    store.table("shop/prices")
    pipeline = Pipeline("sales", store)

    @pipeline.stream("shop/report")
    def reported(read: Any) -> Any:
        return read.stream("shop/prices")

    with pytest.raises(hw.InvalidRequestError, match=r"reads the stream shop/prices, and it is a table: use read\.table"):
        pipeline.check()


def test_an_output_of_another_kind_is_refused(store: hw.Store) -> None:
    store.create_stream("shop/totals")
    with pytest.raises(hw.InvalidRequestError, match="shop/totals is of kind 'events', and 'totals' fills a table"):
        declare(store).check()


def test_an_output_that_another_program_claims_is_refused(store: hw.Store) -> None:
    version = store.table("app/owners").put("totals", b"me")
    store.table("shop/totals")
    store.stream("shop/totals").claim("billing", require=("app/owners", "totals", version))
    with pytest.raises(hw.ConflictError, match="shop/totals is claimed by billing"):
        declare(store).check()


def test_a_pipeline_without_outputs_and_a_view_that_is_missing_are_refused(store: hw.Store) -> None:
    with pytest.raises(hw.InvalidRequestError, match="has no output"):
        Pipeline("sales", store).check()
    pipeline = Pipeline("sales", store)
    pipeline.table("shop/totals", key="id")(totals)
    with pytest.raises(hw.InvalidRequestError, match="'totals' reads a view 'orders'; its views: none"):
        pipeline.check()


@pytest.mark.parametrize("name", ["", "two words", "a/b", ".hidden", "x" * 49, None])
def test_a_name_that_is_no_word_is_refused(store: hw.Store, name: Any) -> None:
    with pytest.raises(hw.InvalidRequestError, match="a pipeline's name is one word"):
        Pipeline(name, store)


def test_checkpoints_that_cannot_be_copied_are_refused(store: hw.Store, tmp_path: Path) -> None:
    with pytest.raises(hw.InvalidRequestError, match="checkpoints lie in a folder"):
        Pipeline("sales", store, checkpoints="s3://bucket/checkpoints")
    with pytest.raises(hw.InvalidRequestError, match="give checkpoints="), hw.open("memory://pipelines") as memory:
        Pipeline("sales", memory)
    (tmp_path / "file").write_text("")
    pipeline = declare(store)
    other = Pipeline("sales", store, checkpoints=tmp_path / "file")
    other._graph = pipeline._graph
    with pytest.raises(hw.InvalidRequestError, match="can't be written"):
        other.check()


def test_what_later_versions_bring_is_refused_with_what_to_do(store: hw.Store) -> None:
    pipeline = Pipeline("sales", store)
    calls: list[Callable[[], Any]] = [
        lambda: pipeline.stream("shop/x", late="shop/late"),
        lambda: pipeline.stream("shop/x", dead_letters="shop/bad"),
        lambda: pipeline.table("shop/x", key="id", dead_letters="shop/bad"),
        lambda: pipeline.sql("x", connect=None, key="id"),
        lambda: pipeline.expect("positive", "price > 0"),
        lambda: pipeline.udf("double"),
        lambda: pipeline.fork("green", at="x"),
        lambda: pipeline.compare(None),
        lambda: pipeline.promote(None),
        lambda: pipeline.backfill("x"),
    ]
    for call in calls:
        with pytest.raises(hw.InvalidRequestError, match="is not in this version: "):
            call()


def test_options_of_the_wrong_type_are_refused(store: hw.Store) -> None:
    pipeline = Pipeline("sales", store)
    options: list[dict[str, Any]] = [{"partitions": 0}, {"max_events": "many"}, {"segments": True}, {"watermark": "10 minutes"}]
    for option in options:
        with pytest.raises(hw.InvalidRequestError, match=next(iter(option))):
            pipeline.stream("shop/x", **option)
    with pytest.raises(hw.InvalidRequestError, match="'scope/name'"):
        pipeline.stream("orders")
    pipeline.stream("shop/x", max_events=1_000_000)


def test_a_pipeline_that_never_ran_takes_no_commands(store: hw.Store) -> None:
    pipeline = declare(store)
    with pytest.raises(hw.NotFoundError, match="never ran"):
        pipeline.savepoint("first")
    with pytest.raises(hw.NotFoundError, match="has no savepoint 'first'; its savepoints: none"):
        pipeline.restore("first")
    assert pipeline.savepoints() == [] and not pipeline.stop()
    assert pipeline.status()["totals"]["state"] == "new"
    assert store.tables() == [], "looking makes nothing"


def test_input_that_was_truncated_past_a_savepoint_is_named(store: hw.Store) -> None:
    stream = store.stream("shop/orders")
    saved = {"sources": [str(stream.tail())]}
    with stream.writer() as writer:
        writer.write({"id": 1})
    register = Register(store, "sales")
    check_input(register, "first", "totals", saved)
    stream.truncate(stream.tail())
    with pytest.raises(hw.ConflictError, match=r"the input of 'totals' was truncated past the savepoint 'first': .*shop/orders"):
        check_input(register, "first", "totals", saved)
