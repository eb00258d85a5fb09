"""Routing keys: the same bytes and the same place by every way of giving them, and key ranges that tile."""

from __future__ import annotations

from enum import Enum, IntEnum, StrEnum
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import InvalidRequestError
from headwater.model.keys import KEY_SPACE, WHOLE, KeyRange, hash_key, key_bytes, key_column
from headwater.model.limits import KEY_BYTES


@pytest.mark.parametrize(("key", "place"), [(b"", 0x2D06800538D394C2), (b"a", 0xE6C632B61E964E1F), (b"42", 0x1217CB28C0EF2191)])
def test_the_place_of_a_key_never_changes(key: bytes, place: int) -> None:
    # xxh3_64 as published: another value here would send the keys of every existing store to other segments.
    assert hash_key(key) == place


@pytest.mark.parametrize(
    ("key", "stored"),
    [
        (b"a", b"a"),
        ("a", b"a"),
        (7, b"7"),
        (-7, b"-7"),
        (0, b"0"),
        ("", b""),
        ("ü", b"\xc3\xbc"),
        (None, None),
        (2**70, b"1180591620717411303424"),
    ],
)
def test_a_key_is_stored_as_its_text(key: Any, stored: bytes | None) -> None:
    assert key_bytes(key) == stored


class Colour(StrEnum):
    RED = "red"


class Shade(str, Enum):  # noqa: UP042 - whose str() is not its value
    DARK = "dark"


class Rank(IntEnum):
    FIRST = 1


@pytest.mark.parametrize(
    ("key", "same"), [(Colour.RED, "red"), (Shade.DARK, "dark"), (Rank.FIRST, 1), (np.str_("a"), "a"), (np.bytes_(b"a"), b"a")]
)
def test_a_key_of_a_subclass_is_the_same_as_its_value(key: Any, same: Any) -> None:
    stored = key_bytes(key)
    assert type(stored) is bytes
    assert stored == key_bytes(same)


@pytest.mark.parametrize("key", [True, False, np.bool_(True), 1.0, 1.5, [], {}, object(), bytearray(b"a"), memoryview(b"a"), ("a",)])
def test_keys_of_other_types_are_refused(key: Any) -> None:
    with pytest.raises(InvalidRequestError, match="bytes, str, int or None"):
        key_bytes(key)


@pytest.mark.parametrize("key", ["\ud800", 10**5000], ids=["surrogate", "digits"])
def test_a_key_without_a_text_is_refused(key: Any) -> None:
    with pytest.raises(InvalidRequestError, match="can't be a routing key"):
        key_bytes(key)


def test_a_key_may_be_as_long_as_the_limit_and_not_longer() -> None:
    assert key_bytes(b"k" * KEY_BYTES) == b"k" * KEY_BYTES
    for key in (b"k" * (KEY_BYTES + 1), "k" * (KEY_BYTES + 1)):
        with pytest.raises(InvalidRequestError, match="65,537 bytes"):
            key_bytes(key)
    with pytest.raises(InvalidRequestError, match="65,537 bytes"):
        key_column(pa.array([b"k" * (KEY_BYTES + 1)]), "id")


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@given(st.lists(st.none() | TEXTS), st.integers(0, 3))
def test_a_column_of_text_gives_the_same_keys_as_one_at_a_time(keys: list[str | None], skip: int) -> None:
    expected = [key_bytes(key) for key in keys]
    raw = [key.encode() if key is not None else None for key in keys]
    columns = [pa.array(keys, kind) for kind in (pa.string(), pa.large_string(), pa.string_view())]
    columns += [pa.array(raw, kind) for kind in (pa.binary(), pa.large_binary(), pa.binary_view())]
    columns.append(pa.array(keys, pa.string()).dictionary_encode())
    for column in columns:
        assert key_column(column, "id").to_pylist() == expected
        assert key_column(column.slice(skip), "id").to_pylist() == expected[skip:]


@given(st.lists(st.none() | st.integers(-(2**63), 2**63 - 1)))
def test_a_column_of_integers_gives_the_same_keys_as_one_at_a_time(keys: list[int | None]) -> None:
    assert key_column(pa.array(keys, pa.int64()), "id").to_pylist() == [key_bytes(key) for key in keys]


@pytest.mark.parametrize("kind", [pa.bool_(), pa.float64(), pa.decimal128(5, 2), pa.timestamp("us"), pa.list_(pa.string())])
def test_a_column_of_another_type_can_not_be_the_key(kind: pa.DataType) -> None:
    with pytest.raises(InvalidRequestError, match="'id'"):
        key_column(pa.nulls(2, kind), "id")


@given(st.integers(0, KEY_SPACE - 2), st.data())
def test_the_parts_of_a_range_tile_it_and_are_nearly_equal(start: int, data: st.DataObject) -> None:
    end = data.draw(st.integers(start + 1, KEY_SPACE))
    parts = data.draw(st.integers(1, min(50, end - start)))
    ranges = KeyRange(start, end).split(parts)
    assert [ranges[0].start, ranges[-1].end, len(ranges)] == [start, end, parts]
    assert all(left.end == right.start for left, right in pairwise(ranges))
    widths = [keys.end - keys.start for keys in ranges]
    assert min(widths) > 0 and max(widths) - min(widths) <= 1


def test_ranges_overlap_only_if_they_share_a_key() -> None:
    left, right = WHOLE.split(2)
    assert not left.overlaps(right) and not right.overlaps(left)
    assert left.overlaps(WHOLE) and WHOLE.overlaps(right) and left.overlaps(left)
