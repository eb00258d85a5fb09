"""The seam between the client classes and the catalog: functions at the top level of a module cross it, through `Engine` only.

Plans, extents and logs stay below it: what reads has a cursor. CLOSURES, USES_OF_DATABASE and USES_OF_PLANS count the places that break
these rules. The numbers can only fall.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.ratchet import check_ratchet

PACKAGE = Path(__file__).parents[2] / "src" / "headwater"

#: Lambdas, nested functions, partials and functions of unknown origin that are given to the engine or to its database.
CLOSURES = 0
#: Uses of `engine.database` outside `catalog/` and `check/`.
USES_OF_DATABASE = 0
#: Names of plans above `segments/`, and cursors that are made past `Engine.cursor`; `check/` is exempt.
USES_OF_PLANS = 0

#: The file that implements the seam. It may use its own database as it likes.
_SEAM = Path("segments/engine.py")
#: The methods of `Engine` and of its database that take a function.
_METHODS = frozenset({"read", "run", "write"})
#: What only the files below the seam may name.
_PLANS = frozenset({"Extent", "OpenRange", "find_extents", "open_range", "plan_log", "plan_segment"})
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
#: Each name that a function binds, with its values. None stands for a value that the source does not show, as of a parameter.
_Scope = dict[str, list[ast.AST | None]]


def find_closures(source: str) -> list[int]:
    """The lines that give the engine a function which is not at the top level of a module."""
    finder = _Closures()
    finder.visit(ast.parse(source))
    return finder.lines


def find_uses_of_database(source: str) -> list[int]:
    """The lines that name `engine.database`."""
    return sorted(node.lineno for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute) and _is_engine_database(node))


def find_uses_of_plans(source: str) -> list[int]:
    """The lines that name plans of reads, or make a cursor."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and _last_name(node.func) == "SegmentCursor":
            found.add(node.lineno)
        if (isinstance(node, ast.Name) and node.id in _PLANS) or (isinstance(node, ast.Attribute) and node.attr in _PLANS):
            found.add(node.lineno)
        if isinstance(node, ast.ImportFrom) and any(alias.name in _PLANS for alias in node.names):
            found.add(node.lineno)
    return sorted(found)


class _Closures(ast.NodeVisitor):
    def __init__(self) -> None:
        self.lines: list[int] = []
        #: The scopes of the functions around the present node, innermost last.
        self._scopes: list[_Scope] = []

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._visit_function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._visit_function(node)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._visit_function(node)

    def _visit_function(self, node: _Function) -> None:
        self._scopes.append(_scope_of(node))
        self.generic_visit(node)
        self._scopes.pop()

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        # Either a call of the engine's method, or a call that is given the method and its arguments, such as `pool.submit`.
        calls: list[ast.expr] = [node.func, *node.args]
        for index, called in enumerate(calls):
            if (index == 0 or isinstance(called, ast.Attribute)) and (method := self._method(called)) is not None:
                self._check(method, calls[index + 1 :], node.keywords)

    def _check(self, method: str, arguments: Sequence[ast.expr], keywords: Sequence[ast.keyword]) -> None:
        for index, argument in enumerate([*arguments, *(keyword.value for keyword in keywords)]):
            is_closure = self._is_closure(argument)
            # `run` takes declared operations only, so a parameter or a loop variable is one. The other methods take any function.
            is_unknown = is_closure is None and index == 0 and method != "run"
            if is_closure or is_unknown:
                self.lines.append(argument.lineno)

    def _is_closure(self, node: ast.AST | None, seen: frozenset[str] = frozenset()) -> bool | None:
        """Whether a value is a function that captures state. None if the source does not tell."""
        if isinstance(node, _Function):
            return True
        if isinstance(node, ast.Call):
            return True if _last_name(node.func) in ("partial", "partialmethod") else None
        if isinstance(node, ast.IfExp):
            return _worst([self._is_closure(node.body, seen), self._is_closure(node.orelse, seen)])
        if isinstance(node, ast.BoolOp):
            return _worst([self._is_closure(value, seen) for value in node.values])
        if isinstance(node, ast.Attribute):
            return False if self._is_at_top(node) else None
        if isinstance(node, ast.Name) and node.id not in seen:
            return _worst([self._is_closure(value, seen | {node.id}) for value in self._values(node.id)])
        return None

    def _is_at_top(self, node: ast.Attribute) -> bool:
        """Whether this is an attribute of a module: the functions around it don't bind its first name."""
        value: ast.expr = node
        while isinstance(value, ast.Attribute):
            value = value.value
        return isinstance(value, ast.Name) and not any(value.id in scope for scope in self._scopes)

    def _method(self, node: ast.AST | None, seen: frozenset[str] = frozenset()) -> str | None:
        """The method of the engine, or of its database, that this value is; None if it is neither."""
        if isinstance(node, ast.IfExp):
            return self._method(node.body, seen) or self._method(node.orelse, seen)
        if isinstance(node, ast.Name) and node.id not in seen:
            methods = [self._method(value, seen | {node.id}) for value in self._values(node.id)]
            return next(filter(None, methods), None)
        if (
            isinstance(node, ast.Attribute)
            and node.attr in _METHODS
            and (_last_name(node.value) == "engine" or self._is_database(node.value))
        ):
            return node.attr
        return None

    def _is_database(self, node: ast.AST | None) -> bool:
        """Whether this value is an engine's database, by itself or by a local name."""
        if isinstance(node, ast.Name):
            return any(isinstance(value, ast.Attribute) and _is_engine_database(value) for value in self._values(node.id))
        return isinstance(node, ast.Attribute) and _is_engine_database(node)

    def _values(self, name: str) -> list[ast.AST | None]:
        """What the functions around the present node give this name; nothing for a name of the module."""
        return next((scope[name] for scope in reversed(self._scopes) if name in scope), [])


