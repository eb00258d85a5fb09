"""How the segments that are ready share a step."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headwater.streams.steps import share

COUNTS = st.lists(st.integers(0, 1000), min_size=1, max_size=20)


@given(COUNTS, st.integers(0, 5000), st.integers(0, 10**6))
def test_a_step_is_as_large_as_it_may_be_and_no_segment_gives_more_than_it_has(counts: list[int], limit: int, turn: int) -> None:
    shares = share(counts, limit, turn)
    assert sum(shares) == min(limit, sum(counts))
    assert all(0 <= taken <= count for taken, count in zip(shares, counts, strict=True))
    some = sum(1 for count in counts if count)
    assert limit < some or all(taken for taken, count in zip(shares, counts, strict=True) if count)


@given(COUNTS, st.integers(1, 25))
def test_all_come_to_their_turn(counts: list[int], limit: int) -> None:
    turn, seen = 0, set()
    for _ in range(len(counts)):
        seen |= {index for index, taken in enumerate(share(counts, limit, turn)) if taken}
        turn += limit
    assert seen == {index for index, count in enumerate(counts) if count}
