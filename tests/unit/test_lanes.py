"""Runs on their way to a flush: what they collected becomes chunks, and how much of them a flush takes."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, cast

import numpy as np
import pyarrow as pa

from headwater.model.schemas import OPAQUE
from headwater.segments.block import Chunk, join
from headwater.segments.intake import Intake
from headwater.segments.lanes import EVENT_OVERHEAD_BYTES, Lane, Loose, Run, StreamRef, given


class _Counting:
    """In the intake's place: notes what was counted."""

    def __init__(self) -> None:
        self.bytes = 0

    def activate(self, lane: Lane) -> None:
        pass

    def account(self, size: int) -> None:
        self.bytes += size


def _lane() -> Lane:
    return Lane(cast(Intake, _Counting()), lambda run, timeout: None, StreamRef(1, "shop/orders", "events", OPAQUE, 1, True), None, 0, 0)


def _collected(lane: Lane, count: int, first: int) -> Run:
    with lane.lock:
        for index in range(first, first + count):
            key = b"user-%d" % index if index % 3 else None
            time = datetime.fromtimestamp(index, UTC) if index % 5 == 0 else None
            run, _ = lane.put(b"%d" % index * (index % 7), key, time)
        lane.close_run()
    return run


def _given(lane: Lane, chunk: Chunk) -> Run:
    with lane.lock:
        return lane.add_chunk(chunk, 100)


def _rows(chunks: list[Chunk | Loose]) -> list[tuple[Any, ...]]:
    whole = join([chunk.whole() if isinstance(chunk, Loose) else chunk for chunk in chunks])
    times = whole.times.to_pylist() if whole.times is not None else [None] * whole.count
    keys = whole.keys.to_pylist() if whole.keys is not None else [None] * whole.count
    return list(zip(whole.columns.column(0).to_pylist(), keys, times, strict=True))


def _expected(first: int, count: int) -> list[tuple[Any, ...]]:
    return [
        (
            b"%d" % index * (index % 7),
            b"user-%d" % index if index % 3 else None,
            datetime.fromtimestamp(index, UTC) if index % 5 == 0 else None,
        )
        for index in range(first, first + count)
    ]


def test_neighbours_are_given_together_and_again_after_a_refusal() -> None:
    lane = _lane()
    runs = [_collected(lane, 40, 0), _collected(lane, 1, 40), _collected(lane, 60, 41)]
    chunks = given(runs)
    assert [chunk.count for chunk in chunks] == [101]
    assert _rows(chunks) == _expected(0, 101)
    # The same runs once more, with one that came since.
    again = given([*runs, _collected(lane, 50, 101)])
    assert _rows(again) == _expected(0, 151)


def test_loose_events_are_taken_in_any_order() -> None:
    (loose,) = given([_collected(lane := _lane(), 40, 0), _collected(lane, 20, 40)])
    order = np.random.default_rng(1).permutation(60)
    assert _rows([loose.take(order)]) == [_expected(0, 60)[index] for index in order]
    assert _rows([loose.take(order[:7])]) == [_expected(0, 60)[index] for index in order[:7]]


def test_loose_rows_of_a_schema_are_taken_in_any_order() -> None:
    schema = pa.schema([pa.field("id", pa.int64()), pa.field("tags", pa.list_(pa.string()))])
    stream = StreamRef(1, "shop/orders", "events", schema, 1, False)
    rows = [{"id": index, "tags": [f"tag-{index}"] * (index % 3) if index % 4 else None} for index in range(30)]
    order = np.random.default_rng(1).permutation(30)
    chunk = Loose(stream, rows, [None] * 30, {}).take(order)
    assert chunk.columns.schema == schema and chunk.columns.to_pylist() == [rows[index] for index in order]
    assert chunk.keys is None and chunk.times is None


def test_batches_stay_as_they_are_also_the_same_one_twice() -> None:
    lane = _lane()
    batch = Chunk(pa.RecordBatch.from_arrays([pa.array([b"a", b"b"], pa.binary())], schema=OPAQUE), None, None)
    chunks = given([_given(lane, batch), _given(lane, batch), _collected(lane, 40, 0), _given(lane, batch)])
    assert [chunk.count for chunk in chunks] == [2, 2, 40, 2]
    assert chunks[0] is batch and chunks[1] is batch and chunks[3] is batch


def test_values_larger_than_a_part_of_a_join_and_empty_ones() -> None:
    lane = _lane()
    values = [b"x" * 300_000, b"", b"y" * 131_072, b"z", b"", b"w" * 131_073]
    with lane.lock:
        for value in values:
            run, _ = lane.put(value, b"")
        lane.close_run()
    (loose,) = given([run])
    chunk = loose.take(np.arange(len(values)))
    assert chunk.columns.column(0).to_pylist() == values
    assert chunk.keys is not None and chunk.keys.to_pylist() == [b""] * len(values)


def test_events_given_one_by_one_count_as_what_they_take_in_memory() -> None:
    lane = _lane()
    with lane.lock:
        for _ in range(3):
            for _ in range(100):
                lane.put(b"x" * 100)
            lane.close_run()
    counted = cast(_Counting, lane.intake)
    each = 100 * (2 * 100 + EVENT_OVERHEAD_BYTES)
    assert counted.bytes == 3 * each
    assert sum(run.count for run in lane.take(2 * each)) == 200
    assert sum(run.count for run in lane.take(2 * each)) == 100


def test_keys_count_as_values_do() -> None:
    lane = _lane()
    with lane.lock:
        for index in range(60):
            lane.put(b"", b"k" * 1000 if index % 2 else None)
            if index % 20 == 19:
                lane.close_run()
    each = 2 * 10 * 1000 + 20 * EVENT_OVERHEAD_BYTES
    assert cast(_Counting, lane.intake).bytes == 3 * each
    assert [sum(run.count for run in lane.take(2 * each)) for _ in range(2)] == [40, 20]
