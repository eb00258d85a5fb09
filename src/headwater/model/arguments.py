"""Arguments of public calls: what numbers, flags, times and lists may be, and the sentence for what they may not."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import datetime
from numbers import Real
from typing import Any

import numpy as np

from headwater.errors import InvalidRequestError
from headwater.model.limits import WAIT_SECONDS

#: Numbers that go into a catalog: what each can hold and add to.
MOST = (1 << 62) - 1
_SHOWN_CHARACTERS = 200


def shown(value: Any) -> str:
    """A value as an error shows it: not at any length, and also where it has no text (a number of thousands of digits)."""
    try:
        text = repr(value)
    except Exception:  # repr is the caller's code; the error to be raised is ours
        return f"this {type(value).__name__}"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def check_whole(value: Any, what: str, least: int = 0, most: int | None = None) -> int:
    """`value` itself if it is a whole number of this range; `what` says in the error what it was meant to be."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidRequestError(f"{what} is a whole number of at least {least:,}, not {shown(value)}")
    if most is not None and value > most:
        raise InvalidRequestError(f"{what} is at most {most:,}, not {shown(value)}")
    return value


def check_seconds(value: Any, what: str) -> float:
    """A time to wait as a float that every wait takes; inf is without end, and less than nothing is nothing: a deadline may be over."""
    try:
        if isinstance(value, Real) and not isinstance(value, bool) and not math.isnan(value):
            return min(float(value), WAIT_SECONDS)
    except OverflowError:  # a whole number that no float can hold
        pass
    raise InvalidRequestError(f"{what} is a number of seconds (float('inf'): without end), not {shown(value)}")


def check_flag(value: Any, what: str) -> bool:
    """True or False, also numpy's. Not whatever is true: 'no' is."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise InvalidRequestError(f"{what} is True or False, not {shown(value)}")


def check_callable(value: Any, what: str) -> None:
    if not callable(value):
        raise InvalidRequestError(f"{what} is a function, not {shown(value)}")


def check_time(time: Any, what: str) -> None:
    """Refuse a time without a zone, and one that is none: pandas' NaT is a datetime, and equals nothing."""
    if not isinstance(time, datetime) or time != time or time.utcoffset() is None:
        raise InvalidRequestError(f"{what} is a datetime with a zone (say, datetime.now(UTC)), not {shown(time)}")


def items_of(values: Any, what: str, kind: str) -> Iterator[Any]:
    """The items of a list, or of anything else that has some. A text has too, but is never meant so."""
    try:
        if not isinstance(values, str | bytes):
            return iter(values)
    except TypeError:
        pass
    raise InvalidRequestError(f"{what} is a list of {kind}, not {'the text ' if isinstance(values, str) else ''}{shown(values)}")
