"""Operations: the requests that a catalog answers, each a function that declares how it runs.

The engine runs declared operations and nothing else. So every request to a store has a name, and whatever goes by that name (metrics,
rights, a remote client, the faults of a test) has one place to stand.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Generic, Literal, NamedTuple, ParamSpec, Protocol, TypeVar, overload

from headwater.catalog.database import Database, Row, Statement, Tx

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

#: How an operation runs. "statement": one call of `run` or `run_all`, outside any transaction. "read": over one consistent look.
#: "commit": in a transaction, which is durable on return. "database": with the database itself, for a commit that may take one round trip.
How = Literal["statement", "read", "commit", "database"]
Verb = Literal["read", "append", "manage", "admin"]


class Right(NamedTuple):
    """What a remote caller must be allowed to do, with the thing that the argument of this name refers to."""

    verb: Verb
    argument: str

    def __str__(self) -> str:
        return f"{self.verb} {self.argument}"


class Operation(Generic[P, T_co]):
    """A declared function. Catalog functions call each other through it with their own `Tx`; all others give it to `Engine.run`.

    `repeatable`: if the answer to its commit is lost, it runs again, and recognises what it did. Without a right it is never offered to
    remote clients: a right is declared only where the operation checks each of its arguments itself.
    """

    def __init__(self, function: Callable[..., T_co], how: How, repeatable: bool, right: Right | None) -> None:
        self.function = function
        self.name = f"{function.__module__.rpartition('.')[2]}.{function.__name__.lstrip('_')}"
        self.how = how
        self.repeatable = repeatable
        self.right = right
        self.__doc__ = function.__doc__

    def __repr__(self) -> str:
        return f"<Operation {self.name}>"

    def __call__(self, tx: Tx, *args: P.args, **kwargs: P.kwargs) -> T_co:
        return self.function(tx, *args, **kwargs)


_declared: dict[str, Operation[..., Any]] = {}


@overload
def operation(
    how: Literal["statement", "read", "commit"], *, repeatable: bool = ..., right: Right | None = ...
) -> Callable[[Callable[Concatenate[Tx, P], T]], Operation[P, T]]: ...


@overload
def operation(
    how: Literal["database"], *, repeatable: bool = ..., right: Right | None = ...
) -> Callable[[Callable[Concatenate[Database, P], T]], Operation[P, T]]: ...


def operation(how: How, *, repeatable: bool = False, right: Right | None = None) -> Callable[[Callable[..., T]], Operation[..., T]]:
    """Declare a function as an operation. What only reads is always repeatable."""

    def declare(function: Callable[..., T]) -> Operation[..., T]:
        found = Operation[..., T](function, how, repeatable or how in ("statement", "read"), right)
        assert found.name not in _declared, f"two operations are called {found.name}"
        assert right is None or right.argument in inspect.signature(function).parameters, f"{found.name} has no argument {right}"
        _declared[found.name] = found
        return found

    return declare


def list_operations() -> list[Operation[..., Any]]:
    """All that were declared by the modules imported so far, by name."""
    return [_declared[name] for name in sorted(_declared)]


class Runner(Protocol):
    """Runs operations: on a database, or around another runner."""

    def run(self, operation: Operation[P, T], *args: P.args, **kwargs: P.kwargs) -> T: ...


class DatabaseRunner:
    """Runs operations on one database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def run(self, operation: Operation[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        function, database = operation.function, self._database
        if operation.how == "statement":
            return function(_OneStatement(database), *args, **kwargs)
        if operation.how == "read":
            return database.read(lambda tx: function(tx, *args, **kwargs))
        if operation.how == "database":
            return function(database, *args, **kwargs)
        result = database.write(lambda tx: function(tx, *args, **kwargs), repeatable=operation.repeatable)
        database.announce()
        return result


_TWO_STATEMENTS = "a second statement might see another state: declare the operation as a read"


class _OneStatement:
    """For an operation that asks once: no transaction around it, which saves a round trip on PostgreSQL."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._is_used = False

    def run(self, sql: str, values: Sequence[Any] = ()) -> list[Row]:
        # As `_use`, without the call: this is on the way of every read.
        assert not self._is_used, _TWO_STATEMENTS
        self._is_used = True
        return self._database.query(sql, values)

    def run_all(self, statements: Sequence[Statement]) -> list[list[Row]]:
        self._use()
        return self._database.query_all(statements)

    def defer(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        raise AssertionError("an operation that changes something is declared as a commit")

    def _use(self) -> None:
        assert not self._is_used, _TWO_STATEMENTS
        self._is_used = True
