"""The graph of a pipeline: views and outputs, what each reads, and what is wrong with it before anything starts.

A node's inputs are found in the source of its function, so most mistakes are named without Spark. An input whose name is computed
is found when the DataFrame is built.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from headwater import InvalidRequestError

Kind = Literal["stream", "table", "view", "parquet"]
_KINDS: tuple[Kind, ...] = ("stream", "table", "view", "parquet")


class Input(NamedTuple):
    """Something that a function reads, as its source says."""

    kind: Kind
    name: str


@dataclass(frozen=True)
class View:
    """A DataFrame with a name, built anew for each output that reads it."""

    name: str
    function: Callable[[Any], Any]


@dataclass(frozen=True)
class Output:
    """One query: the function that builds its DataFrame, and the stream or table that takes the rows."""

    name: str
    function: Callable[[Any], Any]
    target: str
    is_table: bool
    key: str | None
    time: str | None = None
    watermark: tuple[str, str] | None = None
    partitions: int | None = None
    trigger: str | None = None
    max_events: int | None = None
    segments: int = 1


@dataclass
class Graph:
    """The views and outputs of a pipeline, by name."""

    pipeline: str
    views: dict[str, View] = field(default_factory=dict)
    outputs: dict[str, Output] = field(default_factory=dict)

    def add(self, node: View | Output) -> None:
        """Add a node. InvalidRequestError if its name, or the stream or table that it fills, is taken."""
        if node.name in self.views or node.name in self.outputs:
            raise InvalidRequestError(f"pipeline {self.pipeline}: two functions are called {node.name!r}: rename one of them")
        if isinstance(node, View):
            self.views[node.name] = node
            return
        for other in self.outputs.values():
            if other.target == node.target:
                raise InvalidRequestError(
                    f"pipeline {self.pipeline}: {other.name!r} and {node.name!r} both fill {node.target}: give each an output of its own, "
                    "or read both in one function and unite them"
                )
        self.outputs[node.name] = node

    def get_output(self, name: str) -> Output:
        if name not in self.outputs:
            known = ", ".join(self.outputs) or "none"
            raise InvalidRequestError(f"pipeline {self.pipeline} has no output {name!r}; its outputs: {known}")
        return self.outputs[name]

    def producer(self, target: str) -> Output | None:
        """The output that fills a stream or table."""
        return next((output for output in self.outputs.values() if output.target == target), None)

    def inputs(self, output: Output) -> list[Input]:
        """All that an output reads, directly or through views. InvalidRequestError if a view is missing or reads itself."""
        return list(dict.fromkeys(self._inputs(output.function, output.name, ())))

    def _inputs(self, function: Callable[[Any], Any], name: str, path: tuple[str, ...]) -> Iterator[Input]:
        for found in find_inputs(function):
            if found.kind != "view":
                yield found
                continue
            if found.name in path:
                raise InvalidRequestError(
                    f"pipeline {self.pipeline}: the view {found.name!r} reads itself: {' -> '.join((*path, found.name))}. "
                    "A cycle must pass through a stream"
                )
            if found.name not in self.views:
                known = ", ".join(self.views) or "none"
                raise InvalidRequestError(f"pipeline {self.pipeline}: {name!r} reads a view {found.name!r}; its views: {known}")
            yield from self._inputs(self.views[found.name].function, found.name, (*path, found.name))

    def check(self) -> None:
        """Refuse a graph that can't run: no outputs, views that are missing or read themselves, a cycle through a table."""
        if not self.outputs:
            raise InvalidRequestError(f"pipeline {self.pipeline} has no output: declare one with @p.stream or @p.table")
        for output in self.outputs.values():
            self.inputs(output)
        self._check_cycles()

    def _check_cycles(self) -> None:
        """A cycle through a stream keeps what is in flight in the log. One through a table's present entries keeps it nowhere."""
        for output in self.outputs.values():
            for found in self.inputs(output):
                producer = self.producer(found.name) if found.kind == "table" else None
                if producer is not None and output in self.upstream(producer):
                    raise InvalidRequestError(
                        f"pipeline {self.pipeline}: {output.name!r} reads the table {found.name}, which depends on {output.name!r}. "
                        "A cycle must pass through a stream: fill a stream with @p.stream, and read that"
                    )

    def upstream(self, output: Output) -> list[Output]:
        """The output and all those that it depends on."""
        found = [output]
        for one in found:
            for read in self.inputs(one):
                producer = self.producer(read.name) if read.kind in ("stream", "table") else None
                if producer is not None and producer not in found:
                    found.append(producer)
        return found

    def in_order(self) -> list[Output]:
        """The outputs, each after those that it reads. Within a cycle they are in the order of their declaration."""
        ordered: list[Output] = []
        waiting = list(self.outputs.values())
        while waiting:
            free = [output for output in waiting if not any(other in waiting for other in self._producers(output) if other != output)]
            # All that is left depends on a cycle: begin with its first member.
            chosen = free or [next(one for one in waiting if self._is_in_cycle(one))]
            ordered += chosen
            waiting = [output for output in waiting if output not in chosen]
        return ordered

    def has_cycle(self) -> bool:
        return any(self._is_in_cycle(output) for output in self.outputs.values())

    def _producers(self, output: Output) -> list[Output]:
        found = (self.producer(read.name) for read in self.inputs(output) if read.kind in ("stream", "table"))
        return [producer for producer in found if producer is not None]

    def _is_in_cycle(self, output: Output) -> bool:
        return any(output in self.upstream(producer) for producer in self._producers(output))


def find_inputs(function: Callable[[Any], Any]) -> list[Input]:
    """What a function reads: the calls of its first parameter whose argument is a text, in the order of the source."""
    found = []
    tree = _parse(function)
    parameters = [argument.arg for argument in tree.args.args] if tree is not None else []
    if tree is None or not parameters:
        return []
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == parameters[0]
            and node.func.attr in _KINDS
        ):
            given = node.args[0] if node.args else next((word.value for word in node.keywords if word.arg in ("name", "path")), None)
            if isinstance(given, ast.Constant) and isinstance(given.value, str):
                found.append((node.lineno, node.col_offset, Input(node.func.attr, given.value)))
    return [item for _, _, item in sorted(found)]


def _parse(function: Callable[[Any], Any]) -> ast.FunctionDef | ast.Lambda | None:
    """The function's syntax tree; None if Python does not have its source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None
    found = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.Lambda))
    return next(found, None)


def source_of(function: Callable[[Any], Any]) -> str:
    """The text of a function, without its decorators; empty if Python does not have it."""
    tree = _parse(function)
    if tree is None:
        return ""
    if isinstance(tree, ast.FunctionDef):
        tree.decorator_list = []
    return ast.unparse(tree)


#: Options of the contract that later versions bring, and what to do until then.
LATER: Mapping[str, str] = {
    "late": "rows that come after the watermark are dropped as Spark drops them, and counted by it: leave `late` out",
    "dead_letters": "a row that fails stops its output: leave `dead_letters` out, and filter such rows in the function",
    "sql": "outputs are streams and tables of the store: use @p.stream or @p.table",
    "expect": "filter the rows in the function",
    "udf": "use pyspark's own udf: a row that fails stops its output",
    "parse": "use Spark's from_json or from_csv",
    "fork": "give the changed output a new name, which is filled from the head",
    "compare": "read both outputs with headwater.spark.table and compare them",
    "promote": "give the changed output a new name, and move its readers there",
    "backfill": "an output is filled from the head of its inputs when it is new: give it a new name",
}


def refuse_later(word: str) -> InvalidRequestError:
    return InvalidRequestError(f"{word} is not in this version: {LATER[word]}")
