"""When to split and when to merge: a pure function of the policy, the segments' loads and the time.

Splits come quickly, merges slowly, and a merged segment has room to grow before it is split again: that is what keeps a stream from
going back and forth. Floor and ceiling of the policy always hold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from headwater.model.keys import KeyRange
from headwater.model.limits import OPEN_SEGMENTS
from headwater.model.load import WINDOWS_SECONDS, SegmentLoad
from headwater.model.policies import Scaling

#: A segment is split when its rate over a window is above so many times the target: the shorter the window, the clearer it must be.
_SPLIT_AT = ((0, 5.0), (1, 2.0), (2, 1.0))
#: Neighbours are merged when the highest of their rates together are below this part of the target.
_MERGE_BELOW = 0.6
#: How long a segment's keys must have been left alone, before a split and before a merge.
_SPLIT_COOLDOWN_US = 60_000_000
_MERGE_COOLDOWN_US = 1_200_000_000


@dataclass(frozen=True)
class Change:
    """Segments to be sealed, and the key ranges that replace them."""

    kind: str
    seal: tuple[int, ...]
    ranges: tuple[KeyRange, ...]
    reason: str


def decide(policy: Scaling, loads: Sequence[SegmentLoad], now_us: int) -> list[Change]:
    """What to change now, as one epoch; nothing most of the time. `loads` are all open segments, in the order of their keys.

    A hot segment is split into as many parts as bring it below the target, at most `factor`. Splits that did not spread the load (one
    key has it all) are repeated at twice the interval each time.
    """
    assert policy.kind != "fixed", "a fixed number of segments changes only by hand"
    ceiling = min(policy.max_segments or OPEN_SEGMENTS, OPEN_SEGMENTS)
    if len(loads) < policy.min_segments:
        return _raise_to_floor(policy, loads)
    if len(loads) > ceiling:
        return _lower_to_ceiling(policy, loads, ceiling)
    splits = _splits(policy, loads, ceiling - len(loads), now_us)
    hot = {number for change in splits for number in change.seal}
    return splits + _merges(policy, [None if load.number in hot else load for load in loads], len(loads) - policy.min_segments, now_us)


def _splits(policy: Scaling, loads: Sequence[SegmentLoad], room: int, now_us: int) -> list[Change]:
    made = []
    hot = [(trigger, load) for load in loads if (trigger := _trigger(policy, load)) is not None]
    for (window, rate), load in sorted(hot, key=lambda item: -item[0][1]):
        cooldown = _SPLIT_COOLDOWN_US << min(load.in_vain, 32)
        parts = min(policy.factor, max(2, math.ceil(rate / policy.target)), room + 1, load.keys.end - load.keys.start)
        if now_us - load.changed_at >= cooldown and parts >= 2:
            reason = f"{_minutes(window)} rate {rate:,.4g}/s, target {policy.target:,}/s"
            made.append(_split(load, parts, reason))
            room -= parts - 1
    return made


def _trigger(policy: Scaling, load: SegmentLoad) -> tuple[int, float] | None:
    """(window, rate) of the shortest window over which a segment is too hot; None if it is not, or has cooled down since."""
    for window, times in _SPLIT_AT:
        if load.rates[window] > times * policy.target and min(load.rates[: window + 1]) > policy.target:
            return window, load.rates[window]
    return None


def _merges(policy: Scaling, loads: Sequence[SegmentLoad | None], surplus: int, now_us: int) -> list[Change]:
    """Pairs of cold neighbours, the coldest first; None stands for a segment that is not to be touched."""
    cold = [
        (left.highest + right.highest, left, right)
        for left, right in pairwise(loads)
        if left is not None and right is not None and now_us - max(left.changed_at, right.changed_at) >= _MERGE_COOLDOWN_US
    ]
    made: list[Change] = []
    used: set[int] = set()
    for rate, left, right in sorted(cold, key=lambda item: item[0]):
        if len(made) < surplus and rate < _MERGE_BELOW * policy.target and not used & {left.number, right.number}:
            used |= {left.number, right.number}
            made.append(_merge(left, right, f"{rate:,.4g}/s together, target {policy.target:,}/s"))
    return made


def _raise_to_floor(policy: Scaling, loads: Sequence[SegmentLoad]) -> list[Change]:
    """The policy has more segments at the least than there are: split the hottest, or the widest."""
    missing = policy.min_segments - len(loads)
    made: list[Change] = []
    for load in sorted(loads, key=lambda load: (-load.highest, load.keys.start - load.keys.end)):
        # An even share of what is missing for each of those left.
        extra = math.ceil(missing / (len(loads) - len(made)))
        extra = min(extra, load.keys.end - load.keys.start - 1)
        if extra > 0:
            made.append(_split(load, extra + 1, f"at least {policy.min_segments} segments"))
            missing -= extra
    return made


def _lower_to_ceiling(policy: Scaling, loads: Sequence[SegmentLoad], ceiling: int) -> list[Change]:
    """The policy has fewer segments at the most than there are: merge the coldest neighbours, whatever their load; more next time."""
    surplus = len(loads) - ceiling
    made: list[Change] = []
    used: set[int] = set()
    for left, right in sorted(pairwise(loads), key=lambda pair: pair[0].highest + pair[1].highest):
        if len(made) < surplus and not used & {left.number, right.number}:
            used |= {left.number, right.number}
            made.append(_merge(left, right, f"at most {ceiling} segments"))
    return made


def _split(load: SegmentLoad, parts: int, reason: str) -> Change:
    return Change("split", (load.number,), tuple(load.keys.split(parts)), reason)


def _merge(left: SegmentLoad, right: SegmentLoad, reason: str) -> Change:
    return Change("merge", (left.number, right.number), (KeyRange(left.keys.start, right.keys.end),), reason)


def _minutes(window: int) -> str:
    return f"{WINDOWS_SECONDS[window] / 60:.0f}-minute"
