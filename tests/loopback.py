"""A loop-back engine: each call of an operation, its answer and its error go through bytes, as they would to another process.

As a plugin, `pytest -p tests.loopback`, it does so for every store that a test opens in its own process: `make test-long` runs the
contract suite so.
"""

from __future__ import annotations

from typing import Any, ParamSpec, TypeVar

import msgspec
import pytest

from headwater.catalog.operations import Operation
from headwater.errors import HeadwaterError
from headwater.segments.engine import Engine
from tests.wire import SIGNALS, decode_error, encode_error, shape

#: Tests of what no remote client would see, and why.
NOT_SENT = {
    "test_a_damaged_catalog_file_is_reported[value]": "a value of another type in a damaged row: `check` reads rows where they are",
    "test_a_wrong_argument_is_refused_with_a_sentence_and_nothing_is_stored": "arrays and numbers of 5,000 digits as arguments",
}

P = ParamSpec("P")
T = TypeVar("T")


class Loopback:
    """A runner that sends each operation to another one, in the same process."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.calls = 0
        self.bytes = 0

    def run(self, operation: Operation[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        form = shape(operation)
        call = self._send(form.encode_call(args, kwargs))
        try:
            given, named = form.decode_call(call)
            result = self._runner.run(operation, *given, **named)
        except (HeadwaterError, *SIGNALS.values()) as error:
            raise decode_error(self._send(encode_error(error))) from error.__cause__
        answer: T = form.decode_answer(self._send(form.encode_answer(result)))
        return answer

    def _send(self, plain: Any) -> Any:
        sent = msgspec.msgpack.encode(plain)
        self.calls += 1
        self.bytes += len(sent)
        return msgspec.msgpack.decode(sent)


def pytest_configure() -> None:
    """From now on, each engine that is made in this process runs its operations through a loop-back."""
    begin = Engine.__init__

    def begin_with_loopback(engine: Engine, *args: Any) -> None:
        begin(engine, *args)
        engine.runner = Loopback(engine.runner)

    pytest.MonkeyPatch().setattr(Engine, "__init__", begin_with_loopback)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = [item for item in items if not {item.name, item.name.partition("[")[0]} & NOT_SENT.keys()]
