"""Markers: what makes a commit idempotent for its owner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from headwater.model.cuts import Cut


class Marker(NamedTuple):
    """An owner's sequence number: committed once. `fingerprint` tells a repetition from other data under the same number."""

    owner: str
    sequence: int
    fingerprint: str | None = None


class CommittedMarker(NamedTuple):
    """An owner's last marker, and the place right after its commit in each stream that the commit wrote to."""

    owner: str
    sequence: int
    fingerprint: str | None
    cut: Cut


class Look(NamedTuple):
    """Streams and markers as of one moment: the tails of the streams, and the last marker of each owner, None without one."""

    cut: Cut
    markers: Mapping[str, CommittedMarker | None]
