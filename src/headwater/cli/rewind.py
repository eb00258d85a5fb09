"""Commands for second thoughts: ending a claim by hand."""

from __future__ import annotations

import click

from headwater.cli.app import Target, confirm, with_store
from headwater.cli.output import console, emit


@click.command("release-claim")
@click.argument("name")
@click.option("--force", is_flag=True, help="Also while what the claim requires still holds. Don't ask.")
@with_store
def release_claim_command(target: Target, name: str, force: bool) -> None:
    """End the claim of a stream, so that everybody may append to it again.

    Without --force this asks first, and then ends even a claim whose owner still lives.
    """
    with target.open() as store:
        stream = store.stream(name)
        owner = stream.claimed_by
        if owner is not None:
            confirm(f"{name} is claimed by {owner}. End the claim? Its owner can't append any more, and others can.", force)
            stream.release_claim(force=True)
        if target.json:
            emit({"name": name, "released": owner})
        else:
            console().print(f"{name} is no longer claimed by {owner}" if owner is not None else f"nobody claims {name}")
