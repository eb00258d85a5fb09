"""The direction of imports: a module may import those of its own row in LAYERS and of the rows above, and edges the public API only.

No modules import each other in a cycle.

A new module of the package is one more name in one of the two tables.
"""

from __future__ import annotations

import ast
from collections.abc import Container, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "headwater"

#: Lowest first. The name is that of a file or folder in src/headwater.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "model", "runtime"),
    ("catalog", "storage"),
    ("segments",),
    ("streams",),
    (
        "datasets",
        "exports",
        "frames",
        "lanewriter",
        "writer",
        "contents",
        "gathering",
        "committing",
        "transactions",
        "readers",
        "batch",
        "bytestream",
        "synchronizer",
        "tables",
        "journals",
    ),
    ("stream",),
    ("store",),
    ("check",),
)

#: Modules of one row that still don't know each other.
STRANGERS: tuple[frozenset[str], ...] = (frozenset({"catalog", "storage"}),)

#: Above all rows: they use what `import headwater` gives, themselves, and the public modules named here.
EDGES: dict[str, tuple[str, ...]] = {
    "journal": (),
    "ingest": ("errors", "model"),
    "spark": (),
    "pipelines": ("spark",),
    "server": (),
    "cli": ("errors", "model", "check", "journal", "ingest", "spark", "pipelines", "server"),
    "upkeepchild": (),
    "demo": ("model", "check", "spark", "pipelines", "cli"),
    "__main__": ("cli",),
}

#: `headwater/__init__.py`, and so any `from headwater import Store`.
FRONT = "headwater"

ROW_OF: dict[str, int] = {name: row for row, names in enumerate(LAYERS) for name in names}


def find_violations(source: str, path: Path) -> list[str]:
    """What is wrong with the imports of one file, as sentences; `path` is relative to src/headwater."""
    importer = FRONT if path == Path("__init__.py") else path.parts[0].removesuffix(".py")
    if importer != FRONT and importer not in ROW_OF and importer not in EDGES:
        return [f"{path}: {importer!r} has no layer: add it to LAYERS or EDGES in tests/unit/test_imports.py"]
    violations = []
    for line, imported in _find_imports(ast.parse(source), path):
        if reason := _why_not(importer, imported):
            violations.append(f"{path}:{line}: {importer} may not import {imported}: {reason}")
    return violations


def _why_not(importer: str, imported: str) -> str | None:
    if importer == imported:
        return None
    if imported != FRONT and imported not in ROW_OF and imported not in EDGES:
        return "it has no layer"
    if importer in EDGES:
        return None if imported == FRONT or imported in EDGES[importer] else "an edge uses the public API only"
    if imported in EDGES:
        return "edges are above everything"
    if importer == FRONT:
        return None
    if imported == FRONT:
        return "the front door is above; import from the module that defines the name"
    if ROW_OF[imported] > ROW_OF[importer]:
        return "it is in a higher layer"
    if frozenset({importer, imported}) in STRANGERS:
        return "the two don't know each other"
    return None


def find_cycle(sources: Mapping[Path, str]) -> list[str]:
    """The names of modules that import each other in a cycle, the first one again at the end; empty if there is no cycle."""
    modules = {".".join((FRONT, *path.with_suffix("").parts)).removesuffix(".__init__"): path for path in sources}
    imports = {name: set(_find_modules(sources[path], path, modules)) for name, path in modules.items()}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def _find_modules(source: str, path: Path, modules: Container[str]) -> Iterator[str]:
    """Those of `modules` that a file imports, by their dotted names."""
    for _, parts, names in _find_statements(ast.parse(source), path):
        module = ".".join(parts)
        for found in [f"{module}.{name}" if f"{module}.{name}" in modules else module for name in names] or [module]:
            if found in modules:
                yield found


def _find_imports(tree: ast.AST, path: Path) -> Iterator[tuple[int, str]]:
    """Each import of this package, as the name of a layer or an edge."""
    for line, module, names in _find_statements(tree, path):
        if module == [FRONT] and names:
            for name in names:
                yield line, name if name in ROW_OF or name in EDGES else FRONT
        elif module[:1] == [FRONT]:
            yield line, module[1] if len(module) > 1 else FRONT


