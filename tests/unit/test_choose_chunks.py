"""Which chunks are made one: neighbours that fit, enough of them, and so that no byte is written again too often."""

from __future__ import annotations

import random
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from headwater.catalog.extents import PARQUET
from headwater.catalog.tiers import Piece
from headwater.model.limits import CHUNK_BYTES, COMPACT_CHUNKS, MIB
from headwater.segments.tiering import choose_chunks

SIZES = st.lists(st.integers(1, CHUNK_BYTES // 2 - 1) | st.integers(1, MIB), max_size=40)


def chunks(sizes: list[int], gaps: frozenset[int] = frozenset()) -> list[Piece]:
    """Chunks of ten events each, with a hole before those in `gaps`."""
    found, first = [], 0
    for place, size in enumerate(sizes):
        first += 1000 if place in gaps else 0
        found.append(Piece(first, 10, size // 3, 0, 0, place, PARQUET, size, 0))
        first += 10
    return found


def joined(pieces: list[Piece]) -> Piece:
    return pieces[0]._replace(events=pieces[-1].end - pieces[0].first, raw=sum(piece.bytes for piece in pieces))


def settle(pieces: list[Piece], *, is_sealed: bool) -> tuple[list[Piece], int]:
    """Compact until there is nothing to do; returns what is left, and how many bytes were written."""
    written = 0
    while chosen := choose_chunks([piece for piece in pieces if piece.bytes < CHUNK_BYTES // 2], is_sealed=is_sealed):
        if len(chosen) < 2:
            break
        new = joined(chosen)
        at = pieces.index(chosen[0])
        pieces = [*pieces[:at], new, *pieces[at + len(chosen) :]]
        written += new.bytes
    return pieces, written


def test_few_small_chunks_of_an_open_log_are_left() -> None:
    assert choose_chunks([], is_sealed=False) == []
    assert choose_chunks(chunks([100] * (COMPACT_CHUNKS - 1)), is_sealed=False) == []


def test_enough_small_ones_of_an_open_log_are_made_one() -> None:
    some = chunks([100] * COMPACT_CHUNKS)
    assert choose_chunks(some, is_sealed=False) == some


def test_large_ones_in_front_are_not_written_again_with_a_few_small_ones() -> None:
    some = chunks([30 * MIB, *[100] * COMPACT_CHUNKS])
    assert choose_chunks(some, is_sealed=False) == some[1:]


def test_any_two_neighbours_of_a_sealed_log_are_made_one_if_they_fit() -> None:
    some = chunks([60 * MIB, 60 * MIB, 50 * MIB, 5])
    assert choose_chunks(some, is_sealed=True) == some[:2]
    assert choose_chunks(some[:1], is_sealed=True) == []
    apart = chunks([5, 5], gaps=frozenset({1}))
    assert choose_chunks(apart, is_sealed=True) == []


@given(sizes=SIZES, gaps=st.frozensets(st.integers(0, 40)), is_sealed=st.booleans())
def test_what_is_chosen_are_neighbours_that_fit_into_one(sizes: list[int], gaps: frozenset[int], is_sealed: bool) -> None:
    chosen = choose_chunks(chunks(sizes, gaps), is_sealed=is_sealed)
    assert len(chosen) != 1
    assert all(left.end == right.first for left, right in pairwise(chosen))
    assert sum(piece.bytes for piece in chosen) <= CHUNK_BYTES


@given(sizes=SIZES, gaps=st.frozensets(st.integers(0, 40)))
def test_a_sealed_log_ends_with_no_two_neighbours_that_would_fit(sizes: list[int], gaps: frozenset[int]) -> None:
    left, _ = settle(chunks(sizes, gaps), is_sealed=True)
    small = [piece for piece in left if piece.bytes < CHUNK_BYTES // 2]
    for one, other in pairwise(small):
        assert one.end != other.first or one.bytes + other.bytes > CHUNK_BYTES


def test_a_byte_of_a_long_open_log_is_written_only_a_few_times() -> None:
    rng = random.Random(3)
    for largest in (20_000, MIB, 64 * MIB):
        pieces: list[Piece] = []
        total = written = 0
        for _ in range(600):
            size = rng.randint(largest // 2, largest)
            first = pieces[-1].end if pieces else 0
            pieces.append(Piece(first, 10, size, 0, 0, 0, PARQUET, size, 0))
            total += size
            pieces, more = settle(pieces, is_sealed=False)
            written += more
        assert written / total < 12, largest
        assert len(pieces) < 3 * COMPACT_CHUNKS + total // (CHUNK_BYTES // 4)
