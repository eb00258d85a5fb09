"""The table of operations in docs/architecture.md: `python -m tests.docs.operations` prints it, with `--write` puts it there."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from pathlib import Path

import headwater
from headwater.check import list_operations

PATH = Path(__file__).parents[2] / "docs" / "architecture.md"
_BEGIN, _END = "<!-- operations -->\n", "<!-- end of operations -->\n"


def import_all() -> None:
    """Import every module of the package, so that all operations are declared."""
    for module in pkgutil.walk_packages(headwater.__path__, "headwater."):
        if not module.name.endswith(".__main__"):
            importlib.import_module(module.name)


def make_table() -> str:
    """The operations of the package as a table in Markdown."""
    import_all()
    rows = [("Operation", "Runs as", "Repeatable", "Right"), ("---", "---", "---", "---")]
    rows += [(f"`{each.name}`", each.runs_as, "yes" if each.is_repeatable else "", each.right or "") for each in list_operations()]
    return "".join(f"| {' | '.join(row)} |\n".replace("  ", " ") for row in rows)


def make_page(text: str) -> str:
    """The page with the present table between its markers."""
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}{make_table()}{_END}{after}"


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        PATH.write_text(make_page(PATH.read_text()))
    else:
        print(make_table(), end="")
