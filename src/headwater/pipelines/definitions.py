"""What a query is, as far as its checkpoint depends on it: its sources, its stateful operators with their keys, and Spark's version.

Spark itself compares little before it starts, and goes on with wrong state where types happen to fit: a window of another length, or
another key. Columns, filters and expressions before an operator may change, and so may the delay of a watermark.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pyspark.sql import DataFrame

_ID = re.compile(r"#(\d+)L?(?:-T\d+ms)?")
_ALIAS = re.compile(r" AS `?\w+`?(?=$|,)")
_PARTS = ("operator", "keys", "functions", "types")
#: Of a longer text only the part that differs is shown.
_SHOWN = 120
_NAMES = {
    "Aggregate": "aggregation",
    "Distinct": "distinct",
    "Deduplicate": "deduplication",
    "DeduplicateWithinWatermark": "deduplication within the watermark",
    "Join": "join of two streams",
    "TransformWithState": "transformWithState",
    "TransformWithStateInPySpark": "transformWithState",
    "FlatMapGroupsWithState": "flatMapGroupsWithState",
    "FlatMapGroupsInPandasWithState": "applyInPandasWithState",
    "GlobalLimit": "limit",
}


def describe(df: DataFrame, sources: list[str], functions: str) -> dict[str, Any]:
    """The definition of a streaming DataFrame, as JSON. `functions` is the source of the functions that built it."""
    plan: Any = df._jdf.queryExecution().analyzed()
    return {
        "sources": sorted(sources),
        "stateful": [_describe_node(node) for node in _walk(plan) if _is_stateful(node)],
        "spark": df.sparkSession.version,
        "code": hashlib.sha256(functions.encode()).hexdigest()[:16],
        "columns": [[field.name, field.dataType.simpleString()] for field in df.schema],
    }


def is_stateful(definition: Mapping[str, Any]) -> bool:
    return bool(definition["stateful"])


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Why a query can't go on from the checkpoint of another one: a phrase for each reason, none if it can."""
    found = []
    if old["sources"] != new["sources"]:
        found.append(f"it reads {', '.join(new['sources']) or 'no stream'}, and read {', '.join(old['sources']) or 'no stream'}")
    before, after = old["stateful"], new["stateful"]
    if [node["operator"] for node in before] != [node["operator"] for node in after]:
        found.append(f"its stateful operators are {_operators(after)}, and were {_operators(before)}")
    else:
        for one, other in zip(before, after, strict=True):
            for part in _PARTS[1:]:
                if one[part] != other[part]:
                    is_now, was = _apart(other[part], one[part])
                    found.append(f"the {part} of its {one['operator']} are [{is_now}], and were [{was}]")
    if before and _release(old["spark"]) != _release(new["spark"]):
        found.append(f"its state was written by Spark {old['spark']}, and this is Spark {new['spark']}")
    return found


def _apart(one: str, other: str) -> tuple[str, str]:
    """Both texts around the first place where they differ: a window's definition is as long as a page."""
    if max(len(one), len(other)) <= _SHOWN:
        return one, other
    at = next((index for index, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), min(len(one), len(other)))
    first = max(0, at - _SHOWN // 2)
    shown = [("..." if first else "") + text[first : first + _SHOWN] + "..." * (len(text) > first + _SHOWN) for text in (one, other)]
    return shown[0], shown[1]


def _operators(nodes: list[dict[str, str]]) -> str:
    return ", ".join(node["operator"] for node in nodes) or "none"


def _release(version: str) -> list[str]:
    return version.split(".")[:2]


def _walk(node: Any) -> Iterator[Any]:
    """The nodes of a logical plan, each before its children."""
    yield node
    for child in _items(node.children()):
        yield from _walk(child)


def _items(sequence: Any) -> list[Any]:
    return [sequence.apply(index) for index in range(sequence.size())]


def _name(node: Any) -> str:
    return str(node.getClass().getSimpleName())


def _is_stateful(node: Any) -> bool:
    name = _name(node)
    if name not in _NAMES or not node.isStreaming():
        return False
    # A join with a table keeps no state.
    return name != "Join" or all(child.isStreaming() for child in _items(node.children()))


def _describe_node(node: Any) -> dict[str, str]:
    name = _name(node)
    children = _items(node.children())
    keys = functions = ""
    types = _types(node)
    if name == "Aggregate":
        keys = ", ".join(_resolved(item, children) for item in _items(node.groupingExpressions()))
        functions = ", ".join(_ALIAS.sub("", _plain(item)) for item in _items(node.aggregateExpressions()))
    elif name in ("Deduplicate", "DeduplicateWithinWatermark"):
        keys = ", ".join(_resolved(item, children) for item in _items(node.keys()))
        types = ""  # Only keys are kept.
    elif name == "Join":
        condition = node.condition()
        keys = _plain(condition.get()) if condition.isDefined() else ""
        functions = str(node.joinType().toString())
        types = " and ".join(_types(child) for child in children)
    elif name.startswith(("TransformWithState", "FlatMapGroups")):
        grouping = node.leftAttributes() if name == "TransformWithStateInPySpark" else node.groupingAttributes()
        keys = ", ".join(_resolved(item, children) for item in _items(grouping))
    return {"operator": _NAMES[name], "keys": keys, "functions": functions, "types": types}


def _types(node: Any) -> str:
    return ", ".join(str(item.dataType().catalogString()) for item in _items(node.output()))


def _plain(expression: Any) -> str:
    """The text of an expression without the numbers that Spark gives to columns anew each time."""
    return _ID.sub("", str(expression.toString()))


def _resolved(expression: Any, children: list[Any], depth: int = 0) -> str:
    """The text of a key with the columns that are computed below put in: a window's length is not in its name."""
    text = str(expression.toString())
    made = []
    for id in dict.fromkeys(int(found) for found in _ID.findall(text)):
        for definition in _definitions(id, children):
            below = _resolved(definition, children, depth + 1) if depth < 8 else _plain(definition)
            if below != _plain(expression):
                made.append(below)
    plain = _ID.sub("", text)
    return f"{plain} = {'; '.join(made)}" if made else plain


def _definitions(id: int, children: list[Any]) -> Iterator[Any]:
    """The expressions that compute a column in the nodes below; none if it comes from a source as it is."""
    for child in children:
        for node in _walk(child):
            name = _name(node)
            if name == "Project":
                for item in _items(node.projectList()):
                    if _name(item) == "Alias" and int(item.exprId().id()) == id:
                        yield item.child()
            elif name == "Expand":
                places = [at for at, item in enumerate(_items(node.output())) if int(item.exprId().id()) == id]
                for projection in _items(node.projections()) if places else ():
                    for at in places:
                        yield projection.apply(at)
