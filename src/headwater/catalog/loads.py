"""Loads of streams that scale by rate: the last sample of each, its history, and the scalings that were made of it.

Counters that appends keep anyway are read, so sampling costs writers nothing. Rows stay bounded: history is thinned as it ages, and
of the scalings the last ones are kept.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from headwater.catalog import segments, streams
from headwater.catalog.database import Tx
from headwater.catalog.operations import operation
from headwater.catalog.segments import SegmentRow
from headwater.catalog.streams import StreamRow
from headwater.model.keys import KeyRange
from headwater.model.scaling_decision import Change

#: History has a row a minute for so long, then one in ten minutes, up to a week.
SLOT_US = 60_000_000
_COARSE_SLOT_US = 600_000_000
_FINE_US = 6 * 3_600_000_000
_KEPT_US = 7 * 86_400_000_000
_KEPT_EVENTS = 1000
#: Transactions that lived shorter than this count as if all of theirs came with the commit; of the others at most so many are looked at.
_LONG_US = 20_000_000
_LONG_TRANSACTIONS = 2000


class Sample(NamedTuple):
    """A stream's load as it was saved, as JSON."""

    sampled_at: int
    state: str


class LongCommit(NamedTuple):
    """A transaction that took its time: how many events it added to which segments of a stream, and their tails behind it."""

    seconds: float
    added: dict[int, int]
    tails: dict[int, int]


@operation("statement")
def list_scaled_streams(tx: Tx) -> list[int]:
    """The open streams that scale by rate."""
    rows = tx.run("SELECT id FROM stream WHERE sealed_at IS NULL AND kind = 'events' AND scaling LIKE '%rate\"%' ORDER BY id")
    return [row[0] for row in rows]


@operation("statement")
def find_sample(tx: Tx, stream: int) -> Sample | None:
    rows = tx.run("SELECT sampled_at, state FROM stream_load WHERE stream = ?", (stream,))
    return Sample(*rows[0]) if rows else None


def look(tx: Tx, stream: int, known: Sequence[int], after: int | None) -> tuple[StreamRow, list[SegmentRow], list[SegmentRow]]:
    """The stream, its open segments, and those sealed ones that were open before (`known`) or are new (above `after`)."""
    row = streams.get_stream(tx, stream)
    opened = segments.list_open_segments(tx, stream)
    numbers = {segment.number for segment in opened}
    gone = [number for number in known if number not in numbers]
    newer = segments.list_segments(tx, stream, first=after + 1) if after is not None else []
    sealed = [segment for segment in newer if not segment.is_open]
    for start in range(0, len(gone), 256):
        sealed += segments.list_segments_numbered(tx, stream, gone[start : start + 256])
    return row, opened, sealed


def list_long_commits(tx: Tx, stream: int, since: int) -> list[LongCommit]:
    """The transactions of some length that were committed about `since` or later, as far as they wrote to a stream."""
    # A commit comes before its lease runs out, so the index over that finds them.
    sql = (
        "SELECT ended_at - begun_at, result FROM txn WHERE state = 'committed' AND expires_at >= ? AND ended_at >= ? "
        "AND ended_at - begun_at >= ? ORDER BY expires_at LIMIT ?"
    )
    found = []
    for age, result in tx.run(sql, (since - _LONG_US, since - _LONG_US, _LONG_US, _LONG_TRANSACTIONS)):
        outcome = json.loads(result)
        added = outcome.get("added", {}).get(str(stream))
        if added:
            tails = outcome["tails"].get(str(stream), {})
            found.append(LongCommit(age / 1e6, _numbered(added), _numbered(tails)))
    return found


def _numbered(counts: dict[str, int]) -> dict[int, int]:
    return {int(number): count for number, count in counts.items()}


def find_event_bytes(tx: Tx, log: int, first: int) -> float | None:
    """The mean size of a log's events from `first` on, as they were appended; None if nothing of them is left."""
    size = "CAST(sum(COALESCE(raw, length)) AS BIGINT), CAST(sum(count) AS BIGINT)"
    rows = tx.run(f"SELECT {size} FROM extent WHERE log = ? AND first >= ?", (log, first))
    if not rows[0][1]:
        # All in a chunk that begins before.
        rows = tx.run("SELECT COALESCE(raw, length), count FROM extent WHERE log = ? ORDER BY first DESC LIMIT 1", (log,))
    return rows[0][0] / rows[0][1] if rows and rows[0][1] else None


class Saved(NamedTuple):
    """What one sample of one stream leaves: its state, guarded by the time of the sample before, and a row of history or None."""

    stream: int
    before: int | None
    sampled_at: int
    state: str
    rates: str | None


