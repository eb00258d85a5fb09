"""The locks of a commit: all segments in one pass, ascending, each in its strongest mode at once, so that no two commits deadlock."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from headwater.catalog import tails
from headwater.catalog.database import Statement
from headwater.catalog.tails import Watch

WATCHES = st.lists(st.builds(Watch, st.integers(1, 4), st.integers(0, 600), st.booleans()), max_size=700)


def locked(statements: Sequence[Statement]) -> list[tuple[int, int, bool]]:
    """(stream, segment, whether exclusively) in the order in which the statements lock them."""
    found = []
    for sql, (stream, *numbers) in statements:
        assert "ORDER BY number FOR " in sql and list(numbers) == sorted(numbers)
        found += [(stream, number, sql.endswith("FOR UPDATE")) for number in dict.fromkeys(numbers)]
    return found


@given(WATCHES)
def test_each_segment_is_locked_once_ascending_in_its_strongest_mode(watches: list[Watch]) -> None:
    found = locked(tails.lock(watches))
    places = [place[:2] for place in found]
    assert places == sorted({watch[:2] for watch in watches})
    for stream, segment, is_exclusive in found:
        assert is_exclusive == any(watch.is_exclusive for watch in watches if watch[:2] == (stream, segment))


def test_a_shared_lock_does_not_come_before_an_exclusive_one_of_a_lower_number() -> None:
    """Of two commits that each watch what the other one writes, both would wait for ever."""
    assert locked(tails.lock([Watch(1, 5), Watch(1, 2, True), Watch(1, 7), Watch(1, 5)])) == [(1, 2, True), (1, 5, False), (1, 7, False)]
