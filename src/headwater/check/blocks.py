"""One segment's blocks: numbers without a gap from head to tail, each block's bytes as they were written, its events as many as said."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import google_crc32c
import pyarrow as pa

from headwater.catalog import extents, segments, tags
from headwater.catalog.extents import PARQUET, Extent
from headwater.catalog.segments import SegmentRow
from headwater.check.report import CheckReport, Problem
from headwater.errors import CorruptDataError, UnavailableError
from headwater.model.limits import MIB
from headwater.segments.block import decode, verify
from headwater.segments.engine import Engine
from headwater.segments.lanes import StreamRef
from headwater.storage import Storage, layout

_INLINE = "the catalog (inline block)"
_SLICE_EXTENTS = 128
_FETCH_BYTES = 8 * MIB
_SHOWN_RANGES = 4


class SeenObjects:
    """The objects that blocks were found in, over all segments: what the catalog calls them, and whether storage has them."""

    def __init__(self, storage: Storage) -> None:
        self.named: set[int] = set()
        self._storage = storage
        self._found: dict[str, bool] = {}

    def has(self, key: str) -> bool:
        if key not in self._found:
            self._found[key] = self._storage.size(key) is not None
        return self._found[key]


class _Lost(NamedTuple):
    """Blocks that can't be read for one reason, by the numbers they hold."""

    kind: str
    object: str
    message: str
    ranges: list[tuple[int, int]]