@operation("commit", repeatable=True)
def save_samples(tx: Tx, samples: Sequence[Saved]) -> set[int]:
    """Save what nobody else sampled meanwhile; returns the streams for which that was so."""
    marks = ", ".join("?" * len(samples))
    streams = [sample.stream for sample in samples]
    # Locked so that none is deleted meanwhile.
    there = {row[0] for row in tx.run(f"SELECT id FROM stream WHERE id IN ({marks}) ORDER BY id FOR SHARE", streams)}
    won = set()
    for sample in samples:
        if sample.stream not in there:
            continue
        if sample.before is None:
            sql = "INSERT INTO stream_load (stream, sampled_at, state) VALUES (?, ?, ?) ON CONFLICT (stream) DO NOTHING RETURNING stream"
            rows = tx.run(sql, (sample.stream, sample.sampled_at, sample.state))
        else:
            sql = "UPDATE stream_load SET sampled_at = ?, state = ? WHERE stream = ? AND sampled_at = ? RETURNING stream"
            rows = tx.run(sql, (sample.sampled_at, sample.state, sample.stream, sample.before))
        if rows:
            won.add(sample.stream)
            if sample.rates is not None:
                _note_rates(tx, sample.stream, sample.sampled_at, sample.rates)
    return won


def _note_rates(tx: Tx, stream: int, now_us: int, rates: str) -> None:
    slot = now_us - now_us % SLOT_US
    sql = "INSERT INTO load_history (stream, at, rates) VALUES (?, ?, ?) ON CONFLICT (stream, at) DO UPDATE SET rates = excluded.rates"
    tx.run(sql, (stream, slot, rates))
    tx.run("DELETE FROM load_history WHERE stream = ? AND at < ?", (stream, now_us - _KEPT_US))
    # Of each ten minutes the first row stays. Only those that came of age lately are looked at: the older ones were.
    earlier = "EXISTS (SELECT 1 FROM load_history e WHERE e.stream = ? AND e.at < load_history.at AND e.at >= load_history.at / ? * ?)"
    tx.run(
        f"DELETE FROM load_history WHERE stream = ? AND at >= ? AND at < ? AND {earlier}",
        (stream, now_us - 3 * _FINE_US, now_us - _FINE_US, stream, _COARSE_SLOT_US, _COARSE_SLOT_US),
    )


@operation("commit", repeatable=True)
def apply_changes(tx: Tx, stream: int, epoch: int, scaling: str, changes: Sequence[Change], now_us: int) -> list[tuple[int, ...]]:
    """Split and merge, as one epoch, and note why; returns the new numbers of each change.

    They were decided from an epoch and a policy: ConflictError and its kind if the stream was scaled, sealed, deleted or given another
    policy since then.
    """
    current = streams.lock_stream(tx, stream)
    # Another policy means another decision. No stream has this epoch, so the replacement refuses it, with its reasons.
    epoch = epoch if current.scaling == scaling else -1
    ranges: list[KeyRange] = [keys for change in changes for keys in change.ranges]
    seal = [number for change in changes for number in change.seal]
    numbers = iter(segments.replace_segments(tx, stream, epoch=epoch, seal=seal, ranges=ranges))
    made = [tuple(next(numbers) for _ in change.ranges) for change in changes]
    noted = [
        {"kind": change.kind, "sealed": list(change.seal), "made": list(some), "reason": change.reason}
        for change, some in zip(changes, made, strict=True)
    ]
    tx.run("INSERT INTO scale_event (stream, epoch, at, changes) VALUES (?, ?, ?, ?)", (stream, epoch + 1, now_us, json.dumps(noted)))
    tx.run(
        "DELETE FROM scale_event WHERE stream = ? AND epoch <= (SELECT epoch FROM scale_event WHERE stream = ? "
        "ORDER BY epoch DESC LIMIT 1 OFFSET ?)",
        (stream, stream, _KEPT_EVENTS),
    )
    return made


def list_history(tx: Tx, stream: int) -> list[tuple[int, str]]:
    """(time, rates) of the minutes that are kept, in order."""
    return [(row[0], row[1]) for row in tx.run("SELECT at, rates FROM load_history WHERE stream = ? ORDER BY at", (stream,))]


def list_scale_events(tx: Tx, stream: int) -> list[tuple[int, int, str]]:
    """(epoch, time, changes) of the last scalings by rate, in order."""
    rows = tx.run("SELECT epoch, at, changes FROM scale_event WHERE stream = ? ORDER BY epoch", (stream,))
    return [(row[0], row[1], row[2]) for row in rows]
