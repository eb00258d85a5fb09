"""A reader that met an error goes on, when it is asked again, with what it had not handed out; and errors are what they seem."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headwater as hw
from headwater.catalog import extents
from headwater.errors import CorruptDataError, UnavailableError
from headwater.model.limits import PLAN_EXTENTS
from headwater.segments import read
from tests.crash.processes import Place
from tests.operations import intercept

# Many small blocks: not for a quick run.
pytestmark = pytest.mark.slow

#: Above what goes into the catalog itself.
LARGE = bytes(100_000)


class FailsOnce:
    """In the place of a function: raises at its first calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: BaseException, times: int = 1) -> None:
        self._real = getattr(owner, name)
        self._errors = [error] * times
        monkeypatch.setattr(owner, name, self)

    def __call__(self, *args: Any) -> Any:
        if self._errors:
            raise self._errors.pop()
        return self._real(*args)


ERRORS = pytest.mark.parametrize("error", [UnavailableError("out of reach"), CorruptDataError("damaged"), KeyboardInterrupt()], ids=repr)


@ERRORS
@pytest.mark.parametrize("what", ["fetching", "decoding"])
def test_a_group_s_reader_goes_on_where_it_was(store: hw.Store, monkeypatch: pytest.MonkeyPatch, error: BaseException, what: str) -> None:
    stream = store.create_stream("a/x")
    with stream.writer() as writer:
        for number in range(20):
            writer.write(b"%d|" % number + LARGE).result()
    with store.reader_group("g", ["a/x"]).reader("r") as reader:
        owner, name = (store._engine.storage, "get_ranges") if what == "fetching" else (read, "decode")
        # What is damaged is fetched again, block by block, for those before it.
        FailsOnce(monkeypatch, owner, name, error, 2 if what == "fetching" and isinstance(error, CorruptDataError) else 1)
        with pytest.raises(type(error)):
            reader.read_batch(timeout=5)
        found: list[int] = []
        while (batch := reader.read_batch(timeout=0.1)) is not None:
            found += [int(value[: value.index(b"|")]) for value in batch.column("value").to_pylist()]
    assert found == list(range(20))


@ERRORS
def test_a_reader_of_bytes_goes_on_where_it_was(store: hw.Store, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    stream = store.create_stream("a/bytes", kind="bytes")
    with stream.byte_writer() as writer:
        writer.write(LARGE)
        writer.flush()
        writer.write(b"end")
    reader = stream.byte_reader()
    FailsOnce(monkeypatch, store._engine.storage, "get_ranges", error)
    with pytest.raises(type(error)):
        reader.read(1 << 20)
    found = b""
    while part := reader.read(1 << 20):
        found += part
    assert found == LARGE + b"end"


def test_a_damaged_block_is_not_skipped_by_asking_again(place: Place) -> None:
    with place.open(create=True) as store:
        stream = store.create_stream("a/x")
        with stream.writer() as writer:
            for number in range(3):
                writer.write(b"%d|" % number + LARGE).result()
        (path,) = Path(place.url, "journal").glob("*/*")
        with path.open("r+b") as file:
            file.seek(150_000)
            file.write(b"!")
        with store.reader_group("g", ["a/x"]).reader("r") as reader:
            first = reader.read_batch(timeout=1)
            assert first is not None and first["value"][0].as_py() == b"0|" + LARGE
            for _ in range(3):
                with pytest.raises(CorruptDataError):
                    reader.read_batch(timeout=1)


def test_a_part_of_a_dropped_segment_that_no_tag_keeps_was_truncated(store: hw.Store) -> None:
    stream = store.create_stream("a/x")
    with stream.writer() as writer:
        for number in range(PLAN_EXTENTS + 50):
            writer.write(b"%d" % number).result()
            if number == 9:
                store.tag("ten", stream.tail())
    stream.split(0)
    reader = stream.read()
    assert [next(reader).value for _ in range(3)] == [b"0", b"1", b"2"]
    stream.truncate(stream.tail())
    store.run_upkeep()
    with pytest.raises(hw.TruncatedError):
        list(reader)
    assert len(list(stream.read(end=store.tags()["ten"]))) == 10


@pytest.mark.parametrize("how", ["to_arrow", "to_batches", "read"])
def test_a_bounded_read_keeps_its_schema_while_that_is_widened_and_the_rest_is_moved(
    store: hw.Store, place: Place, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    stream = store.create_stream("a/x", schema=pa.schema([("c", pa.int32())]))
    with stream.writer() as writer:
        for number in range(PLAN_EXTENTS + 50):
            writer.write({"c": number}).result()
    plans = iter([False, True] if how != "to_batches" else [True])

    def widen_before_a_plan(name: str, run: Callable[[], Any]) -> Any:
        if name == extents.plan_segment.name and next(plans, False):
            with place.open() as other:
                other.stream("a/x").update(schema=pa.schema([("c", pa.int64()), ("new", pa.string())]))
                other.run_upkeep()
        return run()

    intercept(monkeypatch, store, widen_before_a_plan)
    expected = list(range(PLAN_EXTENTS + 50))
    if how == "read":
        assert [event.value["c"] for event in stream.read()] == expected
    elif how == "to_arrow":
        table = stream.to_arrow(columns=["c"])
        assert table.schema.field("c").type == pa.int32() and table.column("c").to_pylist() == expected
    else:
        batches = list(stream.ranges()[0].to_batches())
        assert {batch.schema.field("c").type for batch in batches} == {pa.int32()}
        assert [number for batch in batches for number in batch.column("c").to_pylist()] == expected
    assert next(plans, None) is None, "nothing was changed meanwhile"


def test_a_missing_inline_block_and_missing_extents_are_damage(place: Place) -> None:
    with place.open(create=True) as store:
        stream = store.create_stream("a/x")
        with stream.writer() as writer:
            for number in range(6):
                writer.write(b"%d" % number).result()
        database = store._engine.database
        database.write(lambda tx: tx.run("DELETE FROM inline_block WHERE first = 3"))
        with pytest.raises(CorruptDataError):
            list(stream.read())
        database.write(lambda tx: tx.run("DELETE FROM extent WHERE first = 3"))
        with pytest.raises(CorruptDataError, match="no extent for event 3"):
            stream.cut_at(datetime.now(UTC))
        database.write(lambda tx: tx.run("DELETE FROM extent"))
        with pytest.raises(CorruptDataError, match="no extent"):
            stream.cut_at(datetime.now(UTC))
