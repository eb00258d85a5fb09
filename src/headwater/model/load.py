"""The load of a stream's open segments: mean rates over some minutes, kept up from samples, and handed on when segments change.

Nothing here looks at a clock or a catalog. Rates are per second, of events or of bytes, whichever the stream's policy counts.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from headwater.model.keys import KeyRange

#: How far back each of a segment's rates looks: a rate is an exponentially weighted mean with this time constant.
WINDOWS_SECONDS = (120.0, 300.0, 600.0, 1200.0)
#: A segment that has this share of the load of all that its predecessor became: splitting the predecessor did not help.
_IN_VAIN_SHARE = 0.8

Rates = tuple[float, float, float, float]
NO_RATES: Rates = (0.0, 0.0, 0.0, 0.0)


class Amount(NamedTuple):
    """So much was appended, evenly over the last `seconds`."""

    total: float
    seconds: float


class SegmentLoad(NamedTuple):
    """What is known of one open segment: its rates over 2, 5, 10 and 20 minutes, and when its keys were last split or merged.

    `origin` are the keys it was split from (its own, if it was not), and `in_vain` is how many splits in a row before it did not
    spread the load: a single key can't be split.
    """

    number: int
    keys: KeyRange
    changed_at: int
    rates: Rates = NO_RATES
    origin: KeyRange | None = None
    in_vain: int = 0

    @property
    def highest(self) -> float:
        return max(self.rates)

    @property
    def latest(self) -> float:
        return self.rates[0]


def observe(rates: Rates, amounts: Iterable[Amount], dt: float, age: float) -> Rates:
    """The rates `dt` seconds later, when `amounts` were appended meanwhile; `age` is for how long they had been observed before.

    An amount may have come about over longer than `dt`, as that of a transaction which was just committed has: it counts as if it had
    been seen at the time. While the age is less than a window, the rate is the mean over the age.
    """
    observed = age + dt
    made = []
    for rate, window in zip(rates, WINDOWS_SECONDS, strict=True):
        known = 1.0 - math.exp(-observed / window)
        updated = rate * (1.0 - (1.0 - math.exp(-dt / window)) / known)
        for total, seconds in amounts:
            # Only what lies within the time observed has a place in the mean.
            span = min(max(seconds, dt), observed)
            updated += total / max(seconds, dt) * (1.0 - math.exp(-span / window)) / known
        made.append(updated)
    return (made[0], made[1], made[2], made[3])


def hand_on(old: Sequence[SegmentLoad], opened: Iterable[tuple[int, KeyRange]], now_us: int) -> list[SegmentLoad]:
    """The loads of the segments that are open now, in the order of their keys, as `old` are: new ones get their share of what had
    their keys before.

    So a split or merge, by whomever, neither hides load nor makes any up. A segment with just the keys of another (a roll for a
    transaction) takes its place as if nothing had happened.
    """
    known = {load.number: load for load in old}
    starts = [load.keys.start for load in old]
    found = []
    for number, keys in sorted(opened, key=lambda item: item[1]):
        if number in known:
            found.append(known[number])
            continue
        before = [old[index] for index in overlapping(starts, keys)]
        same = next((load for load in before if load.keys == keys), None)
        if same is not None:
            found.append(same._replace(number=number))
            continue
        rates = _sum(_scaled(load.rates, key_share(load.keys, keys)) for load in before)
        parent = before[0] if len(before) == 1 and before[0].keys != keys else None
        origin = parent.keys if parent is not None else None
        found.append(SegmentLoad(number, keys, now_us, rates, origin, _splits_in_vain(parent, old, starts) if parent is not None else 0))
    return found


def overlapping(starts: Sequence[int], keys: KeyRange) -> range:
    """Which of the neighbours that begin at these places, in order and tiling the key space, overlap a range."""
    return range(max(0, bisect_right(starts, keys.start) - 1), bisect_left(starts, keys.end))


def _splits_in_vain(load: SegmentLoad, among: Sequence[SegmentLoad], starts: Sequence[int]) -> int:
    """For a segment that was split: how many splits in a row, up to the one that made it, left the load in one piece."""
    if load.origin is None:
        return 0
    family = [among[index] for index in overlapping(starts, load.origin)]
    within = sum(other.latest for other in family if load.origin.start <= other.keys.start and other.keys.end <= load.origin.end)
    return load.in_vain + 1 if load.latest >= _IN_VAIN_SHARE * within else 0


def key_share(whole: KeyRange, part: KeyRange) -> float:
    """How much of a range lies within another one that overlaps it."""
    return (min(whole.end, part.end) - max(whole.start, part.start)) / (whole.end - whole.start)


def _scaled(rates: Rates, share: float) -> Rates:
    return (rates[0] * share, rates[1] * share, rates[2] * share, rates[3] * share)


def _sum(rates: Iterable[Rates]) -> Rates:
    total = [0.0, 0.0, 0.0, 0.0]
    for some in rates:
        total = [a + b for a, b in zip(total, some, strict=True)]
    return (total[0], total[1], total[2], total[3])
