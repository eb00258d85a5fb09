"""What a roll-back and a fork cost: a few statements, however many segments and extents there are."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import headwater as hw


def _fill(store: hw.Store, segments: int, extents: int) -> tuple[hw.Stream, hw.Cut]:
    """A stream with this many open segments, and as many extents in each; the cut is in the middle of all."""
    stream = store.create_stream("a/x", scaling=hw.Scaling.fixed(segments))
    database: Any = store._engine.database
    rows = database.query("SELECT log FROM segment WHERE stream = ? ORDER BY number", (stream.id,))

    def insert(tx: Any) -> None:
        for (log,) in rows:
            sql = "INSERT INTO extent (log, first, count, length, crc, appended_at, object, position) VALUES (?, ?, 10, 100, 0, 1, NULL, 0)"
            tx.defer(sql, [(log, 10 * place) for place in range(extents)])
        tx.run("UPDATE segment SET tail = ?, bytes = ? WHERE stream = ?", (10 * extents, 100 * extents, stream.id))

    database.write(insert)
    tail = stream.tail().streams["a/x"]
    half = {segment: number // 2 for segment, number in tail.segments.items()}
    return stream, hw.Cut(store.id, {"a/x": tail._replace(segments=half)})


@contextmanager
def _longest(store: hw.Store) -> Iterator[list[float]]:
    """The seconds of each transaction that writes."""
    database: Any = store._engine.database
    write, found = database.write, []

    def timed(work: Any, **options: Any) -> Any:
        def measured(tx: Any) -> Any:
            began = time.perf_counter()
            try:
                return work(tx)
            finally:
                found.append(time.perf_counter() - began)

        return write(measured, **options)

    database.write = timed
    try:
        yield found
    finally:
        database.write = write


@pytest.mark.long
def test_a_roll_back_of_a_thousand_segments_and_a_million_extents(tmp_path: Any) -> None:
    with hw.open(tmp_path / "store", upkeep=False) as store:
        stream, cut = _fill(store, 1000, 1000)
        with _longest(store) as held:
            began = time.perf_counter()
            stream.roll_back(cut, keep_as="a/x.old", force=True)
            seconds = time.perf_counter() - began
        print(f"roll back: {seconds:.3f} s, the lock for {max(held):.3f} s")
        with _longest(store) as forked:
            store.stream("a/x.old").fork("a/fork")
        print(f"fork: the lock for {max(forked):.3f} s")
        # Loosely: a busy machine is not a bug.
        assert seconds < 5 and max(held) < 1 and max(forked) < 1
        assert len(stream.segments()) == 1000
