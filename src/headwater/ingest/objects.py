"""Lines that are one JSON object each: checked before Arrow's reader, which takes nulls for rows, and ends the process at others.

Every line begins with { and ends with }, so no value goes on from one line to the next: with as many rows as lines, each has one.
"""

from __future__ import annotations

import re
from itertools import accumulate

import numpy as np

from headwater.ingest.fields import json_object
from headwater.ingest.text import line_ends
from headwater.model.limits import NESTED_TYPES

#: The object of a line is one, each column's type has the others.
_LEVELS = 1 + NESTED_TYPES
_OPEN, _CLOSE, _RETURN, _FEED = b"{"[0], b"}"[0], b"\r"[0], b"\n"[0]
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"')
_STEPS = {b"{"[0]: 1, b"["[0]: 1, b"}"[0]: -1, b"]"[0]: -1}


def count_objects(data: bytes) -> int:
    """How many lines are not blank; ValueError if one can't be an object. One by one only if not all begin and end as most do."""
    letters, ends = np.frombuffer(data, np.uint8), line_ends(data)
    starts = np.concatenate([[0], ends[:-1]])
    last = ends - 1
    for blank in (_FEED, _RETURN):
        last = last - (letters[last] == blank)
    if (letters[starts] == _OPEN).all() and (letters[last] == _CLOSE).all():
        return len(ends)
    lines = [stripped for line in data.split(b"\n") if (stripped := line.strip())]
    for line in lines:
        if line[0] != _OPEN or line[-1] != _CLOSE:
            json_object(line)  # which says what it is
            raise ValueError("not one JSON object in each line")
    return len(lines)


def check_levels(data: bytes) -> None:
    """ValueError if values are nested so deeply that no schema can hold them."""
    for line in data.split(b"\n"):
        if line.count(b"{") + line.count(b"[") > _LEVELS:
            outside = _STRING.sub(b"", line)
            if max(accumulate((_STEPS.get(letter, 0) for letter in outside), initial=0)) > _LEVELS:
                raise ValueError(f"values are nested more than {_LEVELS} levels deep")
