"""Cuts: their canonical text, and what is no cut."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import InvalidRequestError
from headwater.model.cuts import Cut, StreamCut, part_text

NUMBERS = st.integers(0, 2**62)
CUTS = st.builds(
    Cut,
    st.text("0123456789abcdef", min_size=1, max_size=32),
    st.dictionaries(
        st.from_regex(r"[a-z]{1,3}/[a-z]{1,3}", fullmatch=True),
        st.builds(StreamCut, NUMBERS, st.dictionaries(NUMBERS, NUMBERS, max_size=4)),
        max_size=3,
    ),
)


@given(CUTS)
def test_a_cut_is_read_back_from_its_text_and_from_a_pickle(cut: Cut) -> None:
    assert Cut.parse(str(cut)) == cut
    assert str(Cut.parse(str(cut))) == str(cut)
    assert pickle.loads(pickle.dumps(cut)) == cut
    assert hash(Cut.parse(str(cut))) == hash(cut)


def test_the_text_of_a_cut_is_canonical_json() -> None:
    cut = Cut("f00", {"b/y": StreamCut(2, {10: 5, 9: 7}), "a/x": StreamCut(1, {0: 3})})
    assert str(cut) == '{"store":"f00","streams":{"a/x":{"id":1,"segments":{"0":3}},"b/y":{"id":2,"segments":{"10":5,"9":7}}}}'


@given(CUTS, CUTS)
def test_the_text_of_a_cut_contains_the_texts_of_its_own_parts_only(one: Cut, other: Cut) -> None:
    for name, part in other.streams.items():
        assert part_text(name, part) in str(other)
        assert (part_text(name, part) in str(one)) == (one.streams.get(name) == part)


def test_cuts_are_equal_by_what_they_say_and_can_not_be_changed() -> None:
    first = Cut("f00", {"a/x": StreamCut(1, {0: 3, 1: 4})})
    second = Cut("f00", {"a/x": StreamCut(1, {1: 4, 0: 3})})
    assert first == second and len({first, second}) == 1
    assert first != Cut("f00", {"a/x": StreamCut(1, {0: 3, 1: 5})}) and first != str(first)
    with pytest.raises(TypeError):
        first.streams["a/x"].segments[0] = 9  # type: ignore[index]
    with pytest.raises(AttributeError):
        first.store = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "head",
        "{}",
        "[]",
        "null",
        "3",
        '{"store":"f00"}',
        '{"streams":{}}',
        '{"store":"f00","streams":[]}',
        '{"store":"f00","streams":{"a/x":{"id":1}}}',
        '{"store":"f00","streams":{"a/x":{"id":"1","segments":{}}}}',
        '{"store":"f00","streams":{"a/x":{"id":1,"segments":{"0":-1}}}}',
        '{"store":"f00","streams":{"a/x":{"id":1,"segments":{"0":1.5}}}}',
        '{"store":"f00","streams":{"a/x":{"id":1,"segments":{"0":true}}}}',
        '{"store":"f00","streams":{"a/x":{"id":1,"segments":{"-1":0}}}}',
        '{"store":"f00","streams":{"a/x":{"id":1,"segments":{"one":0}}}}',
        '{"store":"f00","streams":{"a/x":{"id":1,"segments":{"0":0}}}',
        "[" * 100_000,
        None,
        7,
    ],
    ids=lambda text: f"{text!r:.70}",
)
def test_a_text_that_is_no_cut_is_refused(text: Any) -> None:
    with pytest.raises(InvalidRequestError, match="not the text of a cut"):
        Cut.parse(text)
