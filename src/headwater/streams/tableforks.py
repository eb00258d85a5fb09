"""Forking tables: a view of the changes, and the entries as of a version, filled in slices under no lock for long.

An entry of the parent that was not changed since the version is copied. A key that was changed since then, even during the copy, gets its
last change before the version, which the view has. What the parent gets meanwhile is never waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress

from headwater.catalog import fills, tables
from headwater.catalog.segments import SegmentRow
from headwater.errors import HeadwaterError, InvalidRequestError, TruncatedError
from headwater.model.limits import FILL_BYTES, FILL_ROWS, FILL_SECONDS
from headwater.model.names import parse_stream_name
from headwater.segments.batches import Columns
from headwater.segments.engine import Engine
from headwater.segments.lanes import StreamRef
from headwater.streams import cuts, reading
from headwater.streams.lifecycle import naming


def fork(engine: Engine, table: StreamRef, new_name: str, version: int | None) -> StreamRef:
    """A new table with the entries of this one as of a version (None: now), and the changes before it."""
    name = parse_stream_name(new_name)
    row = reading.get_single_segment(engine, table)
    if version is not None:
        check_version(engine, table, row, version)
    with naming(table):
        made = engine.run(fills.begin_fill, table.id, name, version)
    fill = engine.stream_ref(made)
    try:
        _fill(engine, table, fill)
        return engine.stream_ref(engine.run(fills.end_fill, fill.id, name))
    except BaseException:
        # If the catalog is out of reach, upkeep drops it.
        with suppress(HeadwaterError):
            drop(engine, fill.id, expired=False)
        raise


def check_version(engine: Engine, table: StreamRef, row: SegmentRow, version: int) -> None:
    """Refuse a version that a table never had, or of which changes were truncated."""
    if version > row.tail:
        raise InvalidRequestError(f"{table.name} is at version {row.tail}; there is no version {version}")
    if version < row.head:
        raise TruncatedError(f"changes of {table.name} up to version {version} were truncated", cuts.head(engine, table))


def drop(engine: Engine, fill: int, *, expired: bool, may_go_on: Callable[[], bool] = lambda: True) -> None:
    """Delete a fill that does not become a table."""
    while may_go_on() and not engine.run(fills.drop_slice, fill, expired=expired):
        pass


def _fill(engine: Engine, table: StreamRef, fill: StreamRef) -> None:
    view = reading.get_single_segment(engine, fill)
    version = view.tail
    after: str | None = None
    while (last := engine.run(fills.find_slice, table.id, version, after)) is not None:
        engine.run(fills.copy_entries, fill.id, table.id, version, after, last)
        after = last
    # After the copy: NotFoundError if the table was deleted, so that its entries were not there to be copied.
    present = reading.get_single_segment(engine, table)
    entries = _Entries(engine, fill.id)
    changed = set()
    for _, key, _ in scan_changes(engine, table, present.number, version, present.tail):
        changed.add(key)
        entries.renew()
    if not changed:
        return
    found = set()
    for number, key, value in scan_changes(engine, fill, view.number, view.head, version):
        if key in changed:
            found.add(key)
            entries.add(key, number + 1, value)
        entries.renew()
    entries.flush()
    for key in sorted(changed - found) if view.head else ():
        entries.renew()
        if engine.run(tables.find_entry, fill.id, key) is None:
            message = f"the entry {key!r} of {table.name} as of version {version} is not known: changes up to version {view.head}"
            raise TruncatedError(f"{message} were truncated, and it was changed since then", cuts.head(engine, table))


class _Entries:
    """The entries of keys that were changed since the version, on their way to the fill."""

    def __init__(self, engine: Engine, fill: int) -> None:
        self._engine = engine
        self._fill = fill
        self._entries: dict[str, tuple[int, bytes | None]] = {}
        self._bytes = 0
        self._due = time.monotonic() + FILL_SECONDS / 4

    def add(self, key: str, version: int, value: bytes | None) -> None:
        self._entries[key] = version, value
        self._bytes += len(value or b"")
        if self._bytes > FILL_BYTES or len(self._entries) >= FILL_ROWS:
            self.flush()

    def renew(self) -> None:
        """Say in time that this fill is not abandoned."""
        if time.monotonic() >= self._due:
            self.flush()

    def flush(self) -> None:
        self._engine.run(fills.set_entries, self._fill, [(key, *entry) for key, entry in self._entries.items()])
        self._entries, self._bytes = {}, 0
        self._due = time.monotonic() + FILL_SECONDS / 4


def scan_changes(engine: Engine, table: StreamRef, segment: int, start: int, end: int) -> Iterator[tuple[int, str, bytes | None]]:
    """The number, key and value of the changes with these numbers; a value of None is a removal."""
    if start >= end:
        return
    cursor = engine.cursor(table, segment, start, end)
    columns = Columns(["key", "value"])
    while (batch := reading.next_batch(engine, table, cursor)) is not None:
        keys, values = (column.to_pylist() for column in batch.to_arrow(columns).columns)
        yield from zip(range(batch.first, batch.first + batch.count), keys, values, strict=True)
