"""What the declarations of all operations promise: arguments are values, and an operation does not trust its caller."""

from __future__ import annotations

import collections.abc
import inspect
import types
import typing
from typing import Any

import pytest

from headwater.catalog import extents, groups, segments, streams
from headwater.catalog.operations import Operation, list_operations
from headwater.model.cuts import Cut
from headwater.model.markers import Marker
from headwater.model.names import StreamName
from tests.docs.operations import import_all

import_all()
OPERATIONS = {found.name: found for found in list_operations() if found.function.__module__.startswith("headwater.")}
#: Rows of the catalog: an operation is given ids, and looks the rows up itself.
ROWS = {segments.SegmentRow, streams.StreamRow, groups.GroupRow, extents.Extent}
#: What an operation knows itself, from model/limits.py.
TRUSTED = {"log", "dead_after_us", "idle_us", "age_us", "open_us"}
#: Upkeep's own, which no client runs. They name logs, since some logs have no segment any more.
UPKEEP = {"tiers"}
#: To be cleared: these take a transaction's age from the client until commits are one operation.
UNFINISHED = {"transactions.begin": {"age_us", "open_us"}}
#: The types of arguments that can be sent as they are; a name or a cut is made of such.
VALUES = (bool, int, float, str, bytes, type(None), Cut, Marker, StreamName)


def parameters(operation: Operation[..., Any]) -> dict[str, Any]:
    """The types of an operation's arguments by name, without the transaction that it runs in."""
    hints = typing.get_type_hints(operation.function)
    names = list(inspect.signature(operation.function).parameters)[1:]
    return {name: hints[name] for name in names}


def parts(kind: Any) -> set[Any]:
    """The types that a type is made of."""
    found = {kind}
    for part in typing.get_args(kind):
        found |= parts(part)
    return found


def is_value(kind: Any) -> bool:
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType, tuple, list, dict, collections.abc.Sequence, collections.abc.Collection):
        return all(part is Ellipsis or is_value(part) for part in typing.get_args(kind))
    return kind in VALUES


@pytest.fixture(params=sorted(OPERATIONS))
def operation(request: pytest.FixtureRequest) -> Operation[..., Any]:
    return OPERATIONS[request.param]


def test_every_argument_and_the_result_of_an_operation_are_annotated(operation: Operation[..., Any]) -> None:
    signature = inspect.signature(operation.function)
    assert signature.return_annotation is not inspect.Signature.empty
    for parameter in signature.parameters.values():
        assert parameter.annotation is not inspect.Parameter.empty, parameter
        assert parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD), parameter


def test_no_operation_takes_a_row_of_the_catalog(operation: Operation[..., Any]) -> None:
    for name, kind in parameters(operation).items():
        assert not parts(kind) & ROWS, f"{name}: give its id"


def test_no_operation_takes_from_its_caller_what_it_can_know_itself(operation: Operation[..., Any]) -> None:
    if operation.name.partition(".")[0] not in UPKEEP:
        assert parameters(operation).keys() & TRUSTED == UNFINISHED.get(operation.name, set())


def test_an_operation_with_a_right_takes_values_only(operation: Operation[..., Any]) -> None:
    if operation.right is not None:
        for name, kind in parameters(operation).items():
            assert is_value(kind), f"{name}: {kind}"


def test_what_is_left_to_do_is_done_by_operations_that_there_are() -> None:
    assert UNFINISHED.keys() <= OPERATIONS.keys()
