"""The command line: `headwater`, with a command for everything people do by hand.

Exit codes: 0 all is well, 1 headwater says no (or `check` found damage), 2 the command line itself is wrong. With --json, what goes to
standard output is one JSON object per line, and an error is one on standard error.
"""

from __future__ import annotations

from headwater.cli.app import App

#: By purpose, in the order of the help: command, the module that has it, and what it does.
COMMANDS = {
    "demo": ("headwater.demo.command", "See it work: ingest files exactly once while the ingester is killed."),
    "create": ("headwater.cli.streams", "Make a stream, and its store if there is none."),
    "list": ("headwater.cli.describe", "List the streams of a store."),
    "describe": ("headwater.cli.describe", "Show what a store holds, or one stream of it."),
    "write": ("headwater.cli.write", "Store the lines of standard input as events."),
    "read": ("headwater.cli.read", "Print the events of a stream."),
    "tail": ("headwater.cli.read", "Print the last events of a stream; with -f also those to come."),
    "split": ("headwater.cli.streams", "Replace an open segment by equal parts of its keys."),
    "merge": ("headwater.cli.streams", "Replace neighbouring open segments by one."),
    "truncate": ("headwater.cli.streams", "Delete what lies before a place, for good."),
    "seal": ("headwater.cli.streams", "End a stream: it stays readable."),
    "delete": ("headwater.cli.streams", "Delete a sealed stream with all its data."),
    "roll-back": ("headwater.cli.rewind", "End a stream at a cut again, and keep what it was under another name."),
    "replace": ("headwater.cli.rewind", "Give the name of a stream to another one."),
    "keep": ("headwater.cli.rewind", "Keep everything of a stream from a place on."),
    "kept": ("headwater.cli.rewind", "List what is kept."),
    "unkeep": ("headwater.cli.rewind", "Forget a keep."),
    "release-claim": ("headwater.cli.rewind", "End the claim of a stream by hand."),
    "scaling": ("headwater.cli.scaling", "Show how a stream's segments followed its load, as a heat map."),
    "journal": ("headwater.cli.journal", "List, read and delete the entities of a journal and their events."),
    "groups": ("headwater.cli.coordinate", "Show reader groups, their lag, and who reads what."),
    "transactions": ("headwater.cli.coordinate", "Show transactions, open and ended."),
    "ingest": ("headwater.cli.ingest", "Store the rows of files in a stream, each once."),
    "pipeline": ("headwater.cli.pipeline", "Run the Spark pipelines of a Python file, with savepoints."),
    "upkeep": ("headwater.cli.maintain", "Do the store's housekeeping, once or until Ctrl-C."),
    "check": ("headwater.cli.maintain", "Verify every block and row of a store."),
    "operations": ("headwater.cli.operations", "List the operations on a catalog, and the right that each needs."),
    "completion": ("headwater.cli.completion", "Print a script for the shell that completes commands and options."),
    "bench": ("headwater.cli.bench", "Measure a store: acks, writing, reading, the tail and transactions."),
}

main = App(COMMANDS)
