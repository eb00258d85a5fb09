"""Names of scopes, streams, writers, groups: what is allowed, and the sentence for what is not."""

from __future__ import annotations

import re
from typing import NamedTuple

from headwater.errors import InvalidRequestError
from headwater.model.arguments import shown

_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_RULE = "1 to 128 of A-Z a-z 0-9 _ . - and begins with a letter or digit"


class StreamName(NamedTuple):
    """A stream's full name, `scope/name`."""

    scope: str
    name: str

    def __str__(self) -> str:
        return f"{self.scope}/{self.name}"


def parse_word(text: str, what: str) -> str:
    """`text` itself if it is a name of one word; `what` says in the error what it was meant to name."""
    if not isinstance(text, str):
        raise InvalidRequestError(f"the name of a {what} is a str, not {type(text).__name__}: {shown(text)}")
    if not _WORD.fullmatch(text):
        raise InvalidRequestError(f"{shown(text)} can't name a {what}: a name has {_RULE}")
    return text


def parse_stream_name(text: str) -> StreamName:
    """Split `scope/name`, each side checked."""
    if not isinstance(text, str):
        raise InvalidRequestError(f"the name of a stream is a str like 'scope/name', not {type(text).__name__}: {shown(text)}")
    scope, slash, name = text.partition("/")
    if not slash or not _WORD.fullmatch(scope) or not _WORD.fullmatch(name):
        raise InvalidRequestError(f"{shown(text)} can't name a stream: it takes the form 'scope/name', where each side has {_RULE}")
    return StreamName(scope, name)
