"""Time, as microseconds since 1970 UTC. No clock decides correctness: see docs/guarantees.md."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def now_us() -> int:
    """This host's wall clock."""
    return time.time_ns() // 1000


def to_datetime(time_us: int) -> datetime:
    return EPOCH + timedelta(microseconds=time_us)


def from_datetime(time: datetime) -> int:
    """Microseconds since 1970; a time without a zone is refused by the caller beforehand."""
    return (time - EPOCH) // timedelta(microseconds=1)