def _worst(answers: Sequence[bool | None]) -> bool | None:
    return True if True in answers else None if None in answers else False


def _is_engine_database(node: ast.Attribute) -> bool:
    return node.attr == "database" and _last_name(node.value) == "engine"


def _last_name(node: ast.expr) -> str | None:
    """`engine` for `engine`, `self._engine` and `store._engine`."""
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None
    return None if name is None else name.removeprefix("_")


def _scope_of(function: _Function) -> _Scope:
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *filter(None, (arguments.vararg, arguments.kwarg))]
    scope: _Scope = {argument.arg: [None] for argument in named}
    body = [function.body] if isinstance(function, ast.Lambda) else function.body
    given: set[ast.expr] = set()
    for node in _walk_own(body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            scope.setdefault(node.name, []).append(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    given.add(target)
                    scope.setdefault(target.id, []).append(node.value)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node not in given:
            scope.setdefault(node.id, []).append(None)
    return scope


def _walk_own(nodes: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """The nodes of a function without those of the functions and classes in it, each after the one that contains it."""
    for node in nodes:
        yield node
        if not isinstance(node, _Function | ast.ClassDef):
            yield from _walk_own(list(ast.iter_child_nodes(node)))


def _list_places(find: Callable[[str], list[int]], *exempt: str) -> list[str]:
    found = []
    for file in sorted(PACKAGE.rglob("*.py")):
        path = file.relative_to(PACKAGE)
        if path != _SEAM and path.parts[0] not in exempt:
            found += [f"{path}:{line}" for line in find(file.read_text(encoding="utf-8"))]
    return found


def test_no_more_closures_are_given_to_the_engine() -> None:
    check_ratchet(_list_places(find_closures, "catalog"), "CLOSURES", CLOSURES)


def test_no_more_code_reaches_past_the_engine_to_its_database() -> None:
    check_ratchet(_list_places(find_uses_of_database, "catalog", "check"), "USES_OF_DATABASE", USES_OF_DATABASE)


def test_no_more_code_above_the_seam_knows_how_a_read_is_planned() -> None:
    check_ratchet(_list_places(find_uses_of_plans, "catalog", "segments", "check"), "USES_OF_PLANS", USES_OF_PLANS)


@pytest.mark.parametrize(
    "source",
    [
        "from headwater.catalog.extents import Extent",
        "def f(engine, id):\n    return engine.run(extents.plan_segment, id, 0, 0, 1, 1)",
        "def f(engine, stream):\n    return SegmentCursor(engine, stream, 0, 0, None)",
    ],
)
def test_a_use_of_plans_is_found(source: str) -> None:
    assert len(find_uses_of_plans(source)) == 1
    assert find_uses_of_plans("def f(engine, stream):\n    cursor: SegmentCursor = engine.cursor(stream, 0, 0, None)") == []


@pytest.mark.parametrize(
    "source",
    [
        "def f(engine):\n    engine.run(lambda tx: tx.run('SELECT 1'))",
        "def f(self):\n    def work(tx): ...\n    return self._engine.run(work)",
        "def f(self):\n    def work(tx): ...\n    def again(): return self._engine.run(work)\n    again()",
        "def f(store, id):\n    store._engine.run(partial(streams.get_stream, stream=id))",
        "def f(engine, id):\n    work = functools.partial(streams.get_stream, stream=id)\n    engine.run(work)",
        "def f(engine):\n    engine.database.write(lambda tx: sessions.end_session(tx, 1), repeatable=True)",
        "def f(engine):\n    database = engine.database\n    database.read(lambda tx: 1)",
        "def f(engine, exist_ok):\n    run = engine.run if exist_ok else other.run\n    run(lambda tx: 1)",
        "def f(engine, is_new):\n    def make(tx): ...\n    engine.run(make if is_new else streams.update_stream)",
        "def f(engine):\n    def work(tx): ...\n    pool.submit(engine.run, work)",
        "def f(engine):\n    engine.run(groups.create_group, key=lambda row: row.id)",
        "def f(engine, look):\n    return engine.database.read(look)",
        "def f(engine):\n    for step in (a, b):\n        engine.database.write(step, 10)",
        "class A:\n    def f(self):\n        self._engine.database.read(self._look)",
        "def f(engine):\n    operation = run = lambda tx: 1\n    engine.run(operation)",
    ],
)
def test_a_closure_is_found(source: str) -> None:
    assert len(find_closures(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "def f(engine, id):\n    engine.database.read(streams.get_stream, id)",
        "def _look(tx, id): ...\nclass A:\n    def f(self):\n        return self._engine.run(_look, self._id)",
        "def f(engine, operation, *args):\n    return engine.run(operation, *args)",
        "def f(engine):\n    for step in (a, b):\n        engine.run(step, 10)",
        "def f(engine, is_new):\n    operation = streams.create if is_new else streams.update\n    engine.run(operation, 1)",
        "def f(engine, exist_ok):\n    run = engine.run if exist_ok else other.run\n    run(streams.create, rows=[1])",
        "def f(engine, retried):\n    retried(lambda: engine.run(streams.get_stream, 1))",
        "def f(file, work):\n    file.read(work)\n    file.write(lambda: 1)",
        "def check(database):\n    database.read(lambda tx: 1)",
    ],
)
def test_a_function_at_the_top_of_a_module_is_fine(source: str) -> None:
    assert find_closures(source) == []


def test_a_use_of_the_database_is_found_and_the_engines_own_is_not() -> None:
    assert find_uses_of_database("def f(self):\n    self._engine.database.query('SELECT 1')\n    x = store._engine.database") == [2, 3]
    assert find_uses_of_database("def f(self):\n    self.database.query('SELECT 1')\n    engine.run(database.find)") == []


def test_a_ratchet_says_what_to_lower_and_where_to_look() -> None:
    check_ratchet(["a.py:1"], "CLOSURES", 1)
    with pytest.raises(pytest.fail.Exception, match="lower CLOSURES from 2 to 1"):
        check_ratchet(["a.py:1"], "CLOSURES", 2)
    with pytest.raises(pytest.fail.Exception, match=r"found 2, CLOSURES allows 1:\na.py:1\nb.py:2"):
        check_ratchet(["a.py:1", "b.py:2"], "CLOSURES", 1)
