"""Refusals as they are kept: an error with its typed attributes as JSON, to be raised again by another process."""

from __future__ import annotations

from typing import Any

from headwater import errors
from headwater.errors import HeadwaterError
from headwater.model.cuts import Cut
from headwater.model.matches import Expected
from headwater.model.positions import Position


def dump_error(error: HeadwaterError) -> dict[str, Any]:
    """An error as JSON values."""
    _, (_, message, facts) = error.__reduce__()
    # By the public class that it is: a kind of it may be known to its own module alone.
    kind = next(kind for kind in type(error).__mro__ if getattr(errors, kind.__name__, None) is kind)
    return {"kind": kind.__name__, "message": message, "facts": {name: _plain(value) for name, value in facts.items()}}


def load_error(found: dict[str, Any]) -> HeadwaterError:
    """The error that was dumped."""
    kind: type[HeadwaterError] = getattr(errors, found["kind"])
    return kind(found["message"], **{name: _typed(value) for name, value in found["facts"].items()})


def _plain(value: Any) -> Any:
    if isinstance(value, Cut):
        return {"cut": str(value)}
    if isinstance(value, Position):
        return {"position": list(value)}
    if isinstance(value, Expected):
        return {"expected": value.value}
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _typed(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if "expected" in value:
        return Expected(value["expected"])
    return Cut.parse(value["cut"]) if "cut" in value else Position(*value["position"])
