"""Scaling by load: sample each stream that scales by rate, decide, and split or merge.

All that is known between two rounds is in the catalog, so any process that takes over goes on from there; of two that sample at once,
one counts. The clock is an argument: what is decided depends on nothing else.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from headwater.catalog import loads, segments
from headwater.catalog.database import Tx
from headwater.catalog.operations import Right, operation
from headwater.errors import ConflictError, NotFoundError
from headwater.model.keys import KEY_SPACE
from headwater.model.scaling_decision import Change, decide
from headwater.model.scaling_history import LoadSample, RangeRate, ScaleEvent, ScalingHistory, SegmentLife
from headwater.runtime.clock import to_datetime
from headwater.segments.engine import Engine
from headwater.streams.load_samples import StreamSample, take_sample

#: Samples saved, and segments split or merged, under one lock. What is left of a stream's changes is for the next round.
_SLICE_STREAMS = 50
_SLICE_CHANGES = 50


@dataclass(frozen=True)
class ScalingReport:
    """What one round of scaling did. `skipped`: streams that another process sampled or changed meanwhile."""

    streams_sampled: int
    splits: int
    merges: int
    skipped: int


def scale_streams(engine: Engine, now_us: int) -> ScalingReport:
    """Sample every stream that scales by rate, and split and merge where its policy asks for it.

    Cheap enough to be called every few seconds: a stream that was sampled less than 8 s ago is left alone.
    """
    samples = [sample for stream in engine.run(loads.list_scaled_streams) if (sample := _sample(engine, stream, now_us)) is not None]
    saved: set[int] = set()
    for start in range(0, len(samples), _SLICE_STREAMS):
        saved |= engine.run(loads.save_samples, [sample.saved for sample in samples[start : start + _SLICE_STREAMS]])
    made: list[Change] = []
    lost = 0
    for sample in samples:
        changes = decide(sample.policy, sample.loads, now_us)[:_SLICE_CHANGES] if sample.stream.id in saved else []
        try:
            if changes:
                stream = sample.stream
                engine.run(loads.apply_changes, stream.id, stream.epoch, stream.scaling, changes, now_us)
                made += changes
        except (ConflictError, NotFoundError):
            # Scaled by hand, rolled, sealed or deleted since it was looked at. The next round sees what became of it.
            lost += 1
    kinds = [change.kind for change in made]
    return ScalingReport(len(saved), kinds.count("split"), kinds.count("merge"), len(samples) - len(saved) + lost)


def _sample(engine: Engine, stream: int, now_us: int) -> StreamSample | None:
    try:
        return engine.run(take_sample, stream, now_us)
    except NotFoundError:
        return None  # deleted meanwhile


@operation("read", right=Right("read", "stream"))
def scaling_history(tx: Tx, stream: int) -> ScalingHistory:
    """What the catalog remembers of a stream's segments, their load and the scalings by rate."""
    lives = [
        SegmentLife(
            row.number,
            row.keys.start / KEY_SPACE,
            row.keys.end / KEY_SPACE,
            to_datetime(row.made_at),
            to_datetime(row.sealed_at) if row.sealed_at is not None else None,
            row.tail - row.base_until,
            row.bytes,
        )
        for row in segments.list_segments(tx, stream)
    ]
    samples = []
    for at, text in loads.list_history(tx, stream):
        kind, target, rates = json.loads(text)
        samples.append(LoadSample(to_datetime(at), kind, target, tuple(RangeRate(*rate) for rate in rates)))
    events = [
        ScaleEvent(to_datetime(at), epoch, change["kind"], tuple(change["sealed"]), tuple(change["made"]), change["reason"])
        for epoch, at, text in loads.list_scale_events(tx, stream)
        for change in json.loads(text)
    ]
    return ScalingHistory(tuple(lives), tuple(samples), tuple(events))
