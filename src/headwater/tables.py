"""Tables: keys with values and versions, and the stream of all changes, which is the table's other side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple, TypeVar

import pyarrow as pa

from headwater.catalog import tables
from headwater.catalog.segments import SegmentRow
from headwater.catalog.tables import ABSENT, EntryChange
from headwater.errors import InvalidRequestError, TruncatedError
from headwater.exports import ExportedWhole
from headwater.model.arguments import MOST, check_flag, check_whole, shown
from headwater.model.limits import ROLLED_BACK_BYTES, TABLE_KEY_BYTES, TABLE_VALUE_BYTES
from headwater.segments.batches import Columns
from headwater.segments.block import Chunk
from headwater.segments.engine import Engine
from headwater.segments.flush import Flusher
from headwater.segments.lanes import EVENT_OVERHEAD_BYTES, Few, StreamRef
from headwater.streams import cuts, reading, tableforks

#: The schema of a table's changes; a null value is a removal. A change's version is its number plus one.
TABLE_SCHEMA = pa.schema([pa.field("key", pa.string(), nullable=False), pa.field("value", pa.binary())])
#: The columns of a table's present entries.
ENTRY_SCHEMA = pa.schema([*(field.with_nullable(False) for field in TABLE_SCHEMA), pa.field("version", pa.int64(), nullable=False)])
_PAGE = 500
T = TypeVar("T")


class Entry(NamedTuple):
    """A key's value, and the version that set it. A version is never used again, also not after a removal."""

    value: bytes
    version: int


class TableChange(NamedTuple):
    """A change of a table: `value` is None where the key was removed."""

    key: str
    value: bytes | None
    version: int


class Table(ExportedWhole):
    """Keys and values with versions. Every change is durable on return, and an event of the table's own stream."""

    def __init__(self, engine: Engine, flusher: Flusher, ref: StreamRef, roll_back: Callable[[str, int], None]) -> None:
        self._engine = engine
        self._flusher = flusher
        self._ref = ref
        self._roll_back = roll_back

    def __repr__(self) -> str:
        return f"<Table {self._ref.name}>"

    def __len__(self) -> int:
        self._flusher.settle(self._ref.id)
        return self._engine.run(tables.count_entries, self._ref.id) or self._nothing(0)

    @property
    def name(self) -> str:
        return self._ref.name

    def put(self, key: str, value: bytes, version: int | None = None) -> int:
        """Set a key; returns the new version.

        With `version`, ConditionFailedError unless the key has that one (`hw.ABSENT`: is missing).
        """
        check_entry(key, value, version)
        return self._change(key, value, version)

    def remove(self, key: str, version: int | None = None) -> int:
        """Remove a key, whether or not it is there; returns the change's version. With `version`, only if the key has that one."""
        check_key(key, version)
        return self._change(key, None, version)

    def _change(self, key: str, value: bytes | None, version: int | None) -> int:
        change = Few([{"key": key, "value": value}], [key.encode()])
        size = len(key) + len(value or b"") + EVENT_OVERHEAD_BYTES
        placement = self._flusher.append(self._ref, change, size, (EntryChange(self._ref.id, key, value, version),))
        return placement.firsts[0] + 1

    def get(self, key: str) -> Entry | None:
        """The key's entry, None if it has none."""
        check_key(key)
        self._flusher.settle(self._ref.id)
        found = self._engine.run(tables.find_entry, self._ref.id, key)
        return Entry(found[1], found[0]) if found is not None else self._nothing(None)

    def _nothing(self, answer: T) -> T:
        """The answer of a table without such entries. NotFoundError if there is no such table any more."""
        reading.get_single_segment(self._engine, self._ref)
        return answer

    def items(self, prefix: str = "") -> Iterator[tuple[str, Entry]]:
        """The entries whose key begins with `prefix`, in the order of the keys' bytes. Each page is a look of its own."""
        if not isinstance(prefix, str) or prefix:
            check_key(prefix)
        return self._items(prefix)

    def _items(self, prefix: str) -> Iterator[tuple[str, Entry]]:
        self._flusher.settle(self._ref.id)
        after: str | None = None
        while rows := self._engine.run(tables.list_entries, self._ref.id, prefix, after, _PAGE):
            for key, version, value in rows:
                yield key, Entry(value, version)
            after = rows[-1][0]
        if after is None:
            self._nothing(None)

    def roll_back(self, version: int) -> None:
        """Make the entries what they were at a version, as one commit of new changes; 0 is before the first change.

        The history stays, and versions grow as ever. ConflictError if the table changes all the time; InvalidRequestError if the changes
        have more than 64 MiB: `fork` and `store.replace_stream` have no such limit.
        """
        self._roll_back(self.name, check_whole(version, "a table's version", most=MOST))

    def fork(self, name: str, version: int | None = None) -> Table:
        """Make a table of its own with the entries as of a version (None: now) and all changes up to it; returns the new table.

        The changes are shared, the entries are copied. The name is not taken before the table is whole. A sealed table can be forked, too.
        """
        if version is not None:
            check_whole(version, "a table's version", most=MOST)
        self._flusher.settle(self._ref.id)
        return Table(self._engine, self._flusher, tableforks.fork(self._engine, self._ref, name, version), self._roll_back)

    def _read_batches(self) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        return ENTRY_SCHEMA, self._entry_batches()

    def _entry_batches(self) -> Iterator[pa.RecordBatch]:
        """The present entries, a page at a time."""
        entries = self._items("")
        while page := list(islice(entries, _PAGE)):
            rows = [(key, entry.value, entry.version) for key, entry in page]
            columns = [pa.array(column, field.type) for column, field in zip(zip(*rows, strict=True), ENTRY_SCHEMA, strict=True)]
            yield pa.RecordBatch.from_arrays(columns, schema=ENTRY_SCHEMA)

    def changes(self, after: int | None = None, *, follow: bool = False) -> Iterator[TableChange]:
        """Every change in order, from the first one or from behind version `after`, to now; with `follow`, for ever.

        TruncatedError if changes behind `after` were truncated.
        """
        if after is not None:
            check_whole(after, "the version in `after`", most=MOST)
        return self._changes(after, check_flag(follow, "follow"))

    def _changes(self, after: int | None, follow: bool) -> Iterator[TableChange]:
        row = reading.get_single_segment(self._engine, self._ref)
        start = row.head if after is None else after
        self._check_kept(row, start)
        if start > row.tail:
            raise InvalidRequestError(f"{self.name} is at version {row.tail}; there is no version {start}")
        cursor = self._engine.cursor(self._ref, row.number, start, None if follow else row.tail)
        columns = Columns(["key", "value"])
        while True:
            seen = self._engine.changes.version()
            batch = reading.next_batch(self._engine, self._ref, cursor)
            if batch is not None:
                for index, change in enumerate(batch.to_arrow(columns).to_pylist()):
                    yield TableChange(change["key"], change["value"], batch.first + index + 1)
            elif not follow:
                return
            else:
                reading.look(self._engine, self._ref, cursor)
                self._engine.wait_for_more([cursor], seen, 1.0)

    def _check_kept(self, row: SegmentRow, start: int) -> None:
        if start < row.head:
            raise TruncatedError(f"changes of {self.name} behind version {start} were truncated", cuts.head(self._engine, self._ref))


