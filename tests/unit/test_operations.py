"""What the declarations of all operations promise: arguments are values, and an operation does not trust its caller."""

from __future__ import annotations

import collections.abc
import dataclasses
import inspect
import sys
import types
import typing
from datetime import datetime
from typing import Any

import pytest

from headwater.catalog import extents, groups, segments, streams
from headwater.catalog.operations import Operation, list_operations
from headwater.segments.lanes import StreamRef
from tests.docs.operations import import_all

import_all()
OPERATIONS = {found.name: found for found in list_operations() if found.function.__module__.startswith("headwater.")}
#: Rows of the catalog, and a client's own view of a stream: an operation is given ids, and looks the rows up itself.
ROWS = {segments.SegmentRow, streams.StreamRow, groups.GroupRow, groups.Assigned, extents.Extent, StreamRef}
#: Upkeep's own, which no client runs. They name logs, since some logs have no segment any more, and the time of the round.
UPKEEP = {"tiers", "loads", "load_samples"}
VALUES = (bool, int, float, str, bytes, datetime, type(None))
_CONTAINERS = (tuple, list, dict, collections.abc.Sequence, collections.abc.Collection, collections.abc.Mapping)


def parameters(operation: Operation[..., Any]) -> dict[str, Any]:
    """The types of an operation's arguments by name, without the transaction that it runs in."""
    hints = typing.get_type_hints(operation.function)
    names = list(inspect.signature(operation.function).parameters)[1:]
    return {name: hints[name] for name in names}


def trusted(operation: Operation[..., Any]) -> set[str]:
    """The arguments that an operation knows itself: logs, and by the catalog's clock and model/limits.py all times but those of events.

    The lease of a transaction is what its user asks for.
    """
    return {name for name in parameters(operation) if name == "log" or (name.endswith("_us") and name not in ("time_us", "lease_us"))}


def parts(kind: Any) -> set[Any]:
    """The types that a type is made of."""
    found = {kind}
    for part in typing.get_args(kind):
        found |= parts(part)
    return found


def is_value(kind: Any) -> bool:
    """Whether something of this type can be sent: it is plain, or made of plain values, as a name and a cut are."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType, *_CONTAINERS):
        return all(part is Ellipsis or is_value(part) for part in typing.get_args(kind))
    if dataclasses.is_dataclass(kind) or hasattr(kind, "_fields"):
        return all(map(is_value, typing.get_type_hints(kind).values()))
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
        assert not trusted(operation)


def test_an_operation_is_at_the_top_of_its_module_and_captures_nothing(operation: Operation[..., Any]) -> None:
    function = operation.function
    assert function.__qualname__ == function.__name__ and function.__closure__ is None
    assert getattr(sys.modules[function.__module__], function.__name__) is operation


def test_an_operation_with_a_right_takes_values_only(operation: Operation[..., Any]) -> None:
    if operation.right is not None:
        for name, kind in parameters(operation).items():
            assert is_value(kind), f"{name}: {kind}"
