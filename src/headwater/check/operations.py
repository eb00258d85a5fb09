"""The operations that a catalog answers, as a list to look at."""

from __future__ import annotations

from typing import NamedTuple

from headwater.catalog import operations


class OperationInfo(NamedTuple):
    """An operation: how it runs, whether it may be repeated after a lost answer, and the right that a remote client needs."""

    name: str
    runs_as: str
    is_repeatable: bool
    right: str | None


def list_operations() -> list[OperationInfo]:
    """The operations of the package, by name. Without a right, an operation is never offered to remote clients."""
    return [
        OperationInfo(found.name, found.how, found.repeatable, str(found.right) if found.right is not None else None)
        for found in operations.list_operations()
        if found.function.__module__.startswith("headwater.")
    ]
