"""The page with every public name is as the code is."""

from __future__ import annotations

from tests.docs import reference


def test_the_reference_is_made_of_the_present_code() -> None:
    assert reference.PATH.read_text() == reference.make(), "python -m tests.docs.reference"
