"""What all commands share: finding them without loading them all, opening the store, and ending with the right code.

Whatever goes wrong is one line on standard error, also an output that can't be written. A closed pipe is no error:
`headwater read x | head` ends with 0. An exception that is neither a HeadwaterError nor the system's is a mistake of ours: it shows where.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import click
from click.shell_completion import CompletionItem

import headwater as hw
from headwater.cli.interrupts import interrupts

OK, FAILED, MISUSED = 0, 1, 2


class App(click.Group):
    """The commands, each loaded when it is run."""

    def __init__(self, commands: Mapping[str, tuple[str, str]]) -> None:
        super().__init__(
            "headwater",
            help="A store for data streams. Give the store with --store, or set HEADWATER_STORE.",
            context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
        )
        self._table = commands
        click.version_option(package_name="headwater", message="%(prog)s %(version)s")(self)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._table)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete a command's name without loading any command."""
        names = [CompletionItem(name, help=text) for name, (_, text) in self._table.items() if name.startswith(incomplete)]
        return names + click.Command.shell_complete(self, ctx, incomplete)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in self._table:
            return None
        command = getattr(importlib.import_module(self._table[name][0]), f"{name.replace('-', '_')}_command")
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self._table.items()])

    def invoke(self, ctx: click.Context) -> Any:
        # Before click sees them: it would end with 1 for a closed pipe, and say "Aborted!" to a Ctrl-C.
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except BrokenPipeError:
            raise _PipeClosedError from None
        except KeyboardInterrupt:
            raise _InterruptedError from None

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, *rest: Any, **extra: Any) -> NoReturn:
        extra["standalone_mode"] = False
        _replace_closed_streams()
        as_json = "--json" in (sys.argv[1:] if args is None else args)
        if hasattr(sys.stdout, "reconfigure"):
            # A terminal that can't show a character shows another: no reason to fail.
            sys.stdout.reconfigure(errors="replace")
        try:
            with interrupts.handled(_error_line("interrupted", "Interrupted", as_json)):
                code = super().main(args, prog_name or "headwater", *rest, **extra)
            sys.exit(code if isinstance(code, int) else OK)
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            sys.exit(MISUSED)
        except click.UsageError as error:
            path = error.ctx.command_path if error.ctx is not None else "headwater"
            _fail(MISUSED, f"{error.format_message()} (see {path} --help)", "UsageError", as_json)
        except (click.Abort, _InterruptedError):
            _fail(FAILED, "interrupted", "Interrupted", as_json)
        except click.ClickException as error:
            _fail(FAILED, error.format_message(), "Error", as_json)
        except _PipeClosedError:
            _let_go_of_output()
            sys.exit(OK)
        except hw.HeadwaterError as error:
            _fail(FAILED, error.message, type(error).__name__, as_json)
        except OSError as error:
            # The library's own are HeadwaterErrors: without a file's name it was ours to read or to write.
            reason = error.strerror or str(error)
            what = "the input can't be read, or the output not written" if error.filename is None else error.filename
            _fail(FAILED, f"{what}: {reason}", type(error).__name__, as_json)


class _PipeClosedError(Exception):
    """Nobody reads our output any more."""


class _InterruptedError(Exception):
    """Ctrl-C, outside the commands that end with it by design."""


def _fail(code: int, message: str, kind: str, as_json: bool) -> NoReturn:
    _let_go_of_output()
    with suppress(OSError):
        click.echo(_error_line(message, kind, as_json), err=True)
    sys.exit(code)


def _let_go_of_output() -> None:
    """Write what is still buffered. What can't be written goes nowhere: Python would try again at exit, and complain."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _replace_closed_streams() -> None:
    """Give a process that was started with `>&-` something in place of what is closed.

    Files of the store would get the free numbers, and whatever is printed to them. Input and output fail when they are used, as they would.
    """
    if sys.stdin is None:
        sys.stdin = os.fdopen(os.open(os.devnull, os.O_WRONLY), "r", closefd=False)
    if sys.stdout is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", closefd=False)


def _error_line(message: str, kind: str, as_json: bool) -> str:
    line = " ".join(message.split())
    return json.dumps({"error": kind, "message": line}, ensure_ascii=False) if as_json else f"headwater: {line}"


class Target:
    """The store that a command is about, and how it is to answer."""

    def __init__(self, url: str | None, catalog: str | None, options: Sequence[str], json: bool) -> None:
        self.url = url
        self.catalog = catalog
        self.options = options
        self.json = json

    def open(self, *, create: bool = False, upkeep: bool = True) -> hw.Store:
        """Open it, once for the command: leaving the `with` block stores what was given."""
        if not self.url:
            raise click.UsageError("which store? Give --store PATH, or set HEADWATER_STORE", click.get_current_context())
        pairs = [option.partition("=") for option in self.options]
        for name, equals, _ in pairs:
            if not name or not equals:
                raise click.BadParameter(f"{name!r} is not of the form NAME=VALUE", param_hint="--storage-option")
        options = {name: value for name, _, value in pairs}
        return hw.open(self.url, catalog=self.catalog, create=create, upkeep=upkeep, storage_options=options or None)


def with_store(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options that name a store, as its first argument."""

    @click.option("--store", "-s", "url", envvar="HEADWATER_STORE", metavar="URL", help="A directory, or s3://bucket/prefix.")
    @click.option("--catalog", envvar="HEADWATER_CATALOG", metavar="URL", help="postgresql://..., unless it is SQLite in the directory.")
    @click.option("--storage-option", "options", multiple=True, metavar="NAME=VALUE", help="A setting of the object store.")
    @click.option("--json", "as_json", is_flag=True, help="Answer in JSON, one object per line.")
    @functools.wraps(function)
    def command(url: str | None, catalog: str | None, options: tuple[str, ...], as_json: bool, **arguments: Any) -> Any:
        return function(Target(url, catalog, options, as_json), **arguments)

    return command


def confirm(question: str, yes: bool) -> None:
    """Ask on a terminal, unless `yes`; a script is taken to mean what it says."""
    if not yes and sys.stdin.isatty() and not click.confirm(question, err=True):
        raise click.ClickException("nothing was changed")
