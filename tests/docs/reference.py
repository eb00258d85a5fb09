"""docs/reference.md, made of the signatures and docstrings of every public name: `python -m tests.docs.reference` writes it."""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import headwater
import headwater.ingest
import headwater.pipelines
import headwater.spark

PATH = Path(__file__).parents[2] / "docs" / "reference.md"

_INTRO = """# Reference

Every public name with what it promises, made from the code by `python -m tests.docs.reference`. `import headwater as hw`.
[Guarantees](guarantees.md) has what holds across calls, every limit, and what to do about each error; the [quickstart](quickstart.md)
shows them at work.
"""
_SECTIONS = {
    "Store": ["open", "Store", "Cut", "Look", "UpkeepReport", "Metrics", "OperationMetrics"],
    "Streams": [
        "Stream",
        "Segment",
        "Position",
        "Event",
        "SegmentRange",
        "ChunkRange",
        "Scaling",
        "ScalingHistory",
        "ScalingReport",
        "Retention",
    ],
    "Writing": ["Writer", "Ack", "ByteWriter", "ByteReader"],
    "Transactions": ["Transaction", "Commit", "Marker", "CommittedMarker", "TransactionStatus", "TransactionInfo"],
    "Reading in a group": ["ReaderGroup", "Reader", "Lag", "HeldSegment", "TimeWindow"],
    "Journals": ["Journal", "Record", "Recorded", "Persisted", "Head", "Snapshot", "Query", "Merged", "Match", "EXISTS"],
    "State and tables": ["Table", "Entry", "TableChange", "ABSENT", "Revisioned", "Revision", "Synchronizer"],
}
_CONSTANTS = {
    "ABSENT": "The version of a key that is missing: for `put` and `remove` that are to happen only then.\n",
    "EXISTS": "The state of an entity that has events, whatever its sequence: for `expected`.\n",
}
#: Classes without fields of a record that users make themselves: their arguments are shown.
_MADE = {"Record", "Match"}
#: Public for other modules of ours only.
_INTERNAL = {"abandon", "add", "is_ours", "stage"}


def make() -> str:
    """The text of the page."""
    errors = [name for name in headwater.__all__ if inspect.isclass(thing := getattr(headwater, name)) and issubclass(thing, Exception)]
    names = [name for section in _SECTIONS.values() for name in section] + errors
    assert sorted(names) == headwater.__all__, set(names) ^ set(headwater.__all__)
    lines = [_INTRO]
    for title, section in _SECTIONS.items():
        lines += [f"## {title}", *_describe_all(headwater, section, "hw.")]
    lines += ["## Errors", "All are `HeadwaterError`, say what to do, carry their facts as `error.facts`, and survive pickling.\n"]
    lines += [_describe_error(getattr(headwater, name)) for name in errors]
    for module in (headwater.ingest, headwater.spark, headwater.pipelines):
        lines += [f"\n## {module.__name__}", _text(module), *_describe_all(module, module.__all__, f"{module.__name__}.")]
    return "\n".join(lines).rstrip() + "\n"


def _describe_all(module: ModuleType, names: list[str], prefix: str) -> Iterator[str]:
    for name in names:
        thing = getattr(module, name)
        if inspect.isclass(thing):
            yield from _describe_class(thing, prefix)
        elif callable(thing):
            yield _entry(f"{prefix}{name}{_signature(thing)}", _text(thing))
        else:
            yield _entry(f"{prefix}{name}", _CONSTANTS[name])


def _describe_class(thing: type, prefix: str) -> Iterator[str]:
    yield f"### {prefix}{thing.__name__}\n{_text(thing)}"
    if thing.__name__ in _MADE:
        yield _entry(f"{prefix}{thing.__name__}{_signature(vars(thing)['__init__']).removesuffix(' -> None')}", "")
    fields = _fields(thing)
    if fields:
        yield "Fields: " + ", ".join(f"`{name}: {kind}`" for name, kind in fields.items()) + "\n"
    for name, member in _members(thing):
        if name in fields or name in _INTERNAL or (inspect.isroutine(member) and not _text(member)):
            continue
        if isinstance(member, property):
            assert member.fget is not None
            yield _entry(f".{name} -> {member.fget.__annotations__.get('return', 'Any')}", _text(member))
        elif isinstance(member, classmethod | staticmethod):
            yield _entry(f"{prefix}{thing.__name__}.{name}{_signature(member.__func__)}", _text(member.__func__))
        elif inspect.isfunction(member):
            yield _entry(f".{name}{_signature(member)}", _text(member))
        elif isinstance(member, thing):
            yield _entry(f"{prefix}{thing.__name__}.{name}", "")


def _fields(thing: type) -> dict[str, Any]:
    """Of what is a record, its fields with their types."""
    if dataclasses.is_dataclass(thing):
        return {field.name: field.type for field in dataclasses.fields(thing) if not field.name.startswith("_")}
    names = getattr(thing, "_fields", ())
    return {name: thing.__annotations__[name].__forward_arg__ for name in names} if isinstance(names, tuple) else {}


def _members(thing: type) -> Iterator[tuple[str, Any]]:
    """Public ones, in the order of the code; those of a class of ours that it is made from behind its own."""
    seen = set()
    for owner in thing.__mro__:
        if owner.__module__.startswith("headwater"):
            for name, member in vars(owner).items():
                if not name.startswith("_") and name not in seen:
                    seen.add(name)
                    yield name, member


def _describe_error(error: type[Exception]) -> str:
    bases = ", ".join(base.__name__ for base in error.__bases__)
    return f"- **`hw.{error.__name__}`** ({bases}): {_text(error)}".rstrip()


def _entry(heading: str, text: str) -> str:
    return textwrap.indent(f"**`{heading}`**" + (f": {text}" if text else "\n"), "  ").replace("  ", "- ", 1)


def _text(thing: Any) -> str:
    """The docstring, each paragraph in one line. Not that of what it stands in for: each Python says that in other words."""
    paragraphs = inspect.cleandoc(thing.__doc__ or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs) + "\n" if paragraphs[0] else ""


def _signature(thing: Any) -> str:
    """As it is written: annotations are texts here, which Python would show in quotes."""
    found = inspect.signature(thing)
    shown, kind_before = [], None
    for name, value in found.parameters.items():
        if name in ("self", "cls"):
            continue
        if value.kind is value.KEYWORD_ONLY and kind_before not in (value.KEYWORD_ONLY, value.VAR_POSITIONAL):
            shown.append("*")
        stars = "*" if value.kind is value.VAR_POSITIONAL else "**" if value.kind is value.VAR_KEYWORD else ""
        default = "" if value.default is value.empty else " = ..." if callable(value.default) else f" = {value.default!r}"
        shown.append(f"{stars}{name}: {value.annotation}{default}")
        kind_before = value.kind
    return f"({', '.join(shown)}) -> {found.return_annotation}"


if __name__ == "__main__":
    PATH.write_text(make())
