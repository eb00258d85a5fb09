"""Policies: how they are made, what is refused, and their JSON in the catalog."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from headwater.errors import InvalidRequestError
from headwater.model.policies import Retention, Scaling

SCALINGS = [
    Scaling.fixed(1),
    Scaling.fixed(10_000),
    Scaling.by_event_rate(100),
    Scaling.by_event_rate(100, factor=4, min_segments=2, max_segments=9),
    Scaling.by_data_rate(1 << 20, min_segments=3),
]
RETENTIONS = [
    Retention.forever(),
    Retention.by_time(timedelta(days=7, microseconds=1)),
    Retention.by_size(1 << 40),
    Retention.by_consumption(["a", "b"], max_size=10, max_age=timedelta(hours=1)),
    Retention.by_consumption(("a",)),
]


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_scaling_is_read_back_from_its_json(scaling: Scaling) -> None:
    assert Scaling.from_json(scaling.to_json()) == scaling
    assert json.loads(scaling.to_json())["kind"] == scaling.kind


@pytest.mark.parametrize("retention", RETENTIONS)
def test_a_retention_is_read_back_from_its_json(retention: Retention) -> None:
    assert Retention.from_json(retention.to_json()) == retention


@pytest.mark.parametrize(
    "make",
    [
        lambda: Scaling.fixed(0),
        lambda: Scaling.fixed(-1),
        lambda: Scaling.fixed(True),
        lambda: Scaling.fixed(1.5),  # type: ignore[arg-type]
        lambda: Scaling.fixed("2"),  # type: ignore[arg-type]
        lambda: Scaling.fixed(10_001),
        lambda: Scaling.by_event_rate(0),
        lambda: Scaling.by_event_rate(10, factor=1),
        lambda: Scaling.by_data_rate(10, min_segments=0),
        lambda: Scaling.by_data_rate(10, min_segments=3, max_segments=2),
        lambda: Scaling.by_event_rate(10, min_segments=10_001),
        lambda: Retention.by_time(timedelta(0)),
        lambda: Retention.by_time(60),  # type: ignore[arg-type]
        lambda: Retention.by_size(0),
        lambda: Retention.by_consumption([]),
        lambda: Retention.by_consumption("group"),
        lambda: Retention.by_consumption(5),  # type: ignore[arg-type]
        lambda: Retention.by_consumption(["a/b"]),
        lambda: Retention.by_consumption(["a", ""]),
        lambda: Retention.by_consumption([5]),  # type: ignore[list-item]
        lambda: Retention.by_consumption(["a"], max_size=0),
        lambda: Retention.by_consumption(["a"], max_age=timedelta(0)),
        lambda: Retention.by_consumption(["a"], max_age=60),  # type: ignore[arg-type]
    ],
)
def test_policies_that_make_no_sense_are_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(InvalidRequestError):
        make()
