"""`headwater completion`: what a shell loads to complete commands and options with the Tab key."""

from __future__ import annotations

import click
from click.shell_completion import BashComplete, FishComplete, ShellComplete, ZshComplete

_SHELLS: dict[str, type[ShellComplete]] = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}


@click.command("completion")
@click.argument("shell", type=click.Choice(list(_SHELLS)))
def completion_command(shell: str) -> None:
    """Print a script that completes commands and options: eval "$(headwater completion bash)" in ~/.bashrc.

    For zsh the same in ~/.zshrc; for fish: headwater completion fish > ~/.config/fish/completions/headwater.fish
    """
    root = click.get_current_context().find_root().command
    click.echo(_SHELLS[shell](root, {}, "headwater", "_HEADWATER_COMPLETE").source())