def find_changes_back(engine: Engine, ref: StreamRef, version: int) -> tuple[int, list[tuple[str, bytes | None]]]:
    """(the table's version now, changes that make its entries what they were at an earlier one). A value of None is a removal."""
    row = reading.get_single_segment(engine, ref)
    tableforks.check_version(engine, ref, row, version)
    if row.head and version == row.head:
        raise TruncatedError(f"changes of {ref.name} up to version {version} were truncated", cuts.head(engine, ref))
    present = {key: value for _, key, value in tableforks.scan_changes(engine, ref, row.number, version, row.tail)}
    before: dict[str, bytes | None] = dict.fromkeys(present)
    size, found = 0, set()
    if present:
        for _, key, value in tableforks.scan_changes(engine, ref, row.number, row.head, version):
            if key in before:
                found.add(key)
                size += len(value or b"") - len(before[key] or b"")
                before[key] = value
    if row.head and found != present.keys():
        message = f"changes of {ref.name} up to version {row.head} were truncated, and with them perhaps the value of"
        raise TruncatedError(f"{message} {min(present.keys() - found)!r} as of version {version}", cuts.head(engine, ref))
    if size + sum(map(len, before)) > ROLLED_BACK_BYTES:
        raise InvalidRequestError(
            f"rolling {ref.name} back to version {version} takes more than {ROLLED_BACK_BYTES:,} bytes of changes: "
            "table.fork(name, version) and store.replace_stream have no such limit"
        )
    return row.tail, [(key, value) for key, value in sorted(before.items()) if value != present[key]]


def changes_chunk(keys: Sequence[str], values: Sequence[bytes | None]) -> Chunk:
    """Changes of a table as events of its stream, with the entries' keys as routing keys; a value of None is a removal."""
    columns = [pa.array(keys, pa.string()), pa.array(values, pa.binary())]
    return Chunk(pa.RecordBatch.from_arrays(columns, schema=TABLE_SCHEMA), columns[0].view(pa.binary()), None)


def check_entry(key: str, value: bytes, version: int | None) -> None:
    """Refuse what no table can hold."""
    check_key(key, version)
    if not isinstance(value, bytes):
        raise InvalidRequestError(f"a table's value is bytes, not {type(value).__name__}")
    if len(value) > TABLE_VALUE_BYTES:
        raise InvalidRequestError(f"this value has {len(value):,} bytes; a table's value may have {TABLE_VALUE_BYTES:,}")


def check_key(key: str, version: int | None = None) -> None:
    """Refuse a key that no table can have, or a version."""
    if not isinstance(key, str) or not key:
        raise InvalidRequestError(f"a table's key is a str that is not empty, not {shown(key)}")
    try:
        size = len(key.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"this key can't be stored as UTF-8: {error}") from error
    if size > TABLE_KEY_BYTES or "\0" in key:
        raise InvalidRequestError(f"a table's key has up to {TABLE_KEY_BYTES:,} bytes and no NUL; this one has {size:,} bytes")
    if version is not None and (isinstance(version, bool) or not isinstance(version, int) or not ABSENT <= version < 1 << 62):
        raise InvalidRequestError(f"a version is what put or get returned, or hw.ABSENT, not {shown(version)}")
