"""Watermarks: up to which event time a stream is complete, as its writers noted it, and at which place.

A writer's note promises that its later events are not older. A mark is the least of all writers' notes, with the tails at that moment;
a writer that noted nothing for a while no longer holds it back.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from headwater.catalog import segments, streams
from headwater.catalog.database import Tx
from headwater.catalog.operations import operation
from headwater.model.limits import IDLE_WRITER_SECONDS

#: Marks kept for each stream; older ones go.
KEPT = 1000
_IDLE_US = int(IDLE_WRITER_SECONDS * 1_000_000)


class Mark(NamedTuple):
    """All events before the numbers are at most `high` old; all behind them, by the writers' word, at least `low`."""

    low: int
    high: int
    numbers: dict[int, int]


@operation("commit", repeatable=True)
def note_time(tx: Tx, stream: int, writer: str, time_us: int) -> None:
    """Note a writer's time, after its events up to then are durable. NotFoundError if the stream was deleted."""
    if streams.lock_stream(tx, stream).sealed_at is not None:
        return  # No events come any more; and without open segments there is no place for a mark.
    tx.run(
        "INSERT INTO noted_time (stream, writer, time, noted_at) VALUES (?, ?, ?, now_us()) "
        "ON CONFLICT (stream, writer) DO UPDATE SET noted_at = excluded.noted_at, "
        "time = CASE WHEN noted_time.time < excluded.time THEN excluded.time ELSE noted_time.time END",
        (stream, writer, time_us),
    )
    tx.run("DELETE FROM noted_time WHERE stream = ? AND writer <> ? AND noted_at < now_us() - ?", (stream, writer, _IDLE_US))
    low, high = tx.run("SELECT min(time), max(time) FROM noted_time WHERE stream = ?", (stream,))[0]
    last = tx.run("SELECT number, low FROM watermark WHERE stream = ? ORDER BY number DESC LIMIT 1", (stream,))
    if low is None or (last and last[0][1] >= low):
        return
    number = last[0][0] + 1 if last else 1
    numbers = {str(row.number): row.tail for row in segments.list_open_segments(tx, stream)}
    tx.run(
        "INSERT INTO watermark (stream, number, low, high, numbers) VALUES (?, ?, ?, ?, ?)",
        (stream, number, low, high, json.dumps(numbers)),
    )
    tx.run("DELETE FROM watermark WHERE stream = ? AND number <= ?", (stream, number - KEPT))


@operation("commit", repeatable=True)
def forget_writer(tx: Tx, stream: int, writer: str) -> None:
    """A writer is done: it no longer holds the mark back."""
    tx.run("DELETE FROM noted_time WHERE stream = ? AND writer = ?", (stream, writer))


def list_marks(tx: Tx, stream: int) -> list[Mark]:
    """A stream's marks, the oldest first."""
    rows = tx.run("SELECT low, high, numbers FROM watermark WHERE stream = ? ORDER BY number", (stream,))
    return [Mark(row[0], row[1], {int(segment): number for segment, number in json.loads(row[2]).items()}) for row in rows]