def _find_statements(tree: ast.AST, path: Path) -> Iterator[tuple[int, list[str], list[str]]]:
    """(line, module, names) of every import, wherever it stands, except imports for the type checker only."""
    if isinstance(tree, ast.If) and ast.unparse(tree.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
        for statement in tree.orelse:
            yield from _find_statements(statement, path)
        return
    if isinstance(tree, ast.Import):
        for alias in tree.names:
            yield tree.lineno, alias.name.split("."), []
    elif isinstance(tree, ast.ImportFrom):
        parts = (tree.module or "").split(".")
        if tree.level:
            folder = (FRONT, *path.parts[:-1])
            parts = [*folder[: len(folder) - tree.level + 1], *parts]
        yield tree.lineno, [part for part in parts if part], [alias.name for alias in tree.names]
    for node in ast.iter_child_nodes(tree):
        yield from _find_statements(node, path)


def test_imports_point_to_lower_layers_only() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    assert files
    violations = [violation for file in files for violation in find_violations(file.read_text(encoding="utf-8"), file.relative_to(PACKAGE))]
    assert not violations, "\n".join(["imports in the wrong direction:", *violations])


def test_no_modules_import_each_other() -> None:
    cycle = find_cycle({file.relative_to(PACKAGE): file.read_text(encoding="utf-8") for file in PACKAGE.rglob("*.py")})
    assert not cycle, " imports ".join(reversed(cycle))


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("catalog/streams.py", "from headwater.storage.layout import object_key"),
        ("catalog/streams.py", "import headwater.storage"),
        ("catalog/streams.py", "from headwater import storage"),
        ("catalog/streams.py", "from ..storage import layout"),
        ("catalog/streams.py", "from .. import storage"),
        ("storage/local.py", "from headwater.catalog import database"),
        ("model/ranges.py", "def late():\n    from headwater.store import Store"),
        ("segments/read.py", "from headwater.streams.scaling import split"),
        ("writer.py", "import headwater"),
        ("writer.py", "from headwater import Store"),
        ("store.py", "from headwater.spark import register"),
        ("__init__.py", "from headwater.cli import main"),
        ("ingest/files.py", "from headwater.store import Store"),
        ("spark/source.py", "from headwater.ingest import Ingester"),
        ("cli/demo.py", "from headwater.catalog import database"),
        ("cli/demo.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    pass\nelse:\n    import headwater.store"),
        ("store.py", "from headwater.helpers import shorten"),
        ("helpers.py", ""),
    ],
)
def test_an_import_in_the_wrong_direction_is_found(path: str, source: str) -> None:
    assert len(find_violations(source, Path(path))) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("catalog/streams.py", "from headwater.model.names import StreamName\nfrom . import database\nfrom ..errors import NotFoundError"),
        ("catalog/streams.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from headwater.store import Store"),
        ("readers/group.py", "from headwater.batch import SegmentRange"),
        ("store.py", "from headwater.writer import Writer\nimport headwater.catalog.streams"),
        ("__init__.py", "from headwater.store import Store, open\nfrom . import errors"),
        ("cli/demo.py", "import headwater as hw\nfrom headwater import Store\nfrom headwater.errors import HeadwaterError"),
        ("ingest/files.py", "import headwater\nfrom headwater.ingest.offsets import Offset\nimport headwaters.store"),
    ],
)
def test_an_import_in_the_right_direction_is_fine(path: str, source: str) -> None:
    assert find_violations(source, Path(path)) == []


def test_a_violation_says_where_and_why() -> None:
    violation = find_violations("import os\nfrom headwater.storage import layout\n", Path("catalog/extents.py"))
    assert violation == ["catalog/extents.py:2: catalog may not import storage: the two don't know each other"]


@pytest.mark.parametrize(
    "back",
    [
        "from headwater.catalog import tags",
        "from headwater.catalog.tags import find_tags_of",
        "import headwater.catalog.tags",
        "from . import tags",
        "from .tags import find_tags_of",
        "def late():\n    from headwater.catalog import tags",
    ],
)
def test_a_cycle_of_modules_is_found(back: str) -> None:
    files = {"tags": "from headwater.catalog import segments", "segments": "from .streams import StreamRow", "streams": back}
    sources = {Path(f"catalog/{name}.py"): source for name, source in files.items()}
    assert set(find_cycle(sources)) == {"headwater.catalog.tags", "headwater.catalog.segments", "headwater.catalog.streams"}
    assert find_cycle({**sources, Path("catalog/streams.py"): "from headwater.catalog import database"}) == []


def test_a_cycle_for_the_type_checker_only_is_fine() -> None:
    late = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from headwater.catalog import tags"
    assert find_cycle({Path("catalog/tags.py"): "from . import streams", Path("catalog/streams.py"): late}) == []
