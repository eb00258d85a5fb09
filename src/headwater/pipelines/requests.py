"""Commands for a pipeline that another process runs: a request in its register, which the runner carries out and answers."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import headwater
from headwater import HeadwaterError
from headwater.pipelines import errors
from headwater.pipelines.register import ANSWER, REQUEST, Owner, Register
from headwater.pipelines.tenure import SUSPECTED_SECONDS
from headwater.spark.addresses import patiently

_POLL_SECONDS = 0.1


class NoRunnerError(Exception):
    """The runner ended before it answered. Never leaves the package."""


def ask(register: Register, owner: Owner, command: str, arguments: Mapping[str, Any]) -> Any:
    """Have the runner carry out a command; returns or raises what it came to. NoRunnerError if the runner is gone: nothing was done."""
    id = uuid.uuid4().hex
    patiently(lambda: register.put(REQUEST + id, {"command": command, "arguments": dict(arguments), "at": time.time()}))
    beat, since = None, time.monotonic()
    try:
        while True:
            answer = patiently(lambda: register.find(ANSWER + id))
            if answer is not None:
                return read_answer(answer)
            now = patiently(lambda: register.beat_version(owner))
            if now != beat:
                beat, since = now, time.monotonic()
            live = patiently(register.find_live)
            left = live is None or live.owner is None or live.owner.id != owner.id
            if left or owner.is_gone() or time.monotonic() - since > SUSPECTED_SECONDS:
                # It may have answered last of all.
                answer = patiently(lambda: register.find(ANSWER + id))
                if answer is not None:
                    return read_answer(answer)
                raise NoRunnerError
            time.sleep(_POLL_SECONDS)
    finally:
        with suppress(HeadwaterError):
            register.remove(REQUEST + id)
            register.remove(ANSWER + id)


def make_answer(value: Any = None, error: BaseException | None = None) -> dict[str, Any]:
    if error is None:
        return {"value": value}
    message = error.message if isinstance(error, HeadwaterError) else f"{type(error).__name__}: {error}"
    return {"error": type(error).__name__, "message": message}


def read_answer(answer: Mapping[str, Any]) -> Any:
    if "error" not in answer:
        return answer["value"]
    kind = getattr(errors, answer["error"], None) or getattr(headwater, answer["error"], None)
    if not (isinstance(kind, type) and issubclass(kind, HeadwaterError)):
        kind = HeadwaterError
    raise kind(answer["message"])
