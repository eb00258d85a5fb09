"""Sampling a stream's load: what was appended to each segment since the last sample, and what that makes of its rates.

The counters are the segments' tails, which only grow. What a transaction adds counts over its lifetime, not as a peak at its commit.
What was appended to segments that were sealed meanwhile counts for those that have their keys now.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from headwater.catalog import loads
from headwater.catalog.database import Tx
from headwater.catalog.loads import LongCommit, Saved
from headwater.catalog.operations import operation
from headwater.catalog.segments import SegmentRow
from headwater.catalog.streams import StreamRow
from headwater.model.keys import KEY_SPACE, KeyRange
from headwater.model.load import Amount, SegmentLoad, hand_on, key_share, observe, overlapping
from headwater.model.policies import Scaling

#: A stream is sampled about this often, and not again within most of it.
SAMPLE_SECONDS = 10.0
_SOONEST_US = 8_000_000
#: Rates below this part of the target are not worth a row of history.
_IDLE = 0.001


class StreamSample(NamedTuple):
    """A stream as it was looked at, the loads of its open segments by key, and what is to be saved of it."""

    stream: StreamRow
    policy: Scaling
    loads: list[SegmentLoad]
    saved: Saved


@dataclass
class LoadState:
    """What is kept of a stream from sample to sample: since when its rates are known, and up to where each segment was counted."""

    kind: str
    since: int
    last_number: int = -1
    event_bytes: float = 0.0
    #: The epoch of the last row of history: a new one is noted however idle the stream is.
    noted_epoch: int = -1
    loads: list[SegmentLoad] = field(default_factory=list)
    counted: dict[int, int] = field(default_factory=dict)

    def to_json(self) -> str:
        segments = []
        for load in self.loads:
            rates = [float(f"{rate:.6g}") for rate in load.rates]
            origin = (*load.origin, load.in_vain) if load.origin is not None else None
            segments.append((load.number, *load.keys, self.counted[load.number], load.changed_at, rates, origin))
        fields = (self.kind, self.since, self.last_number, self.event_bytes, self.noted_epoch)
        return json.dumps([*fields, segments], separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> LoadState:
        *fields, segments = json.loads(text)
        state = cls(*fields)
        for number, start, end, counted, changed_at, rates, origin in segments:
            keys, in_vain = (KeyRange(*origin[:2]), origin[2]) if origin else (None, 0)
            state.loads.append(SegmentLoad(number, KeyRange(start, end), changed_at, tuple(rates), keys, in_vain))
            state.counted[number] = counted
        return state


@operation("read")
def take_sample(tx: Tx, stream: int, now_us: int) -> StreamSample | None:
    """Count what was appended since the last sample; None if that was just now, or if the stream does not scale by rate any more."""
    before = loads.find_sample(tx, stream)
    if before is not None and 0 <= now_us - before.sampled_at < _SOONEST_US:
        return None
    state = LoadState.from_json(before.state) if before is not None else None
    known = list(state.counted) if state is not None else []
    row, opened, sealed = loads.look(tx, stream, known, state.last_number if state is not None else None)
    policy = Scaling.from_json(row.scaling)
    if not opened or policy.kind == "fixed":
        return None
    if before is None or state is None or state.kind != policy.kind:
        # What came before does not count: nobody knows over which time.
        state = LoadState(policy.kind, now_us, loads=hand_on([], [(segment.number, segment.keys) for segment in opened], now_us))
    else:
        grown = [segment for segment in [*opened, *sealed] if segment.tail > state.counted.get(segment.number, 0)]
        amounts = _appended(tx, state, grown, loads.list_long_commits(tx, stream, before.sampled_at) if grown else [])
        _advance(state, before.sampled_at, opened, sealed, amounts, now_us)
    state.last_number = max(state.last_number, *(segment.number for segment in [*opened, *sealed]))
    state.counted = {segment.number: segment.tail for segment in opened}
    rates = _history_row(state, row, policy)
    saved = Saved(stream, before.sampled_at if before is not None else None, now_us, state.to_json(), rates)
    return StreamSample(row, policy, state.loads, saved)


def _appended(tx: Tx, state: LoadState, grown: Sequence[SegmentRow], commits: Sequence[LongCommit]) -> dict[int, list[Amount]]:
    """What each segment got since it was last counted, in the unit of the policy."""
    found: dict[int, list[Amount]] = {}
    for segment in grown:
        counted = state.counted.get(segment.number, 0)
        events = segment.tail - counted
        amounts = []
        for commit in commits:
            # A commit was counted before if the tail behind it was; one into a segment of its own, by a roll, if that was known.
            added = commit.added.get(segment.number, 0)
            if added and commit.tails.get(segment.number, segment.tail) > counted:
                amounts.append(Amount(added, commit.seconds))
                events -= added
        amounts.append(Amount(max(0, events), 0.0))
        if state.kind == "data_rate":
            state.event_bytes = loads.find_event_bytes(tx, segment.log, counted) or state.event_bytes
            amounts = [Amount(total * state.event_bytes, seconds) for total, seconds in amounts]
        found[segment.number] = amounts
    return found


def _advance(
    state: LoadState,
    sampled_at: int,
    opened: Sequence[SegmentRow],
    sealed: Sequence[SegmentRow],
    amounts: dict[int, list[Amount]],
    now_us: int,
) -> None:
    """Bring the rates of all open segments up to date."""
    # A clock that went back must not stop everything until it has caught up.
    seconds = (now_us - sampled_at) / 1e6 if now_us > sampled_at else SAMPLE_SECONDS
    state.since = min(state.since, now_us)
    given: dict[int, list[Amount]] = defaultdict(list)
    for segment in opened:
        given[segment.number] += amounts.get(segment.number, [])
    ordered = sorted(opened, key=lambda segment: segment.keys)
    starts = [segment.keys.start for segment in ordered]
    for segment in sealed:
        for index in overlapping(starts, segment.keys):
            share = key_share(segment.keys, ordered[index].keys)
            given[ordered[index].number] += [Amount(total * share, lifetime) for total, lifetime in amounts.get(segment.number, ())]
    age = max(0.0, (sampled_at - state.since) / 1e6)
    state.loads = [
        load._replace(rates=observe(load.rates, given[load.number], seconds, age), changed_at=min(load.changed_at, now_us))
        for load in hand_on(state.loads, [(segment.number, segment.keys) for segment in opened], now_us)
    ]


def _history_row(state: LoadState, stream: StreamRow, policy: Scaling) -> str | None:
    """Rates by key range, with what they are to be compared to; None if there is nothing to tell."""
    if stream.epoch == state.noted_epoch and all(load.latest < _IDLE * policy.target for load in state.loads):
        return None
    state.noted_epoch = stream.epoch
    rates = [(load.keys.start / KEY_SPACE, load.keys.end / KEY_SPACE, float(f"{load.latest:.4g}")) for load in state.loads]
    return json.dumps([policy.kind, policy.target, rates], separators=(",", ":"))
