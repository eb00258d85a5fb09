"""Conditions of a persist: what its entity must be at, and which events may not be there."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

from headwater.errors import InvalidRequestError
from headwater.model.arguments import MOST, items_of, shown
from headwater.model.limits import MATCH_WORDS, MATCHES
from headwater.model.records import check_id, check_tag, check_type


class Expected(Enum):
    """What a persist may expect beside a number."""

    EXISTS = "exists"

    def __repr__(self) -> str:
        return "hw.EXISTS"


#: The entity has events, and was not deleted.
EXISTS = Expected.EXISTS


class Match:
    """The events that have all of these tags, one of these types and one of these ids, as far as they are given."""

    __slots__ = ("ids", "tags", "types")

    def __init__(self, tags: Sequence[str] = (), types: Sequence[str] = (), ids: Sequence[str] = ()) -> None:
        self.tags = tags
        self.types = types
        self.ids = ids

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Match) and (self.tags, self.types, self.ids) == (other.tags, other.types, other.ids)

    def __hash__(self) -> int:
        return hash((tuple(self.tags), tuple(self.types), tuple(self.ids)))

    def __repr__(self) -> str:
        given = [f"{name}={value!r}" for name in ("tags", "types", "ids") if (value := getattr(self, name))]
        return f"Match({', '.join(given)})"


def check_expected(expected: Any) -> int | Expected | None:
    """What a persist expects of its entity, if it can."""
    if expected is None or expected is EXISTS:
        return expected
    if isinstance(expected, bool) or not isinstance(expected, int) or not 0 <= expected <= MOST:
        raise InvalidRequestError(f"expected is None, a sequence (0: a new entity) or hw.EXISTS, not {shown(expected)}")
    return expected


def check_matches(matches: Any) -> tuple[Match, ...]:
    """One match, or several, with their words checked; each is a tuple without doubles."""
    given = [matches] if isinstance(matches, Match) else list(items_of(matches, "fail_if", "hw.Match"))
    if len(given) > MATCHES:
        raise InvalidRequestError(f"fail_if has up to {MATCHES} matches, not {len(given)}")
    return tuple([_check_match(match) for match in given])


def _check_match(match: Any) -> Match:
    if not isinstance(match, Match):
        raise InvalidRequestError(f"fail_if is made with hw.Match(tags=..., types=..., ids=...), not {shown(match)}")
    tags = tuple(dict.fromkeys([check_tag(tag) for tag in items_of(match.tags, "a match's tags", "words")]))
    types = tuple(dict.fromkeys([check_type(type) for type in items_of(match.types, "a match's types", "words")]))
    ids = tuple(dict.fromkeys([check_id(id) for id in items_of(match.ids, "a match's ids", "texts")]))
    if not (tags or types or ids):
        raise InvalidRequestError("a match has at least one tag, type or id: as it is, it would match every event")
    for name, words in (("tags", tags), ("types", types), ("ids", ids)):
        if len(words) > MATCH_WORDS:
            raise InvalidRequestError(f"a match has up to {MATCH_WORDS} {name}, not {len(words)}")
    return Match(tags, types, ids)
