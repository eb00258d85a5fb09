"""How answers look: JSON lines for machines, tables and bars for people."""

from __future__ import annotations

import base64
import json
import math
import sys
from datetime import UTC, date, datetime, timedelta
from datetime import time as time_of_day
from decimal import Decimal
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

import headwater as hw

_PIPE_WIDTH = 200
_BAR_CELLS = 32
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


class _Console(Console):
    """Leaves a pipe that was closed to the command, where it is no error; Rich would end the process with 1."""

    def on_broken_pipe(self) -> None:
        if not self.stderr:
            raise BrokenPipeError
        # Nobody reads how it goes on; what it does is still wanted.
        self.quiet = True


def console(stderr: bool = False) -> Console:
    """For people: plain and wide where there is no terminal, so that lines stay whole for grep."""
    file = sys.stderr if stderr else sys.stdout
    width = None if file.isatty() else _PIPE_WIDTH
    return _Console(stderr=stderr, file=file, highlight=False, markup=False, emoji=False, soft_wrap=True, width=width)


def table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """A table with these headings; those in `right` are numbers."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", no_wrap=column in right)
    return made


def emit(answer: dict[str, Any]) -> None:
    """One JSON object on a line of standard output."""
    sys.stdout.write(f"{dump(answer)}\n")


#: Compact JSON, by one encoder for all: making one costs as much as using it.
dump = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


def size(count: int | None) -> str:
    """Bytes, as people say them."""
    if count is None:
        return "not counted"
    value, unit = float(count), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{count:,} B" if unit == 0 else f"{value:,.1f} {_UNITS[unit]}"


def key_bar(start: float, end: float) -> str:
    """Which part of the key space a segment has."""
    first = min(math.floor(start * _BAR_CELLS), _BAR_CELLS - 1)
    last = max(math.ceil(end * _BAR_CELLS), first + 1)
    return "·" * first + "█" * (last - first) + "·" * (_BAR_CELLS - last)


def time_text(time: datetime) -> str:
    """A time in UTC, as --start takes it too."""
    return time.astimezone(UTC).isoformat().replace("+00:00", "Z")


def text_field(name: str, data: bytes | None) -> dict[str, str | None]:
    """Bytes as a JSON field: text if they are UTF-8, else base64 under another name."""
    if data is None:
        return {name: None}
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(data).decode()}


def event_json(event: hw.Event) -> dict[str, Any]:
    """An event as `read --json` prints it."""
    position = event.position
    value = text_field("value", event.value) if isinstance(event.value, bytes) else {"value": plain(event.value)}
    return {
        "segment": position.segment,
        "number": position.number,
        "time": time_text(event.time),
        **text_field("key", event.key),
        **value,
    }


def plain(value: Any) -> Any:
    """A value of a typed event in terms of JSON: times as ISO text, decimals as text, bytes as text or {"base64": ...}."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, bytes):
        found = text_field("text", value)
        return found["text"] if "text" in found else {"base64": found["text_base64"]}
    if isinstance(value, datetime):
        return time_text(value) if value.tzinfo is not None else value.isoformat()
    if isinstance(value, date | time_of_day):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    assert isinstance(value, Decimal) or hasattr(value, "__str__")
    return str(value)
