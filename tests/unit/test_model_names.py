"""Names: what is allowed, and a sentence for what is not."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import InvalidRequestError
from headwater.model.names import parse_stream_name, parse_word


@pytest.mark.parametrize("word", ["a", "0", "A-b_c.d", "x" * 128])
def test_a_word_may_have_letters_digits_and_a_few_signs(word: str) -> None:
    assert parse_word(word, "scope") == word


@pytest.mark.parametrize("word", ["", "-a", ".a", "_a", "a b", "a/b", "ä", "x" * 129, "a\n", "a\0", "٣", None, 1, b"a"])
def test_other_words_are_refused_with_what_they_were_to_name(word: Any) -> None:
    with pytest.raises(InvalidRequestError, match="scope"):
        parse_word(word, "scope")


@pytest.mark.parametrize("name", ["a", "a/", "/a", "a/b/c", "a//b", "a/b ", " a/b", "a/_b", "a/b\n", "", None, 7, ("a", "b")])
def test_a_stream_is_called_scope_slash_name_and_nothing_else(name: Any) -> None:
    with pytest.raises(InvalidRequestError, match="scope/name"):
        parse_stream_name(name)


WORDS = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}", fullmatch=True)


@given(WORDS, WORDS)
def test_a_stream_name_is_read_back_from_its_text(scope: str, name: str) -> None:
    assert tuple(parse_stream_name(f"{scope}/{name}")) == (scope, name)
    assert str(parse_stream_name(f"{scope}/{name}")) == f"{scope}/{name}"
