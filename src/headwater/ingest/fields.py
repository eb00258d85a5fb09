"""Fields of JSON objects that are looked up one by one: routing keys, event times."""

from __future__ import annotations

import json
import reprlib
from datetime import UTC, datetime
from typing import Any

from headwater.model.keys import key_bytes


def json_object(line: bytes) -> dict[str, Any]:
    """The object that a line is; ValueError if it is none."""
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not JSON ({error})") from None
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None
    if not isinstance(fields, dict):
        raise ValueError(f"not a JSON object but {type(fields).__name__}")
    return fields


def get_field(fields: dict[str, Any], name: str | None) -> Any:
    if name not in fields:
        raise ValueError(f"there is no field {name!r}")
    return fields[name]


def key_of(value: Any, name: str) -> bytes | None:
    """A field's value as a routing key."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(f"the field {name!r} is {reprlib.repr(value)}: a routing key is text or a whole number")
    return key_bytes(value)


def time_of(value: Any) -> datetime | None:
    """A field's value as an event time: ISO text, UTC where it has no zone, or seconds since 1970."""
    if value is None:
        return None
    if isinstance(value, str):
        time = datetime.fromisoformat(value)
        try:
            return time.astimezone(UTC) if time.tzinfo is not None else time.replace(tzinfo=UTC)
        except OverflowError:
            raise ValueError(f"{value!r} lies outside of the years 1 to 9999 of UTC") from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{reprlib.repr(value)} is no time: it is ISO text, or seconds since 1970")
    try:
        return datetime.fromtimestamp(value, UTC)
    except (OverflowError, OSError) as error:
        raise ValueError(f"{value!r} are not the seconds of any time") from error