class SegmentCheck:
    """Checks one segment, slice by slice; each step of `run` is a slice done."""

    def __init__(self, engine: Engine, stream: StreamRef, row: SegmentRow, report: CheckReport, objects: SeenObjects) -> None:
        self._engine = engine
        self._stream = stream
        self._row = row
        self._report = report
        self._objects = objects
        self._lost: dict[tuple[str, str, int | None], _Lost] = {}
        self._log = row.log
        self._has_gap = False

    def run(self) -> Iterator[None]:
        for start, end in self._needed(self._row):
            at = start
            for log, first, until in self._engine.read(segments.list_pieces, self._row):
                first, until = min(first, end), min(until, end)
                if at < first:
                    self._add_gap(at, first)
                elif start < first < at:
                    self._add("overlap", f"{self._unit} {first}-{at - 1} are in two logs")
                yield from self._check_piece(log, max(at, first), until)
                at = max(at, until)
        self._check_counters()
        if self._stream.kind == "events" and not self._row.dropped:
            self._report.events += self._row.tail - self._row.head
        for lost in self._lost.values():
            message = f"{self._where}, {self._unit} {_shown(lost.ranges)}: {lost.message}"
            self._report.add(Problem(lost.kind, message, self._stream.name, self._row.number, lost.object))

    def _needed(self, row: SegmentRow) -> list[tuple[int, int]]:
        """The numbers of the segment that must be readable: from head to tail, and what tags keep."""
        pins = self._engine.read(tags.get_pins, self._stream.id).get(row.number, [])
        ranges = sorted([*pins, *([] if row.dropped else [(row.head, row.tail)])])
        joined: list[tuple[int, int]] = []
        for start, end in ranges:
            if joined and start <= joined[-1][1]:
                joined[-1] = (joined[-1][0], max(joined[-1][1], end))
            elif start < end:
                joined.append((start, end))
        return joined

    def _check_piece(self, log: int, start: int, end: int) -> Iterator[None]:
        """Numbers [start, end) of the segment, all of which are in one log: its own, or for a fork its parent's."""
        at, appended_at = start, 0
        before: Extent | None = None
        while at < end:
            found = extents.plan(self._engine.database, log, at, end, _SLICE_EXTENTS)
            if not found:
                self._add_gap(at, end, log)
                return
            if before is not None and found[0].first < at and self._is_replaced(log, before):
                appended_at, at = 0, found[0].first  # Upkeep made one chunk of what was checked before and what comes now.
            for extent in found:
                if extent.first > at:
                    self._add_gap(at, extent.first, log)
                elif extent.first < at != start:
                    self._add("overlap", f"{self._unit} {extent.first}-{at - 1} are in two blocks")
                if extent.appended_at < appended_at:
                    self._add("counter", f"the block at event {extent.first} was appended before the one in front of it, says the catalog")
                appended_at = max(appended_at, extent.last_at or extent.appended_at)
                at = max(at, extent.end)
            if at > end == self._row.tail and log == self._row.log and self._find_row() == self._row:
                self._add("overlap", f"its tail is {end}, but its last block goes on to {at}")
            self._check_extents(log, found)
            before = found[-1]
            yield

    def _is_replaced(self, log: int, extent: Extent) -> bool:
        """Whether the catalog has another extent by now where this one was."""
        now = extents.plan(self._engine.database, log, extent.first, extent.first + 1, 1)
        return not now or (now[0].first, now[0].count) != (extent.first, extent.count)

    @property
    def _unit(self) -> str:
        return "events" if self._stream.kind == "events" else "bytes"

    @property
    def _where(self) -> str:
        return f"{self._stream.name} segment {self._row.number}"

    def _add(self, kind: str, message: str) -> None:
        self._report.add(Problem(kind, f"{self._where}: {message}", self._stream.name, self._row.number))

    def _add_gap(self, start: int, end: int, log: int | None = None) -> None:
        """Note numbers that no block of a log holds, or, without one, that are in no log, unless they are truncated by now."""
        row = self._find_row()
        if row is None or not any(first <= start < until for first, until in self._needed(row)):
            return
        if log is None:
            # A fork's rows of other logs go only with its segment, which is there.
            self._add("gap", f"no log holds {self._unit} {start}-{end - 1}, which are from the stream it was forked from")
            return
        again = extents.plan(self._engine.database, log, start, end, 1)
        if not again or again[0].first > start:
            self._has_gap = True
            self._add("gap", f"no block holds {self._unit} {start}-{end - 1}")

    def _check_extents(self, log: int, found: Sequence[Extent]) -> None:
        self._log = log
        group: list[Extent] = []
        size = 0
        for extent in found:
            self._report.blocks += 1
            self._report.bytes += extent.length
            if extent.object is None:
                self._check_inline(extent)
                continue
            self._objects.named.add(extent.object)
            if extent.key is None:
                key = _key_of(extent.object, self._engine.storage.local)
                self._add_lost(extent, "dangling", key, f"the catalog has no row for the object {key} that it names")
                continue
            if extent.form == PARQUET:
                self._check_chunk(extent, extent.key)
                continue
            if group and (extent.key != group[0].key or size + extent.length > _FETCH_BYTES):
                self._check_group(group)
                group, size = [], 0
            group.append(extent)
            size += extent.length
        if group:
            self._check_group(group)

    def _check_inline(self, extent: Extent) -> None:
        if extent.data is None:
            self._add_lost(extent, "missing", _INLINE, "the catalog has no bytes for a block that it names")
        else:
            self._check_block(extent, pa.py_buffer(extent.data), _INLINE)

    def _check_group(self, group: Sequence[Extent]) -> None:
        key = group[0].key
        assert key is not None
        if ("missing", key, None) in self._lost:
            for extent in group:
                self._add_lost(extent, "missing", key, "")
            return
        try:
            # Asked for apart from reading: a file that was deleted can still be read by whoever has it open.
            if not self._objects.has(key):
                raise CorruptDataError(f"{key} is missing", object=key, missing=True)
            buffers = self._engine.storage.get_ranges(key, [(extent.position, extent.length) for extent in group])
        except CorruptDataError as error:
            if len(group) > 1 and not error.facts.get("missing"):
                for extent in group:
                    self._check_group([extent])
                return
            kind, message = ("missing", f"{key} is missing") if error.facts.get("missing") else ("damaged", error.message)
            for extent in group:
                self._add_lost(extent, kind, key, message)
            return
        except UnavailableError as error:
            for extent in group:
                self._add_lost(extent, "unreadable", key, error.message)
            return
        for extent, data in zip(group, buffers, strict=True):
            self._check_block(extent, pa.py_buffer(data), key)

    def _check_chunk(self, extent: Extent, key: str) -> None:
        """Read all of a Parquet chunk: its footer's checksum, every page's, the numbers and as many events as the catalog says."""
        try:
            if not self._objects.has(key):
                raise CorruptDataError(f"{key} is missing", object=key, missing=True)
            file = self._engine.chunks.open(extent)
            for group in file.row_groups(extent.first, extent.end):
                chunk, _ = file.read(self._engine.storage, group.places, None)
                chunk.columns.validate(full=True)
                file.check_numbers(self._engine.storage, group.places)
        except CorruptDataError as error:
            kind = "missing" if error.facts.get("missing") else "damaged"
            self._add_lost(extent, kind, key, error.message)
        except UnavailableError as error:
            self._add_lost(extent, "unreadable", key, error.message)
        except pa.ArrowException as error:
            self._add_lost(extent, "damaged", key, f"{key} can't be decoded: {error}")

    def _check_block(self, extent: Extent, data: pa.Buffer, name: str) -> None:
        try:
            if data.size != extent.length:
                raise CorruptDataError(f"a block in {name} has {data.size} bytes instead of {extent.length}", object=name)
            if self._stream.kind == "bytes":
                count = data.size
                if google_crc32c.value(data) != extent.crc:
                    raise CorruptDataError(f"a block in {name} is damaged: its checksum does not match the catalog's", object=name)
            else:
                verify(data, extent.crc, name)
                count = self._count(data, name)
            if count != extent.count:
                raise CorruptDataError(f"a block in {name} has {count} events, the catalog says {extent.count}", object=name)
        except CorruptDataError as error:
            self._add_lost(extent, "damaged", name, error.message)

    def _count(self, data: pa.Buffer, name: str) -> int:
        """The events of a verified block, all of which are looked at."""
        try:
            block = decode(data, lambda version: self._engine.schema(self._stream.id, version), name)
            block.chunk.columns.validate(full=True)
        except CorruptDataError:
            raise
        except Exception as error:  # Bytes with the right checksum that are no block: whatever pyarrow makes of them.
            raise CorruptDataError(f"a block in {name} can't be decoded: {error}", object=name) from error
        return block.chunk.count

    def _check_counters(self) -> None:
        """What the segment's row says of its own log, in one look."""
        rows = self._engine.database.query(
            "SELECT s.bytes, (SELECT COALESCE(sum(COALESCE(e.raw, e.length)), 0) FROM extent e WHERE e.log = s.log), "
            "(SELECT min(e.first) FROM extent e WHERE e.log = s.log AND e.first >= s.tail) FROM segment s WHERE s.log = ?",
            (self._row.log,),
        )
        for stated, stored, beyond in rows:
            if beyond is not None:
                self._add("overlap", f"there is a block at event {beyond}, behind its tail")
            if stated != stored and not self._has_gap:
                self._add("counter", f"its blocks have {stored:,} bytes, its row says {stated:,}")

    def _add_lost(self, extent: Extent, kind: str, object: str, message: str) -> None:
        """Note a block that can't be read, unless it went by right meanwhile. Blocks lost with one object make one problem."""
        alone = kind == "damaged" or object == _INLINE
        place = (kind, object, extent.first if alone else None)
        lost = self._lost.get(place)
        if lost is None:
            if not self._still_names(extent):
                return
            lost = self._lost[place] = _Lost(kind, object, message, [])
        if lost.ranges and lost.ranges[-1][1] == extent.first:
            lost.ranges[-1] = (lost.ranges[-1][0], extent.end)
        else:
            lost.ranges.append((extent.first, extent.end))

    def _find_row(self) -> SegmentRow | None:
        return self._engine.read(segments.find_segment, self._stream.id, self._row.number)

    def _still_names(self, extent: Extent) -> bool:
        """Whether the catalog still says that these bytes hold events: rows go before bytes do, and a stream's schemas with its segments."""
        if self._find_row() is None:
            return False
        again = extents.plan(self._engine.database, self._log, extent.first, extent.end, 1)
        return [(found.first, found.object) for found in again] == [(extent.first, extent.object)]


def _key_of(object: int, local: bool) -> str:
    if object < 0:
        return f"{layout.TRANSACTION_PREFIX}... (staged object {-object})"
    session, index = layout.parse_object_id(object)
    return layout.journal_key(session, index) if local else layout.object_key(session, index)


def _shown(ranges: Sequence[tuple[int, int]]) -> str:
    shown = ", ".join(f"{start}-{end - 1}" for start, end in ranges[:_SHOWN_RANGES])
    return f"{shown} and {len(ranges) - _SHOWN_RANGES} more ranges" if len(ranges) > _SHOWN_RANGES else shown
