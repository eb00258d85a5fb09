"""The command that lists what a catalog can be asked for."""

from __future__ import annotations

import click

from headwater import check
from headwater.cli.output import console, emit, table


@click.command("operations")
@click.option("--json", "as_json", is_flag=True, help="Answer in JSON, one object per line.")
def operations_command(as_json: bool) -> None:
    """List the operations on a catalog: how each runs, whether it may be repeated, and the right that it needs."""
    found = check.list_operations()
    if as_json:
        for each in found:
            emit({"name": each.name, "runs_as": each.runs_as, "repeatable": each.is_repeatable, "right": each.right})
        return
    shown = table("operation", "runs as", "repeatable", "right")
    for each in found:
        shown.add_row(each.name, each.runs_as, "yes" if each.is_repeatable else "", each.right or "")
    console().print(shown)
