"""Markers: what makes a commit idempotent for its owner."""

from __future__ import annotations

from typing import NamedTuple


class Marker(NamedTuple):
    """An owner's sequence number: committed once. `fingerprint` tells a repetition from other data under the same number."""

    owner: str
    sequence: int
    fingerprint: str | None = None
