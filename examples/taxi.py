"""A day of taxi rides on a stream that scales itself: python taxi.py STORE

Rides are keyed by the zone they begin in. The city sleeps and wakes (its peak is 10 times its low), and the crowd moves through it. The
stream splits the segments of busy zones and merges those of quiet ones. The day is simulated, in seconds; in
real life nothing has to be called: upkeep does it in the background.
"""

import math
import random
import sys
from collections import Counter
from datetime import UTC, datetime, timedelta

import headwater as hw

ZONES = 40
CALM, PEAK = 0.5, 5.0  # rides per second in the whole city
STEP = timedelta(minutes=5)


def rides_per_second(hour: float) -> float:
    """Lowest at 4 in the morning, highest in the afternoon."""
    return CALM + (PEAK - CALM) * (0.5 - 0.5 * math.cos(2 * math.pi * (hour - 4) / 24))


def busy(zone: int, hour: float) -> float:
    """How likely a zone is to be chosen: the crowd goes once around the city in a day."""
    distance = abs(zone / ZONES - hour / 24) % 1
    return 1 + 12 * math.exp(-((min(distance, 1 - distance) / 0.1) ** 2))


def main() -> None:
    chance = random.Random(7)
    counts: Counter[int] = Counter()
    with hw.open(sys.argv[1], upkeep=False) as store:
        rides = store.create_stream("taxi/rides", scaling=hw.Scaling.by_event_rate(1, factor=2, max_segments=64))
        now = datetime.now(UTC)
        splits = merges = 0
        with rides.writer() as writer:
            for step in range(round(timedelta(days=1) / STEP)):
                hour = step * STEP / timedelta(hours=1)
                weights = [busy(zone, hour) for zone in range(ZONES)]
                for zone in chance.choices(range(ZONES), weights, k=round(rides_per_second(hour) * STEP.total_seconds())):
                    counts[zone] += 1
                    writer.write(f"ride {counts[zone]}", key=zone)
                writer.flush()
                now += STEP
                report = store.scale_streams(now)
                splits, merges = splits + report.splits, merges + report.merges
                if hour % 2 == 0:
                    segments = len(rides.segments())
                    print(f"{hour:02.0f}:00  {rides_per_second(hour):4.1f} rides/s  {segments:2} segments  {'█' * segments}")
        print(f"{counts.total():,} rides, {splits} splits, {merges} merges")

        # However often its segment was split and merged meanwhile: the rides of a zone come in the order in which they were written.
        seen: Counter[int] = Counter()
        for event in rides.read():
            zone = int(event.key or b"")
            seen[zone] += 1
            assert event.value == f"ride {seen[zone]}".encode(), f"zone {zone}: ride {seen[zone]} is missing"
        assert seen == counts
        print("every zone's rides are there, in order; `headwater scaling taxi/rides` shows the day as a heat map")


if __name__ == "__main__":
    main()
