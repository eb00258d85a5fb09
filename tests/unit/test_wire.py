"""What operations take and answer can be sent: by their annotations alone, and errors keep their class and their facts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple

import msgspec
import pytest

import headwater as hw
from headwater.catalog.flushes import Flush, commit_flush
from headwater.catalog.operations import Operation, list_operations
from headwater.catalog.parts import Append, Part, Stored
from headwater.catalog.persists import Repeated
from headwater.catalog.tables import EntryChange
from headwater.catalog.targets import RouteStale
from headwater.model.cuts import Cut, StreamCut
from headwater.model.positions import Position
from tests.docs.operations import import_all
from tests.wire import codec, decode_error, encode_error, shape

import_all()
OPERATIONS = {found.name: found for found in list_operations() if found.function.__module__.startswith("headwater.")}


def send(plain: Any) -> Any:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(plain))


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_an_operation_s_arguments_and_answer_can_be_sent(name: str) -> None:
    shape(OPERATIONS[name])


class Pair(NamedTuple):
    name: str
    numbers: tuple[int, ...]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (int | None, None),
        (int, 1 << 80),
        (float, 2),
        (bytes, b"\xff"),
        (str | bytes, "text"),
        (datetime, datetime(2024, 2, 29, 23, 59, 59, 999_999, tzinfo=UTC)),
        (tuple[int, str], (1, "x")),
        (Mapping[tuple[int, int], Pair], {(1, 2): Pair("a", (3,))}),
        (frozenset[str], frozenset({"a"})),
        (Sequence[Pair | int], [Pair("a", ()), 7]),
        (Literal["a", "b"], "b"),
        (Cut, Cut("id", {"a/x": StreamCut(3, {0: 5})})),
        (Any, {0: [1, (2, "x")], "k": None}),
        (Part, Part((Append(1, 2, 3, 4, 5, None, 0, b"block"),), (EntryChange(1, "key", b"value", None),))),
    ],
    ids=str,
)
def test_a_value_is_the_same_after_the_way(kind: Any, value: Any) -> None:
    assert codec(kind).fits(value)
    again = codec(kind).decode(send(codec(kind).encode(value)))
    assert (again == value and type(again) is type(value)) or kind is float


@pytest.mark.parametrize(
    ("kind", "value"),
    [(int, True), (int, 1.0), (str, b""), (list[int], (1,)), (list[int], ["1"]), (tuple[int, int], (1,)), (Pair, ("a", ()))],
)
def test_a_value_of_another_type_is_found(kind: Any, value: Any) -> None:
    assert not codec(kind).fits(value)


def test_a_type_that_can_not_be_sent_is_found() -> None:
    for kind in (object, Operation, list[object], Pair | object):
        with pytest.raises(TypeError, match="can't be sent"):
            codec(kind)


def test_a_call_and_its_answer_are_checked() -> None:
    form = shape(commit_flush)
    flush = Flush(1, 2, (Part((Append(1, 0, 1, 1, 0, None, 0, b"x"),)),), (), 3)
    assert form.decode_call(send(form.encode_call((flush,), {"news": {"a": "b"}}))) == ([flush], {"news": {"a": "b"}})
    assert form.decode_call(send(form.encode_call((1,), {}))) == ([1], {}), "the operation refuses it"
    with pytest.raises(hw.InvalidRequestError, match=r"flush of flushes\.commit_flush"):
        form.encode_call((object(),), {})
    assert form.decode_answer(send(form.encode_answer([Stored((5,), 7)]))) == [Stored((5,), 7)]
    with pytest.raises(TypeError, match="the answer of"):
        form.encode_answer([None])


@pytest.mark.parametrize(
    "error",
    [
        hw.ConditionFailedError("moved", "a", hw.EXISTS, 5, Position(1, 2), found=7),
        hw.TruncatedError("gone", Cut("id", {"a/x": StreamCut(3, {0: 5})})),
        Repeated("again", first=1),
        RouteStale(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_keeps_its_class_and_its_facts(error: Exception) -> None:
    again = decode_error(send(encode_error(error)))
    assert type(again) is type(error) and str(again) == str(error)
    if isinstance(error, hw.HeadwaterError):
        assert again.__reduce__() == error.__reduce__()
