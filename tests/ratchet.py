"""Ratchets: numbers that may fall and never rise, each a constant in the test that checks it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest


def check_ratchet(found: Sequence[str], constant: str, most: int) -> None:
    """Fail if more was found than the constant allows, with all that was found, and if less was found, until the constant is lowered."""
    if len(found) > most:
        pytest.fail("\n".join([f"found {len(found)}, {constant} allows {most}:", *found]))
    if len(found) < most:
        pytest.fail("\n".join([f"found only {len(found)}: lower {constant} from {most} to {len(found)}", *found]))
